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

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import (
    Backend,
    accumulation_dtype,
    cdiv,
    multiprocessors,
    next_power_of_2,
    padded_size,
    uses_triton,
)
from ligerzoo.kernels.fp8 import FP8, from_storage, is_supported
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.math import softcapped
from ligerzoo.kernels.registration import register
from ligerzoo.tensor_checks import check_floats, check_optional_floats, check_tensor

_BLOCK_BYTES = 16384  # of keys that a program reads at a time; shared memory holds several blocks of keys and values
PARTS = 16  # parts that are combined at a time
_MIN_HEADS = 16  # rows of the smallest matrix product


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
    visible = visible_keys(torch.arange(keys.shape[2], device=q.device), first, last, padding_mask, fallback)
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if sinks is None:
        probabilities = scores.softmax(-1)
    else:
        column = sinks.to(wide)[None, :, None].expand(len(q), -1, 1)
        probabilities = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return (probabilities[:, :, None] @ values)[:, :, 0].to(q.dtype)


def visible_keys(
    index: Tensor, first: Tensor | None, last: Tensor | None, padding_mask: Tensor | None, fallback: Tensor | None
) -> Tensor:
    """Returns whether a query attends to the keys at `index`, (S,): (B or 1, S). See `decode_attention`."""
    visible = torch.ones_like(index[None], dtype=torch.bool)
    if first is not None:
        visible = visible & (index >= first[:, None])
    if last is not None:
        visible = visible & (index <= last[:, None])
    if padding_mask is not None:
        visible = visible & padding_mask
    if fallback is not None:
        visible = visible | (index == fallback[:, None])
    return visible


@jit
def key_range(first_ptr, last_ptr, batch, first_stride, last_stride, n_keys):
    """The first key that the query of a row attends to, and the one after the last."""
    first, stop = 0, n_keys
    if first_ptr is not None:
        first = tl.maximum(tl.load(first_ptr + batch * first_stride), 0)
    if last_ptr is not None:
        stop = tl.load(last_ptr + batch * last_stride) + 1
    return first, stop


@jit
def visible_in_block(padding_ptr, fallback_ptr, batch, padding_stride, fallback_stride, index, in_range):
    """Whether each key of a block is in range and no padding; the fallback is visible even if it is padding."""
    visible = in_range
    if padding_ptr is not None:
        fallback = -1
        if fallback_ptr is not None:
            fallback = tl.load(fallback_ptr + batch * fallback_stride)
        is_token = tl.load(padding_ptr + batch * padding_stride + index, mask=in_range, other=0)
        visible = visible & ((is_token != 0) | (index == fallback))
    return visible


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


@kernel
def _split_kernel(
    q_ptr, k_ptr, v_ptr, first_ptr, last_ptr, padding_ptr, fallback_ptr, sink_ptr, out_ptr, lse_ptr,
    q_batch_stride, q_head_stride, k_batch_stride, k_head_stride, k_key_stride,
    v_batch_stride, v_head_stride, v_key_stride, first_stride, last_stride, padding_stride, fallback_stride,
    scale, softcap, n_kv_heads, group, head_dim, n_keys,
    n_splits, BLOCKS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    split = program % n_splits
    kv_head = (program // n_splits) % n_kv_heads
    batch = program // n_splits // n_kv_heads

    first, stop = key_range(first_ptr, last_ptr, batch, first_stride, last_stride, n_keys)
    begin = first + split * BLOCKS * BLOCK
    end = tl.minimum(begin + BLOCKS * BLOCK, stop)
    if begin >= stop:
        return

    members = tl.arange(0, GROUP)  # query heads that share the key head
    features = tl.arange(0, DIM)
    in_head = features < head_dim
    heads = kv_head * group + members
    q_mask = (members < group)[:, None] & in_head[None, :]
    q_offsets = batch * q_batch_stride + heads[:, None] * q_head_stride + features[None, :]
    q = tl.load(q_ptr + q_offsets, mask=q_mask, other=0.0)
    k_row = k_ptr + batch * k_batch_stride + kv_head * k_head_stride
    v_row = v_ptr + batch * v_batch_stride + kv_head * v_head_stride

    maximum = tl.full((GROUP,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((GROUP,), dtype=tl.float32)
    sums = tl.zeros((GROUP, DIM), dtype=tl.float32)
    for start in range(begin, end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        in_range = index < end
        k = tl.load(k_row + index[None, :] * k_key_stride + features[:, None],
                    mask=in_range[None, :] & in_head[:, None], other=0.0).to(q.dtype)  # fmt: skip
        scores, _ = softcapped(_products(q, k, PRECISION), scale, softcap)
        visible = visible_in_block(
            padding_ptr, fallback_ptr, batch, padding_stride, fallback_stride, index, in_range
        )  # fmt: skip
        scores = tl.where(visible[None, :], scores, -float("inf"))
        probabilities, decay, maximum, total = online_softmax(scores, maximum, total)
        v = tl.load(v_row + index[:, None] * v_key_stride + features[None, :],
                    mask=in_range[:, None] & in_head[None, :], other=0.0).to(q.dtype)  # fmt: skip
        sums = sums * decay[:, None] + tl.dot(probabilities.to(v.dtype), v, input_precision=PRECISION)

    row = (batch * n_kv_heads * group + heads) * n_splits + split
    nonzero = tl.where(total == 0.0, 1.0, total)  # 0 for a split without visible keys, whose maximum is -inf
    if lse_ptr is not None:
        tl.store(lse_ptr + row, maximum + tl.log(nonzero), mask=members < group)
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + heads, mask=members < group, other=0.0).to(tl.float32)
        nonzero = total + tl.exp(sink - maximum)
    sums = sums / nonzero[:, None]
    tl.store(out_ptr + row[:, None] * head_dim + features[None, :], sums.to(out_ptr.dtype.element_ty), mask=q_mask)


@kernel
def combine_kernel(
    parts_ptr, lse_ptr, first_ptr, last_ptr, sink_ptr, out_ptr, first_stride, last_stride, n_heads, head_dim, n_keys,
    n_splits, BLOCKS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch = row // n_heads
    first, stop = key_range(first_ptr, last_ptr, batch, first_stride, last_stride, n_keys)
    features = tl.arange(0, DIM)
    in_head = features < head_dim
    n_parts = tl.cdiv(stop - first, BLOCKS * BLOCK)
    maximum, total = -float("inf"), 0.0
    sums = tl.zeros((DIM,), dtype=tl.float32)
    for start in range(0, n_parts, PARTS):
        splits = start + tl.arange(0, PARTS)
        is_part = splits < n_parts
        lse = tl.load(lse_ptr + row * n_splits + splits, mask=is_part, other=-float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(lse, axis=0))
        pivot = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
        decay, weights = tl.exp(maximum - pivot), tl.exp(lse - pivot)
        offsets = (row * n_splits + splits[:, None]) * head_dim + features[None, :]
        parts = tl.load(parts_ptr + offsets, mask=is_part[:, None] & in_head[None, :], other=0.0)
        total = total * decay + tl.sum(weights, axis=0)
        sums = sums * decay + tl.sum(weights[:, None] * parts, axis=0)
        maximum = new_maximum
    if sink_ptr is not None:
        total += tl.exp(tl.load(sink_ptr + row % n_heads).to(tl.float32) - maximum)
    tl.store(out_ptr + row * head_dim + features, (sums / total).to(out_ptr.dtype.element_ty), mask=in_head)


def _allocate(q: Tensor) -> Tensor:
    return q.new_empty(q.shape)


@register("decode_attention", fake=_allocate)
def _forward(
    q: Tensor, keys: Tensor, values: Tensor, first: Tensor | None, last: Tensor | None,
    padding_mask: Tensor | None, fallback: Tensor | None, scale: float, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    out = _allocate(q)
    batch, n_heads, head_dim = q.shape
    n_kv_heads, capacity = keys.shape[1:3]
    group = n_heads // n_kv_heads
    dim_tile = padded_size(head_dim)
    block = max(16, min(64, _BLOCK_BYTES // (dim_tile * q.element_size())))
    blocks = blocks_per_part(multiprocessors(q), batch * n_kv_heads)
    n_splits = cdiv(capacity, blocks * block)
    parts = out if n_splits == 1 else q.new_empty(batch, n_heads, n_splits, head_dim, dtype=torch.float32)
    lse = q.new_empty(batch, n_heads, n_splits, dtype=torch.float32) if n_splits > 1 else None
    bounds = [0 if x is None or len(x) == 1 else x.stride(0) for x in (first, last, padding_mask, fallback)]
    _split_kernel[batch * n_kv_heads * n_splits](
        q, keys, values, first, last, padding_mask, fallback, sinks if n_splits == 1 else None, parts, lse,
        *q.stride()[:2], *keys.stride()[:3], *values.stride()[:3], *bounds,
        scale, softcap, n_kv_heads, group, head_dim, capacity,
        n_splits, blocks, max(_MIN_HEADS, next_power_of_2(group)), dim_tile, block,
        "ieee" if q.dtype == torch.float32 else "tf32", num_warps=4,
    )  # fmt: skip
    if lse is not None:
        combine_kernel[batch * n_heads](
            parts, lse, first, last, sinks, out, *bounds[:2], n_heads, head_dim, capacity, n_splits, blocks, dim_tile,
            block, PARTS, num_warps=4,
        )  # fmt: skip
    return out


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
    for argument, value in (("first", first), ("last", last), ("fallback", fallback)):
        if value is not None:
            check_tensor("decode_attention", argument, value, "integer")
    shapes_match = (
        q.dim() == 3
        and keys.dim() == 4
        and keys.shape == values.shape
        and (keys.shape[0], keys.shape[3]) == (q.shape[0], q.shape[2])
        and q.shape[1] % keys.shape[1] == 0
    )
    if not shapes_match:
        raise ValueError(
            f"decode_attention: q is {tuple(q.shape)}, keys {tuple(keys.shape)} and values {tuple(values.shape)}; "
            "expected shapes (B, N, D), (B, K, S, D) and (B, K, S, D), N a multiple of K"
        )
    check_optional_floats("decode_attention", sinks=sinks)
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"decode_attention: sinks has shape {tuple(sinks.shape)}; expected {tuple(q.shape[1:2])}")
    is_read = keys.dtype == values.dtype == FP8 and is_supported(keys)
    if not is_read:
        keys, values = from_storage(keys, q.dtype), from_storage(values, q.dtype)
    if not uses_triton(*((q,) if is_read else (q, keys, values)), backend=backend):
        return reference(q, keys, values, first, last, padding_mask, fallback, scale, softcap, sinks)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with torch.no_grad():
        q, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, keys, values))
        sinks = None if sinks is None else sinks.contiguous()
        return _forward(q, keys, values, first, last, padding_mask, fallback, scale, softcap, sinks)
