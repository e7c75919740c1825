"""The gradient of a head's weight, accumulated over chunks of rows on a Hopper GPU: dweight = sum of dlogits.T @ x.

Only the GPU knows how many rows of a chunk are valid.

The sum has 24 bits: a bf16 matrix (which becomes the result) holds the leading 16, a second matrix with one byte per
element the next 8. The last chunk rounds to bf16. An fp32 sum would need another quarter of memory.

Until then only these kernels read the sum, so it is stored in the order in which tensor cores leave a tile in the
registers of a Hopper GPU: each thread reads back what it wrote, 16 bytes at a time. In the matrix's own order all
numbers would move between threads twice per chunk, which costs as much as a sixth of the products.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import cdiv, multiprocessors
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.loss.ragged_gemm import tile_position
from ligerzoo.kernels.loss.row_kernel import ROW_TILE

_TILE_M, _TILE_N = 128, 256
"""The tile of a product: rows (classes) and columns (features) of dweight."""

COLUMN_MULTIPLE = 64
"""The weight's width must be a multiple of this: groups of as many columns are permuted together."""


@jit
def _halves(x):
    """Returns the left and the right half of the columns."""
    rows: tl.constexpr = x.shape[0]
    half: tl.constexpr = x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(x, (rows, 2, half)), (0, 2, 1)))


# After a product, a thread holds these elements (r, c) of a tile of 128 rows and 64 columns: r // 16 is its warp, r % 8
# the upper 3 bits of its lane and c % 8 // 2 the lower 2. A thread that loads or stores rows of 64 numbers, 8 at once,
# holds those with r // 4 % 8 as its warp, r % 4 as the upper 2 bits of its lane and c // 8 as the lower 3.


@jit
def _to_register_order(x):
    """Permutes (128, 64) so that a thread stores the elements it holds after a product: no data moves."""
    bits = tl.reshape(x, (8, 2, 4, 2, 2, 4, 4, 2))  # rows: warp, -, lane, lane; columns: -, -, lane, -
    return tl.reshape(tl.permute(bits, (4, 1, 0, 2, 3, 6, 5, 7)), (128, 64))


@jit
def _to_matrix_order(x):
    """The inverse of `_to_register_order`."""
    bits = tl.reshape(x, (2, 2, 8, 4, 2, 4, 4, 2))
    return tl.reshape(tl.permute(bits, (2, 1, 3, 4, 0, 6, 5, 7)), (128, 64))


@jit
def _join_bits(high, low):
    """Returns the fp32 number with the bits of a bf16 and the next 8."""
    bits = (high.to(tl.int16, bitcast=True).to(tl.int32) << 16) | (low << 8)
    return bits.to(tl.float32, bitcast=True)


@jit
def _split_bits(x):
    """Returns the leading 16 and the next 8 bits of an fp32 number rounded to 24 bits: (bf16, int32)."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x == x, bits + 0x80, bits)  # a carry would make a NaN finite
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), (bits >> 8) & 0xFF


@jit
def _accumulate_half_tile(left, right, total, row, col, IS_FIRST: tl.constexpr, IS_LAST: tl.constexpr):
    """Adds two (128, 64) parts of a tile, which begin at (row, col), to (high, low). The first chunk overwrites these.

    An element of `low` packs two bytes: one for an element of each part.
    """
    rows, cols = row + tl.arange(0, 128).to(tl.int64), tl.arange(0, 64)
    width = total.width
    high = total.high + (rows * width + col)[:, None] + cols[None, :]
    low = total.low + (rows * total.low_stride + col // 2)[:, None] + cols[None, :]
    has_left, has_right = col < width, col + 64 < width
    left, right = _to_register_order(left), _to_register_order(right)
    if not IS_FIRST:
        lows = tl.load(low, mask=has_left).to(tl.int32)
        left += _join_bits(tl.load(high, mask=has_left), lows & 0xFF)
        right += _join_bits(tl.load(high + 64, mask=has_right), (lows >> 8) & 0xFF)
    if IS_LAST:
        # The permutation synchronizes the threads: all elements are read before any is overwritten.
        tl.store(high, _to_matrix_order(left.to(tl.bfloat16)), mask=has_left)
        tl.store(high + 64, _to_matrix_order(right.to(tl.bfloat16)), mask=has_right)
    else:
        left_high, left_low = _split_bits(left)
        right_high, right_low = _split_bits(right)
        tl.store(high, left_high, mask=has_left)
        tl.store(high + 64, right_high, mask=has_right)
        tl.store(low, (left_low | (right_low << 8)).to(tl.int16), mask=has_left)


class _Total(NamedTuple):
    """The sum: its leading 16 bits, (height, width) bf16, and the next 8 with their stride."""

    high: Tensor
    low: Tensor
    height: int
    width: int
    low_stride: int


class _Chunk(NamedTuple):
    """A chunk's rows: their first, their number, the end of the valid ones, and that of all chunks."""

    first: int
    n_rows: int
    chunk_end: Tensor
    end: Tensor


@kernel
def _accumulate_kernel(
    a_descriptor, b_descriptor, total, rows, IS_FIRST: tl.constexpr, IS_LAST: tl.constexpr, TILE: tl.constexpr
):
    ROWS: tl.constexpr = TILE[0]
    COLS: tl.constexpr = TILE[1]
    DEPTH: tl.constexpr = TILE[2]
    first_row, n_rows = rows.first, rows.n_rows
    depth = tl.minimum(tl.maximum(tl.load(rows.chunk_end) - first_row, 0), n_rows)
    is_last = tl.load(rows.end) <= first_row + n_rows
    if ((depth > 0) | IS_FIRST) & (is_last == IS_LAST):
        n_vertical, n_horizontal = total.height // ROWS, tl.cdiv(total.width, COLS)
        for tile in tl.range(tl.program_id(0), n_vertical * n_horizontal, tl.num_programs(0), flatten=True):
            row, col = tile_position(tile, n_vertical, n_horizontal, 8)
            product = tl.zeros((ROWS, COLS), dtype=tl.float32)
            for k in range(0, depth, DEPTH):
                product = tl.dot(a_descriptor.load([k, row * ROWS]).T, b_descriptor.load([k, col * COLS]), product)
            left, right = _halves(product)
            one, two = _halves(left)
            three, four = _halves(right)
            row, col = row * ROWS, col * COLS
            _accumulate_half_tile(one, two, total, row, col, IS_FIRST, IS_LAST)
            _accumulate_half_tile(three, four, total, row, col + COLS // 2, IS_FIRST, IS_LAST)


def _low_width(width: int) -> int:
    return cdiv(width, 2 * COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def low_bytes(weight: Tensor) -> int:
    """Counts the bytes of the low bits of dweight, which exist while chunks accumulate."""
    return 2 * cdiv(weight.shape[0], _TILE_M) * _TILE_M * _low_width(weight.shape[1])


class WeightGradAccumulator:
    """Accumulates dweight of a bf16 weight, (V, H) with H a multiple of `COLUMN_MULTIPLE`, on a Hopper GPU.

    Args:
        weight: (V, H), the head.
        n_rows: the number of rows of all chunks.
        rows: the number of rows of a chunk; the last one may have fewer.
    """

    def __init__(self, weight: Tensor, n_rows: int, rows: int) -> None:
        self.n_rows, (self.n_classes, width) = n_rows, weight.shape
        height = cdiv(self.n_classes, _TILE_M) * _TILE_M  # whole tiles, because their rows are permuted
        self._high = weight.new_empty((height, width))
        low_shape = (height, _low_width(width)) if rows < n_rows else (0, 0)
        self._low = torch.empty(low_shape, dtype=torch.int16, device=weight.device)

    def add_(self, dlogits: Tensor, x: Tensor, count: Tensor, end: Tensor, first_row: int) -> None:
        """Adds dlogits.T @ x over the valid rows i: those with first_row + i < count.

        Call it for all chunks in order, from first_row = 0.

        Args:
            dlogits: (M, V) bf16, rows aligned to 16 bytes. Zeros in the ignored rows up to a multiple of `ROW_TILE`.
            x: (M, H) bf16, rows aligned to 16 bytes. Finite in the same rows.
            count: (1,) int32.
            end: (1,) int32, one more than the index of the last valid row of all chunks; the same for each of them.
            first_row: the index of the chunk's row 0.
        """
        from triton.tools.tensor_descriptor import TensorDescriptor

        n_rows = x.shape[0]
        dlogits_descriptor = TensorDescriptor.from_tensor(dlogits, [ROW_TILE, _TILE_M])
        x_descriptor = TensorDescriptor.from_tensor(x, [ROW_TILE, _TILE_N])
        (height, width), low_stride = self._high.shape, self._low.shape[1]
        total = _Total(self._high, self._low, height, width, low_stride)
        chunk, tile = _Chunk(first_row, n_rows, count, end), (_TILE_M, _TILE_N, ROW_TILE)
        # Only the GPU knows which chunk is the last with a valid row: one of the two kernels returns at once.
        for is_last in (False, True) if first_row + n_rows < self.n_rows else (True,):
            _accumulate_kernel[multiprocessors(x)](
                dlogits_descriptor, x_descriptor, total, chunk, first_row == 0, is_last, tile, num_warps=8, num_stages=3
            )

    def result(self) -> Tensor:
        """Returns (V, H) bf16, rounded once; complete once the last chunk with a valid row was added."""
        return self._high[: self.n_classes]
