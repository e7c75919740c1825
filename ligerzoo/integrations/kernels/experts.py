"""Experts of transformers' mixtures with stacked weights, with the grouped products of `experts_mlp`.

transformers stores the gate and up projections of all experts as one tensor (E, 2I, H), as the kernel reads them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ligerzoo.integrations.kernels.compare import random_like
from ligerzoo.integrations.kernels.mlps import activation_of
from ligerzoo.integrations.kernels.replace import KernelModule, Recognized, Replacement
from ligerzoo.kernels import experts_mlp
from ligerzoo.kernels.activation import Activation


class KernelExperts(KernelModule):
    """`ligerzoo.kernels.experts_mlp` with the module's weights."""

    kernel_kind = "experts"
    kernel_activation: Activation
    gate_up_proj: Tensor
    down_proj: Tensor

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states: (T, H), top_k_index: (T, k), top_k_weights: (T, k) -> (T, H)."""
        weights = self.gate_up_proj, self.down_proj
        return experts_mlp(hidden_states, top_k_index, top_k_weights, *weights, activation=self.kernel_activation)


def recognize_experts(module: nn.Module) -> Recognized:
    """Recognizes stacked experts."""
    if not type(module).__name__.endswith("Experts"):
        return None
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    if set(shapes) != {"gate_up_proj", "down_proj"}:
        return f"its parameters are {', '.join(shapes)}; the kernel takes gate_up_proj and down_proj without biases"
    experts, features, hidden = shapes["gate_up_proj"] if len(shapes["gate_up_proj"]) == 3 else (0, 0, 0)
    if not experts or shapes["down_proj"] != (experts, hidden, features // 2):
        return f"its weights are {shapes}; the kernel takes (E, 2I, H) and (E, H, I)"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are distributed over processes"
    activation = activation_of(module)
    if activation is None:
        return "no kernel for its activation"
    return Replacement(KernelExperts, f"experts_mlp ({activation})", {"kernel_activation": activation}, _inputs)


def _inputs(module: KernelExperts) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens whose activations have standard deviations of 1 and 30, for two experts each."""
    weight = module.gate_up_proj
    experts, _features, hidden = weight.shape
    x = random_like(weight, 8, hidden)
    x = x / (x @ weight[0].T).float().std().clamp(min=1e-3).to(x.dtype)
    x[4:] *= 30
    index = torch.arange(16, device=weight.device).view(8, 2) % experts
    return x.detach(), index, random_like(weight, 8, 2).softmax(-1)
