"""Gradients computed in the forward pass.

A scalar loss has one upstream gradient. So its gradients can be computed along with it, up to that factor, and backward
multiplies them by it:

    y = x * factor, multiplied in fp32 and rounded once to the requested dtype.

Each gradient has a separate node in autograd's graph, so backward frees one before it computes the next. If backward
runs once, it multiplies in place. A factor of 1, which is what `loss.backward()` passes, costs no multiplication.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.kernels.autograd import FusedContext, FusedFunction, RecordedContext, once_differentiable, under_transform
from ligerzoo.kernels.dispatch import accumulation_dtype, cdiv, empty_result, multiprocessors, uses_triton
from ligerzoo.kernels.jit import kernel, tl
from ligerzoo.kernels.registration import needs_dispatch, register

_BLOCK, _PROGRAMS_PER_MULTIPROCESSOR = 2048, 16


def reference(x: Tensor, factor: Tensor, y: Tensor) -> Tensor:
    """Writes x * factor to y in plain torch: the specification, the CPU path and the tests' oracle."""
    # A 0-d factor would be rounded to the dtype of x first.
    return torch.mul(x, factor.reshape(1).to(accumulation_dtype(x.dtype)), out=y)


@kernel
def _scaled_kernel(x_ptr, factor_ptr, y_ptr, n_elements, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    if (factor != 1.0) | COPIES:
        for block in range(tl.program_id(0), tl.cdiv(n_elements, BLOCK), tl.num_programs(0)):
            index = (tl.zeros((BLOCK,), tl.int64) + block) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + index, mask=index < n_elements).to(tl.float32)
            tl.store(y_ptr + index, (x * factor).to(y_ptr.dtype.element_ty), mask=index < n_elements)


def _scale(x: Tensor, factor: Tensor, y: Tensor) -> Tensor:
    """Writes x * factor to y, which may be x. Both are contiguous."""
    if y.is_meta:
        return y
    if not (uses_triton(x) and factor.is_cuda == x.is_cuda):
        return reference(x, factor, y)
    programs = min(cdiv(y.numel(), _BLOCK), _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(x))
    _scaled_kernel[programs](x, factor, y, y.numel(), x is not y, _BLOCK, num_warps=4)
    return y


@register("scaled", fake=lambda x, dtype: empty_result(x, dtype))
def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x times a 0-d factor, in `dtype`."""
    return _scale(x.contiguous(), factor, empty_result(x, dtype))


def _is_private() -> bool:
    """Whether only backward sees the tensors saved for it: no tracer, no saved-tensor hooks."""
    return not torch.compiler.is_compiling() and torch._C._autograd._top_saved_tensors_default_hooks(False) is None


class _PrecomputedGradient(FusedFunction):
    """Returns 0. Backward returns a gradient that exists already, times the upstream one."""

    @staticmethod
    def forward(ctx: FusedContext, x: Tensor, gradient: Tensor, factor: Tensor | None) -> Tensor:
        ctx.save_for_backward(gradient, factor)
        ctx.dtype = x.dtype
        ctx.can_reuse = gradient.dtype == x.dtype and gradient.is_contiguous() and _is_private()
        return gradient.new_zeros((), dtype=accumulation_dtype(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient, factor = ctx.saved_tensors
        factor = upstream if factor is None else upstream * factor
        is_unobserved = gradient.is_meta or not needs_dispatch(gradient, factor)
        is_last = is_unobserved and not torch._C._autograd._get_current_graph_task_keep_graph()
        if not (is_last and ctx.can_reuse) or isinstance(ctx, RecordedContext):  # for one of several samples
            return scaled(gradient, factor, ctx.dtype), None, None
        _scale(gradient, factor, gradient)
        torch.autograd.graph.increment_version(gradient)  # autograd raises an error if this node runs again
        return gradient, None, None


def precomputes_gradients() -> bool:
    """Whether a forward should compute gradients for `attach_gradients`.

    Not without gradients, nor under a transform of torch.func: only backward knows which gradients it needs.
    """
    return torch.is_grad_enabled() and not under_transform()


def attach_gradients(loss: Tensor, *gradients: tuple[Tensor | None, Tensor], factor: Tensor | None = None) -> Tensor:
    """Returns `loss` such that backward gives each tensor its gradient, times the upstream one.

    Args:
        loss: 0-d, not connected to these tensors in autograd's graph.
        gradients: (tensor, gradient) pairs. Backward may overwrite a gradient. None, and tensors that do not require a
            gradient, are skipped.
        factor: 0-d, multiplies all gradients too; None for 1.
    """
    for x, gradient in gradients:
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            loss = loss + _PrecomputedGradient.apply(x, gradient, factor)
    return loss
