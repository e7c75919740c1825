"""One AdamW update (Loshchilov & Hutter 2019, algorithm 2) of a parameter and its moments, in one kernel.

    m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2,
    p <- p (1 - lr wd) - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)

All arithmetic is in fp32, and p uses m and v before they are rounded. bf16 tensors are rounded to the nearest, or
stochastically (see `stochastic_rounding`). Rounding to the nearest loses updates: those of p below half an ulp, 2^-9 of
p, and the decay of v in bf16 if 1 - b2 is less than 2^-9, so that v never decreases.

t, lr and the flag to skip the update are tensors, which the kernel reads, without a host sync: a captured CUDA
graph sees their new values in each replay. 1 - b^t is -expm1(t log(b)), which does not cancel.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ligerzoo.checks import NOT_NEGATIVE, check, number
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, cdiv, uses_triton
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.math import exp
from ligerzoo.kernels.philox import random_block
from ligerzoo.kernels.registration import needs_dispatch
from ligerzoo.kernels.stochastic_rounding import check_key, round_to_bf16, store, to_bf16, words_like
from ligerzoo.tensor_checks import check_floats, shape_error

BETA = number("a number from 0 to 1, not 1", lambda x: 0 <= x < 1)
_BLOCK, _WARPS = 1024, 4


def reference(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    lr: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    key: int | None = None,
    first_group: int = 0,
    skip: Tensor | None = None,
) -> None:
    """`adamw_update` in plain torch: the specification, the CPU path and the test oracle."""
    dtype = accumulation_dtype(parameter.dtype)
    p, g, m, v = (t.to(dtype) for t in (parameter, gradient, exp_avg, exp_avg_sq))
    p, m, v = updated(p, g, m, v, step.to(dtype), lr.to(dtype), UpdateNumbers.of(betas, eps, weight_decay))
    if key is not None:
        is_rounded = [old.dtype == torch.bfloat16 for old in (parameter, exp_avg, exp_avg_sq)]
        if is_rounded[0] or is_rounded[1]:
            words = words_like(p, key, step, first_group)
            p = to_bf16(p, words) if is_rounded[0] else p
            m = to_bf16(m, words >> 16) if is_rounded[1] else m
        if is_rounded[2]:
            v = to_bf16(v, words_like(p, key + 1, step, first_group))
    for old, new in ((parameter, p), (exp_avg, m), (exp_avg_sq, v)):
        store(old, new, skip)


class UpdateNumbers(NamedTuple):
    """The numbers of an update: b1, b2, 1 - b1, 1 - b2, log(b1), log(b2), eps and wd."""

    beta1: float
    beta2: float
    rate1: float
    rate2: float
    log_beta1: float
    log_beta2: float
    eps: float
    weight_decay: float

    @classmethod
    def of(cls, betas: tuple[float, float], eps: float, weight_decay: float) -> UpdateNumbers:
        """Returns the numbers of these options."""
        logs = (math.log(beta) if beta > 0 else -math.inf for beta in betas)
        return cls(*betas, 1 - betas[0], 1 - betas[1], *logs, eps, weight_decay)  # type: ignore[call-arg]


class UpdateStep(NamedTuple):
    """t, lr and the flag to skip the update, as kernels read them."""

    step: Tensor
    lr: Tensor
    skip: Tensor | None


def updated(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor, lr: Tensor, numbers: UpdateNumbers
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns p, m and v after an update, before they are rounded, in plain torch."""
    m = numbers.beta1 * m + numbers.rate1 * g
    v = numbers.beta2 * v + numbers.rate2 * (g * g)
    correction1, correction2 = (-torch.expm1(step * log) for log in (numbers.log_beta1, numbers.log_beta2))
    decayed = p * (1 - lr * numbers.weight_decay)
    return decayed - lr / correction1 * m / ((v / correction2).sqrt() + numbers.eps), m, v


@jit
def update(p, g, m, v, step, lr, numbers):
    """p, m and v after an update, in fp32."""
    m = numbers.beta1 * m + numbers.rate1 * g
    v = numbers.beta2 * v + numbers.rate2 * (g * g)
    correction1, correction2 = _one_minus_exp(step * numbers.log_beta1), _one_minus_exp(step * numbers.log_beta2)
    decayed = p * (1.0 - lr * numbers.weight_decay)
    return decayed - lr / correction1 * m / (tl.sqrt_rn(v / correction2) + numbers.eps), m, v


@jit
def _one_minus_exp(x):
    """1 - exp(x) for x <= 0, exact to 1e-6: by its series near 0, where the difference cancels."""
    series = -x * (1.0 + x * (1.0 / 2.0 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x * (1.0 / 120.0)))))
    return tl.where(x > -0.1, series, 1.0 - exp(x, True))


@jit
def store_rounded(ptr, offsets, x, words, mask, STOCHASTIC: tl.constexpr):
    if STOCHASTIC and (ptr.dtype.element_ty == tl.bfloat16):
        tl.store(ptr + offsets, round_to_bf16(x, words), mask=mask)
    else:
        tl.store(ptr + offsets, x.to(ptr.dtype.element_ty), mask=mask)


@kernel
def _kernel(
    p_ptr, g_ptr, m_ptr, v_ptr, schedule, key, first_group, n, numbers, BLOCK: tl.constexpr, STOCHASTIC: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    if schedule.skip is not None:
        n = tl.where(tl.load(schedule.skip) == 0, n, 0)
    mask = offsets < n
    step, lr = tl.load(schedule.step), tl.load(schedule.lr)
    p = tl.load(p_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(m_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    p, m, v = update(p, g, m, v, step, lr, numbers)
    words, square_words = 0, 0
    if STOCHASTIC:
        counter, group = step.to(tl.int64), first_group + start // 4
        words = random_block(key, counter, group, BLOCK)
        if v_ptr.dtype.element_ty == tl.bfloat16:
            square_words = random_block(key + 1, counter, group, BLOCK)
    store_rounded(p_ptr, offsets, p, words, mask, STOCHASTIC)
    store_rounded(m_ptr, offsets, m, words >> 16, mask, STOCHASTIC)
    store_rounded(v_ptr, offsets, v, square_words, mask, STOCHASTIC)


def adamw_update(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    lr: Tensor,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    key: int | None = None,
    first_group: int = 0,
    skip: Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """Updates a parameter and its moments in place by AdamW. No host sync.

    Args:
        parameter: any shape; fp32, bf16, fp16 or fp64.
        gradient: the shape of `parameter`, any floating-point dtype.
        exp_avg: m, the shape of `parameter`, any floating-point dtype.
        exp_avg_sq: v, the shape of `parameter`, any floating-point dtype.
        step: t, 0-d fp32, the number of this update from 1 to 2^24.
        lr: 0-d fp32.
        betas: b1 and b2, from 0 to 1 and not 1.
        eps: added to the root of v.
        weight_decay: wd.
        key: 2^32 or more: rounds bf16 tensors stochastically, with independent bits for each even key, step and
            element. None rounds to the nearest.
        first_group: number of groups of 4 elements before `parameter`, if it is a shard of a larger tensor.
        skip: 0-d or (1,); nothing is written if it is not 0.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Raises:
        ValueError: shapes, dtypes or numbers are wrong.
    """
    tensors = {"parameter": parameter, "gradient": gradient, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    check_floats("adamw_update", **tensors, step=step, lr=lr)
    if len({t.shape for t in tensors.values()}) > 1:
        raise shape_error("adamw_update", "the same shape", **tensors)
    check("adamw_update", BETA, beta1=betas[0], beta2=betas[1])
    check("adamw_update", NOT_NEGATIVE, eps=eps, weight_decay=weight_decay)
    if key is not None:
        check_key("adamw_update", key, first_group)
    together = tuple(tensors.values())
    is_dense = all(t.is_contiguous() for t in (parameter, exp_avg, exp_avg_sq))
    if not (uses_triton(*together, backend=backend) and is_dense) or needs_dispatch(*together):
        with torch.no_grad():
            options = step, lr, betas, eps, weight_decay, key, first_group, skip
            reference(parameter, gradient, exp_avg, exp_avg_sq, *options)
    elif parameter.numel():
        operands = parameter, gradient.contiguous(), exp_avg, exp_avg_sq
        stream = 0 if key is None else key, first_group, parameter.numel()
        numbers = UpdateNumbers.of(betas, eps, weight_decay)
        with torch.cuda.device(parameter.device if parameter.is_cuda else -1):
            _kernel[cdiv(parameter.numel(), _BLOCK)](
                *operands, UpdateStep(step, lr, skip), *stream, numbers, _BLOCK, key is not None, num_warps=_WARPS
            )
        increment_version((parameter, exp_avg, exp_avg_sq))
