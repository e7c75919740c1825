"""Attention of one query per sequence to a cache of latent vectors, as in each step of decoding (DeepSeek-V2, 2024).

    y_h = softmax((q_h . c + r_h . k) * scale) c

over the tokens from `first` to `last` that are not padding: attention of all heads to one key-value head, with keys
[c | k] and values c. The query is q = [q | r]; see `ligerzoo.layers.LatentAttention` for how these products replace
keys and values per head.

A program processes a block of heads and some of the keys, and reads each latent vector once, for scores and sums. The
parts are combined as in `decode_attention`, whose bounds, padding and fp8 caches work in the same way.

Not differentiable: caches are for inference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.kernels.decode_attention import (
    PARTS,
    blocks_per_part,
    combine_kernel,
    key_range,
    online_softmax,
    visible_in_block,
    visible_keys,
)
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
from ligerzoo.kernels.jit import kernel, tl
from ligerzoo.kernels.registration import register
from ligerzoo.tensor_checks import check_floats, check_tensor

_BLOCK_BYTES = 32768  # of latent vectors that a program reads at a time
_MIN_HEADS = 16  # rows of the smallest matrix product
_MAX_HEADS = 32  # more would not fit in the registers of a program, with 512 sums each


def reference(
    q: Tensor,
    q_rope: Tensor,
    latents: Tensor,
    k_rope: Tensor,
    first: Tensor | None = None,
    last: Tensor | None = None,
    padding_mask: Tensor | None = None,
    fallback: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """`latent_decode_attention` in plain torch: the specification, the CPU path and the test oracle."""
    wide = accumulation_dtype(q.dtype)
    values = latents.to(wide)
    scores = (q.to(wide) @ values.mT + q_rope.to(wide) @ k_rope.to(wide).mT) * scale
    visible = visible_keys(torch.arange(latents.shape[1], device=q.device), first, last, padding_mask, fallback)
    return (scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1) @ values).to(q.dtype)


@kernel
def _split_kernel(
    q_ptr, r_ptr, c_ptr, k_ptr, first_ptr, last_ptr, padding_ptr, fallback_ptr, out_ptr, lse_ptr,
    q_batch_stride, q_head_stride, r_batch_stride, r_head_stride, c_batch_stride, c_key_stride,
    k_batch_stride, k_key_stride, first_stride, last_stride, padding_stride, fallback_stride,
    scale, n_heads, rank, rope_dim, n_keys, n_head_blocks, n_splits,
    BLOCKS: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    split = program % n_splits
    head_block = (program // n_splits) % n_head_blocks
    batch = program // n_splits // n_head_blocks

    first, stop = key_range(first_ptr, last_ptr, batch, first_stride, last_stride, n_keys)
    begin = first + split * BLOCKS * BLOCK
    end = tl.minimum(begin + BLOCKS * BLOCK, stop)
    if begin >= stop:
        return

    heads = head_block * HEADS + tl.arange(0, HEADS)
    features, rotated = tl.arange(0, RANK), tl.arange(0, ROPE)
    is_head, is_feature, is_rotated = heads < n_heads, features < rank, rotated < rope_dim
    q = tl.load(q_ptr + batch * q_batch_stride + heads[:, None] * q_head_stride + features[None, :],
                mask=is_head[:, None] & is_feature[None, :], other=0.0)  # fmt: skip
    r = tl.load(r_ptr + batch * r_batch_stride + heads[:, None] * r_head_stride + rotated[None, :],
                mask=is_head[:, None] & is_rotated[None, :], other=0.0)  # fmt: skip

    maximum = tl.full((HEADS,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((HEADS,), dtype=tl.float32)
    sums = tl.zeros((HEADS, RANK), dtype=tl.float32)
    for start in range(begin, end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        in_range = index < end
        c = tl.load(c_ptr + batch * c_batch_stride + index[:, None] * c_key_stride + features[None, :],
                    mask=in_range[:, None] & is_feature[None, :], other=0.0).to(q.dtype)  # fmt: skip
        k = tl.load(k_ptr + batch * k_batch_stride + index[:, None] * k_key_stride + rotated[None, :],
                    mask=in_range[:, None] & is_rotated[None, :], other=0.0).to(r.dtype)  # fmt: skip
        scores = tl.dot(r, tl.trans(k), input_precision=PRECISION)
        scores = tl.dot(q, tl.trans(c), scores, input_precision=PRECISION) * scale
        visible = visible_in_block(
            padding_ptr, fallback_ptr, batch, padding_stride, fallback_stride, index, in_range
        )  # fmt: skip
        scores = tl.where(visible[None, :], scores, -float("inf"))
        probabilities, decay, maximum, total = online_softmax(scores, maximum, total)
        sums = tl.dot(probabilities.to(c.dtype), c, sums * decay[:, None], input_precision=PRECISION)

    row = (batch * n_heads + heads) * n_splits + split
    nonzero = tl.where(total == 0.0, 1.0, total)  # 0 for a split without visible keys, whose maximum is -inf
    if lse_ptr is not None:
        tl.store(lse_ptr + row, maximum + tl.log(nonzero), mask=is_head)
    sums = (sums / nonzero[:, None]).to(out_ptr.dtype.element_ty)
    stored = is_head[:, None] & is_feature[None, :]
    tl.store(out_ptr + row[:, None] * rank + features[None, :], sums, mask=stored)


@register("latent_decode_attention", fake=lambda q: q.new_empty(q.shape))
def _forward(
    q: Tensor, q_rope: Tensor, latents: Tensor, k_rope: Tensor, first: Tensor | None, last: Tensor | None,
    padding_mask: Tensor | None, fallback: Tensor | None, scale: float,
) -> Tensor:  # fmt: skip
    out = q.new_empty(q.shape)
    (batch, n_heads, rank), (capacity, rope_dim) = q.shape, k_rope.shape[1:]
    rank_tile, rope_tile = (padded_size(size) for size in (rank, rope_dim))
    block = max(16, min(64, _BLOCK_BYTES // (rank_tile * q.element_size())))
    heads = max(_MIN_HEADS, min(_MAX_HEADS, next_power_of_2(n_heads)))
    head_blocks = cdiv(n_heads, heads)
    blocks = blocks_per_part(multiprocessors(q), batch * head_blocks)
    n_splits = cdiv(capacity, blocks * block)
    parts = out if n_splits == 1 else q.new_empty(batch, n_heads, n_splits, rank, dtype=torch.float32)
    lse = q.new_empty(batch, n_heads, n_splits, dtype=torch.float32) if n_splits > 1 else None
    bounds = [0 if x is None or len(x) == 1 else x.stride(0) for x in (first, last, padding_mask, fallback)]
    _split_kernel[batch * head_blocks * n_splits](
        q, q_rope, latents, k_rope, first, last, padding_mask, fallback, parts, lse,
        *q.stride()[:2], *q_rope.stride()[:2], *latents.stride()[:2], *k_rope.stride()[:2], *bounds,
        scale, n_heads, rank, rope_dim, capacity, head_blocks, n_splits, blocks, heads, rank_tile, rope_tile, block,
        "ieee" if q.dtype == torch.float32 else "tf32", num_warps=8,
    )  # fmt: skip
    if lse is not None:
        combine_kernel[batch * n_heads](
            parts, lse, first, last, None, out, *bounds[:2], n_heads, rank, capacity, n_splits, blocks, rank_tile,
            block, PARTS, num_warps=4,
        )  # fmt: skip
    return out


def latent_decode_attention(
    q: Tensor,
    q_rope: Tensor,
    latents: Tensor,
    k_rope: Tensor,
    first: Tensor | None = None,
    last: Tensor | None = None,
    padding_mask: Tensor | None = None,
    fallback: Tensor | None = None,
    *,
    scale: float,
    backend: Backend = "auto",
) -> Tensor:
    """Attends from one query per sequence and head to the latent vectors of a cache. Not differentiable.

    Args:
        q: (B, N, R) queries of the latent vectors: those of the keys, times the projection from latents to keys.
        q_rope: (B, N, P) rotated queries.
        latents: (B, S, R), adjacent features. In the dtype of `q` or float8_e4m3fn, see `decode_attention`.
        k_rope: (B, S, P) rotated keys, adjacent features, in the dtype of `latents`.
        first: see `decode_attention`.
        last: see `decode_attention`.
        padding_mask: see `decode_attention`.
        fallback: see `decode_attention`.
        scale: factor of the scores.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        (B, N, R): the sums of latent vectors, which the projection from latents to values completes.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: the shapes or dtypes do not match, or `backend` is unknown or does not support the tensors.
    """
    check_floats("latent_decode_attention", q=q, q_rope=q_rope, latents=latents, k_rope=k_rope)
    for argument, value in (("first", first), ("last", last), ("fallback", fallback)):
        if value is not None:
            check_tensor("latent_decode_attention", argument, value, "integer")
    shapes_match = (
        q.dim() == q_rope.dim() == latents.dim() == k_rope.dim() == 3
        and q.shape[:2] == q_rope.shape[:2]
        and latents.shape == (len(q), k_rope.shape[1], q.shape[2])
        and k_rope.shape == (len(q), latents.shape[1], q_rope.shape[2])
    )
    if not shapes_match:
        raise ValueError(
            f"latent_decode_attention: q is {tuple(q.shape)}, q_rope {tuple(q_rope.shape)}, latents "
            f"{tuple(latents.shape)} and k_rope {tuple(k_rope.shape)}; expected shapes (B, N, R), (B, N, P), (B, S, R) "
            "and (B, S, P)"
        )
    is_read = latents.dtype == k_rope.dtype == FP8 and is_supported(latents)
    if not is_read:
        latents, k_rope = from_storage(latents, q.dtype), from_storage(k_rope, q.dtype)
    if not uses_triton(*((q, q_rope) if is_read else (q, q_rope, latents, k_rope)), backend=backend):
        latents, k_rope = from_storage(latents, q.dtype), from_storage(k_rope, q.dtype)
        return reference(q, q_rope, latents, k_rope, first, last, padding_mask, fallback, scale)
    with torch.no_grad():
        q, q_rope, latents, k_rope = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, q_rope, latents, k_rope))
        return _forward(q, q_rope, latents, k_rope, first, last, padding_mask, fallback, scale)
