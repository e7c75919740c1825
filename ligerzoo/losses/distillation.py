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
from functools import partial
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.checks import FINITE, FRACTION, NOT_NEGATIVE, POSITIVE, check, check_optional
from ligerzoo.kernels import cosine, cross_entropy, jsd, kl_div, linear_cross_entropy, tvd
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype
from ligerzoo.kernels.divergence import check_divergence, jsd_divergence
from ligerzoo.kernels.linear_divergence import Side, linear_divergence
from ligerzoo.kernels.loss.reduction import as_targets, check_target_dtype
from ligerzoo.kernels.loss.token_divergence import Divergence, DivergenceOptions
from ligerzoo.kernels.softcap import Transform, transformed
from ligerzoo.losses.checks import check_choice, check_devices, check_logits, check_unused
from ligerzoo.losses.logps import divisor
from ligerzoo.losses.objective import HeadOptions, LossOutput, check_head_options
from ligerzoo.tensor_checks import check_floats, check_num_items, check_optional_floats

DIVERGENCES: tuple[Divergence, ...] = ("forward_kl", "reverse_kl", "jsd", "tvd", "cosine")

DEFAULTS = {"beta": 0.5, "temperature": 1.0}
"""Defaults of the options that only some divergences use."""


def check_distillation_options(
    name: str, *, divergence: Divergence, beta: float, temperature: float, soft_weight: float, hard_weight: float,
    teacher_softcap: float | None, teacher_logit_scale: float, num_items: int | Tensor | None,
) -> None:  # fmt: skip
    """Raises for invalid options of `distillation_loss`. `name` is the loss that messages name."""
    check_choice(name, DIVERGENCES, divergence=divergence)
    check(name, FRACTION, beta=beta)
    check(name, POSITIVE, temperature=temperature)
    check(name, NOT_NEGATIVE, soft_weight=soft_weight, hard_weight=hard_weight)
    check_optional(name, POSITIVE, teacher_softcap=teacher_softcap)
    check(name, FINITE, teacher_logit_scale=teacher_logit_scale)
    check_num_items(name, num_items=num_items)
    choice = f"divergence={divergence!r}"
    if divergence != "jsd":
        check_unused(name, choice, DEFAULTS, beta=beta)
    if divergence == "cosine":
        check_unused(name, choice, DEFAULTS, temperature=temperature)


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
    """Computes a student's divergence from a teacher, and optionally its cross entropy with labels.

    The formulas are in the docstring of `ligerzoo.losses.distillation`. The loss is not multiplied by the square of the
    temperature. Given the student's hidden states, the logits of all tokens never exist at once.

    Args:
        hidden: (..., H) hidden states of the student, or its logits (..., V).
        weight: (V, H) weight of the student's LM head; None if `hidden` holds logits.
        target: (...) token ids, already shifted: `target[b, t]` is the token that `hidden[b, t]` predicts.
            `ignore_index` marks ignored tokens.
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
        head: options of the student's LM head, see `HeadOptions`.

    Returns:
        `LossOutput`: the loss, and as metrics its two parts before weighting, "soft_loss" and (if `hard_weight` is not
        0) "hard_loss", means over the tokens.

    Raises:
        TypeError: an option is unknown, or an argument has another type.
        ValueError: shapes or dtypes are invalid, an option is out of range or unused, or not exactly one of the
            teacher's hidden states and logits is given.
    """
    name = "distillation_loss"
    check_head_options(distillation_loss, head)
    check_distillation_options(
        name, divergence=divergence, beta=beta, temperature=temperature, soft_weight=soft_weight,
        hard_weight=hard_weight, teacher_softcap=teacher_softcap, teacher_logit_scale=teacher_logit_scale,
        num_items=num_items,
    )  # fmt: skip
    check_floats(name, hidden=hidden)
    check_optional_floats(
        name, weight=weight, bias=head.get("bias"), teacher_hidden=teacher_hidden, teacher_weight=teacher_weight,
        teacher_logits=teacher_logits, teacher_bias=teacher_bias,
    )  # fmt: skip
    check_target_dtype(name, target)
    check_devices(
        name, hidden, weight=weight, target=target, teacher_hidden=teacher_hidden, teacher_weight=teacher_weight,
        teacher_logits=teacher_logits, teacher_bias=teacher_bias,
    )  # fmt: skip
    student = Side("", hidden, weight, head.get("bias"), head.get("logit_scale", 1.0), head.get("softcap"))
    teacher = _teacher_side(
        name, teacher_hidden, teacher_weight, teacher_logits, teacher_bias, teacher_logit_scale, teacher_softcap
    )
    ignore_index = head.get("ignore_index", -100)
    options = DivergenceOptions(
        jsd_divergence(beta) if divergence == "jsd" else divergence, beta, temperature, ignore_index
    )
    soft_loss = _divergence(name, student, teacher, target, options, num_items, head)
    to_mean: float | Tensor = 1.0  # makes a loss divided by num_items a mean over the tokens of this call
    if num_items is not None:
        to_mean = num_items / (target != ignore_index).sum().clamp(min=1).to(soft_loss.dtype)
    loss, metrics = soft_weight * soft_loss, {"soft_loss": soft_loss.detach() * to_mean}
    if hard_weight:
        as_targets(name, target, hidden.shape[-1] if weight is None else weight.shape[0], ignore_index)
        if weight is None:
            hard_loss = cross_entropy(
                hidden, target, ignore_index=ignore_index, softcap=student.softcap, logit_scale=student.scale,
                num_items=num_items, backend=head.get("backend", "auto"),
            )  # fmt: skip
        else:
            hard_loss = linear_cross_entropy(hidden, weight, target, num_items=num_items, **head)
        loss, metrics["hard_loss"] = loss + hard_weight * hard_loss, hard_loss.detach() * to_mean
    return LossOutput(loss, metrics)


def _teacher_side(
    name: str, hidden: Tensor | None, weight: Tensor | None, logits: Tensor | None, bias: Tensor | None, scale: float,
    softcap: float | None,
) -> Side:  # fmt: skip
    """Returns the teacher's tensors without gradients; ValueError unless hidden states and weight, or logits, exist."""
    if (hidden is None) == (logits is None) or (hidden is None) != (weight is None):
        arguments = {"teacher_hidden": hidden, "teacher_weight": weight, "teacher_logits": logits}
        given = ", ".join(argument for argument, tensor in arguments.items() if tensor is not None) or "none of them"
        raise ValueError(f"{name}: pass teacher_hidden and teacher_weight, or teacher_logits; got {given}")
    features = logits if hidden is None else hidden
    assert features is not None
    features, weight, bias = features.detach(), *(None if t is None else t.detach() for t in (weight, bias))
    return Side("teacher_", features, weight, bias, scale, softcap)


def _divergence(
    name: str, student: Side, teacher: Side, target: Tensor, options: DivergenceOptions, num_items: int | Tensor | None,
    head: HeadOptions,
) -> Tensor:  # fmt: skip
    """Computes the divergence, averaged over the non-ignored tokens or divided by `num_items`."""
    backend = head.get("backend", "auto")
    if student.weight is not None:
        budget = head.get("logits_budget")
        return linear_divergence(name, student, teacher, target, options, "mean", num_items, budget, backend)
    check_logits(name, student.hidden, student.bias)
    check_divergence(name, options)
    if student.hidden.shape[:-1] != target.shape or teacher.hidden.shape[:-1] != target.shape:
        raise ValueError(
            f"{name}: got student logits {tuple(student.hidden.shape)}, teacher {tuple(teacher.hidden.shape)}, target "
            f"{tuple(target.shape)}; expected (..., V), (..., V) or (..., G), and (...)"
        )
    mask = target != options.ignore_index
    with torch.no_grad():
        teacher_logits = _transformed_logits(teacher, mask)
    if teacher_logits.shape != student.hidden.shape:
        raise ValueError(
            f"{name}: the student has {student.hidden.shape[-1]} classes, the teacher {teacher_logits.shape[-1]}; "
            "expected the same vocabulary"
        )
    return _divergence_of_logits(
        _transformed_logits(student, mask), teacher_logits, target, options, num_items, backend
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


def _divergence_of_logits(
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
