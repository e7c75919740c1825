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
from ligerzoo.kernels.strided import Strided

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


class DeltaRule(NamedTuple):
    """What all kernels of a call read.

    Attributes:
        q: (B, T, K, D_k).
        k: (B, T, K, D_k).
        v: (B, T, V, D_v).
        beta: (B, T, V), contiguous.
        total: (B, V, T) G; (B, V, T, D_k) with gates per channel.
        q_factor: (B, K, T), 1 / norm of q; None if q and k are not normalized.
        k_factor: (B, K, T), 1 / norm of k, likewise.
        table: the chunks.
        n_tokens: T.
        n_slots: chunks of a row of T tokens without segments.
        n_heads: V.
        group: V / K.
        key_dim: D_k.
        value_dim: D_v.
        scale: factor of the outputs.
        attention: (B, V, T, 64) P of gates per channel, see `delta_channels`; None with gates per head.
        queries: (B, V, T, D_k) U, likewise.
        writers: (B, V, T, D_k) L, likewise.
    """

    q: Strided
    k: Strided
    v: Strided
    beta: Tensor
    total: Tensor
    q_factor: Tensor | None
    k_factor: Tensor | None
    table: ChunkTable
    n_tokens: int
    n_slots: int
    n_heads: int
    group: int
    key_dim: int
    value_dim: int
    scale: float
    attention: Tensor | None = None
    queries: Tensor | None = None
    writers: Tensor | None = None


class Span(NamedTuple):
    """Tokens of a chunk, in a kernel.

    Attributes:
        batch: the batch element.
        start: the chunk's first token.
        end: one past its last token.
        rows: the tokens, counted from `start`.
        tokens: the tokens, int64.
        mask: which of them are in the chunk.
    """

    batch: tl.tensor
    start: tl.tensor
    end: tl.tensor
    rows: tl.tensor
    tokens: tl.tensor
    mask: tl.tensor


@kernel
def _table_kernel(table, n_tokens, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    segment_start_ptr = table.segment_start + row * n_tokens
    starts_ptr = table.starts + row * (n_tokens + 1)
    segments_ptr = table.segments + row * (n_tokens + 1)
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
    tl.store(table.counts + row * 2, n_chunks)
    tl.store(table.counts + row * 2 + 1, n_segments)


def chunk_table(segment_start: Tensor | None) -> ChunkTable:
    """The chunks of rows with these segments, computed without a host sync."""
    if segment_start is None:
        return ChunkTable()
    segment_start = segment_start.contiguous()
    rows, tokens = segment_start.shape
    starts, segments = (segment_start.new_empty((rows, tokens + 1), dtype=torch.int32) for _ in range(2))
    counts = segment_start.new_empty((rows, 2), dtype=torch.int32)
    table = ChunkTable(segment_start, starts, segments, counts, tokens + 1 if rows > 1 else 0)
    _table_kernel[rows](table, tokens, CHUNK, 1024, num_warps=4)
    return table


@jit
def split_program(n_inner, n_middle):
    """The inner, middle and outer index of the program, int64. Programs are ordered as (outer, middle, inner)."""
    program = tl.program_id(0).to(tl.int64)
    return program % n_inner, program // n_inner % n_middle, program // n_inner // n_middle


@jit
def head_rows(rule, batch, head):
    """The row of a value head in (B, V, ...), and its key head."""
    return batch * rule.n_heads + head, head // rule.group


@jit
def key_row(rule, batch, head):
    """The row of a value head's key head in (B, K, ...)."""
    return batch * (rule.n_heads // rule.group) + head // rule.group


@jit
def chunk_count(table, n_tokens, batch, CHUNK: tl.constexpr):
    """The number of chunks of a row."""
    if table.counts is not None:
        n_chunks = tl.load(table.counts + tl.where(table.stride > 0, batch, 0) * 2)
    else:
        n_chunks = tl.cdiv(n_tokens, CHUNK)
    return n_chunks


@jit
def segment_count(table, batch):
    """The number of segments of a row."""
    if table.counts is not None:
        n_segments = tl.load(table.counts + tl.where(table.stride > 0, batch, 0) * 2 + 1)
    else:
        n_segments = tl.full((), 1, dtype=tl.int32)
    return n_segments


@jit
def segment_chunks(table, n_tokens, batch, segment, CHUNK: tl.constexpr):
    """The first chunk of a segment, and the one after its last."""
    if table.segments is not None:
        first = tl.load(table.segments + batch * table.stride + segment)
        end = tl.load(table.segments + batch * table.stride + segment + 1)
    else:
        first = 0
        end = tl.cdiv(n_tokens, CHUNK)
    return first, end


@jit
def chunk_span(table, n_tokens, batch, chunk, rows, CHUNK: tl.constexpr):
    """These rows of a chunk."""
    if table.starts is not None:
        start = tl.load(table.starts + batch * table.stride + chunk).to(tl.int64)
        end = tl.load(table.starts + batch * table.stride + chunk + 1).to(tl.int64)
    else:
        start = tl.cast(chunk, tl.int64) * CHUNK
        end = tl.minimum(start + CHUNK, n_tokens)
    tokens = start + rows
    return Span(batch, start, end, rows, tokens, tokens < end)


@jit
def continues(rule, batch, token):
    """Whether the chunk that begins at the token has a state before it: that of its segment, or the initial one."""
    if rule.table.segment_start is not None:
        row = rule.table.segment_start + tl.where(rule.table.stride > 0, batch, 0) * rule.n_tokens
        has_state = (tl.load(row + token) != token) | (token == 0)
    else:
        has_state = token >= 0
    return has_state


@jit
def by_token(ptr, rule):
    """A contiguous (B, T, V, D_v)."""
    token_stride = rule.n_heads * rule.value_dim
    return Strided(ptr, tl.cast(rule.n_tokens, tl.int64) * token_stride, token_stride, rule.value_dim)


@jit
def by_head(ptr, rule):
    """A contiguous (B, V, T, D_k)."""
    head_stride = tl.cast(rule.n_tokens, tl.int64) * rule.key_dim
    return Strided(ptr, rule.n_heads * head_stride, rule.key_dim, head_stride)


@jit
def tile_ptr(x, span, head):
    """The first feature of a head of the span's first token."""
    return x.ptr + (span.batch * x.batch_stride + span.start * x.token_stride + head * x.head_stride)


@jit
def load_tile(x, span, head, features, n_features):
    """The features of a head of the span's tokens; zeros beyond chunk and features.

    Offsets within a chunk have 32 bits, which takes fewer registers.
    """
    offsets = span.rows[:, None] * x.token_stride + features[None, :]
    mask = span.mask[:, None] & (features < n_features)[None, :]
    return tl.load(tile_ptr(x, span, head) + offsets, mask=mask, other=0.0)


@jit
def store_tile(x, tile, span, head, features, n_features):
    """Stores what `load_tile` loads."""
    offsets = span.rows[:, None] * x.token_stride + features[None, :]
    mask = span.mask[:, None] & (features < n_features)[None, :]
    tl.store(tile_ptr(x, span, head) + offsets, tile.to(x.ptr.dtype.element_ty), mask=mask)


@jit
def load_columns(x, span, head, features, n_features):
    """`load_tile`, transposed: (features, tokens). Triton overlaps the loads of an operand, but not of a transpose."""
    offsets = span.rows[None, :] * x.token_stride + features[:, None]
    mask = span.mask[None, :] & (features < n_features)[:, None]
    return tl.load(tile_ptr(x, span, head) + offsets, mask=mask, other=0.0)


@jit
def store_columns(x, tile, span, head, features, n_features):
    """Stores what `load_columns` loads."""
    offsets = span.rows[None, :] * x.token_stride + features[:, None]
    mask = span.mask[None, :] & (features < n_features)[:, None]
    tl.store(tile_ptr(x, span, head) + offsets, tile.to(x.ptr.dtype.element_ty), mask=mask)


@jit
def inner_products(a, b, span, head, n_features, FEATURES: tl.constexpr):
    """a_i . b_j of the tokens of a chunk, by blocks of features, which takes fewer registers."""
    products = tl.zeros((span.rows.shape[0], span.rows.shape[0]), dtype=tl.float32)
    for first in range(0, n_features, FEATURES):
        features = first + tl.arange(0, FEATURES)
        a_tile = load_tile(a, span, head, features, n_features)
        b_tile = load_tile(b, span, head, features, n_features)
        products = tl.dot(a_tile, tl.trans(b_tile), products, input_precision="ieee")
    return products


@jit
def square_ptrs(ptr, rule, span, row, rows, cols, CHUNK: tl.constexpr):
    """Elements of a square of (B, V, T, 64), that of a chunk."""
    return ptr + (row * rule.n_tokens + span.start) * CHUNK + (rows * CHUNK + cols)


@jit
def load_factors(ptr, rule, span, row):
    """A factor per token of (rows, T); ones for a null pointer."""
    if ptr is not None:
        factors = tl.load(ptr + row * rule.n_tokens + span.tokens, mask=span.mask, other=0.0)
    else:
        factors = tl.where(span.mask, 1.0, 0.0)
    return factors


@jit
def load_totals(rule, span, row):
    """G of the chunk, that of its last token beyond the chunk, so that no difference is positive; and of this token."""
    totals = rule.total + row * rule.n_tokens
    return tl.load(totals + tl.minimum(span.tokens, span.end - 1)), tl.load(totals + span.end - 1)


@jit
def load_coefficients(rule, span, head):
    """beta, and the factors of q and k."""
    row = key_row(rule, span.batch, head)
    beta = tl.load(rule.beta + gate_offsets(rule, span, head), mask=span.mask, other=0.0).to(tl.float32)
    return beta, load_factors(rule.q_factor, rule, span, row), load_factors(rule.k_factor, rule, span, row)


@jit
def load_channel_total(rule, row, token, features):
    """G of a token with gates per channel, (features,)."""
    totals = rule.total + (row * rule.n_tokens + token) * rule.key_dim
    return tl.load(totals + features, mask=features < rule.key_dim, other=0.0)


@jit
def load_channel_totals(rule, span, row, features):
    """G of the tokens with gates per channel, (tokens, features), see `load_totals`."""
    tokens = tl.minimum(span.tokens, span.end - 1)
    totals = rule.total + (row * rule.n_tokens + tokens)[:, None] * rule.key_dim
    return tl.load(totals + features[None, :], mask=(features < rule.key_dim)[None, :], other=0.0)


@jit
def reading_queries(rule, span, row, head):
    """The queries as they read the state before the chunk: the tokens, their head, and a factor for each token."""
    if rule.queries is not None:
        return by_head(rule.queries, rule), head, tl.where(span.mask, 1.0, 0.0)
    else:
        factor = decay_over(load_totals(rule, span, row)[0]) * load_coefficients(rule, span, head)[1] * rule.scale
        return rule.q, head // rule.group, factor


@jit
def written_keys(rule, span, row, head):
    """The keys as the chunk writes them, as `reading_queries`."""
    if rule.writers is not None:
        return by_head(rule.writers, rule), head, tl.where(span.mask, 1.0, 0.0)
    else:
        total, last_total = load_totals(rule, span, row)
        factor = decay_over(last_total - total) * load_coefficients(rule, span, head)[2]
        return rule.k, head // rule.group, factor


@jit
def kept_share(rule, span, row, features):
    """What a chunk keeps of the state before it: a number, or (1, features) with gates per channel."""
    if rule.writers is not None:
        return decay_over(load_channel_total(rule, row, span.end - 1, features))[None, :]
    else:
        return decay_over(load_totals(rule, span, row)[1])


@jit
def load_state(states_ptr, rule, slot, features, values, exists):
    """The block of a state in this slot; zeros if it does not exist.

    `features[:, None]` and `values[None, :]` load (features, values); `features[None, :]` and `values[:, None]` load
    the transpose, (values, features).
    """
    mask = (features < rule.key_dim) & (values < rule.value_dim) & exists
    offsets = values * rule.key_dim + features  # of 32 bits, so that the tile takes one sum of 64 bits, not two
    return tl.load(states_ptr + slot * rule.key_dim * rule.value_dim + offsets, mask=mask, other=0.0)


@jit
def state_block(rule, block, KEYS: tl.constexpr, VALUES: tl.constexpr):
    """A block of the values of a state, (values, features): its features, its values, and which elements exist."""
    features, values = tl.arange(0, KEYS), block.to(tl.int32) * VALUES + tl.arange(0, VALUES)
    return features, values, (values < rule.value_dim)[:, None] & (features < rule.key_dim)[None, :]


@jit
def gate_offsets(rule, span, head):
    """Of (B, T, V)."""
    return (span.batch * rule.n_tokens + span.tokens) * rule.n_heads + head


@jit
def decay_over(difference):
    """The exponential of a difference of sums of g, in fp32. It is exact for sums in fp64, those of fp32 tokens."""
    return exp(difference.to(tl.float32), difference.dtype == tl.float64)


@jit
def decay_if(mask, difference):
    """`decay_over` where a mask holds, else 0. Differences that do not hold may be positive."""
    return tl.where(mask, decay_over(tl.minimum(difference, 0.0)), 0.0)


@jit
def decays(total, rows):
    """e_ij = exp(G_i - G_j) for j <= i, else 0."""
    return tl.where(rows[:, None] >= rows[None, :], decay_over(total[:, None] - total[None, :]), 0.0)


@jit
def inverse_norm(squares, eps, EXACT: tl.constexpr):
    """1 / sqrt(squares + eps). `rsqrt` is approximate on NVIDIA GPUs."""
    if EXACT:
        return tl.div_rn(1.0, tl.sqrt_rn(squares + eps))
    else:
        return tl.rsqrt(squares + eps)
