"""Distillation: a student learns from a teacher's distribution over the vocabulary, and from labels too.

    loss = s D(teacher, student) + h CE(labels, student)

with D one of `ligerzoo.kernels.divergence`'s (forward and reverse Kullback-Leibler, generalized Jensen-Shannon, total
variation) of logits divided by the temperature, or the cosine distance of logits; averaged over the tokens that count.
The cross entropy knows no temperature. (Hinton et al. 2015, section 2, without their factor temperature^2.)

The divergence is swept over both heads at once, 8MHV operations; the labels' share, if there is one, costs 6MHV more.
If the student's logits are given, in place of its hidden states, all of the teacher's are made too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.kernels import cosine, cross_entropy, jsd, kl_div, linear_cross_entropy, tvd
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype
from ligerzoo.kernels.divergence import check_divergence, jsd_divergence
from ligerzoo.kernels.linear_divergence import Side, linear_divergence
from ligerzoo.kernels.loss.token_divergence import Divergence, DivergenceOptions
from ligerzoo.kernels.softcap import Transform, transformed
from ligerzoo.losses.logps import check_choice, check_number, divisor
from ligerzoo.losses.objective import HeadOptions, LossOutput, check_head, check_logits

DIVERGENCES: tuple[Divergence, ...] = ("forward_kl", "reverse_kl", "jsd", "tvd", "cosine")


def distillation_loss(
    hidden: Tensor,
    weight: Tensor | None,
    target: Tensor,
    teacher_hidden: Tensor | None = None,
    teacher_weight: Tensor | None = None,
    *,
    teacher_logits: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    divergence: Divergence = "jsd",
    beta: float = 0.5,
    temperature: float = 1.0,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    num_items: int | Tensor | None = None,
    **head: Unpack[HeadOptions],
) -> LossOutput:
    """A student's distance from a teacher, over the formulas in `distillation.py`; not multiplied by the temperature's
    square, as some have it.

    Args:
        hidden: (..., H), the student's hidden states, or (..., V), its logits.
        weight: (V, H), its head; None if `hidden` are logits.
        target: (...) token ids, or `ignore_index` for a token that does not count.
        teacher_hidden: (..., G), the teacher's hidden states; a constant, as is all of the teacher.
        teacher_weight: (V, G), its head.
        teacher_logits: (..., V), in place of the two.
        teacher_bias: (V,), added to the teacher's logits; not to those given.
        teacher_softcap: c, for the teacher's logits `c tanh(logits / c)`.
        teacher_logit_scale: multiplies the teacher's logits, before the softcap.
        divergence: D: "forward_kl" (covers the teacher's modes), "reverse_kl" (seeks them), "jsd", "tvd" or "cosine".
        beta: of "jsd", the teacher's share of the mixture; see `ligerzoo.kernels.jsd`.
        temperature: divides both logits in D.
        soft_weight: s.
        hard_weight: h.
        num_items: divides the sums in place of the number of tokens that count: the same number for all micro-batches
            of a step makes gradient accumulation exact.
        head: of the student, see `HeadOptions`.

    Returns:
        The loss, and "soft_loss" and "hard_loss", the means over the tokens of its two parts before they are weighted.

    Raises:
        ValueError: shapes or dtypes do not fit, an option is out of range, or neither or both of the teacher's hidden
            states and logits are given.
    """
    name = "distillation_loss"
    check_head(name, head)
    check_choice(name, DIVERGENCES, divergence=divergence)
    check_number(name, num_items=num_items)
    if (teacher_hidden is None) == (teacher_logits is None) or (teacher_hidden is None) != (teacher_weight is None):
        raise ValueError(f"{name}: give teacher_hidden and teacher_weight, or teacher_logits")
    given = teacher_logits if teacher_hidden is None else teacher_hidden
    known, teacher_weight, teacher_bias = (
        None if t is None else t.detach() for t in (given, teacher_weight, teacher_bias)
    )
    assert known is not None
    teacher = Side(known, teacher_weight, teacher_bias, teacher_logit_scale, teacher_softcap)
    student = Side(hidden, weight, head.get("bias"), head.get("logit_scale", 1.0), head.get("softcap"))
    ignore_index = head.get("ignore_index", -100)
    options = DivergenceOptions(
        jsd_divergence(beta) if divergence == "jsd" else divergence, beta, temperature, ignore_index
    )
    soft_loss = _divergence(name, student, teacher, target, options, num_items, head)
    share: float | Tensor = 1.0  # of the tokens that the loss is divided by, those that are here
    if num_items is not None:
        share = num_items / (target != ignore_index).sum().clamp(min=1).to(soft_loss.dtype)
    loss, metrics = soft_weight * soft_loss, {"soft_loss": soft_loss.detach() * share}
    if hard_weight:
        if weight is None:
            hard_loss = cross_entropy(
                hidden, target, ignore_index=ignore_index, softcap=student.softcap, logit_scale=student.scale,
                num_items=num_items, backend=head.get("backend", "auto"),
            )  # fmt: skip
        else:
            hard_loss = linear_cross_entropy(hidden, weight, target, num_items=num_items, **head)
        loss, metrics["hard_loss"] = loss + hard_weight * hard_loss, hard_loss.detach() * share
    return LossOutput(loss, metrics)


def _divergence(
    name: str, student: Side, teacher: Side, target: Tensor, options: DivergenceOptions, num_items: int | Tensor | None,
    head: HeadOptions,
) -> Tensor:  # fmt: skip
    """The mean divergence of the tokens that count."""
    backend = head.get("backend", "auto")
    if student.weight is not None:
        budget = head.get("logits_budget")
        return linear_divergence(name, student, teacher, target, options, "mean", num_items, budget, backend)
    check_logits(name, student.hidden, head)
    check_divergence(name, options)
    if student.hidden.shape[:-1] != target.shape or teacher.hidden.shape[:-1] != target.shape:
        raise ValueError(
            f"{name}: student's logits {tuple(student.hidden.shape)}, teacher's {tuple(teacher.hidden.shape)}, target "
            f"{tuple(target.shape)}; expected (..., V), (..., V) or (..., G), and (...)"
        )
    counts = target != options.ignore_index
    with torch.no_grad():
        teacher_logits = _bounded(teacher, counts)
    if teacher_logits.shape != student.hidden.shape:
        raise ValueError(
            f"{name}: {student.hidden.shape[-1]} classes of the student, {teacher_logits.shape[-1]} of the teacher; "
            "expected as many"
        )
    return _of_logits(_bounded(student, counts), teacher_logits, target, options, num_items, backend)


def _bounded(side: Side, counts: Tensor) -> Tensor:
    """All logits of one side, scaled and bounded; 0 for tokens that do not count, whatever was given for them."""
    logits = torch.where(counts[..., None], side.hidden, 0.0)
    if side.weight is not None:
        logits = F.linear(logits, side.weight, side.bias)
    transform = Transform(side.scale, side.softcap)
    if transform == Transform():
        return logits
    return transformed(logits.to(accumulation_dtype(logits.dtype)), transform)[0]


def _of_logits(
    student: Tensor, teacher: Tensor, target: Tensor, options: DivergenceOptions, num_items: int | Tensor | None,
    backend: Backend,
) -> Tensor:  # fmt: skip
    if options.divergence == "cosine":
        ignored = target == options.ignore_index
        distances = cosine.reference(student, teacher, ignored, options.student, options.teacher)
        return distances.sum() / divisor(num_items, (~ignored).sum(), student)
    functions: dict[Divergence, Callable[..., Tensor]] = {
        "forward_kl": kl_div, "reverse_kl": partial(kl_div, reverse=True), "jsd": partial(jsd, beta=options.beta),
        "tvd": tvd,
    }  # fmt: skip
    return functions[options.divergence](
        student, teacher, target, temperature=options.temperature, ignore_index=options.ignore_index,
        num_items=num_items, backend=backend,
    )  # fmt: skip
