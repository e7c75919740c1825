import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ligerzoo.kernels import jsd, kl_div
from ligerzoo.kernels.dispatch import INTERPRETING
from ligerzoo.kernels.divergence import row_divergences_
from ligerzoo.kernels.loss.token_divergence import DivergenceOptions
from tests.kernels.accuracy import assert_as_exact_as, assert_equal, judge
from tests.kernels.machine import ON_GPU, ROUNDED_DTYPES, kernel_file, needs_triton, on_gpu_too
from tests.kernels.op_recorder import Recorder, launch_nothing
from tests.kernels.operations import DIVERGENCES, every_divergence, one_divergence
from tests.kernels.oracles import divergence_oracle, numbers, targets


def function_of(of: str, **options: Any) -> Callable[..., Tensor]:
    return partial(DIVERGENCES[of][0], **options)


def judge_with(of: str, student: Tensor, teacher: Tensor, target: Tensor | None = None, **options: Any) -> None:
    inputs = [student, teacher.detach(), *([] if target is None else [target])]
    judge(function_of(of, **options), partial(divergence_oracle, of, **options), inputs)


@torch.no_grad()
def separate_(student: Tensor, teacher: Tensor) -> None:
    """Moves nearly equal probabilities apart: rounding would decide the sign of tvd's gradient."""
    student[(student.double().log_softmax(-1) - teacher.double().log_softmax(-1)).abs() < 1e-3] += 0.01


SHAPES = on_gpu_too(
    [(130,), (3, 1), (50, 2), (20, 33), (4, 3, 127), (2, 1, 2, 130), (2, 4097), (1, 9001)],
    [(500, 32_003), (65, 151_936), (33, 262_147)],
)


@one_divergence
@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes(shape: tuple[int, ...], dtype: torch.dtype, of: str, device: str) -> None:
    student, teacher = (numbers(*shape, dtype=dtype, device=device) for _ in range(2))
    if of == "tvd":
        separate_(student, teacher)
    judge_with(of, student, teacher, reduction="none")


@every_divergence
@pytest.mark.parametrize("student, teacher", [(torch.float16, torch.float32), (torch.float32, torch.float16)])
def test_mixed_dtypes(student: torch.dtype, teacher: torch.dtype, of: str, device: str) -> None:
    judge_with(of, numbers(5, 33, dtype=student, device=device), numbers(5, 33, dtype=teacher, device=device))


@every_divergence
@pytest.mark.parametrize("temperature", [0.5, 3, 20.0])
def test_temperature(temperature: float, of: str, device: str) -> None:
    student, teacher = (numbers(100 if ON_GPU else 5, 33, device=device, scale=3.0) for _ in range(2))
    judge_with(of, student, teacher, temperature=temperature, reduction="none")


@pytest.mark.parametrize("beta", [0, 0.0, 1e-3, 0.1, 0.5, 0.9, 1.0, 1])
def test_beta(beta: float, device: str) -> None:
    student, teacher = (numbers(5, 33, device=device, scale=2.0) for _ in range(2))
    judge_with("jsd", student, teacher, beta=beta, temperature=2.0, reduction="none")


@pytest.mark.parametrize("beta, reverse", [(0.0, False), (1.0, True)])
def test_jsd_at_beta_0_and_1_is_a_kl_divergence(beta: float, reverse: bool, device: str) -> None:
    """The limit of jsd divided by beta or 1 - beta; the formula itself is 0 there."""
    student, teacher = numbers(5, 33, device=device).double(), numbers(5, 33, device=device).double().detach()
    kl = kl_div(student, teacher, reverse=reverse, reduction="none")
    assert torch.equal(jsd(student, teacher, beta=beta, reduction="none"), kl)
    near = jsd(student, teacher, beta=abs(beta - 1e-7), reduction="none")
    torch.testing.assert_close(near / 1e-7, kl, rtol=1e-5, atol=0)


@one_divergence
@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("ignore_index", [-100, 0, 10**6])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_targets(reduction: str, ignore_index: int, ignored: float, of: str, device: str) -> None:
    student, teacher = (numbers(4, 3, 33, device=device) for _ in range(2))
    target = targets(4, 3, classes=33, device=device, ignored=ignored, ignore_index=ignore_index)
    judge_with(of, student, teacher, target, ignore_index=ignore_index, reduction=reduction)
    if ignored == 1.0:
        loss = function_of(of, ignore_index=ignore_index, reduction=reduction)(student, teacher.detach(), target)
        (dstudent,) = torch.autograd.grad(loss, student, torch.randn_like(loss))
        assert not loss.any()
        assert not dstudent.any()


@pytest.mark.parametrize("ignore_index", [-100, 0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_without_targets_every_token_is_valid(reduction: str, ignore_index: int, device: str) -> None:
    student, teacher = (numbers(4, 3, 33, device=device) for _ in range(2))
    judge_with("kl_div", student, teacher, ignore_index=ignore_index, reduction=reduction)


@pytest.mark.parametrize("num_items", [7, torch.tensor(7), torch.tensor(2.5)], ids=str)
@pytest.mark.parametrize("with_targets", [False, True])
def test_num_items_divides_the_sum(num_items: int | Tensor, with_targets: bool, device: str) -> None:
    num_items = num_items.to(device) if isinstance(num_items, Tensor) else num_items
    student, teacher = (numbers(4, 3, 33, device=device) for _ in range(2))
    target = targets(4, 3, classes=33, device=device) if with_targets else None
    judge_with("jsd", student, teacher, target, num_items=num_items)


@every_divergence
@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
def test_losses_are_in_fp32(dtype: torch.dtype, of: str, device: str) -> None:
    student, teacher = (numbers(4, 33, dtype=dtype, device=device).detach() for _ in range(2))
    assert function_of(of)(student, teacher).dtype == torch.float32
    assert function_of(of, reduction="none")(student, teacher).dtype == torch.float32


# Extreme logits


@every_divergence
@pytest.mark.parametrize("n_classes", [33, 5000])
@pytest.mark.parametrize("options", [{}, {"temperature": 3.0}], ids=str)
def test_a_student_equal_to_its_teacher(options: dict[str, Any], n_classes: int, of: str, device: str) -> None:
    student = numbers(5, n_classes, device=device, scale=3.0)
    for beta in (0.1, 0.5, 0.7) if of == "jsd" else (None,):
        function = function_of(of, reduction="none", **options, **({} if beta is None else {"beta": beta}))
        losses = function(student, student.detach().clone())
        (dstudent,) = torch.autograd.grad(losses, student, torch.ones_like(losses))
        assert not losses.any()
        rounding = 0.0 if ON_GPU or INTERPRETING else 1e-6  # of torch's softmax backward
        assert dstudent.abs().max() <= rounding


@every_divergence
@pytest.mark.parametrize("at", [1e4, -1e6])
def test_logits_far_from_zero(at: float, of: str, device: str) -> None:
    student, teacher = (at + torch.randn(5, 130, device=device) for _ in range(2))
    judge_with(of, student.requires_grad_(), teacher - 3 * at, reduction="none")


def probabilities_of_zero() -> list[tuple[float, float]]:
    """Returns pairs of a student's and a teacher's logit; the other logits of a row are near 0."""
    return [(-1e4, -1e4), (-1e4, 0.0), (0.0, -1e4), (-95.0, -1e4), (-1e4, -95.0), (-1e30, -1e4)]


@every_divergence
@pytest.mark.parametrize("student_logit, teacher_logit", probabilities_of_zero())
def test_probabilities_that_underflow(student_logit: float, teacher_logit: float, of: str, device: str) -> None:
    student, teacher = numbers(5, 33, device=device), numbers(5, 33, device=device)
    with torch.no_grad():
        student[:, ::3], teacher[:, ::3] = student_logit, teacher_logit
    losses = function_of(of, reduction="none")(student, teacher.detach())
    (dstudent,) = torch.autograd.grad(losses, student, torch.ones_like(losses))
    assert losses.isfinite().all()
    assert dstudent.isfinite().all()
    truth = student.detach().double().requires_grad_()
    true_losses = function_of(of, reduction="none")(truth, teacher.detach().double())
    (true_dstudent,) = torch.autograd.grad(true_losses, truth, torch.ones_like(true_losses))
    torch.testing.assert_close(losses.double(), true_losses, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(
        dstudent.double(), true_dstudent, rtol=2e-6, atol=1e-6 * float(true_dstudent.abs().max())
    )


@every_divergence
@pytest.mark.parametrize("n_classes", [33, 5000])
def test_classes_with_logits_of_minus_infinity(n_classes: int, of: str, device: str) -> None:
    """The result is that of the other classes."""
    student, teacher = numbers(5, n_classes, device=device), numbers(5, n_classes, device=device).detach()
    smaller_student, smaller_teacher = student.detach()[:, :16].requires_grad_(), teacher[:, :16]
    with torch.no_grad():
        student[:, 16:] = teacher[:, 16:] = -torch.inf
    function = function_of(of, reduction="none")
    losses, expected = function(student, teacher), function(smaller_student, smaller_teacher)
    (dstudent,) = torch.autograd.grad(losses, student, torch.ones_like(losses))
    (expected_dstudent,) = torch.autograd.grad(expected, smaller_student, torch.ones_like(losses))
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(dstudent[:, :16], expected_dstudent, rtol=1e-5, atol=1e-7)
    assert not dstudent[:, 16:].any()


@every_divergence
@pytest.mark.parametrize("which", ["student", "teacher"])
def test_classes_with_logits_of_minus_infinity_in_one_distribution(which: str, of: str, device: str) -> None:
    student, teacher = numbers(5, 33, device=device), numbers(5, 33, device=device).detach()
    with torch.no_grad():
        (student if which == "student" else teacher)[:, 16:] = -torch.inf
    losses = function_of(of, reduction="none")(student, teacher)
    is_infinite = (of, which) in {("kl_div", "student"), ("kl_div-reverse", "teacher")}
    assert (losses == torch.inf).all() if is_infinite else losses.isfinite().all()
    if not is_infinite:
        truth = function_of(of, reduction="none")(student.double(), teacher.double())
        torch.testing.assert_close(losses.double(), truth, rtol=2e-6, atol=1e-6)
        (dstudent,) = torch.autograd.grad(losses, student, torch.ones_like(losses))
        assert dstudent.isfinite().all()


@every_divergence
@pytest.mark.parametrize("which", ["student", "teacher"])
def test_a_non_finite_row_does_not_affect_other_rows(which: str, of: str, device: str) -> None:
    student, teacher = numbers(7, 33, device=device), numbers(7, 33, device=device).detach()
    logits = student if which == "student" else teacher
    with torch.no_grad():
        logits[1, 3], logits[2, 4], logits[3], logits[4] = torch.nan, torch.inf, -torch.inf, torch.nan
    target = torch.tensor([1, 2, 3, 4, -100, 5, 6], device=device)
    losses = function_of(of, reduction="none")(student, teacher, target)
    (dstudent,) = torch.autograd.grad(losses, student, torch.randn_like(losses))
    assert losses[[1, 2, 3]].isnan().all()
    assert losses[4] == 0
    if which == "student":
        assert dstudent[[1, 2, 3]].isnan().any(-1).all()
    for t in (losses, dstudent):
        assert t[[0, 5, 6]].isfinite().all()


every_backend = pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])


@every_backend
@every_divergence
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("which", ["student", "teacher", "both"])
def test_non_finite_ignored_rows_have_zero_loss_and_gradient(
    which: str, reduction: str, of: str, backend: str, device: str
) -> None:
    student, teacher = numbers(6, 33, device=device), numbers(6, 33, device=device).detach()
    target = torch.tensor([1, -100, 3, -100, -100, 5], device=device)
    finite_student, finite_teacher = student.detach().clone().requires_grad_(), teacher.clone()
    with torch.no_grad():
        for logits in (student, teacher):
            if which in ("both", "student" if logits is student else "teacher"):
                logits[1], logits[3, 4], logits[4] = torch.nan, torch.inf, -torch.inf
    function = function_of(of, reduction=reduction, backend=backend)
    losses, expected = function(student, teacher, target), function(finite_student, finite_teacher, target)
    upstream = torch.randn_like(losses)
    assert_equal(
        [losses, *torch.autograd.grad(losses, student, upstream)],
        [expected, *torch.autograd.grad(expected, finite_student, upstream)],
    )


@every_backend
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd", "tvd", "cosine"])
def test_loss_and_gradient_of_non_finite_ignored_rows(divergence: Any, backend: str, device: str) -> None:
    student, teacher = torch.randn(4, 33, device=device), torch.randn(4, 33, device=device)
    student[1], teacher[2] = torch.nan, torch.inf
    target, upstream = torch.tensor([1, -100, -100, 4], device=device), torch.rand(4, device=device) + 0.5
    options = DivergenceOptions(divergence, 0.3, 2.0, -100, 1.0, 3.0, 1.0, 3.0)
    losses = row_divergences_(student, teacher, target, upstream, options, backend == "triton")
    for t in (losses, student):
        assert not t[[1, 2]].any()
        assert t[[0, 3]].isfinite().all()
        assert t[[0, 3]].any()


def test_the_cosine_of_non_finite_ignored_rows_and_of_zero_rows(device: str) -> None:
    reference, options = kernel_file("cosine").reference, DivergenceOptions("cosine", 0.0, 1.0, -100)
    student, teacher = numbers(4, 33, device=device), torch.randn(4, 33, device=device)
    with torch.no_grad():
        student[1], student[2] = torch.nan, 0.0
    losses = reference(student, teacher, torch.tensor([0, -100, 0, 0], device=device), options)
    (dstudent,) = torch.autograd.grad(losses.sum(), student)
    assert losses[1:3].tolist() == [0.0, 1.0]
    assert not dstudent[1:3].any()
    assert dstudent[[0, 3]].any(-1).all()


def test_gradient_accumulation_with_num_items_is_exact(device: str) -> None:
    student, teacher = numbers(12, 33, device=device), numbers(12, 33, device=device).detach()
    target = targets(12, classes=33, device=device, ignored=0.5)
    valid = int((target != -100).sum())

    def gradient(student: Tensor, pieces: int) -> Tensor:
        parts = zip(*(t.chunk(pieces) for t in (student, teacher.to(student.dtype), target)), strict=True)
        loss = sum(jsd(*part, num_items=valid) for part in parts)
        return torch.autograd.grad(loss, student)[0]

    truth = gradient(student.detach().double().requires_grad_(), 1)
    reference = torch.autograd.grad(divergence_oracle("jsd", student, teacher, target), student)[0]
    for pieces in (1, 2, 4, 6):
        assert_as_exact_as(gradient(student, pieces), reference, truth)


@pytest.mark.parametrize("dtype", ROUNDED_DTYPES, ids=str)
@pytest.mark.parametrize("of", ["kl_div", "kl_div-reverse", "jsd"])
@pytest.mark.parametrize("distance", [1e-3, 1e-2])
def test_nearly_equal_distributions(distance: float, of: str, dtype: torch.dtype, device: str) -> None:
    """The error of the textbook formula may exceed the divergence."""
    teacher = torch.randn(16, 1000, device=device).to(dtype) * 3
    student = teacher + (distance * torch.randn(16, 1000, device=device)).to(dtype)
    losses = function_of(of, reduction="none")(student, teacher)
    truth = divergence_oracle(of, student.double(), teacher.double(), reduction="none")
    assert (losses >= 0).all() or dtype != torch.float32  # in 16 bits most logits are equal, and D may be 1e-9
    torch.testing.assert_close(losses.double(), truth, rtol=0.0, atol=1e-7)


# Cost and errors


@every_divergence
def test_probabilities_are_not_materialized(of: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_nothing(monkeypatch, "divergence")
    launch_nothing(monkeypatch, "loss.divergence_kernels")
    student, teacher = numbers(50, 330, device=device), numbers(50, 330, device=device).detach()
    with Recorder() as recorder:
        function_of(of)(student, teacher).backward()
    large = [size for size in recorder.allocated if size > 50 * 6 * 4]
    assert large == [50 * 330 * 4]


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=needs_triton)])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd", "tvd"])
def test_loss_and_gradient_equal_the_oracle(divergence: Any, fused: bool, device: str) -> None:
    options = DivergenceOptions(divergence, 0.3, 2.0, -100)
    of = {"forward_kl": "kl_div", "reverse_kl": "kl_div-reverse"}.get(divergence, divergence)
    student, teacher = numbers(9, 5000, device=device), numbers(9, 5000, device=device).detach()
    target = targets(9, classes=33, device=device)
    oracle = partial(divergence_oracle, of, beta=0.3, temperature=2.0, reduction="none")
    expected = oracle(student, teacher, target)
    (reference,) = torch.autograd.grad(expected.sum(), student)
    true_student = student.detach().double().requires_grad_()
    true_losses = oracle(true_student, teacher.double(), target)
    (truth,) = torch.autograd.grad(true_losses.sum(), true_student)
    buffer, upstream = student.detach().clone(), torch.tensor(0.25, device=device).expand(9)
    losses = row_divergences_(buffer, teacher, target, upstream, options, fused)
    assert_as_exact_as(losses, expected.detach(), true_losses.detach())
    assert_as_exact_as(buffer, reference * 0.25, truth * 0.25)


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=needs_triton)])
@pytest.mark.parametrize("n_classes", [34, 5000])
@pytest.mark.parametrize("distance", [2.0, 8.0, -8.0])
def test_the_gradient_of_tvd_does_not_cancel(distance: float, n_classes: int, fused: bool, device: str) -> None:
    """Most of one distribution is where the other is small: s and q S are then almost equal."""
    side = torch.tensor([distance, -distance], device=device).repeat(n_classes // 2)
    student, teacher = (sign * side + torch.randn(9, n_classes, device=device) for sign in (1, -1))
    true_student = student.double().requires_grad_()
    divergence_oracle("tvd", true_student, teacher.double(), reduction="sum").backward()
    options = DivergenceOptions("tvd", 0.0, 1.0, -100)
    target = torch.zeros(9, dtype=torch.int64, device=device)
    row_divergences_(student, teacher, target, torch.ones((), device=device).expand(9), options, fused)
    assert true_student.grad is not None
    error = (student - true_student.grad).abs().max()
    assert error <= 16 * torch.finfo(torch.float32).eps * true_student.grad.abs().max()


@every_divergence
def test_a_teacher_that_requires_a_gradient(of: str, device: str) -> None:
    student, teacher = numbers(5, 33, device=device), numbers(5, 33, device=device)
    with pytest.raises(ValueError, match=r"teacher requires a gradient.*pass teacher\.detach\(\)"):
        function_of(of)(student, teacher)
    with torch.no_grad():
        function_of(of)(student, teacher)


@pytest.mark.parametrize(
    "options", [{"beta": -0.1}, {"beta": 1.1}, {"temperature": 0.0}, {"temperature": -1.0}], ids=str
)
def test_options_out_of_range(options: dict[str, float]) -> None:
    ((option, value),) = options.items()
    expected = {"beta": "a number from 0 to 1", "temperature": "a positive number"}[option]
    with pytest.raises(ValueError, match=rf"^jsd: {option}={value}; expected {expected}$"):
        jsd(torch.ones(2, 33), torch.ones(2, 33), **options)


@pytest.mark.parametrize("options", [{"reduction": "average"}, {"reduction": "none", "num_items": 3}], ids=str)
def test_incompatible_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"reduction='\w+' with num_items="):
        kl_div(torch.ones(2, 33), torch.ones(2, 33), **options)


@pytest.mark.parametrize("teacher", [(2, 3, 32), (3, 33)])
def test_invalid_logits_shapes(teacher: tuple[int, ...]) -> None:
    message = re.escape(f"kl_div: student (2, 3, 33) and teacher {teacher}; expected (..., V) for both")
    with pytest.raises(ValueError, match=message):
        kl_div(torch.ones(2, 3, 33), torch.ones(teacher))


@pytest.mark.parametrize(
    "target, message",
    [
        (torch.ones(2).long(), "shape (2,); expected (2, 3)"),
        (torch.ones(2, 3, 33).long(), "shape (2, 3, 33); expected (2, 3)"),
        (torch.ones(2, 3), "dtype torch.float32; expected token ids of an integer dtype"),
        (torch.ones(2, 3) > 0, "dtype torch.bool; expected token ids of an integer dtype"),
    ],
    ids=["too few", "too many", "floats", "a mask"],
)
def test_invalid_targets(target: Tensor, message: str) -> None:
    """A boolean mask is an error: as integers, all its values would be valid targets."""
    with pytest.raises(ValueError, match=re.escape(f"kl_div: target has {message}")):
        kl_div(torch.ones(2, 3, 33), torch.ones(2, 3, 33), target)


@needs_triton
@every_divergence
def test_the_backends_agree(of: str, device: str) -> None:
    student, teacher = numbers(5, 33, device=device), numbers(5, 33, device=device).detach()
    triton, plain = (function_of(of, backend=backend)(student, teacher) for backend in ("triton", "torch"))
    torch.testing.assert_close(triton, plain, rtol=1e-5, atol=1e-6)
