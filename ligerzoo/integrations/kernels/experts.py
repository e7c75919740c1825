"""Experts of transformers' mixtures with stacked weights, with the grouped products of `experts_mlp`.

transformers stores the gate and up projections of all experts as one tensor (E, 2I, H), as the kernel reads them; those
without a gate (Nemotron-H) are (E, I, H).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ligerzoo.integrations.kernels.compare import random_like
from ligerzoo.integrations.kernels.mlps import activation_of
from ligerzoo.integrations.kernels.replace import KernelModule, Recognized, Replacement
from ligerzoo.kernels import ExpertActivation, Ungated, experts_mlp


class KernelExperts(KernelModule):
    """`ligerzoo.kernels.experts_mlp` with the module's weights."""

    kernel_kind = "experts"
    kernel_activation: ExpertActivation
    kernel_first: str
    down_proj: Tensor

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states: (T, H), top_k_index: (T, k), top_k_weights: (T, k) -> (T, H)."""
        weights = getattr(self, self.kernel_first), self.down_proj
        return experts_mlp(hidden_states, top_k_index, top_k_weights, *weights, activation=self.kernel_activation)


def recognize_experts(module: nn.Module) -> Recognized:
    """Recognizes stacked experts."""
    if not type(module).__name__.endswith("Experts"):
        return None
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    first, *others = set(shapes) - {"down_proj"} or {""}
    if others or first not in ("gate_up_proj", "up_proj") or "down_proj" not in shapes:
        return f"its parameters are {', '.join(shapes)}; the kernel takes gate_up_proj and down_proj without biases"
    experts, features, hidden = shapes[first] if len(shapes[first]) == 3 else (0, 0, 0)
    parts = 1 if first == "up_proj" else 2
    if not experts or shapes["down_proj"] != (experts, hidden, features // parts):
        return f"its weights are {shapes}; the kernel takes (E, {'2I' if parts == 2 else 'I'}, H) and (E, H, I)"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are distributed over processes"
    activation = activation_of(module)
    if activation is None:
        return "no kernel for its activation"
    options = {"kernel_activation": activation if parts == 2 else Ungated(activation), "kernel_first": first}
    return Replacement(KernelExperts, f"experts_mlp ({activation})", options, _inputs)


def _inputs(module: KernelExperts) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens whose activations have standard deviations of 1 and 30, for two experts each."""
    weight, _ = module.parameters()
    experts, _features, hidden = weight.shape
    x = random_like(weight, 8, hidden)
    x = x / (x @ weight[0].T).float().std().clamp(min=1e-3).to(x.dtype)
    x[4:] *= 30
    index = torch.arange(16, device=weight.device).view(8, 2) % experts
    return x.detach(), index, random_like(weight, 8, 2).softmax(-1)
