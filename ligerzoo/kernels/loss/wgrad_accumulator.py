"""The gradient of a head's weight, summed over chunks of rows: dweight = sum of dlogits.T @ x, where only the GPU knows
how many rows of a chunk count.

The sum is kept in 24 bits, of which a bf16 matrix (what it becomes in the end) has the leading 16 and a byte per
element, beside it, the next 8. The last chunk rounds to bf16. An fp32 sum would need another quarter.

Until then nobody else looks at it, so it lies in memory in the order in which the tensor cores leave a tile in the
registers of a Hopper GPU: each thread finds again what it left, 16 bytes at a time. In the matrix's order all numbers
would have to pass from thread to thread, twice a chunk, which takes as long as a sixth of the products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import cdiv, multiprocessors
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.loss.ragged_gemm import place_of

ROW_TILE = 64
"""Rows up to the next multiple of this take part: they must hold zeros in `dlogits`, numbers in `x`."""

_TALL, _WIDE = 128, 256
"""The tile of a product: rows (classes) and columns (features) of the sum."""

COLUMNS = 64
"""A sum's width is a multiple of this: as many columns change their order together."""


@jit
def _halves(x):
    """The left and the right half of the columns."""
    rows: tl.constexpr = x.shape[0]
    half: tl.constexpr = x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(x, (rows, 2, half)), (0, 2, 1)))


# A thread of the tensor cores has, of a tile of 128 rows and 64 columns, those elements (r, c) for which r // 16 is its
# warp, r % 8 the upper 3 bits of its lane and c % 8 // 2 the lower 2. A thread that loads or stores rows of 64 numbers,
# 8 at a time, has those for which r // 4 % 8 is its warp, r % 4 the upper 2 bits of its lane and c // 8 the lower 3.


@jit
def _in_order_of_registers(x):
    """(128, 64), in which the first of these threads has the elements that the second had: nothing moves."""
    bits = tl.reshape(x, (8, 2, 4, 2, 2, 4, 4, 2))  # rows: warp, -, lane, lane; columns: -, -, lane, -
    return tl.reshape(tl.permute(bits, (4, 1, 0, 2, 3, 6, 5, 7)), (128, 64))


@jit
def _in_order_of_matrix(x):
    """The way back."""
    bits = tl.reshape(x, (2, 2, 8, 4, 2, 4, 4, 2))
    return tl.reshape(tl.permute(bits, (2, 1, 3, 4, 0, 6, 5, 7)), (128, 64))


@jit
def _joined(high, low):
    """The fp32 number whose bits are a bf16 and the next 8."""
    bits = (high.to(tl.int16, bitcast=True).to(tl.int32) << 16) | (low << 8)
    return bits.to(tl.float32, bitcast=True)


@jit
def _split(x):
    """The leading 16 and the next 8 bits of an fp32 number, rounded to 24: (bf16, int32)."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x == x, bits + 0x80, bits)  # a carry out of a NaN would make it a number
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), (bits >> 8) & 0xFF


@jit
def _add(
    left, right, high_ptr, low_ptr, row, col, width, low_stride, IS_FIRST: tl.constexpr, IS_LAST: tl.constexpr
):  # fmt: skip
    """(high, low) += the two parts of (128, 64) of a tile that begin at (row, col); or = them, if they are the first.

    A number of `low` is two bytes, of an element of each part.
    """
    rows, cols = row + tl.arange(0, 128).to(tl.int64), tl.arange(0, 64)
    high = high_ptr + (rows * width + col)[:, None] + cols[None, :]
    low = low_ptr + (rows * low_stride + col // 2)[:, None] + cols[None, :]
    has_left, has_right = col < width, col + 64 < width
    left, right = _in_order_of_registers(left), _in_order_of_registers(right)
    if not IS_FIRST:
        lows = tl.load(low, mask=has_left).to(tl.int32)
        left += _joined(tl.load(high, mask=has_left), lows & 0xFF)
        right += _joined(tl.load(high + 64, mask=has_right), (lows >> 8) & 0xFF)
    if IS_LAST:
        # On their way to other threads the numbers wait at a barrier: all are read before one is overwritten.
        tl.store(high, _in_order_of_matrix(left.to(tl.bfloat16)), mask=has_left)
        tl.store(high + 64, _in_order_of_matrix(right.to(tl.bfloat16)), mask=has_right)
    else:
        left_high, left_low = _split(left)
        right_high, right_low = _split(right)
        tl.store(high, left_high, mask=has_left)
        tl.store(high + 64, right_high, mask=has_right)
        tl.store(low, (left_low | (right_low << 8)).to(tl.int16), mask=has_left)


@kernel
def _add_kernel(
    a_descriptor, b_descriptor, high_ptr, low_ptr, count_ptr, end_ptr, first_row, n_rows, height, width, low_stride,
    IS_FIRST: tl.constexpr, IS_LAST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    depth = tl.minimum(tl.maximum(tl.load(count_ptr) - first_row, 0), n_rows)
    is_last = tl.load(end_ptr) <= first_row + n_rows
    if ((depth > 0) | IS_FIRST) & (is_last == IS_LAST):
        n_vertical, n_horizontal = height // ROWS, tl.cdiv(width, COLS)
        for tile in tl.range(tl.program_id(0), n_vertical * n_horizontal, tl.num_programs(0), flatten=True):
            row, col = place_of(tile, n_vertical, n_horizontal, 8)
            total = tl.zeros((ROWS, COLS), dtype=tl.float32)
            for k in range(0, depth, DEPTH):
                total = tl.dot(a_descriptor.load([k, row * ROWS]).T, b_descriptor.load([k, col * COLS]), total)
            left, right = _halves(total)
            one, two = _halves(left)
            three, four = _halves(right)
            row, col = row * ROWS, col * COLS
            _add(one, two, high_ptr, low_ptr, row, col, width, low_stride, IS_FIRST, IS_LAST)
            _add(three, four, high_ptr, low_ptr, row, col + COLS // 2, width, low_stride, IS_FIRST, IS_LAST)


class WeightSum:
    """dweight of a bf16 weight, (V, H) with H a multiple of `COLUMNS`, on a Hopper GPU.

    Args:
        weight: (V, H), the head.
        n_rows: how many rows all chunks have together.
        rows: how many rows a chunk has, but for the last.
    """

    def __init__(self, weight: Tensor, n_rows: int, rows: int) -> None:
        self.n_rows, (self.n_classes, width) = n_rows, weight.shape
        height = cdiv(self.n_classes, _TALL) * _TALL  # whole tiles, for their rows change places
        self._high = weight.new_empty((height, width))
        low_shape = (height, cdiv(width, 2 * COLUMNS) * COLUMNS) if rows < n_rows else (0, 0)
        self._low = torch.empty(low_shape, dtype=torch.int16, device=weight.device)

    def add_(self, dlogits: Tensor, x: Tensor, count: Tensor, end: Tensor, first_row: int) -> None:
        """Adds dlogits.T @ x over the rows that count: those with a number first_row + i below `count`.

        To be called for all chunks in turn, from first_row = 0.

        Args:
            dlogits: (M, V), x: (M, H) bf16, rows beginning at multiples of 16 bytes; see `ROW_TILE`.
            count: (1,) int32.
            end: (1,) int32, the number behind that of the last row that counts in all chunks; the same for all of them.
            first_row: the number of the chunk's row 0.
        """
        from triton.tools.tensor_descriptor import TensorDescriptor

        n_rows = x.shape[0]
        descriptors = [TensorDescriptor.from_tensor(t, [ROW_TILE, size]) for t, size in ((dlogits, _TALL), (x, _WIDE))]
        # Which chunk is the last that has a row, the GPU alone knows: of two kernels one has nothing to do.
        for is_last in (False, True) if first_row + n_rows < self.n_rows else (True,):
            _add_kernel[multiprocessors(x)](
                *descriptors, self._high, self._low, count, end, first_row, n_rows, *self._high.shape,
                self._low.shape[1], first_row == 0, is_last, _TALL, _WIDE, ROW_TILE, num_warps=8, num_stages=3,
            )  # fmt: skip

    def result(self) -> Tensor:
        """(V, H) bf16, rounded once; complete as soon as the last chunk that has a row that counts was added."""
        return self._high[: self.n_classes]
