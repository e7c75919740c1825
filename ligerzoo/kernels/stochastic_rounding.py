"""Rounds fp32 to bf16 stochastically (Gupta et al. 2015), so that small updates of bf16 weights survive in expectation.

A number between the bf16 neighbours a < x < b becomes b with probability (x - a) / (b - a), else a: the expectation is
x. With w, 16 random bits, the bits of the result are

    (bits(x) + w) & 0xFFFF0000,

since bf16 is the upper half of fp32: the sum carries into the upper half with the probability of the lower one. The
bits come from `philox`, so a run can be repeated and resumed bit for bit. Infinities and NaN stay what they are; a
number between the largest bf16 and infinity may become infinite, as in rounding to the nearest.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ligerzoo.checks import COUNT, check, integer
from ligerzoo.kernels.dispatch import Backend, cdiv, uses_triton
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.philox import random_block, random_words
from ligerzoo.kernels.registration import needs_dispatch
from ligerzoo.tensor_checks import check_floats, shape_or_dtype_error

FIRST_KEY = 2**32
"""Smallest key. Larger integers have one type in Triton, 64 bits, so that keys share a compiled kernel."""

_BLOCK, _WARPS = 1024, 4


def to_bf16(x: Tensor, words: Tensor) -> Tensor:
    """Rounds fp32 to bf16 with the lower 16 bits of the words, int64, of the same shape."""
    bits = x.view(torch.int32) + (words & 0xFFFF).to(torch.int32) & -65536
    return torch.where(x.isnan(), x, bits.view(torch.float32)).to(torch.bfloat16)


def words_like(x: Tensor, key: int, step: Tensor, first_group: int) -> Tensor:
    """One random word for each element of x, int64, in the shape of x."""
    keys = torch.full((1,), key, dtype=torch.int64, device=x.device)
    return random_words(keys, step.reshape(1).long(), x.numel(), first_group).view(x.shape)


def store(target: Tensor, value: Tensor, skip: Tensor | None) -> None:
    """Copies the value to the target, unless `skip` is not 0. No host sync."""
    target.copy_(value if skip is None else torch.where(skip == 0, value.to(target.dtype), target))


def reference(
    source: Tensor, target: Tensor, step: Tensor, key: int, first_group: int = 0, skip: Tensor | None = None
) -> None:
    """`round_stochastically` in plain torch: the specification, the CPU path and the test oracle."""
    store(target, to_bf16(source, words_like(source, key, step, first_group)), skip)


@jit
def round_to_bf16(x, words):
    """Rounds fp32 to bf16 with the lower 16 bits of the words, uint32."""
    bits = x.to(tl.int32, bitcast=True) + (words & 0xFFFF).to(tl.int32)
    bits = tl.where(x == x, bits, 0x7FC00000)  # the sum could carry out of a NaN
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@kernel
def _kernel(source_ptr, target_ptr, step_ptr, skip_ptr, key, first_group, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    if skip_ptr is not None:
        n = tl.where(tl.load(skip_ptr) == 0, n, 0)
    mask = offsets < n
    words = random_block(key, tl.load(step_ptr).to(tl.int64), first_group + start // 4, BLOCK)
    x = tl.load(source_ptr + offsets, mask=mask, other=0.0)
    tl.store(target_ptr + offsets, round_to_bf16(x, words), mask=mask)


def check_key(name: str, key: int, first_group: int) -> None:
    """Raises unless the arguments are those of a stream of random bits."""
    check(name, integer(FIRST_KEY), key=key)
    check(name, COUNT, first_group=first_group)


def round_stochastically(
    source: Tensor,
    target: Tensor,
    step: Tensor,
    *,
    key: int,
    first_group: int = 0,
    skip: Tensor | None = None,
    backend: Backend = "auto",
) -> None:
    """Writes fp32 numbers to a bf16 tensor in place, rounded stochastically. No host sync.

    Args:
        source: fp32, any shape.
        target: bf16, the shape of `source`.
        step: 0-d, an integer from 0 to 2^24 in any dtype: other steps have independent random bits.
        key: 2^32 or more: other keys have independent random bits.
        first_group: number of groups of 4 elements before `source`, if it is a shard of a larger tensor.
        skip: 0-d or (1,); nothing is written if it is not 0.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Raises:
        ValueError: shapes or dtypes are wrong.
    """
    check_floats("round_stochastically", source=source, target=target)
    check_key("round_stochastically", key, first_group)
    if source.shape != target.shape or source.dtype != torch.float32 or target.dtype != torch.bfloat16:
        expected = "fp32 and bf16 tensors of the same shape"
        raise shape_or_dtype_error("round_stochastically", expected, source=source, target=target)
    is_dense = source.is_contiguous() and target.is_contiguous()
    if not (uses_triton(source, target, backend=backend) and is_dense) or needs_dispatch(source, target):
        with torch.no_grad():
            reference(source, target, step, key, first_group, skip)
    elif source.numel():
        with torch.cuda.device(source.device if source.is_cuda else -1):
            n, programs = source.numel(), cdiv(source.numel(), _BLOCK)
            _kernel[programs](source, target, step, skip, key, first_group, n, _BLOCK, num_warps=_WARPS)
        increment_version(target)
