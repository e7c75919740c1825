"""`filter_bounds`: the bounds keep what the functions of `ligerzoo.generate` keep, row by row."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.generate import filter_logits
from ligerzoo.kernels import FilterBounds, filter_bounds
from tests.covering import covering
from tests.kernels import compiling
from tests.kernels.compiling import compiling_for_hopper
from tests.kernels.machine import needs_triton, on_gpu_too

ROWS = 6
backends = pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])


def kept(logits: Tensor, bounds: FilterBounds) -> Tensor:
    """Returns a mask (R, V) of the tokens within the bounds."""
    threshold, last = bounds.threshold[:, None], bounds.last_token[:, None]
    is_tie = (logits == threshold) & (torch.arange(logits.shape[1], device=logits.device) <= last)
    return (logits > threshold) | is_tie


def kept_one_by_one(logits: Tensor, options: list[Tensor]) -> Tensor:
    """Returns the mask of the tokens that `filter_logits` keeps."""
    rows = zip(logits.unbind(), zip(*(option.tolist() for option in options), strict=True), strict=True)
    return torch.stack([filter_logits(row, t or 1.0, k, p, m) > -torch.inf for row, (t, k, p, m) in rows])


CASES: dict[str, list[Any]] = {
    "seed": [0, 1],
    "columns": on_gpu_too([1, 33, 500], [9000, 128256]),
    "dtype": [torch.float32, torch.float16],
    "ties": [False, True],
    "top_k": [False, True],
    "top_p": [False, True],
    "min_p": [False, True],
}


@backends
@pytest.mark.parametrize("case", covering(CASES), ids=str)
def test_every_pair_of_filters(case: dict[str, Any], backend: Any, device: str) -> None:
    torch.manual_seed(case["seed"])
    columns = case["columns"]

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(ROWS, device=device)

    logits = 3 * torch.randn(ROWS, columns, device=device)
    logits = (logits.round() if case["ties"] else logits).to(case["dtype"])
    options = [
        uniform(0.3, 2),
        uniform(1, columns + 20).long() if case["top_k"] else torch.full((ROWS,), columns, device=device),
        uniform(0.01, 0.99) if case["top_p"] else torch.ones(ROWS, device=device),
        uniform(0, 0.3) if case["min_p"] else torch.zeros(ROWS, device=device),
    ]
    options[1][0], options[2][0], options[3][0] = columns, 1, 0  # a row without filters
    options[0][1] = 0  # a greedy one
    actual = kept(logits.float(), filter_bounds(logits, *options, backend=backend))
    assert torch.equal(actual, kept_one_by_one(logits.float(), options))
    assert actual[0].all()


@backends
def test_extreme_options_and_logits(backend: Any, device: str) -> None:
    logits = torch.tensor([[0.0, 3.0, -torch.inf, 3.0, -0.0, 1.0]], device=device)

    def tokens(top_k: int = 6, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
        options = [torch.tensor([x], device=device) for x in (1.0, top_k, top_p, min_p)]
        return kept(logits, filter_bounds(logits, *options, backend=backend))[0].nonzero()[:, 0].tolist()

    assert tokens() == [0, 1, 2, 3, 4, 5]
    assert tokens(top_k=1) == [1, 3]  # ties with the largest
    assert tokens(top_k=4) == [0, 1, 3, 4, 5]  # 0.0 equals -0.0
    assert tokens(top_p=1e-30) == [1]
    assert tokens(top_p=0.6) == [1, 3]
    assert tokens(top_p=0.98, top_k=3) == [1, 3, 5]
    assert tokens(min_p=1.0) == [1, 3]


@backends
def test_broken_rows_leave_the_others_alone(backend: Any, device: str) -> None:
    logits = torch.randn(3, 50, device=device)
    options = [
        torch.ones(3, device=device),
        torch.full((3,), 5, device=device),
        *torch.full((2, 3), 0.5, device=device),
    ]
    expected = kept(logits, filter_bounds(logits, *options, backend=backend))
    for value in (torch.nan, torch.inf, -torch.inf):
        broken = logits.clone()
        broken[1] = value
        actual = kept(broken, filter_bounds(broken, *options, backend=backend))
        assert torch.equal(actual[::2], expected[::2])


@pytest.mark.plain
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [1, 97, 128256, 262144])
def test_it_compiles(columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(compiling, "MAX_SHARED_MEMORY", 101376)  # of smaller GPUs
    ones = torch.ones(3)
    with compiling_for_hopper():
        filter_bounds(torch.ones(3, columns, dtype=dtype), ones, ones.long(), ones, ones, backend="triton")
