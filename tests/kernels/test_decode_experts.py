import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ligerzoo import layers
from ligerzoo.kernels import ClampedSwiGLU, Routing, Ungated, decode_experts, experts_mlp, route
from ligerzoo.kernels.activation import ACTIVATIONS
from ligerzoo.kernels.decode_experts import reference
from ligerzoo.kernels.gating import gating
from ligerzoo.kernels.route import select_experts
from ligerzoo.layers import GatedMLP, set_backend
from ligerzoo.layers.moe import Experts, MoE, SharedExpertMoE
from ligerzoo.layers.routers import Router
from tests.covering import covering, long_cases
from tests.kernels import compiling
from tests.kernels.accuracy import assert_as_exact_as
from tests.kernels.compiling import compiling_for_hopper
from tests.kernels.layouts import offset, padded, transposed
from tests.kernels.machine import ON_GPU, ROUNDED_DTYPES, needs_hopper, needs_triton, on_gpu_too
from tests.kernels.oracles import numbers

OPTIONS: dict[str, list[Any]] = {
    "dtype": list(ROUNDED_DTYPES),
    "tokens": on_gpu_too([1, 2, 20, 64], [33]),
    "features": on_gpu_too([16, 33, 136], [2048]),
    "inner": on_gpu_too([1, 24, 70], [768]),
    "experts": on_gpu_too([(3, 2), (9, 4), (2, 1)], [(128, 8)]),  # E, k
    "activation": [*ACTIVATIONS, ClampedSwiGLU(0.6, 1.3), Ungated()],
    "bias": [False, True],
    "residual": [False, True],
    "renormalize": [False, True],
    "favoured": [False, True],  # whether all tokens choose the same experts
}


def make(
    tokens: int,
    features: int,
    inner: int,
    experts: int,
    dtype: torch.dtype,
    device: str,
    favoured: bool = False,
    activation: Any = "silu",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns x, router logits, gate_up, down and a residual."""
    first = gating(activation).parts * inner
    logits = torch.randn(tokens, experts, device=device) + 20 * torch.randn(experts, device=device) * favoured
    return (
        numbers(tokens, features, dtype=dtype, device=device).detach(),
        logits,
        numbers(experts, first, features, dtype=dtype, device=device, scale=features**-0.5).detach(),
        numbers(experts, features, inner, dtype=dtype, device=device, scale=inner**-0.5).detach(),
        numbers(tokens, features, dtype=dtype, device=device).detach(),
    )


def in_fp64(routing: Routing) -> Routing:
    return routing._replace(weights=routing.weights.double())


def assert_same(actual: Tensor, x: Tensor, routing: Routing, gate_up: Tensor, down: Tensor, *rest: Any) -> None:
    """Compares with the reference."""
    expected = reference(x, routing, gate_up, down, *rest)
    wide = (t.double() if isinstance(t, Tensor) else t for t in rest)
    truth = reference(x.double(), in_fp64(routing), gate_up.double(), down.double(), *wide)
    assert_as_exact_as(actual, expected, truth)


@needs_triton
@pytest.mark.parametrize("case", covering(OPTIONS), ids=str)
def test_every_pair_of_options(case: dict[str, Any], device: str) -> None:
    torch.manual_seed(0)
    n_experts, k = case["experts"]
    sizes = case["tokens"], case["features"], case["inner"], n_experts, case["dtype"], device, case["favoured"]
    x, logits, gate_up, down, residual = inputs = make(*sizes, case["activation"])
    routing = route(logits, k, renormalize=case["renormalize"], backend="torch")
    before = [t.clone() for t in (*inputs, *routing)]
    biases = [None, None]
    if case["bias"]:
        biases = [numbers(*t.shape[:2], dtype=case["dtype"], device=device).detach() for t in (gate_up, down)]
    options = (residual if case["residual"] else None), case["activation"], *biases
    actual = decode_experts(
        x, routing, gate_up, down, *biases, residual=options[0], activation=options[1], backend="triton"
    )
    assert_same(actual, x, routing, gate_up, down, *options)
    assert all(torch.equal(*pair) for pair in zip((*inputs, *routing), before, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("activation", [*ACTIVATIONS, Ungated()], ids=str)
@pytest.mark.parametrize("dtype", [*ROUNDED_DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("tokens", [1, 7])
def test_it_equals_experts_mlp(tokens: int, dtype: torch.dtype, activation: Any, device: str) -> None:
    x, logits, gate_up, down, _ = make(tokens, 33, 17, 5, dtype, device, activation=activation)
    routing = route(logits.to(torch.promote_types(dtype, torch.float32)), 2)
    weights, expert_ids = logits.softmax(-1).topk(2)
    weights = (weights / weights.sum(-1, keepdim=True)).to(routing.weights.dtype)
    expected = experts_mlp(x, expert_ids, weights, gate_up, down, activation=activation)
    wide = (t.double() for t in (weights, gate_up, down))
    truth = experts_mlp(x.double(), expert_ids, *wide, activation=activation)
    ulps = 2.0 if dtype != torch.float64 else 2**31  # the weights are computed from logits in fp32
    assert_as_exact_as(decode_experts(x, routing, gate_up, down, activation=activation), expected, truth, ulps)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if ON_GPU else [])], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", ClampedSwiGLU(0.6, 1.3), Ungated()])
@pytest.mark.parametrize("tokens", [1, 7])
def test_it_has_the_bits_of_experts_mlp(
    tokens: int, activation: Any, bias: bool, dtype: torch.dtype, device: str
) -> None:
    """With sums that are exact in any order: a few small integers."""
    draw = torch.Generator().manual_seed(0)

    def integers(*shape: int, largest: int = 2) -> Tensor:
        return torch.randint(-largest, largest + 1, shape, generator=draw).to(device, dtype)

    experts, features, inner = 6, 33, 17
    first = gating(activation).parts * inner
    x, gate_up = integers(tokens, features, largest=40), integers(experts, first, features, largest=40) / 2**13
    down = torch.zeros(experts, features, inner, device=device, dtype=dtype)
    for _ in range(2):  # two inputs of each output
        where = torch.randint(0, inner, (experts, features, 1), generator=draw).to(device)
        down.scatter_(2, where, integers(experts, features, 1))
    biases = (integers(experts, first) / 3, integers(experts, features) / 3) if bias else (None, None)
    logits = torch.randn(tokens, experts, generator=draw).to(device)
    ids, weights = select_experts(logits, 3, renormalize=True, backend="triton")
    options: dict[str, Any] = {"activation": activation, "backend": "triton"}
    expected = experts_mlp(x, ids, weights, gate_up, down, *biases, **options)
    routing = route(logits, 3, backend="triton")
    assert torch.equal(decode_experts(x, routing, gate_up, down, *biases, **options), expected)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [(128, 8, 2048, 768), (32, 4, 2880, 1440), (9, 3, 1000, 200)], ids=str)
def test_it_has_the_bits_of_experts_mlp_on_hopper(sizes: tuple[int, int, int, int], bias: bool) -> None:
    experts, k, features, inner = sizes
    x, logits, gate_up, down, _ = make(600, features, inner, experts, torch.bfloat16, "cuda")
    biases = tuple(numbers(*t.shape[:2], dtype=t.dtype, device="cuda").detach() for t in (gate_up, down))
    parameters = gate_up, down, *(biases if bias else ())
    expected = experts_mlp(x, *select_experts(logits, k, renormalize=True, backend="triton"), *parameters)
    for tokens in (1, 2, 5, 16, 31, 33, 64):
        part = slice(7 * tokens, 8 * tokens)
        assert torch.equal(decode_experts(x[part], route(logits[part], k), *parameters), expected[part]), tokens


@needs_triton
@pytest.mark.parametrize("layout", [offset, padded, transposed], ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("tokens", [1, 5])
def test_layouts(tokens: int, layout: Callable[[Tensor], Tensor], device: str) -> None:
    x, logits, gate_up, down, residual = make(tokens, 36, 20, 4, torch.float16, device)
    routing = route(logits, 2)
    x, gate_up, down, residual = (layout(t) for t in (x, gate_up, down, residual))
    actual = decode_experts(x, routing, gate_up, down, residual=residual, backend="triton")
    assert_same(actual, x, routing, gate_up, down, residual)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [3, 20])
def test_a_token_does_not_depend_on_the_others(tokens: int, dtype: torch.dtype) -> None:
    """To the bit; a single token uses another kernel than several."""
    x, logits, gate_up, down, residual = make(tokens, 520, 270, 4, dtype, "cuda")

    def decode(tokens: slice) -> Tensor:
        routing = route(logits[tokens], 3, backend="triton")
        return decode_experts(x[tokens], routing, gate_up, down, residual=residual[tokens], backend="triton")

    assert torch.equal(decode(slice(tokens)), torch.cat([decode(slice(t, t + 1)) for t in range(tokens)]))


@needs_triton
def test_other_experts_are_not_read(device: str) -> None:
    x, logits, gate_up, down, _ = make(3, 33, 17, 6, torch.float32, device)
    logits[:, [1, 4, 5]] = -100
    routing = route(logits, 2, backend="triton")
    expected = decode_experts(x, routing, gate_up, down, backend="triton")
    for weights in (gate_up, down):
        weights[[1, 4, 5]] = torch.nan
    assert torch.equal(decode_experts(x, routing, gate_up, down, backend="triton"), expected)
    assert expected.isfinite().all()


@needs_triton
@pytest.mark.parametrize("tokens", [2, 20])
def test_non_finite_values_stay_within_their_token_and_expert(tokens: int, device: str) -> None:
    x, logits, gate_up, down, _ = make(tokens, 33, 17, 4, torch.float32, device)
    x[0, 3], gate_up[1, 20, 5], down[2, 7, 16] = torch.nan, torch.nan, torch.inf
    routing = route(logits, 1, backend="triton")
    expert_ids = logits.argmax(-1)
    finite = (expert_ids != 1) & (expert_ids != 2)
    finite[0] = False
    y = decode_experts(x, routing, gate_up, down, backend="triton")
    assert torch.equal(y.isfinite().all(1), finite)


@pytest.mark.parametrize("residual", [False, True])
def test_no_tokens(residual: bool, device: str) -> None:
    x, logits, gate_up, down, others = make(0, 33, 17, 4, torch.float32, device)
    y = decode_experts(x, route(logits, 2), gate_up, down, residual=others if residual else None)
    assert y.shape == (0, 33)


def test_autocast(device: str) -> None:
    x, logits, gate_up, down, _ = make(3, 33, 17, 4, torch.float32, device)
    routing = route(logits, 2)
    with torch.autocast(device, torch.float16):
        y = decode_experts(x, routing, gate_up, down)
    assert_same(y, x.half(), routing, gate_up.half(), down.half())


@needs_triton
def test_flops(device: str) -> None:
    x, logits, gate_up, down, _ = make(3, 33, 17, 4, torch.float32, device)
    with FlopCounterMode(display=False) as counter:
        decode_experts(x, route(logits, 2), gate_up, down, backend="triton")
    assert counter.get_total_flops() == 3 * 2 * 2 * (2 * 17 * 33 + 33 * 17)


@pytest.mark.gpu
@pytest.mark.no_poison
@pytest.mark.parametrize("tokens", [1, 30])
def test_a_graph_replays_with_other_routes(tokens: int) -> None:
    x, logits, gate_up, down, residual = make(tokens, 256, 136, 40, torch.bfloat16, "cuda")

    def step() -> Tensor:
        return decode_experts(x, route(logits, 4), gate_up, down, residual=residual)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    for favoured in (False, True):
        logits.copy_(make(tokens, 1, 1, 40, torch.float32, "cuda", favoured)[1])
        graph.replay()
        assert torch.equal(replayed, step())


COMPILED: dict[str, list[Any]] = {
    "shape": [(1, 2048, 768, 8, 8), (8, 2880, 720, 16, 4), (64, 512, 1792, 2, 2)],
    "dtype": [torch.float32, torch.bfloat16],
}


@pytest.mark.plain
@pytest.mark.parametrize("case", long_cases(COMPILED), ids=str)
def test_it_compiles(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (tokens, features, inner, experts, k), dtype = case["shape"], case["dtype"]
    logits, x, gate_up, down = (
        torch.zeros(shape, dtype=dtype)
        for shape in ((tokens, experts), (tokens, features), (experts, 2 * inner, features), (experts, features, inner))
    )
    monkeypatch.setattr(compiling, "MAX_SHARED_MEMORY", 101376)  # of smaller GPUs
    with compiling_for_hopper():
        routing = route(logits, k, backend="torch")
        decode_experts(x, routing, gate_up, down, residual=x, backend="triton")
        decode_experts(x, routing, gate_up, down, activation="gelu_tanh", backend="triton")
        decode_experts(x, routing, gate_up[:, :inner], down, activation=Ungated(), backend="triton")
        biases = gate_up[:, :, 0].contiguous(), down[:, :, 0].contiguous()
        decode_experts(x, routing, gate_up, down, *biases, activation=ClampedSwiGLU(), backend="triton")


def test_shapes_are_checked() -> None:
    x, logits, gate_up, down, residual = make(3, 33, 17, 4, torch.float32, "cpu")
    routing = route(logits, 2)
    for wrong in (
        (x[None], routing, gate_up, down),
        (x, routing, gate_up[:, 1:], down),
        (x, routing, gate_up, down[:3]),
        (x.half(), routing, gate_up, down),
    ):
        with pytest.raises(ValueError, match=r"^decode_experts: x is .*; expected \(T, H\), \(E, 2I, H\), \(E, H, I\)"):
            decode_experts(*wrong)
    with pytest.raises(ValueError, match=r"^decode_experts: x is .* and residual \(2, 33\) torch.float32; expected"):
        decode_experts(x, routing, gate_up, down, residual=residual[:2])


def test_the_routing_is_checked() -> None:
    x, logits, gate_up, down, _ = make(3, 33, 17, 4, torch.float32, "cpu")
    with pytest.raises(TypeError, match=r"^decode_experts: routing is a tuple; expected the result of `route`$"):
        decode_experts(x, tuple(route(logits, 2)), gate_up, down)  # type: ignore[arg-type]
    for other in (logits[:2], logits[:, :3]):
        with pytest.raises(ValueError, match=r"^decode_experts: routing is of \d tokens .* expected the result of"):
            decode_experts(x, route(other, 2), gate_up, down)
    with pytest.raises(ValueError, match=r"^activation='relu'; expected one of .*'silu'"):
        decode_experts(x, route(logits, 2), gate_up, down, activation="relu")  # type: ignore[arg-type]


# The layer


def mixture_of(experts: int, renormalize: bool, shared: bool, device: str) -> MoE:
    router, mlps = Router(24, experts, 2, renormalize=renormalize), Experts(24, 10, experts)
    mixture = SharedExpertMoE(router, mlps, GatedMLP(24, 14), nn.Linear(24, 1)) if shared else MoE(router, mlps)
    for parameter in mixture.parameters():
        nn.init.normal_(parameter, std=0.3)
    return mixture.to(device)


def without_these_kernels(mixture: MoE) -> MoE:
    """Returns a copy with a hook, which might observe what the experts compute."""
    twin = copy.deepcopy(mixture)
    twin.experts.register_forward_hook(lambda *_: None)
    return twin


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The inputs of `decode_experts` in layers."""
    inputs: list[Tensor] = []

    def spy(x: Tensor, *args: Any, **options: Any) -> Tensor:
        inputs.append(x)
        return decode_experts(x, *args, **options)

    monkeypatch.setattr(layers.moe, "decode_experts", spy)
    return inputs


@needs_triton
@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 24), (2, 3, 24), (64, 1, 24), (24,)], ids=str)
def test_the_layer_decodes_few_tokens(
    shape: tuple[int, ...], shared: bool, renormalize: bool, dtype: torch.dtype, decoded: list[Tensor], device: str
) -> None:
    mixture, x = mixture_of(6, renormalize, shared, device).to(dtype), torch.randn(shape, device=device).to(dtype)
    exact = copy.deepcopy(mixture).double()
    # In fp64, the logits themselves would select other experts where two are nearly equal.
    exact.gate.logits = lambda x: F.linear(x.to(dtype), mixture.gate.weight).double()  # type: ignore[union-attr]
    contexts = [SimpleNamespace(router_logits=[]) for _ in range(2)]
    with torch.no_grad():
        got, expected = mixture(x, contexts[0]), without_these_kernels(mixture)(x, contexts[1])
        assert_as_exact_as(got, expected, exact(x.double()))
    assert len(decoded) == 1
    assert torch.equal(*(context.router_logits[0] for context in contexts))


@needs_triton
def test_when_the_layer_decodes(decoded: list[Tensor], device: str) -> None:
    mixture, x = mixture_of(6, True, False, device), torch.randn(2, 9, 24, device=device)
    mixture(x)  # has gradients
    with torch.no_grad():
        without_these_kernels(mixture)(x)
        mixture(torch.randn(65, 24, device=device))
        torch.func.vmap(mixture)(x)
        on_torch = copy.deepcopy(mixture)
        set_backend(on_torch, "torch")
        on_torch(x)
        assert not decoded
        mixture(x)
    mixture.requires_grad_(False)(x)
    assert len(decoded) == 2
    mixture(x.requires_grad_())
    assert len(decoded) == 2
