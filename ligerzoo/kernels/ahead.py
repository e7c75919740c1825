"""Gradients made ahead of backward.

A loss that is a sum has one upstream gradient for all it depends on, so its gradients can be made while it is computed,
as far as that number, and be multiplied by it when it is known:

    y = x * factor, multiplied in fp32 and rounded once to the dtype asked for.

Each gradient has a node of its own in autograd's graph, so that backward lets go of one before it makes the next.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import cdiv, once_differentiable, register, uses_triton, wide
from ligerzoo.kernels.jit import kernel, tl

_BLOCK = 2048


def reference(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The same in plain torch: the specification, the CPU path and the tests' oracle."""
    # As a 0-d tensor the factor would be rounded to the dtype of x first.
    return torch.mul(x, factor.reshape(1).to(wide(x.dtype)), out=x.new_empty(x.shape, dtype=dtype))


@kernel
def _scaled_kernel(x_ptr, factor_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < n_elements).to(tl.float32)
    y = x * tl.load(factor_ptr).to(tl.float32)
    tl.store(y_ptr + index, y.to(y_ptr.dtype.element_ty), mask=index < n_elements)


def _scaled_fake(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@register("scaled(Tensor x, Tensor factor, ScalarType dtype) -> Tensor", fake=_scaled_fake)
def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x times a 0-d factor, in `dtype`."""
    if not (uses_triton(x) and factor.is_cuda == x.is_cuda):
        return reference(x, factor, dtype)
    y = x.new_empty(x.shape, dtype=dtype)
    _scaled_kernel[cdiv(y.numel(), _BLOCK)](x.contiguous(), factor, y, y.numel(), _BLOCK, num_warps=4)
    return y


class _Carrier(torch.autograd.Function):
    """A zero, whose backward hands on a gradient that is already there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor, factor: Tensor | None) -> Tensor:
        ctx.save_for_backward(gradient, factor)
        ctx.dtype = x.dtype
        return gradient.new_zeros((), dtype=wide(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient, factor = ctx.saved_tensors
        return scaled(gradient, upstream if factor is None else upstream * factor, ctx.dtype), None, None


def with_gradients(loss: Tensor, *gradients: tuple[Tensor | None, Tensor], factor: Tensor | None = None) -> Tensor:
    """Lets backward give each tensor its gradient, times the upstream one.

    Args:
        loss: 0-d, a constant to these tensors.
        gradients: (tensor, gradient) for each; None, and what wants no gradient, is passed over.
        factor: 0-d, multiplies all gradients as well.
    """
    for x, gradient in gradients:
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            loss = loss + _Carrier.apply(x, gradient, factor)
    return loss
