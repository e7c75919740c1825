"""The chunks of the gated delta rule: which tokens belong to each, and what kernels load of them.

The notation is that of `delta_chunks`.

Chunks begin at the start of each segment, so that a segment has the results of the segment alone, bit by bit. A row
of T tokens has at most ceil(T / 64) chunks that continue a segment, each of which begins in another block of 64 tokens:
that block is the slot of its state. So memory and grids depend on T only, and the host does not read the segments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.math import exp

CHUNK = 64
"""Tokens of a chunk."""

FEATURES = 64
"""Features of q and k per iteration of `inner_products`."""

NORMALIZATION_EPS = 1e-6
"""Added to the sum of squares of q and k."""


class ChunkTable(NamedTuple):
    """The chunks of packed rows; of rows that are not packed, Nones.

    Attributes:
        segment_start: (B or 1, T) integers, see `gated_delta_rule`.
        starts: (B or 1, T + 1) int32, the first token of each chunk, then T.
        segments: (B or 1, T + 1) int32, the first chunk of each segment, then the number of chunks.
        counts: (B or 1, 2) int32, the number of chunks and of segments.
        stride: distance of rows in `starts` and `segments`; 0 for one row that describes all.
    """

    segment_start: Tensor | None = None
    starts: Tensor | None = None
    segments: Tensor | None = None
    counts: Tensor | None = None
    stride: int = 0


@kernel
def _table_kernel(segment_start_ptr, starts_ptr, segments_ptr, counts_ptr, n_tokens,
                  CHUNK: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    segment_start_ptr += row * n_tokens
    starts_ptr += row * (n_tokens + 1)
    segments_ptr += row * (n_tokens + 1)
    n_chunks = tl.full((), 0, dtype=tl.int32)
    n_segments = tl.full((), 0, dtype=tl.int32)
    for first in range(0, n_tokens, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        in_row = tokens < n_tokens
        within = tokens - tl.load(segment_start_ptr + tokens, mask=in_row, other=0).to(tl.int32)
        begins_chunk = in_row & (within % CHUNK == 0)
        begins_segment = in_row & (within == 0)
        chunks = n_chunks + tl.cumsum(begins_chunk.to(tl.int32), 0)  # up to each token
        segments = n_segments + tl.cumsum(begins_segment.to(tl.int32), 0)
        tl.store(starts_ptr + chunks - 1, tokens, mask=begins_chunk)
        tl.store(segments_ptr + segments - 1, chunks - 1, mask=begins_segment)
        n_chunks += tl.sum(begins_chunk.to(tl.int32), 0)
        n_segments += tl.sum(begins_segment.to(tl.int32), 0)
    tl.store(starts_ptr + n_chunks, n_tokens)
    tl.store(segments_ptr + n_segments, n_chunks)
    tl.store(counts_ptr + row * 2, n_chunks)
    tl.store(counts_ptr + row * 2 + 1, n_segments)


def chunk_table(segment_start: Tensor | None) -> ChunkTable:
    """The chunks of rows with these segments, computed without a host sync."""
    if segment_start is None:
        return ChunkTable()
    segment_start = segment_start.contiguous()
    rows, tokens = segment_start.shape
    starts, segments = (segment_start.new_empty((rows, tokens + 1), dtype=torch.int32) for _ in range(2))
    counts = segment_start.new_empty((rows, 2), dtype=torch.int32)
    _table_kernel[rows](segment_start, starts, segments, counts, tokens, CHUNK, 1024, num_warps=4)
    return ChunkTable(segment_start, starts, segments, counts, tokens + 1 if rows > 1 else 0)


@jit
def split_program(n_inner, n_middle):
    """The inner, middle and outer index of the program, int64. Programs are ordered as (outer, middle, inner)."""
    program = tl.program_id(0).to(tl.int64)
    return program % n_inner, program // n_inner % n_middle, program // n_inner // n_middle


@jit
def head_rows(batch, head, n_heads, group):
    """The row of a value head in (B, V, ...), its key head, and the row of the key head in (B, K, ...)."""
    key_head = head // group
    return batch * n_heads + head, key_head, batch * (n_heads // group) + key_head


@jit
def chunk_count(counts_ptr, table_stride, batch, n_tokens, CHUNK: tl.constexpr):
    """The number of chunks of a row."""
    if counts_ptr is not None:
        n_chunks = tl.load(counts_ptr + tl.where(table_stride > 0, batch, 0) * 2)
    else:
        n_chunks = tl.cdiv(n_tokens, CHUNK)
    return n_chunks


@jit
def segment_count(counts_ptr, table_stride, batch):
    """The number of segments of a row."""
    if counts_ptr is not None:
        n_segments = tl.load(counts_ptr + tl.where(table_stride > 0, batch, 0) * 2 + 1)
    else:
        n_segments = tl.full((), 1, dtype=tl.int32)
    return n_segments


@jit
def segment_chunks(segments_ptr, table_stride, batch, segment, n_tokens, CHUNK: tl.constexpr):
    """The first chunk of a segment, and the one after its last."""
    if segments_ptr is not None:
        first = tl.load(segments_ptr + batch * table_stride + segment)
        end = tl.load(segments_ptr + batch * table_stride + segment + 1)
    else:
        first = 0
        end = tl.cdiv(n_tokens, CHUNK)
    return first, end


@jit
def chunk_tokens(starts_ptr, table_stride, batch, chunk, rows, n_tokens, CHUNK: tl.constexpr):
    """The first token of a chunk, the one after its last, the tokens `start + rows`, int64, and which are in it."""
    if starts_ptr is not None:
        start = tl.load(starts_ptr + batch * table_stride + chunk).to(tl.int64)
        end = tl.load(starts_ptr + batch * table_stride + chunk + 1).to(tl.int64)
    else:
        start = tl.cast(chunk, tl.int64) * CHUNK
        end = tl.minimum(start + CHUNK, n_tokens)
    tokens = start + rows
    return start, end, tokens, tokens < end


@jit
def continues(segment_start_ptr, table_stride, batch, token, n_tokens):
    """Whether the chunk that begins at the token has a state before it: that of its segment, or the initial one."""
    if segment_start_ptr is not None:
        row = segment_start_ptr + tl.where(table_stride > 0, batch, 0) * n_tokens
        has_state = (tl.load(row + token) != token) | (token == 0)
    else:
        has_state = token >= 0
    return has_state


@jit
def load_tile(ptr, batch, start, rows, head, batch_stride, token_stride, head_stride, features, in_chunk, n_features):
    """The features of a head of the tokens `start + rows` of (B, T, heads, D); zeros beyond chunk and features.

    Offsets within a chunk have 32 bits, which takes fewer registers.
    """
    ptr += batch * batch_stride + start * token_stride + head * head_stride
    offsets = rows[:, None] * token_stride + features[None, :]
    return tl.load(ptr + offsets, mask=in_chunk[:, None] & (features < n_features)[None, :], other=0.0)


@jit
def load_columns(ptr, batch, start, rows, head, batch_stride, token_stride, head_stride, features, in_chunk,
                 n_features):  # fmt: skip
    """`load_tile`, transposed: (features, tokens). Triton overlaps the loads of an operand, but not of a transpose."""
    ptr += batch * batch_stride + start * token_stride + head * head_stride
    offsets = rows[None, :] * token_stride + features[:, None]
    return tl.load(ptr + offsets, mask=in_chunk[None, :] & (features < n_features)[:, None], other=0.0)


@jit
def inner_products(a_ptr, b_ptr, batch, start, rows, head, a_batch_stride, a_token_stride, a_head_stride,
                   b_batch_stride, b_token_stride, b_head_stride, in_chunk, n_features,
                   CHUNK: tl.constexpr, FEATURES: tl.constexpr):  # fmt: skip
    """a_i . b_j of the tokens of a chunk, by blocks of features, which takes fewer registers."""
    products = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    for first in range(0, n_features, FEATURES):
        features = first + tl.arange(0, FEATURES)
        a = load_tile(a_ptr, batch, start, rows, head, a_batch_stride, a_token_stride, a_head_stride, features,
                      in_chunk, n_features)  # fmt: skip
        b = load_tile(b_ptr, batch, start, rows, head, b_batch_stride, b_token_stride, b_head_stride, features,
                      in_chunk, n_features)  # fmt: skip
        products = tl.dot(a, tl.trans(b), products, input_precision="ieee")
    return products


@jit
def load_factors(ptr, row, tokens, in_chunk, n_tokens):
    """A factor per token of (rows, T); ones for a null pointer."""
    if ptr is not None:
        factors = tl.load(ptr + row * n_tokens + tokens, mask=in_chunk, other=0.0)
    else:
        factors = tl.where(in_chunk, 1.0, 0.0)
    return factors


@jit
def load_total(ptr, row, tokens, end, n_tokens):
    """G of (rows, T); that of the last token beyond the chunk, so that no difference is positive."""
    return tl.load(ptr + row * n_tokens + tl.minimum(tokens, end - 1))


@jit
def load_state(states_ptr, slot, features, values, key_dim, value_dim, exists):
    """The block of a state in this slot; zeros if it does not exist.

    `features[:, None]` and `values[None, :]` load (features, values); `features[None, :]` and `values[:, None]` load
    the transpose, (values, features).
    """
    mask = (features < key_dim) & (values < value_dim) & exists
    offsets = values * key_dim + features  # of 32 bits, so that the tile takes one sum of 64 bits, not two
    return tl.load(states_ptr + slot * key_dim * value_dim + offsets, mask=mask, other=0.0)


@jit
def state_block(block, key_dim, value_dim, KEYS: tl.constexpr, VALUES: tl.constexpr):
    """A block of the values of a state, (values, features): its features, its values, and which elements exist."""
    features, values = tl.arange(0, KEYS), block.to(tl.int32) * VALUES + tl.arange(0, VALUES)
    return features, values, (values < value_dim)[:, None] & (features < key_dim)[None, :]


@jit
def load_betas(beta_ptr, batch, tokens, head, n_heads, in_chunk, n_tokens):
    """beta of (B, T, V), in fp32; zeros beyond the chunk."""
    gates = (batch * n_tokens + tokens) * n_heads + head
    return tl.load(beta_ptr + gates, mask=in_chunk, other=0.0).to(tl.float32)


@jit
def decay_over(difference, EXACT: tl.constexpr):
    """The exponential of a difference of sums of g, in fp32."""
    return exp(difference.to(tl.float32), EXACT)


@jit
def decays(total, rows, EXACT: tl.constexpr):
    """e_ij = exp(G_i - G_j) for j <= i, else 0."""
    return tl.where(rows[:, None] >= rows[None, :], decay_over(total[:, None] - total[None, :], EXACT), 0.0)


@jit
def inverse_norm(squares, eps, EXACT: tl.constexpr):
    """1 / sqrt(squares + eps). `rsqrt` is approximate on NVIDIA GPUs."""
    if EXACT:
        return tl.div_rn(1.0, tl.sqrt_rn(squares + eps))
    else:
        return tl.rsqrt(squares + eps)
