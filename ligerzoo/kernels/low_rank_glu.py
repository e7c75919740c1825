"""Gated linear units whose gate and up projections have low-rank updates, which the kernels add in registers.

Forward:   y = a(g) * u,   g = gate + s_g h_g B_g^T,   u = up + s_u h_u B_u^T,   in fp32, rounded once.
Backward:  du = dy * a(g),   dg = dy * u * a'(g),   dy = dz W + dh A of a down projection with an update too.

gate and up are the products of the frozen weights. So the products of the updates, which are as large, are neither
written nor read: only h and B, which have few columns. Saved: gate, up, h, B. g and u are computed again in backward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.activation import ACTIVATIONS, Activation, activate
from ligerzoo.kernels.dispatch import as_rows, cdiv, empty_gradient, next_power_of_2
from ligerzoo.kernels.grouped_mm import input_precision
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.registration import register

MAX_RANK = 32
"""Of gate, up and down. Matrices of higher ranks would fill the registers, and their products would take longer."""

_ROWS, _COLUMNS, _TILES, _WARPS = 16, 128, 8, 4
"""A program's tile, the number of tiles, one below the other, and warps.

Fewer than 64 rows: see `delta_chunks.PREPARE`.
"""


class LowRankTerms(NamedTuple):
    """What is added to gate and up: `gate_scale * h_g @ gate_b.T` and `up_scale * h_u @ up_b.T`.

    Attributes:
        h: (..., r_g + r_u), h_g and h_u, in the dtype of gate and up.
        gate_b: (I, r_g), of any dtype: rounded to that of h.
        up_b: (I, r_u), likewise.
        gate_scale: factor.
        up_scale: factor.
    """

    h: Tensor
    gate_b: Tensor
    up_b: Tensor
    gate_scale: float
    up_scale: float

    def add(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sums in plain torch."""
        gate_h, up_h = self.h.split([self.gate_b.shape[1], self.up_b.shape[1]], -1)
        gate = gate + self.gate_scale * (gate_h @ self.gate_b.to(gate_h.dtype).T)
        return gate, up + self.up_scale * (up_h @ self.up_b.to(up_h.dtype).T)


def reference(gate: Tensor, up: Tensor, terms: LowRankTerms, activation: Activation = "silu") -> Tensor:
    """y in plain torch: the specification and the test oracle."""
    gate, up = terms.add(gate, up)
    return ACTIVATIONS[activation](gate) * up


@jit
def _load_columns(b_ptr, col_stride, rank_stride, cols, in_cols, RANK: tl.constexpr, PADDED: tl.constexpr):
    """Columns of B^T, (PADDED, COLS), with zeros after the rank."""
    ranks = tl.arange(0, PADDED)[:, None]
    offsets = ranks * rank_stride + cols[None, :].to(tl.int64) * col_stride
    return tl.load(b_ptr + offsets, mask=(ranks < RANK) & in_cols[None, :], other=0.0)


@jit
def _product(h_ptr, h_stride, rows, in_rows, b, RANK: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr):
    """Rows of h @ B^T, in fp32."""
    ranks = tl.arange(0, PADDED)[None, :]
    h = tl.load(h_ptr + rows[:, None] * h_stride + ranks, mask=in_rows[:, None] & (ranks < RANK), other=0.0)
    return tl.dot(h, b, input_precision=PRECISION)


@kernel
def _forward_kernel(
    gate_ptr, up_ptr, h_ptr, gate_b_ptr, up_b_ptr, y_ptr, gate_stride, up_stride, h_stride, gate_scale, up_scale,
    n_rows, n_cols, GATE_RANK: tl.constexpr, UP_RANK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, TILES: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    col_tiles = tl.cdiv(n_cols, COLS)
    first = tl.program_id(0).to(tl.int64) // col_tiles * (ROWS * TILES)
    cols = tl.program_id(0) % col_tiles * COLS + tl.arange(0, COLS)
    in_cols = cols < n_cols
    gate_b = _load_columns(gate_b_ptr, GATE_RANK, 1, cols, in_cols, GATE_RANK, PADDED).to(h_ptr.dtype.element_ty)
    up_b = _load_columns(up_b_ptr, UP_RANK, 1, cols, in_cols, UP_RANK, PADDED).to(h_ptr.dtype.element_ty)
    for tile in range(TILES):
        rows = first + tile * ROWS + tl.arange(0, ROWS)
        in_rows = rows < n_rows
        mask = in_rows[:, None] & in_cols[None, :]
        gate = tl.load(gate_ptr + rows[:, None] * gate_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + rows[:, None] * up_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        gate += gate_scale * _product(h_ptr, h_stride, rows, in_rows, gate_b, GATE_RANK, PADDED, PRECISION)
        up += up_scale * _product(h_ptr + GATE_RANK, h_stride, rows, in_rows, up_b, UP_RANK, PADDED, PRECISION)
        activated, _ = activate(gate, ACTIVATION, gate_ptr.dtype.element_ty == tl.float32)
        y = (activated * up).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + rows[:, None] * n_cols + cols[None, :], y, mask=mask)


@kernel
def _backward_kernel(
    dy_ptr, gate_ptr, up_ptr, h_ptr, gate_b_ptr, up_b_ptr, dh_ptr, a_ptr, dgate_ptr, dup_ptr, y_ptr,
    dy_stride, gate_stride, up_stride, h_stride, gate_scale, up_scale, n_rows, n_cols,
    GATE_RANK: tl.constexpr, UP_RANK: tl.constexpr, DOWN_RANK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, TILES: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, NEEDS_Y: tl.constexpr,
):  # fmt: skip
    col_tiles = tl.cdiv(n_cols, COLS)
    first = tl.program_id(0).to(tl.int64) // col_tiles * (ROWS * TILES)
    cols = tl.program_id(0) % col_tiles * COLS + tl.arange(0, COLS)
    in_cols = cols < n_cols
    gate_b = _load_columns(gate_b_ptr, GATE_RANK, 1, cols, in_cols, GATE_RANK, PADDED).to(h_ptr.dtype.element_ty)
    up_b = _load_columns(up_b_ptr, UP_RANK, 1, cols, in_cols, UP_RANK, PADDED).to(h_ptr.dtype.element_ty)
    if DOWN_RANK:
        a = _load_columns(a_ptr, 1, n_cols, cols, in_cols, DOWN_RANK, PADDED).to(dh_ptr.dtype.element_ty)
    for tile in range(TILES):
        rows = first + tile * ROWS + tl.arange(0, ROWS)
        in_rows = rows < n_rows
        mask = in_rows[:, None] & in_cols[None, :]
        target = rows[:, None] * n_cols + cols[None, :]
        gate = tl.load(gate_ptr + rows[:, None] * gate_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + rows[:, None] * up_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        gate += gate_scale * _product(h_ptr, h_stride, rows, in_rows, gate_b, GATE_RANK, PADDED, PRECISION)
        up += up_scale * _product(h_ptr + GATE_RANK, h_stride, rows, in_rows, up_b, UP_RANK, PADDED, PRECISION)
        if DOWN_RANK:
            dy += _product(dh_ptr, DOWN_RANK, rows, in_rows, a, DOWN_RANK, PADDED, PRECISION)
        activated, slope = activate(gate, ACTIVATION, gate_ptr.dtype.element_ty == tl.float32)
        tl.store(dgate_ptr + target, (dy * up * slope).to(dgate_ptr.dtype.element_ty), mask=mask)
        tl.store(dup_ptr + target, (dy * activated).to(dup_ptr.dtype.element_ty), mask=mask)
        if NEEDS_Y:
            tl.store(y_ptr + target, (activated * up).to(y_ptr.dtype.element_ty), mask=mask)


def _programs(n_rows: int, n_cols: int) -> int:
    return cdiv(n_rows, _ROWS * _TILES) * cdiv(n_cols, _COLUMNS)


def _padded(*ranks: int) -> int:
    return max(16, next_power_of_2(max(ranks)))


def _allocate_forward(gate: Tensor, dtype: torch.dtype) -> Tensor:
    return gate.new_empty(gate.shape, dtype=dtype)


def _forward_flops(gate: Tensor, terms: LowRankTerms) -> int:
    return 2 * gate.numel() * terms.h.shape[-1]


@register("low_rank_glu_forward", fake=_allocate_forward, flops=_forward_flops)
def forward(gate: Tensor, up: Tensor, terms: LowRankTerms, activation: Activation, dtype: torch.dtype) -> Tensor:
    """Returns y in this dtype, (..., I), for gate and up of this shape."""
    y = _allocate_forward(gate, dtype)
    gate, up, h, gate_b, up_b = (as_rows(t) for t in (gate, up, *terms[:3]))
    ranks = gate_b.shape[1], up_b.shape[1]
    _forward_kernel[_programs(*gate.shape)](
        gate, up, h, gate_b.contiguous(), up_b.contiguous(), y, gate.stride(0), up.stride(0), h.stride(0), *terms[3:],
        *gate.shape, *ranks, _padded(*ranks), _ROWS, _COLUMNS, _TILES, activation, input_precision(), num_warps=_WARPS,
    )  # fmt: skip
    return y


def _allocate_backward(dy: Tensor, gate: Tensor, needs_y: bool) -> tuple[Tensor, Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape), empty_gradient(dy, needs_y)


def _backward_flops(gate: Tensor, a: Tensor | None) -> int:
    """Those of dh @ a. Products that are computed again are left out, as activation functions are."""
    return 0 if a is None else 2 * gate.numel() * len(a)


@register("low_rank_glu_backward", fake=_allocate_backward, flops=_backward_flops)
def backward(
    dy: Tensor, gate: Tensor, up: Tensor, terms: LowRankTerms, dh: Tensor | None, a: Tensor | None,
    activation: Activation, needs_y: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of gate and up for that of y, dy + dh @ a, and y if it is needed.

    Args:
        dy: (..., I).
        gate: (..., I).
        up: (..., I).
        terms: see `LowRankTerms`.
        dh: (T, r) or None.
        a: (r, I), of any dtype: rounded to that of dy; or None.
        activation: see `activation_linear`.
        needs_y: whether y is needed. Without elements if not.
    """
    dgate, dup, y = _allocate_backward(dy, gate, needs_y)
    dy, gate, up, h, gate_b, up_b = (as_rows(t) for t in (dy, gate, up, *terms[:3]))
    ranks = gate_b.shape[1], up_b.shape[1], 0 if a is None else len(a)
    dh, a = (None if t is None else t.contiguous() for t in (dh, a))
    _backward_kernel[_programs(*gate.shape)](
        dy, gate, up, h, gate_b.contiguous(), up_b.contiguous(), dh, a, dgate, dup, y,
        dy.stride(0), gate.stride(0), up.stride(0), h.stride(0), *terms[3:], *gate.shape, *ranks, _padded(*ranks),
        _ROWS, _COLUMNS, _TILES, activation, input_precision(), needs_y, num_warps=_WARPS,
    )  # fmt: skip
    return dgate, dup, y
