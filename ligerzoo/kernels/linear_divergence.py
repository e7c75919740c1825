"""Distillation heads: the divergences of `divergence` between `student_hidden @ student_weight.T` and `teacher_hidden @
teacher_weight.T`, without ever holding all logits of either.

Forward:   loss = sum_t D(softmax(y_t / T), softmax(z_t / T)),   z_t = W h_t + b of the student, y_t of the teacher.
Backward:  with P_t = dD/dz_t:   dhidden = P @ W,   dweight = P.T @ hidden,   dbias = sum_t P_t.

The rows are swept in chunks whose logits, the student's and the teacher's together, fit a budget: two matrix products
make them, one kernel turns the student's in place into their own gradient, two matrix products turn that into the
chunk's part of dhidden and dweight. dweight and dbias are accumulated in fp32.

The tokens of a sum or mean have one upstream gradient, so gradients are made in the forward sweep, and multiplied by it
in backward, see `ahead`. The teacher is a constant.

Saved: the gradients with respect to the student's hidden, weight and bias that are needed.

Logits may be scaled and bounded, z_t -> c tanh(a z_t / c), before they are divided by T; and the teacher's may be given
in place of its hidden states.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.ahead import with_gradients
from ligerzoo.kernels.dispatch import Backend, autocast, register, uses_triton, wide
from ligerzoo.kernels.divergence import (
    OPTIONS_SCHEMA,
    Divergence,
    Options,
    check,
    every_token_counts,
    jsd_at,
    loss_then_gradient_,
    losses_of,
)
from ligerzoo.kernels.head import DenseHead, Needs, SkippingHead, gradient_dtype, head_type, rows_per_chunk
from ligerzoo.kernels.tokens import check_target, denominator


class Side(NamedTuple):
    """The student, or the teacher.

    Attributes:
        hidden: (..., H) hidden states; of a teacher without weight (..., V) logits.
        weight: (V, H), the head.
        bias: (V,), added to the logits.
        scale: multiplies the logits.
        softcap: then bounds them, to softcap * tanh(logit / softcap).
    """

    hidden: Tensor
    weight: Tensor | None
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


_SIDES_SCHEMA = (
    "Tensor student_hidden, Tensor student_weight, Tensor teacher_hidden, Tensor? teacher_weight, "
    "Tensor? student_bias, Tensor? teacher_bias, float student_scale, float? student_softcap, float teacher_scale, "
    "float? teacher_softcap"
)


def _sweep_fake(
    student_hidden: Tensor, student_weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor | None,
    student_bias: Tensor | None, teacher_bias: Tensor | None, student_scale: float, student_softcap: float | None,
    teacher_scale: float, teacher_softcap: float | None, target: Tensor, upstream: Tensor, divergence: Divergence,
    beta: float, temperature: float, ignore_index: int, budget: int | None, triton: bool, needs_hidden: bool,
    needs_weight: bool, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    either = torch.promote_types(student_hidden.dtype, teacher_hidden.dtype)
    losses = student_hidden.new_empty(target.shape, dtype=wide(either))
    dhidden = student_hidden.new_empty(student_hidden.shape if needs_hidden else (0,))
    classes, features = student_weight.shape
    dweight_dtype = gradient_dtype(*_weights(student_weight, teacher_weight))
    dweight = student_weight.new_empty((classes, features) if needs_weight else (0,), dtype=dweight_dtype)
    dbias = student_weight.new_empty((classes,) if needs_bias else (0,), dtype=wide(student_weight.dtype))
    return losses, dhidden, dweight, dbias


def _weights(*weights: Tensor | None) -> list[Tensor]:
    return [weight for weight in weights if weight is not None]


class _GivenLogits:
    """The part of a head whose logits are there already."""

    def __init__(self, logits: Tensor, order: Tensor | None) -> None:
        self.given, self.order = logits, order

    def logits(self, chunk: slice) -> Tensor:
        return self.given[chunk].clone() if self.order is None else self.given[self.order[chunk]]


def _bounded_(logits: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Logits scaled and bounded, in place of those given; if there is a bound, beside its tanh, which stands there."""
    if softcap is None:
        return (logits if scale == 1.0 else logits.mul_(scale)), None
    tanh = logits.mul_(scale / softcap).tanh_()
    bounded = torch.empty_strided(tanh.shape, tanh.stride(), dtype=tanh.dtype, device=tanh.device)
    return torch.mul(tanh, softcap, out=bounded), tanh


def _through_bound_(gradient: Tensor, tanh: Tensor | None, scale: float, ignored: Tensor) -> Tensor:
    """The gradient with respect to logits before they were scaled and bounded, in place."""
    if tanh is not None:
        tanh.masked_fill_(ignored[:, None], 0.0)  # where no logits were made may stand NaN
        torch.ops.aten.tanh_backward.grad_input(gradient, tanh, grad_input=gradient)
    return gradient if scale == 1.0 else gradient.mul_(scale)


@register(
    f"linear_divergence_sweep({_SIDES_SCHEMA}, Tensor target, Tensor upstream, {OPTIONS_SCHEMA}, int? budget, "
    "bool triton, bool needs_hidden, bool needs_weight, bool needs_bias) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_sweep_fake,
)
def _sweep(
    student_hidden: Tensor, student_weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor | None,
    student_bias: Tensor | None, teacher_bias: Tensor | None, student_scale: float, student_softcap: float | None,
    teacher_scale: float, teacher_softcap: float | None, target: Tensor, upstream: Tensor, divergence: Divergence,
    beta: float, temperature: float, ignore_index: int, budget: int | None, triton: bool, needs_hidden: bool,
    needs_weight: bool, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The losses of all rows, and the gradients of their sum with respect to hidden, weight and bias (empty where not
    needed), times a 0-d upstream one."""
    options = Options(divergence, beta, temperature, ignore_index)
    needs = Needs(needs_hidden, needs_weight, needs_bias)
    sizes = student_hidden.element_size(), teacher_hidden.element_size()
    itemsize = sum(
        size if softcap is None else 2 * size
        for size, softcap in zip(sizes, (student_softcap, teacher_softcap), strict=True)
    )
    rows = rows_per_chunk(student_hidden, student_weight.shape[0], itemsize, budget)
    counts, weights = target != ignore_index, _weights(student_weight, teacher_weight)
    head = head_type(target.shape[0], *weights)
    student = head(student_hidden, student_weight, counts, rows, needs, student_bias)
    teacher: DenseHead | SkippingHead | _GivenLogits = _GivenLogits(teacher_hidden, student.order)
    if teacher_weight is not None:
        teacher = head(teacher_hidden, teacher_weight, counts, rows, Needs(False, False), teacher_bias)
    losses = target.new_zeros(target.shape, dtype=wide(torch.promote_types(student_hidden.dtype, teacher_hidden.dtype)))
    for chunk in student.chunks:
        tokens = chunk if student.order is None else student.order[chunk]
        logits, tanh = _bounded_(student.logits(chunk), student_scale, student_softcap)
        teacher_logits, _ = _bounded_(teacher.logits(chunk), teacher_scale, teacher_softcap)
        if any(needs):
            losses[tokens] = loss_then_gradient_(logits, teacher_logits, target[tokens], upstream, options, triton)
            student.take_gradient(chunk, _through_bound_(logits, tanh, student_scale, ~counts[tokens]))
        else:
            losses[tokens] = losses_of(logits, teacher_logits, target[tokens], options, triton)
    dhidden, dweight, dbias = student.gradients()
    return losses, dhidden, dweight.to(gradient_dtype(*weights)), dbias


def linear_divergence(
    name: str, student: Side, teacher: Side, target: Tensor | None, options: Options,
    reduction: Literal["mean", "sum"], num_items: int | Tensor | None, logits_budget: int | None, backend: Backend,
) -> Tensor:  # fmt: skip
    """The divergence of two heads, as `linear_kl_div` says; `name` is the function that an error is about."""
    check(name, options, teacher_hidden=teacher.hidden, teacher_weight=teacher.weight, teacher_bias=teacher.bias)
    if reduction not in ("mean", "sum"):
        raise ValueError(f'{name}: reduction={reduction!r}; expected "mean" or "sum"')
    student, teacher = _autocast(student), _autocast(teacher)
    assert student.weight is not None
    tokens, classes = student.hidden.shape[:-1], student.weight.shape[:1]
    _check_side(name, "student", student, tokens, classes)
    _check_side(name, "teacher", teacher, tokens, classes)
    if target is None:
        target, options = every_token_counts(student.hidden, options)
    check_target(name, target, tokens)
    divisor = denominator(name, wide(student.hidden.dtype), target, reduction, options.ignore_index, num_items)
    assert divisor is not None
    return _reduced_divergence(
        student._replace(hidden=student.hidden.reshape(-1, student.hidden.shape[-1])),
        teacher._replace(hidden=teacher.hidden.reshape(-1, teacher.hidden.shape[-1])),
        target.reshape(-1), divisor, options, logits_budget,
        uses_triton(student.hidden, teacher.hidden, backend=backend),
    )  # fmt: skip


def _autocast(side: Side) -> Side:
    hidden, weight, bias = autocast(side.hidden, side.weight, side.bias)
    return side._replace(hidden=hidden, weight=weight, bias=bias)


def _reduced_divergence(
    student: Side, teacher: Side, target: Tensor, divisor: int | Tensor, options: Options, budget: int | None,
    triton: bool,
) -> Tensor:  # fmt: skip
    """The sum of the tokens' divergences, divided; gradients are made in this one sweep, if there are to be any."""
    needs = [t is not None and t.requires_grad and torch.is_grad_enabled() for t in student[:3]]
    with torch.no_grad():
        share = torch.ones((), dtype=wide(student.hidden.dtype), device=target.device) / divisor
        # In fp16 what is multiplied by a small number too early may vanish.
        upstream, factor = (torch.ones_like(share), share) if student.hidden.dtype == torch.float16 else (share, None)
        losses, *gradients = _sweep(
            student.hidden, student.weight, teacher.hidden, teacher.weight, student.bias, teacher.bias,
            *student[3:], *teacher[3:], target, upstream, *options, budget, triton, *needs,
        )  # fmt: skip
        loss = losses.sum() / divisor
    return with_gradients(loss, *zip(student[:3], gradients, strict=True), factor=factor)


def _check_side(name: str, whose: str, side: Side, tokens: torch.Size, classes: torch.Size) -> None:
    hidden, weight, bias, _, softcap = side
    if softcap is not None and softcap <= 0:
        raise ValueError(f"{name}: {whose}_softcap={softcap}; expected more than 0, or None")
    if weight is None:
        if hidden.shape != (*tokens, *classes) or bias is not None:
            raise ValueError(
                f"{name}: {whose}'s logits {tuple(hidden.shape)}; expected {(*tokens, *classes)}, and no bias"
            )
        return
    fits = (
        hidden.shape == (*tokens, *weight.shape[1:])
        and weight.dim() == 2
        and weight.shape[:1] == classes
        and hidden.dtype == weight.dtype
        and (bias is None or (bias.shape == classes and bias.dtype == weight.dtype))
    )
    if not fits:
        raise ValueError(
            f"{name}: {whose}_hidden {tuple(hidden.shape)} {hidden.dtype}, {whose}_weight {tuple(weight.shape)} "
            f"{weight.dtype}, {whose}_bias {None if bias is None else (tuple(bias.shape), bias.dtype)}; "
            f"expected {(*tokens, 'H')}, {(*classes, 'H')} and {tuple(classes)} or None, of one dtype"
        )


def linear_kl_div(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    reverse: bool = False,
    temperature: float = 1.0,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    num_items: int | Tensor | None = None,
    logits_budget: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """`kl_div` of `student_hidden @ student_weight.T` and `teacher_hidden @ teacher_weight.T`; the logits of the two
    are never held beyond `logits_budget`.

    Args:
        student_hidden: (..., H) hidden states.
        student_weight: (V, H), the head, in the dtype of `student_hidden`.
        teacher_hidden: (..., G) hidden states; neither size nor dtype need be the student's.
        teacher_weight: (V, G), in the dtype of `teacher_hidden`.
        target: (...) integers, or None if all tokens count. Looked at only to tell tokens that count from others.
        reverse: KL(student || teacher) in place of KL(teacher || student).
        temperature: divides both logits; see `kl_div`.
        student_bias: (V,), added to the student's logits, or None.
        teacher_bias: (V,), added to the teacher's logits, or None.
        ignore_index: the target of a token that does not count.
        reduction: "mean" over the tokens that count, or "sum".
        num_items: divides the sum in place of the number of tokens that count (an int or a 0-d tensor): the same number
            for all micro-batches of a step makes gradient accumulation exact.
        logits_budget: MiB of logits that exist at a time (at least one row of both); None for `set_logits_budget`'s.
            On a CPU a few copies of these in fp32 come on top.
        backend: "auto" (Triton where it can), "triton" or "torch" (the reference, in chunks too).

    Returns:
        0-d, fp32 (fp64 for fp64 input). Without a token that counts, "mean" is 0 and all gradients are 0. What is
        frozen of the student costs neither the memory nor the time of its gradient.

    Raises:
        ValueError: the shapes or dtypes do not fit, an option is out of range, or something of the teacher requires a
            gradient.
    """
    options = Options("reverse_kl" if reverse else "forward_kl", 0.0, temperature, ignore_index)
    student = Side(student_hidden, student_weight, student_bias)
    teacher = Side(teacher_hidden, teacher_weight, teacher_bias)
    return linear_divergence(
        "linear_kl_div", student, teacher, target, options, reduction, num_items, logits_budget, backend
    )


def linear_jsd(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    num_items: int | Tensor | None = None,
    logits_budget: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """`jsd`, whose `beta` this is, of two heads; everything else is as in `linear_kl_div`."""
    options = Options(jsd_at(beta), beta, temperature, ignore_index)
    student = Side(student_hidden, student_weight, student_bias)
    teacher = Side(teacher_hidden, teacher_weight, teacher_bias)
    return linear_divergence(
        "linear_jsd", student, teacher, target, options, reduction, num_items, logits_budget, backend
    )


def linear_tvd(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    temperature: float = 1.0,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    num_items: int | Tensor | None = None,
    logits_budget: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """`tvd` of two heads; everything else is as in `linear_kl_div`."""
    options = Options("tvd", 0.0, temperature, ignore_index)
    student = Side(student_hidden, student_weight, student_bias)
    teacher = Side(teacher_hidden, teacher_weight, teacher_bias)
    return linear_divergence(
        "linear_tvd", student, teacher, target, options, reduction, num_items, logits_budget, backend
    )
