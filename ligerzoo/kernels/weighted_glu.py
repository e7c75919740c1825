"""The activation between the two matrix products of experts: `w * act(gate) * up`, w the weight of the row's slot.

With gate and up the halves of a row h plus a bias, c(gate, up) their combination (see `gating`) and b a row's bias of
the down projection:

Forward:   a = w * c(gate, up),   in fp32, rounded once.
Backward:  dw = sum over the row of da * c(gate, up), plus sum of dy * b,
           dgate = da * w * dc/dgate,   dup = da * w * dc/dup.

The weight is applied before the down projection, so its gradient does not need that projection's result. A program
handles the row of one slot. `rows` and `bounds` are those of `routing.sort_by_expert`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import accumulation_dtype, cdiv, next_power_of_2
from ligerzoo.kernels.gating import Gating, gate_and_up, gated, gated_backward, gated_factors
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.routing import permute
from ligerzoo.kernels.tiling import row_and_columns

_MAX_BLOCK, _MAX_BACKWARD_BLOCK = 1024, 256


class Biases(NamedTuple):
    """Biases of experts.

    Attributes:
        gate_up: (E, 2I); None for 0.
        down: (E, H); None for 0.
    """

    gate_up: Tensor | None
    down: Tensor | None


@jit
def _expert_of(expert_ptr, slot, n_experts):
    """The expert of a slot, and whether it exists."""
    expert = tl.load(expert_ptr + slot).to(tl.int64)
    return expert, (expert >= 0) & (expert < n_experts)


@kernel
def _forward_kernel(
    hidden_ptr, weight_ptr, row_ptr, bias_ptr, expert_ptr, active_ptr, n_cols, n_experts, BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
):  # fmt: skip
    slot, cols = row_and_columns(n_cols, BLOCK)
    mask = cols < n_cols
    row = tl.load(row_ptr + slot).to(tl.int64)
    weight = tl.load(weight_ptr + slot).to(tl.float32)
    gate = tl.load(hidden_ptr + 2 * row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(hidden_ptr + (2 * row + 1) * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        expert, exists = _expert_of(expert_ptr, slot, n_experts)
        gate += tl.load(bias_ptr + 2 * expert * n_cols + cols, mask=mask & exists, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + (2 * expert + 1) * n_cols + cols, mask=mask & exists, other=0.0).to(tl.float32)
    active, _, _ = gate_and_up(gate, up, ACTIVATION, LIMIT, ALPHA, hidden_ptr.dtype.element_ty == tl.float32)
    tl.store(active_ptr + row * n_cols + cols, (weight * active).to(active_ptr.dtype.element_ty), mask=mask)


@kernel
def _backward_kernel(
    dactive_ptr, hidden_ptr, weight_ptr, row_ptr, bounds_ptr, bias_ptr, dy_ptr, down_bias_ptr, expert_ptr,
    dhidden_ptr, dweight_ptr, active_ptr, n_cols, n_outputs, n_experts,
    BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    NEEDS_ACTIVE: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + slot).to(tl.int64)
    weight = tl.load(weight_ptr + slot).to(tl.float32)
    expert, exists = _expert_of(expert_ptr, slot, n_experts)
    dweight = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        gate_cols, up_cols = 2 * row * n_cols + cols, (2 * row + 1) * n_cols + cols
        dactive = tl.load(dactive_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(hidden_ptr + gate_cols, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(hidden_ptr + up_cols, mask=mask, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            gate += tl.load(bias_ptr + 2 * expert * n_cols + cols, mask=mask & exists, other=0.0).to(tl.float32)
            up += tl.load(bias_ptr + (2 * expert + 1) * n_cols + cols, mask=mask & exists, other=0.0).to(tl.float32)
        active, dgate, dup = gate_and_up(gate, up, ACTIVATION, LIMIT, ALPHA, hidden_ptr.dtype.element_ty == tl.float32)
        dweight += dactive * active
        dactive *= weight
        tl.store(dhidden_ptr + gate_cols, (dactive * dgate).to(dhidden_ptr.dtype.element_ty), mask=mask)
        tl.store(dhidden_ptr + up_cols, (dactive * dup).to(dhidden_ptr.dtype.element_ty), mask=mask)
        if NEEDS_ACTIVE:
            active = weight * active
            tl.store(active_ptr + row * n_cols + cols, active.to(active_ptr.dtype.element_ty), mask=mask)
    if down_bias_ptr is not None:
        for start in range(0, n_outputs, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            mask = (cols < n_outputs) & exists
            dy = tl.load(dy_ptr + row * n_outputs + cols, mask=mask, other=0.0).to(tl.float32)
            dweight += dy * tl.load(down_bias_ptr + expert * n_outputs + cols, mask=mask, other=0.0).to(tl.float32)
    is_routed = (tl.load(bounds_ptr) <= row) & (row < tl.load(bounds_ptr + n_experts))
    total = tl.where(is_routed, tl.sum(dweight, axis=0), float("nan"))
    tl.store(dweight_ptr + slot, total.to(dweight_ptr.dtype.element_ty))


def row_values(slot_values: Tensor, rows: Tensor) -> Tensor:
    """(T, k) -> (T * k, 1): the value of each row's slot."""
    return permute(slot_values.reshape(-1, 1), rows.view(-1, 1), False)


def _gate_and_up(hidden: Tensor, rows: Tensor, bias: Tensor | None, expert_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns gate and up of each row, in at least fp32."""
    wide = hidden.to(accumulation_dtype(hidden.dtype))
    if bias is not None:
        wide = wide + bias[row_values(expert_ids, rows)[:, 0]]
    gate, up = wide.chunk(2, -1)
    return gate, up


def weighted_glu(
    hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor, rows: Tensor, bias: Tensor | None, gating: Gating,
    triton: bool,
) -> Tensor:  # fmt: skip
    """Computes the input of the down projections: (T * k, 2I) -> (T * k, I)."""
    if not triton:
        gate, up = _gate_and_up(hidden, rows, bias, expert_ids)
        return (row_values(expert_weights, rows) * gated(gate, up, gating)).to(hidden.dtype)
    n_cols = hidden.shape[1] // 2
    active, block = hidden.new_empty((hidden.shape[0], n_cols)), min(_MAX_BLOCK, next_power_of_2(n_cols))
    programs = hidden.shape[0] * cdiv(n_cols, block)
    _forward_kernel[programs](
        hidden, expert_weights.contiguous(), rows, bias, expert_ids.contiguous(), active, n_cols,
        0 if bias is None else len(bias), block, *gating, num_warps=4,
    )  # fmt: skip
    return active


def weighted_glu_backward(
    dactive: Tensor, dy_rows: Tensor, hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor, rows: Tensor,
    bounds: Tensor, biases: Biases, gating: Gating, needs_active: bool, triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of `hidden` and of `expert_weights`, and the result of `weighted_glu`, recomputed.

    With Triton the last is empty unless `needs_active`. `dy_rows` is the gradient of the down projections' results.
    """
    if not triton:
        weight, (gate, up) = row_values(expert_weights, rows), _gate_and_up(hidden, rows, biases.gate_up, expert_ids)
        activated, factor = gated_factors(gate, up, gating)
        dweights = (dactive * activated * factor).sum(-1)
        if biases.down is not None:
            dweights = dweights + (dy_rows.to(dweights.dtype) * biases.down[row_values(expert_ids, rows)[:, 0]]).sum(-1)
        dhidden = torch.cat(gated_backward(weight * dactive, gate, up, gating), -1)
        return (
            dhidden.to(hidden.dtype),
            dweights[rows].to(expert_weights.dtype),
            (weight * activated * factor).to(hidden.dtype),
        )
    n_rows, n_cols = dactive.shape
    dhidden, dweights = hidden.new_empty(hidden.shape), expert_weights.new_empty(rows.shape)
    active = hidden.new_empty((n_rows if needs_active else 0, n_cols))
    _backward_kernel[n_rows](
        dactive, hidden, expert_weights.contiguous(), rows, bounds, biases.gate_up, dy_rows, biases.down,
        expert_ids.contiguous(), dhidden, dweights, active, n_cols, dy_rows.shape[1], len(bounds) - 1,
        min(_MAX_BACKWARD_BLOCK, next_power_of_2(n_cols)), *gating, needs_active, num_warps=1,
    )  # fmt: skip
    return dhidden, dweights, active
