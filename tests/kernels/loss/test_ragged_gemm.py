"""The matrix products of a loss head skip ignored rows."""

import pytest
import torch

from ligerzoo.kernels.loss import ragged_gemm
from ligerzoo.kernels.loss.row_kernel import Rows
from tests.kernels.accuracy import assert_as_good_as_a_plain_product
from tests.kernels.machine import needs_hopper
from tests.kernels.oracles import bf16, count_of

pytestmark = needs_hopper


@pytest.mark.parametrize("count", [0, 1, 63, 64, 130, 299, 300])
@pytest.mark.parametrize("shape", [(72, 1003), (264, 128), (128, 8)], ids=str)
def test_products(shape: tuple[int, int], count: int) -> None:
    depth, columns = shape
    for first_row, n_rows in ((0, 300), (0, 100), (100, 200)):
        a, weight = bf16(n_rows, depth), bf16(columns, depth)
        present = min(max(count - first_row, 0), n_rows)
        rows = Rows(first_row, end=count_of(count))
        logits = ragged_gemm.row_buffer(a, n_rows, columns).fill_(7)
        ragged_gemm.matmul_(logits, a, weight.T, rows)
        assert_as_good_as_a_plain_product(logits[:present], a[:present], weight.T)
        assert (logits[present:] == 7).all()

        bias = bf16(columns)
        biased = ragged_gemm.row_buffer(a, n_rows, columns).fill_(7)
        ragged_gemm.matmul_(biased, a, weight.T, rows, bias)
        truth = a[:present].double() @ weight.double().T + bias.double()
        plain = torch.addmm(bias, a[:present], weight.T)
        error, plain_error = ((t.double() - truth).norm() for t in (biased[:present], plain))
        assert error <= 1.01 * plain_error
        assert (biased[present:] == 7).all()

        order = torch.randperm(300, device="cuda")
        back = torch.full((300, depth), 7.0, device="cuda", dtype=torch.bfloat16)
        ragged_gemm.matmul_(back, logits, weight, rows._replace(order=order))
        valid_rows = order[first_row : first_row + present]
        assert_as_good_as_a_plain_product(back[valid_rows], logits[:present], weight)
        others = torch.ones(300, dtype=torch.bool, device="cuda")
        others[valid_rows] = False
        assert (back[others] == 7).all()
