"""Decays per channel and writing strength of the gated delta rule, in the notation of `delta_gates`.

Forward:   g_hc = -exp(A_log_h) * softplus(a_hc + dt_bias_hc)  in fp32,   beta_h = m * sigmoid(b_h)
Backward:  that of `delta_gates`; dA_log_h sums over the channels c too.

Saved: the inputs. A program has rows of one head. Elementwise functions are exact in fp32 for all dtypes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import as_rows, cdiv, empty_result, multiprocessors
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.math import exp, sigmoids, softplus_exactly
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.tiling import BACKWARD_TILE, FORWARD_TILE, column_sums_, persistent_programs, tile


class _Gates(NamedTuple):
    """The inputs, a and b as rows of adjacent columns.

    Attributes:
        a: (rows, V * D).
        b: (rows, V).
        a_log: (V,).
        dt_bias: (V, D).
        a_stride: distance of rows.
        b_stride: likewise.
        n_rows: number of rows.
        n_heads: V.
        n_cols: D.
    """

    a: Tensor
    b: Tensor
    a_log: Tensor
    dt_bias: Tensor
    a_stride: int
    b_stride: int
    n_rows: int
    n_heads: int
    n_cols: int


@jit
def _load_head(gates, head, cols):
    """exp(A_log), a number, and dt_bias, in fp32."""
    rate = exp(tl.load(gates.a_log + head).to(tl.float32), True)
    dt_bias = tl.load(gates.dt_bias + head * gates.n_cols + cols, mask=cols < gates.n_cols, other=0.0)
    return rate, dt_bias.to(tl.float32)


@jit
def _load_rows(gates, rows, head, cols, mask):
    """a and b of a head, in fp32."""
    a_ptrs = gates.a + rows[:, None] * gates.a_stride + (head * gates.n_cols + cols)[None, :]
    b = tl.load(gates.b + rows * gates.b_stride + head, mask=rows < gates.n_rows, other=0.0)
    return tl.load(a_ptrs, mask=mask, other=0.0).to(tl.float32), b.to(tl.float32)


@kernel
def _forward_kernel(gates, g_ptr, beta_ptr, max_strength, ROWS: tl.constexpr, COLS: tl.constexpr):
    head, block = tl.program_id(0) % gates.n_heads, tl.program_id(0) // gates.n_heads
    rows = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    mask = (rows < gates.n_rows)[:, None] & (cols < gates.n_cols)[None, :]
    rate, dt_bias = _load_head(gates, head, cols)
    a, b = _load_rows(gates, rows, head, cols, mask)
    heads = rows * gates.n_heads + head
    beta, _ = sigmoids(b, True)
    tl.store(
        g_ptr + heads[:, None] * gates.n_cols + cols[None, :], -rate * softplus_exactly(a + dt_bias[None, :]), mask=mask
    )
    tl.store(beta_ptr + heads, (max_strength * beta).to(beta_ptr.dtype.element_ty), mask=rows < gates.n_rows)


@kernel
def _backward_kernel(
    gates, dg_ptr, dbeta_ptr, da_ptr, db_ptr, sums_ptr, max_strength, ROWS: tl.constexpr, COLS: tl.constexpr
):
    head, program = tl.program_id(0) % gates.n_heads, tl.program_id(0) // gates.n_heads
    programs = tl.num_programs(0) // gates.n_heads
    cols = tl.arange(0, COLS)
    rate, dt_bias = _load_head(gates, head, cols)
    da_log = tl.zeros((COLS,), dtype=tl.float32)
    ddt_bias = tl.zeros((COLS,), dtype=tl.float32)
    for block in range(program, tl.cdiv(gates.n_rows, ROWS), programs):
        rows = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (rows < gates.n_rows)[:, None] & (cols < gates.n_cols)[None, :]
        a, b = _load_rows(gates, rows, head, cols, mask)
        heads = rows * gates.n_heads + head
        offsets = heads[:, None] * gates.n_cols + cols[None, :]
        dg = tl.load(dg_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * -rate
        dbeta = tl.load(dbeta_ptr + heads, mask=rows < gates.n_rows, other=0.0).to(tl.float32) * max_strength
        a += dt_bias[None, :]
        slope, _ = sigmoids(a, True)
        beta, complement = sigmoids(b, True)
        da = dg * slope
        db = dbeta * beta * complement
        tl.store(da_ptr + offsets, da.to(da_ptr.dtype.element_ty), mask=mask)
        tl.store(db_ptr + heads, db.to(db_ptr.dtype.element_ty), mask=rows < gates.n_rows)
        da_log += tl.sum(dg * softplus_exactly(a), 0)
        ddt_bias += tl.sum(da, 0)
    n_channels = gates.n_heads * gates.n_cols
    sums_ptr += program.to(tl.int64) * 2 * n_channels + head * gates.n_cols + cols
    tl.store(sums_ptr, da_log, mask=cols < gates.n_cols)
    tl.store(sums_ptr + n_channels, ddt_bias, mask=cols < gates.n_cols)


def _gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> _Gates:
    a_rows, b_rows = as_rows(a.flatten(-2)), as_rows(b)
    strides = a_rows.stride(0), b_rows.stride(0)
    return _Gates(a_rows, b_rows, a_log.contiguous(), dt_bias.contiguous(), *strides, len(b_rows), *a.shape[-2:])


def new_gates(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns decays and strengths that are not computed yet."""
    return empty_result(a, torch.float32), empty_result(b)


@register("delta_channel_gates_forward", fake=new_gates)
def channel_gates_forward(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, max_strength: float
) -> tuple[Tensor, Tensor]:
    """Computes the decays and strengths of `delta_gates` with decays per channel."""
    g, beta = new_gates(a, b)
    gates = _gates(a, b, a_log, dt_bias)
    rows, cols, warps = tile(gates.n_cols, FORWARD_TILE)
    programs = cdiv(gates.n_rows, rows) * gates.n_heads
    _forward_kernel[programs](gates, g, beta, max_strength, rows, cols, num_warps=warps)
    return g, beta


class GateGradients(NamedTuple):
    """Gradients of the inputs of gates."""

    da: Tensor
    db: Tensor
    da_log: Tensor
    ddt_bias: Tensor


def new_gate_gradients(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> GateGradients:
    """Returns gradients that are not computed yet."""
    return GateGradients(*(empty_result(t) for t in (a, b, a_log, dt_bias)))


@register("delta_channel_gates_backward", fake=new_gate_gradients)
def channel_gates_backward(
    dg: Tensor, dbeta: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, max_strength: float
) -> GateGradients:
    """Computes the gradients of `channel_gates_forward`."""
    gradients = new_gate_gradients(a, b, a_log, dt_bias)
    gates = _gates(a, b, a_log, dt_bias)
    heads, channels = gates.n_heads, dt_bias.numel()
    rows, cols, warps = tile(gates.n_cols, BACKWARD_TILE)
    programs = max(1, persistent_programs(gates.n_rows * heads, rows, multiprocessors(a)) // heads)
    sums = a.new_empty((programs, 2 * channels), dtype=torch.float32)
    results = gradients.da, gradients.db, sums
    _backward_kernel[programs * heads](
        gates, dg.contiguous(), dbeta.contiguous(), *results, max_strength, rows, cols, num_warps=warps
    )
    totals = sums.new_empty(2 * channels)
    column_sums_(totals, sums)
    gradients.da_log.copy_(totals[:channels].view(heads, -1).sum(1))
    gradients.ddt_bias.copy_(totals[channels:].view_as(dt_bias))
    return gradients
