"""Experts with low-rank updates."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ligerzoo.kernels.dispatch import accumulation_dtype
from ligerzoo.kernels.lora import LowRank
from ligerzoo.kernels.lora_experts import lora_experts_mlp
from ligerzoo.layers.lora import LoRALayer, LoRAOptions
from ligerzoo.layers.moe import Experts
from ligerzoo.layers.plain import dequantized


class LoRAExperts(LoRALayer, Experts):
    """`Experts` with low-rank updates of `gate_up_proj`, `down_proj` or both: one pair of matrices for each expert.

    Parameters are named `gate_up_proj_lora_A` (E, r, H) and `gate_up_proj_lora_B` (E, 2I, r), and in the same way for
    `down_proj`. No matrix of the size of the weights is computed. There is no dropout and no DoRA.
    """

    plain_class = Experts

    def add_update(self, parameter: str, options: LoRAOptions, *, dora: bool, dtype: torch.dtype) -> None:
        if dora or options.dropout:
            raise ValueError(
                f"LoRA: experts with {'dora=True' if dora else f'dropout={options.dropout}'}; expected dora=False and "
                "dropout=0. Leave the experts out of the targets, or train without it"
            )
        weight = getattr(self, parameter)
        experts, rows, columns = weight.shape
        self.lora = {**getattr(self, "lora", {}), parameter: options}
        for name, shape in (("A", (options.rank, columns)), ("B", (rows, options.rank))):
            matrices = torch.empty(experts, *shape, device=weight.device, dtype=dtype)
            self.register_parameter(f"{parameter}_lora_{name}", nn.Parameter(matrices))
        self.init_update(parameter)

    def init_update(self, parameter: str) -> None:
        a, b = (getattr(self, f"{parameter}_lora_{name}") for name in "AB")
        bound = a.shape[-1] ** -0.5  # as kaiming_uniform_ with a = sqrt(5), of each matrix
        nn.init.uniform_(a, -bound, bound)
        nn.init.zeros_(b)

    def update(self, parameter: str) -> LowRank | None:
        """Returns A, B and s of a parameter; None if it has no update, or updates are disabled."""
        if parameter not in self.lora or not self.lora_enabled:
            return None
        a, b = (getattr(self, f"{parameter}_lora_{name}") for name in "AB")
        return LowRank(a, b, self.lora[parameter].scale)

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """x: (T, H), expert_ids: (T, k), expert_weights: (T, k) -> (T, H)."""
        if not self.lora_enabled:
            return super().forward(x, expert_ids, expert_weights)
        return lora_experts_mlp(
            x, expert_ids, expert_weights, dequantized(self.gate_up_proj), dequantized(self.down_proj),
            self.update("gate_up_proj"), self.update("down_proj"), self.gate_up_proj_bias, self.down_proj_bias,
            activation=self.activation, backend=self.backend,
        )  # fmt: skip

    def merged_weight(self, parameter: str) -> Tensor:
        weight, options = dequantized(getattr(self, parameter)), self.lora[parameter]
        dtype, merged = accumulation_dtype(weight.dtype), torch.empty_like(weight)
        a, b = (getattr(self, f"{parameter}_lora_{name}").detach() for name in "AB")
        for expert in range(len(weight)):  # one at a time, for the memory of the fp32 copy
            product = b[expert].to(dtype), a[expert].to(dtype)
            merged[expert] = torch.addmm(weight[expert].detach().to(dtype), *product, alpha=options.scale)
        return merged
