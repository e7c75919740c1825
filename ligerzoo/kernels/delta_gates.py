"""Decay and writing strength of the gated delta rule, from two small projections.

Forward:   g = -exp(A_log) * softplus(a + dt_bias)  in fp32;   beta = m * sigmoid(b)  with m = max_strength
Backward:  da = -dg * exp(A_log) * sigmoid(a + dt_bias),   dA_log = sum over rows of dg * g,
           ddt_bias = sum over rows of da,   db = m * dbeta * sigmoid(b) * sigmoid(-b)

Saved: the inputs. Elementwise functions are exact in fp32 for all dtypes: there are few elements.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.autograd import FusedContext, FusedFunction, if_needed, once_differentiable
from ligerzoo.kernels.delta_channel_gates import (
    GateGradients,
    channel_gates_backward,
    channel_gates_forward,
    new_gate_gradients,
    new_gates,
)
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, as_rows, cdiv, multiprocessors, uses_triton
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.math import exp, sigmoids, softplus_exactly
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


def reference(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, max_strength: float = 1.0) -> tuple[Tensor, Tensor]:
    """`delta_gates` in plain torch: the specification, the CPU path and the test oracle."""
    dtype = accumulation_dtype(a.dtype)
    rate = a_log.to(dtype).exp()
    g = -(rate if a.dim() == b.dim() else rate[:, None]) * softplus(a.to(dtype) + dt_bias.to(dtype))
    return g, (max_strength * sigmoid(b.to(dtype))).to(b.dtype)


class _Gates(NamedTuple):
    """The inputs, a and b as rows of adjacent columns."""

    a: Tensor
    b: Tensor
    a_log: Tensor
    dt_bias: Tensor
    a_stride: int
    b_stride: int
    n_rows: int
    n_cols: int


@jit
def _load_vectors(gates, cols):
    """exp(A_log) and dt_bias, in fp32."""
    rate = exp(tl.load(gates.a_log + cols, mask=cols < gates.n_cols, other=0.0).to(tl.float32), True)
    return rate, tl.load(gates.dt_bias + cols, mask=cols < gates.n_cols, other=0.0).to(tl.float32)


@jit
def _load_rows(gates, rows, cols, mask):
    """a and b, in fp32."""
    a = tl.load(gates.a + rows[:, None] * gates.a_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(gates.b + rows[:, None] * gates.b_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    return a, b


@kernel
def _forward_kernel(gates, g_ptr, beta_ptr, max_strength, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    mask = (rows < gates.n_rows)[:, None] & (cols < gates.n_cols)[None, :]
    rate, dt_bias = _load_vectors(gates, cols)
    a, b = _load_rows(gates, rows, cols, mask)
    offsets = rows[:, None] * gates.n_cols + cols[None, :]
    beta, _ = sigmoids(b, True)
    tl.store(g_ptr + offsets, -rate[None, :] * softplus_exactly(a + dt_bias[None, :]), mask=mask)
    tl.store(beta_ptr + offsets, (max_strength * beta).to(beta_ptr.dtype.element_ty), mask=mask)


@kernel
def _backward_kernel(
    gates, dg_ptr, dbeta_ptr, da_ptr, db_ptr, sums_ptr, max_strength, ROWS: tl.constexpr, COLS: tl.constexpr
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    cols = tl.arange(0, COLS)
    rate, dt_bias = _load_vectors(gates, cols)
    da_log = tl.zeros((COLS,), dtype=tl.float32)
    ddt_bias = tl.zeros((COLS,), dtype=tl.float32)
    for block in range(program, tl.cdiv(gates.n_rows, ROWS), programs):
        rows = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (rows < gates.n_rows)[:, None] & (cols < gates.n_cols)[None, :]
        offsets = rows[:, None] * gates.n_cols + cols[None, :]
        a, b = _load_rows(gates, rows, cols, mask)
        dg = tl.load(dg_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * -rate[None, :]
        dbeta = tl.load(dbeta_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * max_strength
        a += dt_bias[None, :]
        slope, _ = sigmoids(a, True)
        beta, complement = sigmoids(b, True)
        da = dg * slope
        tl.store(da_ptr + offsets, da.to(da_ptr.dtype.element_ty), mask=mask)
        tl.store(db_ptr + offsets, (dbeta * beta * complement).to(db_ptr.dtype.element_ty), mask=mask)
        da_log += tl.sum(dg * softplus_exactly(a), 0)
        ddt_bias += tl.sum(da, 0)
    sums_ptr += program.to(tl.int64) * 2 * gates.n_cols + cols
    tl.store(sums_ptr, da_log, mask=cols < gates.n_cols)
    tl.store(sums_ptr + gates.n_cols, ddt_bias, mask=cols < gates.n_cols)


def _gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> _Gates:
    a, b = as_rows(a), as_rows(b)
    return _Gates(a, b, a_log.contiguous(), dt_bias.contiguous(), a.stride(0), b.stride(0), *a.shape)


@register("delta_gates_forward", fake=new_gates)
def _forward(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, max_strength: float) -> tuple[Tensor, Tensor]:
    g, beta = new_gates(a, b)
    gates = _gates(a, b, a_log, dt_bias)
    rows, cols, warps = tile(gates.n_cols, FORWARD_TILE)
    _forward_kernel[cdiv(gates.n_rows, rows)](gates, g, beta, max_strength, rows, cols, num_warps=warps)
    return g, beta


@register("delta_gates_backward", fake=new_gate_gradients)
def _backward(
    dg: Tensor, dbeta: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, max_strength: float
) -> GateGradients:
    gradients = new_gate_gradients(a, b, a_log, dt_bias)
    gates = _gates(a, b, a_log, dt_bias)
    n_cols = gates.n_cols
    rows, cols, warps = tile(n_cols, BACKWARD_TILE)
    programs = persistent_programs(gates.n_rows, rows, multiprocessors(a))
    sums = a.new_empty((programs, 2 * n_cols), dtype=torch.float32)
    results = gradients.da, gradients.db, sums
    _backward_kernel[programs](
        gates, dg.contiguous(), dbeta.contiguous(), *results, max_strength, rows, cols, num_warps=warps
    )
    totals = sums.new_empty(2 * n_cols)
    column_sums_(totals, sums)
    gradients.da_log.copy_(totals[:n_cols])
    gradients.ddt_bias.copy_(totals[n_cols:])
    return gradients


class _DeltaGates(FusedFunction):
    @staticmethod
    def forward(
        ctx: FusedContext, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, max_strength: float
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a, b, a_log, dt_bias)
        ctx.options = max_strength
        forward = channel_gates_forward if a.dim() > b.dim() else _forward
        return forward(a, b, a_log, dt_bias, max_strength)

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dg: Tensor, dbeta: Tensor) -> tuple[Tensor | None, ...]:
        a, b, a_log, dt_bias = ctx.saved_tensors
        backward = channel_gates_backward if a.dim() > b.dim() else _backward
        gradients = backward(dg, dbeta, a, b, a_log, dt_bias, ctx.options)
        return if_needed((*gradients, None), ctx.needs_input_grad)


def delta_gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, max_strength: float = 1.0, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """The decay `g` and the writing strength `beta` of `gated_delta_rule`.

    Args:
        a: (..., V), or (..., V, D_k) for gates per channel, any strides.
        b: (..., V), any strides.
        a_log: (V,), `A_log` of the models.
        dt_bias: (V,), or (V, D_k) for gates per channel.
        max_strength: strengths are between 0 and this.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        `g`, in the shape of `a`, in fp32 (fp64 for fp64 inputs), and `beta`, (..., V) in the dtype of `b`.

    Raises:
        ValueError: the shapes do not match, or `backend` does not support the tensors.
    """
    check_floats("delta_gates", a=a, b=b, a_log=a_log, dt_bias=dt_bias)
    is_per_channel = a.dim() == b.dim() + 1
    check_columns("delta_gates", a[..., 0] if is_per_channel else a, a_log=a_log)
    if b.shape != (a.shape[:-1] if is_per_channel else a.shape):
        raise ValueError(f"delta_gates: b has shape {tuple(b.shape)}; expected {tuple(a.shape)}, or without channels")
    if dt_bias.shape != (a.shape[-2:] if is_per_channel else a_log.shape):
        expected = tuple(a.shape[-2:] if is_per_channel else a_log.shape)
        raise ValueError(f"delta_gates: dt_bias has shape {tuple(dt_bias.shape)}; expected {expected}")
    if uses_triton(a, b, a_log, dt_bias, backend=backend) and fits_registers(a, backend):
        return _DeltaGates.apply(a, b, a_log, dt_bias, max_strength)
    return reference(a, b, a_log, dt_bias, max_strength)
