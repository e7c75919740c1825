"""RMS normalization with an output gate, as in Qwen3-Next: `weight * normalized x * silu(z)`.

Forward:   n = x * r,  r = 1 / sqrt(mean(x^2) + eps)  in fp32;
           y = round(round(weight * round(n)) * silu(z)).  round casts to the dtype of x (the inner product
           to the promoted dtype of x and the weight), silu is in fp32.
Backward:  with a = dy * silu(z) and g = a * weight:   dx = r * (g - n * mean(g * n)),
           dw = sum over rows of a * round(n),   dz = dy * round(weight * round(n)) * silu'(z).

Saved: x, z, the weight and r (one fp32 number per row). Recomputed in backward: n and silu(z).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.kernels.autograd import FusedContext, FusedFunction, if_needed, once_differentiable
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, empty_gradient, empty_result, uses_triton
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.math import sigmoids
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
from ligerzoo.kernels.torch_math import silu
from ligerzoo.tensor_checks import check_floats


def reference(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """`gated_rms_norm` in plain torch: the specification, the CPU path and the test oracle."""
    dtype = accumulation_dtype(x.dtype)
    gate, wide = silu(z.to(dtype)), x.to(dtype)
    groups = (wide if norm_before_gate else wide * gate).unflatten(-1, (-1, group_size or x.shape[-1]))
    normalized = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2).to(x.dtype)
    return (weight * normalized * gate if norm_before_gate else weight * normalized).to(x.dtype)


@jit
def _rounded_product(normalized, wide_weight, x, weight):
    """The product in fp32, rounded to the promoted dtype of x and the weight."""
    product = normalized * wide_weight[None, :]
    if x.dtype == weight.dtype:
        product = product.to(x.dtype).to(tl.float32)
    return product


@kernel
def _forward_kernel(x, z, weight_ptr, y_ptr, rstd_ptr, sizes, eps, TILE: tl.constexpr, EXACT: tl.constexpr):
    ROWS: tl.constexpr = TILE[0]
    COLS: tl.constexpr = TILE[1]
    cols = tl.arange(0, COLS)
    rows, mask = tile_rows(tl.program_id(0), cols, sizes, ROWS)
    n_cols = sizes.n_cols
    x = load_rows(x, rows, cols, mask, sizes.group)
    z = load_rows(z, rows, cols, mask, sizes.group).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0)
    wide_x = x.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(wide_x * wide_x, axis=1) / n_cols + eps)
    normalized = (wide_x * rstd[:, None]).to(x.dtype).to(tl.float32)
    scaled = _rounded_product(normalized, weight.to(tl.float32), x, weight)
    sigmoid, _ = sigmoids(z, EXACT)
    y = scaled * (z * sigmoid)
    tl.store(rstd_ptr + rows, rstd, mask=rows < sizes.n_rows)
    tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _backward_kernel(
    dy, x, z, weight_ptr, rstd_ptr, dx_ptr, dz_ptr, dweight_ptr, sizes, TILE: tl.constexpr, EXACT: tl.constexpr
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    n_cols = sizes.n_cols
    ROWS: tl.constexpr = TILE[0]
    COLS: tl.constexpr = TILE[1]
    cols = tl.arange(0, COLS)
    weight = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0)
    wide_weight = weight.to(tl.float32)
    dweight = tl.zeros((COLS,), dtype=tl.float32)
    for block in range(program, tl.cdiv(sizes.n_rows, ROWS), programs):
        rows, mask = tile_rows(block, cols, sizes, ROWS)
        x_tile = load_rows(x, rows, cols, mask, sizes.group)
        gate = load_rows(z, rows, cols, mask, sizes.group).to(tl.float32)
        upstream = load_rows(dy, rows, cols, mask, sizes.group).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < sizes.n_rows, other=0.0)
        normalized = x_tile.to(tl.float32) * rstd[:, None]
        rounded = normalized.to(x_tile.dtype).to(tl.float32)
        sigmoid, complement = sigmoids(gate, EXACT)
        dscaled = upstream * (gate * sigmoid)
        offsets = rows[:, None] * n_cols + cols[None, :]
        if dz_ptr is not None:
            scaled = _rounded_product(rounded, wide_weight, x_tile, weight)
            dz = upstream * scaled * (sigmoid * (1.0 + gate * complement))
            tl.store(dz_ptr + offsets, dz.to(dz_ptr.dtype.element_ty), mask=mask)
        if dx_ptr is not None:
            g = dscaled * wide_weight[None, :]
            dx = rstd[:, None] * (g - normalized * (tl.sum(g * normalized, axis=1) / n_cols)[:, None])
            tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if dweight_ptr is not None:
            dweight += tl.sum(dscaled * rounded, axis=0)
    if dweight_ptr is not None:
        tl.store(dweight_ptr + program.to(tl.int64) * n_cols + cols, dweight, mask=cols < n_cols)


def _allocate_forward(x: Tensor) -> tuple[Tensor, Tensor]:
    return empty_result(x), number_per_row(x)


def _is_exact(*tensors: Tensor) -> bool:
    return any(t.dtype == torch.float32 for t in tensors)


@register("gated_rms_norm_forward", fake=_allocate_forward)
def _forward(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, rstd = _allocate_forward(x)
    rows, (sizes, tile, programs, warps) = row_launch(x, z)
    exact = _is_exact(x, z)
    _forward_kernel[programs](*rows, weight.contiguous(), y, rstd, sizes, eps, tile, exact, num_warps=warps)
    return y, rstd


def _allocate_backward(
    x: Tensor, z: Tensor, weight: Tensor, needs_x: bool, needs_z: bool, needs_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_gradient(x, needs_x), empty_gradient(z, needs_z), empty_gradient(weight, needs_weight)


@register("gated_rms_norm_backward", fake=_allocate_backward)
def _backward(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, rstd: Tensor, needs_x: bool, needs_z: bool, needs_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dz, dweight = _allocate_backward(x, z, weight, needs_x, needs_z, needs_weight)
    rows, (sizes, tile, programs, warps) = persistent_row_launch(dy, x, z)
    addends = column_addends(x, programs, needs_weight)
    results = dx if needs_x else None, dz if needs_z else None, addends
    _backward_kernel[programs](
        *rows, weight.contiguous(), rstd, *results, sizes, tile, _is_exact(x, z), num_warps=warps
    )
    column_sums_(dweight, addends)
    return dx, dz, dweight


class _GatedRMSNorm(FusedFunction):
    @staticmethod
    def forward(ctx: FusedContext, x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = _forward(x, z, weight, eps)
        ctx.save_for_backward(x, z, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        *needed, _ = ctx.needs_input_grad
        return *if_needed(_backward(dy, *ctx.saved_tensors, *needed), needed), None


def gated_rms_norm(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    backend: Backend = "auto",
) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps) * silu(z)` over the last dimension, normalized and gated in fp32.

    Args:
        x: (..., H), any strides.
        z: (..., H) gate before its activation, any strides.
        weight: (H,).
        eps: added to the mean square.
        group_size: features of a group, each of which is normalized by its own mean square (Mamba-2); None for H.
        norm_before_gate: gate the normalized values (Qwen3-Next). False normalizes `x * silu(z)` (Mamba-2).
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        (..., H), contiguous, in the dtype of `x`.

    Raises:
        ValueError: the shapes do not match, `group_size` does not divide H, or `backend` does not support the tensors.
    """
    check_floats("gated_rms_norm", x=x, z=z, weight=weight)
    check_columns("gated_rms_norm", x, weight=weight)
    if z.shape != x.shape:
        raise ValueError(f"gated_rms_norm: z has shape {tuple(z.shape)}; expected {tuple(x.shape)}")
    if group_size is not None and (group_size < 1 or x.shape[-1] % group_size):
        raise ValueError(f"gated_rms_norm: group_size={group_size}; expected a divisor of H, {x.shape[-1]}")
    is_plain = group_size is None and norm_before_gate
    if is_plain and uses_triton(x, z, weight, backend=backend) and fits_registers(x, backend):
        return _GatedRMSNorm.apply(x, z, weight, eps)
    return reference(x, z, weight, eps, group_size, norm_before_gate)
