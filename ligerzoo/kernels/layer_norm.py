"""Layer normalization (Ba et al. 2016, eq. 4) over the last dimension.

Forward:   n = (x - m) * r,  m = mean(x),  r = 1 / sqrt(mean((x - m)^2) + eps);
           y = n * w + b,  all in fp32, rounded once.
Backward:  with g = dy * w:   dx = r * (g - mean(g) - n * mean(g * n)),
           dw = sum over rows of dy * n,   db = sum over rows of dy.

Saved: x, w, m and r (two fp32 numbers per row). Recomputed in backward: n.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels.autograd import FusedContext, FusedFunction, if_needed, once_differentiable
from ligerzoo.kernels.dispatch import Backend, empty_gradient, empty_result, uses_triton
from ligerzoo.kernels.jit import kernel, tl
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.tiling import (
    check_columns,
    column_addends,
    column_sums_,
    fits_registers,
    load_rows,
    number_per_row,
    persistent_row_launch,
    row_launch,
    row_offsets,
    tile_rows,
)
from ligerzoo.tensor_checks import check_floats, check_optional_floats, explains_options


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """`layer_norm` in plain torch: the specification, the CPU path and the test oracle."""
    dtype = torch.promote_types(x.dtype, weight.dtype)
    bias = None if bias is None else bias.to(dtype)
    return F.layer_norm(x.to(dtype), weight.shape, weight.to(dtype), bias, eps).to(dtype)  # autocast returns fp32


# The kernels. A null pointer means no bias, or a result that is not needed.


@kernel
def _forward_kernel(x, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, sizes, eps, TILE: tl.constexpr):
    ROWS: tl.constexpr = TILE[0]
    COLS: tl.constexpr = TILE[1]
    cols = tl.arange(0, COLS)
    rows, mask = tile_rows(tl.program_id(0), cols, sizes, ROWS)
    n_rows, n_cols, group = sizes
    wide_x = load_rows(x, rows, cols, mask, group).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)

    # The distance from the row's first number keeps the digits of numbers that are close together but far from 0.
    first = tl.load(x.ptr + row_offsets(x, rows, group), mask=rows < n_rows, other=0.0).to(tl.float32)
    distance = tl.where(mask, wide_x - first[:, None], 0.0)
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
def _backward_kernel(dy, x, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr, sizes, TILE: tl.constexpr):
    program, programs = tl.program_id(0), tl.num_programs(0)
    n_rows, n_cols, group = sizes
    ROWS: tl.constexpr = TILE[0]
    COLS: tl.constexpr = TILE[1]
    cols = tl.arange(0, COLS)
    weight = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    dweight = tl.zeros((COLS,), dtype=tl.float32)
    dbias = tl.zeros((COLS,), dtype=tl.float32)

    for block in range(program, tl.cdiv(n_rows, ROWS), programs):
        rows, mask = tile_rows(block, cols, sizes, ROWS)
        wide_x = load_rows(x, rows, cols, mask, group).to(tl.float32)
        upstream = load_rows(dy, rows, cols, mask, group).to(tl.float32)
        mean = tl.load(mean_ptr + rows, mask=rows < n_rows, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)

        # dy is 0 beyond the last column, so x - mean contributes to no sum there.
        normalized = (wide_x - mean[:, None]) * rstd[:, None]
        if dx_ptr is not None:
            g = upstream * weight[None, :]
            g_mean = tl.sum(g, axis=1) / n_cols
            projection = tl.sum(g * normalized, axis=1) / n_cols
            dx = rstd[:, None] * (g - g_mean[:, None] - normalized * projection[:, None])
            tl.store(dx_ptr + rows[:, None] * n_cols + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if dweight_ptr is not None:
            dweight += tl.sum(upstream * normalized, axis=0)
        if dbias_ptr is not None:
            dbias += tl.sum(upstream, axis=0)

    offsets = program.to(tl.int64) * n_cols + cols
    if dweight_ptr is not None:
        tl.store(dweight_ptr + offsets, dweight, mask=cols < n_cols)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + offsets, dbias, mask=cols < n_cols)


def _allocate_forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = empty_result(x, torch.promote_types(x.dtype, weight.dtype))
    mean = number_per_row(x)
    return y, mean, torch.empty_like(mean)


@register("layer_norm_forward", fake=_allocate_forward)
def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, rstd = _allocate_forward(x, weight)
    rows, (sizes, tile, programs, warps) = row_launch(x)
    bias = None if bias is None else bias.contiguous()
    _forward_kernel[programs](*rows, weight.contiguous(), bias, y, mean, rstd, sizes, eps, tile, num_warps=warps)
    return y, mean, rstd


class _Needs(NamedTuple):
    """Which gradients to compute."""

    x: bool
    weight: bool
    bias: bool


def _allocate_backward(x: Tensor, weight: Tensor, needs: _Needs) -> tuple[Tensor, Tensor, Tensor]:
    return empty_gradient(x, needs.x), empty_gradient(weight, needs.weight), empty_gradient(weight, needs.bias)


@register("layer_norm_backward", fake=_allocate_backward)
def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, needs: _Needs
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = _allocate_backward(x, weight, needs)
    rows, (sizes, tile, programs, warps) = persistent_row_launch(dy, x)
    addends = [column_addends(x, programs, needed) for needed in needs[1:]]
    results = dx if needs.x else None, *addends
    _backward_kernel[programs](*rows, weight.contiguous(), mean, rstd, *results, sizes, tile, num_warps=warps)
    column_sums_(dweight, addends[0])
    column_sums_(dbias, addends[1])
    return dx, dweight, dbias


class _LayerNorm(FusedFunction):
    @staticmethod
    def forward(ctx: FusedContext, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        y, mean, rstd = _forward(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs = _Needs(*ctx.needs_input_grad[:3])
        x, weight, mean, rstd = ctx.saved_tensors
        return *if_needed(_backward(dy, x, weight, mean, rstd, needs), needs), None


@explains_options
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
