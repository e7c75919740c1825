import pytest
import torch

from ligerzoo.kernels import softmax
from ligerzoo.kernels.softmax import reference
from tests.kernels.accuracy import judge
from tests.kernels.machine import ON_GPU, ROUNDED_DTYPES, kernel_file, needs_triton, on_gpu_too
from tests.kernels.op_recorder import Recorder, launch_nothing
from tests.kernels.oracles import numbers

SHAPES = on_gpu_too(
    [(1,), (7,), (3, 1), (300, 2), (5, 127), (2, 3, 130), (2, 2, 1, 64), (2, 4097)],
    [(3, 4095), (3, 16384), (3, 16385), (1000, 32_003), (5, 262_147), (20_000, 33), (1_000, 4096)],
)


@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    judge(softmax, reference, [numbers(*shape, dtype=dtype, device=device)])


@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 65), (3, 4096), (2, 9000), (1, 20_001)], ids=str)
def test_rows_too_long_for_registers(
    shape: tuple[int, int], dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_file("softmax"), "_MAX_COLUMNS_IN_REGISTERS", 64)
    judge(softmax, reference, [numbers(*shape, dtype=dtype, device=device)])


LENGTHS = [33, 20_000]  # in registers, and in blocks


@pytest.mark.parametrize("n_cols", LENGTHS)
@pytest.mark.parametrize("at", [1e4, -1e30])
def test_values_far_from_zero(n_cols: int, at: float, device: str) -> None:
    judge(softmax, reference, [(at + torch.randn(3, n_cols, device=device)).requires_grad_()])


@pytest.mark.parametrize("n_cols", LENGTHS)
@pytest.mark.parametrize("ascending", [False, True])
def test_values_far_apart(n_cols: int, ascending: bool, device: str) -> None:
    """The maximum is in the first block, or grows with every block."""
    x = numbers(3, n_cols, device=device, scale=1e4)
    judge(softmax, reference, [x.detach().sort(-1, descending=not ascending)[0].requires_grad_()])


@pytest.mark.parametrize("n_cols", LENGTHS)
def test_masked_with_minus_infinity(n_cols: int, device: str) -> None:
    x = numbers(3, n_cols, device=device)
    with torch.no_grad():
        x[0, :-3] = x[1, 3:] = x[2, ::2] = -torch.inf
    judge(softmax, reference, [x])
    assert softmax(x).isfinite().all()


@pytest.mark.parametrize("n_cols", LENGTHS)
def test_a_non_finite_row_does_not_affect_others(n_cols: int, device: str) -> None:
    x = numbers(6, n_cols, device=device)
    with torch.no_grad():
        x[1, 3], x[2, n_cols - 1], x[4] = torch.nan, torch.inf, -torch.inf
    y = softmax(x)
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
    for t in (y, dx):
        assert t[[1, 2, 4]].isnan().all()
        assert t[[0, 3, 5]].isfinite().all()


@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
def test_the_result_has_the_dtype_of_the_input(dtype: torch.dtype, device: str) -> None:
    assert softmax(numbers(5, 33, dtype=dtype, device=device)).dtype == dtype


@pytest.mark.parametrize("n_cols", LENGTHS)
def test_only_results_are_allocated(n_cols: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_nothing(monkeypatch, "softmax")
    x, upstream = numbers(5, n_cols, device=device), torch.ones(5, n_cols, device=device)
    with Recorder() as recorder:
        torch.autograd.grad(softmax(x), x, upstream)
    assert recorder.allocated == [5 * n_cols * 4] * 2


@needs_triton
def test_backend_argument(device: str) -> None:
    x = numbers(5, 33, device=device)
    assert (
        type(softmax(x).grad_fn).__name__ == type(softmax(x, backend="triton").grad_fn).__name__ == "_SoftmaxBackward"
    )
    assert torch.equal(softmax(x, backend="torch"), reference(x))
    assert type(softmax(x, backend="torch").grad_fn).__name__ != "_SoftmaxBackward"


@pytest.mark.skipif(ON_GPU, reason="Triton is supported on a GPU")
def test_an_unsupported_backend() -> None:
    with pytest.raises(ValueError, match=r'backend="triton" with tensors torch\.float64 on cpu'):
        softmax(torch.ones(5, 33, dtype=torch.float64), backend="triton")
