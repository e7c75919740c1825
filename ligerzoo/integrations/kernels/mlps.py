"""MLPs of transformers' models: the activation fused with the product of the gate and with the down projection.

Three structures are known: separate gate and up projections, both in one (Phi-3, GLM-4, ModernBERT), and no gate
(vision towers).
The projections are called as modules, so that adapters on them keep working.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ligerzoo.integrations.kernels.compare import first_match, random_like
from ligerzoo.integrations.kernels.replace import KernelModule, Recognized, Replacement
from ligerzoo.kernels import activation_linear, glu, glu_linear
from ligerzoo.kernels.activation import ACTIVATIONS, Activation
from ligerzoo.layers.plain import is_plain
from ligerzoo.layers.projection import project

ACTIVATION_NAMES = ("act_fn", "activation_fn", "act")
"""Attributes under which MLPs and experts store their activation."""


class KernelMLP(KernelModule):
    """Base class: an activation, and the names of the projections in the order in which they are applied."""

    kernel_kind = "mlp"
    kernel_activation: Activation
    kernel_projections: tuple[str, ...]

    def _down(self, gate: Tensor, up: Tensor) -> Tensor:
        down = self.get_submodule(self.kernel_projections[-1])
        if is_plain(down, nn.Linear):
            return glu_linear(gate, up, down.weight, down.bias, activation=self.kernel_activation)
        return down(glu(gate, up, activation=self.kernel_activation))  # type: ignore[no-any-return]


class KernelGatedMLP(KernelMLP):
    """`ligerzoo.kernels.glu_linear` after the gate and up projections."""

    gate_proj: nn.Module
    up_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., H) -> (..., H)."""
        return self._down(*project(x, self.gate_proj, self.up_proj))


class KernelFusedGateMLP(KernelMLP):
    """`ligerzoo.kernels.glu_linear` after one projection to gate and up."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states: (..., H) -> (..., H)."""
        first, *_ = self.kernel_projections
        return self._down(*self.get_submodule(first)(hidden_states).chunk(2, dim=-1))


class KernelUngatedMLP(KernelMLP):
    """`ligerzoo.kernels.activation_linear` after the first projection."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states: (..., H) -> (..., O)."""
        first, second = (self.get_submodule(name) for name in self.kernel_projections)
        x: Tensor = first(hidden_states)
        if is_plain(second, nn.Linear):
            return activation_linear(x, second.weight, second.bias, activation=self.kernel_activation)
        return second(ACTIVATIONS[self.kernel_activation](x))  # type: ignore[no-any-return]


STRUCTURES: dict[tuple[str, ...], tuple[type[KernelMLP], str]] = {
    ("gate_proj", "up_proj", "down_proj"): (KernelGatedMLP, "glu_linear"),
    ("gate_up_proj", "down_proj"): (KernelFusedGateMLP, "glu_linear"),
    ("Wi", "Wo"): (KernelFusedGateMLP, "glu_linear"),
    ("up_proj", "down_proj"): (KernelUngatedMLP, "activation_linear"),
    ("fc1", "fc2"): (KernelUngatedMLP, "activation_linear"),
    ("linear_fc1", "linear_fc2"): (KernelUngatedMLP, "activation_linear"),
}
"""What computes an MLP, by the names of its projections in the order in which they are applied."""


def recognize_mlp(module: nn.Module) -> Recognized:
    """Recognizes an MLP. One with dropout is kept."""
    children = {name for name, child in module.named_children() if not _drops_nothing(child)} - set(ACTIVATION_NAMES)
    projections = next((names for names in STRUCTURES if children == set(names)), None)
    if projections is None:
        return "its projections have no known names" if type(module).__name__.endswith("MLP") else None
    name = activation_of(module)
    if name is None:
        return f"no kernel for its activation, {_activation_name(module)}"
    mixin, kernel = STRUCTURES[projections]
    options = {"kernel_activation": name, "kernel_projections": projections}
    return Replacement(mixin, f"{kernel} ({name})", options, partial(_inputs, projections[0]))


def _drops_nothing(module: nn.Module) -> bool:
    """Whether a module is a dropout that drops nothing."""
    return isinstance(module, nn.Dropout) and module.p == 0


def activation_of(module: nn.Module) -> Activation | None:
    """Returns the name of the module's activation; None if no kernel computes it."""
    if (function := _activation_function(module)) is None:
        return None
    parameter = next(function.parameters(), None) if isinstance(function, nn.Module) else None
    x = torch.linspace(-30, 30, 601, device=None if parameter is None else parameter.device)
    try:
        with torch.no_grad():
            y = function(x)
    except Exception:  # an activation of any class, which may take other arguments
        return None
    if not isinstance(y, Tensor) or (y.shape, y.dtype) != (x.shape, x.dtype):
        return None
    return first_match(ACTIVATIONS, lambda name: torch.allclose(ACTIVATIONS[name](x), y, rtol=0, atol=1e-6))


def _activation_function(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    return next((getattr(module, name) for name in ACTIVATION_NAMES if hasattr(module, name)), None)


def _activation_name(module: nn.Module) -> str:
    if (function := _activation_function(module)) is None:
        return "which has no known name"
    return type(function).__name__ if isinstance(function, nn.Module) else getattr(function, "__name__", repr(function))


def _inputs(first: str, module: nn.Module) -> tuple[Tensor]:
    """Rows whose activations have standard deviations of 1 and 30, where a clamped activation differs."""
    projection = module.get_submodule(first)
    weight = next(p for p in projection.parameters() if p.ndim == 2)
    features = getattr(projection, "in_features", weight.shape[-1])
    x = random_like(weight, 8, features)
    with torch.no_grad():
        x = x / projection(x).float().std().clamp(min=1e-3).to(x.dtype)
    x[4:] *= 30
    return (x[None],)
