"""Mixture of experts (Shazeer et al. 2017): the weighted sum of k of E gated MLPs for each token.

With gate and up the halves of h = x_t @ gate_up[e].T, for each slot j of token t, e = expert_ids[t, j]:

Forward:   a_tj = w_tj * act(gate) * up,   y_t = sum_j a_tj @ down[e].T.
Backward:  da = dy_t @ down[e],   dw_tj = sum(da * act(gate) * up),
           dgate = da * w_tj * up * act'(gate),   dup = da * w_tj * act(gate),   dx_t = sum_j dh @ gate_up[e],
           ddown[e] = sum of dy_t^T a_tj,   dgate_up[e] = sum of dh^T x_t   over the slots of expert e.

The T * k slots become the rows of matrices, sorted by expert. `routing` permutes tokens to rows and back, `grouped_mm`
computes the matrix products, and `weighted_glu` the activation between them. The sums over slots run in fp32, in the
order of the slots.

Saved: the inputs (x only for dgate_up), h, and the row of each slot. Recomputed in backward: a, and the copies of x and
dy for each slot.
An expert id outside [0, E) makes its token's output NaN on a GPU. On a CPU or with LIGERZOO_DEBUG=1 it is an error.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels.activation import ACTIVATIONS, Activation, check_activation
from ligerzoo.kernels.autograd import FusedFunction, once_differentiable
from ligerzoo.kernels.checks import check_floats, check_tensor
from ligerzoo.kernels.dispatch import (
    DEBUG,
    Backend,
    accumulation_dtype,
    autocast,
    empty_gradient,
    uses_triton,
)
from ligerzoo.kernels.grouped_mm import grouped_outer_product, grouped_product
from ligerzoo.kernels.recompute import Recompute, recomputable
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.routing import permute, sort_by_expert, unpermute
from ligerzoo.kernels.weighted_glu import weighted_glu, weighted_glu_backward


def reference(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation = "silu",
) -> Tensor:
    """`experts_mlp` in plain torch, one expert after the other: the specification and the test oracle."""
    x, gate_up, down = autocast(x, gate_up, down)
    y = torch.zeros_like(x, dtype=accumulation_dtype(x.dtype))
    for expert in range(gate_up.shape[0]):
        token, slot = torch.where(expert_ids == expert)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, -1)
        expert_y = F.linear(ACTIVATIONS[activation](gate) * up, down[expert])
        y = y.index_add(0, token, expert_weights[token, slot, None] * expert_y.to(y.dtype))
    return y.to(x.dtype)


def _forward_fake(x: Tensor, expert_ids: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n_experts, n_hidden, _ = gate_up.shape
    hidden = x.new_empty((expert_ids.numel(), n_hidden))
    rows, bounds = (expert_ids.new_empty(shape, dtype=torch.int32) for shape in (expert_ids.shape, (n_experts + 1,)))
    return x.new_empty(x.shape), hidden, rows, bounds


def _flops(expert_ids: Tensor, gate_up: Tensor, down: Tensor) -> int:
    return 2 * expert_ids.numel() * (gate_up[0].numel() + down[0].numel())


def _forward_peak(x: Tensor, expert_ids: Tensor, down: Tensor) -> int:
    """At the last step: hidden and active rows, their products, and y."""
    _, n_features, n_inner = down.shape
    return x.element_size() * (expert_ids.numel() * (3 * n_inner + n_features) + x.numel()) + 4 * expert_ids.numel()


@register("experts_forward", fake=_forward_fake, flops=_flops, peak=_forward_peak)
def _forward(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor, activation: Activation,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns y, the hidden rows, and the rows and bounds of `sort_by_expert`."""
    check_ids(expert_ids, gate_up.shape[0])
    rows, bounds = sort_by_expert(expert_ids, gate_up.shape[0])
    hidden = _gate_and_up(x, gate_up, rows, bounds, triton)
    active = weighted_glu(hidden, expert_weights, rows, activation, triton)
    return unpermute(grouped_product(active, down.mT, bounds[1:], triton), rows, bounds, triton), hidden, rows, bounds


@register(
    "experts_gate_up",
    fake=lambda x, gate_up, rows: x.new_empty((rows.numel(), gate_up.shape[1])),
    flops=lambda gate_up, rows: 2 * rows.numel() * gate_up[0].numel(),
    peak=lambda x, gate_up, rows: x.element_size() * rows.numel() * (x.shape[1] + gate_up.shape[1]),
)
def _gate_and_up(x: Tensor, gate_up: Tensor, rows: Tensor, bounds: Tensor, triton: bool) -> Tensor:
    """Returns the hidden rows."""
    return grouped_product(permute(x, rows, triton), gate_up.mT, bounds[1:], triton)


def _backward_fake(
    x: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor,
    needs_x: bool, needs_weights: bool, needs_gate_up: bool, needs_down: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        empty_gradient(x, needs_x),
        empty_gradient(expert_weights, needs_weights),
        empty_gradient(gate_up, needs_gate_up),
        empty_gradient(down, needs_down),
    )


def _backward_flops(
    rows: Tensor, gate_up: Tensor, down: Tensor,
    needs_x: bool, needs_weights: bool, needs_gate_up: bool, needs_down: bool,
) -> int:  # fmt: skip
    down_products = (needs_x or needs_weights or needs_gate_up) + needs_down
    return 2 * rows.numel() * ((needs_x + needs_gate_up) * gate_up[0].numel() + down_products * down[0].numel())


def _backward_peak(
    x: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor, rows: Tensor,
    needs_x: bool, needs_weights: bool, needs_gate_up: bool, needs_down: bool,
) -> int:  # fmt: skip
    n_rows, n_features, n_inner = rows.numel(), down.shape[1], down.shape[2]
    needs_hidden = needs_x or needs_weights or needs_gate_up
    dhidden, active = 2 * n_inner * needs_hidden, n_inner * (needs_down or not needs_hidden)
    dactive = n_inner * needs_hidden
    ddown, dx, dgate_up = down.numel() * needs_down, x.numel() * needs_x, gate_up.numel() * needs_gate_up
    steps = [
        n_rows * (n_features + dactive + dhidden + active),  # gradients of the activation
        n_rows * (n_features + dhidden + active) + ddown,
        (n_rows * (dhidden + n_features) + ddown + dx) * (needs_x or needs_gate_up) + dgate_up,
    ]
    return x.element_size() * max(steps) + expert_weights.element_size() * n_rows * needs_weights


@register("experts_backward", fake=_backward_fake, flops=_backward_flops, peak=_backward_peak)
def _backward(
    dy: Tensor, x: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor, hidden: Tensor, rows: Tensor,
    bounds: Tensor, activation: Activation, triton: bool, needs_x: bool, needs_weights: bool, needs_gate_up: bool,
    needs_down: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of x, expert_weights, gate_up and down; without elements if not needed."""
    dx, dweights, dgate_up, ddown = (t.new_empty(0) for t in (x, expert_weights, gate_up, down))
    ends, dy_rows = bounds[1:], permute(dy, rows, triton)
    if needs_x or needs_weights or needs_gate_up:
        dactive = grouped_product(dy_rows, down, ends, triton)
        dhidden, dw, active = weighted_glu_backward(
            dactive, hidden, expert_weights, rows, bounds, activation, needs_down, triton
        )
        dweights = dw if needs_weights else dweights
        del dactive
    else:
        active = weighted_glu(hidden, expert_weights, rows, activation, triton)
    if needs_down:
        ddown = grouped_outer_product(dy_rows, active, ends, triton)
    del dy_rows, active  # frees their memory before the largest gradients are allocated
    if needs_x:
        dx = unpermute(grouped_product(dhidden, gate_up, ends, triton), rows, bounds, triton)
    if needs_gate_up:
        dgate_up = grouped_outer_product(dhidden, permute(x, rows, triton), ends, triton)
    return dx, dweights, dgate_up, ddown


class _ExpertsMLP(FusedFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        expert_weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        expert_ids: Tensor,
        activation: Activation,
        triton: bool,
    ) -> Tensor:
        y, hidden, rows, bounds = _forward(x, expert_ids, expert_weights, gate_up, down, activation, triton)
        needs_gate_up = ctx.needs_input_grad[2]
        # A checkpointed block computes the hidden rows again anyway, with the output.
        recomputable(
            (hidden,), _gate_and_up, x, gate_up, rows, bounds, triton, level=Recompute.MLP, in_checkpoints=False
        )
        ctx.save_for_backward(x if needs_gate_up else None, expert_weights, gate_up, down, hidden, rows, bounds)
        ctx.options = activation, triton
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, expert_weights, gate_up, down, hidden, rows, bounds = ctx.saved_tensors
        activation, triton = ctx.options
        needs_x, needs_weights, needs_gate_up, needs_down = needs = ctx.needs_input_grad[:4]
        gradients = _backward(
            dy, dy if x is None else x, expert_weights, gate_up, down, hidden, rows, bounds, activation, triton,
            needs_x, needs_weights, needs_gate_up, needs_down,
        )  # fmt: skip
        return *(g if needed else None for g, needed in zip(gradients, needs, strict=True)), None, None, None


def check_ids(expert_ids: Tensor, n_experts: int) -> None:
    if DEBUG or expert_ids.device.type == "cpu":
        invalid = (expert_ids < 0) | (expert_ids >= n_experts)
        if bool(invalid.any()):
            token, slot = (int(i) for i in invalid.nonzero()[0])
            raise ValueError(
                f"experts_mlp: expert_ids[{token}, {slot}] is {int(expert_ids[token, slot])}; "
                f"expected 0 to {n_experts - 1}"
            )


def check_experts(
    name: str, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor
) -> None:
    """Raises ValueError unless the shapes and the dtypes of the arguments of `experts_mlp` match."""
    n_experts, n_features = gate_up.shape[0], x.shape[-1]
    if (
        x.dim() != 2
        or expert_ids.dim() != 2
        or len(x) != len(expert_ids)
        or expert_ids.shape != expert_weights.shape
        or gate_up.shape != (n_experts, 2 * down.shape[-1], n_features)
        or down.shape[:-1] != (n_experts, n_features)
        or not x.dtype == gate_up.dtype == down.dtype
    ):
        raise ValueError(
            f"{name}: x is {tuple(x.shape)} {x.dtype}, expert_ids {tuple(expert_ids.shape)} {expert_ids.dtype}, "
            f"expert_weights {tuple(expert_weights.shape)}, gate_up {tuple(gate_up.shape)} {gate_up.dtype}, "
            f"down {tuple(down.shape)} {down.dtype}; expected (T, H), (T, k) of integers, (T, k), (E, 2I, H) and "
            "(E, H, I), with the same dtype for x, gate_up and down"
        )


def experts_mlp(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    activation: Activation = "silu",
    backend: Backend = "auto",
) -> Tensor:
    """Computes each token's weighted sum of k expert MLPs.

    `y_t = sum_j expert_weights[t, j] * down[e] @ (act(gate) * up)` with `e = expert_ids[t, j]`, where `gate` and `up`
    are the halves of `gate_up[e] @ x_t`. Deterministic. Without a host sync, except in fp64 and for backend="torch".

    Args:
        x: (T, H) hidden states of the tokens, any strides.
        expert_ids: (T, k) integers in [0, E).
        expert_weights: (T, k), of any floating-point dtype.
        gate_up: (E, 2I, H), the gate's rows first, in the dtype of `x`.
        down: (E, H, I), in the dtype of `x`.
        activation: the activation of the gate, see `activation_linear`.
        backend: "auto" (Triton where supported), "triton" or "torch" (the same steps in plain torch).

    Returns:
        (T, H), contiguous, in the dtype of `x`.

    Raises:
        ValueError: shapes or dtypes do not match, or the activation is unknown. On a CPU or with LIGERZOO_DEBUG=1 also
            if an expert id is outside [0, E); otherwise the output of such a token is NaN.
    """
    check_floats("experts_mlp", x=x, expert_weights=expert_weights, gate_up=gate_up, down=down)
    check_tensor("experts_mlp", "expert_ids", expert_ids, "integer")
    x, gate_up, down = autocast(x, gate_up, down)
    check_experts("experts_mlp", x, expert_ids, expert_weights, gate_up, down)
    check_activation(activation)
    triton = uses_triton(x, expert_weights, gate_up, down, backend=backend)
    return _ExpertsMLP.apply(x, expert_weights, gate_up, down, expert_ids, activation, triton)
