import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels import linear_cross_entropy
from ligerzoo.kernels.dispatch import INTERPRETING
from tests.kernels.helpers import (
    DTYPES,
    ON_GPU,
    Recorder,
    assert_as_exact_as,
    differentiate,
    in_fp64,
    judge,
    kernel_file,
    linear_cross_entropy_oracle,
    needs_triton,
    numbers,
    on_gpu_too,
    targets,
)

SetChunk = Callable[[int], None]


@pytest.fixture
def rows_per_chunk(monkeypatch: pytest.MonkeyPatch) -> SetChunk:
    """Sets how many rows' logits exist at a time; the budget itself counts in MiB."""
    return lambda rows: monkeypatch.setattr(kernel_file("linear_cross_entropy"), "_rows_per_chunk", lambda *_: rows)


def make(
    rows: int, features: int, classes: int, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any
) -> list[Tensor]:
    """hidden, weight and target."""
    weight = numbers(classes, features, dtype=dtype, device=device, scale=features**-0.5)
    return [
        numbers(rows, features, dtype=dtype, device=device),
        weight,
        targets(rows, classes=classes, device=device, **options),
    ]


def ignoring(pattern: str, target: Tensor, ignore_index: int) -> Tensor:
    """The target with no token, some, all but the last (alone in its chunk, when it can be) or all of them ignored."""
    ignored = torch.zeros_like(target, dtype=torch.bool)
    match pattern:
        case "some":
            ignored[::3] = ignored[1] = True
        case "all but the last":
            ignored[:-1] = True
        case "all":
            ignored[:] = True
    return target.masked_fill(ignored, ignore_index)


REDUCTIONS: list[dict[str, Any]] = [{"reduction": r} for r in ("mean", "sum", "none")] + [{"num_items": 5}]


@pytest.mark.parametrize("options", REDUCTIONS, ids=str)
@pytest.mark.parametrize("pattern", ["none", "some", "all but the last", "all"])
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_options(options: dict[str, Any], pattern: str, rows: int, rows_per_chunk: SetChunk, device: str) -> None:
    rows_per_chunk(rows)
    for ignore_index in (-100, 4):
        hidden, weight, target = make(7, 17, 33, device=device, ignored=0.0)
        inputs = [hidden, weight, ignoring(pattern, target, ignore_index)]
        options = {**options, "ignore_index": ignore_index}
        judge(partial(linear_cross_entropy, **options), partial(linear_cross_entropy_oracle, **options), inputs)


# rows, features, classes
SHAPES = on_gpu_too(
    [(1, 1, 1), (3, 7, 2), (5, 127, 130), (7, 16, 33)],
    [(513, 4095, 2_003), (300, 64, 151_936), (1000, 512, 32_003)],
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_sizes(shape: tuple[int, int, int], reduction: str, dtype: torch.dtype, device: str) -> None:
    inputs = make(*shape, dtype=dtype, device=device)
    function, reference = (partial(f, reduction=reduction) for f in (linear_cross_entropy, linear_cross_entropy_oracle))
    judge(function, reference, inputs)


@pytest.mark.parametrize("leading", [(), (2,), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_leading_dimensions(leading: tuple[int, ...], reduction: str, device: str) -> None:
    inputs = [
        numbers(*leading, 17, device=device),
        numbers(33, 17, device=device),
        targets(*leading, classes=33, device=device),
    ]
    judge(
        partial(linear_cross_entropy, reduction=reduction),
        partial(linear_cross_entropy_oracle, reduction=reduction),
        inputs,
    )


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_chunks_leave_no_trace(reduction: str, rows_per_chunk: SetChunk, device: str) -> None:
    inputs = make(9, 17, 33, device=device)
    function = partial(linear_cross_entropy, reduction=reduction)
    upstream = [torch.randn_like(function(*inputs))]
    truth = differentiate(function, in_fp64(inputs), in_fp64(upstream))
    reference = differentiate(function, inputs, upstream)
    for rows in (1, 2, 4, 5, 8, 9, 100):
        rows_per_chunk(rows)
        outputs, gradients = differentiate(function, inputs, upstream)
        for case in zip((*outputs, *gradients), (*reference[0], *reference[1]), (*truth[0], *truth[1]), strict=True):
            assert_as_exact_as(*case)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_chunks_fit_the_budget(itemsize: int) -> None:
    rows_per_chunk = kernel_file("linear_cross_entropy")._rows_per_chunk
    for n_rows, n_classes, budget in product([1, 127, 128, 1000, 16384], [1, 33, 32_003, 262_147], [0, 1, 64, 512]):
        rows = rows_per_chunk(n_rows, n_classes, itemsize, budget)
        most = budget * 2**20 // (n_classes * itemsize)
        assert 1 <= rows <= max(1, most)
        chunks = -(-n_rows // rows)
        assert chunks <= 2 * max(1, -(-n_rows // max(1, most)))
        assert rows % 128 == 0 or rows >= n_rows or rows == max(1, most)


def accumulated(inputs: list[Tensor], pieces: int, num_items: int | Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of hidden and weight when the rows come in so many unequal micro-batches."""
    hidden, weight, target = inputs
    bounds = [0, *sorted(torch.randperm(hidden.shape[0] - 1)[: pieces - 1].add(1).tolist()), hidden.shape[0]]
    for start, end in pairwise(bounds):
        linear_cross_entropy(hidden[start:end], weight, target[start:end], num_items=num_items).backward()
    gradients = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    return gradients


@pytest.mark.parametrize("pieces", [1, 2, 4, 7])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_same_number_of_items_makes_accumulation_exact(pieces: int, as_tensor: bool, device: str) -> None:
    inputs = make(19, 17, 33, device=device, ignored=0.6)
    count = (inputs[2] != -100).sum()
    actual = accumulated(inputs, pieces, count if as_tensor else int(count))
    _, reference = differentiate(linear_cross_entropy_oracle, inputs, [torch.ones((), device=device)])
    _, truth = differentiate(linear_cross_entropy_oracle, in_fp64(inputs), [torch.ones((), device=device)])
    for case in zip(actual, reference[:2], truth[:2], strict=True):
        assert_as_exact_as(*case)


@pytest.mark.skipif(INTERPRETING, reason="the chunks are torch's work, as on any CPU, and the interpreter is slow")
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_the_weights_gradient_is_accumulated_in_fp32(dtype: torch.dtype, rows_per_chunk: SetChunk, device: str) -> None:
    rows, features, classes = (8192, 512, 1000) if ON_GPU else (256, 16, 33)
    inputs = make(rows, features, classes, dtype=dtype, device=device, ignored=0.0)
    truth = differentiate(
        partial(linear_cross_entropy_oracle, reduction="sum"), in_fp64(inputs), [torch.tensor(0.5, device=device)]
    )

    def error(chunks: int) -> float:
        rows_per_chunk(rows // chunks)
        _, (_, dweight, _) = differentiate(
            partial(linear_cross_entropy, reduction="sum"), inputs, [torch.tensor(0.5, device=device)]
        )
        assert dweight is not None
        assert dweight.dtype == dtype
        return float((dweight.double() - truth[1][1]).norm())

    unchunked = error(1)
    for chunks in (16, 128):
        assert error(chunks) <= 1.5 * unchunked


def test_the_upstream_gradient_is_not_rounded(device: str) -> None:
    hidden, weight, target = make(7, 17, 33, dtype=torch.bfloat16, device=device)
    loss = linear_cross_entropy(hidden, weight, target, reduction="sum")
    one = torch.ones((), device=device)
    factor = 1.003 * one  # bf16 has nothing between 1 and 1.0078
    dhidden, scaled = (torch.autograd.grad(loss, hidden, g, retain_graph=True)[0] for g in (one, factor))
    assert torch.equal(scaled, (dhidden.float() * factor).bfloat16())
    assert not torch.equal(scaled, dhidden)


def sizes_made(inputs: list[Tensor], **options: Any) -> Recorder:
    """What a forward and a backward pass run, and the memory they make."""
    with Recorder() as recorder:
        loss = linear_cross_entropy(*inputs, **options)
        if loss.requires_grad:
            loss.backward(torch.full_like(loss, 0.5))
    return recorder


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_memory_exceeds_the_budget_but_the_gradients(reduction: str, device: str) -> None:
    inputs = make(9, 2, 2**16, device=device)  # 2.25 MiB of logits
    recorder = sizes_made(inputs, reduction=reduction, logits_budget=1)
    assert max(recorder.made) == 2**20
    recorder = sizes_made(inputs, reduction=reduction)
    assert max(recorder.made) == 9 * 2**16 * 4


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_frozen_head_costs_nothing(reduction: str, rows_per_chunk: SetChunk, device: str) -> None:
    rows_per_chunk(4)
    hidden, weight, target = make(8, 64, 130, device=device)
    frozen = sizes_made([hidden, weight.detach(), target], reduction=reduction)
    assert 130 * 64 * 4 not in frozen.made
    assert "addmm" not in frozen.names
    trained = sizes_made([hidden, weight, target], reduction=reduction)
    assert 130 * 64 * 4 in trained.made
    assert trained.names.count("addmm") == 2


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen_hidden_states_cost_nothing(reduction: str, rows_per_chunk: SetChunk, device: str) -> None:
    rows_per_chunk(4)
    hidden, weight, target = make(8, 64, 33, device=device)
    forward_again = 2 if reduction == "none" else 0
    frozen = sizes_made([hidden.detach(), weight, target], reduction=reduction)
    assert 8 * 64 * 4 not in frozen.made
    assert frozen.names.count("mm") == 2 + forward_again
    trained = sizes_made([hidden, weight, target], reduction=reduction)
    assert 8 * 64 * 4 in trained.made
    assert trained.names.count("mm") == 4 + forward_again


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
def test_evaluation_makes_no_gradients(mode: Any, rows_per_chunk: SetChunk, device: str) -> None:
    rows_per_chunk(4)
    inputs = make(8, 64, 130, device=device)
    expected = linear_cross_entropy(*inputs)
    with mode():
        recorder = sizes_made(inputs)
        loss = linear_cross_entropy(*inputs)
    assert (recorder.names.count("mm"), recorder.names.count("addmm")) == (2, 0)
    assert max(recorder.made) <= 4 * 130 * 4
    assert torch.equal(loss, expected.detach())


def test_autocast_casts_hidden_states_and_weight_alike(device: str) -> None:
    """A norm with fp32 weights hands on fp32."""

    def with_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*inputs: Tensor) -> Any:
            with torch.autocast(device, torch.float16):
                return function(*inputs)

        return run

    judge(
        with_autocast(linear_cross_entropy), with_autocast(linear_cross_entropy_oracle), make(7, 17, 33, device=device)
    )


def test_hidden_states_that_are_not_finite_spoil_no_other_row(rows_per_chunk: SetChunk, device: str) -> None:
    rows_per_chunk(2)
    hidden, weight, target = make(7, 17, 33, device=device, ignored=0.0)
    with torch.no_grad():
        hidden[2, 3], hidden[5, 0] = torch.nan, torch.inf
    losses = linear_cross_entropy(hidden, weight, target, reduction="none")
    (dhidden,) = torch.autograd.grad(losses, hidden, torch.randn_like(losses))
    for t in (losses, dhidden):
        assert t[[2, 5]].isnan().any(-1).all()
        assert t[[0, 1, 3, 4, 6]].isfinite().all()


@pytest.mark.skipif(ON_GPU, reason="looking at the targets would make the host wait")
@pytest.mark.parametrize("wrong", [33, -1])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_target_that_is_no_class(wrong: int, reduction: str) -> None:
    hidden, weight, target = make(7, 17, 33)
    target[5] = wrong
    with pytest.raises(ValueError, match=re.escape(f"the target at (5,) is {wrong}; expected 0 to 32, or -100")):
        linear_cross_entropy(hidden, weight, target, reduction=reduction)


@needs_triton
def test_a_target_that_nobody_looked_at_is_loud(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cross_entropy", "linear_cross_entropy"):
        monkeypatch.setattr(kernel_file(name), "check_targets", lambda *_: None)
    hidden, weight, target = make(7, 17, 33, device=device, ignored=0.0)
    target[5] = 33
    losses = linear_cross_entropy(hidden, weight, target, reduction="none")
    (dhidden,) = torch.autograd.grad(losses, hidden, torch.randn_like(losses))
    others = [0, 1, 2, 3, 4, 6]
    for t in (losses, dhidden):
        assert t[5].isnan().all()
        assert t[others].isfinite().all()


def test_the_meta_device() -> None:
    hidden, weight, target = (t.to("meta") for t in make(7, 17, 33))
    assert linear_cross_entropy(hidden, weight, target, reduction="none").shape == (7,)


@pytest.mark.parametrize(
    "hidden, weight, target",
    [
        ((2, 17), (33, 16), (2,)),
        ((2, 17), (33, 17), (3,)),
        ((2, 17), (17,), (2,)),
        ((2, 17), (1, 33, 17), (2,)),
        ((17,), (33, 17), (1,)),
    ],
)
def test_shapes_that_do_not_fit(hidden: tuple[int, ...], weight: tuple[int, ...], target: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="linear_cross_entropy: hidden"):
        linear_cross_entropy(torch.ones(hidden), torch.ones(weight), torch.zeros(target, dtype=torch.int64))


def test_dtypes_that_differ() -> None:
    with pytest.raises(ValueError, match=r"hidden \(2, 17\) torch.float32, weight \(33, 17\) torch.float16.*one dtype"):
        linear_cross_entropy(torch.ones(2, 17), torch.ones(33, 17).half(), torch.zeros(2, dtype=torch.int64))


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_peak_memory_on_a_gpu(reduction: str) -> None:
    rows, features, classes, mib = 16384, 1024, 128_256, 2**20
    inputs = make(rows, features, classes, dtype=torch.bfloat16, device="cuda")
    linear_cross_entropy(*make(8, features, classes, dtype=torch.bfloat16, device="cuda")).backward()  # workspaces

    def peak_of(function: Callable[[], Any]) -> tuple[Any, int]:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        return function(), torch.cuda.max_memory_allocated() - before

    loss, forward_peak = peak_of(lambda: linear_cross_entropy(*inputs, reduction=reduction, logits_budget=256).sum())
    _, backward_peak = peak_of(loss.backward)
    dhidden, dweight = 2 * rows * features, 2 * classes * features  # in bf16; dweight is first made in fp32
    made, handed_out = 256 * mib + dhidden + 2 * dweight, dhidden + dweight
    slack = 16 * mib
    if reduction == "mean":  # gradients are made in the forward pass, and scaled in the backward pass
        assert forward_peak <= made + slack
        assert backward_peak <= handed_out + slack
    else:
        assert forward_peak <= 256 * mib + slack
        assert backward_peak <= made + dweight + slack
