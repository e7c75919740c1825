"""The activation between the two matrix products of experts: `w * act(gate) * up`, w the weight of the row's slot.

Forward:   a = w * act(gate) * up,   gate and up the halves of a row h,   in fp32, rounded once.
Backward:  dw = sum over the row of da * act(gate) * up,   dgate = da * w * up * act'(gate),   dup = da * w * act(gate).

The weight is applied before the down projection, so its gradient does not need that projection's result. A program
handles the row of one slot. `rows` and `bounds` are those of `routing.sort_by_expert`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.kernels.activation import ACTIVATIONS, Activation, activate
from ligerzoo.kernels.dispatch import accumulation_dtype, cdiv, next_power_of_2
from ligerzoo.kernels.jit import kernel, tl
from ligerzoo.kernels.routing import permute
from ligerzoo.kernels.tiling import row_and_columns

_MAX_BLOCK, _MAX_BACKWARD_BLOCK = 1024, 256


@kernel
def _forward_kernel(
    hidden_ptr, weight_ptr, row_ptr, active_ptr, n_cols, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr
):  # fmt: skip
    slot, cols = row_and_columns(n_cols, BLOCK)
    mask = cols < n_cols
    row = tl.load(row_ptr + slot).to(tl.int64)
    weight = tl.load(weight_ptr + slot).to(tl.float32)
    gate = tl.load(hidden_ptr + 2 * row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(hidden_ptr + (2 * row + 1) * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
    active, _ = activate(gate, ACTIVATION, hidden_ptr.dtype.element_ty == tl.float32)
    tl.store(active_ptr + row * n_cols + cols, (weight * active * up).to(active_ptr.dtype.element_ty), mask=mask)


@kernel
def _backward_kernel(
    dactive_ptr, hidden_ptr, weight_ptr, row_ptr, bounds_ptr, dhidden_ptr, dweight_ptr, active_ptr, n_cols,
    n_experts, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, NEEDS_ACTIVE: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + slot).to(tl.int64)
    weight = tl.load(weight_ptr + slot).to(tl.float32)
    dweight = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        gate_cols, up_cols = 2 * row * n_cols + cols, (2 * row + 1) * n_cols + cols
        dactive = tl.load(dactive_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(hidden_ptr + gate_cols, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(hidden_ptr + up_cols, mask=mask, other=0.0).to(tl.float32)
        active, slope = activate(gate, ACTIVATION, hidden_ptr.dtype.element_ty == tl.float32)
        dweight += dactive * active * up
        dactive *= weight
        tl.store(dhidden_ptr + gate_cols, (dactive * up * slope).to(dhidden_ptr.dtype.element_ty), mask=mask)
        tl.store(dhidden_ptr + up_cols, (dactive * active).to(dhidden_ptr.dtype.element_ty), mask=mask)
        if NEEDS_ACTIVE:
            active = weight * active * up
            tl.store(active_ptr + row * n_cols + cols, active.to(active_ptr.dtype.element_ty), mask=mask)
    is_routed = (tl.load(bounds_ptr) <= row) & (row < tl.load(bounds_ptr + n_experts))
    total = tl.where(is_routed, tl.sum(dweight, axis=0), float("nan"))
    tl.store(dweight_ptr + slot, total.to(dweight_ptr.dtype.element_ty))


def _activation_backward(upstream: Tensor, gate: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return torch.ops.aten.silu_backward(upstream, gate)
    if activation == "quick_gelu":
        return torch.ops.aten.silu_backward(upstream, 1.702 * gate)
    if activation == "relu2":
        return upstream * 2.0 * torch.relu(gate)
    return torch.ops.aten.gelu_backward(upstream, gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def _row_weights(expert_weights: Tensor, rows: Tensor) -> Tensor:
    """(T, k) -> (T * k, 1): the weight of each row's slot."""
    return permute(expert_weights.reshape(-1, 1), rows.view(-1, 1), False)


def weighted_glu(hidden: Tensor, expert_weights: Tensor, rows: Tensor, activation: Activation, triton: bool) -> Tensor:
    """Computes the input of the down projections: (T * k, 2I) -> (T * k, I)."""
    if not triton:
        weight, (gate, up) = (
            _row_weights(expert_weights, rows),
            hidden.to(accumulation_dtype(hidden.dtype)).chunk(2, -1),
        )
        return (weight * ACTIVATIONS[activation](gate) * up).to(hidden.dtype)
    n_cols = hidden.shape[1] // 2
    active, block = hidden.new_empty((hidden.shape[0], n_cols)), min(_MAX_BLOCK, next_power_of_2(n_cols))
    programs = hidden.shape[0] * cdiv(n_cols, block)
    _forward_kernel[programs](hidden, expert_weights.contiguous(), rows, active, n_cols, block, activation, num_warps=4)
    return active


def weighted_glu_backward(
    dactive: Tensor, hidden: Tensor, expert_weights: Tensor, rows: Tensor, bounds: Tensor, activation: Activation,
    needs_active: bool, triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of `hidden` and of `expert_weights`, and the result of `weighted_glu`, recomputed.

    With Triton the last is empty unless `needs_active`.
    """
    if not triton:
        weight, (gate, up) = (
            _row_weights(expert_weights, rows),
            hidden.to(accumulation_dtype(hidden.dtype)).chunk(2, -1),
        )
        activated = ACTIVATIONS[activation](gate)
        dweights = (dactive * activated * up).sum(-1)[rows].to(expert_weights.dtype)
        dgate = _activation_backward(weight * dactive * up, gate, activation)
        dhidden = torch.cat([dgate, weight * dactive * activated], -1)
        return dhidden.to(hidden.dtype), dweights, (weight * activated * up).to(hidden.dtype)
    n_rows, n_cols = dactive.shape
    dhidden, dweights = hidden.new_empty(hidden.shape), expert_weights.new_empty(rows.shape)
    active = hidden.new_empty((n_rows if needs_active else 0, n_cols))
    _backward_kernel[n_rows](
        dactive, hidden, expert_weights.contiguous(), rows, bounds, dhidden, dweights, active, n_cols, len(bounds) - 1,
        min(_MAX_BACKWARD_BLOCK, next_power_of_2(n_cols)), activation, needs_active, num_warps=1,
    )  # fmt: skip
    return dhidden, dweights, active
