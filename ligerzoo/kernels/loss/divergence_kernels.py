"""The Triton kernels for the formulas of `token_divergence`: one program computes one row.

Forward makes two passes over both rows: the first for the softmaxes' normalizers, the second for D, S and L. Backward
makes one, from the saved normalizers, S and L.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import as_rows, empty_result, next_power_of_2
from ligerzoo.kernels.jit import Kernel, jit, kernel, tl
from ligerzoo.kernels.loss.token_divergence import DivergenceOptions
from ligerzoo.kernels.math import exp, fast_log, load_softcapped
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.softmax import max_and_sum_exp


@jit
def _weighted(probability, x):
    """Returns probability * x, 0 where the probability is 0, even for infinite x."""
    return tl.where(probability == 0.0, 0.0, probability * x)


@jit
def _sign(x):
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, x))  # NaN stays NaN


@jit
def _probabilities(log_p, log_q, EXACT: tl.constexpr):
    """Returns (p, q, log(q / p), log(max(p, q) / p), log(max(p, q) / q), min(p, q) / max(p, q)) from two exponentials.

    The last three are computed from a log ratio clamped at 200, where the smaller probability underflows.
    """
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
    """Returns (f, s, q) of each class."""
    p, q, ratio, p_distance, q_distance, decay = _probabilities(log_p, log_q, EXACT)
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
        # log(m / max(p, q)) cannot overflow, and is exactly 0 for equal probabilities.
        share = tl.where(ratio > 0.0, 1.0 - beta, beta)  # the weight of the larger probability
        mixture = share + (1.0 - share) * decay
        mixture = tl.log(mixture) if EXACT else fast_log(mixture, (1.0 - share) * (decay - 1.0))
        slope = (beta - 1.0) * q * (q_distance + mixture)
        part = slope - beta * p * (p_distance + mixture)
    return part, slope, q


@jit
def _load_log_probabilities(student, teacher, normalizers, cols, numbers):
    """Returns (log p, log q, the slope of the student's transformed logits). The logs are -inf beyond the last column.

    Args:
        student, teacher: the row's pointer, scale and softcap.
        normalizers: the maximum of the student's transformed logits, the log of their sum of exponentials, and the
            teacher's two.
    """
    student_ptr, student_scale, student_softcap = student
    teacher_ptr, teacher_scale, teacher_softcap = teacher
    student_max, student_log, teacher_max, teacher_log = normalizers
    n_cols, inverse_temperature = numbers.n_cols, numbers.inverse_temperature
    x, slope = load_softcapped(student_ptr, cols, n_cols, student_scale, student_softcap)
    y, _ = load_softcapped(teacher_ptr, cols, n_cols, teacher_scale, teacher_softcap)
    log_q = (x - student_max) * inverse_temperature - student_log
    log_p = (y - teacher_max) * inverse_temperature - teacher_log
    return log_p, log_q, slope


@jit
def _statistics(student, teacher, numbers, DIVERGENCE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns D, the normalizers, and (S, L) of a row.

    For tvd, S and L are U / (U + L) and L / (U + L). Otherwise L is 0.
    """
    n_cols, inverse_temperature, beta = numbers.n_cols, numbers.inverse_temperature, numbers.beta
    student_ptr, student_scale, student_softcap = student
    teacher_ptr, teacher_scale, teacher_softcap = teacher
    EXACT: tl.constexpr = (student_ptr.dtype.element_ty == tl.float32) or (teacher_ptr.dtype.element_ty == tl.float32)
    student_max, student_sum = max_and_sum_exp(
        student_ptr, student_scale, student_softcap, inverse_temperature, n_cols, BLOCK
    )
    teacher_max, teacher_sum = max_and_sum_exp(
        teacher_ptr, teacher_scale, teacher_softcap, inverse_temperature, n_cols, BLOCK
    )
    student_log, teacher_log = tl.log(student_sum), tl.log(teacher_sum)
    normalizers = (student_max, student_log, teacher_max, teacher_log)
    parts = tl.zeros((BLOCK,), dtype=tl.float32)
    slopes = tl.zeros((BLOCK,), dtype=tl.float32)
    lower = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        log_p, log_q, _ = _load_log_probabilities(student, teacher, normalizers, cols, numbers)
        part, slope, q = _part_and_slope(log_p, log_q, beta, DIVERGENCE, EXACT)
        parts += part
        if DIVERGENCE == "tvd":
            slopes += 0.5 * q + slope
            lower += 0.5 * q - slope
        else:
            slopes += slope
    # The log is NaN for a row without a softmax. Comparisons may have dropped the NaN from the sums, so add it.
    nan_or_zero = 0.0 * (student_log + teacher_log)
    slope_sum, lower_sum = tl.sum(slopes, axis=0) + nan_or_zero, 0.0
    if DIVERGENCE == "tvd":
        lower_sum = tl.sum(lower, axis=0) + nan_or_zero
        total = slope_sum + lower_sum
        slope_sum, lower_sum = slope_sum / total, lower_sum / total
    return tl.sum(parts, axis=0) + nan_or_zero, normalizers, (slope_sum, lower_sum)


@jit
def _change(slope, q, sums, DIVERGENCE: tl.constexpr):
    """Returns s - q S, or for tvd u L - l U, where u or l is 0 unless s is 0."""
    slope_sum, lower_sum = sums
    if DIVERGENCE == "tvd":
        tie = 0.5 * (lower_sum - slope_sum)
        return q * tl.where(slope > 0.0, lower_sum, tl.where(slope < 0.0, -slope_sum, tie))
    else:
        return slope - q * slope_sum


@jit
def _store_gradient(
    student, teacher, out_ptr, normalizers, sums, upstream, numbers, DIVERGENCE: tl.constexpr, BLOCK: tl.constexpr
):
    n_cols, inverse_temperature, beta = numbers.n_cols, numbers.inverse_temperature, numbers.beta
    EXACT: tl.constexpr = (student[0].dtype.element_ty == tl.float32) or (teacher[0].dtype.element_ty == tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        log_p, log_q, transform_slope = _load_log_probabilities(student, teacher, normalizers, cols, numbers)
        _, slope, q = _part_and_slope(log_p, log_q, beta, DIVERGENCE, EXACT)
        change = _change(slope, q, sums, DIVERGENCE)
        gradient = upstream * inverse_temperature * change * transform_slope
        tl.store(out_ptr + cols, gradient.to(out_ptr.dtype.element_ty), mask=cols < n_cols)


@jit
def _store_zeros(out_ptr, n_cols, BLOCK: tl.constexpr):
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + cols, tl.zeros((BLOCK,), dtype=out_ptr.dtype.element_ty), mask=cols < n_cols)


class _Logits(NamedTuple):
    """Logits of one side, (M, V), with their stride, scale and softcap."""

    ptr: Tensor
    row_stride: int
    scale: float | None
    softcap: float | None


class _Upstream(NamedTuple):
    """The gradient of each row's divergence, (M,), any stride."""

    ptr: Tensor
    stride: int


class _Numbers(NamedTuple):
    """The number of columns, and the numbers of `DivergenceOptions`."""

    n_cols: int
    ignore_index: int
    inverse_temperature: float
    beta: float


@kernel
def _forward_kernel(
    student, teacher, target_ptr, loss_ptr, statistics_ptr, numbers, DIVERGENCE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(target_ptr + row) == numbers.ignore_index:
        tl.store(loss_ptr + row, 0.0)
        tl.store(statistics_ptr + row * 6 + tl.arange(0, 8), 0.0, mask=tl.arange(0, 8) < 6)
    else:
        z = (student.ptr + row * student.row_stride, student.scale, student.softcap)
        y = (teacher.ptr + row * teacher.row_stride, teacher.scale, teacher.softcap)
        loss, normalizers, sums = _statistics(z, y, numbers, DIVERGENCE, BLOCK)
        tl.store(loss_ptr + row, loss)
        for i in tl.static_range(4):
            tl.store(statistics_ptr + row * 6 + i, normalizers[i])
        for i in tl.static_range(2):
            tl.store(statistics_ptr + row * 6 + 4 + i, sums[i])


@kernel
def _backward_kernel(
    student, teacher, target_ptr, saved_ptr, upstream, out_ptr, numbers, DIVERGENCE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(target_ptr + row) == numbers.ignore_index:
        _store_zeros(out_ptr + row * numbers.n_cols, numbers.n_cols, BLOCK)
    else:
        z = (student.ptr + row * student.row_stride, student.scale, student.softcap)
        y = (teacher.ptr + row * teacher.row_stride, teacher.scale, teacher.softcap)
        dstudent_ptr = out_ptr + row * numbers.n_cols
        saved = saved_ptr + row * 6
        normalizers = (tl.load(saved), tl.load(saved + 1), tl.load(saved + 2), tl.load(saved + 3))
        sums = (tl.load(saved + 4), tl.load(saved + 5))
        dloss = tl.load(upstream.ptr + row * upstream.stride).to(tl.float32)
        _store_gradient(z, y, dstudent_ptr, normalizers, sums, dloss, numbers, DIVERGENCE, BLOCK)


@kernel
def _loss_and_gradient_kernel(
    student, teacher, target_ptr, loss_ptr, upstream, numbers, DIVERGENCE: tl.constexpr, BLOCK: tl.constexpr
):
    """Computes the loss and overwrites the student's logits, a private buffer, with the gradient.

    One kernel reads a row several times in a short time, so later passes hit the cache.
    """
    row = tl.program_id(0).to(tl.int64)
    out_ptr = student.ptr + row * student.row_stride
    if tl.load(target_ptr + row) == numbers.ignore_index:
        tl.store(loss_ptr + row, 0.0)
        _store_zeros(out_ptr, numbers.n_cols, BLOCK)
    else:
        z = (student.ptr + row * student.row_stride, student.scale, student.softcap)
        y = (teacher.ptr + row * teacher.row_stride, teacher.scale, teacher.softcap)
        loss, normalizers, sums = _statistics(z, y, numbers, DIVERGENCE, BLOCK)
        tl.store(loss_ptr + row, loss)
        tl.debug_barrier()  # all warps must have read the row before one overwrites a part of it
        dloss = tl.load(upstream.ptr + row * upstream.stride).to(tl.float32)
        _store_gradient(z, y, out_ptr, normalizers, sums, dloss, numbers, DIVERGENCE, BLOCK)


def _launch(
    kernel: Kernel,
    student: Tensor,
    teacher: Tensor,
    target: Tensor,
    tensors: Sequence[Tensor | _Upstream],
    options: DivergenceOptions,
) -> None:
    n_rows, n_cols = student.shape
    sides = (student, options.student), (teacher, options.teacher)
    logits = (_Logits(x, x.stride(0), *transform.arguments()) for x, transform in sides)
    numbers = _Numbers(n_cols, options.ignore_index, 1 / options.temperature, options.beta)
    block = min(4096, next_power_of_2(n_cols))  # columns per step of a program
    warps = min(8, max(4, block // 512))
    kernel[n_rows](*logits, target.contiguous(), *tensors, numbers, options.divergence, block, num_warps=warps)


class ForwardResults(NamedTuple):
    """Each token's loss, and six numbers for backward: the student's maximum and log of its sum of exponentials, the
    teacher's two, S and L."""

    loss: Tensor
    statistics: Tensor


def _forward_fake(student: Tensor, target: Tensor) -> ForwardResults:
    loss = student.new_empty(target.shape, dtype=torch.float32)
    return ForwardResults(loss, student.new_empty((*target.shape, 6), dtype=torch.float32))


@register("divergence_forward", fake=_forward_fake)
def divergence_forward(student: Tensor, teacher: Tensor, target: Tensor, options: DivergenceOptions) -> ForwardResults:
    results = _forward_fake(student, target)
    _launch(_forward_kernel, as_rows(student), as_rows(teacher), target, results, options)
    return results


@register("divergence_backward", fake=lambda student: empty_result(student))
def divergence_backward(
    student: Tensor, teacher: Tensor, target: Tensor, statistics: Tensor, upstream: Tensor, options: DivergenceOptions
) -> Tensor:
    dstudent = empty_result(student)
    tensors = statistics, _Upstream(upstream, upstream.stride(0)), dstudent
    _launch(_backward_kernel, as_rows(student), as_rows(teacher), target, tensors, options)
    return dstudent


def fused_divergences_(
    student: Tensor, teacher: Tensor, target: Tensor, upstream: Tensor | None, options: DivergenceOptions
) -> Tensor:
    """`ligerzoo.kernels.divergence.row_divergences_` by Triton."""
    if upstream is None:
        return divergence_forward(student, teacher, target, options).loss
    loss = student.new_empty(target.shape, dtype=torch.float32)
    tensors = loss, _Upstream(upstream, upstream.stride(0))
    _launch(_loss_and_gradient_kernel, student, as_rows(teacher), target, tensors, options)
    return loss
