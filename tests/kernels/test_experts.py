import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels import ClampedSwiGLU, Ungated, experts_mlp, lora_experts_mlp
from ligerzoo.kernels.activation import ACTIVATIONS
from ligerzoo.kernels.dispatch import INTERPRETING
from ligerzoo.kernels.experts import reference
from ligerzoo.kernels.gating import gating
from ligerzoo.kernels.grouped_mm import grouped_outer_product, grouped_product
from ligerzoo.kernels.low_rank import LowRank
from ligerzoo.kernels.routing import permute, sort_by_expert, unpermute
from tests.covering import long_cases
from tests.kernels.accuracy import assert_as_exact_as, assert_equal, differentiate, judge, judge_draws
from tests.kernels.layouts import offset, padded, transposed
from tests.kernels.machine import ON_GPU, ROUNDED_DTYPES, on_gpu_too
from tests.kernels.op_recorder import Recorder
from tests.kernels.oracles import numbers

FUSED = ON_GPU or INTERPRETING


def routes(tokens: int, experts: int, slots: int, device: str) -> Tensor:
    """Random expert ids, distinct per token if there are enough experts."""
    return torch.rand(tokens, max(experts, slots), device=device).argsort(-1)[:, :slots] % experts


def make(
    tokens: int,
    features: int,
    inner: int,
    experts: int,
    slots: int,
    dtype: torch.dtype,
    device: str,
    activation: Any = "silu",
) -> list[Tensor]:
    """x, expert_ids, expert_weights, gate_up and down."""
    first = gating(activation).parts * inner
    return [
        numbers(tokens, features, dtype=dtype, device=device),
        routes(tokens, experts, slots, device),
        torch.rand(tokens, slots, device=device).to(dtype).requires_grad_(),
        numbers(experts, first, features, dtype=dtype, device=device, scale=features**-0.5),
        numbers(experts, features, inner, dtype=dtype, device=device, scale=inner**-0.5),
    ]


# tokens, features, inner, experts, slots
SHAPES = on_gpu_too(
    [
        (1, 16, 8, 4, 3),
        (7, 1, 1, 3, 2),
        (5, 16, 1, 8, 4),
        (5, 1, 8, 3, 1),
        (64, 33, 17, 5, 1),
        (31, 40, 24, 9, 8),
        (9, 130, 70, 3, 2),
    ],
    [(3, 512, 256, 128, 8), (4095, 256, 136, 7, 2), (16384, 64, 64, 2, 1), (300, 500, 1023, 20, 4)],
)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes(shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: str) -> None:
    judge(experts_mlp, reference, make(*shape, dtype, device))


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *map(Ungated, ACTIVATIONS)], ids=str)
def test_activations(activation: Any, device: str) -> None:
    function, oracle = (partial(f, activation=activation) for f in (experts_mlp, reference))
    judge(function, oracle, make(20, 33, 17, 3, 2, torch.float32, device, activation))


def biased(inputs: list[Tensor], dtype: torch.dtype, device: str) -> list[Tensor]:
    return [*inputs, *(numbers(*t.shape[:2], dtype=dtype, device=device) for t in inputs[-2:])]


CLAMPED = ClampedSwiGLU(0.5, 1.3)  # cuts off many of the numbers


@pytest.mark.parametrize(
    "case", long_cases({"activation": ["silu", CLAMPED, Ungated()], "dtype": ROUNDED_DTYPES}), ids=str
)
def test_biases(case: dict[str, Any], device: str) -> None:
    activation, dtype = case.values()
    function, oracle = (partial(f, activation=activation) for f in (experts_mlp, reference))
    # No single weight: `judge` checks a gradient of one number with 16 draws.
    for shape in ((20, 33, 17, 4, 2), (1, 7, 140, 3, 2), (140, 70, 24, 3, 1)):

        def judge_draw(seed: int, shape: tuple[int, ...] = shape) -> None:
            torch.manual_seed(seed)
            judge(function, oracle, biased(make(*shape, dtype, device, activation), dtype, device))

        judge_draws(judge_draw, seed=0)  # rounding moves some numbers across the limit, where the gradient jumps


def test_clamps(device: str) -> None:
    """Without biases, with features exactly at the limits, and NaN."""
    function, oracle = (partial(f, activation=CLAMPED) for f in (experts_mlp, reference))
    judge(function, oracle, make(20, 33, 17, 3, 2, torch.float32, device))
    x, gate_up = torch.tensor([[1.0]], device=device), torch.tensor([[[0.5], [-0.5]]], device=device)
    ids, weights, down = torch.zeros(1, 1, device=device).long(), torch.ones_like(x), torch.ones(1, 1, 1, device=device)
    gate_up.requires_grad_()
    (gradient,) = torch.autograd.grad(function(x, ids, weights, gate_up, down), gate_up)
    (expected,) = torch.autograd.grad(oracle(x, ids, weights, gate_up, down), gate_up)
    assert (gradient != 0).all()
    torch.testing.assert_close(gradient, expected)
    assert function(x * torch.nan, ids, weights, gate_up, down).isnan().all()


@pytest.mark.parametrize("frozen", [(), (0, 2, 3, 4), (0, 2, 3, 4, 5), (0, 2, 3, 4, 6), (5, 6)], ids=str)
def test_frozen_inputs_with_biases(frozen: tuple[int, ...], device: str) -> None:
    for activation in (CLAMPED, Ungated()):
        inputs = biased(make(20, 33, 17, 4, 2, torch.float32, device, activation), torch.float32, device)
        inputs = [t.detach() if i in frozen else t for i, t in enumerate(inputs)]
        judge(partial(experts_mlp, activation=activation), partial(reference, activation=activation), inputs)


@pytest.mark.parametrize("activation", [ClampedSwiGLU(0.0), ClampedSwiGLU(7.0, -1.0), ClampedSwiGLU(float("nan"))])
def test_invalid_clamps(activation: Any, device: str) -> None:
    with pytest.raises(
        ValueError, match=r"^activation=ClampedSwiGLU\(.*; expected a positive limit and a positive alpha"
    ):
        experts_mlp(*make(2, 3, 4, 2, 1, torch.float32, device), activation=activation)


def test_shapes_of_biases_are_checked(device: str) -> None:
    inputs = make(2, 3, 4, 2, 1, torch.float32, device)
    with pytest.raises(ValueError, match=r"^experts_mlp: gate_up_bias has shape \(2, 4\); expected \(2, 8\)"):
        experts_mlp(*inputs, torch.zeros(2, 4, device=device))
    with pytest.raises(ValueError, match=r"^experts_mlp: down_bias has shape \(3, 3\); expected \(2, 3\)"):
        experts_mlp(*inputs, None, torch.zeros(3, 3, device=device))


@pytest.mark.parametrize("ids", [[0], [2], [1, 3], [3, 1, 0]], ids=str)
def test_experts_without_tokens(ids: list[int], device: str) -> None:
    x, expert_ids, *others = make(20, 33, 17, 4, 2, torch.float32, device)
    inputs = [x, torch.tensor(ids, device=device)[expert_ids % len(ids)], *others]
    judge(experts_mlp, reference, inputs)
    _, gradients = differentiate(experts_mlp, inputs, [torch.randn_like(x)])
    idle = sorted({0, 1, 2, 3} - set(ids))
    for gradient in gradients[-2:]:
        assert gradient is not None
        assert torch.equal(gradient[idle], torch.zeros_like(gradient[idle]))


def repeated(tokens: int, experts: int, slots: int, device: str) -> Tensor:
    """Random expert ids, independent of each other: tokens have an expert several times, or only one."""
    ids = torch.randint(experts, (tokens, slots), device=device)
    ids[::2] = ids[::2, :1]
    return ids


def updates(experts: int, features: int, first: int, inner: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """A and B of rank 8, of the gate and up projections and of the down projections."""
    shapes = (experts, 8, features), (experts, first, 8), (experts, 8, inner), (experts, features, 8)
    return [numbers(*shape, dtype=dtype, device=device, scale=shape[2] ** -0.5) for shape in shapes]


def judge_repeated(
    tokens: int, experts: int, slots: int, dtype: torch.dtype, device: str, activation: Any = "silu"
) -> None:
    features, inner = 64, 24
    x, _, weights, gate_up, down = make(tokens, features, inner, experts, slots, dtype, device, activation)
    inputs = [x, repeated(tokens, experts, slots, device), weights, gate_up, down]
    judge(partial(experts_mlp, activation=activation), partial(reference, activation=activation), inputs)
    matrices = updates(experts, features, gate_up.shape[1], inner, dtype, device)
    frozen = [*inputs[:3], gate_up.detach(), down.detach(), *matrices]

    def with_updates(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args: function(
            *args[:5],
            gate_up_update=LowRank(*args[5:7], 0.5),
            down_update=LowRank(*args[7:], 0.5),
            activation=activation,
        )

    judge(with_updates(lora_experts_mlp), with_updates(reference), frozen)


@pytest.mark.parametrize("tokens, experts, slots", [(5, 1, 8), (70, 1, 2), (9, 3, 8), (1, 2, 2)])
def test_repeated_experts(tokens: int, experts: int, slots: int, device: str) -> None:
    for activation in ("silu", Ungated()):
        judge_repeated(tokens, experts, slots, torch.float32, device, activation)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("experts", [1, 2, 4])
@pytest.mark.parametrize(
    "tokens, slots", [(1, 8), (63, 8), (64, 8), (300, 8), (1000, 8), (511, 1), (512, 1), (4000, 2)]
)
def test_repeated_experts_in_large_groups(tokens: int, slots: int, experts: int, dtype: torch.dtype) -> None:
    """With our kernel, torch's grouped_mm, and a plain product for a single expert."""
    judge_repeated(tokens, experts, slots, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [1023, 1024, 1500])
def test_many_experts(experts: int) -> None:
    judge(experts_mlp, reference, make(600, 16, 8, experts, 2, torch.bfloat16, "cuda"))


def test_int32_ids_and_weights_in_fp32(device: str) -> None:
    x, expert_ids, expert_weights, *matrices = make(40, 33, 17, 3, 2, torch.float16, device)
    judge(experts_mlp, reference, [x, expert_ids.int(), expert_weights.detach().float().requires_grad_(), *matrices])


def test_non_finite_values_stay_within_their_token_and_expert(device: str) -> None:
    x, _, expert_weights, gate_up, down = make(6, 33, 17, 4, 1, torch.float32, device)
    expert_ids = torch.tensor([[0], [0], [1], [2], [3], [3]], device=device)
    with torch.no_grad():
        x[0, 3], gate_up[1, 20, 5], down[2, 7, 16], expert_weights[4] = torch.nan, torch.nan, torch.inf, torch.nan
    inputs = [x, expert_ids, expert_weights, gate_up, down]
    (y,), (dx, *_, dgate_up, ddown) = differentiate(experts_mlp, inputs, [torch.randn_like(x)])
    finite = torch.tensor([False, True, False, False, False, True], device=device)
    assert torch.equal(y.isfinite().all(1), finite)
    assert dx is not None
    assert torch.equal(dx.isfinite().all(1), finite)
    for gradient in (dgate_up, ddown):
        assert gradient is not None
        assert torch.equal(gradient[3].isnan().any(), torch.tensor(True, device=device))


@pytest.mark.skipif(ON_GPU, reason="ids are not checked on a GPU, to avoid a host sync")
@pytest.mark.parametrize("invalid_id", [-1, 3, 2**40])
def test_an_invalid_expert_id(invalid_id: int, device: str) -> None:
    inputs = make(5, 33, 17, 3, 2, torch.float32, device)
    inputs[1][3, 1] = invalid_id
    message = re.escape(f"experts_mlp: expert_ids[3, 1] is {invalid_id}; expected 0 to 2")
    with pytest.raises(ValueError, match=message):
        experts_mlp(*inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("invalid_id", [-1, 3, 2**20])
def test_an_invalid_expert_id_on_a_gpu(invalid_id: int, device: str) -> None:
    inputs = make(5, 33, 17, 3, 2, torch.float32, device)
    inputs[1][3, 1] = invalid_id
    (y,), (dx, _, dweights, *_) = differentiate(experts_mlp, inputs, [torch.randn_like(inputs[0])])
    assert dx is not None
    assert dweights is not None
    for rows in (y, dx):
        assert rows.isnan().any(1).nonzero().tolist() == [[3]]
    assert dweights.isnan().nonzero().tolist() == [[3, 1]]


def test_only_the_hidden_rows_are_saved(device: str) -> None:
    inputs = make(64, 33, 17, 5, 2, torch.float32, device)
    saved: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        experts_mlp(*inputs)
    own = [t for t in saved if t.data_ptr() not in {i.data_ptr() for i in inputs}]
    assert sorted(t.nbytes for t in own) == [6 * 4, 64 * 2 * 4, 64 * 2 * 2 * 17 * 4]


@pytest.mark.plain
def test_frozen_inputs_allocate_nothing(device: str) -> None:
    inputs = make(64, 36, 20, 5, 2, torch.float32, device)

    def allocated_in_backward(*trainable: int) -> set[int]:
        leaves = [t.detach().requires_grad_(i in trainable) for i, t in enumerate(inputs)]
        y = experts_mlp(*leaves)
        upstream = torch.ones_like(y)
        with Recorder() as recorder:
            torch.autograd.grad(y, [leaves[i] for i in trainable], upstream)
        return set(recorder.allocated)

    dx, dgate_up, ddown, dhidden = (4 * n for n in (64 * 36, 5 * 40 * 36, 5 * 36 * 20, 128 * 40))
    sizes = {dx, dgate_up, ddown, dhidden}
    assert allocated_in_backward(0, 2, 3, 4) & sizes == sizes
    assert allocated_in_backward(0) & sizes == {dx, dhidden}
    assert allocated_in_backward(2) & sizes == {dhidden}
    assert allocated_in_backward(3) & sizes == {dgate_up, dhidden}
    assert allocated_in_backward(4) & sizes == {ddown}


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.ones(5, 32)},
        {"x": torch.ones(1, 5, 33)},
        {"x": torch.ones(5, 33, dtype=torch.float16)},
        {"expert_ids": torch.zeros(4, 2, dtype=torch.int64)},
        {"expert_ids": torch.zeros(5, dtype=torch.int64)},
        {"expert_weights": torch.ones(5, 3)},
        {"gate_up": torch.ones(3, 33, 33)},
        {"gate_up": torch.ones(3, 34, 33, dtype=torch.float16)},
        {"down": torch.ones(2, 33, 17)},
        {"down": torch.ones(3, 33, 34)},
    ],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("function", [experts_mlp, lora_experts_mlp])
def test_mismatched_shapes_and_dtypes(function: Callable[..., Tensor], change: dict[str, Tensor]) -> None:
    names = ["x", "expert_ids", "expert_weights", "gate_up", "down"]
    inputs = dict(zip(names, make(5, 33, 17, 3, 2, torch.float32, "cpu"), strict=True))
    message = rf"^{function.__name__}: x is \(.*expected \(T, H\), \(T, k\) of integers, \(T, k\)"
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        function(**(inputs | change))


@pytest.mark.parametrize("function", [experts_mlp, lora_experts_mlp])
def test_ungated_experts_have_one_output_per_feature(function: Callable[..., Tensor]) -> None:
    with torch.no_grad(), pytest.raises(ValueError, match=r"gate_up \(3, 34, 33\).*expected .* \(E, I, H\) and \(E, H"):
        function(*make(5, 33, 17, 3, 2, torch.float32, "cpu"), activation=Ungated())


def test_expert_ids_of_a_floating_dtype() -> None:
    x, _, *others = make(5, 33, 17, 3, 2, torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"experts_mlp: expert_ids has dtype torch\.float32; expected an integer"):
        experts_mlp(x, torch.zeros(5, 2), *others)


def test_an_unknown_activation() -> None:
    with pytest.raises(ValueError, match=r"activation='relu'; expected one of .*'silu', 'gelu_tanh', 'gelu', 'quick_"):
        experts_mlp(*make(5, 33, 17, 3, 2, torch.float32, "cpu"), activation="relu")


# Routing and grouped products


def test_slots_are_sorted_by_expert_and_keep_their_order(device: str) -> None:
    expert_ids = routes(50, 7, 3, device)
    rows, bounds = sort_by_expert(expert_ids, 9)
    ids = expert_ids.flatten()
    assert torch.equal(rows.flatten().long(), ids.argsort(stable=True).argsort())
    assert bounds.tolist() == [int((ids < expert).sum()) for expert in range(10)]


@pytest.mark.parametrize("layout", [torch.clone, offset, padded, transposed], ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("features", on_gpu_too([1, 7, 64, 127, 2049], [4095, 16384]))
def test_permute_and_unpermute(features: int, layout: Any, device: str) -> None:
    x, (rows, bounds) = numbers(20, features, device=device).detach(), sort_by_expert(routes(20, 7, 3, device), 7)
    values = permute(layout(x), rows, FUSED)
    assert torch.equal(values[rows.flatten().long()], x.repeat_interleave(3, 0))
    values = torch.randn_like(values)
    truth = values.double()[rows.long()].sum(1)
    assert_as_exact_as(unpermute(values, rows, bounds, FUSED), truth.float(), truth)


def grouped(rows_of_groups: list[int], device: str) -> tuple[int, Tensor]:
    ends = torch.tensor(rows_of_groups, device=device).cumsum(0).int()
    return sum(rows_of_groups), ends


GROUPS = on_gpu_too(
    [[3], [0, 63, 65, 0, 129]], [[512], [4000], [4000, 1], [4000, 0], [0] * 300 + [511, 513], [1024, 1025]]
)


@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("sizes", on_gpu_too([(1, 1), (16, 64), (65, 33), (40, 300)], [(40, 2100)]), ids=str)
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_grouped_products(groups: list[int], sizes: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    n_rows, ends = grouped(groups, device)
    n_inner, n_cols = sizes
    x, z = (numbers(n_rows, n, dtype=dtype, device=device).detach() for n in sizes)
    w = numbers(len(groups), n_inner, n_cols, dtype=dtype, device=device).detach()
    slices = [slice(start, end) for start, end in pairwise([0, *ends.tolist()])]
    truth = torch.cat([x[rows].double() @ matrix.double() for rows, matrix in zip(slices, w, strict=True)])
    expected = torch.cat([x[rows] @ matrix for rows, matrix in zip(slices, w, strict=True)])
    for layout in (torch.clone, offset, padded, lambda t: t.mT.contiguous().mT):
        assert_as_exact_as(grouped_product(x, layout(w), ends, FUSED), expected, truth)
    truth = torch.stack([x[rows].double().T @ z[rows].double() for rows in slices])
    expected = torch.stack([x[rows].T @ z[rows] for rows in slices])
    assert_as_exact_as(grouped_outer_product(x, z, ends, FUSED), expected, truth)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_groups_do_not_affect_each_other(is_transposed: bool, device: str) -> None:
    n_rows, ends = grouped([65, 63, 70], device)
    x, a = (numbers(n_rows, n, device=device).detach() for n in (33, 36))
    w = numbers(3, 33, 70, device=device).detach()
    expected = grouped_product(x, w, ends, FUSED), grouped_outer_product(x, a, ends, FUSED)
    middle = slice(65, 128)
    x[:65] = x[128:] = a[:65] = a[128:] = w[0] = w[2] = torch.nan
    w = w.mT.contiguous().mT if is_transposed else w
    assert_equal([grouped_product(x, w, ends, FUSED)[middle]], [expected[0][middle]])
    assert_equal([grouped_outer_product(x, a, ends, FUSED)[1]], [expected[1][1]])


@pytest.mark.gpu
@pytest.mark.no_poison
@pytest.mark.parametrize("tokens", [300, 5000])  # our kernel, and torch's grouped_mm
def test_a_graph_replays_with_other_routes(tokens: int) -> None:
    inputs = make(tokens, 256, 136, 4, 2, torch.bfloat16, "cuda")
    upstream = torch.randn_like(inputs[0])
    leaves = [t for t in inputs if t.requires_grad]

    def step() -> list[Tensor]:
        y = experts_mlp(*inputs)
        return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    for _ in range(2):
        inputs[1].copy_(routes(tokens, 4, 2, "cuda"))
        graph.replay()
        assert_equal(replayed, step())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
def test_many_rows_per_expert_without_host_sync(dtype: torch.dtype) -> None:
    """Enough rows per expert to use torch's grouped_mm where it is supported."""
    inputs = make(3000, 64, 24, 4, 2, dtype, "cuda")
    judge(experts_mlp, reference, inputs)
    y = experts_mlp(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(experts_mlp(*inputs), [t for t in inputs if t.requires_grad], torch.ones_like(y))
    finally:
        torch.cuda.set_sync_debug_mode("default")
