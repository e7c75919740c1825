"""Grouped matrix products: rows sorted by group, such as tokens by expert, with group sizes that stay on the GPU.

Group e has the rows from ends[e - 1] to ends[e]:

    grouped_product:        y_r = x_r @ w[e]          for each row r of group e
    grouped_outer_product:  z[e] = sum over the rows r of group e of a_r^T b_r
    grouped_sum:            z[e] = sum over the rows r of group e of w_r x_r

No host sync, except on a CPU and in fp64, where a Python loop runs over the groups. In bf16 on Hopper,
torch's grouped_mm does not sync either. We use it for outer products (up to 650 TFLOP/s on an H200, against 450 with
our kernel) and for products of large groups. Our kernel is faster for small ones: the experts of Qwen3-30B-A3B take
1.77 ms forward and backward at 128 rows per group, against 2.00 ms with torch's. At 512 rows both take the same time.
A single group is a plain product of all rows: torch's grouped_mm returns wrong results for it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels.dispatch import accumulation_dtype, cdiv, is_hopper, next_power_of_2
from ligerzoo.kernels.jit import jit, kernel, tl


@jit
def add_product(total, a, b, PRECISION: tl.constexpr):
    """total + a @ b, total in fp32."""
    if a.dtype == tl.float32:
        # Partial sums per step: accumulating thousands of products one by one would round more often than torch does.
        return total + tl.dot(a, b, input_precision=PRECISION, max_num_imprecise_acc=1)
    else:
        return tl.dot(a, b, total)


class _Sizes(NamedTuple):
    n_rows: int
    n_cols: int
    n_inner: int
    n_groups: int


@kernel
def _product_kernel(
    x_descriptor, w_descriptor, ends_ptr, y_ptr, sizes,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, BAND: tl.constexpr,
    TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # The host does not know the number of tiles of each group. If group e owns the tiles from ends[e - 1] // ROWS + e
    # on, groups do not overlap, each has enough tiles, and all tiles are below n_rows // ROWS + n_groups.
    row_tiles, col_tiles = sizes.n_rows // ROWS + sizes.n_groups, tl.cdiv(sizes.n_cols, COLS)
    # Programs go through all rows of a band of a few columns first, to share rows and weights in the L2 cache.
    band, index = tl.program_id(0) // (BAND * row_tiles), tl.program_id(0) % (BAND * row_tiles)
    width = tl.minimum(BAND, col_tiles - band * BAND)
    row_tile, col = index // width, (band * BAND + index % width) * COLS

    groups = tl.arange(0, GROUPS)
    ends = tl.load(ends_ptr + groups, mask=groups < sizes.n_groups, other=2**30)
    group = tl.sum((ends // ROWS + groups < row_tile).to(tl.int32), axis=0)
    start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(ends_ptr + group, mask=group < sizes.n_groups, other=0)
    row = start + (row_tile - start // ROWS - group) * ROWS
    if row < end:
        y = tl.zeros((ROWS, COLS), dtype=tl.float32)
        for inner in range(0, sizes.n_inner, INNER):
            x = x_descriptor.load([row, inner])
            if TRANSPOSED:
                w = w_descriptor.load([group, col, inner]).reshape(COLS, INNER).T
            else:
                w = w_descriptor.load([group, inner, col]).reshape(INNER, COLS)
            y = add_product(y, x, w, PRECISION)
        rows, cols = row.to(tl.int64) + tl.arange(0, ROWS), col + tl.arange(0, COLS)
        mask = (rows < end)[:, None] & (cols < sizes.n_cols)[None, :]
        tl.store(y_ptr + rows[:, None] * sizes.n_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _outer_product_kernel(
    a_ptr, b_ptr, ends_ptr, z_ptr, n_rows, n_cols,
    ROWS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    col_tiles = tl.cdiv(n_cols, COLS)
    tiles = tl.cdiv(n_rows, ROWS) * col_tiles
    group, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(ends_ptr + group)
    rows = (tile // col_tiles) * ROWS + tl.arange(0, ROWS)
    cols = (tile % col_tiles) * COLS + tl.arange(0, COLS)
    z = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for first in range(start, end, INNER):
        inner = tl.cast(first, tl.int64) + tl.arange(0, INNER)
        a_mask = (inner < end)[:, None] & (rows < n_rows)[None, :]
        b_mask = (inner < end)[:, None] & (cols < n_cols)[None, :]
        a = tl.load(a_ptr + inner[:, None] * n_rows + rows[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_ptr + inner[:, None] * n_cols + cols[None, :], mask=b_mask, other=0.0)
        z = add_product(z, tl.trans(a), b, PRECISION)
    z_ptrs = z_ptr + group.to(tl.int64) * n_rows * n_cols + rows.to(tl.int64)[:, None] * n_cols + cols[None, :]
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    tl.store(z_ptrs, z.to(z_ptr.dtype.element_ty), mask=mask)


@kernel
def _sum_kernel(x_ptr, weight_ptr, ends_ptr, z_ptr, n_cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    tiles = tl.cdiv(n_cols, COLS)
    group, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(ends_ptr + group)
    cols = tile * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for first in range(start, end, ROWS):
        rows = tl.cast(first, tl.int64) + tl.arange(0, ROWS)
        mask = (rows < end)[:, None] & (cols < n_cols)[None, :]
        x = tl.load(x_ptr + rows[:, None] * n_cols + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            x *= tl.load(weight_ptr + rows, mask=rows < end, other=0.0).to(tl.float32)[:, None]
        total += x
    z = tl.sum(total, axis=0).to(z_ptr.dtype.element_ty)
    tl.store(z_ptr + group.to(tl.int64) * n_cols + cols, z, mask=cols < n_cols)


_SUM_ROWS, _SUM_COLUMNS = 32, 128
_BAND = 16
_LARGE_GROUP = 512
"""Average rows per group from which torch's product is used."""

_MAX_GROUPS = 1023
"""Most groups of torch's product."""


def input_precision() -> str:
    """The input precision of `tl.dot` in fp32, from torch's setting."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _suits_torch(a: Tensor, b: Tensor, n_groups: int) -> bool:
    """Whether torch's grouped_mm supports these inputs without a host sync."""
    return (
        is_hopper(a)
        and n_groups <= _MAX_GROUPS
        and a.dtype == torch.bfloat16
        and a.shape[0] > 0
        and all(t.shape[-1] % 8 == 0 and t.data_ptr() % 16 == 0 for t in (a, b))
    )


def _tile(dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """(rows, columns, inner) of a program's tiles, its warps and its stages. Two programs run per multiprocessor."""
    return (64, 64, 32, 4, 2) if dtype == torch.float32 else (128, 128, 64, 4, 3)


def _descriptor(t: Tensor, tile: list[int]) -> Any:
    """A TMA descriptor of a contiguous tensor. Copies it if its rows do not start at multiples of 16 bytes."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    columns, per_16_bytes = t.shape[-1], 16 // t.element_size()
    if columns % per_16_bytes or t.data_ptr() % 16:
        t = F.pad(t, (0, -columns % per_16_bytes))[..., :columns]
    # Of a contiguous tensor, a dimension of size one may have any stride: that of `w.mT`, w of shape (E, K, 1), is 1.
    if any(stride % per_16_bytes for stride in t.stride()[:-1]):
        t = t.clone(memory_format=torch.contiguous_format)
    return TensorDescriptor.from_tensor(t, tile)


def grouped_product(x: Tensor, w: Tensor, ends: Tensor, triton: bool) -> Tensor:
    """Multiplies each row by the matrix of its group: (R, K) x (E, K, N) -> (R, N). Rows from ends[-1] are undefined.

    Args:
        x: (R, K), contiguous, with rows sorted by group.
        w: (E, K, N), in the dtype of `x`. Copied if neither it nor `w.mT` is contiguous.
        ends: (E,) int32, one past the last row of each group.
        triton: whether to use the Triton kernel, or torch's on Hopper; False loops over the groups in plain torch.
    """
    (n_rows, n_inner), (n_groups, _, n_cols) = x.shape, w.shape
    if triton and n_groups == 1:
        return x @ w[0]
    if not triton:
        y = x.new_empty((n_rows, n_cols))
        for group, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
            torch.mm(x[start:end], w[group], out=y[start:end])
        return y
    is_transposed = w.mT.is_contiguous()
    stored = w.mT if is_transposed else w.contiguous()
    if n_rows >= _LARGE_GROUP * n_groups and _suits_torch(x, stored, n_groups):
        return F.grouped_mm(x, stored.mT if is_transposed else stored, offs=ends)
    y = x.new_empty((n_rows, n_cols))
    if n_rows > 0:
        rows, cols, inner, warps, stages = _tile(x.dtype)
        programs = (n_rows // rows + n_groups) * cdiv(n_cols, cols)
        x_tile, w_tile = [rows, inner], [1, cols, inner] if is_transposed else [1, inner, cols]
        sizes = _Sizes(n_rows, n_cols, n_inner, n_groups)
        constants = next_power_of_2(n_groups), rows, cols, inner, _BAND, is_transposed, input_precision()
        _product_kernel[programs](
            _descriptor(x, x_tile), _descriptor(stored, w_tile), ends, y, sizes, *constants, num_warps=warps,
            num_stages=stages,
        )  # fmt: skip
    return y


def grouped_outer_product(a: Tensor, b: Tensor, ends: Tensor, triton: bool) -> Tensor:
    """Sums the outer products of each group's rows: (R, M), (R, N) -> (E, M, N), 0 for an empty group.

    Args:
        a: (R, M), contiguous, with rows sorted by group.
        b: (R, N), contiguous, in the dtype of `a`.
        ends: (E,) int32, one past the last row of each group.
        triton: as in `grouped_product`.
    """
    n_groups, n_rows, n_cols = ends.shape[0], a.shape[1], b.shape[1]
    if triton and n_groups == 1:
        return (a.T @ b)[None]
    if triton and _suits_torch(a, b, n_groups):
        return F.grouped_mm(a.T, b, offs=ends)
    z = a.new_empty((n_groups, n_rows, n_cols))
    if triton:
        rows, cols, inner, warps, stages = _tile(a.dtype)
        programs = n_groups * cdiv(n_rows, rows) * cdiv(n_cols, cols)
        _outer_product_kernel[programs](
            a, b, ends, z, n_rows, n_cols, rows, cols, inner, input_precision(), num_warps=warps, num_stages=stages
        )
    else:
        for group, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
            torch.mm(a[start:end].T, b[start:end], out=z[group])
    return z


def grouped_sum(x: Tensor, weights: Tensor | None, ends: Tensor, dtype: torch.dtype, triton: bool) -> Tensor:
    """Sums the rows of each group, in fp32 and rounded once: (R, N) -> (E, N), 0 for an empty group.

    Args:
        x: (R, N), contiguous, with rows sorted by group.
        weights: (R,), factors of the rows, contiguous; None for 1.
        ends: (E,) int32, one past the last row of each group.
        dtype: dtype of the result.
        triton: whether to use the Triton kernel.
    """
    z = x.new_empty((ends.shape[0], x.shape[1]), dtype=dtype)
    if triton:
        programs = len(z) * cdiv(x.shape[1], _SUM_COLUMNS)
        _sum_kernel[programs](x, weights, ends, z, x.shape[1], _SUM_ROWS, _SUM_COLUMNS, num_warps=4)
        return z
    wide = accumulation_dtype(x.dtype)
    for group, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        rows = x[start:end].to(wide)
        z[group] = (rows if weights is None else rows * weights[start:end, None]).sum(0)
    return z
