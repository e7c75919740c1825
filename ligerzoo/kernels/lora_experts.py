"""Mixture of experts whose stacked weights are frozen and have low-rank updates, see `experts`."""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import Backend, autocast
from ligerzoo.kernels.experts import (
    ExpertSlots,
    Projection,
    check_biases,
    check_experts,
    compute_experts,
    contiguous_biases,
)
from ligerzoo.kernels.gating import ExpertActivation
from ligerzoo.kernels.low_rank import LowRank
from ligerzoo.tensor_checks import check_floats, check_optional_floats, check_tensor, shape_error


def lora_experts_mlp(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_update: LowRank | None = None,
    down_update: LowRank | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: ExpertActivation = "silu",
    backend: Backend = "auto",
) -> Tensor:
    """Computes `experts_mlp` with frozen weights that have low-rank updates.

    Args:
        x: (T, H) hidden states of the tokens, any strides.
        expert_ids: (T, k) integers in [0, E).
        expert_weights: (T, k), of any floating-point dtype.
        gate_up: (E, 2I, H), the gate's rows first, or (E, I, H) without a gate, in the dtype of `x`. Gets no gradient.
        down: (E, H, I), in the dtype of `x`. Gets no gradient.
        gate_up_update: a (E, r, H) and b (E, 2I or I, r), of any floating-point dtype; None for no update.
        down_update: a (E, r, I) and b (E, H, r), of any floating-point dtype; None for no update.
        gate_up_bias: (E, 2I) or (E, I), of any floating-point dtype; None for 0. Gets no gradient.
        down_bias: (E, H), of any floating-point dtype; None for 0. Gets no gradient.
        activation: see `experts_mlp`.
        backend: "auto" (Triton where supported), "triton" or "torch" (the same steps in plain torch).

    Returns:
        (T, H), contiguous, in the dtype of `x`.

    Raises:
        ValueError: shapes or dtypes do not match, the activation is unknown, or a weight requires a gradient. On a CPU
            or with LIGERZOO_DEBUG=1 also if an expert id is outside [0, E).
    """
    name = "lora_experts_mlp"
    check_floats(name, x=x, expert_weights=expert_weights, gate_up=gate_up, down=down)
    check_tensor(name, "expert_ids", expert_ids, "integer")
    check_optional_floats(name, gate_up_bias=gate_up_bias, down_bias=down_bias)
    frozen = [t for t in (gate_up, down, gate_up_bias, down_bias) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in frozen):
        raise ValueError(
            f"{name}: the experts' weights or biases require gradients; expected frozen ones. "
            "Call requires_grad_(False) on them, or train the experts without low-rank updates"
        )
    x, gate_up, down, gate_up_bias, down_bias = autocast(x, gate_up, down, gate_up_bias, down_bias)
    slots = ExpertSlots(expert_ids, expert_weights)
    check_experts(name, x, slots, gate_up, down, activation)
    check_biases(name, gate_up, down, gate_up_bias, down_bias)
    gate_up_bias, down_bias = contiguous_biases(gate_up_bias, down_bias)
    gate_up_projection = _with_update(name, "gate_up", Projection(gate_up, gate_up_bias), gate_up_update)
    down_projection = _with_update(name, "down", Projection(down, down_bias), down_update)
    return compute_experts(x, slots, gate_up_projection, down_projection, activation, backend)


def _with_update(name: str, label: str, projection: Projection, update: LowRank | None) -> Projection:
    """Returns the projection with an update of its dtype.

    Raises:
        ValueError: the shapes do not match.
    """
    if update is None:
        return projection
    a, b, scale = update
    experts, outputs, features = projection.weight.shape
    if a.shape != (experts, a.shape[1], features) or b.shape != (experts, outputs, a.shape[1]):
        expected = "(E, O, K), and (E, r, K) and (E, O, r) for its update"
        raise shape_error(name, expected, **{label: projection.weight}, a=a, b=b)
    dtype = projection.weight.dtype
    return projection._replace(a=a.to(dtype), b=b.to(dtype), scale=scale)
