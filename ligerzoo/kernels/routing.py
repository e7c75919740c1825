"""Permutes T tokens with k experts each into T * k rows sorted by expert, one per slot, and sums the rows per token.

    permute:     out[rows[t, j]] = x_t                 (copies each token to the rows of its slots)
    unpermute:   y_t = sum_j values[rows[t, j]]        (in fp32 and in the order of the slots; optionally plus
                                                        w[t, j] bias[expert_ids[t, j]])

Each is the transpose, and so the backward pass, of the other. They use no atomics and no host syncs: the number of
rows of each expert stays on the GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import accumulation_dtype, as_rows, cdiv, next_power_of_2
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.tiling import row_and_columns

_MAX_BLOCK = 2048


def sort_by_expert(expert_ids: Tensor, n_experts: int) -> tuple[Tensor, Tensor]:
    """Sorts the slots of all tokens by expert, in stable order. Slots with an id outside [0, E) come first or last.

    Returns:
        rows: (T, k) int32, the row of each slot.
        bounds: (E + 1,) int32: expert e has the rows from bounds[e] to bounds[e + 1].
    """
    sorted_ids, slots = expert_ids.flatten().int().sort(stable=True)
    device = expert_ids.device
    bounds = torch.searchsorted(
        sorted_ids, torch.arange(n_experts + 1, dtype=torch.int32, device=device), out_int32=True
    )
    rows = torch.arange(len(slots), dtype=torch.int32, device=device)
    return torch.empty_like(rows).scatter_(0, slots, rows).view(expert_ids.shape), bounds


@kernel
def _permute_kernel(x_ptr, row_ptr, out_ptr, x_stride, n_cols, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    token, cols = row_and_columns(n_cols, BLOCK)
    x = tl.load(x_ptr + token * x_stride + cols, mask=cols < n_cols, other=0.0)
    for slot in tl.static_range(SLOTS):
        row = tl.load(row_ptr + token * SLOTS + slot).to(tl.int64)
        tl.store(out_ptr + row * n_cols + cols, x, mask=cols < n_cols)


@jit
def add_bias(y, bias_ptr, expert, weight, n_cols, cols, mask):
    """y plus a slot's weight times its expert's bias, rounded once."""
    bias = tl.load(bias_ptr + expert.to(tl.int64) * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
    return tl.fma(tl.broadcast_to(weight.to(tl.float32), y.shape), tl.broadcast_to(bias, y.shape), y)


@kernel
def _unpermute_kernel(
    values_ptr, row_ptr, bounds_ptr, bias_ptr, expert_ptr, weight_ptr, y_ptr, n_cols, n_experts,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, cols = row_and_columns(n_cols, BLOCK)
    first, end = tl.load(bounds_ptr), tl.load(bounds_ptr + n_experts)
    y = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in tl.static_range(SLOTS):
        row = tl.load(row_ptr + token * SLOTS + slot).to(tl.int64)
        mask = (cols < n_cols) & (first <= row) & (row < end)
        y += tl.load(values_ptr + row * n_cols + cols, mask=mask, other=float("nan")).to(tl.float32)
        if bias_ptr is not None:
            expert = tl.load(expert_ptr + token * SLOTS + slot)
            y = add_bias(y, bias_ptr, expert, tl.load(weight_ptr + token * SLOTS + slot), n_cols, cols, mask)
    tl.store(y_ptr + token * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=cols < n_cols)


def permute(x: Tensor, rows: Tensor, triton: bool) -> Tensor:
    """Copies each token to the rows of its slots: (T, H), any strides -> (T * k, H)."""
    if x.is_meta:
        return x.repeat_interleave(rows.shape[1], 0)
    out = x.new_empty((rows.numel(), x.shape[1]))
    if triton:
        x, n_cols, block = as_rows(x), x.shape[1], min(_MAX_BLOCK, next_power_of_2(x.shape[1]))
        programs = x.shape[0] * cdiv(n_cols, block)
        _permute_kernel[programs](x, rows, out, x.stride(0), n_cols, rows.shape[1], block, num_warps=4)
    else:
        out[rows.flatten()] = x.repeat_interleave(rows.shape[1], 0)
    return out


class SlotBias(NamedTuple):
    """A bias of each slot's row.

    Attributes:
        bias: (E, H).
        expert_ids: (T, k).
        weights: (T, k), factors of the biases.
    """

    bias: Tensor
    expert_ids: Tensor
    weights: Tensor


def unpermute(values: Tensor, rows: Tensor, bounds: Tensor, triton: bool, bias: SlotBias | None = None) -> Tensor:
    """Sums the rows of each token's slots: (T * k, H), contiguous -> (T, H).

    The Triton kernel returns NaN for a token with an expert id outside [0, E).
    """
    n_cols = values.shape[1]
    if values.is_meta:
        return values.view(*rows.shape, n_cols).sum(1)
    if not triton:
        summands = values[rows.flatten()].view(*rows.shape, n_cols)
        if bias is not None:
            summands = summands + bias.weights[..., None] * bias.bias[bias.expert_ids]
        return summands.sum(1, dtype=accumulation_dtype(values.dtype)).to(values.dtype)
    y, block = values.new_empty((rows.shape[0], n_cols)), min(_MAX_BLOCK, next_power_of_2(n_cols))
    programs = rows.shape[0] * cdiv(n_cols, block)
    of_slots = (None, None, None) if bias is None else (bias.bias, *(t.contiguous() for t in bias[1:]))
    _unpermute_kernel[programs](
        values, rows, bounds, *of_slots, y, n_cols, len(bounds) - 1, rows.shape[1], block, num_warps=4
    )
    return y
