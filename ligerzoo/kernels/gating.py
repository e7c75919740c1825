"""How an expert combines the outputs of its gate and up projections.

Either `act(gate) * up` with one of the activations of `activation`, or the clamped SwiGLU of gpt-oss (OpenAI 2025),
with the sigmoid s, a limit L and a factor alpha:

    (u + 1) g s(alpha g),   g = min(gate, L),   u = min(max(up, -L), L)

Its gradient is 0 with respect to what a clamp cuts off, and not at the limit itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.activation import ACTIVATIONS, Activation, activate, check_activation, scaled_silu
from ligerzoo.kernels.jit import jit, tl

_CLAMPED_SWIGLU = "clamped_swiglu"


class ClampedSwiGLU(NamedTuple):
    """The clamped SwiGLU of gpt-oss, see the formula above.

    Attributes:
        limit: L, positive.
        alpha: factor of the gate within the sigmoid, positive.
    """

    limit: float = 7.0
    alpha: float = 1.702


GatedActivation = Activation | ClampedSwiGLU
"""An activation of the gate, or a function of gate and up."""


class Gating(NamedTuple):
    """A `GatedActivation` as ops and kernels take it.

    Attributes:
        activation: its name.
        limit: see `ClampedSwiGLU`; 0 for an activation of the gate.
        alpha: see `ClampedSwiGLU`; 0 for an activation of the gate.
    """

    activation: str
    limit: float
    alpha: float


def gating(activation: GatedActivation) -> Gating:
    """Returns the arguments of kernels for an activation.

    Raises:
        ValueError: the activation is unknown, or its numbers are not positive.
    """
    if not isinstance(activation, ClampedSwiGLU):
        return Gating(check_activation(activation), 0.0, 0.0)
    if not (activation.limit > 0 and activation.alpha > 0):
        raise ValueError(f"activation={activation!r}; expected a positive limit and a positive alpha")
    return Gating(_CLAMPED_SWIGLU, float(activation.limit), float(activation.alpha))


def gated(gate: Tensor, up: Tensor, gating: Gating) -> Tensor:
    """Combines gate and up in plain torch: the specification, the CPU path and the test oracle."""
    activated, factor = gated_factors(gate, up, gating)
    return activated * factor


def gated_factors(gate: Tensor, up: Tensor, gating: Gating) -> tuple[Tensor, Tensor]:
    """Returns the two factors of `gated`: one depends on the gate, the other on up."""
    if gating.activation != _CLAMPED_SWIGLU:
        return ACTIVATIONS[gating.activation](gate), up  # type: ignore[index]
    limit = gating.limit
    gate = torch.where(gate > limit, limit, gate)  # torch.clamp has slope 0 at the limit since torch 2.15
    up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
    return gate * torch.sigmoid(gating.alpha * gate), up + 1


def gated_backward(upstream: Tensor, gate: Tensor, up: Tensor, gating: Gating) -> tuple[Tensor, Tensor]:
    """Returns the gradients of `gated` with respect to gate and up, in plain torch."""
    activation, limit, alpha = gating
    if activation == _CLAMPED_SWIGLU:
        clamped = gate.clamp(max=limit)
        dgate = torch.ops.aten.silu_backward(upstream * (up.clamp(-limit, limit) + 1), alpha * clamped)
        dup = upstream * (clamped * torch.sigmoid(alpha * clamped))
        return dgate * (gate <= limit), dup * (up.abs() <= limit)
    function = ACTIVATIONS[activation]  # type: ignore[index]
    return function.backward(upstream * up, gate), upstream * function(gate)


@jit
def gate_and_up(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, EXACT: tl.constexpr):
    """The combination of gate and up, and its derivatives with respect to both."""
    if ACTIVATION == "clamped_swiglu":
        clamped = tl.where(gate > LIMIT, LIMIT, gate)  # NaN stays NaN
        factor = 1.0 + tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        activated, slope = scaled_silu(clamped, ALPHA, EXACT)
        is_cut = (up > LIMIT) | (up < -LIMIT)
        return activated * factor, tl.where(gate > LIMIT, 0.0, slope * factor), tl.where(is_cut, 0.0, activated)
    else:
        activated, slope = activate(gate, ACTIVATION, EXACT)
        return activated * up, up * slope, activated
