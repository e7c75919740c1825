import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, pairwise, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo import kernels
from ligerzoo.kernels import linear_cross_entropy
from ligerzoo.kernels.dispatch import INTERPRETING
from tests.covering import covering
from tests.kernels.accuracy import assert_as_exact_as, assert_equal, differentiate, in_fp64, judge
from tests.kernels.machine import HALF_DTYPE, ON_GPU, ROUNDED_DTYPES, kernel_file, needs_triton, on_gpu_too
from tests.kernels.op_recorder import Recorder
from tests.kernels.operations import DIVERGENCES
from tests.kernels.oracles import (
    cross_entropy_oracle,
    linear_cross_entropy_oracle,
    numbers,
    statistics,
    statistics_oracle,
    targets,
)

SetChunk = Callable[[int], None]


@pytest.fixture
def rows_per_chunk(monkeypatch: pytest.MonkeyPatch) -> SetChunk:
    """Sets the rows per chunk; `logits_budget` is in MiB."""
    return lambda rows: monkeypatch.setattr(kernel_file("linear_cross_entropy"), "rows_per_chunk", lambda *_: rows)


def make(
    rows: int, features: int, classes: int, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any
) -> list[Tensor]:
    """Returns hidden, weight and target."""
    weight = numbers(classes, features, dtype=dtype, device=device, scale=features**-0.5)
    return [
        numbers(rows, features, dtype=dtype, device=device),
        weight,
        targets(rows, classes=classes, device=device, **options),
    ]


def ignoring(pattern: str, target: Tensor, ignore_index: int) -> Tensor:
    """Returns the target with no token, some tokens, all but the last, or all tokens ignored."""
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


def combinations(device: str, strength: int) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
    """Yields numbers and tensors of options, of which any `strength` occur with and without each other."""
    tensors = {
        "bias": numbers(33, device=device),
        "token_weight": (torch.rand(7, device=device) + 0.5).requires_grad_(),
        "class_weight": torch.rand(33, device=device) + 0.5,
    }
    amounts = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0, "logit_scale": 0.7, "temperature": 1.3}
    for chosen in covering({name: [False, True] for name in (*amounts, *tensors)}, strength):
        names = {name for name, is_on in chosen.items() if is_on}
        yield (
            {name: value for name, value in amounts.items() if name in names},
            {name: value for name, value in tensors.items() if name in names},
        )


@pytest.mark.parametrize("strength", [3, pytest.param(4 if INTERPRETING else 8, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("options", REDUCTIONS, ids=str)
def test_combinations_of_options(options: dict[str, Any], strength: int, rows_per_chunk: SetChunk, device: str) -> None:
    hidden, weight, target = make(7, 17, 33, device=device)
    chunks = cycle([7, 1, 3])
    for amounts, tensors in combinations(device, strength):
        rows_per_chunk(next(chunks))
        if options == {"reduction": "mean"} and "token_weight" in tensors:
            # The weights' gradient is a difference here, whose rounding error exceeds what `judge` allows.
            tensors["token_weight"] = tensors["token_weight"].detach()
        differentiable = [name for name, t in tensors.items() if t.requires_grad]
        constants = {**options, **amounts, **{name: t for name, t in tensors.items() if not t.requires_grad}}

        def call(function: Callable[..., Tensor], hidden: Tensor, weight: Tensor, target: Tensor, *others: Tensor,
                 names: list[str] = differentiable, constants: dict[str, Any] = constants) -> Tensor:  # fmt: skip
            return function(hidden, weight, target, **dict(zip(names, others, strict=True)), **constants)

        inputs = [hidden, weight, target, *(tensors[name] for name in differentiable)]
        judge(partial(call, linear_cross_entropy), partial(call, linear_cross_entropy_oracle), inputs)


def test_the_gradient_of_token_weights_in_a_weighted_mean(device: str) -> None:
    hidden, weight, target = make(7, 17, 33, device=device)
    token_weight = (torch.rand(7, device=device) + 0.5).requires_grad_()
    (actual,) = torch.autograd.grad(
        linear_cross_entropy(hidden, weight, target, token_weight=token_weight), token_weight
    )
    truth = linear_cross_entropy_oracle(hidden.double(), weight.double(), target, None, token_weight.double())
    (expected,) = torch.autograd.grad(truth, token_weight)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_second_derivative_through_token_weights_is_an_error(reduction: str, device: str) -> None:
    hidden, weight, target = make(7, 17, 33, device=device)
    token_weight = torch.rand(7, device=device).requires_grad_()
    loss = linear_cross_entropy(hidden, weight, target, token_weight=token_weight, reduction=reduction)
    with pytest.raises(RuntimeError, match="differentiated only once"):
        torch.autograd.grad(loss, token_weight, create_graph=True)


@pytest.mark.parametrize("grad", [False, True])
def test_fp64_weights_and_num_items_keep_the_loss_in_fp32(grad: bool, device: str) -> None:
    hidden, weight, target = make(7, 17, 33, device=device)
    wide = torch.full((7,), 3.0, dtype=torch.float64, device=device)
    with torch.set_grad_enabled(grad):
        for options in ({"num_items": wide[0]}, {"token_weight": wide}, {"token_weight": wide, "reduction": "none"}):
            assert linear_cross_entropy(hidden, weight, target, **options).dtype == torch.float32  # type: ignore[call-overload]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_weights_of_ignored_tokens(reduction: str, device: str) -> None:
    """Their values have no effect. If all weights are 0, the mean is 0."""
    hidden, weight, target = make(7, 17, 33, device=device, ignored=0.0)
    target[[1, 4]] = -100
    token_weight = torch.rand(7, device=device)
    wild = token_weight.clone()
    wild[1], wild[4] = torch.nan, torch.inf
    results = [
        gradients_and_loss(hidden, weight, target, token_weight=w, reduction=reduction) for w in (token_weight, wild)
    ]
    assert_equal(*results)
    nothing = gradients_and_loss(hidden, weight, target, token_weight=torch.zeros_like(wild), reduction=reduction)
    assert not any(t.any() for t in nothing)


def gradients_and_loss(hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, ...]:
    loss = linear_cross_entropy(hidden, weight, target, **options)
    return loss.detach(), *torch.autograd.grad(loss.sum(), (hidden, weight))


@pytest.mark.plain
def test_small_weights_in_fp16(device: str) -> None:
    """Backward scales their gradients up with the loss, as in any fp16 training."""
    hidden, weight, target = make(64, 32, 400, dtype=torch.float16, device=device, ignored=0.0)
    small = torch.full((64,), 1e-5, device=device)
    loss = linear_cross_entropy(hidden, weight, target, token_weight=small, reduction="sum") * 65536
    expected = linear_cross_entropy(hidden, weight, target, reduction="sum") * (65536 * 1e-5)
    for actual, reference in zip(
        torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(expected, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(actual, reference, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_strided_vectors(backend: Any, device: str) -> None:
    hidden, weight, target = make(7, 17, 33, device=device)
    bias, class_weight, token_weight = (torch.rand(n, device=device) for n in (33, 33, 7))

    def losses(*vectors: Tensor) -> tuple[Tensor, ...]:
        target, bias, class_weight, token_weight = vectors
        options: dict[str, Any] = {"class_weight": class_weight, "token_weight": token_weight, "backend": backend}
        return (
            linear_cross_entropy(hidden, weight, target, bias, **options),
            linear_cross_entropy(hidden, weight, target, bias, **options, reduction="none"),
            kernels.cross_entropy(hidden @ weight.T, target, **options),
        )

    vectors = (target, bias, class_weight, token_weight)
    assert_equal(losses(*(torch.stack([v, v.flip(0)], 1)[:, 0] for v in vectors)), losses(*vectors))


@pytest.mark.parametrize("chunk", [1, 3, 7])
@pytest.mark.parametrize("transform", [{}, {"softcap": 2.0, "logit_scale": 0.7, "temperature": 1.3}], ids=str)
def test_statistics(transform: dict[str, float], chunk: int, rows_per_chunk: SetChunk, device: str) -> None:
    rows_per_chunk(chunk)
    inputs = make(7, 17, 33, device=device)
    judge(partial(statistics, **transform), partial(statistics_oracle, **transform), inputs)
    judge(
        partial(kernels.token_logps, **transform),
        lambda *inputs: statistics_oracle(*inputs, **transform)[0],  # type: ignore[arg-type]
        inputs,
    )
    hidden, weight, target = inputs
    found = kernels.token_statistics(hidden, weight, target, **transform)
    valid = target != -100
    argmax = (hidden @ weight.T).argmax(-1)
    assert torch.equal(found.argmax, argmax.where(valid, 0))
    torch.testing.assert_close(found.accuracy, (argmax == target)[valid].float().mean())


def test_statistics_of_no_token(device: str) -> None:
    hidden, weight, target = make(7, 17, 33, device=device, ignored=1.0)
    found = kernels.token_statistics(hidden, weight, target)
    for result in (found.logps, found.entropy, found.logsumexp, found.argmax, found.accuracy):
        assert not result.any()


def test_a_loss_with_its_statistics(device: str) -> None:
    """One sweep computes both; the statistics are detached."""
    inputs = make(7, 17, 33, device=device)
    for options in REDUCTIONS:
        with Recorder() as recorder:
            loss, found = kernels.linear_cross_entropy(*inputs, **options, return_statistics=True)
        assert ON_GPU or recorder.names.count("mm") == (1 if options.get("reduction") == "none" else 2)
        assert torch.equal(loss, linear_cross_entropy(*inputs, **options))
        expected = kernels.token_statistics(*inputs)
        for name in ("logps", "entropy", "logsumexp", "argmax", "accuracy"):
            assert not getattr(found, name).requires_grad
            assert torch.equal(getattr(found, name), getattr(expected, name))


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has it since 2.13")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_equals_torch_linear_cross_entropy(reduction: str, device: str) -> None:
    hidden, weight, target = make(7, 17, 33, device=device)
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.1, "ignore_index": -100}
    judge(
        partial(linear_cross_entropy, **options), partial(F.linear_cross_entropy, **options), [hidden, weight, target]
    )


# rows, features, classes
SHAPES = on_gpu_too(
    [(1, 1, 1), (3, 7, 2), (5, 127, 130), (7, 16, 33)],
    [(513, 4095, 2_003), (300, 64, 151_936), (1000, 512, 32_003), (130, 16_384, 1_000), (200, 128, 262_147)],
)


@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_sizes(shape: tuple[int, int, int], reduction: str, dtype: torch.dtype, device: str) -> None:
    inputs = make(*shape, dtype=dtype, device=device)
    function, reference = (partial(f, reduction=reduction) for f in (linear_cross_entropy, linear_cross_entropy_oracle))
    judge(function, reference, inputs)


@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
def test_bias(dtype: torch.dtype, device: str) -> None:
    inputs = [*make(16, 17, 33, dtype=dtype, device=device), numbers(33, dtype=dtype, device=device)]
    judge(
        partial(linear_cross_entropy, reduction="none"), partial(linear_cross_entropy_oracle, reduction="none"), inputs
    )


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
def test_results_do_not_depend_on_the_chunks(reduction: str, rows_per_chunk: SetChunk, device: str) -> None:
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


@pytest.mark.parametrize("bytes_per_logit", [2, 4])
def test_chunks_fit_the_budget(bytes_per_logit: int) -> None:
    rows_per_chunk = kernel_file("loss.chunked_head").rows_per_chunk
    for n_rows, n_classes, budget in product([1, 127, 128, 1000, 16384], [1, 33, 32_003, 262_147], [0, 1, 64, 512]):
        hidden = torch.empty(n_rows, 2304, device="meta")
        rows = rows_per_chunk(hidden, n_classes, bytes_per_logit, budget)
        most = budget * 2**20 // (n_classes * bytes_per_logit)
        assert 1 <= rows <= max(1, most)
        assert rows % 128 == 0 or rows >= n_rows or most < 128


def test_set_logits_budget() -> None:
    rows_per_chunk = kernel_file("loss.chunked_head").rows_per_chunk
    hidden = torch.empty(16384, 64, device="meta")
    assert rows_per_chunk(hidden, 2**18, 2, None) == 1024
    kernels.set_logits_budget(256)
    try:
        assert rows_per_chunk(hidden, 2**18, 2, None) == 512
        assert rows_per_chunk(hidden, 2**18, 2, 512) == 1024
    finally:
        kernels.set_logits_budget(512)
    with pytest.raises(ValueError, match="set_logits_budget: mebibytes=-1; expected an integer of MiB, 0 or more"):
        kernels.set_logits_budget(-1)


def accumulated(inputs: list[Tensor], pieces: int, num_items: int | Tensor) -> tuple[Tensor | None, ...]:
    """Returns the gradients of hidden and weight, accumulated over `pieces` unequal microbatches."""
    hidden, weight, target = inputs
    bounds = [0, *sorted(torch.randperm(hidden.shape[0] - 1)[: pieces - 1].add(1).tolist()), hidden.shape[0]]
    for start, end in pairwise(bounds):
        linear_cross_entropy(hidden[start:end], weight, target[start:end], num_items=num_items).backward()
    gradients = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    return gradients


@pytest.mark.parametrize("pieces", [1, 2, 4, 7])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_gradient_accumulation_with_num_items_is_exact(pieces: int, as_tensor: bool, device: str) -> None:
    inputs = make(19, 17, 33, device=device, ignored=0.6)
    count = (inputs[2] != -100).sum()
    actual = accumulated(inputs, pieces, count if as_tensor else int(count))
    _, reference = differentiate(linear_cross_entropy_oracle, inputs, [torch.ones((), device=device)])
    _, truth = differentiate(linear_cross_entropy_oracle, in_fp64(inputs), [torch.ones((), device=device)])
    for case in zip(actual, reference[:2], truth[:2], strict=True):
        assert_as_exact_as(*case)


@pytest.mark.plain
@pytest.mark.parametrize("dtype", ROUNDED_DTYPES[1:], ids=str)
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
    for chunks in on_gpu_too([16, 128], [1024]):
        assert error(chunks) <= 1.5 * unchunked


def test_the_upstream_gradient_is_not_rounded(device: str) -> None:
    # Both dtypes round the factor to 1. The interpreter truncates to bf16, so it uses fp16.
    dtype, by = (torch.float16, 1.0004) if INTERPRETING else (torch.bfloat16, 1.003)
    hidden, weight, target = make(7, 17, 33, dtype=dtype, device=device)
    loss = linear_cross_entropy(hidden, weight, target, reduction="sum")
    one = torch.ones((), device=device)
    factor = by * one
    dhidden, scaled = (torch.autograd.grad(loss, hidden, g, retain_graph=True)[0] for g in (one, factor))
    assert torch.equal(scaled, (dhidden.float() * factor).to(dtype))
    assert not torch.equal(scaled, dhidden)


def recorded(inputs: list[Tensor], **options: Any) -> Recorder:
    """Records the operations and allocations of a forward and a backward pass."""
    with Recorder() as recorder:
        loss = linear_cross_entropy(*inputs, **options)
        if loss.requires_grad:
            loss.backward(torch.full_like(loss, 0.5))
    return recorder


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_allocations_fit_the_budget_except_gradients(reduction: str, device: str) -> None:
    inputs = make(9, 2, 2**16, device=device, ignored=0.0)  # 2.25 MiB of logits
    recorder = recorded(inputs, reduction=reduction, logits_budget=1)
    assert max(recorder.allocated) == 2**20
    recorder = recorded(inputs, reduction=reduction)
    assert max(recorder.allocated) == 9 * 2**16 * 4


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_frozen_head_costs_nothing(reduction: str, rows_per_chunk: SetChunk, device: str) -> None:
    rows_per_chunk(4)
    hidden, weight, target = make(8, 64, 130, device=device)
    frozen = recorded([hidden, weight.detach(), target], reduction=reduction)
    assert 130 * 64 * 4 not in frozen.allocated
    assert "addmm" not in frozen.names
    trained = recorded([hidden, weight, target], reduction=reduction)
    assert 130 * 64 * 4 in trained.allocated
    assert trained.names.count("addmm") == 2


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen_hidden_states_cost_nothing(reduction: str, rows_per_chunk: SetChunk, device: str) -> None:
    rows_per_chunk(4)
    hidden, weight, target = make(8, 64, 33, device=device)
    forward_again = 2 if reduction == "none" else 0
    frozen = recorded([hidden.detach(), weight, target], reduction=reduction)
    assert 8 * 64 * 4 not in frozen.allocated
    assert frozen.names.count("mm") == 2 + forward_again
    trained = recorded([hidden, weight, target], reduction=reduction)
    assert 8 * 64 * 4 in trained.allocated
    assert trained.names.count("mm") == 4 + forward_again


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
def test_evaluation_computes_no_gradients(mode: Any, rows_per_chunk: SetChunk, device: str) -> None:
    rows_per_chunk(4)
    inputs = make(8, 64, 130, device=device)
    expected = linear_cross_entropy(*inputs)
    with mode():
        recorder = recorded(inputs)
        loss = linear_cross_entropy(*inputs)
    assert (recorder.names.count("mm"), recorder.names.count("addmm")) == (2, 0)
    assert max(recorder.allocated) <= 4 * 130 * 4
    assert torch.equal(loss, expected.detach())


def test_autocast_casts_hidden_states_and_weight_alike(device: str) -> None:
    """A norm with fp32 weights returns fp32."""

    def with_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*inputs: Tensor) -> Any:
            with torch.autocast(device, torch.float16):
                return function(*inputs)

        return run

    judge(
        with_autocast(linear_cross_entropy), with_autocast(linear_cross_entropy_oracle), make(7, 17, 33, device=device)
    )


def test_non_finite_hidden_states_do_not_affect_other_rows(rows_per_chunk: SetChunk, device: str) -> None:
    rows_per_chunk(2)
    hidden, weight, target = make(7, 17, 33, device=device, ignored=0.0)
    with torch.no_grad():
        hidden[2, 3], hidden[5, 0] = torch.nan, torch.inf
    losses = linear_cross_entropy(hidden, weight, target, reduction="none")
    (dhidden,) = torch.autograd.grad(losses, hidden, torch.randn_like(losses))
    for t in (losses, dhidden):
        assert t[[2, 5]].isnan().any(-1).all()
        assert t[[0, 1, 3, 4, 6]].isfinite().all()


@pytest.mark.parametrize("features", [17, 64])  # with 64, Hopper GPUs use RaggedHead in bf16
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("of", ["linear_cross_entropy", "token_logps", *DIVERGENCES])
def test_hidden_states_of_ignored_tokens_have_no_effect(
    of: str, backend: Any, bad: float, features: int, device: str
) -> None:
    dtype = HALF_DTYPE
    hidden, weight, target = make(9, features, 33, dtype=dtype, device=device, ignored=0.0)
    target[[0, 4, 5]] = -100
    bias = numbers(33, dtype=dtype, device=device)
    teacher = [t.detach().flip(0) for t in (hidden, weight)]

    def results() -> list[Tensor]:
        if of in DIVERGENCES:
            function = DIVERGENCES[of][1]
            loss = function(hidden, weight, *teacher, target, student_bias=bias, backend=backend)
        else:
            loss = getattr(kernels, of)(hidden, weight, target, bias, backend=backend)
        return [loss.detach(), *torch.autograd.grad(loss.sum(), (hidden, weight, bias))]

    with torch.no_grad():
        hidden[[0, 4, 5]] = 0.0
        teacher[0][[0, 4, 5]] = 0.0
    expected = results()
    assert not expected[1][[0, 4, 5]].any()
    with torch.no_grad():
        hidden[[0, 4, 5]] = bad
        teacher[0][[0, 4, 5]] = bad
    assert_equal(results(), expected)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("features, dtype", [(17, HALF_DTYPE), (64, HALF_DTYPE), (64, torch.float16)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_gradient_of_the_bias_is_summed_before_it_is_rounded(
    reduction: str, features: int, dtype: torch.dtype, backend: Any, rows_per_chunk: SetChunk, device: str
) -> None:
    """Equal rows have equal rounding errors, which would add up in a sum of rounded gradients."""
    rows_per_chunk(10)
    rows, classes = 40, 33
    hidden = numbers(1, features, dtype=dtype, device=device).detach().expand(rows, features)
    weight = numbers(classes, features, dtype=dtype, device=device, scale=0.1 * features**-0.5)
    target = targets(rows, classes=classes, device=device)
    bias = numbers(classes, dtype=dtype, device=device)
    # From the rounded logits: only the gradient's own error is compared.
    logits = F.linear(hidden, weight, bias).double().detach().requires_grad_()
    upstream = torch.linspace(0.5, 1.5, rows, device=device) if reduction == "none" else torch.ones((), device=device)
    loss = linear_cross_entropy(hidden, weight, target, bias, reduction=reduction, backend=backend)
    (actual,) = torch.autograd.grad(loss, bias, upstream)
    truth = cross_entropy_oracle(logits, target, reduction=reduction)
    (dlogits,) = torch.autograd.grad(truth, logits, upstream.double())
    exact = dlogits.sum(0)
    rounded = exact.to(dtype)
    error, rounding = ((t.double() - exact).abs().max() for t in (actual, rounded))
    assert error <= 1.01 * rounding


@pytest.mark.skipif(ON_GPU, reason="checking the targets would be a host sync")
@pytest.mark.parametrize("wrong", [33, -1])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_target_outside_the_vocabulary(wrong: int, reduction: str) -> None:
    hidden, weight, target = make(7, 17, 33)
    target[5] = wrong
    with pytest.raises(ValueError, match=re.escape(f"target[5] is {wrong}; expected 0 to 32, or ignore_index=-100")):
        linear_cross_entropy(hidden, weight, target, reduction=reduction)


@needs_triton
def test_an_unchecked_target_outside_the_vocabulary_gives_nan(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_file("linear_cross_entropy"), "as_targets", lambda _, target, *__: target)
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
def test_invalid_shapes(hidden: tuple[int, ...], weight: tuple[int, ...], target: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="linear_cross_entropy: hidden"):
        linear_cross_entropy(torch.ones(hidden), torch.ones(weight), torch.zeros(target, dtype=torch.int64))


def test_mixed_dtypes_of_one_head() -> None:
    with pytest.raises(
        ValueError, match=r"hidden \(2, 17\) torch.float32, weight \(33, 17\) torch.float16.*one floating-point dtype"
    ):
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
    dhidden, dweight = 2 * rows * features, 2 * classes * features  # in bf16; dweight is accumulated in fp32
    computed, returned = 256 * mib + dhidden + 2 * dweight, dhidden + dweight
    slack = 16 * mib
    if reduction == "mean":  # forward computes the gradients, backward scales them
        assert forward_peak <= computed + slack
        assert backward_peak <= returned + slack
    else:
        assert forward_peak <= 256 * mib + slack
        assert backward_peak <= computed + dweight + slack
