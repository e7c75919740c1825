"""What kernels share that hold whole rows, (..., H), in the registers of a program: where the rows are, how many of
them a program holds, and the sums over programs that make the gradient of a weight of shape (H,).
"""

from __future__ import annotations

import functools

from torch import Tensor

from ligerzoo.kernels.dispatch import Backend, as_rows, cdiv, multiprocessors, next_power_of_2
from ligerzoo.kernels.jit import jit, kernel, tl

MAX_COLUMNS = 65536
"""Longer rows take the references."""

FORWARD_TILE, BACKWARD_TILE = 2048, 8192
"""About how many elements a program holds at a time."""

_STRIP, STRIP_WARPS = 2048, 4
"""How many elements a program takes, and its warps, where each element is one of its own, see `strips`."""

PROGRAMS_PER_MULTIPROCESSOR = 2
"""Of the backward kernels, whose programs each walk many tiles and add up a weight's gradient on the way."""


def check_columns(operation: str, x: Tensor, **vectors: Tensor) -> None:
    """Raises ValueError unless each vector has a number for each column of x."""
    for name, vector in vectors.items():
        if vector.shape != x.shape[-1:]:
            raise ValueError(f"{operation}: {name} has shape {tuple(vector.shape)}; expected {tuple(x.shape[-1:])}")


def fits(x: Tensor, backend: Backend) -> bool:
    """Whether a program can hold a row of x; a ValueError if it can't and `backend` is "triton"."""
    if x.shape[-1] <= MAX_COLUMNS:
        return True
    if backend == "triton":
        raise ValueError(
            f'backend="triton" with rows of {x.shape[-1]} numbers; expected at most {MAX_COLUMNS}, or backend="auto"'
        )
    return False


@functools.cache
def tile(n_cols: int, elements: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of one program that holds about so many elements: short rows share a program."""
    cols = next_power_of_2(n_cols)
    return max(1, elements // cols), cols, min(16, max(4, cols // 1024))


def persistent_programs(n_rows: int, tile_rows: int, x: Tensor) -> int:
    """How many programs walk the tiles of a backward kernel; one at least, which writes zeros for a weight's gradient
    where there are no rows."""
    return max(1, min(cdiv(n_rows, tile_rows), PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(x)))


def group_size(*tensors: Tensor) -> int:
    """How many rows of these tensors, all of one shape, make a group for `grouped`.

    1 where all are contiguous, else the last dimension but one. So attention's heads are read where they lie: from head
    to head of a token is one stride, from token to token another, be they a part of a fused projection or not.
    """
    shape = tensors[0].shape
    return 1 if len(shape) == 1 or all(t.is_contiguous() for t in tensors) else shape[-2]


def grouped(x: Tensor, group: int) -> tuple[Tensor, int, int]:
    """x and its strides from group to group and from row to row, for `row_offsets`; a copy of x where there are none.

    The elements of a row lie side by side.
    """
    if x.is_contiguous():
        return x, group * x.shape[-1], x.shape[-1]
    groups = x.reshape(-1, group, x.shape[-1])
    groups = groups if groups.stride(-1) == 1 else groups.contiguous()
    return groups, groups.stride(0), groups.stride(1)


@jit
def row_offsets(rows, group, group_stride, row_stride):
    """Where these rows begin. A group of 1 is a constant to Triton, and nothing is divided."""
    return rows // group * group_stride + rows % group * row_stride


@kernel
def _column_sums_kernel(addends_ptr, sums_ptr, n_rows, n_cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    cols = tl.program_id(0).to(tl.int64) * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for start in range(0, n_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        total += tl.load(addends_ptr + rows[:, None] * n_cols + cols[None, :], mask=mask, other=0.0)
    tl.store(sums_ptr + cols, tl.sum(total, axis=0).to(sums_ptr.dtype.element_ty), mask=cols < n_cols)


def column_sums_(sums: Tensor, addends: Tensor) -> None:
    """Writes the sums over the first dimension of `addends`, (programs, H) fp32, to `sums`, each rounded once."""
    n_rows, n_cols = addends.shape
    rows, cols = 64, 32
    _column_sums_kernel[cdiv(n_cols, cols)](addends, sums, n_rows, n_cols, rows, cols, num_warps=4)


def strips(*tensors: Tensor) -> tuple[tuple[Tensor, ...], int, int, int]:
    """For what is elementwise: the tensors with columns of unit stride, how many columns, how many of them a program
    takes, and the programs.

    Where nothing is strided, all elements are one row. The halves of a fused projection are read where they are.
    """
    if all(t.is_contiguous() for t in tensors):
        n_rows, n_cols = 1, tensors[0].numel()
    else:
        tensors = tuple(as_rows(t) for t in tensors)
        n_rows, n_cols = tensors[0].shape
    block = min(_STRIP, next_power_of_2(n_cols))
    return tensors, n_cols, block, n_rows * cdiv(n_cols, block)


@jit
def row_and_columns(n_cols, BLOCK: tl.constexpr):
    """Of a program that takes a part of a row: the row and its columns."""
    program, blocks = tl.program_id(0), tl.cdiv(tl.cast(n_cols, tl.int64), BLOCK)
    return program // blocks, program % blocks * BLOCK + tl.arange(0, BLOCK)
