"""RMS normalization with an output gate: `weight * normalized x * silu(z)` as in Qwen3-Next, or `weight * normalized
x * silu(z)` with the gate within the norm as in Mamba-2.

Forward:   n = x * r,  r = 1 / sqrt(mean(x^2) + eps)  in fp32;
           y = round(round(weight * round(n)) * silu(z)).  round casts to the dtype of x (the inner product
           to the promoted dtype of x and the weight), silu is in fp32.
Backward:  with a = dy * silu(z) and g = a * weight:   dx = r * (g - n * mean(g * n)),
           dw = sum over rows of a * round(n),   dz = dy * round(weight * round(n)) * silu'(z).

The gate before the norm:   n = u * r,  u = x * silu(z),  r = 1 / sqrt(mean(u^2) + eps);   y = round(weight * round(n));
           with g = dy * weight:   du = r * (g - n * mean(g * n)),   dx = du * silu(z),   dz = du * x * silu'(z),
           dw = sum over rows of dy * round(n).

With a sigmoid in place of SiLU (Kimi Linear), only y is rounded.

A row may have several groups of features, each with its own mean square. A program has tiles of one group.

Saved: x, z, the weight and r (one fp32 number per group). Recomputed in backward: n and silu(z).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.autograd import FusedContext, FusedFunction, if_needed, once_differentiable
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, cdiv, empty_gradient, empty_result, uses_triton
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
)
from ligerzoo.kernels.torch_math import sigmoid, silu
from ligerzoo.tensor_checks import check_floats

GateActivation = Literal["silu", "sigmoid"]


def reference(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: GateActivation = "silu",
) -> Tensor:
    """`gated_rms_norm` in plain torch: the specification, the CPU path and the test oracle."""
    dtype = accumulation_dtype(x.dtype)
    gate, wide = (sigmoid if activation == "sigmoid" else silu)(z.to(dtype)), x.to(dtype)
    groups = (wide if norm_before_gate else wide * gate).unflatten(-1, (-1, group_size or x.shape[-1]))
    normalized = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    scaled = weight.to(dtype) * normalized if activation == "sigmoid" else weight * normalized.to(x.dtype)
    return (scaled * gate if norm_before_gate else scaled).to(x.dtype)


@jit
def _activated(z, SIGMOID: tl.constexpr, EXACT: tl.constexpr):
    """The activation of the gate, and its derivative."""
    sigmoid, complement = sigmoids(z, EXACT)
    if SIGMOID:
        return sigmoid, sigmoid * complement
    else:
        return z * sigmoid, sigmoid * (1.0 + z * complement)


@jit
def _rounded(normalized, x, SIGMOID: tl.constexpr):
    """Normalized x, rounded unless the gate is a sigmoid."""
    return normalized if SIGMOID else normalized.to(x.dtype).to(tl.float32)


@jit
def _rounded_product(normalized, wide_weight, x, weight, SIGMOID: tl.constexpr):
    """The product in fp32, rounded to the promoted dtype of x and the weight unless the gate is a sigmoid."""
    product = normalized * wide_weight[None, :]
    if x.dtype == weight.dtype and not SIGMOID:
        product = product.to(x.dtype).to(tl.float32)
    return product


@jit
def _rows_of_group(block, group, n_groups, cols, sizes, ROWS: tl.constexpr):
    """Rows of a tile, which are those of one group, and which of its elements exist."""
    rows = (tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)) * n_groups + group
    return rows, (rows < sizes.n_rows)[:, None] & (cols < sizes.n_cols)[None, :]


@kernel
def _forward_kernel(x, z, weight_ptr, y_ptr, rstd_ptr, sizes, n_groups, eps, TILE: tl.constexpr, GATING: tl.constexpr):
    NORM_FIRST: tl.constexpr = GATING[0]
    SIGMOID: tl.constexpr = GATING[1]
    EXACT: tl.constexpr = GATING[2]
    ROWS: tl.constexpr = TILE[0]
    COLS: tl.constexpr = TILE[1]
    cols = tl.arange(0, COLS)
    group = tl.program_id(0) % n_groups
    rows, mask = _rows_of_group(tl.program_id(0) // n_groups, group, n_groups, cols, sizes, ROWS)
    n_cols = sizes.n_cols
    x = load_rows(x, rows, cols, mask, sizes.group)
    z = load_rows(z, rows, cols, mask, sizes.group).to(tl.float32)
    weight = tl.load(weight_ptr + group * n_cols + cols, mask=cols < n_cols, other=0.0)
    gate, _ = _activated(z, SIGMOID, EXACT)
    u = x.to(tl.float32)
    if not NORM_FIRST:
        u *= gate
    rstd = 1.0 / tl.sqrt(tl.sum(u * u, axis=1) / n_cols + eps)
    normalized = _rounded(u * rstd[:, None], x, SIGMOID)
    y = _rounded_product(normalized, weight.to(tl.float32), x, weight, SIGMOID)
    if NORM_FIRST:
        y *= gate
    tl.store(rstd_ptr + rows, rstd, mask=rows < sizes.n_rows)
    tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _backward_kernel(
    dy, x, z, weight_ptr, rstd_ptr, dx_ptr, dz_ptr, dw_ptr, sizes, n_groups, TILE: tl.constexpr, GATING: tl.constexpr
):
    NORM_FIRST: tl.constexpr = GATING[0]
    SIGMOID: tl.constexpr = GATING[1]
    EXACT: tl.constexpr = GATING[2]
    group, program = tl.program_id(0) % n_groups, tl.program_id(0) // n_groups
    programs = tl.num_programs(0) // n_groups
    n_cols = sizes.n_cols
    ROWS: tl.constexpr = TILE[0]
    COLS: tl.constexpr = TILE[1]
    cols = tl.arange(0, COLS)
    weight = tl.load(weight_ptr + group * n_cols + cols, mask=cols < n_cols, other=0.0)
    wide_weight = weight.to(tl.float32)
    dweight = tl.zeros((COLS,), dtype=tl.float32)
    for block in range(program, tl.cdiv(sizes.n_rows // n_groups, ROWS), programs):
        rows, mask = _rows_of_group(block, group, n_groups, cols, sizes, ROWS)
        x_tile = load_rows(x, rows, cols, mask, sizes.group)
        gate = load_rows(z, rows, cols, mask, sizes.group).to(tl.float32)
        upstream = load_rows(dy, rows, cols, mask, sizes.group).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < sizes.n_rows, other=0.0)
        activated, slope = _activated(gate, SIGMOID, EXACT)
        u = x_tile.to(tl.float32)
        dscaled = upstream
        if NORM_FIRST:
            dscaled *= activated
        else:
            u *= activated
        normalized = u * rstd[:, None]
        rounded = _rounded(normalized, x_tile, SIGMOID)
        g = dscaled * wide_weight[None, :]
        du = rstd[:, None] * (g - normalized * (tl.sum(g * normalized, axis=1) / n_cols)[:, None])
        offsets = rows[:, None] * n_cols + cols[None, :]
        if dz_ptr is not None:
            if NORM_FIRST:
                dz = upstream * _rounded_product(rounded, wide_weight, x_tile, weight, SIGMOID) * slope
            else:
                dz = du * x_tile.to(tl.float32) * slope
            tl.store(dz_ptr + offsets, dz.to(dz_ptr.dtype.element_ty), mask=mask)
        if dx_ptr is not None:
            if not NORM_FIRST:
                du *= activated
            tl.store(dx_ptr + offsets, du.to(dx_ptr.dtype.element_ty), mask=mask)
        if dw_ptr is not None:
            dweight += tl.sum(dscaled * rounded, axis=0)
    if dw_ptr is not None:
        parts = dw_ptr + (program.to(tl.int64) * n_groups + group) * n_cols
        tl.store(parts + cols, dweight, mask=cols < n_cols)


class _Options(NamedTuple):
    """Options of the op.

    Attributes:
        eps: added to the mean square.
        group_size: features of a group.
        norm_first: gate the normalized values.
        is_sigmoid: the activation of the gate is a sigmoid instead of SiLU.
    """

    eps: float
    group_size: int
    norm_first: bool
    is_sigmoid: bool


def _in_groups(x: Tensor, options: _Options) -> Tensor:
    """(..., H) -> (..., groups, group size)."""
    if x.shape[-1] == options.group_size:
        return x
    return x.unflatten(-1, (-1, options.group_size))


def _allocate_forward(x: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
    return empty_result(x), number_per_row(_in_groups(x, options))


def _is_exact(*tensors: Tensor) -> bool:
    return any(t.dtype == torch.float32 for t in tensors)


@register("gated_rms_norm_forward", fake=lambda x, z, weight, options: _allocate_forward(x, options))
def _forward(x: Tensor, z: Tensor, weight: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
    y, rstd = _allocate_forward(x, options)
    rows, (sizes, tile, _, warps) = row_launch(*(_in_groups(t, options) for t in (x, z)))
    n_groups = x.shape[-1] // options.group_size
    programs = cdiv(sizes.n_rows // n_groups, tile[0]) * n_groups
    constants = tile, (options.norm_first, options.is_sigmoid, _is_exact(x, z))
    _forward_kernel[programs](
        *rows, weight.contiguous(), y, rstd, sizes, n_groups, options.eps, *constants, num_warps=warps
    )
    return y, rstd


class _Needs(NamedTuple):
    """Which gradients are needed."""

    x: bool
    z: bool
    weight: bool


def _allocate_backward(x: Tensor, z: Tensor, weight: Tensor, needs: _Needs) -> tuple[Tensor, Tensor, Tensor]:
    return empty_gradient(x, needs.x), empty_gradient(z, needs.z), empty_gradient(weight, needs.weight)


@register(
    "gated_rms_norm_backward",
    fake=lambda dy, x, z, weight, rstd, options, needs: _allocate_backward(x, z, weight, needs),
)
def _backward(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, rstd: Tensor, options: _Options, needs: _Needs
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dz, dweight = _allocate_backward(x, z, weight, needs)
    groups = (_in_groups(t, options) for t in (dy, x, z))
    rows, (sizes, tile, programs, warps) = persistent_row_launch(*groups, small=True)
    n_groups = x.shape[-1] // options.group_size
    programs = max(1, programs // n_groups)
    addends = column_addends(x, programs, needs.weight)
    results = dx if needs.x else None, dz if needs.z else None, addends
    constants = tile, (options.norm_first, options.is_sigmoid, _is_exact(x, z))
    _backward_kernel[programs * n_groups](
        *rows, weight.contiguous(), rstd, *results, sizes, n_groups, *constants, num_warps=warps
    )
    column_sums_(dweight, addends)
    return dx, dz, dweight


class _GatedRMSNorm(FusedFunction):
    @staticmethod
    def forward(ctx: FusedContext, x: Tensor, z: Tensor, weight: Tensor, *options: float) -> Tensor:
        eps, group_size, norm_first, is_sigmoid = options
        ctx.options = _Options(eps, int(group_size), bool(norm_first), bool(is_sigmoid))
        y, rstd = _forward(x, z, weight, ctx.options)
        ctx.save_for_backward(x, z, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs, (x, z, weight, rstd) = _Needs._make(ctx.needs_input_grad[:3]), ctx.saved_tensors
        return *if_needed(_backward(dy, x, z, weight, rstd, ctx.options, needs), needs), None, None, None, None


def gated_rms_norm(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: GateActivation = "silu",
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
        activation: of the gate: "silu", or "sigmoid" (Kimi Linear), with which the result is rounded once, at the end.
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
    size = x.shape[-1] if group_size is None else group_size
    if uses_triton(x, z, weight, backend=backend) and fits_registers(x[..., :size], backend):
        return _GatedRMSNorm.apply(x, z, weight, eps, size, norm_before_gate, activation == "sigmoid")
    return reference(x, z, weight, eps, group_size, norm_before_gate, activation)
