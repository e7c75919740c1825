"""Gated linear units whose gate and up projections have low-rank updates, which the kernels add in registers.

y = a(g) * u,   g = gate + s_g h_g B_g^T,   u = up + s_u h_u B_u^T,   in fp32, rounded once.

gate and up are the products of the frozen weights. So the products of the updates, which are as large, are neither
written nor read: only h and B, which have few columns. Saved: gate, up, h, B. g and u are computed again in backward,
see `low_rank_glu_gradients`.

The kernels run in 2-byte dtypes, where matrix units compute the products. `glu_linear` adds others with torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.activation import ACTIVATIONS, Activation, activate
from ligerzoo.kernels.dispatch import as_rows, cdiv, empty_result, padded_size
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.low_rank import LowRankTerms
from ligerzoo.kernels.registration import register

MAX_RANK = 32
"""Of gate, up and down. Matrices of higher ranks would fill the registers, and their products would take longer."""

_ROWS, _COLUMNS, _TILES, _WARPS, _STAGES = 16, 128, 8, 4, 3
"""A program's tile, the number of tiles, one below the other, warps, and tiles that are loaded ahead.

Fewer than 64 rows: see `delta_chunks.PREPARE`.
"""


def reference(gate: Tensor, up: Tensor, terms: LowRankTerms, activation: Activation = "silu") -> Tensor:
    """y in plain torch: the specification and the test oracle."""
    gate, up = terms.add(gate, up)
    return ACTIVATIONS[activation](gate) * up


@jit
def load_b(b_ptr, col_stride, rank_stride, cols, in_cols, RANK: tl.constexpr, PADDED: tl.constexpr):
    """Columns of B^T, (PADDED, COLS), with zeros after the rank."""
    ranks = tl.arange(0, PADDED)[:, None]
    offsets = ranks * rank_stride + cols[None, :].to(tl.int64) * col_stride
    return tl.load(b_ptr + offsets, mask=(ranks < RANK) & in_cols[None, :], other=0.0)


@jit
def load_h(h_ptr, h_stride, rows, in_rows, RANK: tl.constexpr, PADDED: tl.constexpr):
    """Rows of h, (ROWS, PADDED), with zeros after the rank."""
    ranks = tl.arange(0, PADDED)[None, :]
    return tl.load(h_ptr + rows[:, None] * h_stride + ranks, mask=in_rows[:, None] & (ranks < RANK), other=0.0)


@jit
def load_with_term(x_ptr, x_stride, rows, cols, mask, scale, h, b):
    """x + scale * h @ b, in fp32."""
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    return x + scale * tl.dot(h, b)


class _Rows(NamedTuple):
    """A matrix of adjacent columns, as kernels read it."""

    ptr: Tensor
    stride: int


def rows_of(x: Tensor) -> _Rows:
    """(..., H)."""
    rows = as_rows(x)
    return _Rows(rows, rows.stride(0))


@kernel
def _forward_kernel(
    gate, up, terms, h_stride, y_ptr, n_rows, n_cols, GATE_RANK: tl.constexpr, UP_RANK: tl.constexpr,
    PADDED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    col_tiles = tl.cdiv(n_cols, COLS)
    first = tl.program_id(0).to(tl.int64) // col_tiles * (ROWS * TILES)
    cols = tl.program_id(0) % col_tiles * COLS + tl.arange(0, COLS)
    in_cols = cols < n_cols
    dtype = terms.h.dtype.element_ty
    gate_b = load_b(terms.gate_b, GATE_RANK, 1, cols, in_cols, GATE_RANK, PADDED).to(dtype)
    up_b = load_b(terms.up_b, UP_RANK, 1, cols, in_cols, UP_RANK, PADDED).to(dtype)
    rows = first + tl.arange(0, ROWS)
    gate_h = load_h(terms.h, h_stride, rows, rows < n_rows, GATE_RANK, PADDED)
    up_h = load_h(terms.h + GATE_RANK, h_stride, rows, rows < n_rows, UP_RANK, PADDED)
    for _ in tl.range(TILES, num_stages=STAGES):
        # Triton does not load tiles as small as those of h ahead, so this loop does.
        next_rows = rows + ROWS
        next_gate_h = load_h(terms.h, h_stride, next_rows, next_rows < n_rows, GATE_RANK, PADDED)
        next_up_h = load_h(terms.h + GATE_RANK, h_stride, next_rows, next_rows < n_rows, UP_RANK, PADDED)
        mask = (rows < n_rows)[:, None] & in_cols[None, :]
        full_gate = load_with_term(gate.ptr, gate.stride, rows, cols, mask, terms.gate_scale, gate_h, gate_b)
        full_up = load_with_term(up.ptr, up.stride, rows, cols, mask, terms.up_scale, up_h, up_b)
        activated, _ = activate(full_gate, ACTIVATION, False)
        y = (activated * full_up).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y, mask=mask)
        rows, gate_h, up_h = next_rows, next_gate_h, next_up_h


def _programs(n_rows: int, n_cols: int) -> int:
    return cdiv(n_rows, _ROWS * _TILES) * cdiv(n_cols, _COLUMNS)


def _allocate_forward(gate: Tensor, dtype: torch.dtype) -> Tensor:
    return empty_result(gate, dtype)


def _forward_flops(gate: Tensor, terms: LowRankTerms) -> int:
    return 2 * gate.numel() * terms.h.shape[-1]


@register("low_rank_glu_forward", fake=_allocate_forward, flops=_forward_flops)
def forward(gate: Tensor, up: Tensor, terms: LowRankTerms, activation: Activation, dtype: torch.dtype) -> Tensor:
    """Returns y in this dtype, (..., I), for gate and up of this shape."""
    y = _allocate_forward(gate, dtype)
    gate_rows, up_rows, terms = rows_of(gate), rows_of(up), terms.contiguous()
    sizes, ranks = gate_rows.ptr.shape, terms.ranks
    constants = *ranks, padded_size(*ranks), _ROWS, _COLUMNS, _TILES, _STAGES, activation
    _forward_kernel[_programs(*sizes)](
        gate_rows, up_rows, terms, terms.h.stride(0), y, *sizes, *constants, num_warps=_WARPS
    )
    return y
