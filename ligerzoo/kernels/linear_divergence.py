"""Distillation heads: the divergences of `divergence` between `student_hidden @ student_weight.T` and `teacher_hidden @
teacher_weight.T`, without materializing all logits of either.

Forward:   loss = sum_t D(softmax(y_t / T), softmax(z_t / T)),   z_t = W h_t + b of the student, y_t of the teacher;
           with a scale a and a softcap c, a z_t or c tanh(a z_t / c) replaces z_t, and likewise y_t.
Backward:  with P_t = dD/dz_t:   dhidden = P @ W,   dweight = P.T @ hidden,   dbias = sum_t P_t.

A sweep processes the rows in chunks. The logits of both heads for a chunk fit a budget together. Two matrix products
compute them. One kernel overwrites the student's logits with their gradient. Two matrix products compute the chunk's
part of dhidden and dweight from it. dweight and dbias are accumulated in fp32.

A sum or mean over tokens has one upstream gradient. The forward sweep computes gradients up to that factor, and
backward multiplies them by it, see `loss.precomputed_grad`. Divergences per token have one upstream gradient each,
known only in backward, which sweeps again. The teacher gets no gradient.

Saved: the needed gradients of the student's hidden, weight and bias; or, for divergences per token, all inputs.

The teacher may be given as logits instead of hidden states.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypedDict, Unpack, get_type_hints

import torch
from torch import Tensor

from ligerzoo.checks import FINITE, POSITIVE_OR_NONE, check
from ligerzoo.errors import LigerzooError
from ligerzoo.kernels.autograd import FusedContext, FusedFunction, once_differentiable, under_transform
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, autocast, uses_triton
from ligerzoo.kernels.divergence import check_divergence, jsd_divergence, row_divergences_, target_without_ignored
from ligerzoo.kernels.loss.chunked_head import (
    HeadInputs,
    Needs,
    check_budget,
    gradient_dtype,
    gradients_of,
    head_flops,
    head_type,
    rows_per_chunk,
)
from ligerzoo.kernels.loss.precomputed_grad import attach_gradients
from ligerzoo.kernels.loss.reduction import Reduction, check_target, denominator, reduce_losses
from ligerzoo.kernels.loss.token_divergence import Divergence, DivergenceOptions
from ligerzoo.kernels.registration import register
from ligerzoo.tensor_checks import check_floats, unknown_options

P = ParamSpec("P")


class Side(NamedTuple):
    """One side of a distillation: the student or the teacher.

    Attributes:
        prefix: how its arguments begin, for messages: "student_hidden" or "hidden".
        hidden: (..., H) hidden states; (..., V) logits if `weight` is None.
        weight: (V, H), the head; None only for the teacher.
        bias: (V,), added to the logits.
        scale: multiplies the logits.
        softcap: c, for logits `c tanh(logits / c)`, after the scale.
    """

    prefix: str
    hidden: Tensor
    weight: Tensor | None
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def detached(self) -> Side:
        """Returns the same side with tensors outside autograd."""
        weight, bias = (None if t is None else t.detach() for t in (self.weight, self.bias))
        return self._replace(hidden=self.hidden.detach(), weight=weight, bias=bias)


class TeacherInputs(NamedTuple):
    """The teacher's (T, G) hidden states, (V, G) weight and (V,) bias or None; or its (T, V) logits and two Nones."""

    hidden: Tensor
    weight: Tensor | None
    bias: Tensor | None


class _SweepResults(NamedTuple):
    """(T,) losses, and the student's `HeadGradients` for the losses' upstream gradients."""

    losses: Tensor
    dhidden: Tensor
    dweight: Tensor
    dbias: Tensor


class _SweepOptions(NamedTuple):
    """MiB of logits that exist at a time (None for the default), and whether Triton computes the rows."""

    budget: int | None
    triton: bool


def _loss_dtype(student: HeadInputs, teacher: TeacherInputs) -> torch.dtype:
    return accumulation_dtype(torch.promote_types(student.hidden.dtype, teacher.hidden.dtype))


def _weights(student: HeadInputs, teacher: TeacherInputs) -> list[Tensor]:
    return [student.weight] if teacher.weight is None else [student.weight, teacher.weight]


def _sweep_fake(student: HeadInputs, teacher: TeacherInputs, target: Tensor, needs: Needs) -> _SweepResults:
    hidden, weight, _ = student
    return _SweepResults(
        hidden.new_empty(target.shape, dtype=_loss_dtype(student, teacher)),
        hidden.new_empty(hidden.shape if needs.hidden else (0,)),
        weight.new_empty(weight.shape if needs.weight else (0,), dtype=gradient_dtype(*_weights(student, teacher))),
        weight.new_empty(weight.shape[:1] if needs.bias else (0,), dtype=accumulation_dtype(weight.dtype)),
    )


def _flops(student: HeadInputs, teacher: TeacherInputs, needs: Needs) -> int:
    flops = head_flops(student.hidden, student.weight, needs)
    return flops if teacher.weight is None else flops + head_flops(teacher.hidden, teacher.weight, Needs(False, False))


@register("linear_divergence_sweep", fake=_sweep_fake, flops=_flops)
def _sweep(
    student: HeadInputs,
    teacher: TeacherInputs,
    target: Tensor,
    upstream: Tensor | None,
    divergence: DivergenceOptions,
    options: _SweepOptions,
    needs: Needs,
) -> _SweepResults:
    """Computes the losses and the needed gradients. `upstream`, (T,), is None if no gradient is needed."""
    itemsize = student.hidden.element_size() + teacher.hidden.element_size()
    rows = rows_per_chunk(student.hidden, student.weight.shape[0], itemsize, options.budget)
    valid, weights = target != divergence.ignore_index, _weights(student, teacher)
    head = head_type(target.shape[0], *weights)
    student_head, teacher_head = head(student, valid, rows, needs), None
    if teacher.weight is not None:
        inputs = HeadInputs(teacher.hidden, teacher.weight, teacher.bias)
        teacher_head = head(inputs, valid, rows, Needs(False, False))
    losses = target.new_zeros(target.shape, dtype=_loss_dtype(student, teacher))
    for chunk in student_head.chunks:
        tokens = student_head.tokens(chunk)
        logits = student_head.logits(chunk)
        teacher_logits = teacher.hidden[tokens] if teacher_head is None else teacher_head.logits(chunk)
        gradient = upstream[tokens] if upstream is not None and any(needs) else None
        losses[tokens] = row_divergences_(logits, teacher_logits, target[tokens], gradient, divergence, options.triton)
        if gradient is not None:
            student_head.accumulate_gradient(chunk, logits)
    dhidden, dweight, dbias = student_head.gradients()
    return _SweepResults(losses, dhidden, dweight.to(gradient_dtype(*weights)), dbias)


def linear_divergence(
    name: str,
    student: Side,
    teacher: Side,
    target: Tensor | None,
    divergence: DivergenceOptions,
    *,
    reduction: Reduction = "mean",
    num_items: int | Tensor | None = None,
    logits_budget: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Returns the divergence of two heads, see `linear_kl_div`. `name` is the public function, for error messages."""
    student_tensors, teacher_tensors = _named_tensors(student), _named_tensors(teacher)
    check_floats(name, **{f"{student.prefix}weight": student.weight} | student_tensors | teacher_tensors)
    check_divergence(name, divergence, **teacher_tensors)
    check_budget(name, logits_budget)
    student, teacher = _autocast(student), _autocast(teacher)
    assert student.weight is not None
    tokens, classes = student.hidden.shape[:-1], student.weight.shape[:1]
    _check_side(name, student, tokens, classes)
    _check_side(name, teacher, tokens, classes)
    if target is None:
        target, divergence = target_without_ignored(student.hidden, divergence)
    check_target(name, target, tokens)
    divergence = divergence._replace(
        student_scale=student.scale,
        student_softcap=student.softcap,
        teacher_scale=teacher.scale,
        teacher_softcap=teacher.softcap,
    )
    dtype = accumulation_dtype(student.hidden.dtype)
    divisor = denominator(name, dtype, target, reduction, divergence.ignore_index, num_items)
    options = _SweepOptions(logits_budget, uses_triton(student.hidden, teacher.hidden, backend=backend))
    head = HeadInputs(student.hidden.reshape(-1, student.hidden.shape[-1]), student.weight, student.bias)
    teacher_head = TeacherInputs(teacher.hidden.reshape(-1, teacher.hidden.shape[-1]), teacher.weight, teacher.bias)
    targets = target.reshape(-1)
    if divisor is None or under_transform():
        losses: Tensor = _TokenDivergences.apply(*head, *teacher_head, targets, divergence, options)
        return reduce_losses(losses.view(tokens), divisor)
    return _reduced_divergence(head, teacher_head, targets, divisor, divergence, options)


def _autocast(side: Side) -> Side:
    hidden, weight, bias = autocast(side.hidden, side.weight, side.bias)
    return side._replace(hidden=hidden, weight=weight, bias=bias)


def _reduced_divergence(
    student: HeadInputs,
    teacher: TeacherInputs,
    target: Tensor,
    divisor: int | Tensor,
    divergence: DivergenceOptions,
    options: _SweepOptions,
) -> Tensor:
    """Returns the sum of the tokens' divergences, divided by `divisor`. One sweep computes it and its gradients."""
    needs = Needs(*(t is not None and t.requires_grad and torch.is_grad_enabled() for t in student))
    with torch.no_grad():
        share = torch.ones((), dtype=accumulation_dtype(student.hidden.dtype), device=target.device) / divisor
        # In fp16 gradients multiplied by a small share may underflow, so backward multiplies by it.
        is_fp16 = student.hidden.dtype == torch.float16
        upstream, factor = (torch.ones_like(share), share) if is_fp16 else (share, None)
        losses, *gradients = _sweep(student, teacher, target, upstream.expand(target.shape), divergence, options, needs)
        loss = losses.sum() / divisor
    return attach_gradients(loss, *zip(student, gradients, strict=True), factor=factor)


class _TokenDivergences(FusedFunction):
    """The divergence of each token. Backward sweeps again, with the tokens' upstream gradients."""

    @staticmethod
    def forward(ctx: FusedContext, *args: Any) -> Tensor:
        *inputs, divergence, options = args
        ctx.save_for_backward(*inputs)
        ctx.divergence, ctx.options = divergence, options
        heads = HeadInputs(*inputs[:3]), TeacherInputs(*inputs[3:6])
        return _sweep(*heads, inputs[6], None, divergence, options, Needs(False, False)).losses

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, upstream: Tensor) -> tuple[Tensor | None, ...]:
        inputs, needs = ctx.saved_tensors, Needs(*ctx.needs_input_grad[:3])
        heads = HeadInputs(*inputs[:3]), TeacherInputs(*inputs[3:6])
        _, *gradients = _sweep(*heads, inputs[6], upstream, ctx.divergence, ctx.options, needs)
        return *gradients_of(inputs[:3], gradients, needs), *(None,) * 6


def _named_tensors(side: Side) -> dict[str, Tensor]:
    """Returns the given tensors by the names of their arguments."""
    tensors = {"logits" if side.weight is None else "hidden": side.hidden, "weight": side.weight, "bias": side.bias}
    return {f"{side.prefix}{argument}": tensor for argument, tensor in tensors.items() if tensor is not None}


def _check_side(name: str, side: Side, tokens: torch.Size, classes: torch.Size) -> None:
    prefix, hidden, weight, bias, scale, softcap = side
    check(name, POSITIVE_OR_NONE, **{f"{prefix}softcap": softcap})
    check(name, FINITE, **{f"{prefix}logit_scale": scale})
    if weight is None:
        if hidden.shape != (*tokens, *classes) or bias is not None:
            with_bias = "" if bias is None else f" and {prefix}bias is given"
            what = f"{prefix}logits has shape {tuple(hidden.shape)}{with_bias}"
            raise LigerzooError(what, where=name, expected=f"{(*tokens, *classes)}, without a bias")
        return
    fits = (
        hidden.shape == (*tokens, *weight.shape[1:])
        and weight.dim() == 2
        and weight.shape[:1] == classes
        and hidden.dtype == weight.dtype
        and (bias is None or (bias.shape == classes and bias.dtype == weight.dtype))
    )
    if not fits:
        given = [
            f"{argument} {tuple(tensor.shape)} {tensor.dtype}" for argument, tensor in _named_tensors(side).items()
        ]
        expected = f"{(*tokens, 'H')}, {(*classes, 'H')} and {tuple(classes)} or None, of one dtype"
        raise LigerzooError(", ".join(given), where=name, expected=expected)


class LinearDivergenceOptions(TypedDict, total=False):
    """Options of `linear_kl_div`, which documents them, `linear_jsd` and `linear_tvd`."""

    temperature: float
    student_bias: Tensor | None
    teacher_bias: Tensor | None
    student_logit_scale: float
    teacher_logit_scale: float
    student_softcap: float | None
    teacher_softcap: float | None
    ignore_index: int
    reduction: Reduction
    num_items: int | Tensor | None
    logits_budget: int | None
    backend: Backend


_DEFAULTS: LinearDivergenceOptions = {
    "temperature": 1.0,
    "student_bias": None,
    "teacher_bias": None,
    "student_logit_scale": 1.0,
    "teacher_logit_scale": 1.0,
    "student_softcap": None,
    "teacher_softcap": None,
    "ignore_index": -100,
    "reduction": "mean",
    "num_items": None,
    "logits_budget": None,
    "backend": "auto",
}


def _shows_options(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Lists the options and their defaults in the signature of a function, as `help` shows it."""
    signature, types = inspect.signature(function), get_type_hints(LinearDivergenceOptions)
    *own, _ = signature.parameters.values()
    options = (
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[name])
        for name, default in _DEFAULTS.items()
    )
    vars(function)["__signature__"] = signature.replace(parameters=[*own, *options])
    return function


def _divergence_of_heads(
    name: str,
    divergence: Divergence,
    beta: float,
    hidden: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor],
    target: Tensor | None,
    given: LinearDivergenceOptions,
) -> Tensor:
    if error := unknown_options(name, given, _DEFAULTS):
        raise error
    o: LinearDivergenceOptions = {**_DEFAULTS, **given}
    student = Side("student_", hidden[0], weights[0], o["student_bias"], o["student_logit_scale"], o["student_softcap"])
    teacher = Side("teacher_", hidden[1], weights[1], o["teacher_bias"], o["teacher_logit_scale"], o["teacher_softcap"])
    return linear_divergence(
        name,
        student,
        teacher,
        target,
        DivergenceOptions(divergence, beta, o["temperature"], o["ignore_index"]),
        reduction=o["reduction"],
        num_items=o["num_items"],
        logits_budget=o["logits_budget"],
        backend=o["backend"],
    )


@_shows_options
def linear_kl_div(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    reverse: bool = False,
    **options: Unpack[LinearDivergenceOptions],
) -> Tensor:
    """`kl_div` of `student_hidden @ student_weight.T` and `teacher_hidden @ teacher_weight.T`, without materializing
    all logits of either.

    Args:
        student_hidden: (..., H) hidden states.
        student_weight: (V, H), the head, in the dtype of `student_hidden`.
        teacher_hidden: (..., G) hidden states; their size and dtype may differ from the student's.
        teacher_weight: (V, G), in the dtype of `teacher_hidden`.
        target: (...) integers, or None if all tokens are valid. Only compared with `ignore_index`.
        reverse: KL(student || teacher) instead of KL(teacher || student).
        temperature: divides both logits, after the softcaps; see `kl_div`.
        student_bias: (V,), added to the student's logits, or None.
        teacher_bias: (V,), added to the teacher's logits, or None.
        student_logit_scale: multiplies the student's logits, before the softcap.
        teacher_logit_scale: multiplies the teacher's logits, before the softcap.
        student_softcap: c, for student logits `c tanh(logits / c)`, or None.
        teacher_softcap: c, for teacher logits `c tanh(logits / c)`, or None.
        ignore_index: the target of ignored tokens.
        reduction: "mean" over the valid tokens, "sum", or "none" for one divergence per token, which costs a second
            sweep in backward.
        num_items: with "mean", divides the sum instead of the number of valid tokens (an int or a 0-d tensor). Pass the
            same number for all microbatches of a step to make gradient accumulation exact.
        logits_budget: MiB of logits of both that exist at a time (at least one row); None for the default, see
            `set_logits_budget`. On a CPU, a few fp32 copies of a chunk's logits exist too.
        backend: "auto" (Triton on a GPU), "triton" or "torch" (the reference, in chunks too).

    Returns:
        The loss in fp32 (fp64 for fp64 input): 0-d, or of the tokens' shape for "none". "mean" and all gradients are 0
        without a valid token. A student tensor that requires no gradient costs neither the memory nor the time of its
        gradient.

    Raises:
        ValueError: a shape, a dtype or an option is invalid, or a tensor of the teacher requires a gradient.
    """
    hidden, weights = (student_hidden, teacher_hidden), (student_weight, teacher_weight)
    divergence: Divergence = "reverse_kl" if reverse else "forward_kl"
    return _divergence_of_heads("linear_kl_div", divergence, 0.0, hidden, weights, target, options)


@_shows_options
def linear_jsd(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    beta: float = 0.5,
    **options: Unpack[LinearDivergenceOptions],
) -> Tensor:
    """`jsd` of two heads, with its `beta`. The other arguments, the result and errors are those of `linear_kl_div`."""
    hidden, weights = (student_hidden, teacher_hidden), (student_weight, teacher_weight)
    return _divergence_of_heads("linear_jsd", jsd_divergence(beta), beta, hidden, weights, target, options)


@_shows_options
def linear_tvd(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    **options: Unpack[LinearDivergenceOptions],
) -> Tensor:
    """`tvd` of two heads. The arguments, the result and the errors are those of `linear_kl_div`."""
    hidden, weights = (student_hidden, teacher_hidden), (student_weight, teacher_weight)
    return _divergence_of_heads("linear_tvd", "tvd", 0.0, hidden, weights, target, options)
