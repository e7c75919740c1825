from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels import Routing, route_sigmoid
from ligerzoo.kernels.route import SigmoidOptions, sigmoid_reference
from ligerzoo.layers import SigmoidRouter
from tests.kernels import compiling
from tests.kernels.accuracy import assert_as_exact_as
from tests.kernels.compiling import compiling_for_hopper
from tests.kernels.layouts import offset, padded, transposed
from tests.kernels.machine import ROUNDED_DTYPES, needs_triton, on_gpu_too
from tests.kernels.oracles import numbers
from tests.kernels.test_route import pairs


class Shape(NamedTuple):
    tokens: int
    experts: int
    experts_per_token: int
    groups: int = 1
    selected_groups: int = 1


SHAPES = on_gpu_too(
    [Shape(1, 1, 1), Shape(1, 256, 8, 8, 4), Shape(5, 12, 3, 3, 2), Shape(7, 33, 5), Shape(9, 20, 4, 5, 1)],
    [Shape(32, 256, 8, 8, 4), Shape(64, 384, 8), Shape(64, 160, 8), Shape(64, 512, 16, 16, 3)],
)


def inputs(shape: Shape, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    logits = 2 * numbers(shape.tokens, shape.experts, dtype=dtype, device=device).detach()
    return logits, 0.3 * numbers(shape.experts, device=device).detach()


def options(shape: Shape, **others: Any) -> dict[str, Any]:
    return {"num_groups": shape.groups, "num_selected_groups": shape.selected_groups, **others}


def assert_same(actual: Routing, logits: Tensor, bias: Tensor, k: int, **chosen: Any) -> None:
    expected = sigmoid_reference(logits, bias, k, SigmoidOptions(**chosen))
    truth = sigmoid_reference(logits.double(), bias.double(), k, SigmoidOptions(**chosen))
    for name in ("experts", "bounds", "tokens", "rows", "expert_ids"):
        pair = getattr(actual, name), getattr(expected, name)
        assert pair[0].dtype == torch.int32
        assert torch.equal(*pair), name
    assert_as_exact_as(actual.weights, expected.weights, truth.weights)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("renormalize, scale, eps", [(False, 1.0, 1e-20), (True, 2.5, 0.1)])
def test_the_reference_routes_as_the_router(
    shape: Shape, renormalize: bool, scale: float, eps: float, device: str
) -> None:
    chosen = options(shape, renormalize=renormalize, scale=scale, eps=eps)
    router = SigmoidRouter(12, shape.experts, shape.experts_per_token, **chosen, device=device)
    router.init_weights(std=0.3)
    router.e_score_correction_bias.normal_(std=0.3)
    logits, expert_ids, weights = router(torch.randn(shape.tokens, 12, device=device))
    routing = router.routing(logits.detach(), "torch")
    assert torch.equal(routing.expert_ids, expert_ids.int())
    expected = [sorted(zip(*pair, strict=True)) for pair in zip(expert_ids.tolist(), weights.tolist(), strict=True)]
    for got, required in zip(pairs(routing), expected, strict=True):
        assert [expert for expert, _ in got] == [expert for expert, _ in required]
        assert [weight for _, weight in got] == pytest.approx([weight for _, weight in required], rel=1e-5)


@needs_triton
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: Shape, dtype: torch.dtype, renormalize: bool, device: str) -> None:
    logits, bias = inputs(shape, dtype, device)
    chosen = options(shape, renormalize=renormalize, scale=1.8, eps=0.01)
    routing = route_sigmoid(logits, bias, shape.experts_per_token, **chosen, backend="triton")
    assert_same(routing, logits, bias, shape.experts_per_token, **chosen)


@needs_triton
@pytest.mark.parametrize("layout", [offset, padded, transposed], ids=lambda layout: layout.__name__)
def test_layouts(layout: Any, device: str) -> None:
    logits, bias = inputs(Shape(9, 20, 3), torch.float32, device)
    assert_same(route_sigmoid(layout(logits), bias, 3, backend="triton"), logits, bias, 3)


@needs_triton
def test_ties_go_to_the_lower_expert_and_group(device: str) -> None:
    logits, bias = torch.zeros(2, 8, device=device), torch.zeros(8, device=device)
    logits[1, 4:6] = 1  # the second best group after the third is the first
    chosen = {"num_groups": 4, "num_selected_groups": 2}
    routing = route_sigmoid(logits, bias, 3, **chosen, backend="triton")
    assert [[expert for expert, _ in token] for token in pairs(routing)] == [[0, 1, 2], [0, 4, 5]]
    assert_same(routing, logits, bias, 3, **chosen)


@needs_triton
def test_the_bias_selects_and_does_not_weight(device: str) -> None:
    logits, bias = torch.tensor([[5.0, 4, -6, -7]], device=device), torch.tensor([0.0, 0, 0, 3], device=device)
    routing = route_sigmoid(logits, bias, 1, renormalize=False, backend="triton")
    assert routing.experts.tolist() == [3]
    assert routing.weights.item() == pytest.approx(torch.tensor(-7.0).sigmoid().item(), rel=1e-5)


@pytest.mark.plain
@pytest.mark.parametrize("shape", [Shape(1, 256, 8, 8, 4), Shape(64, 128, 8), Shape(32, 64, 4)], ids=str)
def test_it_compiles(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MAX_SHARED_MEMORY", 101376)  # of smaller GPUs
    with compiling_for_hopper():
        logits, bias = torch.zeros(shape.tokens, shape.experts), torch.zeros(shape.experts)
        route_sigmoid(logits, bias, shape.experts_per_token, **options(shape), backend="triton")


@pytest.mark.plain
def test_the_largest_shape_compiles() -> None:
    with compiling_for_hopper():
        options = {"num_groups": 16, "num_selected_groups": 4}
        route_sigmoid(torch.zeros(64, 512), torch.zeros(512), 16, **options, backend="triton")


@pytest.mark.parametrize(
    "experts, k, chosen, message",
    [
        (8, 2, {"num_groups": 3}, "expected .* groups of E / num_groups"),
        (8, 2, {"num_groups": 8, "num_selected_groups": 4}, "groups of E / num_groups >= 2"),
        (8, 2, {"num_groups": 2, "num_selected_groups": 3}, "at most num_groups"),
        (8, 5, {"num_groups": 2}, "num_experts_per_token=5; expected at most 4"),
        (8, 9, {}, r"num_experts_per_token=9; expected shape \(T, E\)"),
    ],
)
def test_options_are_checked(experts: int, k: int, chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^route_sigmoid: .*{message}"):
        route_sigmoid(torch.zeros(3, experts), torch.zeros(experts), k, **chosen)
    with pytest.raises(ValueError, match=r"^SigmoidRouter: "):
        SigmoidRouter(4, experts, k, **chosen)


def test_the_bias_needs_one_number_for_each_expert() -> None:
    with pytest.raises(ValueError, match=r"bias \(3,\).*expected \(T, E\), \(E,\)"):
        route_sigmoid(torch.zeros(3, 4), torch.zeros(3), 2)
