import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels import Routing, route
from ligerzoo.kernels.dispatch import INTERPRETING
from ligerzoo.kernels.route import reference, select_experts
from ligerzoo.layers.routers import Router
from tests.covering import long_cases
from tests.kernels import compiling
from tests.kernels.accuracy import assert_as_exact_as, judge
from tests.kernels.compiling import compiling_for_hopper
from tests.kernels.layouts import offset, padded, transposed
from tests.kernels.machine import ON_GPU, ROUNDED_DTYPES, needs_triton, on_gpu_too
from tests.kernels.oracles import numbers

# tokens, experts, experts per token
SHAPES = on_gpu_too(
    [(1, 1, 1), (1, 128, 8), (5, 4, 4), (7, 33, 5), (64, 8, 2), (31, 60, 4)],
    [(32, 128, 8), (64, 128, 8), (64, 512, 16), (1, 32768, 3)],
)


def pairs(routing: Routing) -> list[list[tuple[int, float]]]:
    """Returns the experts and weights of each token, in the order of experts, from the rows."""
    found: list[list[tuple[int, float]]] = [[] for _ in routing.rows]
    bounds, tokens, weights = (t.tolist() for t in (routing.bounds, routing.tokens, routing.weights))
    for expert, start, end in zip(routing.experts.tolist(), bounds, bounds[1:], strict=False):
        for row in range(start, end):
            slot = routing.rows[tokens[row]].tolist().index(row)
            assert routing.expert_ids[tokens[row], slot] == expert
            found[tokens[row]].append((expert, weights[row]))
    return list(map(sorted, found))


def assert_same(actual: Routing, logits: Tensor, k: int, renormalize: bool) -> None:
    """Compares with the reference."""
    expected, truth = (reference(t, k, renormalize) for t in (logits, logits.double()))
    for name in ("experts", "bounds", "tokens", "rows", "expert_ids"):
        pair = getattr(actual, name), getattr(expected, name)
        assert pair[0].dtype == torch.int32
        assert torch.equal(*pair), name
    assert_as_exact_as(actual.weights, expected.weights, truth.weights)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_routes_as_the_router(shape: tuple[int, int, int], renormalize: bool, device: str) -> None:
    n_tokens, n_experts, k = shape
    router, x = Router(12, n_experts, k, renormalize=renormalize, device=device), torch.randn(n_tokens, 12).to(device)
    router.init_weights(std=0.3)
    logits, expert_ids, weights = router(x)
    routing = route(logits.detach(), k, renormalize=renormalize, backend="torch")
    assert torch.equal(routing.expert_ids, expert_ids.int())
    expected = [sorted(zip(*pair, strict=True)) for pair in zip(expert_ids.tolist(), weights.tolist(), strict=True)]
    for got, required in zip(pairs(routing), expected, strict=True):
        assert [expert for expert, _ in got] == [expert for expert, _ in required]
        assert [weight for _, weight in got] == pytest.approx([weight for _, weight in required], rel=1e-5)
    n_active = len({expert for token in expected for expert, _ in token})
    assert (routing.bounds[n_active:] == n_tokens * k).all()
    assert not routing.experts[n_active:].any()
    assert len(routing.experts) == min(n_experts, n_tokens * k)


@needs_triton
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, int, int], dtype: torch.dtype, renormalize: bool, device: str) -> None:
    n_tokens, n_experts, k = shape
    logits = 3 * numbers(n_tokens, n_experts, dtype=dtype, device=device).detach()
    before = logits.clone()
    assert_same(route(logits, k, renormalize=renormalize, backend="triton"), logits, k, renormalize)
    assert torch.equal(logits, before)


def select(logits: Tensor, k: int, renormalize: bool = True, backend: Any = "triton") -> tuple[Tensor, Tensor]:
    return select_experts(logits, k, renormalize=renormalize, backend=backend)


@needs_triton
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(300, 128, 8), (9, 60, 4), (2, 5, 5), (1, 1, 1)], ids=str)
def test_selection_and_its_gradient(
    shape: tuple[int, int, int], dtype: torch.dtype, renormalize: bool, device: str
) -> None:
    n_tokens, n_experts, k = shape
    logits = (3 * numbers(n_tokens, n_experts, dtype=dtype, device=device)).detach().requires_grad_()
    assert torch.equal(select(logits, k)[0], select(logits, k, backend="torch")[0])
    judge(
        lambda logits: select(logits, k, renormalize)[1],
        lambda logits: select(logits, k, renormalize, "torch")[1],
        [logits],
    )


@needs_triton
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 128, 8), (5, 4, 4), (7, 33, 5), (64, 60, 4), (64, 512, 16)], ids=str)
def test_both_routes_have_the_same_bits(shape: tuple[int, int, int], renormalize: bool, device: str) -> None:
    n_tokens, n_experts, k = shape
    logits = (8 * torch.randn(300, n_experts, device=device)).round() / 4  # with ties
    ids, weights = select(logits, k, renormalize)
    first = torch.randint(0, 301 - n_tokens, ()).item()
    part = slice(first, first + n_tokens)
    routing = route(logits[part], k, renormalize=renormalize, backend="triton")
    assert torch.equal(routing.expert_ids, ids[part].int())
    assert torch.equal(routing.weights[routing.rows], weights[part])


@needs_triton
@pytest.mark.parametrize("layout", [offset, padded, transposed], ids=lambda layout: layout.__name__)
def test_layouts(layout: Any, device: str) -> None:
    logits = layout(numbers(9, 20, device=device).detach())
    assert_same(route(logits, 3, backend="triton"), logits, 3, True)


@needs_triton
@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
def test_ties_go_to_the_lower_expert(dtype: torch.dtype, device: str) -> None:
    logits = torch.tensor([[0.0, -0.0, 1.0, -0.0, 0.0], [2, 2, 2, 2, 2], [-1, 3, -1, -1, 3]], device=device).to(dtype)
    routing = route(logits, 3, backend="triton")
    assert [[expert for expert, _ in token] for token in pairs(routing)] == [[0, 1, 2], [0, 1, 2], [0, 1, 4]]
    assert_same(routing, logits, 3, True)


@needs_triton
@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
def test_infinite_logits_and_nan(dtype: torch.dtype, device: str) -> None:
    """NaN counts as the largest, and its token's weights are NaN; other tokens are not affected."""
    inf, nan = math.inf, math.nan
    rows = [[1, -inf, 0, -inf, 2], [-inf, -inf, -inf, -inf, 0], [0, nan, 5, nan, -nan], [inf, 1, 2, inf, 0]]
    logits = torch.tensor(rows, device=device).to(dtype)
    logits[2, 4] = -logits[2, 1].abs()  # the sign bit of NaN does not matter
    for renormalize in (False, True):
        routing = Routing(*(t.cpu() for t in route(logits, 4, renormalize=renormalize, backend="triton")))
        assert_same(routing, logits.cpu(), 4, renormalize)  # on a GPU, torch sorts NaN by its sign
        assert sorted({int(t) for t in routing.tokens[routing.weights.isnan()]}) == [2, 3]


@needs_triton
def test_large_differences_of_logits(device: str) -> None:
    logits = torch.tensor([[-200.0, 300, 299, -5], [1e30, -1e30, 0, 9e29]], device=device)
    for renormalize in (False, True):
        assert_same(route(logits, 3, renormalize=renormalize, backend="triton"), logits, 3, renormalize)


def test_no_tokens(device: str) -> None:
    routing = route(torch.empty(0, 5, device=device), 2)
    assert [tuple(t.shape) for t in routing] == [(0,), (1,), (0,), (0,), (0, 2), (0, 2)]
    assert routing.bounds.tolist() == [0]


COMPILED: dict[str, list[Any]] = {
    "shape": [(1, 128, 8), (8, 60, 4), (64, 8, 2), (64, 128, 8)], "dtype": [torch.float32, torch.bfloat16]
}  # fmt: skip


@pytest.mark.plain
@pytest.mark.parametrize("case", long_cases(COMPILED), ids=str)
def test_it_compiles(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (n_tokens, n_experts, k), dtype = case.values()
    monkeypatch.setattr(compiling, "MAX_SHARED_MEMORY", 101376)  # of smaller GPUs
    with compiling_for_hopper():
        logits = torch.zeros(n_tokens, n_experts, dtype=dtype)
        route(logits, k, backend="triton")
        select(logits, k)


@pytest.mark.plain
def test_the_largest_shape_compiles() -> None:
    with compiling_for_hopper():
        route(torch.zeros(64, 512), 16, backend="triton")
        select(torch.zeros(1, 32768), 16)


@pytest.mark.parametrize("shape, k", [((2, 3, 4), 2), ((3, 4), 5), ((4,), 1)])
def test_shapes_are_checked(shape: tuple[int, ...], k: int) -> None:
    with pytest.raises(
        ValueError, match=r"^route: logits are .* and num_experts_per_token=\d; expected shape \(T, E\)"
    ):
        route(torch.ones(shape), k)


@pytest.mark.parametrize("k, error", [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_the_number_of_experts_is_checked(k: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^route: num_experts_per_token=.*; expected an integer, 1 or more$"):
        route(torch.ones(3, 4), k)


def test_too_many_logits(device: str) -> None:
    logits = torch.randn(65, 512, device=device)
    with pytest.raises(ValueError, match=r"^route: backend=\"triton\" with logits \(65, 512\); expected at most 32768"):
        route(logits, 2, backend="triton")
    assert_same(route(logits, 2), logits, 2, True)


@pytest.mark.skipif(ON_GPU or INTERPRETING, reason="Triton is supported")
def test_triton_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match='backend="triton" with tensors'):
        route(torch.ones(3, 4), 2, backend="triton")
