"""Adds the parts of a sum, such as the gradients of several processes, and scales it.

y = s (x_1 + x_2 + ... + x_P), in this order, in fp32 (fp64 for fp64), rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, cdiv, uses_triton
from ligerzoo.kernels.jit import kernel, tl
from ligerzoo.tensor_checks import check_floats, shape_error

_BLOCK, _WARPS = 4096, 8


def reference(parts: Tensor, out: Tensor, scale: float) -> None:
    """`add_parts` in plain torch: the specification, the CPU path and the test oracle."""
    total = parts[0].to(accumulation_dtype(parts.dtype), copy=True)
    for part in parts[1:]:
        total += part
    out.copy_(total.mul_(scale))


@kernel
def _kernel(parts_ptr, out_ptr, scale, stride, count, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    total = tl.load(parts_ptr + offsets, mask=mask).to(tl.float32)
    for _ in range(1, count):
        parts_ptr += stride
        total += tl.load(parts_ptr + offsets, mask=mask).to(tl.float32)
    tl.store(out_ptr + offsets, total * scale, mask=mask)


def add_parts(parts: Tensor, out: Tensor, scale: float = 1.0, *, backend: Backend = "auto") -> None:
    """Writes the scaled sum of the rows of `parts` to `out`. Not differentiable.

    Args:
        parts: (P, n), P > 0, any distance between rows that are contiguous.
        out: (n,), contiguous, of any floating-point dtype.
        scale: factor of the sum.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Raises:
        ValueError: shapes or dtypes are wrong.
    """
    check_floats("add_parts", parts=parts, out=out)
    if parts.ndim != 2 or not len(parts) or out.shape != parts.shape[1:]:
        raise shape_error("add_parts", "(P, n) with P > 0, and (n,)", parts=parts, out=out)
    is_dense = parts.stride(1) == 1 and out.is_contiguous()
    if not (uses_triton(parts, out, backend=backend) and is_dense):
        with torch.no_grad():
            reference(parts, out, scale)
    elif out.numel():
        with torch.cuda.device(out.device if out.is_cuda else -1):
            sizes = parts.stride(0), len(parts), out.numel()
            _kernel[cdiv(out.numel(), _BLOCK)](parts, out, scale, *sizes, _BLOCK, num_warps=_WARPS)
        increment_version(out)
