"""xIELU, an activation with a trainable curvature on each side (Huang & Schlag 2024, section 3).

Forward:   x > 0:   y = a x^2 + beta x
           else:    y = b (expm1(min(x, eps)) - x) + beta x,   in fp32, rounded once.
Backward:  x > 0:   dx = dy (2 a x + beta),   da = sum of dy x^2
           else:    dx = dy (b (exp(x) [x < eps] - 1) + beta),   db = sum of dy (expm1(min(x, eps)) - x).

Saved: x, a, b, beta and eps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.autograd import FusedContext, FusedFunction, once_differentiable
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, empty_gradient, empty_result, uses_triton
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.math import expm1
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.tiling import STRIP_WARPS, load_strip, row_and_columns, strips
from ligerzoo.tensor_checks import check_floats, check_tensor


def reference(x: Tensor, positive: Tensor, negative: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """`xielu` in plain torch: the specification, the CPU path and the test oracle."""
    dtype = accumulation_dtype(x.dtype)
    wide = x.to(dtype)
    positive, negative, beta, eps = (t.to(dtype) for t in (positive, negative, beta, eps))
    curve = torch.expm1(torch.minimum(wide, eps)) - wide
    return (torch.where(wide > 0, positive * wide * wide, negative * curve) + beta * wide).to(x.dtype)


class _Numbers(NamedTuple):
    """The parameters of xIELU, one element each."""

    positive: Tensor
    negative: Tensor
    beta: Tensor
    eps: Tensor


@jit
def _load(ptr):
    """The only element, in fp32."""
    return tl.load(ptr).to(tl.float32)


@kernel
def _forward_kernel(x, numbers, y_ptr, n_cols, BLOCK: tl.constexpr):
    row, cols = row_and_columns(n_cols, BLOCK)
    mask = cols < n_cols
    x = load_strip(x, row, cols, mask)
    eps = _load(numbers.eps)
    curve = expm1(tl.where(x > eps, eps, x)) - x
    y = tl.where(x > 0.0, _load(numbers.positive) * x * x, _load(numbers.negative) * curve) + _load(numbers.beta) * x
    tl.store(y_ptr + row * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _backward_kernel(dy, x, numbers, dx_ptr, sums_ptr, n_cols, BLOCK: tl.constexpr):
    row, cols = row_and_columns(n_cols, BLOCK)
    mask = cols < n_cols
    dy = load_strip(dy, row, cols, mask)
    x = load_strip(x, row, cols, mask)
    eps, is_positive = _load(numbers.eps), x > 0.0
    growth = expm1(tl.where(x > eps, eps, x))
    if dx_ptr is not None:
        curve_slope = tl.where(x < eps, growth, -1.0)
        slope = tl.where(is_positive, 2.0 * _load(numbers.positive) * x, _load(numbers.negative) * curve_slope)
        dx = dy * (slope + _load(numbers.beta))
        tl.store(dx_ptr + row * n_cols + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if sums_ptr is not None:
        program = tl.program_id(0).to(tl.int64)
        tl.store(sums_ptr + 2 * program, tl.sum(tl.where(is_positive, dy * x * x, 0.0), 0))
        tl.store(sums_ptr + 2 * program + 1, tl.sum(tl.where(is_positive, 0.0, dy * (growth - x)), 0))


def _allocate_forward(x: Tensor) -> Tensor:
    return empty_result(x)


@register("xielu_forward", fake=_allocate_forward)
def _forward(x: Tensor, numbers: _Numbers) -> Tensor:
    y = _allocate_forward(x)
    (rows,), n_cols, block, programs = strips(x)
    _forward_kernel[programs](rows, numbers, y, n_cols, block, num_warps=STRIP_WARPS)
    return y


def _allocate_backward(x: Tensor, needs_x: bool, needs_curvatures: bool) -> tuple[Tensor, Tensor]:
    return empty_gradient(x, needs_x), x.new_empty((2 * needs_curvatures,), dtype=torch.float32)


@register("xielu_backward", fake=_allocate_backward)
def _backward(dy: Tensor, x: Tensor, numbers: _Numbers, needs_x: bool, needs_curvatures: bool) -> tuple[Tensor, Tensor]:
    """Returns dx, and da and db, without elements if not needed."""
    dx, curvatures = _allocate_backward(x, needs_x, needs_curvatures)
    rows, n_cols, block, programs = strips(dy, x)
    sums = x.new_empty((programs, 2), dtype=torch.float32) if needs_curvatures else None
    _backward_kernel[programs](*rows, numbers, dx if needs_x else None, sums, n_cols, block, num_warps=STRIP_WARPS)
    if sums is not None:
        torch.sum(sums, 0, out=curvatures)
    return dx, curvatures


class _XIELU(FusedFunction):
    @staticmethod
    def forward(ctx: FusedContext, x: Tensor, *numbers: Tensor) -> Tensor:
        ctx.save_for_backward(x, *numbers)
        return _forward(x, _Numbers(*numbers))

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *numbers = ctx.saved_tensors
        needs_x, *needed = ctx.needs_input_grad[:3]
        dx, curvatures = _backward(dy, x, _Numbers(*numbers), needs_x, any(needed))
        dpositive, dnegative = (
            curvatures[i].to(numbers[i].dtype).view(numbers[i].shape) if needed[i] else None for i in range(2)
        )
        return dx if needs_x else None, dpositive, dnegative, None, None


def xielu(
    x: Tensor, positive: Tensor, negative: Tensor, beta: Tensor, eps: Tensor, *, backend: Backend = "auto"
) -> Tensor:
    """`positive * x^2 + beta * x` for x > 0, else `negative * (expm1(min(x, eps)) - x) + beta * x`.

    Args:
        x: (...), any strides.
        positive: (1,) curvature for positive x.
        negative: (1,) curvature for other x.
        beta: one element, the slope at 0. Gets no gradient.
        eps: one element, a negative number near 0, which keeps the exponential's argument away from 0. Gets no
            gradient.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        (...), contiguous, in the dtype of `x`; computed in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: `positive`, `negative`, `beta` or `eps` does not have one element.
    """
    check_floats("xielu", x=x, positive=positive, negative=negative, beta=beta, eps=eps)
    for name, tensor in {"positive": positive, "negative": negative, "beta": beta, "eps": eps}.items():
        check_tensor("xielu", name, tensor, shapes=[(1,), ()], device=x.device)
    if uses_triton(x, positive, negative, backend=backend):
        return _XIELU.apply(x, positive, negative, beta.detach(), eps.detach())
    return reference(x, positive, negative, beta.detach(), eps.detach())
