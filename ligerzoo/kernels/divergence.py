"""How far a student's distribution is from a teacher's, token by token, both given as logits: the losses of
distillation.

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

The linear divergences scale and bound the logits of each side first, see `softcap`, and multiply dstudent by its slope.

The differences of p and q add up to 0, but with them no f is negative, and what rounding does to the normalization
cancels: a divergence of 1e-6 keeps its leading digits.

Where a probability is 0 (a logit of -inf, or underflow) so are the products it is a factor of. A student equal to its
teacher gives exactly 0, and a gradient of exactly 0 (the reference, of what rounding leaves).

Saved: both logits (the caller's own tensors, never written to), and five fp32 numbers a row: the two maxima, the logs
of the two sums of exponentials, and S. Recomputed in backward: p and q.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels import cosine
from ligerzoo.kernels.dispatch import (
    Backend,
    accumulation_dtype,
    as_rows,
    next_power_of_2,
    once_differentiable,
    uses_triton,
)
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.loss.reduction import Reduction, check_target, denominator, reduce_losses
from ligerzoo.kernels.math import exp, fast_log, softcapped
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.softcap import Transform, transformed
from ligerzoo.kernels.softmax import max_and_sum_exp

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "tvd", "cosine"]
"""The last, of `cosine`, is one of logits."""


class DivergenceOptions(NamedTuple):
    """What is computed; only "jsd" uses `beta`. The scales and softcaps are applied before the temperature."""

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

    def numbers(self) -> tuple[float | None, ...]:
        """What the kernels take: `ignore_index`, 1 / `temperature`, `beta` and both sides' scale and softcap."""
        student, teacher = self.student.arguments(), self.teacher.arguments()
        return self.ignore_index, 1 / self.temperature, self.beta, *student, *teacher


def _log_probabilities(
    student: Tensor, teacher: Tensor, options: DivergenceOptions
) -> tuple[Tensor, Tensor, Tensor | float]:
    """(log p, log q, the slope of the student's transformed logits)"""
    dtype = accumulation_dtype(torch.promote_types(student.dtype, teacher.dtype))
    (y, _), (x, slope) = (
        transformed(logits.to(dtype), transform)
        for logits, transform in ((teacher, options.teacher), (student, options.student))
    )
    return (y / options.temperature).log_softmax(-1), (x / options.temperature).log_softmax(-1), slope


def _times(probability: Tensor, x: Tensor) -> Tensor:
    """probability * x, but 0 where the probability is, however large x; and so for the gradients."""
    return probability * x.masked_fill(probability == 0, 0.0)


def _parts(log_p: Tensor, log_q: Tensor, divergence: Divergence, beta: float) -> tuple[Tensor, Tensor]:
    """(f, s) of each class."""
    p, q, ratio = log_p.exp(), log_q.exp(), log_q - log_p
    if divergence == "forward_kl":
        return _times(p, -ratio) + (q - p), q - p
    if divergence == "reverse_kl":
        slope = _times(q, ratio)
        return slope + (p - q), slope
    if divergence == "tvd":
        return 0.5 * (p - q).abs(), 0.5 * q * (q - p).sign()
    # Beyond a ratio of exp(80) the smaller probability valid for nothing, and further on its exponential overflows.
    ratio = ratio.masked_fill((p == 0) & (q == 0), 0.0).clamp(-80.0, 80.0)
    slope = (beta - 1) * q * torch.log1p(beta * torch.expm1(-ratio))
    return slope - beta * p * torch.log1p((1 - beta) * torch.expm1(ratio)), slope


def reference(student: Tensor, teacher: Tensor, target: Tensor, options: DivergenceOptions) -> Tensor:
    """The divergence of each token in plain torch: the specification, the CPU path and the tests' oracle."""
    ignored = target == options.ignore_index
    # Masking the losses alone would multiply NaN logits of an ignored token by an upstream gradient of 0.
    student, teacher = (logits.masked_fill(ignored[..., None], 0.0) for logits in (student, teacher))
    log_p, log_q, _ = _log_probabilities(student, teacher, options)
    parts, _ = _parts(log_p, log_q, options.divergence, options.beta)
    return parts.sum(-1).masked_fill(ignored, 0.0)


@jit
def _weighted(probability, x):
    """probability * x, but 0 where the probability is, however large x."""
    return tl.where(probability == 0.0, 0.0, probability * x)


@jit
def _sign(x):
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, x))  # NaN stays NaN


@jit
def _probabilities(log_p, log_q, EXACT: tl.constexpr):
    """(p, q, log(q / p), how far p and q are behind the larger of them, exp(-distance)), of two exponentials; the
    distances are logarithms, at most 200, where nothing is left of the smaller."""
    larger = exp(tl.maximum(log_p, log_q), EXACT)
    ratio = tl.where(larger == 0.0, 0.0, log_q - log_p)
    distance = tl.minimum(tl.abs(ratio), 200.0)
    decay = exp(-distance, EXACT)
    smaller = larger * decay
    q_is_larger = ratio > 0.0
    p, q = tl.where(q_is_larger, smaller, larger), tl.where(q_is_larger, larger, smaller)
    return p, q, ratio, tl.where(q_is_larger, distance, 0.0), tl.where(q_is_larger, 0.0, distance), decay


@jit
def _part_and_slope(log_p, log_q, beta, DIVERGENCE: tl.constexpr, EXACT: tl.constexpr):
    """(f, s, q) of each class."""
    p, q, ratio, p_behind, q_behind, decay = _probabilities(log_p, log_q, EXACT)
    if DIVERGENCE == "forward_kl":
        slope = q - p
        part = _weighted(p, -ratio) + slope
    elif DIVERGENCE == "reverse_kl":
        slope = _weighted(q, ratio)
        part = slope + (p - q)
    elif DIVERGENCE == "tvd":
        slope = 0.5 * q * _sign(q - p)
        part = 0.5 * tl.abs(p - q)
    else:
        # log(m / max(p, q)): nothing overflows, and that of equal probabilities is exactly 0.
        share = tl.where(ratio > 0.0, 1.0 - beta, beta)  # of the larger
        mixture = share + (1.0 - share) * decay
        mixture = tl.log(mixture) if EXACT else fast_log(mixture, (1.0 - share) * (decay - 1.0))
        slope = (beta - 1.0) * q * (q_behind + mixture)
        part = slope - beta * p * (p_behind + mixture)
    return part, slope, q


@jit
def _log_probabilities_at(row_ptr, cols, n_cols, scale, softcap, maximum, log_sum, inverse_temperature):
    """The log-probabilities, -inf beyond the last column, and the slopes of the transformed logits."""
    z = tl.load(row_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    x, slope = softcapped(z, scale, softcap)
    x = tl.where(cols < n_cols, x, -float("inf"))
    return (x - maximum) * inverse_temperature - log_sum, slope


@jit
def _statistics(
    student_ptr, teacher_ptr, inverse_temperature, beta, student_scale, student_softcap, teacher_scale,
    teacher_softcap, n_cols, DIVERGENCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(D, the student's maximum and log of its sum of exponentials, the teacher's two, S) of a row, in two passes."""
    EXACT: tl.constexpr = (student_ptr.dtype.element_ty == tl.float32) or (teacher_ptr.dtype.element_ty == tl.float32)
    student_max, student_sum = max_and_sum_exp(
        student_ptr, student_scale, student_softcap, inverse_temperature, n_cols, BLOCK
    )
    teacher_max, teacher_sum = max_and_sum_exp(
        teacher_ptr, teacher_scale, teacher_softcap, inverse_temperature, n_cols, BLOCK
    )
    student_log, teacher_log = tl.log(student_sum), tl.log(teacher_sum)
    parts = tl.zeros((BLOCK,), dtype=tl.float32)
    slopes = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        log_q, _ = _log_probabilities_at(
            student_ptr, cols, n_cols, student_scale, student_softcap, student_max, student_log, inverse_temperature
        )
        log_p, _ = _log_probabilities_at(
            teacher_ptr, cols, n_cols, teacher_scale, teacher_softcap, teacher_max, teacher_log, inverse_temperature
        )
        part, slope, _ = _part_and_slope(log_p, log_q, beta, DIVERGENCE, EXACT)
        parts += part
        slopes += slope
    # The log of a row without a softmax is NaN, and so are its results: comparisons may have lost that on the way.
    lost = 0.0 * (student_log + teacher_log)
    return (
        tl.sum(parts, axis=0) + lost, student_max, student_log, teacher_max, teacher_log, tl.sum(slopes, axis=0) + lost
    )  # fmt: skip


@jit
def _store_gradient(
    student_ptr, teacher_ptr, out_ptr, student_max, student_log, teacher_max, teacher_log, slope_sum, upstream,
    inverse_temperature, beta, student_scale, student_softcap, teacher_scale, teacher_softcap, n_cols,
    DIVERGENCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    EXACT: tl.constexpr = (student_ptr.dtype.element_ty == tl.float32) or (teacher_ptr.dtype.element_ty == tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        log_q, transform_slope = _log_probabilities_at(
            student_ptr, cols, n_cols, student_scale, student_softcap, student_max, student_log, inverse_temperature
        )
        log_p, _ = _log_probabilities_at(
            teacher_ptr, cols, n_cols, teacher_scale, teacher_softcap, teacher_max, teacher_log, inverse_temperature
        )
        _, slope, q = _part_and_slope(log_p, log_q, beta, DIVERGENCE, EXACT)
        # For tvd, s is 1/2 q sign(q - p), and of s - q S may be little left.
        change = q * (0.5 * _sign(slope) - slope_sum) if DIVERGENCE == "tvd" else slope - q * slope_sum
        gradient = upstream * inverse_temperature * change * transform_slope
        tl.store(out_ptr + cols, gradient.to(out_ptr.dtype.element_ty), mask=cols < n_cols)


@jit
def _store_zeros(out_ptr, n_cols, BLOCK: tl.constexpr):
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + cols, tl.zeros((BLOCK,), dtype=out_ptr.dtype.element_ty), mask=cols < n_cols)


@kernel
def _forward_kernel(
    student_ptr, teacher_ptr, target_ptr, loss_ptr, statistics_ptr, student_stride, teacher_stride, ignore_index,
    inverse_temperature, beta, student_scale, student_softcap, teacher_scale, teacher_softcap, n_cols,
    DIVERGENCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(target_ptr + row) == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        tl.store(statistics_ptr + row * 5 + tl.arange(0, 8), 0.0, mask=tl.arange(0, 8) < 5)
    else:
        loss, student_max, student_log, teacher_max, teacher_log, slope_sum = _statistics(
            student_ptr + row * student_stride, teacher_ptr + row * teacher_stride, inverse_temperature, beta,
            student_scale, student_softcap, teacher_scale, teacher_softcap, n_cols, DIVERGENCE, BLOCK,
        )  # fmt: skip
        tl.store(loss_ptr + row, loss)
        tl.store(statistics_ptr + row * 5, student_max)
        tl.store(statistics_ptr + row * 5 + 1, student_log)
        tl.store(statistics_ptr + row * 5 + 2, teacher_max)
        tl.store(statistics_ptr + row * 5 + 3, teacher_log)
        tl.store(statistics_ptr + row * 5 + 4, slope_sum)


@kernel
def _backward_kernel(
    student_ptr, teacher_ptr, target_ptr, statistics_ptr, upstream_ptr, dstudent_ptr, student_stride, teacher_stride,
    upstream_stride, ignore_index, inverse_temperature, beta, student_scale, student_softcap, teacher_scale,
    teacher_softcap, n_cols, DIVERGENCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(target_ptr + row) == ignore_index:
        _store_zeros(dstudent_ptr + row * n_cols, n_cols, BLOCK)
    else:
        _store_gradient(
            student_ptr + row * student_stride, teacher_ptr + row * teacher_stride, dstudent_ptr + row * n_cols,
            tl.load(statistics_ptr + row * 5), tl.load(statistics_ptr + row * 5 + 1),
            tl.load(statistics_ptr + row * 5 + 2), tl.load(statistics_ptr + row * 5 + 3),
            tl.load(statistics_ptr + row * 5 + 4), tl.load(upstream_ptr + row * upstream_stride).to(tl.float32),
            inverse_temperature, beta, student_scale, student_softcap, teacher_scale, teacher_softcap, n_cols,
            DIVERGENCE, BLOCK,
        )  # fmt: skip


@kernel
def _loss_and_gradient_kernel(
    student_ptr, teacher_ptr, target_ptr, loss_ptr, upstream_ptr, student_stride, teacher_stride, upstream_stride,
    ignore_index, inverse_temperature, beta, student_scale, student_softcap, teacher_scale, teacher_softcap, n_cols,
    DIVERGENCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Both directions on private logits of the student, which the gradient replaces: later passes meet the cache."""
    row = tl.program_id(0).to(tl.int64)
    student_row_ptr = student_ptr + row * student_stride
    teacher_row_ptr = teacher_ptr + row * teacher_stride
    if tl.load(target_ptr + row) == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        _store_zeros(student_row_ptr, n_cols, BLOCK)
    else:
        loss, student_max, student_log, teacher_max, teacher_log, slope_sum = _statistics(
            student_row_ptr, teacher_row_ptr, inverse_temperature, beta, student_scale, student_softcap, teacher_scale,
            teacher_softcap, n_cols, DIVERGENCE, BLOCK,
        )  # fmt: skip
        tl.store(loss_ptr + row, loss)
        tl.debug_barrier()  # the whole row must be read before another warp overwrites a part of it
        _store_gradient(
            student_row_ptr, teacher_row_ptr, student_row_ptr, student_max, student_log, teacher_max, teacher_log,
            slope_sum, tl.load(upstream_ptr + row * upstream_stride).to(tl.float32), inverse_temperature, beta,
            student_scale, student_softcap, teacher_scale, teacher_softcap, n_cols, DIVERGENCE, BLOCK,
        )  # fmt: skip


def _block(n_cols: int) -> tuple[int, int]:
    """(columns a step, warps) of the program that walks one row."""
    block = min(4096, next_power_of_2(n_cols))
    return block, min(8, max(4, block // 512))


class _ForwardResults(NamedTuple):
    """Of each token the loss, and five numbers for backward: the student's maximum and log of its sum of exponentials,
    the teacher's two, and S."""

    loss: Tensor
    statistics: Tensor


def _forward_fake(student: Tensor, target: Tensor) -> _ForwardResults:
    loss = student.new_empty(target.shape, dtype=torch.float32)
    return _ForwardResults(loss, student.new_empty((*target.shape, 5), dtype=torch.float32))


@register("divergence_forward", fake=_forward_fake)
def _forward(student: Tensor, teacher: Tensor, target: Tensor, options: DivergenceOptions) -> _ForwardResults:
    results = _forward_fake(student, target)
    student_rows, teacher_rows = as_rows(student), as_rows(teacher)
    n_rows, n_cols = student_rows.shape
    block, warps = _block(n_cols)
    _forward_kernel[n_rows](
        student_rows, teacher_rows, target.contiguous(), *results, student_rows.stride(0), teacher_rows.stride(0),
        *options.numbers(), n_cols, options.divergence, block, num_warps=warps,
    )  # fmt: skip
    return results


def _backward_fake(student: Tensor) -> Tensor:
    return student.new_empty(student.shape)


@register("divergence_backward", fake=_backward_fake)
def _backward(
    student: Tensor, teacher: Tensor, target: Tensor, statistics: Tensor, upstream: Tensor, options: DivergenceOptions
) -> Tensor:  # fmt: skip
    dstudent = _backward_fake(student)
    student_rows, teacher_rows = as_rows(student), as_rows(teacher)
    n_rows, n_cols = student_rows.shape
    block, warps = _block(n_cols)
    _backward_kernel[n_rows](
        student_rows, teacher_rows, target.contiguous(), statistics, upstream, dstudent, student_rows.stride(0),
        teacher_rows.stride(0), upstream.stride(0), *options.numbers(), n_cols, options.divergence, block,
        num_warps=warps,
    )  # fmt: skip
    return dstudent


def compute_losses(
    student: Tensor, teacher: Tensor, target: Tensor, options: DivergenceOptions, triton: bool
) -> Tensor:
    """The divergence of each row of (M, V) logits, outside autograd; by Triton, or by plain torch."""
    if options.divergence == "cosine":
        ignored = target == options.ignore_index
        return cosine.compute_losses(student, teacher, ignored, options.student, options.teacher)
    return _forward(student, teacher, target, options).loss if triton else reference(student, teacher, target, options)


def loss_and_gradient_(
    student: Tensor, teacher: Tensor, target: Tensor, upstream: Tensor, options: DivergenceOptions, triton: bool
) -> Tensor:
    """Returns each row's divergence and overwrites `student` with its gradient.

    For the linear divergences, which compute logits only to differentiate them at once.

    Args:
        student: (M, V) logits, contiguous rows of a private buffer.
        teacher: (M, V) logits.
        target: (M,) integers.
        upstream: (M,) fp32 (fp64 for fp64 logits), the gradient of each row's divergence; may be expanded.
        options: what is computed.
        triton: by Triton, or by plain torch.
    """
    ignored = target == options.ignore_index
    if options.divergence == "cosine":
        return cosine.loss_and_gradient_(student, teacher, ignored, upstream, options.student, options.teacher)
    if triton:
        loss = student.new_empty(target.shape, dtype=torch.float32)
        teacher_rows = as_rows(teacher)
        n_rows, n_cols = student.shape
        block, warps = _block(n_cols)
        _loss_and_gradient_kernel[n_rows](
            student, teacher_rows, target.contiguous(), loss, upstream, student.stride(0), teacher_rows.stride(0),
            upstream.stride(0), *options.numbers(), n_cols, options.divergence, block, num_warps=warps,
        )  # fmt: skip
        return loss
    log_p, log_q, transform_slope = _log_probabilities(student, teacher, options)
    parts, slopes = _parts(log_p, log_q, options.divergence, options.beta)
    gradient = (slopes - log_q.exp() * slopes.sum(-1, keepdim=True)) * (upstream / options.temperature)[:, None]
    student.copy_((gradient * transform_slope).masked_fill(ignored[:, None], 0.0))
    return parts.sum(-1).masked_fill(ignored, 0.0)


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, target: Tensor, options: DivergenceOptions) -> Tensor:
        loss, statistics = _forward(student, teacher, target, options)
        ctx.save_for_backward(student, teacher, target, statistics)
        ctx.options = options
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        student, teacher, target, statistics = ctx.saved_tensors
        dstudent = _backward(student, teacher, target, statistics, upstream.reshape(-1), ctx.options)
        return dstudent, None, None, None


def check(name: str, options: DivergenceOptions, **of_the_teacher: Tensor | None) -> None:
    """Raises ValueError for numbers that define no divergence, and for a teacher that expects gradients."""
    if not (0 <= options.beta <= 1 and options.temperature > 0):
        raise ValueError(
            f"{name}: beta={options.beta} and temperature={options.temperature}; "
            "expected 0 <= beta <= 1 and temperature > 0"
        )
    for part, tensor in of_the_teacher.items():
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}: {part} requires a gradient, and the teacher is given none; "
                f"run the teacher under torch.no_grad(), or pass {part}.detach()"
            )


def jsd_divergence(beta: float) -> Divergence:
    """Which divergence `jsd` with this beta is."""
    if beta == 0:
        return "forward_kl"
    return "reverse_kl" if beta == 1 else "jsd"


def _divergence(
    name: str, student: Tensor, teacher: Tensor, target: Tensor | None, options: DivergenceOptions,
    reduction: Reduction, num_items: int | Tensor | None, backend: Backend,
) -> Tensor:  # fmt: skip
    check(name, options, teacher=teacher)
    if student.shape != teacher.shape:
        raise ValueError(
            f"{name}: student {tuple(student.shape)} and teacher {tuple(teacher.shape)}; expected (..., V) of both"
        )
    if target is None:
        target, options = target_without_ignored(student, options)
    check_target(name, target, student.shape[:-1])
    losses = (
        _Losses.apply(student, teacher, target, options)
        if uses_triton(student, teacher, backend=backend)
        else reference(student, teacher, target, options)
    )
    return reduce_losses(losses, denominator(name, losses.dtype, target, reduction, options.ignore_index, num_items))


def target_without_ignored(student: Tensor, options: DivergenceOptions) -> tuple[Tensor, DivergenceOptions]:
    """Targets of which none is ignored, for (..., V) logits or (..., H) hidden states."""
    target = torch.zeros(student.shape[:-1], dtype=torch.int64, device=student.device)
    return target, options._replace(ignore_index=-100)


def kl_div(
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    reverse: bool = False,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items: int | Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """The Kullback-Leibler divergence KL(p || q) of `q = softmax(student / temperature)` from `p = softmax(teacher /
    temperature)`, or KL(q || p), computed in fp32 whatever the dtypes.

    Args:
        student: (..., V) logits, any strides. Never written to. Alone gets a gradient.
        teacher: (..., V) logits, any strides and dtype.
        target: (...) integers, or None if all tokens count. Looked at only to tell tokens that count from others.
        reverse: KL(q || p), which seeks the teacher's modes, in place of KL(p || q), which covers them.
        temperature: divides both logits. The loss is not multiplied by temperature^2, as Hinton et al. advise where a
            cross entropy is added: gradients shrink about as 1 / temperature^2.
        ignore_index: the target of a token that does not count.
        reduction: "mean" over the tokens that count, "sum", or "none" for the divergence of each token.
        num_items: divides the sum in place of the number of tokens that count (an int or a 0-d tensor): the same number
            for all micro-batches of a step makes gradient accumulation exact.
        backend: "auto" (Triton where it can), "triton" or "torch" (the reference).

    Returns:
        fp32 (fp64 for fp64 logits): 0-d, or of the tokens' shape for "none". Without a token that valid, "mean" is 0.

    Raises:
        ValueError: the shapes do not fit, an option is out of range, or the teacher requires a gradient.
    """
    options = DivergenceOptions("reverse_kl" if reverse else "forward_kl", 0.0, temperature, ignore_index)
    return _divergence("kl_div", student, teacher, target, options, reduction, num_items, backend)


def jsd(
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items: int | Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """The generalized Jensen-Shannon divergence `beta KL(p || m) + (1 - beta) KL(q || m)` of `q = softmax(student /
    temperature)` and `p = softmax(teacher / temperature)`, with `m = beta p + (1 - beta) q`.

    Args:
        beta: 0 to 1, the teacher's share. At 0 and 1, where the formula is 0, KL(p || q) and KL(q || p) stand in, which
            it tends to when divided by beta and by 1 - beta: the convention of TRL's GKDTrainer, and Liger's. So losses
            near the ends are not close to those at the ends.

    The other arguments, the result and the errors are those of `kl_div`.
    """
    options = DivergenceOptions(jsd_divergence(beta), beta, temperature, ignore_index)
    return _divergence("jsd", student, teacher, target, options, reduction, num_items, backend)


def tvd(
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None = None,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items: int | Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """The total variation distance `1/2 sum |p - q|` of `q = softmax(student / temperature)` and `p = softmax(teacher /
    temperature)`; the gradient takes sign(0) as 0.

    The arguments, the result and the errors are those of `kl_div`.
    """
    options = DivergenceOptions("tvd", 0.0, temperature, ignore_index)
    return _divergence("tvd", student, teacher, target, options, reduction, num_items, backend)
