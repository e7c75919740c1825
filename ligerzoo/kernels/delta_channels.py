"""The gated delta rule with a gate per channel of the keys (Kimi Team 2025, section 3): another `prepare`.

G_i is a vector of D_k numbers, so decays are not factors of the products of keys. In the notation of `delta_chunks`,
where o is the elementwise product,

    M_ij = sum over c of k_ic k_jc exp(G_ic - G_jc) for j < i,   P_ij = scale (the same of q_ic and k_jc) for j <= i
    E  = X V - W S,           W = X (exp(G) o K)
    O  = U S + P diag(beta) E,                       U = scale exp(G) o Q
    S' = diag(exp(G_last)) S + L^T diag(beta) E,     L = exp(G_last - G) o K

exp(G_i - G_j) is at most 1, but the factors exp(G_i) and exp(-G_j) may underflow and overflow. So rows are computed by
blocks of 16: with r the first row of a block, the products with earlier rows j are those of exp(G_i - G_r) o k_i and
exp(G_r - G_j) o k_j, none of which exceeds k. The products within a block take exp(G_i - G_j) itself.

Three kernels replace `prepare`; `solve`, `scan` and `outputs` then read U, L and P:

1. `_totals_kernel`, for each chunk and block of channels: G;
2. `_products_kernel`, for each block of 16 rows: M, P and the factors that normalize q and k;
3. `_invert_kernel`, for each chunk: X.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.kernels.chunk_tiles import (
    Launch,
    chunk_count,
    chunk_span,
    decay_if,
    decay_over,
    gate_offsets,
    head_rows,
    load_tile,
    split_program,
    square_ptrs,
)
from ligerzoo.kernels.delta_chunks import PREPARE, chunk_programs, inverse_of_unit_lower, launch_of
from ligerzoo.kernels.delta_tiles import (
    CHUNK,
    FEATURES,
    NORMALIZATION_EPS,
    DeltaRule,
    inverse_norm,
    key_row,
    load_channel_total,
    load_channel_totals,
)
from ligerzoo.kernels.dispatch import cdiv, padded_size
from ligerzoo.kernels.jit import jit, kernel, tl

BLOCK = 16
"""Rows of a block, which is the smallest number of rows of a product."""

PRODUCTS = {2: Launch(values=0, warps=4, stages=1), 4: Launch(values=0, warps=8, stages=1)}
"""See `delta_chunks`. To be tuned on a GPU."""


@jit
def channel_block(rule, n_blocks, FEATURES: tl.constexpr):
    """The channels, value head, slot and batch element of a program for a block of channels of a chunk."""
    program = tl.program_id(0).to(tl.int64)
    features, program = (program % n_blocks).to(tl.int32) * FEATURES + tl.arange(0, FEATURES), program // n_blocks
    head, chunk = program % rule.n_heads, program // rule.n_heads
    return features, head, chunk % rule.n_slots, chunk // rule.n_slots


@jit
def channel_offsets(span, n_tokens, n_heads, head, features, key_dim):
    """Of (B, T, V, D_k)."""
    tokens = (span.batch * n_tokens + span.tokens) * n_heads + head
    return tokens[:, None] * key_dim + features[None, :]


@kernel(unspecialized=("n_tokens",))  # so that a segment is added up as the segment alone
def _totals_kernel(
    g_ptr, total_ptr, table, n_tokens, n_slots, n_heads, n_blocks, key_dim, CHUNK: tl.constexpr, FEATURES: tl.constexpr
):
    block, program = tl.program_id(0).to(tl.int64) % n_blocks, tl.program_id(0).to(tl.int64) // n_blocks
    head, slot, batch = program % n_heads, program // n_heads % n_slots, program // n_heads // n_slots
    rows, features = tl.arange(0, CHUNK), block.to(tl.int32) * FEATURES + tl.arange(0, FEATURES)
    for chunk in range(slot, chunk_count(table, n_tokens, batch, CHUNK), n_slots):
        span = chunk_span(table, n_tokens, batch, chunk, rows, CHUNK)
        mask = span.mask[:, None] & (features < key_dim)[None, :]
        g = tl.load(g_ptr + channel_offsets(span, n_tokens, n_heads, head, features, key_dim), mask=mask, other=0.0)
        total = tl.cumsum(g.to(total_ptr.dtype.element_ty), 0)
        totals = total_ptr + ((batch * n_heads + head) * n_tokens + span.tokens)[:, None] * key_dim
        tl.store(totals + features[None, :], total, mask=mask)


@kernel
def _products_kernel(rule, system_ptr, eps, CHUNK: tl.constexpr, BLOCK: tl.constexpr, FEATURES: tl.constexpr):
    EXACT: tl.constexpr = rule.k.ptr.dtype.element_ty == tl.float32
    PRECISION: tl.constexpr = "ieee" if EXACT else "tf32"
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    program = tl.program_id(0).to(tl.int64)
    first_row, program = (program % BLOCKS).to(tl.int32) * BLOCK, program // BLOCKS
    head, slot, batch = (
        program % rule.n_heads,
        program // rule.n_heads % rule.n_slots,
        program // rule.n_heads // rule.n_slots,
    )
    row, key_head = head_rows(rule, batch, head)
    rows, own_rows = tl.arange(0, CHUNK), first_row + tl.arange(0, BLOCK)
    for chunk in range(slot, chunk_count(rule.table, rule.n_tokens, batch, CHUNK), rule.n_slots):
        whole = chunk_span(rule.table, rule.n_tokens, batch, chunk, rows, CHUNK)
        own = chunk_span(rule.table, rule.n_tokens, batch, chunk, own_rows, CHUNK)
        q_factor, k_factor = tl.where(own.mask, 1.0, 0.0), tl.where(own.mask, 1.0, 0.0)
        all_k_factors = tl.where(whole.mask, 1.0, 0.0)
        if rule.k_factor is not None:
            q_factor = inverse_norm(_squares(rule.q, rule, own, key_head, FEATURES), eps, EXACT)
            k_factor = inverse_norm(_squares(rule.k, rule, own, key_head, FEATURES), eps, EXACT)
            all_k_factors = inverse_norm(_squares(rule.k, rule, whole, key_head, FEATURES), eps, EXACT)
            if head % rule.group == 0:
                factors = key_row(rule, batch, head) * rule.n_tokens + own.tokens
                tl.store(rule.q_factor + factors, q_factor, mask=own.mask)
                tl.store(rule.k_factor + factors, k_factor, mask=own.mask)

        attention = tl.zeros((BLOCK, CHUNK), dtype=tl.float32)
        system = tl.zeros((BLOCK, CHUNK), dtype=tl.float32)
        start = tl.minimum(own.start + first_row, own.end - 1)
        for first in range(0, rule.key_dim, FEATURES):
            features = first + tl.arange(0, FEATURES)
            q = load_tile(rule.q, own, key_head, features, rule.key_dim).to(tl.float32) * q_factor[:, None]
            k = load_tile(rule.k, own, key_head, features, rule.key_dim).to(tl.float32) * k_factor[:, None]
            all_k = load_tile(rule.k, whole, key_head, features, rule.key_dim).to(tl.float32) * all_k_factors[:, None]
            total = load_channel_totals(rule, own, row, features)
            first_total = load_channel_total(rule, row, start, features)[None, :]
            difference = first_total - load_channel_totals(rule, whole, row, features)
            earlier = tl.trans(decay_if((rows < first_row)[:, None], difference) * all_k)
            decay = decay_over(total - first_total)
            attention = tl.dot(q * decay, earlier, attention, input_precision=PRECISION)
            system = tl.dot(k * decay, earlier, system, input_precision=PRECISION)
            for i in range(BLOCK):
                column = first_row + i
                token = tl.minimum(own.start + column, own.end - 1)
                one = rule.k.ptr + batch * rule.k.batch_stride + token * rule.k.token_stride
                one += key_head * rule.k.head_stride
                one_k = tl.load(one + features, mask=features < rule.key_dim, other=0.0).to(tl.float32)
                one_k *= tl.sum(tl.where(rows == column, all_k_factors, 0.0), 0)
                since = total - load_channel_total(rule, row, token, features)[None, :]
                decayed = decay_if((own_rows >= column)[:, None], since) * one_k[None, :]
                is_column = (rows == column)[None, :]
                attention += tl.where(is_column, tl.sum(q * decayed, 1)[:, None], 0.0)
                system += tl.where(is_column, tl.sum(k * decayed, 1)[:, None], 0.0)

        squares = square_ptrs(rule.attention, rule, own, row, own_rows[:, None], rows[None, :], CHUNK)
        tl.store(squares, (attention * rule.scale).to(rule.attention.dtype.element_ty), mask=own.mask[:, None])
        squares = square_ptrs(system_ptr, rule, own, row, own_rows[:, None], rows[None, :], CHUNK)
        tl.store(squares, tl.where(own_rows[:, None] > rows[None, :], system, 0.0), mask=own.mask[:, None])


@jit
def _squares(x, rule, span, key_head, FEATURES: tl.constexpr):
    """The sum of squares of q or k of each token."""
    squares = tl.zeros((span.rows.shape[0],), dtype=tl.float32)
    for first in range(0, rule.key_dim, FEATURES):
        tile = load_tile(x, span, key_head, first + tl.arange(0, FEATURES), rule.key_dim).to(tl.float32)
        squares += tl.sum(tile * tile, 1)
    return squares


@kernel
def _invert_kernel(rule, system_ptr, inverse_ptr, CHUNK: tl.constexpr):
    EXACT: tl.constexpr = rule.k.ptr.dtype.element_ty == tl.float32
    head, slot, batch = split_program(rule.n_heads, rule.n_slots)
    row = batch * rule.n_heads + head
    rows = tl.arange(0, CHUNK)
    for chunk in range(slot, chunk_count(rule.table, rule.n_tokens, batch, CHUNK), rule.n_slots):
        span = chunk_span(rule.table, rule.n_tokens, batch, chunk, rows, CHUNK)
        beta = tl.load(rule.beta + gate_offsets(rule, span, head), mask=span.mask, other=0.0).to(tl.float32)
        squares = square_ptrs(system_ptr, rule, span, row, rows[:, None], rows[None, :], CHUNK)
        system = tl.load(squares, mask=span.mask[:, None], other=0.0) * beta[None, :]
        inverse = inverse_of_unit_lower(system, CHUNK, "ieee" if EXACT else "tf32")
        squares = square_ptrs(inverse_ptr, rule, span, row, rows[:, None], rows[None, :], CHUNK)
        tl.store(squares, inverse.to(inverse_ptr.dtype.element_ty), mask=span.mask[:, None])


def channel_blocks(rule: DeltaRule) -> tuple[int, int]:
    """Blocks of channels of a chunk, and channels of each."""
    features = min(FEATURES, padded_size(rule.key_dim))
    return cdiv(rule.key_dim, features), features


def block_programs(rule: DeltaRule) -> int:
    """Programs of a kernel with one for each block of rows of a chunk, and value head."""
    return chunk_programs(rule) * (CHUNK // BLOCK)


def prepare_channels(rule: DeltaRule, g: Tensor, inverse: Tensor) -> None:
    """Computes `Prepared`, from g, (B, T, V, D_k) and contiguous."""
    blocks, features = channel_blocks(rule)
    sizes = rule.n_tokens, rule.n_slots, rule.n_heads, blocks, rule.key_dim, CHUNK, features
    _totals_kernel[chunk_programs(rule) * blocks](g, rule.total, rule.table, *sizes, num_warps=4)
    system, options = torch.empty_like(inverse, dtype=torch.float32), launch_of(PRODUCTS, rule).options
    _products_kernel[block_programs(rule)](rule, system, NORMALIZATION_EPS, CHUNK, BLOCK, features, **options)
    _invert_kernel[chunk_programs(rule)](rule, system, inverse, CHUNK, **launch_of(PREPARE, rule).options)
