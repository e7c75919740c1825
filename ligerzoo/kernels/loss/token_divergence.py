"""Divergences of a student's distribution from a teacher's at each token: the formulas, and plain torch for them.

With p = softmax(teacher / T), q = softmax(student / T) over the vocabulary, and m = b p + (1 - b) q:

    kl_div             KL(p || q) = sum_v p_v log(p_v / q_v)                    (Hinton et al. 2015, section 2)
    kl_div, reversed   KL(q || p) = sum_v q_v log(q_v / p_v)                    (Gu et al. 2023, eq. 2)
    jsd                b KL(p || m) + (1 - b) KL(q || m)                        (Agarwal et al. 2023, eq. 1)
    tvd                1/2 sum_v |p_v - q_v|                                    (Wen et al. 2023, section 3)

Each is a sum D = sum_v f_v, with slopes s_v = df_v/dlog q_v:

    kl_div             f = p log(p / q) + q - p                                 s = q - p
    kl_div, reversed   f = q log(q / p) + p - q                                 s = q log(q / p)
    jsd                f = b p log(p / m) + (1 - b) q log(q / m)                s = (1 - b) q log(q / m)
    tvd                f = 1/2 |p - q|                                          s = 1/2 q sign(q - p)

    dstudent_v = (s_v - q_v S) / T,   S = sum_v s_v.

Where almost all of q is above p, or below, the two terms for tvd cancel. They are replaced by an equal difference of
which only one term is not 0, unless p = q. With u = q / 2 + s, l = q / 2 - s, and their sums U and L:

    dstudent_v = (u_v L - l_v U) / ((U + L) T).

U + L is 1. The division corrects the rounding error of the softmax's normalizer.

A scale and a softcap transform the logits of each side first, see `softcap`; dstudent is multiplied by their slope.

The terms q - p and p - q sum to 0. With them no f is negative and the rounding errors of the normalization cancel, so a
divergence of 1e-6 keeps its leading digits.

Where a probability is 0 (a logit of -inf, or underflow), its products are 0. A student equal to its teacher gives
exactly 0 and a zero gradient (in the reference, up to rounding). `divergence_kernels` has the Triton kernels.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import accumulation_dtype
from ligerzoo.kernels.softcap import Transform, transformed

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "tvd", "cosine"]
"""All but "cosine" compare distributions; "cosine" compares logits, see `ligerzoo.kernels.cosine`."""


class DivergenceOptions(NamedTuple):
    """The options of a divergence. Scales and softcaps are applied before the temperature.

    Attributes:
        divergence: which one.
        beta: b, the teacher's weight in "jsd", 0 to 1; unused by the others.
        temperature: T.
        ignore_index: the target of ignored tokens.
        student_scale: multiplies the student's logits.
        student_softcap: bounds them, or None.
        teacher_scale: multiplies the teacher's logits.
        teacher_softcap: bounds them, or None.
    """

    divergence: Divergence
    beta: float
    temperature: float
    ignore_index: int
    student_scale: float = 1.0
    student_softcap: float | None = None
    teacher_scale: float = 1.0
    teacher_softcap: float | None = None

    @property
    def student(self) -> Transform:
        return Transform(self.student_scale, self.student_softcap)

    @property
    def teacher(self) -> Transform:
        return Transform(self.teacher_scale, self.teacher_softcap)


def _log_probabilities(
    student: Tensor, teacher: Tensor, options: DivergenceOptions
) -> tuple[Tensor, Tensor, Tensor | float]:
    """Returns (log p, log q, the slope of the student's transformed logits)."""
    dtype = accumulation_dtype(torch.promote_types(student.dtype, teacher.dtype))
    (y, _), (x, slope) = (
        transformed(logits.to(dtype), transform)
        for logits, transform in ((teacher, options.teacher), (student, options.student))
    )
    return (y / options.temperature).log_softmax(-1), (x / options.temperature).log_softmax(-1), slope


def _times(probability: Tensor, x: Tensor) -> Tensor:
    """Returns probability * x, 0 where the probability is 0, even for infinite x. The same holds for its gradients."""
    return probability * x.masked_fill(probability == 0, 0.0)


def _parts(log_p: Tensor, log_q: Tensor, divergence: Divergence, beta: float) -> tuple[Tensor, Tensor]:
    """Returns (f, s) of each class."""
    p, q, ratio = log_p.exp(), log_q.exp(), log_q - log_p
    if divergence == "forward_kl":
        return _times(p, -ratio) + (q - p), q - p
    if divergence == "reverse_kl":
        slope = _times(q, ratio)
        return slope + (p - q), slope
    if divergence == "tvd":
        return 0.5 * (p - q).abs(), 0.5 * q * (q - p).sign()
    # Beyond a ratio of exp(80) the smaller probability is negligible; beyond exp(88) fp32 overflows.
    ratio = ratio.masked_fill((p == 0) & (q == 0), 0.0).clamp(-80.0, 80.0)
    slope = (beta - 1) * q * torch.log1p(beta * torch.expm1(-ratio))
    return slope - beta * p * torch.log1p((1 - beta) * torch.expm1(ratio)), slope


def reference(student: Tensor, teacher: Tensor, target: Tensor, options: DivergenceOptions) -> Tensor:
    """Returns each token's divergence in plain torch: the specification, the CPU path and the tests' oracle."""
    ignored = target == options.ignore_index
    # Masking only the losses would multiply NaN logits of an ignored token by an upstream gradient of 0.
    student, teacher = (logits.masked_fill(ignored[..., None], 0.0) for logits in (student, teacher))
    log_p, log_q, _ = _log_probabilities(student, teacher, options)
    parts, _ = _parts(log_p, log_q, options.divergence, options.beta)
    return parts.sum(-1).masked_fill(ignored, 0.0)


def reference_divergences_(
    student: Tensor, teacher: Tensor, target: Tensor, upstream: Tensor | None, options: DivergenceOptions
) -> Tensor:
    """`ligerzoo.kernels.divergence.row_divergences_` in plain torch."""
    if upstream is None:
        return reference(student, teacher, target, options)
    ignored = target == options.ignore_index
    log_p, log_q, transform_slope = _log_probabilities(student, teacher, options)
    parts, slopes = _parts(log_p, log_q, options.divergence, options.beta)
    q = log_q.exp()
    if options.divergence == "tvd":
        upper, lower = 0.5 * q + slopes, 0.5 * q - slopes
        upper_sum, lower_sum = upper.sum(-1, keepdim=True), lower.sum(-1, keepdim=True)
        change = (upper * lower_sum - lower * upper_sum) / (upper_sum + lower_sum)
    else:
        change = slopes - q * slopes.sum(-1, keepdim=True)
    gradient = change * (upstream / options.temperature)[:, None]
    student.copy_((gradient * transform_slope).masked_fill(ignored[:, None], 0.0))
    return parts.sum(-1).masked_fill(ignored, 0.0)
