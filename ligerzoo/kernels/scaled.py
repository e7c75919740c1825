"""A gradient made ahead of its time, multiplied by the upstream gradient when that is known.

y = x * factor, multiplied in fp32 and rounded once to the dtype asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import register, uses_triton, wide
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
    """x times a 0-d factor, in `dtype`. An op, to be called within an `autograd.Function`."""
    if not (uses_triton(x) and factor.is_cuda == x.is_cuda):
        return reference(x, factor, dtype)
    y = x.new_empty(x.shape, dtype=dtype)
    _scaled_kernel[-(-y.numel() // _BLOCK)](x.contiguous(), factor, y, y.numel(), _BLOCK, num_warps=4)
    return y
