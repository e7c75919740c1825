"""Helpers of all kernel files: when Triton runs, dtypes and autocast, and launch arithmetic."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ligerzoo.checks import check, one_of
from ligerzoo.kernels.jit import INTERPRETING

Backend = Literal["auto", "triton", "torch"]
"""What computes an operation: Triton where supported ("auto"), Triton or an error, or the plain-torch reference."""

DEBUG = os.environ.get("LIGERZOO_DEBUG") == "1"
"""Enables checks that need a host sync, for example that each label is inside the vocabulary."""

_FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


_BACKENDS = one_of(get_args(Backend))._replace(expected='"auto", "triton" or "torch"')


def check_backend(backend: Backend) -> Backend:
    """Returns the backend.

    Raises:
        ValueError: the backend is unknown.
    """
    if backend not in _BACKENDS.choices:
        check(None, _BACKENDS, backend=backend)
    return backend


class GPU(NamedTuple):
    """A GPU's properties that choose kernels and sizes.

    Attributes:
        capability: the major compute capability.
        multiprocessors: the number of multiprocessors.
    """

    capability: int
    multiprocessors: int


HOPPER = GPU(9, 132)
"""H100 and H200."""

_SIMULATED: ContextVar[GPU | None] = ContextVar("_SIMULATED", default=None)


@contextlib.contextmanager
def simulated_gpu(gpu: GPU) -> Iterator[None]:
    """Within this context of the current thread, meta tensors take the path of tensors on this GPU: fused operations,
    its tile sizes."""
    token = _SIMULATED.set(gpu)
    try:
        yield
    finally:
        _SIMULATED.reset(token)


def _simulated(tensor: Tensor) -> GPU | None:
    """The GPU that a tensor is simulated to be on; None for tensors with values, and in compiled code."""
    return _SIMULATED.get() if tensor.is_meta and not torch.compiler.is_compiling() else None


def uses_triton(*tensors: Tensor, backend: Backend = "auto") -> bool:
    """Whether the Triton kernels run on these tensors: "auto" runs them for fp32, bf16 and fp16 on a GPU.

    Raises:
        ValueError: `backend` is unknown, or is "triton" and the kernels do not support the tensors.
    """
    is_fused = _are_fused(tensors)
    if backend == "auto":
        return is_fused
    if check_backend(backend) == "triton" and not is_fused:
        got = ", ".join(f"{t.dtype} on {t.device}" for t in tensors)
        raise ValueError(
            f'backend="triton" with tensors {got}; expected fp32, bf16 or fp16 on a GPU, or backend="auto"'
        )
    return backend == "triton"


def _are_fused(tensors: Iterable[Tensor]) -> bool:
    for t in tensors:  # a loop takes half the time of `all`
        on_gpu = t.is_cuda or INTERPRETING or (t.is_meta and _simulated(t) is not None)
        if not on_gpu or t.dtype not in _FUSED_DTYPES:
            return False
    return True


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that reductions over `dtype` are computed in: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def autocast(*tensors: Any) -> Any:
    """Casts the tensors as `torch.autocast` casts the inputs of a matrix product; returns them unchanged if it is off.

    Nones stay None, and fp64 stays fp64.
    """
    dtype = _autocast_dtype(tensors[0].device.type)
    if dtype is None:
        return tensors
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def dtype_of_products(x: Tensor) -> torch.dtype:
    """The dtype in which x enters a matrix product, see `autocast`."""
    dtype = _autocast_dtype(x.device.type)
    return x.dtype if dtype is None or x.dtype == torch.float64 else dtype


def _autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of `torch.autocast` on a kind of device; None if it is off."""
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None


def empty_result(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialized, contiguous tensor of the shape of x, in half the time of `new_empty`."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def empty_gradient(t: Tensor, needed: bool) -> Tensor:
    """An uninitialized, contiguous gradient of `t`; without elements if not needed."""
    return empty_result(t) if needed else t.new_empty(0)


def as_rows(x: Tensor) -> Tensor:
    """(..., H) -> (rows, H) with unit stride along H: a view if the strides allow it, else a copy."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def cdiv(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def padded_size(*sizes: int) -> int:
    """The least side of a tile in a matrix product that holds these sizes: a power of 2, at least 16."""
    return max(16, next_power_of_2(max(sizes)))


def multiprocessors(tensor: Tensor) -> int:
    """The number of multiprocessors of the tensor's GPU; 2 on a CPU, for the interpreter."""
    if (gpu := _simulated(tensor)) is not None:
        return gpu.multiprocessors
    return _multiprocessors(tensor.get_device()) if tensor.is_cuda else 2


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def is_hopper(tensor: Tensor) -> bool:
    """Whether the tensor is on a Hopper GPU, whose matrix and tensor-copy units our tile sizes are chosen for."""
    if (gpu := _simulated(tensor)) is not None:
        return gpu.capability == 9
    return tensor.is_cuda and _capability(tensor.get_device())[0] == 9


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
