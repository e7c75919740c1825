"""Every kernel compiles for a Hopper GPU. Finds compiler crashes without a GPU."""

import pytest
import torch

from tests.kernels.compiling import compile_both_passes
from tests.kernels.operations import Operation, every_operation

pytest.importorskip("triton")
pytestmark = pytest.mark.plain


@pytest.mark.slow
@every_operation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_operation_compiles(operation: Operation, dtype: torch.dtype) -> None:
    inputs = operation.inputs(5, dtype, "cpu")
    compile_both_passes(operation.function, inputs)
