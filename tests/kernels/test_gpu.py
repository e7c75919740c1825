"""Tests that need a GPU: sizes beyond 32-bit offsets, host syncs, several devices, determinism, CUDA graphs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels import (
    add_rms_norm,
    cross_entropy,
    geglu,
    jsd,
    kl_div,
    layer_norm,
    linear_cross_entropy,
    rms_norm,
    rope,
    softmax,
    swiglu,
    tvd,
)
from tests.kernels.accuracy import as_tuple, assert_equal, differentiate
from tests.kernels.machine import kernel_file
from tests.kernels.operations import Operation, every_operation
from tests.kernels.oracles import angles, targets

pytestmark = pytest.mark.gpu


def upstream_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.randn_like(output) for output in outputs]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@every_operation
def test_no_host_sync(operation: Operation) -> None:
    inputs = operation.inputs(5, torch.bfloat16, "cuda")
    upstream = upstream_of(as_tuple(operation.function(*inputs)))
    differentiable = [t for t in inputs if t.requires_grad]
    torch.autograd.grad(as_tuple(operation.function(*inputs)), differentiable, upstream)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(as_tuple(operation.function(*inputs)), differentiable, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_operation
def test_results_are_deterministic(operation: Operation) -> None:
    inputs = operation.inputs(3000, torch.bfloat16, "cuda")
    upstream = upstream_of(as_tuple(operation.function(*inputs)))

    def results() -> list[Tensor | None]:
        outputs, gradients = differentiate(operation.function, inputs, upstream)
        return [*(t.detach() for t in outputs), *gradients]

    first = results()
    for _ in range(3):
        assert_equal(results(), first)


@every_operation
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_gpu_than_the_current_one(operation: Operation) -> None:
    inputs = operation.inputs(5, torch.float32, "cuda:0")
    upstream = upstream_of(as_tuple(operation.function(*inputs)))
    outputs, gradients = differentiate(operation.function, inputs, upstream)

    def on_gpu_1(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t.detach().to("cuda:1").requires_grad_(t.requires_grad) for t in tensors]

    assert torch.cuda.current_device() == 0
    results = differentiate(operation.function, on_gpu_1(inputs), on_gpu_1(upstream))
    assert torch.cuda.current_device() == 0
    for actual, expected in zip((*results[0], *results[1]), (*outputs, *gradients), strict=True):
        assert (actual is None) == (expected is None)
        if actual is not None:
            assert actual.device.index == 1
            assert torch.equal(actual.cpu(), expected.cpu())


@every_operation
def test_a_cuda_graph_replays_with_new_inputs(operation: Operation) -> None:
    static = operation.inputs(5, torch.bfloat16, "cuda")
    trainable = [t for t in static if t.requires_grad]
    upstream = upstream_of(as_tuple(operation.function(*static)))

    def results() -> tuple[Tensor, ...]:
        outputs = as_tuple(operation.function(*static))
        return *(t.detach() for t in outputs), *torch.autograd.grad(outputs, trainable, upstream)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            results()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results()
    with torch.no_grad():
        for old, new in zip(static, operation.inputs(5, torch.bfloat16, "cuda"), strict=True):
            old.copy_(new)
    graph.replay()
    assert_equal(captured, results())


# More than 2^31 elements


def add_rms_norm_of_ones(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    return add_rms_norm(x, residual, torch.ones(x.shape[-1], device=x.device))


def big(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def assert_slices_give_the_same_rows(
    function: Callable[..., Any], rowwise: Sequence[Tensor], shared: Sequence[Tensor], slices: int = 8
) -> None:
    """Outputs and gradients of all rows at once are those of a slice of them at a time, to the bit."""
    assert max(t.numel() for t in rowwise) > 2**31
    outputs = as_tuple(function(*rowwise, *shared))
    upstream = upstream_of(outputs)
    gradients = torch.autograd.grad(outputs, [t for t in rowwise if t.requires_grad], upstream)
    n_rows = rowwise[0].shape[0]
    for row_slice in torch.arange(n_rows).chunk(slices):
        rows = slice(int(row_slice[0]), int(row_slice[-1]) + 1)
        some = [t.detach()[rows].requires_grad_(t.requires_grad) for t in rowwise]
        some_outputs = as_tuple(function(*some, *shared))
        some_gradients = torch.autograd.grad(
            some_outputs, [t for t in some if t.requires_grad], [dy[rows] for dy in upstream]
        )
        for whole, part in zip((*outputs, *gradients), (*some_outputs, *some_gradients), strict=True):
            assert torch.equal(whole.detach()[rows], part.detach())


@pytest.mark.slow
@pytest.mark.no_poison
def test_large_rms_norm() -> None:
    assert_slices_give_the_same_rows(rms_norm, [big(2**19 + 5, 4096)], [torch.ones(4096, device="cuda")])


@pytest.mark.slow
@pytest.mark.no_poison
def test_large_rms_norm_gradient_of_the_weight() -> None:
    x, weight = big(2**19 + 5, 4096), torch.ones(4096, device="cuda").requires_grad_()
    upstream = torch.randn_like(x).float()
    (dweight,) = torch.autograd.grad(rms_norm(x, weight), weight, upstream)
    parts = [
        torch.autograd.grad(rms_norm(some, weight), weight, dy)[0].double()
        for some, dy in zip(x.detach().chunk(8), upstream.chunk(8), strict=True)
    ]
    torch.testing.assert_close(dweight.double(), sum(parts), rtol=1e-5, atol=1e-2)


@pytest.mark.slow
@pytest.mark.no_poison
@pytest.mark.parametrize("function", [swiglu, geglu, add_rms_norm_of_ones], ids=lambda function: function.__name__)
def test_two_large_tensors(function: Callable[..., Any]) -> None:
    assert_slices_give_the_same_rows(function, [big(2**19 + 5, 4096), big(2**19 + 5, 4096)], [])


@pytest.mark.slow
@pytest.mark.no_poison
def test_large_halves_of_one_tensor() -> None:
    assert_slices_give_the_same_rows(lambda x: swiglu(*x.chunk(2, -1)), [big(2**18 + 5, 2**13 + 16)], [])


@pytest.mark.slow
@pytest.mark.no_poison
def test_large_layer_norm() -> None:
    ones = torch.ones(4096, device="cuda")
    assert_slices_give_the_same_rows(layer_norm, [big(2**19 + 5, 4096)], [ones, ones])


@pytest.mark.slow
@pytest.mark.no_poison
@pytest.mark.parametrize("columns", [2**12, 2**17 + 3])
def test_large_softmax(columns: int) -> None:
    assert_slices_give_the_same_rows(softmax, [big(2**31 // columns + 5, columns)], [])


@pytest.mark.slow
@pytest.mark.no_poison
@pytest.mark.parametrize("divergence", [kl_div, jsd, tvd], ids=lambda function: function.__name__)
def test_large_divergences(divergence: Callable[..., Any]) -> None:
    student, teacher = big(2**14 + 5, 2**17 + 3), big(2**14 + 5, 2**17 + 3).detach()
    assert_slices_give_the_same_rows(partial(divergence, reduction="none"), [student, teacher], [])


@pytest.mark.slow
@pytest.mark.no_poison
def test_large_cross_entropy() -> None:
    logits, target = big(2**14 + 5, 2**17 + 3), targets(2**14 + 5, classes=2**17 + 3, device="cuda")
    assert_slices_give_the_same_rows(partial(cross_entropy, reduction="none"), [logits, target], [])


@pytest.mark.slow
@pytest.mark.no_poison
def test_large_rope() -> None:
    rows = 2**19 + 5
    assert_slices_give_the_same_rows(
        rope, [big(rows, 1, 32, 128), big(rows, 1, 8, 128)], angles(1, 1, 64, device="cuda")
    )


@pytest.mark.slow
@pytest.mark.no_poison
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 1, 3, 2), (3, 0, 2, 1)], ids=str)
def test_rope_of_heads_or_features_far_apart(order: tuple[int, ...]) -> None:
    """The dimensions are stored in this order, and offsets exceed 2^31 elements."""
    shape = (1, 2**17, 130, 128)
    laid_out = big(*(shape[i] for i in order)).detach()
    q = laid_out.permute([order.index(i) for i in range(4)])
    assert q.shape == shape
    tokens = slice(2**17 - 100, 2**17)
    k, (cos, sin) = q[:, tokens, :2], angles(1, 100, 64, device="cuda")
    assert_equal(rope(q[:, tokens], k, cos, sin), rope(q[:, tokens].contiguous(), k.contiguous(), cos, sin))


@pytest.mark.slow
@pytest.mark.no_poison
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_large_chunks_of_linear_cross_entropy(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, features, classes = 2**14 + 5, 64, 2**17 + 3
    hidden, target = big(rows, features), targets(rows, classes=classes, device="cuda")
    weight = (torch.randn(classes, features, device="cuda") / 8).bfloat16().requires_grad_()

    def results(rows_at_a_time: int) -> tuple[Tensor, ...]:
        monkeypatch.setattr(kernel_file("linear_cross_entropy"), "rows_per_chunk", lambda *_: rows_at_a_time)
        loss = linear_cross_entropy(hidden, weight, target, reduction=reduction)
        upstream = torch.linspace(0.5, 1.5, loss.numel(), device="cuda").view_as(loss)
        return loss.detach(), *torch.autograd.grad(loss, [hidden, weight], upstream)

    for whole, parts in zip(results(rows), results(2048), strict=True):
        error = (whole.double() - parts.double()).norm() / parts.double().norm()
        assert error <= 2**-8
