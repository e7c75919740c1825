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

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.autograd import FusedContext, FusedFunction, if_needed, once_differentiable, requires_gradient
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, empty_gradient, empty_result, uses_triton
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
    tile_rows,
)
from ligerzoo.tensor_checks import check_floats, explains_options


def reference(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, round_before_scale: bool = True
) -> Tensor:
    """`rms_norm` in plain torch: the specification, the CPU path and the test oracle."""
    wide_x = x.to(accumulation_dtype(x.dtype))
    normalized = wide_x * torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + eps)
    return norm_output(normalized, x.dtype, weight, weight_offset, round_before_scale)


def norm_output(
    normalized: Tensor, dtype: torch.dtype, weight: Tensor | None, weight_offset: float, round_before_scale: bool
) -> Tensor:
    """Returns the output of a norm for an input of this dtype, given the values before they are rounded and scaled."""
    if weight is None:
        return normalized.to(dtype)
    scale = weight.to(accumulation_dtype(weight.dtype))
    scale = weight_offset + scale if weight_offset else scale
    if round_before_scale:
        return (scale * normalized.to(dtype)).to(torch.promote_types(dtype, weight.dtype))
    return (normalized * scale).to(dtype)


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


class _Options(NamedTuple):
    """The options of `rms_norm`."""

    eps: float
    weight_offset: float
    round_before_scale: bool


class _Results(NamedTuple):
    """What the forward kernel stores: y, r, and the sum if there is a residual."""

    y: Tensor
    rstd: Tensor
    summed: Tensor | None = None


class _Needs(NamedTuple):
    """Which gradients to compute."""

    x: bool
    weight: bool

    @classmethod
    def of(cls, needs_input_grad: Sequence[bool]) -> _Needs:
        """Reads them from the context of `_RMSNorm`: x and the residual have the same gradient."""
        x, residual, weight, *_ = needs_input_grad
        return cls(x or residual, weight)


class _Gradients(NamedTuple):
    """What the backward kernel stores: dx, and each program's part of dw."""

    dx: Tensor | None
    dweight: Tensor | None


# The kernels. A null pointer means that an input does not exist, or that a result is not needed.


@kernel
def _forward_kernel(
    x, residual_ptr, weight_ptr, results, sizes, eps, offset, TILE: tl.constexpr, ROUND_FIRST: tl.constexpr
):
    ROWS: tl.constexpr = TILE[0]
    COLS: tl.constexpr = TILE[1]
    cols = tl.arange(0, COLS)
    rows, mask = tile_rows(tl.program_id(0), cols, sizes, ROWS)
    n_cols = sizes.n_cols
    offsets = rows[:, None] * n_cols + cols[None, :]
    x = load_rows(x, rows, cols, mask, sizes.group)

    if residual_ptr is not None:
        residual = tl.load(residual_ptr + offsets, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(results.summed.dtype.element_ty)
        tl.store(results.summed + offsets, x, mask=mask)

    wide_x = x.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(wide_x * wide_x, axis=1) / n_cols + eps)
    y = wide_x * rstd[:, None]
    if weight_ptr is not None:
        scale = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32) + offset
        if ROUND_FIRST:
            y = y.to(x.dtype).to(tl.float32)
        y *= scale[None, :]

    tl.store(results.rstd + rows, rstd, mask=rows < sizes.n_rows)
    tl.store(results.y + offsets, y.to(results.y.dtype.element_ty), mask=mask)


@kernel
def _backward_kernel(
    dy,
    dsummed_ptr,
    x,
    weight_ptr,
    rstd_ptr,
    results,
    sizes,
    offset,
    TILE: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    n_cols = sizes.n_cols
    ROWS: tl.constexpr = TILE[0]
    COLS: tl.constexpr = TILE[1]
    cols = tl.arange(0, COLS)
    if weight_ptr is not None:
        scale = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32) + offset
    dweight = tl.zeros((COLS,), dtype=tl.float32)

    for block in range(program, tl.cdiv(sizes.n_rows, ROWS), programs):
        rows, mask = tile_rows(block, cols, sizes, ROWS)
        wide_x = load_rows(x, rows, cols, mask, sizes.group).to(tl.float32)
        wide_dy = load_rows(dy, rows, cols, mask, sizes.group).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < sizes.n_rows, other=0.0)

        normalized = wide_x * rstd[:, None]
        if results.dx is not None:
            offsets = rows[:, None] * n_cols + cols[None, :]
            g = wide_dy if weight_ptr is None else wide_dy * scale[None, :]
            dx = rstd[:, None] * (g - normalized * (tl.sum(g * normalized, axis=1) / n_cols)[:, None])
            if dsummed_ptr is not None:
                dx += tl.load(dsummed_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            tl.store(results.dx + offsets, dx.to(results.dx.dtype.element_ty), mask=mask)
        if results.dweight is not None:
            if ROUND_FIRST:
                normalized = normalized.to(x.ptr.dtype.element_ty).to(tl.float32)
            dweight += tl.sum(wide_dy * normalized, axis=0)

    if results.dweight is not None:
        tl.store(results.dweight + program.to(tl.int64) * n_cols + cols, dweight, mask=cols < n_cols)


def _launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, results: _Results, options: _Options
) -> None:
    (rows,), (sizes, tile, programs, warps) = row_launch(x)
    residual = None if residual is None else residual.contiguous()
    weight = None if weight is None else weight.contiguous()
    _forward_kernel[programs](rows, residual, weight, results, sizes, *options[:2], tile, options[2], num_warps=warps)


def _allocate_forward(x: Tensor, weight: Tensor | None, options: _Options) -> tuple[Tensor, Tensor]:
    dtype = x.dtype
    if weight is not None and options.round_before_scale:
        dtype = torch.promote_types(x.dtype, weight.dtype)
    return empty_result(x, dtype), number_per_row(x)


@register("rms_norm_forward", fake=_allocate_forward)
def _forward(x: Tensor, weight: Tensor | None, options: _Options) -> tuple[Tensor, Tensor]:
    y, rstd = _allocate_forward(x, weight, options)
    _launch_forward(x, None, weight, _Results(y, rstd), options)
    return y, rstd


def _allocate_add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, options: _Options
) -> tuple[Tensor, Tensor, Tensor]:
    summed = empty_result(x, torch.promote_types(x.dtype, residual.dtype))
    return *_allocate_forward(summed, weight, options), summed


@register("add_rms_norm_forward", fake=_allocate_add_forward)
def _add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, options: _Options
) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd, summed = _allocate_add_forward(x, residual, weight, options)
    _launch_forward(x, residual, weight, _Results(y, rstd, summed), options)
    return y, rstd, summed


def _allocate_backward(x: Tensor, weight: Tensor | None, needs: _Needs) -> tuple[Tensor, Tensor]:
    return empty_gradient(x, needs.x), empty_gradient(x if weight is None else weight, needs.weight)


@register("rms_norm_backward", fake=_allocate_backward)
def _backward(
    dy: Tensor, dsummed: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, options: _Options, needs: _Needs
) -> tuple[Tensor, Tensor]:
    dx, dweight = _allocate_backward(x, weight, needs)
    (dy_rows, x_rows), (sizes, tile, programs, warps) = persistent_row_launch(dy, x)
    dsummed = None if dsummed is None else dsummed.contiguous()
    weight = None if weight is None else weight.contiguous()
    results = _Gradients(dx if needs.x else None, column_addends(x, programs, needs.weight))
    _, offset, round_first = options
    _backward_kernel[programs](
        dy_rows, dsummed, x_rows, weight, rstd, results, sizes, offset, tile, round_first, num_warps=warps
    )
    column_sums_(dweight, results.dweight)
    return dx, dweight


class _RMSNorm(FusedFunction):
    """y; with `returns_sum` also x, or its sum with the residual, whose upstream gradient is added to that of x."""

    @staticmethod
    def forward(
        ctx: FusedContext,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        options: _Options,
        returns_sum: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        outputs: Tensor | tuple[Tensor, Tensor]
        if residual is None:
            y, rstd = _forward(x, weight, options)
            outputs = (y, x.view_as(x)) if returns_sum else y  # torch.func rejects an input both saved and returned
        else:
            y, rstd, x = _add_forward(x, residual, weight, options)
            outputs = y, x
            if not _Needs.of(ctx.needs_input_grad).x:
                ctx.mark_non_differentiable(x)
        ctx.save_for_backward(x, weight, rstd)
        ctx.options = options
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dy: Tensor, dsummed: Tensor | None = None) -> tuple[Tensor | None, ...]:
        needs = _Needs.of(ctx.needs_input_grad)
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = _backward(dy, dsummed, x, weight, rstd, ctx.options, needs)
        # Both summands get the same tensor, as in torch: autograd casts it to each dtype, and copies before it writes.
        return if_needed((dx, dx, dweight, None, None), ctx.needs_input_grad)


def _is_fused(
    name: str, weight: Tensor | None, weight_offset: float, backend: Backend, x: Tensor, *residual: Tensor
) -> bool:
    """Whether the kernels run. Raises ValueError for a weight of a wrong shape, or an offset without a weight."""
    if weight is None:
        if weight_offset:
            raise ValueError(f"{name}: weight_offset={weight_offset} without a weight; expected 0.0, or a weight")
        return uses_triton(x, *residual, backend=backend) and fits_registers(x, backend)
    check_floats(name, weight=weight)
    check_columns(name, x, weight=weight)
    return uses_triton(x, *residual, weight, backend=backend) and fits_registers(x, backend)


@explains_options
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
    if _is_fused("rms_norm", weight, weight_offset, backend, x):
        return _RMSNorm.apply(x, None, weight, _Options(eps, weight_offset, round_before_scale), False)
    return reference(x, weight, eps, weight_offset, round_before_scale)


@explains_options
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
    is_fused = _is_fused("residual_rms_norm", weight, weight_offset, backend, x)
    if x.requires_grad and not torch.is_grad_enabled():
        x = x.detach()  # no result requires a gradient under no_grad, neither does the residual
    if not is_fused:
        return reference(x, weight, eps, weight_offset, round_before_scale), x
    options = _Options(eps, weight_offset, round_before_scale)
    if requires_gradient(x):
        return _RMSNorm.apply(x, None, weight, options, True)
    return _RMSNorm.apply(x, None, weight, options, False), x


@explains_options
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
    if _is_fused("add_rms_norm", weight, weight_offset, backend, x, residual):
        return _RMSNorm.apply(x, residual, weight, _Options(eps, weight_offset, round_before_scale), True)
    return add_reference(x, residual, weight, eps, weight_offset, round_before_scale)
