"""All gradients of a gated linear unit with low-rank terms (see `low_rank_glu`), in one pass over gate, up and dy.

With y = a(g) * u,   g = gate + s_g h_g B_g^T,   u = up + s_u h_u B_u^T,   and z = y W^T + s y A^T B^T after it:

    dy = dz W + dh A,   du = dy * a(g),   dg = dy * u * a'(g),
    dh_i = s_i di B_i,   dB_i = s_i di^T h_i   for i = g and u,   dA = dh^T y.

dh, the gradient of y A^T, and the product dz W are given. gate, up, dy and their gradients have many columns, all
others few. So the time is that of reading and writing five large matrices. y is not written, unless dW needs it.

A program computes dg and du for some columns of some rows, and partial sums: dh_i of its rows over these columns, dB_i
and dA of these columns over its rows. They are fp32, and added up in a fixed order by the kernel of
`low_rank_gradients`.

The sums run over whole tiles. So an infinity or NaN in h or B may reach gradients of h and B that are finite in plain
torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.activation import Activation, activate
from ligerzoo.kernels.dispatch import empty_gradient, multiprocessors, padded_size
from ligerzoo.kernels.jit import kernel, tl
from ligerzoo.kernels.low_rank import LowRankTerms
from ligerzoo.kernels.low_rank_glu import load_b, load_h, load_with_term, rows_of
from ligerzoo.kernels.low_rank_gradients import split_matrix, sum_parts
from ligerzoo.kernels.registration import register

_ROWS, _COLUMNS, _WARPS, _STAGES = 16, 128, 4, 3
"""Rows and columns that a program reads at once, and how.

No product has 64 rows or more, for which Triton would use `wgmma`, see `delta_chunks.PREPARE`.
"""

_MIN_ROWS = 128
"""Fewest rows per program: fewer would write more partial sums of dB and dA."""
_PROGRAMS_PER_MULTIPROCESSOR = 8


class LowRankGLUGradients(NamedTuple):
    """Gradients of a gated linear unit with low-rank terms, and y.

    Attributes:
        gate: (..., I).
        up: (..., I).
        h: (..., r_g + r_u).
        factors: those of gate_b, (I, r_g), of up_b, (I, r_u), and of a, (r, I), one after the other, (n,), in fp32.
        y: (..., I), without elements if it is not needed.
    """

    gate: Tensor
    up: Tensor
    h: Tensor
    factors: Tensor
    y: Tensor

    def of_factors(self, terms: LowRankTerms, a: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the gradients of gate_b, up_b and a in the dtypes and shapes of these; in fp32, they share memory."""
        all_factors = [terms.gate_b, terms.up_b, *([] if a is None else [a])]
        parts = self.factors.split([factor.numel() for factor in all_factors])
        found = [part.view(factor.shape).to(factor.dtype) for part, factor in zip(parts, all_factors, strict=True)]
        return found[0], found[1], None if a is None else found[2]


class _Down(NamedTuple):
    """The gradient of y A^T, (T, r), A, and a factor of 1."""

    dh: Tensor | None
    a: Tensor | None
    scale: float


@kernel
def _partial_kernel(
    dy_rows, gate_rows, up_rows, terms, h_stride, down, gradients, y_ptr, n_rows, n_cols, rows_per_program,
    GATE_RANK: tl.constexpr, UP_RANK: tl.constexpr, DOWN_RANK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    col_blocks = tl.cdiv(n_cols, COLS)
    row_block, col_block = tl.program_id(0).to(tl.int64) // col_blocks, tl.program_id(0).to(tl.int64) % col_blocks
    first_row, first_col = row_block * rows_per_program, col_block * COLS
    BOTH: tl.constexpr = GATE_RANK + UP_RANK
    dtype = gate_rows.ptr.dtype.element_ty
    dy_ptr = dy_rows.ptr + first_row * dy_rows.stride + first_col
    gate_ptr = gate_rows.ptr + first_row * gate_rows.stride + first_col
    up_ptr = up_rows.ptr + first_row * up_rows.stride + first_col
    dgate_ptr = gradients.gate + first_row * n_cols + first_col
    dup_ptr = gradients.up + first_row * n_cols + first_col
    if y_ptr is not None:
        y_ptr += first_row * n_cols + first_col
    h_ptr = terms.h + first_row * h_stride
    dh_ptr = gradients.h + (col_block * n_rows + first_row) * BOTH
    dab_ptr = gradients.factors + row_block * n_cols * (BOTH + DOWN_RANK)

    cols = tl.arange(0, COLS)
    in_cols = cols < n_cols - first_col
    gate_b_ptr, up_b_ptr = terms.gate_b + first_col * GATE_RANK, terms.up_b + first_col * UP_RANK
    gate_b = load_b(gate_b_ptr, GATE_RANK, 1, cols, in_cols, GATE_RANK, PADDED).to(dtype)
    up_b = load_b(up_b_ptr, UP_RANK, 1, cols, in_cols, UP_RANK, PADDED).to(dtype)
    # Loaded again rather than transposed, so that each product finds its operand in shared memory as it reads it.
    gate_b_rows = load_h(gate_b_ptr, GATE_RANK, cols, in_cols, GATE_RANK, PADDED).to(dtype)
    up_b_rows = load_h(up_b_ptr, UP_RANK, cols, in_cols, UP_RANK, PADDED).to(dtype)
    dgate_b = tl.zeros((PADDED, COLS), dtype=tl.float32)
    dup_b = tl.zeros((PADDED, COLS), dtype=tl.float32)
    if DOWN_RANK:
        down_dh_ptr = down.dh + first_row * DOWN_RANK
        a = load_b(down.a + first_col, 1, n_cols, cols, in_cols, DOWN_RANK, PADDED).to(dtype)
        da = tl.zeros((PADDED, COLS), dtype=tl.float32)

    rows, ranks = tl.arange(0, ROWS), tl.arange(0, PADDED)
    n_rows = tl.minimum(rows_per_program, n_rows - first_row).to(tl.int32)
    in_rows = rows < n_rows
    gate_h = load_h(h_ptr, h_stride, rows, in_rows, GATE_RANK, PADDED)
    up_h = load_h(h_ptr + GATE_RANK, h_stride, rows, in_rows, UP_RANK, PADDED)
    if DOWN_RANK:
        down_dh = load_h(down_dh_ptr, DOWN_RANK, rows, in_rows, DOWN_RANK, PADDED)
    for first in range(0, n_rows, ROWS):
        # Triton does not load tiles as small as these ahead, so this loop does.
        in_next = rows < n_rows - first - ROWS
        h_ptr += ROWS * h_stride
        next_gate_h = load_h(h_ptr, h_stride, rows, in_next, GATE_RANK, PADDED)
        next_up_h = load_h(h_ptr + GATE_RANK, h_stride, rows, in_next, UP_RANK, PADDED)
        if DOWN_RANK:
            down_dh_ptr += ROWS * DOWN_RANK
            next_down_dh = load_h(down_dh_ptr, DOWN_RANK, rows, in_next, DOWN_RANK, PADDED)
        in_rows = rows < n_rows - first
        mask = in_rows[:, None] & in_cols[None, :]
        gate = load_with_term(gate_ptr, gate_rows.stride, rows, cols, mask, terms.gate_scale, gate_h, gate_b)
        up = load_with_term(up_ptr, up_rows.stride, rows, cols, mask, terms.up_scale, up_h, up_b)
        if DOWN_RANK:
            # The scale is 1. Without a factor, Triton would not load the tile of dy ahead, but add the product to it.
            dy = load_with_term(dy_ptr, dy_rows.stride, rows, cols, mask, down.scale, down_dh, a)
        else:
            dy_ptrs = dy_ptr + rows[:, None] * dy_rows.stride + cols[None, :]
            dy = tl.load(dy_ptrs, mask=mask, other=0.0).to(tl.float32)

        activated, slope = activate(gate, ACTIVATION, False)
        dgate, dup = (dy * up * slope).to(dtype), (dy * activated).to(dtype)
        target = rows[:, None] * n_cols + cols[None, :]
        tl.store(dgate_ptr + target, dgate, mask=mask)
        tl.store(dup_ptr + target, dup, mask=mask)
        if y_ptr is not None or DOWN_RANK:
            y = (activated * up).to(dtype)
            if y_ptr is not None:
                tl.store(y_ptr + target, y, mask=mask)
                y_ptr += ROWS * n_cols
            if DOWN_RANK:
                da = tl.dot(tl.trans(down_dh), y, da)
                down_dh = next_down_dh

        # These products are transposed: the rank is their number of rows, and warps share the columns.
        dgate_h = terms.gate_scale * tl.trans(tl.dot(tl.trans(gate_b_rows), tl.trans(dgate)))
        dup_h = terms.up_scale * tl.trans(tl.dot(tl.trans(up_b_rows), tl.trans(dup)))
        offsets = rows[:, None] * BOTH + ranks[None, :]
        tl.store(dh_ptr + offsets, dgate_h, mask=in_rows[:, None] & (ranks < GATE_RANK)[None, :])
        tl.store(dh_ptr + GATE_RANK + offsets, dup_h, mask=in_rows[:, None] & (ranks < UP_RANK)[None, :])
        dgate_b = tl.dot(tl.trans(gate_h), dgate, dgate_b)
        dup_b = tl.dot(tl.trans(up_h), dup, dup_b)
        # Offsets within a tile fit in 32 bits, those of all rows may not.
        dy_ptr += ROWS * dy_rows.stride
        gate_ptr += ROWS * gate_rows.stride
        up_ptr += ROWS * up_rows.stride
        dgate_ptr += ROWS * n_cols
        dup_ptr += ROWS * n_cols
        gate_h, up_h = next_gate_h, next_up_h
        dh_ptr += ROWS * BOTH

    all_cols = first_col + cols
    gate_offsets = all_cols[None, :] * GATE_RANK + ranks[:, None]
    up_offsets = all_cols[None, :] * UP_RANK + ranks[:, None]
    tl.store(dab_ptr + gate_offsets, terms.gate_scale * dgate_b, mask=(ranks < GATE_RANK)[:, None] & in_cols[None, :])
    dab_ptr += n_cols.to(tl.int64) * GATE_RANK
    tl.store(dab_ptr + up_offsets, terms.up_scale * dup_b, mask=(ranks < UP_RANK)[:, None] & in_cols[None, :])
    if DOWN_RANK:
        dab_ptr += n_cols.to(tl.int64) * UP_RANK
        a_mask = (ranks < DOWN_RANK)[:, None] & in_cols[None, :]
        tl.store(dab_ptr + ranks.to(tl.int64)[:, None] * n_cols + all_cols[None, :], da, mask=a_mask)


def _blocks(gate: Tensor) -> tuple[int, int, int]:
    n_rows, n_cols = gate.shape[:-1].numel(), gate.shape[-1]
    programs = _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(gate)
    return split_matrix(n_rows, n_cols, _ROWS, _COLUMNS, min_rows=_MIN_ROWS, programs=programs)


def _ranks(terms: LowRankTerms, a: Tensor | None) -> tuple[int, int, int]:
    return *terms.ranks, 0 if a is None else len(a)


def _allocate(dy: Tensor, gate: Tensor, terms: LowRankTerms, a: Tensor | None, needs_y: bool) -> LowRankGLUGradients:
    factors = gate.new_empty(gate.shape[-1] * sum(_ranks(terms, a)), dtype=torch.float32)
    dgate, dup, dh = (gate.new_empty(shape) for shape in (gate.shape, gate.shape, terms.h.shape))
    return LowRankGLUGradients(dgate, dup, dh, factors, empty_gradient(dy, needs_y))


def _flops(gate: Tensor, terms: LowRankTerms, a: Tensor | None) -> int:
    """Those of dh_i, dB_i, dh A and dA. Products that are computed again are left out, as activation functions are."""
    return 4 * gate.numel() * sum(_ranks(terms, a))


def _peak(gate: Tensor, terms: LowRankTerms, a: Tensor | None, needs_y: bool) -> int:
    (_, row_blocks, col_blocks), ranks = _blocks(gate), _ranks(terms, a)
    partial_sums = col_blocks * terms.h.numel() + row_blocks * gate.shape[-1] * sum(ranks)
    results = (3 if needs_y else 2) * gate.nbytes + terms.h.nbytes + 4 * gate.shape[-1] * sum(ranks)
    return results + 4 * partial_sums


@register("low_rank_glu_gradients", fake=_allocate, flops=_flops, peak=_peak)
def low_rank_glu_gradients(
    dy: Tensor, gate: Tensor, up: Tensor, terms: LowRankTerms, down_dh: Tensor | None, a: Tensor | None,
    activation: Activation, needs_y: bool,
) -> LowRankGLUGradients:  # fmt: skip
    """Returns the gradients for that of y, dy + down_dh @ a, and y if it is needed.

    Args:
        dy: (..., I).
        gate: (..., I).
        up: (..., I).
        terms: see `LowRankTerms`.
        down_dh: (T, r), gradient of y @ a.T, in the dtype of dy; or None.
        a: (r, I), of any dtype: rounded to that of dy; or None.
        activation: see `activation_linear`.
        needs_y: whether y is needed.
    """
    gradients = _allocate(dy, gate, terms, a, needs_y)
    rows_per_program, row_blocks, col_blocks = _blocks(gate)
    ranks = _ranks(terms, a)
    terms, operands = terms.contiguous(), [rows_of(t) for t in (dy, gate, up)]
    down_dh, a = (None if t is None else t.contiguous() for t in (down_dh, a))
    dh_parts = gate.new_empty((col_blocks, *terms.h.shape), dtype=torch.float32)
    factor_parts = gate.new_empty((row_blocks, len(gradients.factors)), dtype=torch.float32)
    outputs = LowRankGLUGradients(gradients.gate, gradients.up, dh_parts, factor_parts, gradients.y)
    sizes = *operands[1].ptr.shape, rows_per_program
    constants = *ranks, padded_size(*ranks), _ROWS, _COLUMNS, activation
    _partial_kernel[row_blocks * col_blocks](
        *operands, terms, terms.h.stride(0), _Down(down_dh, a, 1.0), outputs, gradients.y if needs_y else None, *sizes,
        *constants, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    sum_parts(dh_parts, gradients.h, factor_parts, gradients.factors)
    return gradients
