"""Distillation: a student learns from a teacher's distribution over the vocabulary, and from labels too.

    loss = s D(teacher, student) + h CE(labels, student)

with D one of `ligerzoo.kernels.divergence`'s (forward and reverse Kullback-Leibler, generalized Jensen-Shannon, total
variation) of logits divided by the temperature, or the cosine distance of logits; averaged over the tokens that count.
The cross entropy knows no temperature. (Hinton et al. 2015, section 2, without their factor temperature^2.)

The divergence is swept over both heads at once, 8MHV operations; the labels' share, if there is one, costs 6MHV more.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from ligerzoo.kernels import linear_cross_entropy
from ligerzoo.kernels.divergence import Divergence, Options, jsd_at
from ligerzoo.kernels.linear_divergence import Side, linear_divergence
from ligerzoo.losses.logps import check_choice, check_number
from ligerzoo.losses.objective import HeadOptions, LossOutput, check_head

DIVERGENCES: tuple[Divergence, ...] = ("forward_kl", "reverse_kl", "jsd", "tvd", "cosine")


def distillation_loss(
    hidden: Tensor,
    weight: Tensor,
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
        hidden: (..., H), the student's hidden states.
        weight: (V, H), its head.
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
        The loss, and "soft_loss" and "hard_loss", its two parts before they are weighted.

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
    options = Options(jsd_at(beta) if divergence == "jsd" else divergence, beta, temperature, ignore_index)
    soft_loss = linear_divergence(
        name, student, teacher, target, options, "mean", num_items, head.get("logits_budget"),
        head.get("backend", "auto"),
    )  # fmt: skip
    loss, metrics = soft_weight * soft_loss, {"soft_loss": soft_loss.detach()}
    if hard_weight:
        hard_loss = linear_cross_entropy(hidden, weight, target, num_items=num_items, **head)
        loss, metrics["hard_loss"] = loss + hard_weight * hard_loss, hard_loss.detach()
    return LossOutput(loss, metrics)
