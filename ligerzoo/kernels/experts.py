"""Mixture of experts (Shazeer et al. 2017): the weighted sum of k of E gated MLPs for each token.

With h = x_t @ gate_up[e].T, gate and up the halves of h + gate_up_bias[e], and c(gate, up) their combination, such as
act(gate) * up (see `gating`), for each slot j of token t, e = expert_ids[t, j]:

Forward:   a_tj = w_tj * c(gate, up),   y_t = sum_j (a_tj @ down[e].T + w_tj * down_bias[e]).
Backward:  da = dy_t @ down[e],   dw_tj = sum(da * c(gate, up)) + sum(dy_t * down_bias[e]),
           dgate = da * w_tj * dc/dgate,   dup = da * w_tj * dc/dup,   dx_t = sum_j dh @ gate_up[e],
           ddown[e] = sum of dy_t^T a_tj,   dgate_up[e] = sum of dh^T x_t,
           ddown_bias[e] = sum of w_tj dy_t,   dgate_up_bias[e] = sum of dh   over the slots of expert e.

The T * k slots become the rows of matrices, sorted by expert. `routing` permutes tokens to rows and back, and adds the
biases of the down projections. `grouped_mm` computes the matrix products, and `weighted_glu` the activation between
them. The sums over slots run in fp32, in the order of the slots.

Saved: the inputs (x only for dgate_up), h, and the row of each slot. Recomputed in backward: a, and the copies of x and
dy for each slot.
An expert id outside [0, E) makes its token's output NaN on a GPU. On a CPU or with LIGERZOO_DEBUG=1 it is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels.autograd import FusedFunction, once_differentiable
from ligerzoo.kernels.dispatch import (
    DEBUG,
    Backend,
    accumulation_dtype,
    autocast,
    empty_gradient,
    uses_triton,
)
from ligerzoo.kernels.gating import GatedActivation, Gating, gated, gating
from ligerzoo.kernels.grouped_mm import grouped_outer_product, grouped_product, grouped_sum
from ligerzoo.kernels.recompute import Recompute, recomputable
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.routing import SlotBias, permute, sort_by_expert, unpermute
from ligerzoo.kernels.weighted_glu import Biases, row_values, weighted_glu, weighted_glu_backward
from ligerzoo.tensor_checks import check_floats, check_optional_floats, check_tensor


def reference(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: GatedActivation = "silu",
) -> Tensor:
    """`experts_mlp` in plain torch, one expert after the other: the specification and the test oracle."""
    x, gate_up, down, gate_up_bias, down_bias = autocast(x, gate_up, down, gate_up_bias, down_bias)
    y = torch.zeros_like(x, dtype=accumulation_dtype(x.dtype))
    for expert in range(gate_up.shape[0]):
        token, slot = torch.where(expert_ids == expert)
        gate, up = F.linear(x[token], gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert]).chunk(
            2, -1
        )
        active = gated(gate, up, gating(activation))
        expert_y = F.linear(active, down[expert], None if down_bias is None else down_bias[expert])
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
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor, biases: Biases,
    gating: Gating, triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns y, the hidden rows, and the rows and bounds of `sort_by_expert`."""
    check_ids(expert_ids, gate_up.shape[0])
    rows, bounds = sort_by_expert(expert_ids, gate_up.shape[0])
    hidden = _gate_and_up(x, gate_up, rows, bounds, triton)
    active = weighted_glu(hidden, expert_ids, expert_weights, rows, biases.gate_up, gating, triton)
    slot_bias = None if biases.down is None else SlotBias(biases.down, expert_ids, expert_weights)
    y = unpermute(grouped_product(active, down.mT, bounds[1:], triton), rows, bounds, triton, slot_bias)
    return y, hidden, rows, bounds


@register(
    "experts_gate_up",
    fake=lambda x, gate_up, rows: x.new_empty((rows.numel(), gate_up.shape[1])),
    flops=lambda gate_up, rows: 2 * rows.numel() * gate_up[0].numel(),
    peak=lambda x, gate_up, rows: x.element_size() * rows.numel() * (x.shape[1] + gate_up.shape[1]),
)
def _gate_and_up(x: Tensor, gate_up: Tensor, rows: Tensor, bounds: Tensor, triton: bool) -> Tensor:
    """Returns the hidden rows."""
    return grouped_product(permute(x, rows, triton), gate_up.mT, bounds[1:], triton)


class _Needs(NamedTuple):
    """Which gradients are needed."""

    x: bool
    weights: bool
    gate_up: bool
    down: bool
    gate_up_bias: bool
    down_bias: bool

    @property
    def hidden(self) -> bool:
        """Whether the gradient of the hidden rows is needed."""
        return self.x or self.weights or self.gate_up or self.gate_up_bias


def _empty_bias_gradient(x: Tensor, bias: Tensor | None, needed: bool) -> Tensor:
    return x.new_empty(0) if bias is None else empty_gradient(bias, needed)


def _backward_fake(
    x: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor, biases: Biases, needs: _Needs
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        empty_gradient(x, needs.x),
        empty_gradient(expert_weights, needs.weights),
        empty_gradient(gate_up, needs.gate_up),
        empty_gradient(down, needs.down),
        _empty_bias_gradient(x, biases.gate_up, needs.gate_up_bias),
        _empty_bias_gradient(x, biases.down, needs.down_bias),
    )


def _backward_flops(rows: Tensor, gate_up: Tensor, down: Tensor, needs: _Needs) -> int:
    down_products = needs.hidden + needs.down
    return 2 * rows.numel() * ((needs.x + needs.gate_up) * gate_up[0].numel() + down_products * down[0].numel())


def _backward_peak(
    x: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor, rows: Tensor, needs: _Needs
) -> int:
    n_rows, n_features, n_inner = rows.numel(), down.shape[1], down.shape[2]
    dhidden, active = 2 * n_inner * needs.hidden, n_inner * (needs.down or not needs.hidden)
    dactive = n_inner * needs.hidden
    ddown, dx, dgate_up = down.numel() * needs.down, x.numel() * needs.x, gate_up.numel() * needs.gate_up
    steps = [
        n_rows * (n_features + dactive + dhidden + active),  # gradients of the activation
        n_rows * (n_features + dhidden + active) + ddown,
        (n_rows * (dhidden + n_features) + ddown + dx) * (needs.x or needs.gate_up) + dgate_up,
    ]
    return x.element_size() * max(steps) + expert_weights.element_size() * n_rows * needs.weights


@register("experts_backward", fake=_backward_fake, flops=_backward_flops, peak=_backward_peak)
def _backward(
    dy: Tensor, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor, hidden: Tensor,
    rows: Tensor, bounds: Tensor, biases: Biases, gating: Gating, triton: bool, needs: _Needs,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of x, expert_weights, gate_up, down and both biases; without elements if not needed."""
    dx, dweights, dgate_up, ddown = (t.new_empty(0) for t in (x, expert_weights, gate_up, down))
    dbiases = [x.new_empty(0) for _ in biases]
    ends, dy_rows = bounds[1:], permute(dy, rows, triton)
    if needs.hidden:
        dactive = grouped_product(dy_rows, down, ends, triton)
        dhidden, dw, active = weighted_glu_backward(
            dactive, dy_rows, hidden, expert_ids, expert_weights, rows, bounds, biases, gating, needs.down, triton
        )
        dweights = dw if needs.weights else dweights
        del dactive
    elif needs.down:
        active = weighted_glu(hidden, expert_ids, expert_weights, rows, biases.gate_up, gating, triton)
    if needs.down:
        ddown = grouped_outer_product(dy_rows, active, ends, triton)
    if needs.down_bias and biases.down is not None:
        weights = row_values(expert_weights, rows)[:, 0]
        dbiases[1] = grouped_sum(dy_rows, weights, ends, biases.down.dtype, triton)
    dy_rows = active = dy  # frees their memory before the largest gradients are allocated
    if needs.x:
        dx = unpermute(grouped_product(dhidden, gate_up, ends, triton), rows, bounds, triton)
    if needs.gate_up:
        dgate_up = grouped_outer_product(dhidden, permute(x, rows, triton), ends, triton)
    if needs.gate_up_bias and biases.gate_up is not None:
        dbiases[0] = grouped_sum(dhidden, None, ends, biases.gate_up.dtype, triton)
    return dx, dweights, dgate_up, ddown, dbiases[0], dbiases[1]


class _ExpertsMLP(FusedFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        expert_weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        expert_ids: Tensor,
        gating: Gating,
        triton: bool,
    ) -> Tensor:
        biases = Biases(gate_up_bias, down_bias)
        y, hidden, rows, bounds = _forward(x, expert_ids, expert_weights, gate_up, down, biases, gating, triton)
        needs_gate_up = ctx.needs_input_grad[2]
        # A checkpointed block computes the hidden rows again anyway, with the output.
        recomputable(
            (hidden,), _gate_and_up, x, gate_up, rows, bounds, triton, level=Recompute.MLP, in_checkpoints=False
        )
        saved_x = x if needs_gate_up else None
        ctx.save_for_backward(saved_x, expert_ids, expert_weights, gate_up, down, hidden, rows, bounds, *biases)
        ctx.options = gating, triton
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, expert_ids, expert_weights, gate_up, down, hidden, rows, bounds, *biases = ctx.saved_tensors
        options, triton = ctx.options
        needs = _Needs(*ctx.needs_input_grad[:6])
        gradients = _backward(
            dy, dy if x is None else x, expert_ids, expert_weights, gate_up, down, hidden, rows, bounds,
            Biases(*biases), options, triton, needs,
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


def check_biases(
    name: str, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None
) -> None:
    """Raises ValueError unless the biases have the shapes of the experts' outputs."""
    for label, weight, bias in (("gate_up", gate_up, gate_up_bias), ("down", down, down_bias)):
        if bias is not None and bias.shape != weight.shape[:2]:
            raise ValueError(
                f"{name}: {label}_bias has shape {tuple(bias.shape)}; expected {tuple(weight.shape[:2])}, the experts "
                f"and outputs of {label}"
            )


def contiguous_biases(*biases: Tensor | None) -> Iterator[Tensor | None]:
    """Returns the biases in the memory format that the kernels read."""
    return (None if bias is None else bias.contiguous() for bias in biases)


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
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: GatedActivation = "silu",
    backend: Backend = "auto",
) -> Tensor:
    """Computes each token's weighted sum of k expert MLPs.

    `y_t = sum_j expert_weights[t, j] * (down[e] @ (act(gate) * up) + down_bias[e])` with `e = expert_ids[t, j]`, where
    `gate` and `up` are the halves of `gate_up[e] @ x_t + gate_up_bias[e]`. Deterministic. Without a host sync, except
    in fp64 and for backend="torch".

    Args:
        x: (T, H) hidden states of the tokens, any strides.
        expert_ids: (T, k) integers in [0, E).
        expert_weights: (T, k), of any floating-point dtype.
        gate_up: (E, 2I, H), the gate's rows first, in the dtype of `x`.
        down: (E, H, I), in the dtype of `x`.
        gate_up_bias: (E, 2I), of any floating-point dtype; None for 0.
        down_bias: (E, H), of any floating-point dtype; None for 0.
        activation: the activation of the gate, see `activation_linear`; or `ClampedSwiGLU`, instead of act(gate) * up.
        backend: "auto" (Triton where supported), "triton" or "torch" (the same steps in plain torch).

    Returns:
        (T, H), contiguous, in the dtype of `x`.

    Raises:
        ValueError: shapes or dtypes do not match, or the activation is unknown. On a CPU or with LIGERZOO_DEBUG=1 also
            if an expert id is outside [0, E); otherwise the output of such a token is NaN.
    """
    check_floats("experts_mlp", x=x, expert_weights=expert_weights, gate_up=gate_up, down=down)
    check_tensor("experts_mlp", "expert_ids", expert_ids, "integer")
    check_optional_floats("experts_mlp", gate_up_bias=gate_up_bias, down_bias=down_bias)
    x, gate_up, down, gate_up_bias, down_bias = autocast(x, gate_up, down, gate_up_bias, down_bias)
    check_experts("experts_mlp", x, expert_ids, expert_weights, gate_up, down)
    check_biases("experts_mlp", gate_up, down, gate_up_bias, down_bias)
    options = gating(activation)
    biases = [t for t in (gate_up_bias, down_bias) if t is not None]
    triton = uses_triton(x, expert_weights, gate_up, down, *biases, backend=backend)
    return _ExpertsMLP.apply(
        x, expert_weights, gate_up, down, *contiguous_biases(gate_up_bias, down_bias), expert_ids, options, triton
    )
