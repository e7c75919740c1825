"""Distillation heads: the divergences of `divergence` between `student_hidden @ student_weight.T` and `teacher_hidden @
teacher_weight.T`, without ever holding all logits of either.

Forward:   loss = sum_t D(softmax(y_t / T), softmax(z_t / T)),   z_t = W h_t + b of the student, y_t of the teacher;
           with a scale a and a softcap c, a z_t or c tanh(a z_t / c) in place of z_t, and likewise of y_t.
Backward:  with P_t = dD/dz_t:   dhidden = P @ W,   dweight = P.T @ hidden,   dbias = sum_t P_t.

The rows are swept in chunks whose logits, the student's and the teacher's together, fit a budget: two matrix products
make them, one kernel turns the student's in place into their own gradient, two matrix products turn that into the
chunk's part of dhidden and dweight. dweight and dbias are accumulated in fp32.

The tokens of a sum or mean have one upstream gradient, so the forward sweep computes gradients, and backward multiplies
them by it, see `ahead`. The divergences of single tokens have an upstream gradient each, unknown until backward, which
then sweeps again. The teacher is a constant.

Saved: the gradients with respect to the student's hidden, weight and bias that are needed; or, for the divergences of
single tokens, all inputs.

The teacher's logits may be given in place of its hidden states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, autocast, once_differentiable, register, uses_triton
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
from ligerzoo.kernels.loss.chunked_head import DenseHead, Needs, SkippingHead, gradient_dtype, head_type, rows_per_chunk
from ligerzoo.kernels.loss.precomputed_grad import with_gradients
from ligerzoo.kernels.loss.reduction import Reduction, check_target, denominator


class Side(NamedTuple):
    """The student, or the teacher.

    Attributes:
        hidden: (..., H) hidden states; of a teacher without weight (..., V) logits.
        weight: (V, H), the head.
        bias: (V,), added to the logits.
        scale: multiplies the logits.
        softcap: then bounds them to softcap * tanh(logit / softcap).
    """

    hidden: Tensor
    weight: Tensor | None
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


_INPUTS_SCHEMA = (
    "Tensor student_hidden, Tensor student_weight, Tensor? student_bias, Tensor teacher_hidden, "
    "Tensor? teacher_weight, Tensor? teacher_bias, Tensor target, Tensor? upstream"
)


def _sweep_fake(
    student_hidden: Tensor, student_weight: Tensor, student_bias: Tensor | None, teacher_hidden: Tensor,
    teacher_weight: Tensor | None, teacher_bias: Tensor | None, target: Tensor, upstream: Tensor | None,
    divergence: Divergence, beta: float, temperature: float, ignore_index: int, student_scale: float,
    student_softcap: float | None, teacher_scale: float, teacher_softcap: float | None, budget: int | None,
    triton: bool, needs_hidden: bool, needs_weight: bool, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    either = torch.promote_types(student_hidden.dtype, teacher_hidden.dtype)
    losses = student_hidden.new_empty(target.shape, dtype=accumulation_dtype(either))
    dhidden = student_hidden.new_empty(student_hidden.shape if needs_hidden else (0,))
    classes, features = student_weight.shape
    dweight_dtype = gradient_dtype(*_weights(student_weight, teacher_weight))
    dweight = student_weight.new_empty((classes, features) if needs_weight else (0,), dtype=dweight_dtype)
    dbias = student_weight.new_empty((classes,) if needs_bias else (0,), dtype=accumulation_dtype(student_weight.dtype))
    return losses, dhidden, dweight, dbias


def _weights(*weights: Tensor | None) -> list[Tensor]:
    return [weight for weight in weights if weight is not None]


class _GivenLogits:
    """The part of a head whose logits are there already."""

    def __init__(self, logits: Tensor, order: Tensor | None) -> None:
        self.given, self.order = logits, order

    def logits(self, chunk: slice) -> Tensor:
        return self.given[chunk] if self.order is None else self.given[self.order[chunk]]


@register(
    f"linear_divergence_sweep({_INPUTS_SCHEMA}, {OPTIONS_SCHEMA}, int? budget, bool triton, bool needs_hidden, "
    "bool needs_weight, bool needs_bias) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_sweep_fake,
)
def _sweep(
    student_hidden: Tensor, student_weight: Tensor, student_bias: Tensor | None, teacher_hidden: Tensor,
    teacher_weight: Tensor | None, teacher_bias: Tensor | None, target: Tensor, upstream: Tensor | None,
    divergence: Divergence, beta: float, temperature: float, ignore_index: int, student_scale: float,
    student_softcap: float | None, teacher_scale: float, teacher_softcap: float | None, budget: int | None,
    triton: bool, needs_hidden: bool, needs_weight: bool, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The losses of all rows, and the gradients of their sum, weighted by `upstream`, (T,), with respect to the
    student's hidden, weight and bias (empty where not needed). Without gradients `upstream` is not read."""
    options = Options(
        divergence, beta, temperature, ignore_index, student_scale, student_softcap, teacher_scale, teacher_softcap
    )
    needs = Needs(needs_hidden, needs_weight, needs_bias)
    itemsize = student_hidden.element_size() + teacher_hidden.element_size()
    rows = rows_per_chunk(student_hidden, student_weight.shape[0], itemsize, budget)
    counts, weights = target != ignore_index, _weights(student_weight, teacher_weight)
    head = head_type(target.shape[0], *weights)
    student = head(student_hidden, student_weight, counts, rows, needs, student_bias)
    teacher: DenseHead | SkippingHead | _GivenLogits = _GivenLogits(teacher_hidden, student.order)
    if teacher_weight is not None:
        teacher = head(teacher_hidden, teacher_weight, counts, rows, Needs(False, False), teacher_bias)
    losses = target.new_zeros(
        target.shape, dtype=accumulation_dtype(torch.promote_types(student_hidden.dtype, teacher_hidden.dtype))
    )
    for chunk in student.chunks:
        tokens = chunk if student.order is None else student.order[chunk]
        logits, teacher_logits = student.logits(chunk), teacher.logits(chunk)
        if any(needs):
            assert upstream is not None
            losses[tokens] = loss_then_gradient_(
                logits, teacher_logits, target[tokens], upstream[tokens], options, triton
            )
            student.take_gradient(chunk, logits)
        else:
            losses[tokens] = losses_of(logits, teacher_logits, target[tokens], options, triton)
    dhidden, dweight, dbias = student.gradients()
    return losses, dhidden, dweight.to(gradient_dtype(*weights)), dbias


class _Inputs(NamedTuple):
    """The tensors of a sweep, rows of all tokens; `target` is (T,)."""

    student_hidden: Tensor
    student_weight: Tensor
    student_bias: Tensor | None
    teacher_hidden: Tensor
    teacher_weight: Tensor | None
    teacher_bias: Tensor | None
    target: Tensor


def linear_divergence(
    name: str, student: Side, teacher: Side, target: Tensor | None, options: Options, reduction: Reduction,
    num_items: int | Tensor | None, logits_budget: int | None, backend: Backend,
) -> Tensor:  # fmt: skip
    """The divergence of two heads, as `linear_kl_div` says; `name` is the function that an error is about."""
    check(name, options, teacher_hidden=teacher.hidden, teacher_weight=teacher.weight, teacher_bias=teacher.bias)
    student, teacher = _autocast(student), _autocast(teacher)
    assert student.weight is not None
    tokens, classes = student.hidden.shape[:-1], student.weight.shape[:1]
    _check_side(name, "student", student, tokens, classes)
    _check_side(name, "teacher", teacher, tokens, classes)
    if target is None:
        target, options = every_token_counts(student.hidden, options)
    check_target(name, target, tokens)
    options = options._replace(
        student_scale=student.scale, student_softcap=student.softcap,
        teacher_scale=teacher.scale, teacher_softcap=teacher.softcap,
    )  # fmt: skip
    divisor = denominator(
        name, accumulation_dtype(student.hidden.dtype), target, reduction, options.ignore_index, num_items
    )
    inputs = _Inputs(
        student.hidden.reshape(-1, student.hidden.shape[-1]), student.weight, student.bias,
        teacher.hidden.reshape(-1, teacher.hidden.shape[-1]), teacher.weight, teacher.bias, target.reshape(-1),
    )  # fmt: skip
    how = logits_budget, uses_triton(student.hidden, teacher.hidden, backend=backend)
    if divisor is None:
        losses: Tensor = _TokenDivergences.apply(*inputs, options, *how)
        return losses.view(tokens)
    return _reduced_divergence(inputs, divisor, options, *how)


def _autocast(side: Side) -> Side:
    hidden, weight, bias = autocast(side.hidden, side.weight, side.bias)
    return side._replace(hidden=hidden, weight=weight, bias=bias)


def _reduced_divergence(
    inputs: _Inputs, divisor: int | Tensor, options: Options, budget: int | None, triton: bool
) -> Tensor:
    """The sum of the tokens' divergences, divided; one sweep computes it and the gradients that are needed."""
    student, target = inputs[:3], inputs.target
    needs = [t is not None and t.requires_grad and torch.is_grad_enabled() for t in student]
    with torch.no_grad():
        share = torch.ones((), dtype=accumulation_dtype(inputs.student_hidden.dtype), device=target.device) / divisor
        # In fp16 what is multiplied by a small number too early may vanish.
        is_fp16 = inputs.student_hidden.dtype == torch.float16
        upstream, factor = (torch.ones_like(share), share) if is_fp16 else (share, None)
        losses, *gradients = _sweep(*inputs, upstream.expand(target.shape), *options, budget, triton, *needs)
        loss = losses.sum() / divisor
    return with_gradients(loss, *zip(student, gradients, strict=True), factor=factor)


class _TokenDivergences(torch.autograd.Function):
    """The divergence of each token; backward sweeps again, now with the upstream gradient of each."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *inputs, options, budget, triton = args
        ctx.save_for_backward(*inputs)
        ctx.options = *options, budget, triton
        losses: Tensor = _sweep(*inputs, None, *ctx.options, False, False, False)[0]
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        student, needs = ctx.saved_tensors[:3], ctx.needs_input_grad[:3]
        _, *gradients = _sweep(*ctx.saved_tensors, upstream, *ctx.options, *needs)
        of_student = (g.to(t.dtype) if needed else None for g, t, needed in zip(gradients, student, needs, strict=True))
        return *of_student, *(None,) * 7


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
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
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
        temperature: divides both logits, after the softcaps; see `kl_div`.
        student_bias: (V,), added to the student's logits, or None.
        teacher_bias: (V,), added to the teacher's logits, or None.
        student_logit_scale: multiplies the student's logits, before the softcap.
        teacher_logit_scale: multiplies the teacher's logits, before the softcap.
        student_softcap: c, for student logits `c tanh(logits / c)`, or None.
        teacher_softcap: c, for teacher logits `c tanh(logits / c)`, or None.
        ignore_index: the target of a token that does not count.
        reduction: "mean" over the tokens that count, "sum", or "none" for the divergence of each token, which costs a
            second sweep in backward.
        num_items: divides the sum in place of the number of tokens that count (an int or a 0-d tensor): the same number
            for all micro-batches of a step makes gradient accumulation exact.
        logits_budget: MiB of logits that exist at a time (at least one row of both); None for `set_logits_budget`'s.
            On a CPU a few copies of these in fp32 come on top.
        backend: "auto" (Triton where it can), "triton" or "torch" (the reference, in chunks too).

    Returns:
        fp32 (fp64 for fp64 input): 0-d, or of the tokens' shape for "none". Without a token that counts, "mean" is 0
        and all gradients are 0. A frozen student tensor costs neither the memory nor the time of its gradient.

    Raises:
        ValueError: the shapes or dtypes do not fit, an option is out of range, or something of the teacher requires a
            gradient.
    """
    options = Options("reverse_kl" if reverse else "forward_kl", 0.0, temperature, ignore_index)
    student = Side(student_hidden, student_weight, student_bias, student_logit_scale, student_softcap)
    teacher = Side(teacher_hidden, teacher_weight, teacher_bias, teacher_logit_scale, teacher_softcap)
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
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items: int | Tensor | None = None,
    logits_budget: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """`jsd`, whose `beta` this is, of two heads; everything else is as in `linear_kl_div`."""
    options = Options(jsd_at(beta), beta, temperature, ignore_index)
    student = Side(student_hidden, student_weight, student_bias, student_logit_scale, student_softcap)
    teacher = Side(teacher_hidden, teacher_weight, teacher_bias, teacher_logit_scale, teacher_softcap)
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
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items: int | Tensor | None = None,
    logits_budget: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """`tvd` of two heads; everything else is as in `linear_kl_div`."""
    options = Options("tvd", 0.0, temperature, ignore_index)
    student = Side(student_hidden, student_weight, student_bias, student_logit_scale, student_softcap)
    teacher = Side(teacher_hidden, teacher_weight, teacher_bias, teacher_logit_scale, teacher_softcap)
    return linear_divergence(
        "linear_tvd", student, teacher, target, options, reduction, num_items, logits_budget, backend
    )
