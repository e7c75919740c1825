"""Attention of one query per sequence to its KV cache, as in each step of decoding (Dao et al. 2023, Flash-Decoding).

    y = softmax(cap(q K^T * scale)) V,   cap(s) = softcap * tanh(s / softcap) or the identity

over the keys from `first` to `last` that are not padding, and a sink: a logit of the head that takes part in the
softmax, but has no value (see `attention_sinks`). A decode step reads the whole cache and computes little, so
the keys of a head are split among programs until all multiprocessors read. Each program also returns the logarithm of
its sum of exponentials; a second kernel combines the parts, sixteen at a time. The bounds of the visible keys are read
on the device: a captured CUDA graph serves every length up to the cache's capacity, and reads only what is visible. The
result does not depend on the capacity, to the bit.

Keys and values in fp8 are converted to the dtype of the queries when they have been read, and computed with as such.

Not differentiable: caches are for inference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import (
    Backend,
    accumulation_dtype,
    cdiv,
    empty_result,
    multiprocessors,
    next_power_of_2,
    padded_size,
    uses_triton,
)
from ligerzoo.kernels.fp8 import FP8, from_storage, is_supported
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.math import softcapped
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.strided import Strided, strided_cache
from ligerzoo.tensor_checks import check_floats, check_optional_floats, check_tensor, shape_error

_BLOCK_BYTES = 16384  # of keys that a program reads at a time; shared memory holds several blocks of keys and values
PARTS = 16  # parts that are combined at a time
MIN_HEADS = 16  # rows of the smallest matrix product


def reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    first: Tensor | None = None,
    last: Tensor | None = None,
    padding_mask: Tensor | None = None,
    fallback: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`decode_attention` in plain torch: the specification, the CPU path and the test oracle."""
    wide = accumulation_dtype(q.dtype)
    n_groups = q.shape[1] // keys.shape[1]
    keys, values = (x.to(wide).repeat_interleave(n_groups, dim=1) for x in (keys, values))
    scores = (q[:, :, None].to(wide) @ keys.mT)[:, :, 0] * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = VisibleKeys(first, last, padding_mask, fallback).mask(torch.arange(keys.shape[2], device=q.device))
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if sinks is None:
        probabilities = scores.softmax(-1)
    else:
        column = sinks.to(wide)[None, :, None].expand(len(q), -1, 1)
        probabilities = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return (probabilities[:, :, None] @ values)[:, :, 0].to(q.dtype)


class VisibleKeys(NamedTuple):
    """The keys that a query attends to, see `decode_attention`."""

    first: Tensor | None = None
    last: Tensor | None = None
    padding_mask: Tensor | None = None
    fallback: Tensor | None = None

    def check(self, function: str) -> None:
        """Raises unless the indices are tensors of integers."""
        for argument, value in (("first", self.first), ("last", self.last), ("fallback", self.fallback)):
            if value is not None:
                check_tensor(function, argument, value, "integer")

    def mask(self, index: Tensor) -> Tensor:
        """Returns whether a query attends to the keys at `index`, (S,): (B or 1, S)."""
        visible = torch.ones_like(index[None], dtype=torch.bool)
        if self.first is not None:
            visible = visible & (index >= self.first[:, None])
        if self.last is not None:
            visible = visible & (index <= self.last[:, None])
        if self.padding_mask is not None:
            visible = visible & self.padding_mask
        if self.fallback is not None:
            visible = visible | (index == self.fallback[:, None])
        return visible

    def strided(self) -> _Visible:
        """The tensors and the distances of their rows, 0 for one row that describes all, as kernels read them."""
        return _Visible(*self, *(0 if x is None or len(x) == 1 else x.stride(0) for x in self))


class _Visible(NamedTuple):
    first: Tensor | None
    last: Tensor | None
    padding: Tensor | None
    fallback: Tensor | None
    first_stride: int
    last_stride: int
    padding_stride: int
    fallback_stride: int


class Split(NamedTuple):
    """The parts of S keys: their results, (B, N, n_parts, D), and the logarithms of their sums of exponentials.

    A single part has the final result, with sinks, and no `lse`.
    """

    parts: Tensor
    lse: Tensor | None
    sinks: Tensor | None
    n_parts: int
    n_keys: int


_Launch = Callable[[int, Split, int], None]
"""Launches a kernel with a number of programs, for parts of a number of blocks."""


@jit
def key_range(visible, batch, n_keys):
    """The first key that the query of a row attends to, and the one after the last."""
    first, stop = 0, n_keys
    if visible.first is not None:
        first = tl.maximum(tl.load(visible.first + batch * visible.first_stride), 0)
    if visible.last is not None:
        stop = tl.load(visible.last + batch * visible.last_stride) + 1
    return first, stop


@jit
def visible_in_block(visible, batch, index, in_range):
    """Whether each key of a block is in range and no padding; the fallback is visible even if it is padding."""
    mask = in_range
    if visible.padding is not None:
        fallback = -1
        if visible.fallback is not None:
            fallback = tl.load(visible.fallback + batch * visible.fallback_stride)
        is_token = tl.load(visible.padding + batch * visible.padding_stride + index, mask=in_range, other=0)
        mask = mask & ((is_token != 0) | (index == fallback))
    return mask


@jit
def store_part(split, part, sums, maximum, total, batch, heads, n_heads, features, head_dim):
    """Stores the result of a part and the logarithm of its sum of exponentials."""
    is_head = heads < n_heads
    row = (batch * n_heads + heads) * split.n_parts + part
    nonzero = tl.where(total == 0.0, 1.0, total)  # 0 for a part without visible keys, whose maximum is -inf
    if split.lse is not None:
        tl.store(split.lse + row, maximum + tl.log(nonzero), mask=is_head)
    if split.sinks is not None:
        sink = tl.load(split.sinks + heads, mask=is_head, other=0.0).to(tl.float32)
        nonzero = total + tl.exp(sink - maximum)
    sums = (sums / nonzero[:, None]).to(split.parts.dtype.element_ty)
    mask = is_head[:, None] & (features < head_dim)[None, :]
    tl.store(split.parts + row[:, None] * head_dim + features[None, :], sums, mask=mask)


@jit
def online_softmax(scores, maximum, total):
    """Adds a block of scores to the softmax of each row (Milakov and Gimelshein 2018).

    Returns the unnormalized probabilities, the factor of earlier sums, and the new maximum and total.
    """
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    pivot = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)  # -inf - -inf would be NaN
    probabilities = tl.exp(scores - pivot[:, None])
    decay = tl.exp(maximum - pivot)
    return probabilities, decay, new_maximum, total * decay + tl.sum(probabilities, axis=1)


@jit
def _products(q, k, PRECISION: tl.constexpr):
    """q @ k. In fp32, sums over 32 features each are added up.

    GPUs have no matrix instruction for fp32: they add the products of all features in order, and round after each. A
    rounding error of a score is a relative error of its probability.
    """
    FEATURES: tl.constexpr = 32
    GROUP: tl.constexpr = q.shape[0]
    PARTS: tl.constexpr = q.shape[1] // FEATURES
    if PRECISION == "ieee" and PARTS > 1:
        q = q.reshape(GROUP, PARTS, FEATURES).permute(1, 0, 2)
        k = k.reshape(PARTS, FEATURES, k.shape[1])
        return tl.sum(tl.dot(q, k, input_precision=PRECISION), axis=0)
    else:
        return tl.dot(q, k, input_precision=PRECISION)


class _Heads(NamedTuple):
    n_kv_heads: int
    group: int  # query heads that share a key head
    dim: int


@kernel
def _split_kernel(
    q, k, v, visible, split, heads, scale, softcap,
    BLOCKS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    PRECISION: tl.constexpr = "ieee" if q.ptr.dtype.element_ty == tl.float32 else "tf32"
    program = tl.program_id(0).to(tl.int64)
    part, row = program % split.n_parts, program // split.n_parts
    kv_head, batch = row % heads.n_kv_heads, row // heads.n_kv_heads

    first, stop = key_range(visible, batch, split.n_keys)
    begin = first + part * BLOCKS * BLOCK
    end = tl.minimum(begin + BLOCKS * BLOCK, stop)
    if begin >= stop:
        return

    members, features = tl.arange(0, GROUP), tl.arange(0, DIM)
    in_head = features < heads.dim
    query_heads = kv_head * heads.group + members
    q_mask = (members < heads.group)[:, None] & in_head[None, :]
    q_offsets = batch * q.batch_stride + query_heads[:, None] * q.head_stride + features[None, :]
    q_tile = tl.load(q.ptr + q_offsets, mask=q_mask, other=0.0)
    k_row = k.ptr + batch * k.batch_stride + kv_head * k.head_stride
    v_row = v.ptr + batch * v.batch_stride + kv_head * v.head_stride

    maximum = tl.full((GROUP,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((GROUP,), dtype=tl.float32)
    sums = tl.zeros((GROUP, DIM), dtype=tl.float32)
    for start in range(begin, end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        in_range = index < end
        k_offsets, k_mask = index[None, :] * k.token_stride + features[:, None], in_range[None, :] & in_head[:, None]
        k_tile = tl.load(k_row + k_offsets, mask=k_mask, other=0.0).to(q_tile.dtype)
        scores, _ = softcapped(_products(q_tile, k_tile, PRECISION), scale, softcap)
        scores = tl.where(visible_in_block(visible, batch, index, in_range)[None, :], scores, -float("inf"))
        probabilities, decay, maximum, total = online_softmax(scores, maximum, total)
        v_offsets, v_mask = index[:, None] * v.token_stride + features[None, :], in_range[:, None] & in_head[None, :]
        v_tile = tl.load(v_row + v_offsets, mask=v_mask, other=0.0).to(q_tile.dtype)
        sums = sums * decay[:, None] + tl.dot(probabilities.to(v_tile.dtype), v_tile, input_precision=PRECISION)

    # Members beyond the group get a head that does not exist.
    stored = tl.where(members < heads.group, query_heads, heads.n_kv_heads * heads.group)
    store_part(split, part, sums, maximum, total, batch, stored, heads.n_kv_heads * heads.group, features, heads.dim)


@kernel
def _combine_kernel(
    split, visible, sink_ptr, out_ptr, n_heads, head_dim,
    BLOCKS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first, stop = key_range(visible, row // n_heads, split.n_keys)
    features = tl.arange(0, DIM)
    in_head = features < head_dim
    n_parts = tl.cdiv(stop - first, BLOCKS * BLOCK)
    maximum, total = -float("inf"), 0.0
    sums = tl.zeros((DIM,), dtype=tl.float32)
    for start in range(0, n_parts, PARTS):
        splits = start + tl.arange(0, PARTS)
        is_part = splits < n_parts
        lse = tl.load(split.lse + row * split.n_parts + splits, mask=is_part, other=-float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(lse, axis=0))
        pivot = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
        decay, weights = tl.exp(maximum - pivot), tl.exp(lse - pivot)
        offsets = (row * split.n_parts + splits[:, None]) * head_dim + features[None, :]
        parts = tl.load(split.parts + offsets, mask=is_part[:, None] & in_head[None, :], other=0.0)
        total = total * decay + tl.sum(weights, axis=0)
        sums = sums * decay + tl.sum(weights[:, None] * parts, axis=0)
        maximum = new_maximum
    if sink_ptr is not None:
        total += tl.exp(tl.load(sink_ptr + row % n_heads).to(tl.float32) - maximum)
    tl.store(out_ptr + row * head_dim + features, (sums / total).to(out_ptr.dtype.element_ty), mask=in_head)


def attend_in_parts(
    q: Tensor, n_keys: int, visible: _Visible, sinks: Tensor | None, key_heads: int, block: int, launch: _Launch
) -> Tensor:
    """Splits the keys, `block` of which a program reads at a time, launches a kernel for the parts, and combines them.

    A sequence takes `key_heads` programs for each part.
    """
    out = empty_result(q)
    batch, n_heads, head_dim = q.shape
    blocks = blocks_per_part(multiprocessors(q), batch * key_heads)
    count = cdiv(n_keys, blocks * block)
    if count == 1:
        launch(batch * key_heads, Split(out, None, sinks, 1, n_keys), blocks)
        return out
    parts = q.new_empty(batch, n_heads, count, head_dim, dtype=torch.float32)
    split = Split(parts, parts.new_empty(parts.shape[:3]), None, count, n_keys)
    launch(batch * key_heads * count, split, blocks)
    _combine_kernel[batch * n_heads](
        split, visible, sinks, out, n_heads, head_dim, blocks, padded_size(head_dim), block, PARTS, num_warps=4
    )
    return out


@register("decode_attention", fake=lambda q: empty_result(q))
def _forward(
    q: Tensor, keys: Tensor, values: Tensor, visible: VisibleKeys, sinks: Tensor | None, scale: float,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    (_, n_heads, head_dim), (_, n_kv_heads, capacity, _) = q.shape, keys.shape
    heads = _Heads(n_kv_heads, n_heads // n_kv_heads, head_dim)
    dim_tile, keys_seen = padded_size(head_dim), visible.strided()
    block = max(16, min(64, _BLOCK_BYTES // (dim_tile * q.element_size())))
    queries, cached = Strided(q, q.stride(0), 0, q.stride(1)), (strided_cache(keys), strided_cache(values))
    tile = max(MIN_HEADS, next_power_of_2(heads.group)), dim_tile, block

    def launch(programs: int, split: Split, blocks: int) -> None:
        _split_kernel[programs](queries, *cached, keys_seen, split, heads, scale, softcap, blocks, *tile, num_warps=4)

    return attend_in_parts(q, capacity, keys_seen, sinks, n_kv_heads, block, launch)


def blocks_per_part(processors: int, heads: int) -> int:
    """Number of blocks of keys that a program reads: the fewer key heads there are in the batch, the fewer."""
    return min(8, next_power_of_2(cdiv(heads, processors)))


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    first: Tensor | None = None,
    last: Tensor | None = None,
    padding_mask: Tensor | None = None,
    fallback: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attends from one query per sequence to the keys of a cache. Not differentiable.

    Args:
        q: (B, N, D) queries, adjacent features.
        keys: (B, K, S, D), adjacent features, K a divisor of N: query heads j*N/K to (j+1)*N/K - 1 share key head j. In
            the dtype of `q` or float8_e4m3fn. GPUs of compute capability below 8.9 read a copy of the latter.
        values: (B, K, S, D), adjacent features, in the dtype of `keys`.
        first: (B or 1,) int64, index of the first key that the query attends to; None, or a negative one, for 0.
        last: (B or 1,) int64, index of the last one, at least `first` and less than S; None for S - 1.
        padding_mask: (B or 1, S) bool, False for padding, which the query does not attend to; None for no padding.
        fallback: (B or 1,) int64, index of a key from `first` to `last` that is attended to although it is padding, for
            a query that would attend to no key; -1 or None for none.
        scale: factor of the scores; None for D^-0.5.
        softcap: soft cap of the scores (Gemma Team 2024, section 2); None for no cap.
        sinks: (N,), the logit of each head's sink, of any floating-point dtype; None for no sinks.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        (B, N, D).

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: the shapes or dtypes do not match, or `backend` is unknown or does not support the tensors.
    """
    check_floats("decode_attention", q=q, keys=keys, values=values)
    visible = VisibleKeys(first, last, padding_mask, fallback)
    visible.check("decode_attention")
    shapes_match = (
        q.dim() == 3
        and keys.dim() == 4
        and keys.shape == values.shape
        and (keys.shape[0], keys.shape[3]) == (q.shape[0], q.shape[2])
        and q.shape[1] % keys.shape[1] == 0
    )
    if not shapes_match:
        expected = "shapes (B, N, D), (B, K, S, D) and (B, K, S, D), N a multiple of K"
        raise shape_error("decode_attention", expected, q=q, keys=keys, values=values)
    check_optional_floats("decode_attention", sinks=sinks)
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"decode_attention: sinks has shape {tuple(sinks.shape)}; expected {tuple(q.shape[1:2])}")
    is_read = keys.dtype == values.dtype == FP8 and is_supported(keys)
    if not is_read:
        keys, values = from_storage(keys, q.dtype), from_storage(values, q.dtype)
    if not uses_triton(*((q,) if is_read else (q, keys, values)), backend=backend):
        return reference(q, keys, values, *visible, scale, softcap, sinks)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with torch.no_grad():
        q, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, keys, values))
        sinks = None if sinks is None else sinks.contiguous()
        return _forward(q, keys, values, visible, sinks, scale, softcap)
