"""Decay and writing strength of the gated delta rule, from two small projections.

Forward:   g = -exp(A_log) * softplus(a + dt_bias)  in fp32;   beta = sigmoid(b)
Backward:  da = -dg * exp(A_log) * sigmoid(a + dt_bias),   dA_log = sum over rows of dg * g,
           ddt_bias = sum over rows of da,   db = dbeta * sigmoid(b) * sigmoid(-b)

Saved: the inputs. Elementwise functions are exact in fp32 for all dtypes: there are few elements.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.autograd import FusedFunction, once_differentiable
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, as_rows, cdiv, uses_triton
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.math import exp, sigmoids
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.tiling import (
    BACKWARD_TILE,
    FORWARD_TILE,
    check_columns,
    column_sums_,
    fits_registers,
    persistent_programs,
    tile,
)
from ligerzoo.kernels.torch_math import sigmoid, softplus
from ligerzoo.tensor_checks import check_floats


def reference(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """`delta_gates` in plain torch: the specification, the CPU path and the test oracle."""
    dtype = accumulation_dtype(a.dtype)
    return -a_log.to(dtype).exp() * softplus(a.to(dtype) + dt_bias.to(dtype)), sigmoid(b.to(dtype)).to(b.dtype)


@jit
def _softplus(x):
    """log(1 + e^x) = max(x, 0) + log(1 + d) with d = e^-|x|. s = d / (2 + d) <= 1/3 has 2 artanh(s) = log(1 + d)."""
    decay = exp(-tl.abs(x), True)
    s = decay / (2.0 + decay)
    u = s * s
    series = 1.0 / 9.0 + u * (1.0 / 11.0 + u * (1.0 / 13.0 + u * (1.0 / 15.0)))
    series = 1.0 + u * (1.0 / 3.0 + u * (1.0 / 5.0 + u * (1.0 / 7.0 + u * series)))
    return tl.maximum(x, 0.0) + 2.0 * s * series


@kernel
def _forward_kernel(
    a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, g_ptr, beta_ptr, a_stride, b_stride, n_rows, n_cols,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    rate = exp(tl.load(a_log_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32), True)
    dt_bias = tl.load(dt_bias_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    a = tl.load(a_ptr + rows[:, None] * a_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + rows[:, None] * b_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    offsets = rows[:, None] * n_cols + cols[None, :]
    beta, _ = sigmoids(b, True)
    tl.store(g_ptr + offsets, -rate[None, :] * _softplus(a + dt_bias[None, :]), mask=mask)
    tl.store(beta_ptr + offsets, beta.to(beta_ptr.dtype.element_ty), mask=mask)


@kernel
def _backward_kernel(
    dg_ptr, dbeta_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, da_ptr, db_ptr, sums_ptr, a_stride, b_stride, n_rows,
    n_cols, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    cols = tl.arange(0, COLS)
    rate = exp(tl.load(a_log_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32), True)
    dt_bias = tl.load(dt_bias_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    da_log = tl.zeros((COLS,), dtype=tl.float32)
    ddt_bias = tl.zeros((COLS,), dtype=tl.float32)
    for block in range(program, tl.cdiv(n_rows, ROWS), programs):
        rows = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        offsets = rows[:, None] * n_cols + cols[None, :]
        a = tl.load(a_ptr + rows[:, None] * a_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + rows[:, None] * b_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dg = tl.load(dg_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * -rate[None, :]
        dbeta = tl.load(dbeta_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        a += dt_bias[None, :]
        slope, _ = sigmoids(a, True)
        beta, complement = sigmoids(b, True)
        da = dg * slope
        tl.store(da_ptr + offsets, da.to(da_ptr.dtype.element_ty), mask=mask)
        tl.store(db_ptr + offsets, (dbeta * beta * complement).to(db_ptr.dtype.element_ty), mask=mask)
        da_log += tl.sum(dg * _softplus(a), 0)
        ddt_bias += tl.sum(da, 0)
    sums_ptr += program.to(tl.int64) * 2 * n_cols + cols
    tl.store(sums_ptr, da_log, mask=cols < n_cols)
    tl.store(sums_ptr + n_cols, ddt_bias, mask=cols < n_cols)


def _allocate_forward(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape, dtype=torch.float32), b.new_empty(b.shape)


@register("delta_gates_forward", fake=_allocate_forward)
def _forward(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    g, beta = _allocate_forward(a, b)
    a, b = as_rows(a), as_rows(b)
    n_rows, n_cols = a.shape
    tile_rows, tile_cols, warps = tile(n_cols, FORWARD_TILE)
    _forward_kernel[cdiv(n_rows, tile_rows)](
        a, b, a_log.contiguous(), dt_bias.contiguous(), g, beta, a.stride(0), b.stride(0), n_rows, n_cols, tile_rows,
        tile_cols, num_warps=warps,
    )  # fmt: skip
    return g, beta


class _Gradients(NamedTuple):
    da: Tensor
    db: Tensor
    da_log: Tensor
    ddt_bias: Tensor


def _allocate_backward(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> _Gradients:
    return _Gradients(*(t.new_empty(t.shape) for t in (a, b, a_log, dt_bias)))


@register("delta_gates_backward", fake=_allocate_backward)
def _backward(dg: Tensor, dbeta: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> _Gradients:
    gradients = _allocate_backward(a, b, a_log, dt_bias)
    a, b = as_rows(a), as_rows(b)
    n_rows, n_cols = a.shape
    tile_rows, tile_cols, warps = tile(n_cols, BACKWARD_TILE)
    programs = persistent_programs(n_rows, tile_rows, a)
    sums = a.new_empty((programs, 2 * n_cols), dtype=torch.float32)
    _backward_kernel[programs](
        dg.contiguous(), dbeta.contiguous(), a, b, a_log.contiguous(), dt_bias.contiguous(), gradients.da,
        gradients.db, sums, a.stride(0), b.stride(0), n_rows, n_cols, tile_rows, tile_cols, num_warps=warps,
    )  # fmt: skip
    totals = sums.new_empty(2 * n_cols)
    column_sums_(totals, sums)
    gradients.da_log.copy_(totals[:n_cols])
    gradients.ddt_bias.copy_(totals[n_cols:])
    return gradients


class _DeltaGates(FusedFunction):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a, b, a_log, dt_bias)
        return _forward(a, b, a_log, dt_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dg: Tensor, dbeta: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _backward(dg, dbeta, *ctx.saved_tensors)
        return tuple(g if is_needed else None for g, is_needed in zip(gradients, ctx.needs_input_grad, strict=True))


def delta_gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """The decay `g` and the writing strength `beta` of `gated_delta_rule`.

    Args:
        a: (..., V), any strides.
        b: (..., V), any strides.
        a_log: (V,), `A_log` of the models.
        dt_bias: (V,).
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        `g`, (..., V) in fp32 (fp64 for fp64 inputs), and `beta`, (..., V) in the dtype of `b`.

    Raises:
        ValueError: the shapes do not match, or `backend` does not support the tensors.
    """
    check_floats("delta_gates", a=a, b=b, a_log=a_log, dt_bias=dt_bias)
    check_columns("delta_gates", a, a_log=a_log, dt_bias=dt_bias)
    if b.shape != a.shape:
        raise ValueError(f"delta_gates: b has shape {tuple(b.shape)}; expected {tuple(a.shape)}")
    if uses_triton(a, b, a_log, dt_bias, backend=backend) and fits_registers(a, backend):
        return _DeltaGates.apply(a, b, a_log, dt_bias)
    return reference(a, b, a_log, dt_bias)
