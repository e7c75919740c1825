"""What kernels of the gated delta rule load of its chunks, in addition to `chunk_tiles`.

The notation is that of `delta_chunks`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ligerzoo.kernels.chunk_tiles import ChunkTable, decay_over, gate_offsets, load_totals
from ligerzoo.kernels.jit import jit, tl
from ligerzoo.kernels.strided import Strided

CHUNK = 64
"""Tokens of a chunk."""

FEATURES = 64
"""Features of q and k per iteration of `inner_products`."""

NORMALIZATION_EPS = 1e-6
"""Added to the sum of squares of q and k."""


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


@jit
def key_row(rule, batch, head):
    """The row of a value head's key head in (B, K, ...)."""
    return batch * (rule.n_heads // rule.group) + head // rule.group


@jit
def by_head(ptr, rule):
    """A contiguous (B, V, T, D_k)."""
    head_stride = tl.cast(rule.n_tokens, tl.int64) * rule.key_dim
    return Strided(ptr, rule.n_heads * head_stride, rule.key_dim, head_stride)


@jit
def load_factors(ptr, rule, span, row):
    """A factor per token of (rows, T); ones for a null pointer."""
    if ptr is not None:
        factors = tl.load(ptr + row * rule.n_tokens + span.tokens, mask=span.mask, other=0.0)
    else:
        factors = tl.where(span.mask, 1.0, 0.0)
    return factors


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
def inverse_norm(squares, eps, EXACT: tl.constexpr):
    """1 / sqrt(squares + eps). `rsqrt` is approximate on NVIDIA GPUs."""
    if EXACT:
        return tl.div_rn(1.0, tl.sqrt_rn(squares + eps))
    else:
        return tl.rsqrt(squares + eps)
