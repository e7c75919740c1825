"""Mixture of experts whose stacked weights have low-rank updates (LoRA, Hu et al. 2021), one pair of matrices each.

As `experts`, with the products of a linear layer with weight W[e], update s B[e] A[e] and rows x (see `lora`):

Forward:   h = x @ A[e].T,   y = x @ W[e].T + s h @ B[e].T.
Backward:  dh = s dy @ B[e],   dx = dy @ W[e] + dh @ A[e],   dA[e] = dh.T @ x,   dB[e] = s dy.T @ h.

The weights themselves are frozen: W + s B A, which is as large as all experts, is never computed, and no gradient of W.

Saved: the inputs (x only for dA of the gate and up projections), the hidden rows and the h, which have few columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels.autograd import FusedFunction, once_differentiable
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, autocast, empty_gradient, uses_triton
from ligerzoo.kernels.experts import check_biases, check_experts, check_ids, contiguous_biases
from ligerzoo.kernels.gating import GatedActivation, Gating, gated, gating
from ligerzoo.kernels.grouped_mm import grouped_outer_product, grouped_product
from ligerzoo.kernels.lora import LowRank, low_rank_product
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.routing import SlotBias, permute, sort_by_expert, unpermute
from ligerzoo.kernels.weighted_glu import Biases, weighted_glu, weighted_glu_backward
from ligerzoo.tensor_checks import check_floats, check_optional_floats, check_tensor


class Projection(NamedTuple):
    """A stacked weight and its update.

    Attributes:
        weight: (E, O, K).
        a: (E, r, K) or None for no update.
        b: (E, O, r) or None.
        scale: factor of b @ a.
    """

    weight: Tensor
    a: Tensor | None
    b: Tensor | None
    scale: float


def reference(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_update: LowRank | None,
    down_update: LowRank | None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: GatedActivation = "silu",
) -> Tensor:
    """`lora_experts_mlp` in plain torch, one expert after the other: the specification and the test oracle."""
    x, gate_up, down, gate_up_bias, down_bias = autocast(x, gate_up, down, gate_up_bias, down_bias)

    def project(rows: Tensor, weight: Tensor, bias: Tensor | None, update: LowRank | None, expert: int) -> Tensor:
        y = F.linear(rows, weight[expert], None if bias is None else bias[expert])
        if update is None:
            return y
        return y + low_rank_product(rows, LowRank(update.a[expert], update.b[expert], update.scale))

    y = torch.zeros_like(x, dtype=accumulation_dtype(x.dtype))
    for expert in range(gate_up.shape[0]):
        token, slot = torch.where(expert_ids == expert)
        gate, up = project(x[token], gate_up, gate_up_bias, gate_up_update, expert).chunk(2, -1)
        expert_y = project(gated(gate, up, gating(activation)), down, down_bias, down_update, expert)
        y = y.index_add(0, token, expert_weights[token, slot, None] * expert_y.to(y.dtype))
    return y.to(x.dtype)


def _product(x: Tensor, projection: Projection, ends: Tensor, triton: bool) -> tuple[Tensor, Tensor]:
    """Returns y and h; h has no elements without an update."""
    weight, a, b, scale = projection
    y = grouped_product(x, weight.mT, ends, triton)
    if a is None or b is None:
        return y, x.new_empty(0)
    h = grouped_product(x, a.mT, ends, triton)
    return y.add_(grouped_product(h, b.mT, ends, triton), alpha=scale), h


def _inner_gradient(dy: Tensor, projection: Projection, ends: Tensor, triton: bool) -> Tensor:
    """Returns dh; without elements if there is no update."""
    if projection.b is None:
        return dy.new_empty(0)
    return grouped_product(dy, projection.b, ends, triton).mul_(projection.scale)


def _input_gradient(dy: Tensor, dh: Tensor, projection: Projection, ends: Tensor, triton: bool) -> Tensor:
    dx = grouped_product(dy, projection.weight, ends, triton)
    return dx if projection.a is None else dx.add_(grouped_product(dh, projection.a, ends, triton))


def _update_gradients(
    dy: Tensor, dh: Tensor, x: Tensor, h: Tensor, scale: float, ends: Tensor, triton: bool
) -> tuple[Tensor, Tensor]:
    """Returns dA and dB."""
    da = grouped_outer_product(dh, x, ends, triton)
    return da, grouped_outer_product(dy, h, ends, triton).mul_(scale)


def _forward_fake(
    x: Tensor, expert_ids: Tensor, gate_up: Projection, down: Projection
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    slots = expert_ids.numel()
    hidden = x.new_empty((slots, gate_up.weight.shape[1]))
    rows = expert_ids.new_empty(expert_ids.shape, dtype=torch.int32)
    bounds = expert_ids.new_empty((len(gate_up.weight) + 1,), dtype=torch.int32)
    low = [x.new_empty(0 if p.a is None else (slots, p.a.shape[1])) for p in (gate_up, down)]
    return x.new_empty(x.shape), hidden, rows, bounds, low[0], low[1]


def _flops(expert_ids: Tensor, gate_up: Projection, down: Projection) -> int:
    return 2 * expert_ids.numel() * sum(_size(projection) for projection in (gate_up, down))


def _size(projection: Projection) -> int:
    """Elements of the matrices of one expert."""
    return sum(t[0].numel() for t in projection[:3] if t is not None)


@register("lora_experts_forward", fake=_forward_fake, flops=_flops)
def _forward(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Projection, down: Projection, biases: Biases,
    gating: Gating, triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns y, the hidden rows, the rows and bounds of `sort_by_expert`, and h of both projections."""
    check_ids(expert_ids, len(gate_up.weight))
    rows, bounds = sort_by_expert(expert_ids, len(gate_up.weight))
    hidden, gate_up_h = _product(permute(x, rows, triton), gate_up, bounds[1:], triton)
    active = weighted_glu(hidden, expert_ids, expert_weights, rows, biases.gate_up, gating, triton)
    y, down_h = _product(active, down, bounds[1:], triton)
    slot_bias = None if biases.down is None else SlotBias(biases.down, expert_ids, expert_weights)
    return unpermute(y, rows, bounds, triton, slot_bias), hidden, rows, bounds, gate_up_h, down_h


def _gradients_fake(
    x: Tensor, expert_weights: Tensor, gate_up: Projection, down: Projection, needs_x: bool, needs_gate_up: bool,
    needs_down: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    updates = [
        x.new_empty(0) if t is None else empty_gradient(t, needed)
        for p, needed in ((gate_up, needs_gate_up), (down, needs_down))
        for t in (p.a, p.b)
    ]
    dx, dweights = empty_gradient(x, needs_x), expert_weights.new_empty(expert_weights.shape)
    return dx, dweights, updates[0], updates[1], updates[2], updates[3]


def _gradients_flops(
    rows: Tensor, gate_up: Projection, down: Projection, needs_x: bool, needs_gate_up: bool, needs_down: bool
) -> int:
    products = _size(down) + needs_x * _size(gate_up)
    for projection, needed in ((gate_up, needs_gate_up), (down, needs_down)):
        products += needed * (_size(projection) - projection.weight[0].numel())
    return 2 * rows.numel() * products


@register("lora_experts_backward", fake=_gradients_fake, flops=_gradients_flops)
def _gradients(
    dy: Tensor, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Projection, down: Projection,
    hidden: Tensor, gate_up_h: Tensor, down_h: Tensor, rows: Tensor, bounds: Tensor, biases: Biases, gating: Gating,
    triton: bool, needs_x: bool, needs_gate_up: bool, needs_down: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of x, expert_weights, and A and B of both updates; without elements if not needed."""
    ends, dy_rows = bounds[1:], permute(dy, rows, triton)
    dx, da_gate_up, db_gate_up, da_down, db_down = (x.new_empty(0) for _ in range(5))
    dh = _inner_gradient(dy_rows, down, ends, triton)
    dactive = _input_gradient(dy_rows, dh, down, ends, triton)
    dhidden, dweights, active = weighted_glu_backward(
        dactive, dy_rows, hidden, expert_ids, expert_weights, rows, bounds, biases, gating, needs_down, triton
    )
    del dactive
    if needs_down:
        da_down, db_down = _update_gradients(dy_rows, dh, active, down_h, down.scale, ends, triton)
    del dy_rows, active
    dh = _inner_gradient(dhidden, gate_up, ends, triton)
    if needs_x:
        dx = unpermute(_input_gradient(dhidden, dh, gate_up, ends, triton), rows, bounds, triton)
    if needs_gate_up:
        x_rows = permute(x, rows, triton)
        da_gate_up, db_gate_up = _update_gradients(dhidden, dh, x_rows, gate_up_h, gate_up.scale, ends, triton)
    return dx, dweights, da_gate_up, db_gate_up, da_down, db_down


class _LoRAExperts(FusedFunction):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, expert_weights: Tensor, gate_up: Tensor, gate_up_a: Tensor | None,
        gate_up_b: Tensor | None, down: Tensor, down_a: Tensor | None, down_b: Tensor | None,
        scales: tuple[float, float], gate_up_bias: Tensor | None, down_bias: Tensor | None, expert_ids: Tensor,
        gating: Gating, triton: bool,
    ) -> Tensor:  # fmt: skip
        biases = Biases(gate_up_bias, down_bias)
        projections = Projection(gate_up, gate_up_a, gate_up_b, scales[0]), Projection(down, down_a, down_b, scales[1])
        y, hidden, rows, bounds, *low = _forward(x, expert_ids, expert_weights, *projections, biases, gating, triton)
        saved_x = x if gate_up_a is not None and any(ctx.needs_input_grad[3:5]) else None
        ctx.save_for_backward(
            saved_x, expert_ids, expert_weights, gate_up, gate_up_a, gate_up_b, down, down_a, down_b, hidden, *low,
            rows, bounds, *biases,
        )  # fmt: skip
        ctx.options = scales, gating, triton
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, expert_ids, expert_weights, gate_up, gate_up_a, gate_up_b, down, down_a, down_b, *saved = ctx.saved_tensors
        hidden, gate_up_h, down_h, rows, bounds, *biases = saved
        scales, gating, triton = ctx.options
        needs_x, needs_weights, _, *needs_gate_up, _, needs_a, needs_b = ctx.needs_input_grad[:8]
        gradients = _gradients(
            dy, dy if x is None else x, expert_ids, expert_weights,
            Projection(gate_up, gate_up_a, gate_up_b, scales[0]), Projection(down, down_a, down_b, scales[1]), hidden,
            gate_up_h, down_h, rows, bounds, Biases(*biases), gating, triton, needs_x,
            gate_up_a is not None and any(needs_gate_up), down_a is not None and (needs_a or needs_b),
        )  # fmt: skip
        needs = [needs_x, needs_weights, *(t is not None for t in (gate_up_a, gate_up_b, down_a, down_b))]
        dx, dweights, *updates = (g if needed else None for g, needed in zip(gradients, needs, strict=True))
        return dx, dweights, None, *updates[:2], None, *updates[2:], None, None, None, None, None, None


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
    activation: GatedActivation = "silu",
    backend: Backend = "auto",
) -> Tensor:
    """Computes `experts_mlp` with frozen weights that have low-rank updates.

    Args:
        x: (T, H) hidden states of the tokens, any strides.
        expert_ids: (T, k) integers in [0, E).
        expert_weights: (T, k), of any floating-point dtype.
        gate_up: (E, 2I, H), the gate's rows first, in the dtype of `x`. Gets no gradient.
        down: (E, H, I), in the dtype of `x`. Gets no gradient.
        gate_up_update: a (E, r, H) and b (E, 2I, r), of any floating-point dtype; None for no update.
        down_update: a (E, r, I) and b (E, H, r), of any floating-point dtype; None for no update.
        gate_up_bias: (E, 2I), of any floating-point dtype; None for 0. Gets no gradient.
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
    options = gating(activation)
    frozen = [t for t in (gate_up, down, gate_up_bias, down_bias) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in frozen):
        raise ValueError(
            f"{name}: the experts' weights or biases require gradients; expected frozen ones. "
            "Call requires_grad_(False) on them, or train the experts without low-rank updates"
        )
    x, gate_up, down, gate_up_bias, down_bias = autocast(x, gate_up, down, gate_up_bias, down_bias)
    check_experts(name, x, expert_ids, expert_weights, gate_up, down)
    check_biases(name, gate_up, down, gate_up_bias, down_bias)
    flat = []
    for label, weight, update in (("gate_up", gate_up, gate_up_update), ("down", down, down_update)):
        if update is None:
            flat += [weight, None, None]
            continue
        a, b, _ = update
        experts, outputs, features = weight.shape
        if a.shape != (experts, a.shape[1], features) or b.shape != (experts, outputs, a.shape[1]):
            raise ValueError(
                f"{name}: {label} is {tuple(weight.shape)}, and its update has a {tuple(a.shape)} and b "
                f"{tuple(b.shape)}; expected (E, O, K), (E, r, K) and (E, O, r)"
            )
        flat += [weight, a.to(x.dtype), b.to(x.dtype)]
    scales = tuple(1.0 if update is None else update.scale for update in (gate_up_update, down_update))
    triton = uses_triton(x, expert_weights, *frozen, backend=backend)
    biases = contiguous_biases(gate_up_bias, down_bias)
    return _LoRAExperts.apply(x, expert_weights, *flat, scales, *biases, expert_ids, options, triton)
