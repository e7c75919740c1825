"""The 8-bit floating-point format e4m3 (Micikevicius et al. 2022), in which a KV cache takes half the memory of bf16.

4 bits of exponent, 3 of mantissa: numbers are rounded to 1 part in 16 from 2^-6 to 448. Casts saturate: larger numbers
and infinities become 448, and NaN stays NaN.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ligerzoo.kernels.jit import jit, tl

FP8 = torch.float8_e4m3fn
MAX = 448.0


def to_storage(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts to the dtype of a cache: saturating to `FP8`."""
    if dtype != FP8 or x.dtype == FP8:
        return x.to(dtype)
    return x.clamp(-MAX, MAX).to(FP8)  # torch before 2.12 casts larger numbers to NaN


def from_storage(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts to `dtype` what is stored as `FP8`; returns other tensors unchanged."""
    return x.to(dtype) if x.dtype == FP8 else x


def as_bytes(x: Tensor) -> Tensor:
    """Returns a view of an `FP8` tensor as bytes, which all versions of torch can index; other tensors unchanged."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


def is_supported(x: Tensor) -> bool:
    """Whether Triton's kernels may convert an `FP8` tensor on its device: a GPU of compute capability 8.9 or later."""
    return not x.is_cuda or _has_conversion(x.get_device())


@functools.cache
def _has_conversion(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (8, 9)


@jit
def saturated(x):
    """x in fp32, limited to the numbers of `FP8`. NaN stays NaN."""
    x = x.to(tl.float32)
    return tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
