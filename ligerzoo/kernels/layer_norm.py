"""Layer normalization (Ba et al. 2016, eq. 4) over the last dimension.

Forward:   n = (x - m) * r,  m = mean(x),  r = 1 / sqrt(mean((x - m)^2) + eps);
           y = n * w + b,  all in fp32, rounded once.
Backward:  with g = dy * w:   dx = r * (g - mean(g) - n * mean(g * n)),
           dw = sum over rows of dy * n,   db = sum over rows of dy.

Saved: x, w, m and r (two fp32 numbers per row). Recomputed in backward: n.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels.autograd import FusedFunction, once_differentiable
from ligerzoo.kernels.dispatch import Backend, cdiv, empty_gradient, uses_triton
from ligerzoo.kernels.jit import kernel, tl
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.tiling import (
    BACKWARD_TILE,
    FORWARD_TILE,
    check_columns,
    column_sums_,
    fits_registers,
    group_size,
    grouped,
    persistent_programs,
    row_offsets,
    tile,
)
from ligerzoo.tensor_checks import check_floats, check_optional_floats


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """`layer_norm` in plain torch: the specification, the CPU path and the test oracle."""
    dtype = torch.promote_types(x.dtype, weight.dtype)
    bias = None if bias is None else bias.to(dtype)
    return F.layer_norm(x.to(dtype), weight.shape, weight.to(dtype), bias, eps).to(dtype)  # autocast returns fp32


# The kernels. A null pointer means that there is no bias, or that a result is not needed.


@kernel
def _forward_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, group, group_stride, row_stride, n_rows, n_cols, eps,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    x_rows = row_offsets(rows, group, group_stride, row_stride)
    x = tl.load(x_ptr + x_rows[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)

    # The distance from the row's first number keeps the digits of numbers that are close together but far from 0.
    first = tl.load(x_ptr + x_rows, mask=rows < n_rows, other=0.0).to(tl.float32)
    distance = tl.where(mask, x - first[:, None], 0.0)
    mean_distance = tl.sum(distance, axis=1) / n_cols
    centered = tl.where(mask, distance - mean_distance[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centered * centered, axis=1) / n_cols + eps)
    y = centered * rstd[:, None] * weight[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)[None, :]

    tl.store(mean_ptr + rows, first + mean_distance, mask=rows < n_rows)
    tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)
    tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _backward_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr, group, dy_group_stride,
    dy_row_stride, x_group_stride, x_row_stride, n_rows, n_cols, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    cols = tl.arange(0, COLS)
    weight = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    dweight = tl.zeros((COLS,), dtype=tl.float32)
    dbias = tl.zeros((COLS,), dtype=tl.float32)

    for block in range(program, tl.cdiv(n_rows, ROWS), programs):
        rows = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        x_rows = row_offsets(rows, group, x_group_stride, x_row_stride)
        dy_rows = row_offsets(rows, group, dy_group_stride, dy_row_stride)
        x = tl.load(x_ptr + x_rows[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + dy_rows[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + rows, mask=rows < n_rows, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)

        # dy is 0 beyond the last column, so x - mean contributes to no sum there.
        normalized = (x - mean[:, None]) * rstd[:, None]
        if dx_ptr is not None:
            g = dy * weight[None, :]
            g_mean = tl.sum(g, axis=1) / n_cols
            projection = tl.sum(g * normalized, axis=1) / n_cols
            dx = rstd[:, None] * (g - g_mean[:, None] - normalized * projection[:, None])
            tl.store(dx_ptr + rows[:, None] * n_cols + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if dweight_ptr is not None:
            dweight += tl.sum(dy * normalized, axis=0)
        if dbias_ptr is not None:
            dbias += tl.sum(dy, axis=0)

    offsets = program.to(tl.int64) * n_cols + cols
    if dweight_ptr is not None:
        tl.store(dweight_ptr + offsets, dweight, mask=cols < n_cols)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + offsets, dbias, mask=cols < n_cols)


def _allocate_forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))
    mean = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return y, mean, torch.empty_like(mean)


@register("layer_norm_forward", fake=_allocate_forward)
def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, rstd = _allocate_forward(x, weight)
    n_rows, n_cols = rstd.numel(), x.shape[-1]
    group = group_size(x)
    x, group_stride, row_stride = grouped(x, group)
    tile_rows, tile_cols, warps = tile(n_cols, FORWARD_TILE)
    _forward_kernel[cdiv(n_rows, tile_rows)](
        x, weight.contiguous(), None if bias is None else bias.contiguous(), y, mean, rstd, group, group_stride,
        row_stride, n_rows, n_cols, eps, tile_rows, tile_cols, num_warps=warps,
    )  # fmt: skip
    return y, mean, rstd


def _allocate_backward(
    x: Tensor, weight: Tensor, needs_x: bool, needs_weight: bool, needs_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_gradient(x, needs_x), empty_gradient(weight, needs_weight), empty_gradient(weight, needs_bias)


@register("layer_norm_backward", fake=_allocate_backward)
def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor,
    needs_x: bool, needs_weight: bool, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx, dweight, dbias = _allocate_backward(x, weight, needs_x, needs_weight, needs_bias)
    n_rows, n_cols = rstd.numel(), x.shape[-1]
    group = group_size(dy, x)
    dy, dy_group_stride, dy_row_stride = grouped(dy, group)
    x, x_group_stride, x_row_stride = grouped(x, group)
    tile_rows, tile_cols, warps = tile(n_cols, BACKWARD_TILE)
    programs = persistent_programs(n_rows, tile_rows, x)
    weight_partial = x.new_empty((programs, n_cols), dtype=torch.float32) if needs_weight else None
    bias_partial = x.new_empty((programs, n_cols), dtype=torch.float32) if needs_bias else None
    _backward_kernel[programs](
        dy, x, weight.contiguous(), mean, rstd, dx if needs_x else None, weight_partial, bias_partial, group,
        dy_group_stride, dy_row_stride, x_group_stride, x_row_stride, n_rows, n_cols, tile_rows, tile_cols,
        num_warps=warps,
    )  # fmt: skip
    if weight_partial is not None:
        column_sums_(dweight, weight_partial)
    if bias_partial is not None:
        column_sums_(dbias, bias_partial)
    return dx, dweight, dbias


class _LayerNorm(FusedFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        y, mean, rstd = _forward(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        x, weight, mean, rstd = ctx.saved_tensors
        dx, dweight, dbias = _backward(dy, x, weight, mean, rstd, needs_x, needs_weight, needs_bias)
        return dx if needs_x else None, dweight if needs_weight else None, dbias if needs_bias else None, None


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, *, backend: Backend = "auto"
) -> Tensor:
    """`weight * (x - mean(x)) / sqrt(var(x) + eps) + bias` over the last dimension, in fp32.

    Args:
        x: (..., H), any strides.
        weight: (H,).
        bias: (H,) in the dtype of `weight`, or None.
        eps: added to the variance.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        (..., H), contiguous, in the promoted dtype of `x` and `weight`.

    Raises:
        ValueError: `weight` or `bias` is not of shape (H,), their dtypes differ, or `backend` does not support the
            tensors.
    """
    check_floats("layer_norm", x=x, weight=weight)
    check_optional_floats("layer_norm", bias=bias)
    check_columns("layer_norm", x, weight=weight)
    if bias is not None:
        check_columns("layer_norm", x, bias=bias)
        if bias.dtype != weight.dtype:
            raise ValueError(f"layer_norm: bias has dtype {bias.dtype}; expected {weight.dtype}, the dtype of weight")
    if uses_triton(x, weight, backend=backend) and fits_registers(x, backend):
        return _LayerNorm.apply(x, weight, bias, eps)
    return reference(x, weight, bias, eps)
