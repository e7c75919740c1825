"""RMS normalization (Zhang & Sennrich 2019, eq. 4) of a tensor, or of the sum of two tensors.

Forward:   n = x * r,  r = 1 / sqrt(mean(x^2) + eps)  in fp32;
           y = round(n) * (offset + w)  or  round(n * (offset + w)),  depending on the model;
           y = round(n)  without a weight.  round casts to the dtype of x.
Backward:  with g = dy * (offset + w):   dx = r * (g - n * mean(g * n)),
           dw = sum over rows of dy * n,  or of dy * round(n)  as in the forward.

For a sum, x is the rounded sum. The gradient of both summands is dx plus the upstream gradient of the sum. Likewise
`residual_rms_norm` returns x too, and adds its upstream gradient to dx: autograd would read and write it once more.

Saved: x (or the sum), w and r (one fp32 number per row). Recomputed in backward: n.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ligerzoo.kernels.autograd import FusedFunction, once_differentiable, requires_gradient
from ligerzoo.kernels.dispatch import (
    Backend,
    accumulation_dtype,
    cdiv,
    empty_gradient,
    uses_triton,
)
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
from ligerzoo.tensor_checks import check_floats


def reference(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, round_before_scale: bool = True
) -> Tensor:
    """`rms_norm` in plain torch: the specification, the CPU path and the test oracle."""
    wide_x = x.to(accumulation_dtype(x.dtype))
    normalized = wide_x * torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normalized.to(x.dtype)
    scale = weight_offset + weight.to(accumulation_dtype(weight.dtype))
    if round_before_scale:
        return (scale * normalized.to(x.dtype)).to(torch.promote_types(x.dtype, weight.dtype))
    return (normalized * scale).to(x.dtype)


def add_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    round_before_scale: bool = True,
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` in plain torch."""
    summed = x + residual
    return reference(summed, weight, eps, weight_offset, round_before_scale), summed


# The kernels. A null pointer means that an input does not exist, or that a result is not needed.


@kernel
def _forward_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, summed_ptr, rstd_ptr, group, group_stride, row_stride, n_rows, n_cols, eps,
    weight_offset, ROWS: tl.constexpr, COLS: tl.constexpr, ROUND_BEFORE_SCALE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    offsets = rows[:, None] * n_cols + cols[None, :]
    x_rows = row_offsets(rows, group, group_stride, row_stride)
    x = tl.load(x_ptr + x_rows[:, None] + cols[None, :], mask=mask, other=0.0)

    if residual_ptr is not None:
        residual = tl.load(residual_ptr + offsets, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(summed_ptr.dtype.element_ty)
        tl.store(summed_ptr + offsets, x, mask=mask)

    wide_x = x.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(wide_x * wide_x, axis=1) / n_cols + eps)
    y = wide_x * rstd[:, None]
    if weight_ptr is not None:
        scale = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32) + weight_offset
        if ROUND_BEFORE_SCALE:
            y = y.to(x.dtype).to(tl.float32)
        y *= scale[None, :]

    tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _backward_kernel(
    dy_ptr, dsummed_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, dweight_ptr, group, dy_group_stride, dy_row_stride,
    x_group_stride, x_row_stride, n_rows, n_cols, weight_offset,
    ROWS: tl.constexpr, COLS: tl.constexpr, ROUND_BEFORE_SCALE: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    cols = tl.arange(0, COLS)
    if weight_ptr is not None:
        scale = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32) + weight_offset
    dweight = tl.zeros((COLS,), dtype=tl.float32)

    for block in range(program, tl.cdiv(n_rows, ROWS), programs):
        rows = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        x_rows = row_offsets(rows, group, x_group_stride, x_row_stride)
        dy_rows = row_offsets(rows, group, dy_group_stride, dy_row_stride)
        x = tl.load(x_ptr + x_rows[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + dy_rows[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)

        normalized = x * rstd[:, None]
        if dx_ptr is not None:
            offsets = rows[:, None] * n_cols + cols[None, :]
            g = dy if weight_ptr is None else dy * scale[None, :]
            dx = rstd[:, None] * (g - normalized * (tl.sum(g * normalized, axis=1) / n_cols)[:, None])
            if dsummed_ptr is not None:
                dx += tl.load(dsummed_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if dweight_ptr is not None:
            if ROUND_BEFORE_SCALE:
                normalized = normalized.to(x_ptr.dtype.element_ty).to(tl.float32)
            dweight += tl.sum(dy * normalized, axis=0)

    if dweight_ptr is not None:
        tl.store(dweight_ptr + program.to(tl.int64) * n_cols + cols, dweight, mask=cols < n_cols)


def _launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, y: Tensor, summed: Tensor | None, rstd: Tensor,
    eps: float, weight_offset: float, round_before_scale: bool,
) -> None:  # fmt: skip
    n_rows, n_cols = rstd.numel(), x.shape[-1]
    group = group_size(x)
    x, group_stride, row_stride = grouped(x, group)
    tile_rows, tile_cols, warps = tile(n_cols, FORWARD_TILE)
    _forward_kernel[cdiv(n_rows, tile_rows)](
        x, residual, None if weight is None else weight.contiguous(), y, summed, rstd, group, group_stride, row_stride,
        n_rows, n_cols, eps, weight_offset, tile_rows, tile_cols, round_before_scale, num_warps=warps,
    )  # fmt: skip


def _allocate_forward(x: Tensor, weight: Tensor | None, round_before_scale: bool) -> tuple[Tensor, Tensor]:
    dtype = x.dtype
    if weight is not None and round_before_scale:
        dtype = torch.promote_types(x.dtype, weight.dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1], dtype=torch.float32)


@register("rms_norm_forward", fake=_allocate_forward)
def _forward(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, round_before_scale: bool
) -> tuple[Tensor, Tensor]:
    y, rstd = _allocate_forward(x, weight, round_before_scale)
    _launch_forward(x, None, weight, y, None, rstd, eps, weight_offset, round_before_scale)
    return y, rstd


def _allocate_add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, round_before_scale: bool
) -> tuple[Tensor, Tensor, Tensor]:
    summed = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    y, rstd = _allocate_forward(summed, weight, round_before_scale)
    return y, summed, rstd


@register("add_rms_norm_forward", fake=_allocate_add_forward)
def _add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float, round_before_scale: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y, summed, rstd = _allocate_add_forward(x, residual, weight, round_before_scale)
    _launch_forward(x, residual.contiguous(), weight, y, summed, rstd, eps, weight_offset, round_before_scale)
    return y, summed, rstd


def _allocate_backward(x: Tensor, weight: Tensor | None, needs_x: bool, needs_weight: bool) -> tuple[Tensor, Tensor]:
    return empty_gradient(x, needs_x), empty_gradient(x if weight is None else weight, needs_weight)


@register("rms_norm_backward", fake=_allocate_backward)
def _backward(
    dy: Tensor, dsummed: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, weight_offset: float,
    round_before_scale: bool, needs_x: bool, needs_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dx, dweight = _allocate_backward(x, weight, needs_x, needs_weight)
    n_rows, n_cols = rstd.numel(), x.shape[-1]
    group = group_size(dy, x)
    dy, dy_group_stride, dy_row_stride = grouped(dy, group)
    x, x_group_stride, x_row_stride = grouped(x, group)
    tile_rows, tile_cols, warps = tile(n_cols, BACKWARD_TILE)
    programs = persistent_programs(n_rows, tile_rows, x)
    partial = x.new_empty((programs, n_cols), dtype=torch.float32) if needs_weight else None
    _backward_kernel[programs](
        dy, None if dsummed is None else dsummed.contiguous(), x, None if weight is None else weight.contiguous(), rstd,
        dx if needs_x else None, partial, group, dy_group_stride, dy_row_stride, x_group_stride, x_row_stride, n_rows,
        n_cols, weight_offset, tile_rows, tile_cols, round_before_scale, num_warps=warps,
    )  # fmt: skip
    if partial is not None:
        column_sums_(dweight, partial)
    return dx, dweight


class _RMSNorm(FusedFunction):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, round_before_scale: bool
    ) -> Tensor:
        y, rstd = _forward(x, weight, eps, weight_offset, round_before_scale)
        ctx.save_for_backward(x, weight, rstd)
        ctx.options = weight_offset, round_before_scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        x, weight, rstd = ctx.saved_tensors
        weight_offset, round_before_scale = ctx.options
        dx, dweight = _backward(dy, None, x, weight, rstd, weight_offset, round_before_scale, needs_x, needs_weight)
        return dx if needs_x else None, dweight if needs_weight else None, None, None, None


class _ResidualRMSNorm(FusedFunction):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, round_before_scale: bool
    ) -> tuple[Tensor, Tensor]:
        y, rstd = _forward(x, weight, eps, weight_offset, round_before_scale)
        ctx.save_for_backward(x, weight, rstd)
        ctx.options = weight_offset, round_before_scale
        return y, x.view_as(x)  # torch.func does not support an input that is both saved and returned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dx: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        x, weight, rstd = ctx.saved_tensors
        weight_offset, round_before_scale = ctx.options
        dx, dweight = _backward(dy, dx, x, weight, rstd, weight_offset, round_before_scale, needs_x, needs_weight)
        return dx if needs_x else None, dweight if needs_weight else None, None, None, None


class _AddRMSNorm(FusedFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        eps: float,
        weight_offset: float,
        round_before_scale: bool,
    ) -> tuple[Tensor, Tensor]:
        y, summed, rstd = _add_forward(x, residual, weight, eps, weight_offset, round_before_scale)
        ctx.save_for_backward(summed, weight, rstd)
        ctx.options = weight_offset, round_before_scale
        if not any(ctx.needs_input_grad[:2]):
            ctx.mark_non_differentiable(summed)
        return y, summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dsummed: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_residual, needs_weight = ctx.needs_input_grad[:3]
        summed, weight, rstd = ctx.saved_tensors
        weight_offset, round_before_scale = ctx.options
        dx, dweight = _backward(
            dy, dsummed, summed, weight, rstd, weight_offset, round_before_scale, needs_x or needs_residual,
            needs_weight,
        )  # fmt: skip
        # Both summands get the same tensor, as in torch: autograd casts it to each dtype, and copies before it writes.
        return (
            dx if needs_x else None, dx if needs_residual else None, dweight if needs_weight else None,
            None, None, None,
        )  # fmt: skip


def _weights(name: str, x: Tensor, weight: Tensor | None, weight_offset: float) -> list[Tensor]:
    """The weight as a list, empty if it is None. Raises ValueError for a wrong shape, or an offset without a weight."""
    if weight is not None:
        check_floats(name, weight=weight)
        check_columns(name, x, weight=weight)
        return [weight]
    if weight_offset:
        raise ValueError(f"{name}: weight_offset={weight_offset} without a weight; expected 0.0, or a weight")
    return []


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_before_scale: bool = True,
    backend: Backend = "auto",
) -> Tensor:
    """`(weight_offset + weight) * x / sqrt(mean(x^2) + eps)` over the last dimension, normalized in fp32.

    Args:
        x: (..., H), any strides.
        weight: (H,), or None for `x / sqrt(mean(x^2) + eps)`.
        eps: added to the mean square.
        weight_offset: added to `weight` in fp32. Gemma stores `weight - 1` and uses 1.0.
        round_before_scale: rounds the normalized values to the dtype of `x` before they are scaled, as Llama and most
            models do. False rounds only the scaled values, as Gemma and OLMo 2 do.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        (..., H), contiguous, in the promoted dtype of `x` and `weight`, or in the dtype of `x` if not
        `round_before_scale`.

    Raises:
        ValueError: `weight` is not of shape (H,), `weight_offset` is given without a weight, or `backend` does not
            support the tensors.
    """
    check_floats("rms_norm", x=x)
    if uses_triton(x, *_weights("rms_norm", x, weight, weight_offset), backend=backend) and fits_registers(x, backend):
        return _RMSNorm.apply(x, weight, eps, weight_offset, round_before_scale)
    return reference(x, weight, eps, weight_offset, round_before_scale)


def residual_rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_before_scale: bool = True,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Normalizes the residual stream for a branch, and returns the stream for the sum after the branch.

    The backward kernel adds the gradient of the stream to that of the norm.

    Args:
        x: (..., H), any strides.
        weight: (H,), or None, as for `rms_norm`.
        eps: added to the mean square.
        weight_offset: as for `rms_norm`.
        round_before_scale: as for `rms_norm`.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        normalized: `rms_norm(x, weight, ...)`.
        residual: `x`, or a view of it. Do not modify it in place.

    Raises:
        ValueError: as `rms_norm`.
    """
    check_floats("residual_rms_norm", x=x)
    weights = _weights("residual_rms_norm", x, weight, weight_offset)
    if x.requires_grad and not torch.is_grad_enabled():
        x = x.detach()  # no result requires a gradient under no_grad, neither does the residual
    if uses_triton(x, *weights, backend=backend) and fits_registers(x, backend) and requires_gradient(x):
        return _ResidualRMSNorm.apply(x, weight, eps, weight_offset, round_before_scale)
    options: Any = {"weight_offset": weight_offset, "round_before_scale": round_before_scale, "backend": backend}
    return rms_norm(x, weight, eps, **options), x


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_before_scale: bool = True,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Adds a branch's output to the residual stream, and normalizes the sum for the next branch.

    Args:
        x: (..., H), any strides.
        residual: (..., H), any strides.
        weight: (H,), or None, as for `rms_norm`.
        eps: added to the mean square.
        weight_offset: as for `rms_norm`.
        round_before_scale: as for `rms_norm`.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        normalized: `rms_norm(summed, weight, ...)`.
        summed: (..., H), `x + residual` in the promoted dtype of both.

    Raises:
        ValueError: the shapes of `residual` and `x` differ, `weight` is not of shape (H,), `weight_offset` is given
            without a weight, or `backend` does not support the tensors.
    """
    check_floats("add_rms_norm", x=x, residual=residual)
    if residual.shape != x.shape:
        raise ValueError(f"add_rms_norm: residual has shape {tuple(residual.shape)}; expected {tuple(x.shape)}")
    weights = _weights("add_rms_norm", x, weight, weight_offset)
    if uses_triton(x, residual, *weights, backend=backend) and fits_registers(x, backend):
        return _AddRMSNorm.apply(x, residual, weight, eps, weight_offset, round_before_scale)
    return add_reference(x, residual, weight, eps, weight_offset, round_before_scale)
