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

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.decode_attention import (
    MIN_HEADS,
    Split,
    VisibleKeys,
    attend_in_parts,
    key_range,
    online_softmax,
    store_part,
    visible_in_block,
)
from ligerzoo.kernels.dispatch import (
    Backend,
    accumulation_dtype,
    cdiv,
    empty_result,
    next_power_of_2,
    padded_size,
    uses_triton,
)
from ligerzoo.kernels.fp8 import FP8, from_storage, is_supported
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.strided import Strided
from ligerzoo.tensor_checks import check_floats, shape_error

_BLOCK_BYTES = 32768  # of latent vectors that a program reads at a time
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
    visible = VisibleKeys(first, last, padding_mask, fallback).mask(torch.arange(latents.shape[1], device=q.device))
    return (scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1) @ values).to(q.dtype)


class _Sizes(NamedTuple):
    n_heads: int
    n_blocks: int  # of heads
    rank: int
    rope_dim: int


@jit
def _load(x, batch, rows, in_rows, features, n_features):
    """Some rows of (B, rows, features): heads of queries, or tokens."""
    offsets = batch * x.batch_stride + rows[:, None] * x.token_stride + features[None, :]
    return tl.load(x.ptr + offsets, mask=in_rows[:, None] & (features < n_features)[None, :], other=0.0)


@kernel
def _split_kernel(
    q, r, c, k, visible, split, sizes, scale,
    BLOCKS: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    PRECISION: tl.constexpr = "ieee" if q.ptr.dtype.element_ty == tl.float32 else "tf32"
    program = tl.program_id(0).to(tl.int64)
    part, row = program % split.n_parts, program // split.n_parts
    head_block, batch = row % sizes.n_blocks, row // sizes.n_blocks

    first, stop = key_range(visible, batch, split.n_keys)
    begin = first + part * BLOCKS * BLOCK
    end = tl.minimum(begin + BLOCKS * BLOCK, stop)
    if begin >= stop:
        return

    heads = head_block * HEADS + tl.arange(0, HEADS)
    features, rotated = tl.arange(0, RANK), tl.arange(0, ROPE)
    queries = _load(q, batch, heads, heads < sizes.n_heads, features, sizes.rank)
    rotated_queries = _load(r, batch, heads, heads < sizes.n_heads, rotated, sizes.rope_dim)

    maximum = tl.full((HEADS,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((HEADS,), dtype=tl.float32)
    sums = tl.zeros((HEADS, RANK), dtype=tl.float32)
    for start in range(begin, end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        in_range = index < end
        latents = _load(c, batch, index, in_range, features, sizes.rank).to(queries.dtype)
        keys = _load(k, batch, index, in_range, rotated, sizes.rope_dim).to(queries.dtype)
        scores = tl.dot(rotated_queries, tl.trans(keys), input_precision=PRECISION)
        scores = tl.dot(queries, tl.trans(latents), scores, input_precision=PRECISION) * scale
        scores = tl.where(visible_in_block(visible, batch, index, in_range)[None, :], scores, -float("inf"))
        probabilities, decay, maximum, total = online_softmax(scores, maximum, total)
        sums = tl.dot(probabilities.to(latents.dtype), latents, sums * decay[:, None], input_precision=PRECISION)

    store_part(split, part, sums, maximum, total, batch, heads, sizes.n_heads, features, sizes.rank)


@register("latent_decode_attention", fake=lambda q: empty_result(q))
def _forward(q: Tensor, q_rope: Tensor, latents: Tensor, k_rope: Tensor, visible: VisibleKeys, scale: float) -> Tensor:
    (_, n_heads, rank), (_, capacity, rope_dim) = q.shape, k_rope.shape
    rank_tile, rope_tile = padded_size(rank), padded_size(rope_dim)
    block = max(16, min(64, _BLOCK_BYTES // (rank_tile * q.element_size())))
    heads = max(MIN_HEADS, min(_MAX_HEADS, next_power_of_2(n_heads)))
    sizes, keys_seen = _Sizes(n_heads, cdiv(n_heads, heads), rank, rope_dim), visible.strided()
    operands = [Strided(x, x.stride(0), x.stride(1), 0) for x in (q, q_rope, latents, k_rope)]
    tile = heads, rank_tile, rope_tile, block

    def launch(programs: int, split: Split, blocks: int) -> None:
        _split_kernel[programs](*operands, keys_seen, split, sizes, scale, blocks, *tile, num_warps=8)

    return attend_in_parts(q, capacity, keys_seen, None, sizes.n_blocks, block, launch)


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
    visible = VisibleKeys(first, last, padding_mask, fallback)
    visible.check("latent_decode_attention")
    shapes_match = (
        q.dim() == q_rope.dim() == latents.dim() == k_rope.dim() == 3
        and q.shape[:2] == q_rope.shape[:2]
        and latents.shape == (len(q), k_rope.shape[1], q.shape[2])
        and k_rope.shape == (len(q), latents.shape[1], q_rope.shape[2])
    )
    if not shapes_match:
        expected = "shapes (B, N, R), (B, N, P), (B, S, R) and (B, S, P)"
        raise shape_error("latent_decode_attention", expected, q=q, q_rope=q_rope, latents=latents, k_rope=k_rope)
    is_read = latents.dtype == k_rope.dtype == FP8 and is_supported(latents)
    if not is_read:
        latents, k_rope = from_storage(latents, q.dtype), from_storage(k_rope, q.dtype)
    if not uses_triton(*((q, q_rope) if is_read else (q, q_rope, latents, k_rope)), backend=backend):
        latents, k_rope = from_storage(latents, q.dtype), from_storage(k_rope, q.dtype)
        return reference(q, q_rope, latents, k_rope, *visible, scale)
    with torch.no_grad():
        q, q_rope, latents, k_rope = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, q_rope, latents, k_rope))
        return _forward(q, q_rope, latents, k_rope, visible, scale)
