"""Two gradients of a low-rank update y = s h B^T that read dy, in one pass over it.

    dh = s dy @ B,   dB = s dy^T @ h

dy has as many columns as the layer has outputs, h and B have as many as the rank. So the time is that of reading dy,
which two products of torch read twice.

A program computes partial sums for some columns of dy: dh of its rows over these columns, dB of these columns over its
rows. Both are fp32. A second kernel adds them up in a fixed order and rounds once.

The partial sums of dh are `rank / COLUMNS` times as large as dy, in elements of 4 bytes that are written and read. So
the kernels run up to a rank of 32, and in 2-byte dtypes, where matrix units compute the products. torch computes all
others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import Backend, as_rows, cdiv, empty_result, multiprocessors, padded_size, uses_triton
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.registration import register

MAX_RANK = 32

_ROWS, _WARPS, _STAGES = 32, 4, 3
"""Rows of dy that a program reads at once, and how.

No product has 64 rows or more, for which Triton would use `wgmma`, see `delta_chunks.PREPARE`.
"""

_MIN_ROWS = 128
"""Fewest rows per program: fewer would write more partial sums of dB."""
_PROGRAMS_PER_MULTIPROCESSOR = 4

_PARTS, _SUMS, _SUM_WARPS = 16, 256, 4
"""Partial sums that a program of the second kernel reads at once, results per program, and warps."""


def scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Computes scale * a @ b, rounded once."""
    y = a.new_empty(len(a), b.shape[1])
    return torch.addmm(y, a, b, beta=0, alpha=scale, out=y)


def reference(dy: Tensor, b: Tensor, h: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`low_rank_gradients` in plain torch: the specification, the CPU path and the test oracle."""
    return scaled_product(dy, b.to(dy.dtype), scale), scaled_product(dy.T, h, scale).to(b.dtype)


@kernel
def _partial_kernel(
    dy_ptr, b_ptr, h_ptr, dh_ptr, db_ptr, dy_stride, h_stride, scale, n_rows, n_cols, rows_per_program,
    RANK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    col_blocks = tl.cdiv(n_cols, COLS)
    row_block, col_block = tl.program_id(0).to(tl.int64) // col_blocks, tl.program_id(0).to(tl.int64) % col_blocks
    first_row, first_col = row_block * rows_per_program, col_block * COLS
    dy_ptr += first_row * dy_stride + first_col
    h_ptr += first_row * h_stride
    b_ptr += first_col * RANK
    dh_ptr += (col_block * n_rows + first_row) * RANK
    db_ptr += (row_block * n_cols + first_col) * RANK

    rows, cols, ranks = tl.arange(0, ROWS), tl.arange(0, COLS), tl.arange(0, PADDED)
    in_cols, in_rank = cols < n_cols - first_col, ranks < RANK
    # Both products are transposed: the rank is their number of rows, and warps share the columns.
    b_offsets, b_mask = cols[:, None] * RANK + ranks[None, :], in_cols[:, None] & in_rank[None, :]
    b = tl.trans(tl.load(b_ptr + b_offsets, mask=b_mask, other=0.0).to(dy_ptr.dtype.element_ty))
    db = tl.zeros((PADDED, COLS), dtype=tl.float32)
    n_rows = tl.minimum(rows_per_program, n_rows - first_row).to(tl.int32)
    h_mask = (rows < n_rows)[:, None] & in_rank[None, :]
    h = tl.load(h_ptr + rows[:, None] * h_stride + ranks[None, :], mask=h_mask, other=0.0)
    for first in range(0, n_rows, ROWS):
        dy_mask = (rows < n_rows - first)[:, None] & in_cols[None, :]
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=dy_mask, other=0.0)
        # Triton does not load tiles as small as those of h ahead, so this loop does.
        h_ptr += ROWS * h_stride
        next_mask = (rows < n_rows - first - ROWS)[:, None] & in_rank[None, :]
        next_h = tl.load(h_ptr + rows[:, None] * h_stride + ranks[None, :], mask=next_mask, other=0.0)
        dh = scale * tl.trans(tl.dot(b, tl.trans(dy)))
        tl.store(dh_ptr + rows[:, None] * RANK + ranks[None, :], dh, mask=h_mask)
        db = tl.dot(tl.trans(h), dy, db)
        # Offsets within a tile fit in 32 bits, those of all rows may not.
        dy_ptr += ROWS * dy_stride
        dh_ptr += ROWS * RANK
        h, h_mask = next_h, next_mask
    tl.store(db_ptr + b_offsets, scale * tl.trans(db), mask=b_mask)


class _Sums(NamedTuple):
    """(n_parts, n_sums), whose columns are added up."""

    parts: Tensor
    total: Tensor
    n_parts: int
    n_sums: int


@jit
def _sum_of_parts(x, block, PARTS: tl.constexpr, SUMS: tl.constexpr):
    """Writes the sums of a block of columns."""
    sums = block.to(tl.int64) * SUMS + tl.arange(0, SUMS)
    in_sums = sums < x.n_sums
    total = tl.zeros((PARTS, SUMS), dtype=tl.float32)
    for first in range(0, x.n_parts, PARTS):
        parts = first + tl.arange(0, PARTS)
        mask = (parts < x.n_parts)[:, None] & in_sums[None, :]
        total += tl.load(x.parts + parts.to(tl.int64)[:, None] * x.n_sums + sums[None, :], mask=mask, other=0.0)
    tl.store(x.total + sums, tl.sum(total, axis=0).to(x.total.dtype.element_ty), mask=in_sums)


@kernel
def _sum_kernel(dh, db, PARTS: tl.constexpr, SUMS: tl.constexpr):
    program, dh_programs = tl.program_id(0), tl.cdiv(dh.n_sums, SUMS)
    if program < dh_programs:
        _sum_of_parts(dh, program, PARTS, SUMS)
    else:
        _sum_of_parts(db, program - dh_programs, PARTS, SUMS)


def sum_parts(dh_parts: Tensor, dh: Tensor, db_parts: Tensor, db: Tensor) -> None:
    """Writes the sums over the first dimension of fp32 parts to `dh` and `db`, rounded to their dtypes."""
    sums = (_Sums(parts, total, len(parts), total.numel()) for parts, total in ((dh_parts, dh), (db_parts, db)))
    programs = cdiv(dh.numel(), _SUMS) + cdiv(db.numel(), _SUMS)
    _sum_kernel[programs](*sums, _PARTS, _SUMS, num_warps=_SUM_WARPS)


def _columns(dy: Tensor) -> int:
    """Columns of a program: more have fewer partial sums of dh, but leave too few programs for a narrow dy."""
    return 256 if dy.shape[1] > 8192 else 128


def split_matrix(
    n_rows: int, n_cols: int, tile_rows: int, tile_cols: int, *, min_rows: int, programs: int
) -> tuple[int, int, int]:
    """Splits a matrix among about this many programs.

    Returns:
        The rows per program, `min_rows` or a multiple of the tile's, and the number of blocks of rows and of columns.
    """
    col_blocks = cdiv(n_cols, tile_cols)
    rows = cdiv(cdiv(n_rows, max(1, programs // col_blocks)), tile_rows) * tile_rows
    rows = max(min_rows, rows)
    return rows, cdiv(n_rows, rows), col_blocks


def _blocks(dy: Tensor) -> tuple[int, int, int]:
    programs = _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(dy)
    return split_matrix(len(dy), dy.shape[1], _ROWS, _columns(dy), min_rows=_MIN_ROWS, programs=programs)


def _allocate(dy: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return dy.new_empty(dy.shape[0], b.shape[1]), empty_result(b)


def _peak(dy: Tensor, b: Tensor) -> int:
    (_, row_blocks, col_blocks), (n_rows, n_cols), rank = _blocks(dy), dy.shape, b.shape[1]
    partial_sums = col_blocks * n_rows + row_blocks * n_cols
    return 4 * rank * partial_sums + rank * n_rows * dy.element_size() + b.nbytes


@register("low_rank_gradients", fake=_allocate, flops=lambda dy, b: 4 * dy.numel() * b.shape[1], peak=_peak)
def _gradients(dy: Tensor, b: Tensor, h: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    dh, db = _allocate(dy, b)
    dy, h, b = as_rows(dy), as_rows(h), b.contiguous()
    (rows_per_program, row_blocks, col_blocks), (n_rows, n_cols), rank = _blocks(dy), dy.shape, b.shape[1]
    dh_parts = dh.new_empty((col_blocks, *dh.shape), dtype=torch.float32)
    db_parts = db.new_empty((row_blocks, *db.shape), dtype=torch.float32)
    arguments = dy, b, h, dh_parts, db_parts, dy.stride(0), h.stride(0), scale, n_rows, n_cols, rows_per_program
    constants = rank, padded_size(rank), _ROWS, _columns(dy)
    _partial_kernel[row_blocks * col_blocks](*arguments, *constants, num_warps=_WARPS, num_stages=_STAGES)
    sum_parts(dh_parts, dh, db_parts, db)
    return dh, db


def low_rank_gradients(
    dy: Tensor, b: Tensor, h: Tensor, scale: float, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Computes dh = scale * dy @ b, (T, r) in the dtype of `dy`, and db = scale * dy.T @ h, (O, r) in that of `b`.

    Args:
        dy: (T, O), any strides.
        b: (O, r), of any dtype: rounded to that of `dy`.
        h: (T, r), in the dtype of `dy`, any strides.
        scale: factor of both.
        backend: "auto" or "triton" (the kernels where they are supported) or "torch" (the reference).
    """
    is_supported = dy.element_size() == 2 and dy.numel() > 0 and 0 < b.shape[1] <= MAX_RANK
    if is_supported and uses_triton(dy, b, h, backend=backend):
        return _gradients(dy, b, h, scale)
    return reference(dy, b, h, scale)
