"""Tiling of row-wise and elementwise kernels: tile sizes, row offsets, and column sums for weight gradients.

Row-wise kernels hold whole rows of (..., H) in the registers of a program.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import Backend, as_rows, cdiv, multiprocessors, next_power_of_2
from ligerzoo.kernels.jit import jit, kernel, tl

MAX_COLUMNS = 65536
"""Longer rows run in plain torch."""

FORWARD_TILE, BACKWARD_TILE = 2048, 8192
"""Approximate number of elements that a program holds in registers."""

_STRIP, STRIP_WARPS = 2048, 4
"""Elements and warps per program of an elementwise kernel, see `strips`."""

PROGRAMS_PER_MULTIPROCESSOR = 2
"""For backward kernels: a program loops over many tiles and accumulates its part of a weight gradient."""

_LAUNCHES = 4096
"""Bounds the caches of launches if each batch has another shape."""


def check_columns(operation: str, x: Tensor, **vectors: Tensor) -> None:
    """Raises ValueError unless each vector has shape (H,) for x of shape (..., H)."""
    for name, vector in vectors.items():
        if vector.shape != x.shape[-1:]:
            raise ValueError(f"{operation}: {name} has shape {tuple(vector.shape)}; expected {tuple(x.shape[-1:])}")


def fits_registers(x: Tensor, backend: Backend) -> bool:
    """Whether a row of x fits in the registers of a program.

    Raises:
        ValueError: it does not fit, and `backend` is "triton".
    """
    if x.shape[-1] <= MAX_COLUMNS:
        return True
    if backend == "triton":
        raise ValueError(
            f'backend="triton" with x {tuple(x.shape)}; expected at most {MAX_COLUMNS} columns, or backend="auto"'
        )
    return False


@functools.cache
def tile(n_cols: int, elements: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program that holds about `elements` elements. Several short rows share a program."""
    cols = next_power_of_2(n_cols)
    return max(1, elements // cols), cols, min(16, max(4, cols // 1024))


@functools.cache
def small_tile(n_cols: int) -> tuple[int, int, int]:
    """`tile` for kernels that hold about ten numbers for each element: 8 to 16 elements per thread if a row allows."""
    cols = next_power_of_2(n_cols)
    return max(1, 1024 // cols if cols < 512 else 1), cols, min(16, max(2, cols // 256))


def persistent_programs(
    n_rows: int, tile_rows: int, n_multiprocessors: int, per_multiprocessor: int = PROGRAMS_PER_MULTIPROCESSOR
) -> int:
    """Number of programs of a backward kernel. At least one: without rows it writes zeros to the weight gradient."""
    return max(1, min(cdiv(n_rows, tile_rows), per_multiprocessor * n_multiprocessors))


def number_per_row(x: Tensor) -> Tensor:
    """An uninitialized fp32 number for each row of x."""
    return x.new_empty(math.prod(x.shape[:-1]), dtype=torch.float32)


def group_size(*tensors: Tensor) -> int:
    """Number of rows in a group of `grouped`, for tensors of the same shape.

    1 if all are contiguous, else the size of the last dimension but one. For attention heads, (B, T, N, D), the rows of
    a group have the head stride and the groups have the token stride, so that no copy is needed.
    """
    for t in tensors:  # a loop takes half the time of `all`
        if not t.is_contiguous():
            return t.shape[-2] if t.dim() > 1 else 1
    return 1


class GroupedRows(NamedTuple):
    """A tensor (..., H) whose rows have unit stride, as kernels take it, see `grouped`."""

    ptr: Tensor
    group_stride: int
    row_stride: int


class RowSizes(NamedTuple):
    """Numbers of rows, of columns, and of rows in a group."""

    n_rows: int
    n_cols: int
    group: int


class RowLaunch(NamedTuple):
    """A launch of a row-wise kernel.

    Attributes:
        sizes: the sizes of its tensors.
        tile: rows and columns of a program.
        programs: number of programs.
        warps: warps per program.
    """

    sizes: RowSizes
    tile: tuple[int, int]
    programs: int
    warps: int


def row_launch(*tensors: Tensor) -> tuple[list[GroupedRows], RowLaunch]:
    """Launches one program per tile of tensors of the same shape. Returns the tensors as kernels take them."""
    group = group_size(*tensors)
    return [grouped(t, group) for t in tensors], _row_launch(tensors[0].shape, group)


def persistent_row_launch(*tensors: Tensor, small: bool = False) -> tuple[list[GroupedRows], RowLaunch]:
    """Launches programs that loop over tiles, for backward kernels, otherwise as `row_launch`.

    With `small`, tiles are those of `small_tile`, with 16 warps per multiprocessor.
    """
    first, group = tensors[0], group_size(*tensors)
    return [grouped(t, group) for t in tensors], _persistent_launch(first.shape, group, multiprocessors(first), small)


@functools.lru_cache(_LAUNCHES)
def _row_launch(shape: torch.Size, group: int) -> RowLaunch:
    sizes = RowSizes(shape[:-1].numel(), shape[-1], group)
    rows, cols, warps = tile(sizes.n_cols, FORWARD_TILE)
    return RowLaunch(sizes, (rows, cols), cdiv(sizes.n_rows, rows), warps)


@functools.lru_cache(_LAUNCHES)
def _persistent_launch(shape: torch.Size, group: int, n_multiprocessors: int, small: bool) -> RowLaunch:
    sizes = RowSizes(shape[:-1].numel(), shape[-1], group)
    rows, cols, warps = small_tile(sizes.n_cols) if small else tile(sizes.n_cols, BACKWARD_TILE)
    per_multiprocessor = 16 // warps if small else PROGRAMS_PER_MULTIPROCESSOR
    programs = persistent_programs(sizes.n_rows, rows, n_multiprocessors, per_multiprocessor)
    return RowLaunch(sizes, (rows, cols), programs, warps)


def grouped(x: Tensor, group: int) -> GroupedRows:
    """Returns x for kernels, in groups of this many rows. Copies x if its strides do not allow this."""
    if group == 1 and x.is_contiguous():
        n_cols = x.shape[-1]
        return GroupedRows(x, n_cols, n_cols)
    groups = x.reshape(-1, group, x.shape[-1])
    groups = groups if groups.stride(-1) == 1 else groups.contiguous()
    return GroupedRows(groups, groups.stride(0), groups.stride(1))


@jit
def tile_rows(block, cols, sizes, ROWS: tl.constexpr):
    """Rows of a tile, and which of its elements exist."""
    rows = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
    return rows, (rows < sizes.n_rows)[:, None] & (cols < sizes.n_cols)[None, :]


@jit
def load_rows(x, rows, cols, mask, group):
    """Elements of `GroupedRows`, 0 beyond the mask."""
    return tl.load(x.ptr + row_offsets(x, rows, group)[:, None] + cols[None, :], mask=mask, other=0.0)


@jit
def row_offsets(x, rows, group):
    """Offsets of the first elements of rows. Triton specializes on a group of 1 and drops the division."""
    return rows // group * x.group_stride + rows % group * x.row_stride


@kernel
def _column_sums_kernel(addends_ptr, sums_ptr, n_rows, n_cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    cols = tl.program_id(0).to(tl.int64) * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for start in range(0, n_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        total += tl.load(addends_ptr + rows[:, None] * n_cols + cols[None, :], mask=mask, other=0.0)
    tl.store(sums_ptr + cols, tl.sum(total, axis=0).to(sums_ptr.dtype.element_ty), mask=cols < n_cols)


def column_addends(x: Tensor, programs: int, needed: bool) -> Tensor | None:
    """The programs' parts of a weight gradient, (programs, H) fp32, for `column_sums_`; None if it is not needed."""
    return x.new_empty((programs, x.shape[-1]), dtype=torch.float32) if needed else None


def column_sums_(sums: Tensor, addends: Tensor | None) -> None:
    """Writes the sums over the first dimension of `addends`, (programs, H) fp32, to `sums`, (H,). Rounds once."""
    if addends is None:
        return
    n_rows, n_cols = addends.shape
    rows, cols = 64, 32
    _column_sums_kernel[cdiv(n_cols, cols)](addends, sums, n_rows, n_cols, rows, cols, num_warps=4)


class StridedRows(NamedTuple):
    """A matrix whose rows have unit stride, as kernels take it; None for one that is not needed."""

    ptr: Tensor | None
    row_stride: int


def strips(*tensors: Tensor) -> tuple[list[StridedRows], int, int, int]:
    """Splits the rows of an elementwise kernel's inputs into strips, one per program.

    If all tensors are contiguous, they are treated as a single row. The halves of a fused projection are not copied.

    Returns:
        The tensors, the number of columns, the columns per program, the number of programs.
    """
    if all(t.is_contiguous() for t in tensors):  # not by `group_size`, which is 1 for (B, 1, H) of any strides
        n_rows, n_cols = 1, tensors[0].numel()
        operands = [StridedRows(t, n_cols) for t in tensors]
    else:
        rows = [as_rows(t) for t in tensors]
        n_rows, n_cols = rows[0].shape
        operands = [StridedRows(t, t.stride(0)) for t in rows]
    block = min(_STRIP, next_power_of_2(n_cols))
    return operands, n_cols, block, n_rows * cdiv(n_cols, block)


@jit
def row_and_columns(n_cols, BLOCK: tl.constexpr):
    """The row and the columns of this program's strip."""
    program, blocks = tl.program_id(0), tl.cdiv(tl.cast(n_cols, tl.int64), BLOCK)
    return program // blocks, program % blocks * BLOCK + tl.arange(0, BLOCK)


@jit
def load_strip(x, row, cols, mask):
    """Columns of a row in fp32, 0 beyond the mask."""
    return tl.load(x.ptr + row * x.row_stride + cols, mask=mask, other=0.0).to(tl.float32)
