"""Softmax over the last dimension, in fp32 and rounded once.

Forward:   y = exp(x - m) / sum(exp(x - m)),   m = max(x).
Backward:  dx = y * (dy - sum(dy * y)).

Saved: y. A row that fits in the registers of one program is read once; several short rows share a program. A longer row
is read twice: first for its maximum and sum, then for its results. The first pass rescales the sum whenever the maximum
grows (online softmax, Milakov & Gimelshein 2018).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.kernels.autograd import FusedContext, FusedFunction, once_differentiable
from ligerzoo.kernels.dispatch import Backend, as_rows, cdiv, empty_result, uses_triton
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.math import fast_exp, load_softcapped
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.tiling import FORWARD_TILE, tile
from ligerzoo.tensor_checks import check_floats, explains_options

_MAX_COLUMNS_IN_REGISTERS = 32768  # longer rows are read in blocks
_BLOCK = 4096  # columns per block of a longer row


def reference(x: Tensor) -> Tensor:
    """`softmax` in plain torch: the specification, the CPU path and the test oracle."""
    return torch.softmax(x, -1, dtype=x.dtype)  # an explicit dtype disables autocast


@jit
def max_and_sum_exp(row_ptr, scale, softcap, inverse_temperature, n_cols, BLOCK: tl.constexpr):
    """Returns m = max(x) and sum(exp((x - m) / temperature)) of a row transformed by `softcapped`, in one pass.

    The sum is NaN for a row that contains a NaN or an inf, or only -inf.
    """
    steepness = inverse_temperature * 1.4426950408889634  # exp(x / temperature) = 2^(steepness * x)
    GROUP: tl.constexpr = 8 if BLOCK > 8 else BLOCK  # adjacent columns that one thread reduces
    maximum = tl.full((BLOCK // GROUP,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK // GROUP,), dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x, _ = load_softcapped(row_ptr, cols, n_cols, scale, softcap)
        new_maximum = tl.maximum(maximum, tl.max(x, axis=1))
        # If all values so far are -inf, x - maximum would be NaN.
        pivot = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
        terms = tl.exp2(steepness * (x - pivot[:, None]))
        total = total * tl.exp2(steepness * (maximum - pivot)) + tl.sum(terms, axis=1)
        maximum = new_maximum
    row_maximum = tl.max(maximum, axis=0)
    pivot = tl.where(row_maximum == -float("inf"), 0.0, row_maximum)
    sum_exp = tl.sum(total * tl.exp2(steepness * (maximum - pivot)), axis=0)
    return row_maximum, tl.where(sum_exp == 0.0, float("nan"), sum_exp)


@kernel
def _forward_kernel(x_ptr, y_ptr, x_stride, n_rows, n_cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=-float("inf")).to(tl.float32)
    exp = fast_exp(x - tl.max(x, axis=1)[:, None])
    y = exp / tl.sum(exp, axis=1)[:, None]
    tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _backward_kernel(
    dy_ptr, y_ptr, dx_ptr, dy_stride, y_stride, n_rows, n_cols, ROWS: tl.constexpr, COLS: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    y = tl.load(y_ptr + rows[:, None] * y_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    dx = y * (dy - tl.sum(dy * y, axis=1)[:, None])
    tl.store(dx_ptr + rows[:, None] * n_cols + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


@kernel
def _long_forward_kernel(x_ptr, y_ptr, x_stride, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    maximum, sum_exp = max_and_sum_exp(x_ptr + row * x_stride, None, None, 1.0, n_cols, BLOCK)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        y = fast_exp(x - maximum) / sum_exp
        tl.store(y_ptr + row * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=cols < n_cols)


@kernel
def _long_backward_kernel(dy_ptr, y_ptr, dx_ptr, dy_stride, y_stride, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    products = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        y = tl.load(y_ptr + row * y_stride + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        products += dy * y
    projection = tl.sum(products, axis=0)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        y = tl.load(y_ptr + row * y_stride + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        dx = y * (dy - projection)
        tl.store(dx_ptr + row * n_cols + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < n_cols)


@register("softmax_forward", fake=lambda x: empty_result(x))
def _forward(x: Tensor) -> Tensor:
    y, rows = empty_result(x), as_rows(x)
    n_rows, n_cols = rows.shape
    if n_cols > _MAX_COLUMNS_IN_REGISTERS:
        _long_forward_kernel[n_rows](rows, y, rows.stride(0), n_cols, _BLOCK, num_warps=8)
    else:
        tile_rows, tile_cols, warps = tile(n_cols, FORWARD_TILE)
        _forward_kernel[cdiv(n_rows, tile_rows)](
            rows, y, rows.stride(0), n_rows, n_cols, tile_rows, tile_cols, num_warps=warps
        )
    return y


@register("softmax_backward", fake=lambda y: empty_result(y))
def _backward(dy: Tensor, y: Tensor) -> Tensor:
    dx, dy_rows, y_rows = empty_result(y), as_rows(dy), as_rows(y)
    n_rows, n_cols = y_rows.shape
    strides = dy_rows.stride(0), y_rows.stride(0)
    if n_cols > _MAX_COLUMNS_IN_REGISTERS:
        _long_backward_kernel[n_rows](dy_rows, y_rows, dx, *strides, n_cols, _BLOCK, num_warps=8)
    else:
        tile_rows, tile_cols, warps = tile(n_cols, FORWARD_TILE)
        _backward_kernel[cdiv(n_rows, tile_rows)](
            dy_rows, y_rows, dx, *strides, n_rows, n_cols, tile_rows, tile_cols, num_warps=warps
        )
    return dx


class _Softmax(FusedFunction):
    @staticmethod
    def forward(ctx: FusedContext, x: Tensor) -> Tensor:
        y = _forward(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dy: Tensor) -> Tensor:
        return _backward(dy, *ctx.saved_tensors)


@explains_options
def softmax(x: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Computes `exp(x) / sum(exp(x))` over the last dimension, in fp32 whatever the dtype of `x`.

    Args:
        x: (..., H), any strides and any H.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        (..., H) in the dtype of `x`. A row that contains a NaN or an inf, or only -inf, becomes NaN.

    Raises:
        ValueError: `backend` is unknown, or does not support `x`.
    """
    check_floats("softmax", x=x)
    return _Softmax.apply(x) if uses_triton(x, backend=backend) else reference(x)
