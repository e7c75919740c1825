"""Step sizes and decays of Mamba-2, from a small projection.

Forward:   dt = min(max(softplus(x + dt_bias), lowest), highest),   g = -exp(A_log) * dt   in fp32
Backward:  dx = (ddt - exp(A_log) * dg) * sigmoid(x + dt_bias), 0 beyond the limits,
           dA_log = sum over rows of dg * g,   ddt_bias = sum over rows of dx

Saved: the inputs. Elementwise functions are exact in fp32 for all dtypes: there are few elements.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.autograd import FusedContext, FusedFunction, if_needed, once_differentiable
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, empty_result, uses_triton
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.math import exp, sigmoids, softplus_exactly
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.tiling import (
    check_columns,
    column_addends,
    column_sums_,
    fits_registers,
    load_rows,
    persistent_row_launch,
    row_launch,
    tile_rows,
)
from ligerzoo.kernels.torch_math import softplus
from ligerzoo.tensor_checks import check_floats


def reference(
    x: Tensor, a_log: Tensor, dt_bias: Tensor, lowest: float = 0.0, highest: float = math.inf
) -> tuple[Tensor, Tensor]:
    """`ssd_gates` in plain torch: the specification, the CPU path and the test oracle."""
    dtype = accumulation_dtype(x.dtype)
    dt = softplus(x.to(dtype) + dt_bias.to(dtype))
    dt = torch.where(dt < lowest, lowest, torch.where(dt > highest, highest, dt))  # slope 1 at the limits
    return -a_log.to(dtype).exp() * dt, dt


class GateInputs(NamedTuple):
    """What the gates are computed from, see `ssd_gates`."""

    x: Tensor
    a_log: Tensor
    dt_bias: Tensor
    lowest: float
    highest: float


@jit
def _load_gates(x, vectors, rows, cols, mask, sizes):
    """exp(A_log), x + dt_bias, the step sizes, and where they are within the limits, in fp32."""
    a_log = tl.load(vectors.a_log + cols, mask=cols < sizes.n_cols, other=0.0).to(tl.float32)
    dt_bias = tl.load(vectors.dt_bias + cols, mask=cols < sizes.n_cols, other=0.0).to(tl.float32)
    shifted = load_rows(x, rows, cols, mask, sizes.group).to(tl.float32) + dt_bias[None, :]
    dt = softplus_exactly(shifted)
    is_within = (dt >= vectors.lowest) & (dt <= vectors.highest)
    dt = tl.where(dt < vectors.lowest, vectors.lowest, tl.where(dt > vectors.highest, vectors.highest, dt))
    return exp(a_log, True)[None, :], shifted, dt, is_within


@kernel
def _forward_kernel(x, vectors, g_ptr, dt_ptr, sizes, TILE: tl.constexpr):
    ROWS: tl.constexpr = TILE[0]
    COLS: tl.constexpr = TILE[1]
    cols = tl.arange(0, COLS)
    rows, mask = tile_rows(tl.program_id(0), cols, sizes, ROWS)
    rate, _, dt, _ = _load_gates(x, vectors, rows, cols, mask, sizes)
    offsets = rows[:, None] * sizes.n_cols + cols[None, :]
    tl.store(g_ptr + offsets, -rate * dt, mask=mask)
    tl.store(dt_ptr + offsets, dt, mask=mask)


@kernel
def _backward_kernel(dg_ptr, ddt_ptr, x, vectors, dx_ptr, da_log_ptr, dbias_ptr, sizes, TILE: tl.constexpr):
    ROWS: tl.constexpr = TILE[0]
    COLS: tl.constexpr = TILE[1]
    program, programs = tl.program_id(0), tl.num_programs(0)
    cols = tl.arange(0, COLS)
    da_log = tl.zeros((COLS,), dtype=tl.float32)
    dbias = tl.zeros((COLS,), dtype=tl.float32)
    for block in range(program, tl.cdiv(sizes.n_rows, ROWS), programs):
        rows, mask = tile_rows(block, cols, sizes, ROWS)
        rate, shifted, dt, is_within = _load_gates(x, vectors, rows, cols, mask, sizes)
        offsets = rows[:, None] * sizes.n_cols + cols[None, :]
        dg = tl.load(dg_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * -rate
        ddt = tl.load(ddt_ptr + offsets, mask=mask, other=0.0).to(tl.float32) + dg
        slope, _ = sigmoids(shifted, True)
        dx = tl.where(is_within, ddt * slope, 0.0)
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        da_log += tl.sum(dg * dt, 0)
        dbias += tl.sum(dx, 0)
    offsets = program.to(tl.int64) * sizes.n_cols + cols
    tl.store(da_log_ptr + offsets, da_log, mask=cols < sizes.n_cols)
    tl.store(dbias_ptr + offsets, dbias, mask=cols < sizes.n_cols)


def _contiguous(inputs: GateInputs) -> GateInputs:
    return inputs._replace(a_log=inputs.a_log.contiguous(), dt_bias=inputs.dt_bias.contiguous())


def _allocate_forward(inputs: GateInputs) -> tuple[Tensor, Tensor]:
    return empty_result(inputs.x, torch.float32), empty_result(inputs.x, torch.float32)


@register("ssd_gates_forward", fake=_allocate_forward)
def _forward(inputs: GateInputs) -> tuple[Tensor, Tensor]:
    g, dt = _allocate_forward(inputs)
    [x], (sizes, tile, programs, warps) = row_launch(inputs.x)
    _forward_kernel[programs](x, _contiguous(inputs), g, dt, sizes, tile, num_warps=warps)
    return g, dt


def _allocate_backward(inputs: GateInputs) -> tuple[Tensor, Tensor, Tensor]:
    return empty_result(inputs.x), empty_result(inputs.a_log), empty_result(inputs.dt_bias)


@register("ssd_gates_backward", fake=lambda dg, ddt, inputs: _allocate_backward(inputs))
def _backward(dg: Tensor, ddt: Tensor, inputs: GateInputs) -> tuple[Tensor, Tensor, Tensor]:
    dx, da_log, dbias = _allocate_backward(inputs)
    [x], (sizes, tile, programs, warps) = persistent_row_launch(inputs.x)
    addends = [column_addends(inputs.x, programs, True) for _ in range(2)]
    gates = x, _contiguous(inputs)
    _backward_kernel[programs](dg.contiguous(), ddt.contiguous(), *gates, dx, *addends, sizes, tile, num_warps=warps)
    for sums, parts in zip((da_log, dbias), addends, strict=True):
        column_sums_(sums, parts)
    return dx, da_log, dbias


class _SSDGates(FusedFunction):
    """The arguments are the fields of `GateInputs`."""

    @staticmethod
    def forward(ctx: FusedContext, x: Tensor, a_log: Tensor, dt_bias: Tensor, *limits: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, a_log, dt_bias)
        ctx.limits = limits
        return _forward(GateInputs(x, a_log, dt_bias, *limits))

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dg: Tensor, ddt: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _backward(dg, ddt, GateInputs(*ctx.saved_tensors, *ctx.limits))
        return *if_needed(gradients, ctx.needs_input_grad[:3]), None, None


def ssd_gates(
    x: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lowest: float = 0.0,
    highest: float = math.inf,
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """The decay `g` and the step size `dt` of `ssd`.

    Args:
        x: (..., N) step sizes before softplus, any strides.
        a_log: (N,), `A_log` of the models.
        dt_bias: (N,).
        lowest: lower limit of the step size.
        highest: upper limit of the step size.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        `g` and `dt`, (..., N) in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: the shapes do not match, or `backend` does not support the tensors.
    """
    check_floats("ssd_gates", x=x, a_log=a_log, dt_bias=dt_bias)
    check_columns("ssd_gates", x, a_log=a_log, dt_bias=dt_bias)
    if uses_triton(x, a_log, dt_bias, backend=backend) and fits_registers(x, backend):
        return _SSDGates.apply(x, a_log, dt_bias, float(lowest), float(highest))
    return reference(x, a_log, dt_bias, lowest, highest)
