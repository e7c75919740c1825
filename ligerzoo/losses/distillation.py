"""Distillation: a student learns the distribution of a teacher over the vocabulary, and optionally from labels.

    loss = s D(teacher, student) + h CE(labels, student)

with s = soft_weight and h = hard_weight. D is a divergence of `ligerzoo.kernels.divergence` (forward or reverse
Kullback-Leibler, generalized Jensen-Shannon, total variation) of logits divided by the temperature, or the cosine
distance of logits, averaged over the non-ignored tokens. The cross entropy uses no temperature. (Hinton et al. 2015,
section 2, without their factor temperature^2.)

Both heads are swept together in chunks: 8MHV operations for the divergence, and 6MHV more for a cross entropy. If the
student's logits are given, all logits of the teacher are computed at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.errors import LigerzooError
from ligerzoo.kernels import cosine, cross_entropy, jsd, kl_div, linear_cross_entropy, tvd
from ligerzoo.kernels.dispatch import accumulation_dtype
from ligerzoo.kernels.divergence import jsd_divergence
from ligerzoo.kernels.linear_divergence import Side, linear_divergence
from ligerzoo.kernels.loss.reduction import as_targets
from ligerzoo.kernels.loss.token_divergence import Divergence, DivergenceOptions
from ligerzoo.kernels.softcap import Transform, transformed
from ligerzoo.losses.checks import check_inputs
from ligerzoo.losses.logps import items_or
from ligerzoo.losses.objective import LossOutput
from ligerzoo.losses.options import Finite, Fraction, HeadOptions, LossInputs, NotNegative, NumItems, Positive, takes
from ligerzoo.tensor_checks import check_num_items
from ligerzoo.token_parts import TokenParts, divided_tokens


@dataclass(frozen=True, kw_only=True)
class DistillationOptions(HeadOptions):
    """Options of `distillation_loss`; those of the head are the student's.

    Attributes:
        teacher_hidden: (..., G) hidden states of the teacher. All tensors of the teacher are constants.
        teacher_weight: (V, G) weight of the teacher's LM head.
        teacher_logits: (..., V) logits of the teacher, instead of `teacher_hidden` and `teacher_weight`.
        teacher_bias: (V,), added to the teacher's logits; unused with `teacher_logits`.
        teacher_softcap: c, for the teacher's logits `c tanh(logits / c)`.
        teacher_logit_scale: multiplies the teacher's logits, before the softcap.
        divergence: D: "forward_kl" (covers the teacher's modes), "reverse_kl" (seeks modes), "jsd", "tvd" or "cosine".
        beta: the teacher's share of the mixture in "jsd", see `ligerzoo.kernels.jsd`.
        temperature: divides the logits of student and teacher in D.
        soft_weight: s, the weight of the divergence.
        hard_weight: h, the weight of the cross entropy.
        num_items: divides the summed losses. Default: the number of non-ignored tokens. For exact gradient
            accumulation, pass the number in the step to every microbatch.
    """

    teacher_hidden: Tensor | None = field(default=None, kw_only=False)
    teacher_weight: Tensor | None = field(default=None, kw_only=False)
    teacher_logits: Tensor | None = None
    teacher_bias: Tensor | None = None
    teacher_softcap: Positive | None = None
    teacher_logit_scale: Finite = 1.0
    divergence: Divergence = "jsd"
    beta: Fraction = 0.5
    temperature: Positive = 1.0
    soft_weight: NotNegative = 1.0
    hard_weight: NotNegative = 0.0
    num_items: NumItems = None

    def check(self, name: str) -> None:
        check_num_items(name, num_items=self.num_items)
        choice = f"divergence={self.divergence!r}"
        if self.divergence != "jsd":
            self.check_unused(name, choice, "beta")
        if self.divergence == "cosine":
            self.check_unused(name, choice, "temperature")


@takes(DistillationOptions)
def distillation_loss(inputs: LossInputs, options: DistillationOptions) -> LossOutput:
    """Computes a student's divergence from a teacher, and optionally its cross entropy with labels.

    The formulas are in the docstring of `ligerzoo.losses.distillation`. The loss is not multiplied by the square of the
    temperature. Given the student's hidden states, the logits of all tokens never exist at once.

    Args:
        hidden: (..., H) hidden states of the student, or its logits (..., V).
        weight: (V, H) weight of the student's LM head; None if `hidden` holds logits.
        target: (...) token ids, already shifted: `target[b, t]` is the token that `hidden[b, t]` predicts.
            `ignore_index` marks ignored tokens.

    Returns:
        `LossOutput`: the loss, and as metrics its two parts before weighting, "soft_loss" and (if `hard_weight` is not
        0) "hard_loss", means over the tokens.
    """
    (name, _, weight, target), o = inputs, options
    names = ("teacher_hidden", "teacher_weight", "teacher_logits")
    tensors = {argument: getattr(o, argument) for argument in names}
    check_inputs(inputs, bias=o.bias, teacher_bias=o.teacher_bias, **tensors)
    given = [argument for argument, tensor in tensors.items() if tensor is not None]
    if given not in (["teacher_hidden", "teacher_weight"], ["teacher_logits"]):
        what = f"pass teacher_hidden and teacher_weight, or teacher_logits; got {', '.join(given) or 'none of them'}"
        raise LigerzooError(what, where=name)
    parts = divided_tokens(target.numel())
    if parts is not None and weight is not None and o.teacher_hidden is not None:
        return _by_parts(inputs, options, o.teacher_hidden, parts)
    return _whole_loss(inputs, options)


def _by_parts(
    inputs: LossInputs, options: DistillationOptions, teacher_hidden: Tensor, parts: TokenParts
) -> LossOutput:
    """Computes the loss of the tokens of this process, and adds up those of all; see `token_parts`."""
    name, hidden, weight, target = inputs
    count = options.target_mask(target).sum().clamp(min=1)
    items = count if options.num_items is None else options.num_items
    hidden, teacher_hidden = (parts.own(x.reshape(1, -1, x.shape[-1])) for x in (hidden, teacher_hidden))
    target = parts.own(target.reshape(1, -1), fill=options.ignore_index)
    own = replace(options, num_items=items, teacher_hidden=teacher_hidden)
    loss, metrics = _whole_loss(LossInputs(name, hidden, weight, target), own)
    weight_here = options.target_mask(target).sum() / count

    def total(x: Tensor) -> Tensor:
        return parts.of(parts.count).gather(x.view(1, 1)).sum()

    return LossOutput(total(loss), {metric: total(value * weight_here) for metric, value in metrics.items()})


def _whole_loss(inputs: LossInputs, options: DistillationOptions) -> LossOutput:
    """Computes `distillation_loss` of inputs that it has checked."""
    (name, hidden, weight, target), o = inputs, options
    features: Any = o.teacher_logits if o.teacher_hidden is None else o.teacher_hidden
    student = Side("", hidden, weight, o.bias, o.logit_scale, o.softcap)
    teacher = Side("teacher_", features, o.teacher_weight, o.teacher_bias, o.teacher_logit_scale, o.teacher_softcap)
    teacher = teacher.detached()
    soft_loss = _divergence(name, student, teacher, target, options)
    to_mean: float | Tensor = 1.0  # makes a loss divided by num_items a mean over the tokens of this call
    if o.num_items is not None:
        to_mean = o.num_items / o.target_mask(target).sum().clamp(min=1).to(soft_loss.dtype)
    loss, metrics = o.soft_weight * soft_loss, {"soft_loss": soft_loss.detach() * to_mean}
    if o.hard_weight:
        as_targets(name, target, inputs.n_classes, o.ignore_index)
        if weight is None:
            hard_loss = cross_entropy(hidden, target, num_items=o.num_items, **o.of_logits)
        else:
            hard_loss = linear_cross_entropy(
                hidden, weight, target, o.bias, num_items=o.num_items, logits_budget=o.logits_budget, **o.of_logits
            )
        loss, metrics["hard_loss"] = loss + o.hard_weight * hard_loss, hard_loss.detach() * to_mean
    return LossOutput(loss, metrics)


def _divergence(name: str, student: Side, teacher: Side, target: Tensor, options: DistillationOptions) -> Tensor:
    """Computes the divergence, averaged over the non-ignored tokens or divided by `num_items`."""
    kind, beta = options.divergence, options.beta
    divergence = DivergenceOptions(
        jsd_divergence(beta) if kind == "jsd" else kind, beta, options.temperature, options.ignore_index
    )
    if student.weight is not None:
        return linear_divergence(
            name,
            student,
            teacher,
            target,
            divergence,
            num_items=options.num_items,
            logits_budget=options.logits_budget,
            backend=options.backend,
        )
    if student.hidden.shape[:-1] != target.shape or teacher.hidden.shape[:-1] != target.shape:
        shapes = (tuple(t.shape) for t in (student.hidden, teacher.hidden, target))
        what = "got student logits {}, teacher {}, target {}".format(*shapes)
        raise LigerzooError(what, where=name, expected="(..., V), (..., V) or (..., G), and (...)")
    mask = options.target_mask(target)
    with torch.no_grad():
        teacher_logits = _transformed_logits(teacher, mask)
    if teacher_logits.shape != student.hidden.shape:
        what = f"the student has {student.hidden.shape[-1]} classes, the teacher {teacher_logits.shape[-1]}"
        raise LigerzooError(what, where=name, expected="the same vocabulary")
    logits = _transformed_logits(student, mask)
    if kind == "cosine":
        distances = cosine.reference(logits, teacher_logits, target, divergence)
        return distances.sum() / items_or(options.num_items, mask.sum(), logits)
    functions: dict[Divergence, Callable[..., Tensor]] = {
        "forward_kl": kl_div,
        "reverse_kl": partial(kl_div, reverse=True),
        "jsd": partial(jsd, beta=beta),
        "tvd": tvd,
    }
    return functions[kind](
        logits,
        teacher_logits,
        target,
        temperature=options.temperature,
        ignore_index=options.ignore_index,
        num_items=options.num_items,
        backend=options.backend,
    )


def _transformed_logits(side: Side, mask: Tensor) -> Tensor:
    """Computes all logits of student or teacher, scaled and capped; hidden states of ignored tokens may be NaN."""
    logits = torch.where(mask[..., None], side.hidden, 0.0)
    if side.weight is not None:
        logits = F.linear(logits, side.weight, side.bias)
    transform = Transform(side.scale, side.softcap)
    if transform == Transform():
        return logits
    return transformed(logits.to(accumulation_dtype(logits.dtype)), transform)[0]
