"""How an expert combines the outputs of its gate and up projections.

Either `act(gate) * up` with one of the activations of `activation`, or the clamped SwiGLU of gpt-oss (OpenAI 2025),
with the sigmoid s, a limit L and a factor alpha:

    (u + 1) g s(alpha g),   g = min(gate, L),   u = min(max(up, -L), L)

Its gradient is 0 with respect to what a clamp cuts off, and not at the limit itself.

Experts without a gate (Nemotron-H) compute `act(up)`. Their first projection has I outputs, instead of 2I.
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


class Ungated(NamedTuple):
    """An activation of experts without a gate.

    Attributes:
        activation: its name.
    """

    activation: Activation = "relu2"


GatedActivation = Activation | ClampedSwiGLU
"""An activation of the gate, or a function of gate and up."""

ExpertActivation = GatedActivation | Ungated
"""How experts combine the outputs of their first projection."""


class Gating(NamedTuple):
    """An `ExpertActivation` as ops and kernels take it.

    Attributes:
        activation: its name.
        limit: see `ClampedSwiGLU`; 0 for an activation of the gate.
        alpha: see `ClampedSwiGLU`; 0 for an activation of the gate.
        parts: outputs of the first projection for each input of the last: 2, those of gate and up; 1 without a gate.
    """

    activation: str
    limit: float = 0.0
    alpha: float = 0.0
    parts: int = 2


def gating(activation: ExpertActivation) -> Gating:
    """Returns the arguments of kernels for an activation.

    Raises:
        ValueError: the activation is unknown, or its numbers are not positive.
    """
    match activation:
        case ClampedSwiGLU(limit, alpha) if limit > 0 and alpha > 0:
            return Gating(_CLAMPED_SWIGLU, float(limit), float(alpha))
        case ClampedSwiGLU():
            raise ValueError(f"activation={activation!r}; expected a positive limit and a positive alpha")
        case Ungated(name):
            return Gating(check_activation(name), parts=1)
    return Gating(check_activation(activation))


def combined(hidden: Tensor, gating: Gating) -> Tensor:
    """(..., parts * I) -> (..., I) in plain torch: the specification, the CPU path and the test oracle."""
    activated, factor = combined_factors(hidden, gating)
    return activated * factor


def combined_factors(hidden: Tensor, gating: Gating) -> tuple[Tensor, Tensor | float]:
    """Returns the two factors of `combined`: one depends on the gate, the other on up."""
    if gating.parts == 1:
        return ACTIVATIONS[gating.activation](hidden), 1.0  # type: ignore[index]
    gate, up = hidden.chunk(2, -1)
    if gating.activation != _CLAMPED_SWIGLU:
        return ACTIVATIONS[gating.activation](gate), up  # type: ignore[index]
    limit = gating.limit
    gate = torch.where(gate > limit, limit, gate)  # torch.clamp has slope 0 at the limit since torch 2.15
    up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
    return gate * torch.sigmoid(gating.alpha * gate), up + 1


def combined_backward(upstream: Tensor, hidden: Tensor, gating: Gating) -> Tensor:
    """Returns the gradient of `combined` with respect to `hidden`, in plain torch."""
    activation, limit, alpha, parts = gating
    if parts == 1:
        return ACTIVATIONS[activation].backward(upstream, hidden)  # type: ignore[index]
    gate, up = hidden.chunk(2, -1)
    if activation == _CLAMPED_SWIGLU:
        clamped = gate.clamp(max=limit)
        dgate = torch.ops.aten.silu_backward(upstream * (up.clamp(-limit, limit) + 1), alpha * clamped)
        dup = upstream * (clamped * torch.sigmoid(alpha * clamped))
        return torch.cat([dgate * (gate <= limit), dup * (up.abs() <= limit)], -1)
    function = ACTIVATIONS[activation]  # type: ignore[index]
    return torch.cat([function.backward(upstream * up, gate), upstream * function(gate)], -1)


@jit
def load_gate_and_up(ptr, row, n_cols, cols, mask, PARTS: tl.constexpr):
    """Some columns of gate and up of a row of PARTS * n_cols numbers, in fp32; without a gate, up and up."""
    gate = tl.load(ptr + PARTS * row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
    up = gate
    if PARTS == 2:
        up = tl.load(ptr + (2 * row + 1) * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
    return gate, up


@jit
def gate_and_up(
    gate,
    up,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    PARTS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """The combination of gate and up, and its derivatives with respect to both; without a gate, of `gate` alone."""
    if PARTS == 1:
        activated, slope = activate(gate, ACTIVATION, EXACT)
        return activated, slope, slope
    elif ACTIVATION == "clamped_swiglu":
        clamped = tl.where(gate > LIMIT, LIMIT, gate)  # NaN stays NaN
        factor = 1.0 + tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        activated, slope = scaled_silu(clamped, ALPHA, EXACT)
        is_cut = (up > LIMIT) | (up < -LIMIT)
        return activated * factor, tl.where(gate > LIMIT, 0.0, slope * factor), tl.where(is_cut, 0.0, activated)
    else:
        activated, slope = activate(gate, ACTIVATION, EXACT)
        return activated * up, up * slope, activated
