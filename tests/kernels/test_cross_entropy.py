import re
from functools import partial
from itertools import islice, product
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels import cross_entropy, linear_cross_entropy, token_statistics
from ligerzoo.kernels.dispatch import INTERPRETING
from tests.kernels.accuracy import assert_as_exact_as, assert_equal, judge
from tests.kernels.machine import ON_GPU, ROUNDED_DTYPES, kernel_file, needs_triton, on_gpu_too
from tests.kernels.oracles import cross_entropy_oracle, numbers, targets


def judge_with(logits: Tensor, target: Tensor, **options: Any) -> None:
    judge(partial(cross_entropy, **options), partial(cross_entropy_oracle, **options), [logits, target])


def test_every_combination_of_options(device: str) -> None:
    logits, target = numbers(5, 33, device=device), targets(5, classes=33, device=device)
    token_weight, class_weight = numbers(5, device=device), torch.rand(33, device=device) + 0.5
    amounts = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0, "logit_scale": 0.7, "temperature": 1.3}
    amounts |= {"class_weight": class_weight}
    every = 5 if INTERPRETING else 1
    for chosen in islice(product([False, True], repeat=len(amounts)), 0, None, every):
        options: dict[str, Any] = {name: v for (name, v), on in zip(amounts.items(), chosen, strict=True) if on}
        options["reduction"] = "none"
        judge_with(logits, target, **options)
        judge(
            lambda x, y, w, options=options: cross_entropy(x, y, token_weight=w, **options),
            lambda x, y, w, options=options: cross_entropy_oracle(x, y, w, **options),
            [logits, target, token_weight],
        )


SHAPES = on_gpu_too(
    [(2,), (3, 1), (5, 2), (4, 33), (2, 3, 127), (2, 1, 2, 130), (2, 8193), (1, 20_001)],
    [(1000, 32_003), (65, 151_936), (33, 262_147)],
)


@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    target = targets(*shape[:-1], classes=shape[-1], device=device)
    judge_with(numbers(*shape, dtype=dtype, device=device, scale=3.0), target, reduction="none")


@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("ignore_index", on_gpu_too([-100, 0, 10**6], [-1, 5]))
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_targets(reduction: str, ignore_index: int, ignored: float, device: str) -> None:
    logits = numbers(4, 3, 33, device=device)
    target = targets(4, 3, classes=33, device=device, ignored=ignored, ignore_index=ignore_index)
    judge_with(logits, target, ignore_index=ignore_index, reduction=reduction)
    if ignored == 1.0:
        loss = cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)
        (dlogits,) = torch.autograd.grad(loss, logits, torch.randn_like(loss))
        assert not loss.any()
        assert not dlogits.any()


@pytest.mark.parametrize("num_items", [7, torch.tensor(7), torch.tensor(2.5)], ids=str)
def test_num_items_divides_the_sum(num_items: int | Tensor, device: str) -> None:
    num_items = num_items.to(device) if isinstance(num_items, Tensor) else num_items
    logits, target = numbers(4, 3, 33, device=device), targets(4, 3, classes=33, device=device)
    judge_with(logits, target, num_items=num_items)


@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
def test_losses_are_in_fp32(dtype: torch.dtype, device: str) -> None:
    logits, target = numbers(4, 33, dtype=dtype, device=device), targets(4, classes=33, device=device)
    assert cross_entropy(logits, target).dtype == torch.float32
    assert cross_entropy(logits, target, reduction="none").dtype == torch.float32


@pytest.mark.parametrize("dtype, at", [(torch.float32, 1e4), (torch.float32, -1e30), (torch.float16, 65_000.0)])
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_logits_far_from_zero(dtype: torch.dtype, at: float, spread: float, device: str) -> None:
    """A large constant added to all logits of a row changes nothing and costs no accuracy."""
    logits = (at + spread * torch.randn(5, 130, device=device)).to(dtype).requires_grad_()
    judge_with(logits, targets(5, classes=130, device=device), reduction="none")


@pytest.mark.parametrize("scale", [100.0, 2e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_logits_far_apart(dtype: torch.dtype, scale: float, device: str) -> None:
    largest = torch.finfo(torch.float16).max
    logits = (torch.randn(5, 130, device=device) * scale).clamp(-largest, largest).to(dtype).requires_grad_()
    judge_with(logits, targets(5, classes=130, device=device), reduction="none")


@pytest.mark.parametrize("n_classes", [33, 8193])
def test_classes_with_logits_of_minus_infinity(n_classes: int, device: str) -> None:
    logits, target = numbers(5, n_classes, device=device), targets(5, classes=16, device=device, ignored=0.0)
    with torch.no_grad():
        logits[:, 16:] = -torch.inf
        logits[0, ::2] = -torch.inf
    target[0] = 1
    judge_with(logits, target, reduction="none")


def test_a_non_finite_row_does_not_affect_other_rows(device: str) -> None:
    logits, target = numbers(7, 33, device=device), targets(7, classes=33, device=device, ignored=0.0)
    with torch.no_grad():
        logits[1, 3], logits[2, 4], logits[3], logits[4, target[4]] = torch.nan, torch.inf, -torch.inf, -torch.inf
    judge_with(logits, target, reduction="none")
    losses = cross_entropy(logits, target, reduction="none")
    (dlogits,) = torch.autograd.grad(losses, logits, torch.randn_like(losses))
    assert losses[[1, 2, 3]].isnan().all()
    assert losses[4] == torch.inf
    for t in (losses, dlogits):
        assert t[[0, 5, 6]].isfinite().all()


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_non_finite_ignored_row_changes_nothing(reduction: str, bad: float, backend: Any, device: str) -> None:
    logits, target = numbers(3, 33, device=device), torch.tensor([-100, 3, 7], device=device)
    for options in ({}, {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.01}):

        def results(options: dict[str, Any] = options) -> list[Tensor]:
            loss, found = cross_entropy(
                logits, target, reduction=reduction, backend=backend, return_statistics=True, **options
            )
            (dlogits,) = torch.autograd.grad(loss, logits, torch.ones_like(loss))
            return [loss.detach(), dlogits, found.logps, found.entropy, found.logsumexp, found.argmax, found.accuracy]

        with torch.no_grad():
            logits[0] = 0.0
        expected = results()
        with torch.no_grad():
            logits[0] = bad
        actual = results()
        assert_equal(actual, expected)
        assert not actual[1][0].any()


@pytest.mark.parametrize("smoothing", [0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_smoothing_of_logits_far_from_zero(weighted: bool, smoothing: float, device: str) -> None:
    logits = (1e4 + torch.randn(5, 130, device=device)).requires_grad_()
    class_weight = torch.rand(130, device=device) + 0.5 if weighted else None
    target = targets(5, classes=130, device=device)
    judge_with(logits, target, label_smoothing=smoothing, class_weight=class_weight, reduction="none")


@pytest.mark.parametrize("n_classes", [33, 8193])
def test_smoothing_with_a_target_logit_of_minus_infinity(n_classes: int, device: str) -> None:
    logits, target = numbers(3, n_classes, device=device), targets(3, classes=16, device=device, ignored=0.0)
    with torch.no_grad():
        logits[0, target[0]] = -torch.inf
    losses = cross_entropy(logits, target, label_smoothing=0.1, reduction="none")
    assert losses[0] == torch.inf
    assert losses[1:].isfinite().all()


def test_statistics_equal_those_of_the_loss_head(device: str) -> None:
    logits, target = numbers(2, 5, 33, device=device), targets(2, 5, classes=33, device=device)
    transform = {"softcap": 2.0, "logit_scale": 0.7, "temperature": 1.3}
    loss, found = cross_entropy(logits, target, label_smoothing=0.1, return_statistics=True, **transform)
    assert torch.equal(loss, cross_entropy(logits, target, label_smoothing=0.1, **transform))
    expected = token_statistics(logits, torch.eye(33, device=device), target, **transform)
    for name in ("logps", "entropy", "logsumexp", "argmax", "accuracy"):
        assert not getattr(found, name).requires_grad
        torch.testing.assert_close(getattr(found, name), getattr(expected, name).detach())


@needs_triton
def test_statistics_cost_no_second_pass(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []
    launch = kernel_file("jit").Kernel._launch
    monkeypatch.setattr(
        kernel_file("jit").Kernel, "_launch", lambda *args, **options: launches.append(args) or launch(*args, **options)
    )
    loss, _ = cross_entropy(
        numbers(5, 33, device=device),
        targets(5, classes=33, device=device),
        return_statistics=True,
        label_smoothing=0.1,
        class_weight=torch.rand(33, device=device),
    )
    loss.backward()
    assert len(launches) == 2


WRONG_TARGETS = [33, -1, -101, 2**40]


@pytest.mark.skipif(ON_GPU, reason="checking the targets would be a host sync")
@pytest.mark.parametrize("wrong", WRONG_TARGETS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_target_outside_the_vocabulary(wrong: int, requires_grad: bool) -> None:
    target = torch.tensor([[1, -100, 2], [0, wrong, 32]])
    message = re.escape(f"cross_entropy: target[1, 1] is {wrong}; expected 0 to 32, or ignore_index=-100")
    with pytest.raises(ValueError, match=message):
        cross_entropy(torch.ones(2, 3, 33, requires_grad=requires_grad), target)


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", WRONG_TARGETS)
def test_debug_checks_for_a_target_outside_the_vocabulary_on_a_gpu(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_file("loss.reduction"), "DEBUG", True)
    with pytest.raises(ValueError, match=re.escape(f"cross_entropy: target[1] is {wrong}")):
        cross_entropy(torch.ones(2, 33, device="cuda"), torch.tensor([1, wrong], device="cuda"))


@needs_triton
@pytest.mark.parametrize("wrong", WRONG_TARGETS)
def test_an_unchecked_target_outside_the_vocabulary_gives_nan(
    wrong: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_file("cross_entropy"), "as_targets", lambda _, target, *__: target)
    logits = numbers(3, 33, device=device)
    target = torch.tensor([1, wrong, 32], device=device)
    losses = cross_entropy(logits, target, reduction="none")
    (dlogits,) = torch.autograd.grad(losses, logits, torch.randn_like(losses))
    for t in (losses, dlogits):
        assert t[1].isnan().all()
        assert t[[0, 2]].isfinite().all()


def test_gradient_accumulation_with_num_items_is_exact(device: str) -> None:
    logits, target = numbers(12, 33, device=device), targets(12, classes=33, device=device, ignored=0.5)
    valid = int((target != -100).sum())

    def gradient(logits: Tensor, pieces: int) -> Tensor:
        parts = zip(logits.chunk(pieces), target.chunk(pieces), strict=True)
        loss = sum(cross_entropy(some, of_them, num_items=valid) for some, of_them in parts)
        return torch.autograd.grad(loss, logits)[0]

    truth = gradient(logits.detach().double().requires_grad_(), 1)
    reference = torch.autograd.grad(cross_entropy_oracle(logits, target), logits)[0]
    for pieces in (1, 2, 4, 6):
        assert_as_exact_as(gradient(logits, pieces), reference, truth)


@pytest.mark.parametrize(
    "options", [{"reduction": "average"}, {"reduction": "none", "num_items": 3}, {"reduction": "sum", "num_items": 3}]
)
def test_incompatible_options(options: dict[str, Any], device: str) -> None:
    with pytest.raises(ValueError, match=r"cross_entropy: reduction='\w+' with num_items="):
        cross_entropy(numbers(2, 33, device=device), targets(2, classes=33, device=device), **options)


@pytest.mark.parametrize("target_shape", [(2,), (3,), (2, 4), (2, 3, 33), ()])
def test_invalid_shapes(target_shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"cross_entropy: logits \(2, 3, 33\) and target .*; expected"):
        cross_entropy(torch.ones(2, 3, 33), torch.zeros(target_shape, dtype=torch.int64))


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("options", [{"z_loss": 0.1}, {"label_smoothing": 0.3}])
def test_a_mean_without_any_weight_is_zero(linear: bool, options: dict[str, float], device: str) -> None:
    x, weight = numbers(5, 16, device=device), numbers(33, 16, device=device)
    target = targets(5, classes=33, device=device, ignored=0.0)
    class_weight = torch.ones(33, device=device)
    class_weight[target] = 0
    arguments = (x, weight, target) if linear else (x @ weight.T, target)
    loss = (linear_cross_entropy if linear else cross_entropy)(*arguments, class_weight=class_weight, **options)
    assert loss == 0
    assert all(not gradient.any() for gradient in torch.autograd.grad(loss, [x, weight]))


def test_almost_full_smoothing_keeps_the_digits_of_the_target(device: str) -> None:
    """The target's share 1 - e is small here, and its gradient the largest of all."""
    logits, target = numbers(1, 1024, device=device, scale=0.5), targets(1, classes=1024, device=device, ignored=0.0)
    options = {"label_smoothing": 0.9906020990452717}
    judge(partial(cross_entropy, **options), partial(cross_entropy_oracle, **options), [logits, target])
