"""What all kernel files share: when Triton runs, how an op is registered, and some launch helpers.

Ops are registered with `torch.library.Library` and differentiated by a `torch.autograd.Function` around them: the
cheapest registration (24 us for a forward and backward, against 39 to 44 us for `custom_op` and `triton_op`) that still
passes opcheck, full-graph compilation with training, and export. Plain tensors go past the dispatcher altogether.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ligerzoo.kernels.jit import INTERPRETING
from ligerzoo.kernels.registration import _library
from ligerzoo.kernels.registration import is_watched as is_watched

Backend = Literal["auto", "triton", "torch"]
"""What computes an operation: Triton where it can ("auto"), Triton or an error, or the plain-torch reference."""

DEBUG = os.environ.get("LIGERZOO_DEBUG") == "1"
"""Checks that would make the host wait for the GPU (a label outside the vocabulary, for example) run only when this is
set."""

_FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_backend(backend: Backend) -> Backend:
    """The backend; a ValueError if there is none of that name."""
    if backend not in ("auto", "triton", "torch"):
        raise ValueError(f'backend={backend!r}; expected "auto", "triton" or "torch"')
    return backend


def uses_triton(*tensors: Tensor, backend: Backend = "auto") -> bool:
    """Whether the Triton kernels serve these tensors: on a GPU, in a dtype whose arithmetic fp32 covers.

    Raises:
        ValueError: `backend` is unknown, or is "triton" and Triton can't serve the tensors.
    """
    check_backend(backend)
    served = all((t.is_cuda or INTERPRETING) and t.dtype in _FUSED_DTYPES for t in tensors)
    if backend == "auto":
        return served
    if backend == "triton" and not served:
        got = ", ".join(f"{t.dtype} on {t.device}" for t in tensors)
        raise ValueError(
            f'backend="triton" with tensors {got}; expected fp32, bf16 or fp16 on a GPU, or backend="auto"'
        )
    return backend == "triton"


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that reductions over `dtype` are computed in: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def autocast(*tensors: Any) -> Any:
    """The tensors (or Nones) as `torch.autocast` would hand them to a matrix product: cast where it is on, else
    untouched."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a backward refuse `create_graph=True`, where autograd would take its results for constants.

    torch's decorator of this name lets that pass whenever the upstream gradient is itself a constant, as a loss's is.
    """

    @functools.wraps(backward)
    def checked(*args: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "a fused operation can be differentiated only once; its file's reference, any number of times"
            )
        return backward(*args)

    return checked


def register(schema: str, *, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Registers the decorated function as the op `ligerzoo::<schema>`, for tensors on all devices but meta.

    The result is to be called where autograd does not record, within an `autograd.Function`. It calls the function
    itself, or the op where something watches or replaces operations: a compiler, a dispatch mode, a tensor subclass.

    Args:
        schema: the op's signature in PyTorch's schema language; it must be functional (nothing is mutated).
        fake: the same function on shapes and dtypes alone; contiguous results, as the op itself gives.
    """
    name = schema.split("(", 1)[0]

    def decorate(function: Callable[..., Any]) -> Any:
        def on_the_tensors_device(first: Tensor, *args: Any) -> Any:
            # Triton launches on the current device. A context manager per call would cost more than the launch.
            if first.is_cuda and first.get_device() != torch.cuda.current_device():
                with torch.cuda.device(first.device):
                    return function(first, *args)
            return function(first, *args)

        _library.define(schema)
        for device in ("CPU", "CUDA", "MPS", "XPU"):
            _library.impl(name, on_the_tensors_device, device)
        torch.library.register_fake(f"ligerzoo::{name}", fake, lib=_library)
        op = getattr(torch.ops.ligerzoo, name).default

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            return op(*args) if is_watched(*args) or args[0].is_meta else on_the_tensors_device(*args)

        return call

    return decorate


def as_rows(x: Tensor) -> Tensor:
    """(..., H) -> (rows, H) with unit stride along H: a view where the strides allow it, else a copy."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def multiprocessors(tensor: Tensor) -> int:
    """How many programs of a persistent kernel run side by side on the tensor's device."""
    return _multiprocessors(tensor.get_device()) if tensor.is_cuda else 2


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def is_hopper(tensor: Tensor) -> bool:
    """Whether the tensor is on a GPU with Hopper's matrix products and tensor copies, for which tiles were chosen."""
    return tensor.is_cuda and _capability(tensor.get_device())[0] == 9


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
