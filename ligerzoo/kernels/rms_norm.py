"""RMS normalization (Zhang & Sennrich 2019, eq. 4), in Llama's order of rounding.

Forward:   n = x * r,  r = 1 / sqrt(mean(x^2) + eps)  in fp32;   y = w * round(n),  where round goes to x's dtype.
Backward:  with g = dy * w:   dx = r * (g - n * mean(g * n)),   dw = sum over rows of dy * round(n).

Saved: x, w and r (one fp32 number a row). Recomputed in backward: n.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import (
    as_rows,
    multiprocessors,
    next_power_of_2,
    once_differentiable,
    register,
    uses_triton,
    wide,
)
from ligerzoo.kernels.jit import kernel, tl

_MAX_COLUMNS = 65536  # a row is held in the registers of one program


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same in plain torch: the specification, the CPU path and the tests' oracle."""
    wide_x = x.to(wide(x.dtype))
    normalized = wide_x * torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + eps)
    return weight * normalized.to(x.dtype)


@kernel
def _forward_kernel(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, x_stride, n_rows, n_cols, eps, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)

    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / n_cols + eps)
    normalized = (x * rstd[:, None]).to(x_ptr.dtype.element_ty).to(tl.float32)
    y = normalized * weight[None, :]

    tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)
    tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _backward_kernel(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, dweight_ptr, dy_stride, x_stride, n_rows, n_cols,
    ROWS: tl.constexpr, COLS: tl.constexpr, NEEDS_DWEIGHT: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    cols = tl.arange(0, COLS)
    weight = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    dweight = tl.zeros((COLS,), dtype=tl.float32)

    for block in range(program, tl.cdiv(n_rows, ROWS), programs):
        rows = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)

        normalized = x * rstd[:, None]
        g = dy * weight[None, :]
        dx = rstd[:, None] * (g - normalized * (tl.sum(g * normalized, axis=1) / n_cols)[:, None])
        tl.store(dx_ptr + rows[:, None] * n_cols + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if NEEDS_DWEIGHT:
            dweight += tl.sum(dy * normalized.to(x_ptr.dtype.element_ty).to(tl.float32), axis=0)

    if NEEDS_DWEIGHT:
        tl.store(dweight_ptr + program.to(tl.int64) * n_cols + cols, dweight, mask=cols < n_cols)


def _tile(n_cols: int, elements: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of one program that holds about so many elements: short rows share a program."""
    cols = next_power_of_2(n_cols)
    return max(1, elements // cols), cols, min(16, max(4, cols // 1024))


def _forward_fake(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))
    return y, x.new_empty(x.shape[:-1], dtype=torch.float32)


@register("rms_norm_forward(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", fake=_forward_fake)
def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, rstd = _forward_fake(x, weight, eps)
    rows = as_rows(x)
    n_rows, n_cols = rows.shape
    tile_rows, tile_cols, warps = _tile(n_cols, 2048)
    _forward_kernel[-(-n_rows // tile_rows)](
        rows, weight.contiguous(), y, rstd, rows.stride(0), n_rows, n_cols, eps, tile_rows, tile_cols, num_warps=warps
    )
    return y, rstd


def _backward_fake(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, needs_dweight: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape if needs_dweight else (0,))


@register(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd, bool needs_dweight) -> (Tensor, Tensor)",
    fake=_backward_fake,
)
def _backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, needs_dweight: bool) -> tuple[Tensor, Tensor]:
    dx, _ = _backward_fake(dy, x, weight, rstd, needs_dweight)
    x_rows, dy_rows = as_rows(x), as_rows(dy)
    n_rows, n_cols = x_rows.shape
    tile_rows, tile_cols, warps = _tile(n_cols, 8192)
    programs = max(1, min(-(-n_rows // tile_rows), 2 * multiprocessors(x)))
    partial = x.new_empty((programs if needs_dweight else 0, n_cols), dtype=torch.float32)
    _backward_kernel[programs](
        dy_rows, x_rows, weight.contiguous(), rstd, dx, partial, dy_rows.stride(0), x_rows.stride(0), n_rows, n_cols,
        tile_rows, tile_cols, needs_dweight, num_warps=warps,
    )  # fmt: skip
    dweight = partial.sum(0).to(weight.dtype) if needs_dweight else weight.new_empty(0)
    return dx, dweight


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = _forward(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs_dx, needs_dweight, _ = ctx.needs_input_grad
        dx, dweight = _backward(dy, *ctx.saved_tensors, needs_dweight)
        return dx if needs_dx else None, dweight if needs_dweight else None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension, normalized in fp32 and rounded before the product.

    Args:
        x: (..., H), any strides.
        weight: (H,).
        eps: added to the mean square.

    Returns:
        (..., H) in the promoted dtype of `x` and `weight`.

    Raises:
        ValueError: `weight` is not of shape (H,).
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: weight has shape {tuple(weight.shape)}; expected {tuple(x.shape[-1:])}")
    if uses_triton(x, weight) and x.shape[-1] <= _MAX_COLUMNS:
        return _RMSNorm.apply(x, weight, eps)
    return reference(x, weight, eps)
