"""The gradient of a loss head's weight, summed over chunks with ignored rows."""

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels.loss.ragged_gemm import row_buffer
from ligerzoo.kernels.loss.wgrad_accumulator import WeightGradAccumulator
from tests.kernels.accuracy import assert_as_good_as_a_plain_product
from tests.kernels.machine import needs_hopper
from tests.kernels.oracles import bf16, count_of

pytestmark = needs_hopper


def summed(dlogits: Tensor, x: Tensor, ends: list[int], rows: int) -> Tensor:
    """Returns the sum over chunks of `rows` rows. Rows from a chunk's end on are ignored."""
    last = max((end for i, end in enumerate(ends) if end > i * rows), default=0)
    total = WeightGradAccumulator(x.new_empty((dlogits.shape[1], x.shape[1])), len(x), rows)
    for i, end in enumerate(ends):
        chunk = slice(i * rows, (i + 1) * rows)
        total.add_(dlogits[chunk], x[chunk], count_of(end), count_of(last), chunk.start)
    return total.result()


def zeros_in_ignored_rows(n_rows: int, columns: int, ends: list[int], rows: int) -> Tensor:
    dlogits = row_buffer(bf16(1, 1), n_rows, columns).normal_()
    for i, end in enumerate(ends):
        dlogits[max(end, i * rows) : (i + 1) * rows] = 0
    return dlogits


@pytest.mark.parametrize("count", [0, 1, 64, 130, 256, 700, 900])
@pytest.mark.parametrize("shape", [(1003, 64), (128, 256), (520, 192), (1000, 640), (300, 896)], ids=str)
@pytest.mark.parametrize("rows", [64, 256, 300, 900])
def test_sums_over_chunks(rows: int, shape: tuple[int, int], count: int) -> None:
    columns, width = shape
    ends = [count] * -(-900 // rows)
    dlogits, x = zeros_in_ignored_rows(900, columns, ends, rows), bf16(900, width)
    assert_as_good_as_a_plain_product(summed(dlogits, x, ends, rows), dlogits.T, x)


@pytest.mark.parametrize("present", [[64, 0, 3], [0, 65, 128], [128, 128, 0], [0, 0, 0], [1, 128, 128]], ids=str)
def test_sums_over_chunks_that_all_have_ignored_rows(present: list[int]) -> None:
    ends = [128 * chunk + rows for chunk, rows in enumerate(present)]
    dlogits, x = zeros_in_ignored_rows(384, 264, ends, 128), bf16(384, 320)
    assert_as_good_as_a_plain_product(summed(dlogits, x, ends, 128), dlogits.T, x)


def test_a_large_sum_is_the_same_each_time() -> None:
    """A missing barrier would let threads overwrite elements that others still read."""
    ends = [2048] * 4
    dlogits, x = zeros_in_ignored_rows(2048, 32000, ends, 512), bf16(2048, 1024)
    first = summed(dlogits, x, ends, 512)
    assert_as_good_as_a_plain_product(first, dlogits.T, x)
    for _ in range(20):
        assert torch.equal(summed(dlogits, x, ends, 512), first)


def test_nan_and_infinity_are_kept() -> None:
    dlogits, x = torch.zeros(128, 8, device="cuda").bfloat16(), torch.ones(128, 64, device="cuda").bfloat16()
    dlogits[3, 0], dlogits[5, 1], dlogits[7, 2] = torch.nan, torch.inf, -torch.inf
    total = summed(dlogits, x, [128, 128], 64)
    assert total[0].isnan().all()
    assert (total[1] == torch.inf).all()
    assert (total[2] == -torch.inf).all()
    assert not total[3:].any()
