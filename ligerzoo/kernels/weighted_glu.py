"""The activation between the two matrix products of experts: `w * act(gate) * up`, w the weight of the row's slot.

With gate and up the halves of a row h plus a bias, c(gate, up) their combination (see `gating`) and b a row's bias of
the down projection (without a gate, c(h), for the whole row):

Forward:   a = w * c(gate, up),   in fp32, rounded once.
Backward:  dw = sum over the row of da * c(gate, up), plus sum of dy * b,
           dgate = da * w * dc/dgate,   dup = da * w * dc/dup.

The weight is applied before the down projection, so its gradient does not need that projection's result. A program
handles the row of one slot. `rows` and `bounds` are those of `routing.sort_by_expert`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ligerzoo.kernels.dispatch import accumulation_dtype, cdiv, empty_result, next_power_of_2
from ligerzoo.kernels.gating import (
    Gating,
    combined,
    combined_backward,
    combined_factors,
    gate_and_up,
    load_gate_and_up,
)
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.routing import permute
from ligerzoo.kernels.tiling import row_and_columns

_MAX_BLOCK, _MAX_BACKWARD_BLOCK = 1024, 256


class Biases(NamedTuple):
    """Biases of experts.

    Attributes:
        gate_up: (E, 2I), or (E, I) without a gate; None for 0.
        down: (E, H); None for 0.
    """

    gate_up: Tensor | None
    down: Tensor | None


class _Slots(NamedTuple):
    """The slots of tokens: their weights, rows and experts, the number of experts, and the bounds for backward."""

    weights: Tensor
    rows: Tensor
    expert_ids: Tensor
    n_experts: int
    bounds: Tensor | None = None


class _Gradients(NamedTuple):
    """What the backward kernel stores; None for a recomputed result that is not needed."""

    hidden: Tensor
    weights: Tensor
    active: Tensor | None


@jit
def _expert_of(slots, slot):
    """The expert of a slot, and whether it exists."""
    expert = tl.load(slots.expert_ids + slot).to(tl.int64)
    return expert, (expert >= 0) & (expert < slots.n_experts)


@kernel
def _forward_kernel(
    hidden_ptr,
    slots,
    bias_ptr,
    active_ptr,
    n_cols,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    PARTS: tl.constexpr,
):
    slot, cols = row_and_columns(n_cols, BLOCK)
    mask = cols < n_cols
    row = tl.load(slots.rows + slot).to(tl.int64)
    weight = tl.load(slots.weights + slot).to(tl.float32)
    gate, up = load_gate_and_up(hidden_ptr, row, n_cols, cols, mask, PARTS)
    if bias_ptr is not None:
        expert, exists = _expert_of(slots, slot)
        gate_bias, up_bias = load_gate_and_up(bias_ptr, expert, n_cols, cols, mask & exists, PARTS)
        gate, up = gate + gate_bias, up + up_bias
    active, _, _ = gate_and_up(gate, up, ACTIVATION, LIMIT, ALPHA, PARTS, hidden_ptr.dtype.element_ty == tl.float32)
    tl.store(active_ptr + row * n_cols + cols, (weight * active).to(active_ptr.dtype.element_ty), mask=mask)


@kernel
def _backward_kernel(
    da_ptr,
    dy_ptr,
    hidden_ptr,
    slots,
    biases,
    results,
    n_cols,
    n_outputs,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    PARTS: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(slots.rows + slot).to(tl.int64)
    weight = tl.load(slots.weights + slot).to(tl.float32)
    expert, exists = _expert_of(slots, slot)
    dweight = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        dactive = tl.load(da_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        gate, up = load_gate_and_up(hidden_ptr, row, n_cols, cols, mask, PARTS)
        if biases.gate_up is not None:
            gate_bias, up_bias = load_gate_and_up(biases.gate_up, expert, n_cols, cols, mask & exists, PARTS)
            gate, up = gate + gate_bias, up + up_bias
        exact: tl.constexpr = hidden_ptr.dtype.element_ty == tl.float32
        active, dgate, dup = gate_and_up(gate, up, ACTIVATION, LIMIT, ALPHA, PARTS, exact)
        dweight += dactive * active
        dactive *= weight
        dhidden_ptrs = results.hidden + PARTS * row * n_cols + cols
        tl.store(dhidden_ptrs, (dactive * dgate).to(results.hidden.dtype.element_ty), mask=mask)
        if PARTS == 2:
            tl.store(dhidden_ptrs + n_cols, (dactive * dup).to(results.hidden.dtype.element_ty), mask=mask)
        if results.active is not None:
            active = weight * active
            tl.store(results.active + row * n_cols + cols, active.to(results.active.dtype.element_ty), mask=mask)
    if biases.down is not None:
        for start in range(0, n_outputs, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            mask = (cols < n_outputs) & exists
            dy = tl.load(dy_ptr + row * n_outputs + cols, mask=mask, other=0.0).to(tl.float32)
            dweight += dy * tl.load(biases.down + expert * n_outputs + cols, mask=mask, other=0.0).to(tl.float32)
    is_routed = (tl.load(slots.bounds) <= row) & (row < tl.load(slots.bounds + slots.n_experts))
    total = tl.where(is_routed, tl.sum(dweight, axis=0), float("nan"))
    tl.store(results.weights + slot, total.to(results.weights.dtype.element_ty))


def row_values(slot_values: Tensor, rows: Tensor) -> Tensor:
    """(T, k) -> (T * k, 1): the value of each row's slot."""
    return permute(slot_values.reshape(-1, 1), rows.view(-1, 1), False)


def _with_bias(hidden: Tensor, rows: Tensor, bias: Tensor | None, expert_ids: Tensor) -> Tensor:
    """Returns the hidden rows plus the biases of their experts, in at least fp32."""
    wide = hidden.to(accumulation_dtype(hidden.dtype))
    return wide if bias is None else wide + bias[row_values(expert_ids, rows)[:, 0]]


def weighted_glu(
    hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor, rows: Tensor, bias: Tensor | None, gating: Gating,
    triton: bool,
) -> Tensor:  # fmt: skip
    """Computes the input of the down projections: (T * k, 2I), or (T * k, I) without a gate -> (T * k, I)."""
    if not triton:
        active = combined(_with_bias(hidden, rows, bias, expert_ids), gating)
        return (row_values(expert_weights, rows) * active).to(hidden.dtype)
    n_cols = hidden.shape[1] // gating.parts
    active, block = hidden.new_empty((hidden.shape[0], n_cols)), min(_MAX_BLOCK, next_power_of_2(n_cols))
    slots = _Slots(expert_weights.contiguous(), rows, expert_ids.contiguous(), 0 if bias is None else len(bias))
    programs = hidden.shape[0] * cdiv(n_cols, block)
    _forward_kernel[programs](hidden, slots, bias, active, n_cols, block, *gating, num_warps=4)
    return active


def weighted_glu_backward(
    dactive: Tensor, dy_rows: Tensor, hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor, rows: Tensor,
    bounds: Tensor, biases: Biases, gating: Gating, needs_active: bool, triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of `hidden` and of `expert_weights`, and the result of `weighted_glu`, recomputed.

    With Triton the last is empty unless `needs_active`. `dy_rows` is the gradient of the down projections' results.
    """
    if not triton:
        weight, features = row_values(expert_weights, rows), _with_bias(hidden, rows, biases.gate_up, expert_ids)
        activated, factor = combined_factors(features, gating)
        dweights = (dactive * activated * factor).sum(-1)
        if biases.down is not None:
            dweights = dweights + (dy_rows.to(dweights.dtype) * biases.down[row_values(expert_ids, rows)[:, 0]]).sum(-1)
        return (
            combined_backward(weight * dactive, features, gating).to(hidden.dtype),
            dweights[rows].to(expert_weights.dtype),
            (weight * activated * factor).to(hidden.dtype),
        )
    n_rows, n_cols = dactive.shape
    dhidden, dweights = empty_result(hidden), expert_weights.new_empty(rows.shape)
    active = hidden.new_empty((n_rows if needs_active else 0, n_cols))
    slots = _Slots(expert_weights.contiguous(), rows, expert_ids.contiguous(), len(bounds) - 1, bounds)
    results = _Gradients(dhidden, dweights, active if needs_active else None)
    block = min(_MAX_BACKWARD_BLOCK, next_power_of_2(n_cols))
    _backward_kernel[n_rows](
        dactive, dy_rows, hidden, slots, biases, results, n_cols, dy_rows.shape[1], block, *gating, num_warps=1
    )
    return dhidden, dweights, active
