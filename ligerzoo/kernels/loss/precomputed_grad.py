"""Gradients made ahead of backward.

A loss that is a sum has one upstream gradient for all it depends on, so its gradients can be made while it is computed,
as far as that number, and be multiplied by it when it is known:

    y = x * factor, multiplied in fp32 and rounded once to the dtype asked for.

Each gradient has a node of its own in autograd's graph, so that backward lets go of one before it makes the next. A
backward that is the only one has no more use for what was made, and multiplies in place; by 1, the factor of a loss
that is itself what backward begins with, not at all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import (
    accumulation_dtype,
    cdiv,
    multiprocessors,
    once_differentiable,
    uses_triton,
)
from ligerzoo.kernels.jit import kernel, tl
from ligerzoo.kernels.registration import is_watched, register

_BLOCK, _PROGRAMS_PER_MULTIPROCESSOR = 2048, 16


def reference(x: Tensor, factor: Tensor, y: Tensor) -> Tensor:
    """The same in plain torch: the specification, the CPU path and the tests' oracle."""
    # As a 0-d tensor the factor would be rounded to the dtype of x first.
    return torch.mul(x, factor.reshape(1).to(accumulation_dtype(x.dtype)), out=y)


@kernel
def _scaled_kernel(x_ptr, factor_ptr, y_ptr, n_elements, ANEW: tl.constexpr, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    if (factor != 1.0) | ANEW:
        for block in range(tl.program_id(0), tl.cdiv(n_elements, BLOCK), tl.num_programs(0)):
            index = (tl.zeros((BLOCK,), tl.int64) + block) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + index, mask=index < n_elements).to(tl.float32)
            tl.store(y_ptr + index, (x * factor).to(y_ptr.dtype.element_ty), mask=index < n_elements)


def _scale(x: Tensor, factor: Tensor, y: Tensor) -> Tensor:
    """Fills in y, contiguous as x is, or x itself."""
    if not (uses_triton(x) and factor.is_cuda == x.is_cuda):
        return reference(x, factor, y)
    programs = min(cdiv(y.numel(), _BLOCK), _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(x))
    _scaled_kernel[programs](x, factor, y, y.numel(), x is not y, _BLOCK, num_warps=4)
    return y


@register("scaled", fake=lambda x, dtype: x.new_empty(x.shape, dtype=dtype))
def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x times a 0-d factor, in `dtype`."""
    return _scale(x.contiguous(), factor, x.new_empty(x.shape, dtype=dtype))


def _is_private() -> bool:
    """Whether what is saved for backward comes to backward alone: not to a tracer, nor to somebody's hooks."""
    return not torch.compiler.is_compiling() and torch._C._autograd._top_saved_tensors_default_hooks(False) is None


class _PrecomputedGradient(torch.autograd.Function):
    """A zero, whose backward hands on a gradient that is already there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor, factor: Tensor | None) -> Tensor:
        ctx.save_for_backward(gradient, factor)
        ctx.dtype = x.dtype
        ctx.becomes_the_result = gradient.dtype == x.dtype and gradient.is_contiguous() and _is_private()
        return gradient.new_zeros((), dtype=accumulation_dtype(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient, factor = ctx.saved_tensors
        factor = upstream if factor is None else upstream * factor
        is_last = not is_watched(gradient, factor) and not torch._C._autograd._get_current_graph_task_keep_graph()
        if not (is_last and ctx.becomes_the_result):
            return scaled(gradient, factor, ctx.dtype), None, None
        _scale(gradient, factor, gradient)
        torch.autograd.graph.increment_version(gradient)  # should this node run again after all, autograd will refuse
        return gradient, None, None


def attach_gradients(loss: Tensor, *gradients: tuple[Tensor | None, Tensor], factor: Tensor | None = None) -> Tensor:
    """Lets backward give each tensor its gradient, times the upstream one.

    Args:
        loss: 0-d, a constant to these tensors.
        gradients: (tensor, gradient) for each, a gradient that nobody else looks at, for it is written to; None, and
            what wants no gradient, is passed over.
        factor: 0-d, multiplies all gradients as well.
    """
    for x, gradient in gradients:
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            loss = loss + _PrecomputedGradient.apply(x, gradient, factor)
    return loss
