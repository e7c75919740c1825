"""Mixture of experts (Shazeer et al. 2017): the weighted sum of k of E gated MLPs for each token.

With h = x_t @ gate_up[e].T, gate and up the halves of h + gate_up_bias[e], and c(gate, up) their combination, such as
act(gate) * up (see `gating`), for each slot j of token t, e = expert_ids[t, j] (without a gate, c(h + gate_up_bias[e])
and dh):

Forward:   a_tj = w_tj * c(gate, up),  y_t = sum_j (a_tj @ down[e].T + w_tj * down_bias[e]).
Backward:  da = dy_t @ down[e],  dw_tj = sum(da * c(gate, up)) + sum(dy_t * down_bias[e]),
           dgate = da * w_tj * dc/dgate,  dup = da * w_tj * dc/dup,  dx_t = sum_j dh @ gate_up[e],
           ddown[e] = sum of dy_t^T a_tj,  dgate_up[e] = sum of dh^T x_t,
           ddown_bias[e] = sum of w_tj dy_t,  dgate_up_bias[e] = sum of dh   over the slots of expert e.

The T * k slots become the rows of matrices, sorted by expert. `routing` permutes tokens to rows and back, and adds the
biases of the down projections. `grouped_mm` computes the matrix products, and `weighted_glu` the activation between
them. The sums over slots run in fp32, in the order of the slots.

The stacked weights may have low-rank updates (LoRA, Hu et al. 2021), one pair of matrices for each expert. A product
with weight W[e], update s B[e] A[e] and rows x is then, as in `lora`:

Forward:   h = x @ A[e].T,  y = x @ W[e].T + s h @ B[e].T.
Backward:  dh = s dy @ B[e],  dx = dy @ W[e] + dh @ A[e],  dA[e] = dh.T @ x,  dB[e] = s dy.T @ h.

W + s B A, which is as large as all experts, is never computed.

Saved: the inputs (x only for the gradients of gate_up), the hidden rows, the row of each slot, and h of the updates,
which have few columns. Recomputed in backward: a, and the copies of x and dy for each slot.
An expert id outside [0, E) makes its token's output NaN on a GPU. On a CPU or with LIGERZOO_DEBUG=1 it is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels.autograd import FusedContext, FusedFunction, if_needed, once_differentiable
from ligerzoo.kernels.dispatch import (
    DEBUG,
    Backend,
    accumulation_dtype,
    autocast,
    empty_gradient,
    empty_result,
    uses_triton,
)
from ligerzoo.kernels.gating import ExpertActivation, Gating, combined, gating
from ligerzoo.kernels.grouped_mm import grouped_outer_product, grouped_product, grouped_sum
from ligerzoo.kernels.low_rank import LowRank, low_rank_product
from ligerzoo.kernels.recompute import Recompute, recomputable
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.routing import SlotBias, permute, sort_by_expert, unpermute
from ligerzoo.kernels.weighted_glu import Biases, row_values, weighted_glu, weighted_glu_backward
from ligerzoo.tensor_checks import check_floats, check_optional_floats, check_tensor, shape_or_dtype_error


def reference(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: ExpertActivation = "silu",
    gate_up_update: LowRank | None = None,
    down_update: LowRank | None = None,
) -> Tensor:
    """`experts_mlp` in plain torch, one expert after the other: the specification and the test oracle."""
    x, gate_up, down, gate_up_bias, down_bias = autocast(x, gate_up, down, gate_up_bias, down_bias)

    def project(rows: Tensor, weight: Tensor, bias: Tensor | None, update: LowRank | None, expert: int) -> Tensor:
        y = F.linear(rows, weight[expert], None if bias is None else bias[expert])
        if update is None:
            return y
        return y + low_rank_product(rows, LowRank(update.a[expert], update.b[expert], update.scale))

    y = torch.zeros_like(x, dtype=accumulation_dtype(x.dtype))
    for expert in range(gate_up.shape[0]):
        token, slot = torch.where(expert_ids == expert)
        active = combined(project(x[token], gate_up, gate_up_bias, gate_up_update, expert), gating(activation))
        expert_y = project(active, down, down_bias, down_update, expert)
        y = y.index_add(0, token, expert_weights[token, slot, None] * expert_y.to(y.dtype))
    return y.to(x.dtype)


class ExpertSlots(NamedTuple):
    """The experts of each token, (T, k) each."""

    expert_ids: Tensor
    weights: Tensor


class Projection(NamedTuple):
    """A projection of all experts.

    Attributes:
        weight: (E, O, K).
        bias: (E, O), or None for 0.
        a: (E, r, K), or None for no update of the weight.
        b: (E, O, r), or None.
        scale: factor of b @ a.
    """

    weight: Tensor
    bias: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0

    @property
    def update_size(self) -> int:
        """Elements of one expert's A and B."""
        return sum(t[0].numel() for t in (self.a, self.b) if t is not None)

    @property
    def size(self) -> int:
        """Elements of one expert's matrices."""
        return self.weight[0].numel() + self.update_size


class Hidden(NamedTuple):
    """What backward reads of the forward pass.

    Attributes:
        hidden: (T * k, 2I), gate and up without biases; (T * k, I) without a gate.
        rows: (T, k), see `sort_by_expert`.
        bounds: (E + 1,), see `sort_by_expert`.
        gate_up_h: (T * k, r), h of the gate and up projections; None if these have no update.
        down_h: likewise.
    """

    hidden: Tensor
    rows: Tensor
    bounds: Tensor
    gate_up_h: Tensor | None
    down_h: Tensor | None


_ADDED = 4
"""Passes over a product to add that of an update: it is written, both are read, and the sum is written."""

_Output = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""y and the fields of `Hidden`, without elements for None."""


def _product(x: Tensor, projection: Projection, ends: Tensor, triton: bool) -> tuple[Tensor, Tensor]:
    """Returns y and h; h has no elements without an update."""
    weight, _, a, b, scale = projection
    y = grouped_product(x, weight.mT, ends, triton)
    if a is None or b is None:
        return y, x.new_empty(0)
    h = grouped_product(x, a.mT, ends, triton)
    return y.add_(grouped_product(h, b.mT, ends, triton), alpha=scale), h


def _inner_gradient(dy: Tensor, projection: Projection, ends: Tensor, triton: bool) -> Tensor | None:
    """Returns dh; None without an update."""
    if projection.b is None:
        return None
    return grouped_product(dy, projection.b, ends, triton).mul_(projection.scale)


def _input_gradient(dy: Tensor, dh: Tensor | None, projection: Projection, ends: Tensor, triton: bool) -> Tensor:
    dx = grouped_product(dy, projection.weight, ends, triton)
    return dx if dh is None or projection.a is None else dx.add_(grouped_product(dh, projection.a, ends, triton))


def _forward_fake(x: Tensor, slots: ExpertSlots, gate_up: Projection, down: Projection) -> _Output:
    ids, weight = slots.expert_ids, gate_up.weight
    gate_up_h, down_h = (x.new_empty(0 if p.a is None else (ids.numel(), p.a.shape[1])) for p in (gate_up, down))
    rows, bounds = (ids.new_empty(shape, dtype=torch.int32) for shape in (ids.shape, (weight.shape[0] + 1,)))
    return empty_result(x), x.new_empty((ids.numel(), weight.shape[1])), rows, bounds, gate_up_h, down_h


def _flops(slots: ExpertSlots, gate_up: Projection, down: Projection) -> int:
    return 2 * slots.expert_ids.numel() * (gate_up.size + down.size)


def _forward_peak(x: Tensor, slots: ExpertSlots, gate_up: Projection, down: Projection) -> int:
    """At the last step: hidden and active rows, their products, and y or the products of the update."""
    (_, n_features, n_inner), n_rows = down.weight.shape, slots.expert_ids.numel()
    last = x.numel() if down.a is None else max(x.numel(), n_rows * n_features)
    return x.element_size() * (n_rows * (gate_up.weight.shape[1] + n_inner + n_features) + last) + 4 * n_rows


def _forward_moved(x: Tensor, slots: ExpertSlots, gate_up: Projection, down: Projection) -> int:
    """Rows of x and y, and the active ones, are written and read, the hidden ones read; updates are added to them."""
    (_, n_features, n_inner), n_rows = down.weight.shape, slots.expert_ids.numel()
    n_hidden = gate_up.weight.shape[1]
    updates = _ADDED * ((gate_up.a is not None) * n_hidden + (down.a is not None) * n_features)
    return x.element_size() * n_rows * (4 * n_features + n_hidden + 2 * n_inner + updates)


@register("experts_forward", fake=_forward_fake, flops=_flops, peak=_forward_peak, moved=_forward_moved)
def _forward(
    x: Tensor, slots: ExpertSlots, gate_up: Projection, down: Projection, gating: Gating, triton: bool
) -> _Output:
    n_experts = len(gate_up.weight)
    check_ids(slots.expert_ids, n_experts)
    rows, bounds = sort_by_expert(slots.expert_ids, n_experts)
    hidden, gate_up_h = _product(permute(x, rows, triton), gate_up, bounds[1:], triton)
    active = weighted_glu(hidden, *slots, rows, gate_up.bias, gating, triton)
    values, down_h = _product(active, down, bounds[1:], triton)
    bias = None if down.bias is None else SlotBias(down.bias, *slots)
    return unpermute(values, rows, bounds, triton, bias), hidden, rows, bounds, gate_up_h, down_h


@register(
    "experts_gate_up",
    fake=lambda x, gate_up, rows: x.new_empty((rows.numel(), gate_up.shape[1])),
    flops=lambda gate_up, rows: 2 * rows.numel() * gate_up[0].numel(),
    peak=lambda x, gate_up, rows: x.element_size() * rows.numel() * (x.shape[1] + gate_up.shape[1]),
)
def _gate_and_up(x: Tensor, gate_up: Tensor, rows: Tensor, bounds: Tensor, triton: bool) -> Tensor:
    """Returns the hidden rows of projections without updates."""
    return grouped_product(permute(x, rows, triton), gate_up.mT, bounds[1:], triton)


class _Needs(NamedTuple):
    """Which gradients to compute."""

    x: bool
    weights: bool
    gate_up: bool
    gate_up_bias: bool
    gate_up_update: bool
    down: bool
    down_bias: bool
    down_update: bool

    @classmethod
    def of(cls, needs_input_grad: Sequence[bool]) -> _Needs:
        """Reads them from the context of `_ExpertsMLP`."""
        x, _, weights, gate_up, gate_up_bias, gate_up_a, gate_up_b, *of_down, _ = needs_input_grad
        down, down_bias, down_a, down_b = of_down
        return cls(
            x, weights, gate_up, gate_up_bias, gate_up_a or gate_up_b, down, down_bias, down_update=down_a or down_b
        )

    @property
    def hidden(self) -> bool:
        """Whether the gradient of the hidden rows is needed."""
        return self.x or self.weights or self.gate_up or self.gate_up_bias or self.gate_up_update

    @property
    def active(self) -> bool:
        """Whether the inputs of the down projections are."""
        return self.down or self.down_update


class _Gradients(NamedTuple):
    """Without elements if not needed."""

    x: Tensor
    weights: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor
    gate_up_a: Tensor
    gate_up_b: Tensor
    down: Tensor
    down_bias: Tensor
    down_a: Tensor
    down_b: Tensor


def _allocate_gradients(
    x: Tensor, slots: ExpertSlots, gate_up: Projection, down: Projection, needs: _Needs
) -> _Gradients:
    def gradient(t: Tensor | None, needed: bool) -> Tensor:
        return x.new_empty(0) if t is None else empty_gradient(t, needed)

    of_gate_up = needs.gate_up, needs.gate_up_bias, needs.gate_up_update, needs.gate_up_update
    of_down = needs.down, needs.down_bias, needs.down_update, needs.down_update
    return _Gradients(
        empty_gradient(x, needs.x),
        empty_gradient(slots.weights, needs.weights),
        *map(gradient, gate_up[:4], of_gate_up),
        *map(gradient, down[:4], of_down),
    )


def _backward_flops(saved: Hidden, gate_up: Projection, down: Projection, needs: _Needs) -> int:
    products = needs.hidden * down.size + needs.down * down.weight[0].numel() + needs.down_update * down.update_size
    products += needs.x * gate_up.size + needs.gate_up * gate_up.weight[0].numel()
    return 2 * saved.rows.numel() * (products + needs.gate_up_update * gate_up.update_size)


def _backward_peak(
    x: Tensor, slots: ExpertSlots, gate_up: Projection, down: Projection, saved: Hidden, needs: _Needs
) -> int:
    n_rows, (_, n_features, n_inner) = saved.rows.numel(), down.weight.shape
    dhidden, active = gate_up.weight.shape[1] * needs.hidden, n_inner * (needs.active or not needs.hidden)
    dactive, added = n_inner * needs.hidden, n_features * (gate_up.a is not None)
    ddown, dx = down.weight.numel() * needs.down, x.numel() * needs.x
    dgate_up = gate_up.weight.numel() * needs.gate_up
    steps = [
        n_rows * (n_features + dactive + dhidden + active),  # gradients of the activation
        n_rows * (n_features + dhidden + active) + ddown,
        (n_rows * (dhidden + n_features) + max(ddown + dx, n_rows * added)) * (needs.x or needs.gate_up) + dgate_up,
    ]
    return x.element_size() * max(steps) + slots.weights.element_size() * n_rows * needs.weights


def _backward_moved(x: Tensor, gate_up: Projection, down: Projection, saved: Hidden, needs: _Needs) -> int:
    """As `_forward_moved`, for rows of dy, x and dx, and of the gradients of active and hidden ones."""
    n_rows, (_, n_features, n_inner) = saved.rows.numel(), down.weight.shape
    features = 2 + needs.down + 2 * needs.x + 2 * (needs.gate_up or needs.gate_up_update) + 2 * needs.down_update
    hidden = needs.hidden + needs.x + needs.gate_up + 2 * needs.gate_up_update
    inner = 2 * needs.hidden + 2 * needs.active
    updates = _ADDED * ((down.a is not None) * n_inner + (gate_up.a is not None) * n_features)
    moved = features * n_features + hidden * gate_up.weight.shape[1] + inner * n_inner + updates
    return x.element_size() * n_rows * moved


@register(
    "experts_backward", fake=_allocate_gradients, flops=_backward_flops, peak=_backward_peak, moved=_backward_moved
)
def _backward(
    dy: Tensor, x: Tensor, slots: ExpertSlots, gate_up: Projection, down: Projection, saved: Hidden, gating: Gating,
    triton: bool, needs: _Needs,
) -> _Gradients:  # fmt: skip
    found: dict[str, Tensor] = {}
    hidden, rows, bounds, gate_up_h, down_h = saved
    ends, dy_rows = bounds[1:], permute(dy, rows, triton)
    dh = _inner_gradient(dy_rows, down, ends, triton) if needs.hidden or needs.down_update else None
    if needs.hidden:
        dactive = _input_gradient(dy_rows, dh, down, ends, triton)
        biases = Biases(gate_up.bias, down.bias)
        dhidden, dweights, active = weighted_glu_backward(
            dactive, dy_rows, hidden, *slots, rows, bounds, biases, gating, needs.active, triton
        )
        del dactive
        if needs.weights:
            found["weights"] = dweights
    elif needs.active:
        active = weighted_glu(hidden, *slots, rows, gate_up.bias, gating, triton)
    if needs.down:
        found["down"] = grouped_outer_product(dy_rows, active, ends, triton)
    if needs.down_update and dh is not None and down_h is not None:
        found["down_a"] = grouped_outer_product(dh, active, ends, triton)
        found["down_b"] = grouped_outer_product(dy_rows, down_h, ends, triton).mul_(down.scale)
    if needs.down_bias and down.bias is not None:
        weights = row_values(slots.weights, rows)[:, 0]
        found["down_bias"] = grouped_sum(dy_rows, weights, ends, down.bias.dtype, triton)
    dy_rows = active = dy  # frees their memory before the largest gradients are allocated
    dh = _inner_gradient(dhidden, gate_up, ends, triton) if needs.hidden else None
    if needs.x:
        found["x"] = unpermute(_input_gradient(dhidden, dh, gate_up, ends, triton), rows, bounds, triton)
    if needs.gate_up:
        found["gate_up"] = grouped_outer_product(dhidden, permute(x, rows, triton), ends, triton)
    if needs.gate_up_update and dh is not None and gate_up_h is not None:
        found["gate_up_a"] = grouped_outer_product(dh, permute(x, rows, triton), ends, triton)
        found["gate_up_b"] = grouped_outer_product(dhidden, gate_up_h, ends, triton).mul_(gate_up.scale)
    if needs.gate_up_bias and gate_up.bias is not None:
        found["gate_up_bias"] = grouped_sum(dhidden, None, ends, gate_up.bias.dtype, triton)
    none = _allocate_gradients(x, slots, gate_up, down, _Needs(*[False] * len(needs)))
    return none._replace(**found)


class _Options(NamedTuple):
    """The numbers of `_ExpertsMLP`: the scales of the updates, the activation, and whether Triton computes it."""

    gate_up_scale: float
    down_scale: float
    gating: Gating
    triton: bool


def _operands(tensors: Sequence[Any], options: _Options) -> tuple[ExpertSlots, Projection, Projection]:
    """Returns the slots and projections that `_ExpertsMLP` takes as tensors: the ids and weights, then four of each."""
    expert_ids, weights, *of_projections = tensors
    gate_up = Projection(*of_projections[:4])._replace(scale=options.gate_up_scale)
    down = Projection(*of_projections[4:])._replace(scale=options.down_scale)
    return ExpertSlots(expert_ids, weights), gate_up, down


class _ExpertsMLP(FusedFunction):
    """The arguments are x, the tensors of the slots and of both projections, and the options."""

    @staticmethod
    def forward(ctx: FusedContext, x: Tensor, *arguments: Any) -> Tensor:
        *tensors, options = arguments
        slots, gate_up, down = _operands(tensors, options)
        y, hidden, rows, bounds, *low = _forward(x, slots, gate_up, down, options.gating, options.triton)
        if gate_up.a is None and down.a is None:
            # A checkpointed block computes the hidden rows again anyway, with the output.
            inputs = x, gate_up.weight, rows, bounds, options.triton
            recomputable((hidden,), _gate_and_up, *inputs, level=Recompute.MLP, in_checkpoints=False)
        needs = _Needs.of(ctx.needs_input_grad)
        saved_x = x if needs.gate_up or needs.gate_up_update else None
        saved_low = (None if p.a is None else h for h, p in zip(low, (gate_up, down), strict=True))
        ctx.save_for_backward(saved_x, hidden, rows, bounds, *saved_low, *tensors)
        ctx.options = options
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, rows, bounds, gate_up_h, down_h, *tensors = ctx.saved_tensors
        slots, gate_up, down = _operands(tensors, ctx.options)
        saved, needs = Hidden(hidden, rows, bounds, gate_up_h, down_h), _Needs.of(ctx.needs_input_grad)
        *_, gating, triton = ctx.options
        x = dy if x is None else x
        dx, dweights, *others = _backward(dy, x, slots, gate_up, down, saved, gating, triton, needs)
        return if_needed((dx, None, dweights, *others, None), ctx.needs_input_grad)


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
    name: str, x: Tensor, slots: ExpertSlots, gate_up: Tensor, down: Tensor, activation: ExpertActivation
) -> None:
    """Raises ValueError unless the shapes and the dtypes of the arguments of `experts_mlp` match."""
    n_experts, n_features, parts = gate_up.shape[0], x.shape[-1], gating(activation).parts
    expert_ids, expert_weights = slots
    if (
        x.dim() != 2
        or expert_ids.dim() != 2
        or len(x) != len(expert_ids)
        or expert_ids.shape != expert_weights.shape
        or gate_up.shape != (n_experts, parts * down.shape[-1], n_features)
        or down.shape[:-1] != (n_experts, n_features)
        or not x.dtype == gate_up.dtype == down.dtype
    ):
        first = "(E, 2I, H)" if parts == 2 else "(E, I, H)"
        expected = f"(T, H), (T, k) of integers, (T, k), {first} and (E, H, I), x and weights in one dtype"
        tensors = {"x": x, "expert_ids": expert_ids, "expert_weights": expert_weights, "gate_up": gate_up, "down": down}
        raise shape_or_dtype_error(name, expected, **tensors)


def experts_mlp(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: ExpertActivation = "silu",
    backend: Backend = "auto",
) -> Tensor:
    """Computes each token's weighted sum of k expert MLPs.

    `y_t = sum_j expert_weights[t, j] * (down[e] @ (act(gate) * up) + down_bias[e])` with `e = expert_ids[t, j]`, where
    `gate` and `up` are the halves of `gate_up[e] @ x_t + gate_up_bias[e]`; experts without a gate, see `Ungated`, apply
    the activation to it. Deterministic. Without a host sync, except in fp64 and for backend="torch".

    Args:
        x: (T, H) hidden states of the tokens, any strides.
        expert_ids: (T, k) integers in [0, E).
        expert_weights: (T, k), of any floating-point dtype.
        gate_up: (E, 2I, H), the gate's rows first, or (E, I, H) without a gate, in the dtype of `x`.
        down: (E, H, I), in the dtype of `x`.
        gate_up_bias: (E, 2I) or (E, I), of any floating-point dtype; None for 0.
        down_bias: (E, H), of any floating-point dtype; None for 0.
        activation: the activation of the gate, see `activation_linear`; or `ClampedSwiGLU`, instead of act(gate) * up;
            or `Ungated`, without a gate.
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
    slots = ExpertSlots(expert_ids, expert_weights)
    check_experts("experts_mlp", x, slots, gate_up, down, activation)
    check_biases("experts_mlp", gate_up, down, gate_up_bias, down_bias)
    gate_up_bias, down_bias = contiguous_biases(gate_up_bias, down_bias)
    gate_up_projection, down_projection = Projection(gate_up, gate_up_bias), Projection(down, down_bias)
    return compute_experts(x, slots, gate_up_projection, down_projection, activation, backend)


def compute_experts(
    x: Tensor, slots: ExpertSlots, gate_up: Projection, down: Projection, activation: ExpertActivation, backend: Backend
) -> Tensor:
    """`experts_mlp` of projections that may have updates, without checks and autocast."""
    fixed = [t for t in (gate_up.weight, down.weight, gate_up.bias, down.bias) if t is not None]
    triton = uses_triton(x, slots.weights, *fixed, backend=backend)
    options = _Options(gate_up.scale, down.scale, gating(activation), triton)
    return _ExpertsMLP.apply(x, *slots, *gate_up[:4], *down[:4], options)
