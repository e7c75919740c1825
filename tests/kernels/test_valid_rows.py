"""The products of a loss head in which the rows that do not count have no part."""

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels import valid_rows
from ligerzoo.kernels.dispatch import INTERPRETING

pytestmark = pytest.mark.skipif(
    INTERPRETING or not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="needs a Hopper GPU",
)


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def number(n: int) -> Tensor:
    return torch.tensor([n], device="cuda", dtype=torch.int32)


def assert_as_good_as_a_plain_product(actual: Tensor, a: Tensor, b: Tensor) -> None:
    truth = a.double() @ b.double()
    error, plain = ((t.double() - truth).norm().item() for t in (actual, a @ b))
    assert error <= 1.01 * plain


@pytest.mark.parametrize("count", [0, 1, 63, 64, 130, 299, 300])
@pytest.mark.parametrize("shape", [(72, 1003), (264, 128), (128, 8)], ids=str)
def test_products(shape: tuple[int, int], count: int) -> None:
    depth, columns = shape
    for first_row, n_rows in ((0, 300), (0, 100), (100, 200)):
        a, weight = bf16(n_rows, depth), bf16(columns, depth)
        present = min(max(count - first_row, 0), n_rows)
        logits = valid_rows.row_buffer(a, n_rows, columns).fill_(7)
        valid_rows.product_(logits, a, weight.T, number(count), first_row)
        assert_as_good_as_a_plain_product(logits[:present], a[:present], weight.T)
        assert (logits[present:] == 7).all()

        order = torch.randperm(300, device="cuda")
        back = torch.full((300, depth), 7.0, device="cuda", dtype=torch.bfloat16)
        valid_rows.product_(back, logits, weight, number(count), first_row, order)
        places = order[first_row : first_row + present]
        assert_as_good_as_a_plain_product(back[places], logits[:present], weight)
        others = torch.ones(300, dtype=torch.bool, device="cuda")
        others[places] = False
        assert (back[others] == 7).all()


@pytest.mark.parametrize("count", [0, 1, 64, 130, 256, 700, 900])
@pytest.mark.parametrize("shape", [(1003, 72), (128, 264), (520, 64)], ids=str)
@pytest.mark.parametrize("rows_at_a_time", [64, 256, 300, 900])
def test_sums_over_chunks(rows_at_a_time: int, shape: tuple[int, int], count: int) -> None:
    columns, width = shape
    a, b = valid_rows.row_buffer(bf16(1, 1), 900, columns), bf16(900, width)
    a.copy_(torch.randn(a.shape, device="cuda"))
    a[count:] = 0
    high = torch.full((columns, width), torch.nan, device="cuda", dtype=torch.bfloat16)
    low = torch.full(high.shape, 255, device="cuda", dtype=torch.uint8)
    for start in range(0, 900, rows_at_a_time):
        chunk = slice(start, start + rows_at_a_time)
        valid_rows.accumulate_(high, low, a[chunk], b[chunk], number(count), number(count), start)
    assert_as_good_as_a_plain_product(high, a.T, b)


@pytest.mark.parametrize("present", [[64, 0, 3], [0, 65, 128], [128, 128, 0], [0, 0, 0], [1, 128, 128]], ids=str)
def test_sums_over_chunks_each_of_which_has_rows_that_do_not_count(present: list[int]) -> None:
    a, b = valid_rows.row_buffer(bf16(1, 1), 384, 264), bf16(384, 72)
    a.copy_(torch.randn(a.shape, device="cuda"))
    ends = [128 * chunk + rows for chunk, rows in enumerate(present)]
    for chunk, end in enumerate(ends):
        a[end : 128 * (chunk + 1)] = 0
    last = max((end for end, rows in zip(ends, present, strict=True) if rows), default=0)
    high = torch.full((264, 72), torch.nan, device="cuda", dtype=torch.bfloat16)
    low = torch.full(high.shape, 255, device="cuda", dtype=torch.uint8)
    for chunk, end in enumerate(ends):
        rows = slice(128 * chunk, 128 * (chunk + 1))
        valid_rows.accumulate_(high, low, a[rows], b[rows], number(end), number(last), rows.start)
    assert_as_good_as_a_plain_product(high, a.T, b)


def test_numbers_that_are_none_stay_so() -> None:
    a, b = torch.zeros(128, 8, device="cuda").bfloat16(), torch.ones(128, 8, device="cuda").bfloat16()
    a[3, 0], a[5, 1], a[7, 2] = torch.nan, torch.inf, -torch.inf
    high, low = torch.empty(8, 8, device="cuda").bfloat16(), torch.empty(8, 8, device="cuda", dtype=torch.uint8)
    for start in (0, 64):
        valid_rows.accumulate_(high, low, a[start : start + 64], b[start : start + 64], number(128), number(128), start)
    assert high[0].isnan().all()
    assert (high[1] == torch.inf).all()
    assert (high[2] == -torch.inf).all()
    assert not high[3:].any()
