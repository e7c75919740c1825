"""RMSNorm and LayerNorm of transformers' models, with the fused kernels.

The families differ in the constant added to the weight, in where they round, and in the name of epsilon. A norm is
recognized by its results for random inputs and weights, in fp32 and in bf16.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import TypedDict, TypeGuard

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ligerzoo.integrations.kernels.compare import class_of, difference_of, first_match
from ligerzoo.integrations.kernels.replace import KernelModule, Recognized, Replacement
from ligerzoo.kernels import add_rms_norm, layer_norm, residual_rms_norm, rms_norm
from ligerzoo.layers.plain import is_plain

EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
"""Attributes under which norms store epsilon."""


class NormOptions(TypedDict):
    """Arguments of `ligerzoo.kernels.rms_norm`."""

    weight: Tensor | None
    eps: float
    weight_offset: float
    round_before_scale: bool


class KernelRMSNorm(KernelModule):
    """`ligerzoo.kernels.rms_norm` with the module's weight."""

    kernel_kind = "norm"
    kernel_eps: float
    kernel_weight_offset: float
    kernel_round_before_scale: bool

    def _norm_options(self) -> NormOptions:
        return {
            "weight": getattr(self, "weight", None),
            "eps": self.kernel_eps,
            "weight_offset": self.kernel_weight_offset,
            "round_before_scale": self.kernel_round_before_scale,
        }

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states: (..., H) -> (..., H)."""
        return rms_norm(hidden_states, **self._norm_options())


class KernelLayerNorm(KernelModule):
    """`ligerzoo.kernels.layer_norm` with the module's weight and bias."""

    kernel_kind = "norm"
    kernel_eps: float
    kernel_weight_offset: float
    weight: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """input: (..., H) -> (..., H)."""
        weight = self.weight + self.kernel_weight_offset if self.kernel_weight_offset else self.weight
        return layer_norm(input, weight, getattr(self, "bias", None), self.kernel_eps)


def _is_unwrapped(norm: nn.Module) -> TypeGuard[KernelRMSNorm]:
    """Whether a norm is a replaced one that nothing wraps."""
    return isinstance(norm, KernelRMSNorm) and is_plain(norm, type(norm))


def kernel_normalize(hidden_states: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Returns `(norm(hidden_states), hidden_states)`; one kernel adds their gradients if nothing wraps the norm."""
    if _is_unwrapped(norm):
        return residual_rms_norm(hidden_states, **norm._norm_options())
    return norm(hidden_states), hidden_states


def kernel_add_and_normalize(hidden_states: Tensor, residual: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Returns `(norm(hidden_states + residual), hidden_states + residual)`; in one kernel if nothing wraps the norm."""
    if _is_unwrapped(norm):
        return add_rms_norm(hidden_states, residual, **norm._norm_options())
    summed = residual + hidden_states
    return norm(summed), summed


def recognize_norm(module: nn.Module) -> Recognized:
    """Recognizes an RMSNorm or a LayerNorm."""
    if "Norm" not in type(module).__name__:
        return None
    if next(module.children(), None) is not None:
        return "it has submodules"
    arguments = [
        parameter.name
        for parameter in list(inspect.signature(type(module).forward).parameters.values())[1:]
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    if len(arguments) != 1:  # the others may be given even if they have defaults, as a gate in Bamba
        return f"its forward takes {', '.join(arguments)}, not only hidden states"
    parameters = dict(module.named_parameters(recurse=False))
    if set(parameters) - {"weight", "bias"} or any(p.ndim != 1 for p in parameters.values()):
        return "its parameters are not a weight and a bias of one dimension"
    eps = next((getattr(module, name) for name in EPSILONS if hasattr(module, name)), None)
    if eps is None:
        return "it has no epsilon under a known name"
    found = first_match(_candidates(parameters, float(eps)), partial(_computes, module))
    return found or "its results on random input are not those of an RMS or layer norm"


def _candidates(parameters: dict[str, nn.Parameter], eps: float) -> Iterator[Replacement]:
    offsets = (0.0, 1.0) if parameters else (0.0,)
    if "bias" not in parameters:
        for offset, rounds in product(offsets, (True, False) if parameters else (True,)):
            constants = {"kernel_eps": eps, "kernel_weight_offset": offset, "kernel_round_before_scale": rounds}
            yield Replacement(KernelRMSNorm, "rms_norm", constants)
    if parameters:
        for offset in offsets:
            constants = {"kernel_eps": eps, "kernel_weight_offset": offset}
            yield Replacement(KernelLayerNorm, "layer_norm", constants)


def _computes(module: nn.Module, candidate: Replacement) -> bool:
    """Whether the module computes what `candidate` does, for random weights in fp32 and bf16.

    In bf16 the results of the two ways to round differ in many elements, by one ulp.
    """
    for dtype, ulps, mismatches in ((torch.float32, 16.0, 1.0), (torch.bfloat16, 1.0, 0.02)):
        weights, x = _random_weights_and_input(module, dtype)
        with torch.no_grad():
            expected = functional_call(module, weights, (x,))
            with class_of(module, candidate.class_for(module)):
                actual = functional_call(module, weights, (x,))
        if difference_of(actual, expected, ulps) or (actual != expected).float().mean().item() > mismatches:
            return False
    return True


def _random_weights_and_input(module: nn.Module, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """Weights far from 1, and rows of which half are so small that epsilon matters."""
    parameter = next(module.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    weights = {name: random(*p.shape).to(dtype) for name, p in module.named_parameters()}
    x = random(8, 32 if parameter is None else parameter.shape[0])
    x[4:] *= 1e-3
    return weights, x.to(dtype)
