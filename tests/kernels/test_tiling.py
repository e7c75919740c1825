import pytest
import torch

from ligerzoo.kernels.tiling import column_sums_
from tests.kernels.accuracy import assert_as_exact_as
from tests.kernels.machine import DTYPES, needs_triton, on_gpu_too


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", on_gpu_too([(1, 1), (64, 32), (65, 33), (264, 127)], [(264, 4096), (264, 65536)]))
def test_column_sums(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    addends = torch.randn(shape, device=device)
    sums = torch.empty(shape[1], dtype=dtype, device=device)
    column_sums_(sums, addends)
    assert_as_exact_as(sums, addends.sum(0).to(dtype), addends.double().sum(0))
