from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import INTERPRETING
from ligerzoo.kernels.low_rank_gradients import MAX_RANK, _gradients, low_rank_gradients, reference
from tests.covering import covering
from tests.kernels.accuracy import assert_as_exact_as
from tests.kernels.compiling import compiling_for_hopper
from tests.kernels.layouts import LAYOUTS, padded
from tests.kernels.machine import DTYPES, ON_GPU, ROUNDED_DTYPES, kernel_file, needs_triton, on_gpu_too

LARGE = [(8192, 1024), (2048, 14336), (513, 4104)]
SHAPES = [(1, 1), (7, 5), (40, 33), (131, 520), (300, 16), *on_gpu_too([], LARGE)]
OPTIONS = {
    "dtype": ROUNDED_DTYPES,
    "b_dtype": [None, torch.float32],  # None: that of dy
    "shape": SHAPES,
    "rank": [1, 3, 8, 16, 17, 32, 33, 128],
    "layout": [torch.clone, *LAYOUTS],
    "scale": [1.0, -0.35],
}


def matrices(rows: int, columns: int, rank: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dy, b and h."""
    shapes = (rows, columns), (columns, rank), (rows, rank)
    dy, b, h = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    return dy, b, h


def judge(
    dtype: torch.dtype, b_dtype: torch.dtype | None, shape: tuple[int, int], rank: int,
    layout: Callable[[Tensor], Tensor], scale: float, device: str,
) -> None:  # fmt: skip
    dy, b, h = (layout(t) for t in matrices(*shape, rank, dtype, device))
    b = b.to(b_dtype or dtype)
    actual = low_rank_gradients(dy, b, h, scale)
    expected = reference(dy, b, h, scale)
    truth = reference(dy.double(), b.to(dtype).double(), h.double(), scale)
    for case in zip(actual, expected, truth, strict=True):
        assert_as_exact_as(*case)


@pytest.mark.parametrize("options", covering(OPTIONS)[:: 1 if ON_GPU or not INTERPRETING else 3])
def test_pairs_of_options(options: dict[str, object], device: str) -> None:
    judge(**options, device=device)  # type: ignore[arg-type]


@needs_triton
@pytest.mark.parametrize("shape, multiprocessors", [((213, 1111), 4), ((1100, 200), 132)])
def test_gradients_of_a_layer_that_needs_several_programs(
    shape: tuple[int, int], multiprocessors: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several blocks of rows and of columns, the last ones incomplete, and rows of h that are apart."""
    monkeypatch.setattr(kernel_file("low_rank_gradients"), "_MIN_ROWS", 64)
    monkeypatch.setattr(kernel_file("low_rank_gradients"), "multiprocessors", lambda _: multiprocessors)
    judge(torch.float16, torch.float32, shape, 16, padded, 2.0, device)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rank", [1, MAX_RANK, MAX_RANK + 1])
def test_the_kernels_run_for_small_ranks_and_dtypes_of_two_bytes(
    rank: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(kernel_file("low_rank_gradients"), "_gradients", lambda *_: calls.append(1))
    for shape in ((4, 6), (0, 6), (4, 0)):
        low_rank_gradients(*matrices(*shape, rank, dtype, device), 1.0)
    assert len(calls) == (dtype != torch.float32 and rank <= MAX_RANK)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 6), (4, 0)])
def test_empty(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    dh, db = low_rank_gradients(*matrices(*shape, 2, dtype, device), 1.0)
    assert (dh.shape, db.shape) == ((shape[0], 2), (shape[1], 2))
    assert not dh.any()
    assert not db.any()


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_gradients_are_deterministic(device: str) -> None:
    arguments = matrices(4096, 3000, 16, torch.bfloat16, device)
    first, second = (low_rank_gradients(*arguments, 2.0) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.plain
@pytest.mark.parametrize("rank", [8, 16, 32])
def test_no_product_uses_wgmma(rank: int) -> None:
    """See `delta_chunks.PREPARE` for the reason."""
    pytest.importorskip("triton")
    dy, b, h = matrices(64, 1024, rank, torch.bfloat16, "cpu")
    with compiling_for_hopper() as kernels:
        _gradients(dy, b, h, 1.0)
    assert len(kernels) == 2
    assert "mma.sync" in kernels[0].asm["ptx"]
    assert not any("wgmma" in compiled.asm["ptx"] for compiled in kernels)
