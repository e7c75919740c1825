"""The chunked forward pass of the gated delta rule: the products of 64 tokens at a time in matrix products.

Within a chunk, let G_i be the sum of g up to token i, e_ij = exp(G_i - G_j), S the state before the chunk, and K, V, Q,
O, E the rows of its tokens. An error E_i = v_i - S_i^T k_i is what the (decayed) state before token i lacks of its
value, so that the rule's delta is beta_i E_i. Unrolled, the rule reads (Yang et al. 2024, section 3.2, with decay)

    E_i = v_i - exp(G_i) S^T k_i - sum over j < i of e_ij (k_i . k_j) beta_j E_j
    O_i = scale (exp(G_i) S^T q_i + sum over j <= i of e_ij (q_i . k_j) beta_j E_j)
    S'  = exp(G_last) S + sum over j of exp(G_last - G_j) beta_j k_j E_j^T

The first line is a triangular system: with M_ij = e_ij (k_i . k_j) for j < i and X = (I + M diag(beta))^-1,

    E = X V - W S,   W = X diag(exp(G)) K

Four kernels:

1. `prepare`, for each chunk: G, X and the factors that normalize q and k;
2. `solve`, for each chunk: W and X V;
3. `scan`, for each head and block of values, from chunk to chunk: E and S. A chunk waits for two products;
4. `outputs`, for each chunk: O.

Kernels read q and k without normalizing them. The factors multiply rows and columns of the products, in fp32.

The chunks are those of `chunk_tiles`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.chunk_tiles import (
    Launch,
    by_token,
    chunk_count,
    chunk_span,
    chunk_table,
    continues,
    decay_over,
    decays,
    gate_offsets,
    head_rows,
    inner_products,
    load_columns,
    load_state,
    load_tile,
    load_totals,
    segment_chunks,
    segment_count,
    segment_shares,
    split_program,
    square_ptrs,
    state_block,
    store_columns,
    store_tile,
    total_dtype,
)
from ligerzoo.kernels.delta_tiles import (
    CHUNK,
    FEATURES,
    NORMALIZATION_EPS,
    DeltaRule,
    by_head,
    inverse_norm,
    kept_share,
    key_row,
    load_channel_total,
    load_channel_totals,
    load_coefficients,
    reading_queries,
    written_keys,
)
from ligerzoo.kernels.dispatch import cdiv, empty_result, padded_size
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.strided import strided

PREPARE = {2: Launch(values=0, warps=2, stages=1), 4: Launch(values=0, warps=8, stages=1)}
SOLVE = {2: Launch(values=32, warps=1, stages=3), 4: Launch(values=32, warps=8, stages=1)}
SOLVE_CHANNELS = {2: Launch(values=32, warps=2, stages=2), 4: Launch(values=16, warps=8, stages=1)}
SCAN = {2: Launch(values=16, warps=4, stages=3), 4: Launch(values=16, warps=8, stages=1)}
OUTPUTS = {2: Launch(values=64, warps=2, stages=1), 4: Launch(values=16, warps=8, stages=1)}
"""By the element size of the tokens' tensors; those of 2 bytes were measured by `benchmarks.recurrence_launches`.

Triton uses the instructions `wgmma` for products of 2-byte elements with at least 64 rows in programs with a multiple
of 4 warps. ptxas 12.8 compiles some of them to code that accesses illegal memory (triton issue 11366). So programs with
products of 64 rows have 2 warps. The products of `scan` and `reverse_scan` have a row per feature of the values, and
those of `query_gradients` and `key_gradients` a row per token of half a chunk.
"""


@jit
def inverse_of_unit_lower(a, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 for a strictly lower triangular `a`, in fp32.

    Rows are eliminated one by one in the diagonal blocks of 16 x 16. With their inverses B and the blocks L below, the
    inverse is (I + N)^-1 B = (I + N^2) (I - N) B with N = B L, since 4 blocks make N^4 = 0.
    """
    BLOCK: tl.constexpr = 16
    N_BLOCKS: tl.constexpr = CHUNK // BLOCK
    tl.static_assert(N_BLOCKS <= 4)
    rows = tl.arange(0, CHUNK)
    on_diagonal = (rows // BLOCK)[:, None] == (rows // BLOCK)[None, :]
    blocks = tl.sum(tl.reshape(tl.where(on_diagonal, a, 0.0), (N_BLOCKS, BLOCK, N_BLOCKS, BLOCK)), 2)
    index = tl.arange(0, BLOCK)
    inverses = tl.where(index[:, None] == index[None, :], 1.0, 0.0)[None, :, :] + tl.zeros_like(blocks)
    for i in range(1, BLOCK):
        is_row = (index == i)[None, :, None]
        row = tl.sum(tl.where(is_row, blocks, 0.0), 1)
        inverses = tl.where(is_row, inverses - tl.sum(row[:, :, None] * inverses, 1)[:, None, :], inverses)

    repeated = tl.broadcast_to(inverses[:, :, None, :], (N_BLOCKS, BLOCK, N_BLOCKS, BLOCK))
    b = tl.where(on_diagonal, tl.reshape(repeated, (CHUNK, CHUNK)), 0.0)
    n = tl.dot(b, tl.where(on_diagonal, 0.0, a), input_precision=PRECISION)
    first_two = tl.dot(-n, b, b, input_precision=PRECISION)
    n_squared = tl.dot(n, n, input_precision=PRECISION)
    return tl.dot(n_squared, first_two, first_two, input_precision=PRECISION)


@kernel
def _prepare_kernel(rule, g_ptr, inverse_ptr, eps, CHUNK: tl.constexpr, FEATURES: tl.constexpr):
    EXACT: tl.constexpr = rule.k.ptr.dtype.element_ty == tl.float32
    head, slot, batch = split_program(rule.n_heads, rule.n_slots)
    row, key_head = head_rows(rule, batch, head)
    rows = tl.arange(0, CHUNK)
    for chunk in range(slot, chunk_count(rule.table, rule.n_tokens, batch, CHUNK), rule.n_slots):
        span = chunk_span(rule.table, rule.n_tokens, batch, chunk, rows, CHUNK)
        g = tl.load(g_ptr + gate_offsets(rule, span, head), mask=span.mask, other=0.0)
        total = tl.cumsum(g.to(rule.total.dtype.element_ty), 0)
        beta = tl.load(rule.beta + gate_offsets(rule, span, head), mask=span.mask, other=0.0).to(tl.float32)
        tl.store(rule.total + row * rule.n_tokens + span.tokens, total, mask=span.mask)

        products = inner_products(rule.k, rule.k, span, key_head, rule.key_dim, FEATURES)
        if rule.k_factor is not None:
            squares = tl.sum(tl.where(rows[:, None] == rows[None, :], products, 0.0), 1)
            k_factor = inverse_norm(squares, eps, EXACT)
            products *= k_factor[:, None] * k_factor[None, :]
            if head % rule.group == 0:
                squares = tl.zeros((CHUNK,), dtype=tl.float32)
                for first in range(0, rule.key_dim, FEATURES):
                    features = first + tl.arange(0, FEATURES)
                    q = load_tile(rule.q, span, key_head, features, rule.key_dim).to(tl.float32)
                    squares += tl.sum(q * q, 1)
                factors = key_row(rule, batch, head) * rule.n_tokens + span.tokens
                tl.store(rule.k_factor + factors, k_factor, mask=span.mask)
                tl.store(rule.q_factor + factors, inverse_norm(squares, eps, EXACT), mask=span.mask)

        system = tl.where(rows[:, None] > rows[None, :], decays(total, rows) * products * beta[None, :], 0.0)
        inverse = inverse_of_unit_lower(system, CHUNK, "ieee" if EXACT else "tf32")
        ptrs = square_ptrs(inverse_ptr, rule, span, row, rows[:, None], rows[None, :], CHUNK)
        tl.store(ptrs, inverse.to(inverse_ptr.dtype.element_ty), mask=span.mask[:, None])


@kernel
def _solve_kernel(rule, inverse_ptr, readers_ptr, errors_ptr, CHUNK: tl.constexpr, FEATURES: tl.constexpr):
    head, slot, batch = split_program(rule.n_heads, rule.n_slots)
    row, key_head = head_rows(rule, batch, head)
    rows = tl.arange(0, CHUNK)
    for chunk in range(slot, chunk_count(rule.table, rule.n_tokens, batch, CHUNK), rule.n_slots):
        span = chunk_span(rule.table, rule.n_tokens, batch, chunk, rows, CHUNK)
        inverse_ptrs = square_ptrs(inverse_ptr, rule, span, row, rows[:, None], rows[None, :], CHUNK)
        inverse = tl.load(inverse_ptrs, mask=span.mask[:, None], other=0.0)
        _, q_factor, k_factor = load_coefficients(rule, span, head)
        if rule.writers is None:
            total = load_totals(rule, span, row)[0]
            scaled = (inverse.to(tl.float32) * (decay_over(total) * k_factor)[None, :]).to(inverse.dtype)
        else:
            scaled = inverse
        for first in range(0, rule.key_dim, FEATURES):
            features = first + tl.arange(0, FEATURES)
            k = load_tile(rule.k, span, key_head, features, rule.key_dim)
            if rule.writers is not None:
                wide_k = k.to(tl.float32) * k_factor[:, None]
                totals = load_channel_totals(rule, span, row, features)
                last_total = load_channel_total(rule, row, span.end - 1, features)
                q = load_tile(rule.q, span, key_head, features, rule.key_dim).to(tl.float32)
                queries = q * (q_factor * rule.scale)[:, None] * decay_over(totals)
                store_tile(by_head(rule.queries, rule), queries, span, head, features, rule.key_dim)
                writers = wide_k * decay_over(last_total[None, :] - totals)
                store_tile(by_head(rule.writers, rule), writers, span, head, features, rule.key_dim)
                k = (wide_k * decay_over(totals)).to(k.dtype)
            readers = tl.dot(scaled, k, input_precision="ieee")
            store_tile(by_head(readers_ptr, rule), readers, span, head, features, rule.key_dim)
        for first in range(0, rule.value_dim, FEATURES):
            values = first + tl.arange(0, FEATURES)
            v = load_tile(rule.v, span, head, values, rule.value_dim)
            errors = tl.dot(inverse, v, input_precision="ieee")
            store_tile(by_token(errors_ptr, rule), errors, span, head, values, rule.value_dim)


@kernel
def _scan_kernel(
    rule, readers_ptr, errors_ptr, states_ptr, initial_ptr, final_ptr, n_shares, n_blocks,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    block, share, row = split_program(n_blocks, n_shares)
    batch, head = row // rule.n_heads, row % rule.n_heads
    rows = tl.arange(0, CHUNK)
    features, values, state_mask = state_block(rule, block, KEYS, VALUES)
    state_size = rule.key_dim * rule.value_dim
    state_offsets = values[:, None] * rule.key_dim + features[None, :]
    outer_offsets = features[None, :] * rule.value_dim + values[:, None]  # of (d_k, d_v)
    n_segments = segment_count(rule.table, batch)
    for segment in range(share, n_segments, n_shares):
        first, after_last = segment_chunks(rule.table, rule.n_tokens, batch, segment, CHUNK)
        state = tl.zeros((VALUES, KEYS), dtype=tl.float32)  # transposed
        if initial_ptr is not None:
            initial = initial_ptr + row * state_size + outer_offsets
            state = tl.load(initial, mask=state_mask & (segment == 0), other=0.0).to(tl.float32)
        for chunk in range(first, after_last):
            span = chunk_span(rule.table, rule.n_tokens, batch, chunk, rows, CHUNK)
            keys, key_head, factor = written_keys(rule, span, row, head)
            kept = kept_share(rule, span, row, features)
            beta = load_coefficients(rule, span, head)[0]
            k = load_tile(keys, span, key_head, features, rule.key_dim)
            readers = load_columns(by_head(readers_ptr, rule), span, head, features, rule.key_dim)
            errors = load_columns(by_token(errors_ptr, rule), span, head, values, rule.value_dim).to(tl.float32)

            rounded = state.to(k.dtype)
            slot = (row * rule.n_slots + span.start // CHUNK) * state_size
            stored = state_mask & continues(rule, batch, span.start)
            tl.store(states_ptr + slot + state_offsets, rounded, mask=stored)
            errors -= tl.dot(rounded, readers, input_precision="ieee")
            store_columns(by_token(errors_ptr, rule), errors, span, head, values, rule.value_dim)
            written = errors * (factor * beta)[None, :]
            state = tl.dot(written.to(k.dtype), k, kept * state, input_precision="ieee")
        if final_ptr is not None:
            final = final_ptr + row * state_size + outer_offsets
            tl.store(final, state, mask=state_mask & (segment == n_segments - 1))


@kernel
def _outputs_kernel(
    rule, errors_ptr, states_ptr, out_ptr, CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr
):
    head, slot, batch = split_program(rule.n_heads, rule.n_slots)
    row, key_head = head_rows(rule, batch, head)
    rows, features = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    for chunk in range(slot, chunk_count(rule.table, rule.n_tokens, batch, CHUNK), rule.n_slots):
        span = chunk_span(rule.table, rule.n_tokens, batch, chunk, rows, CHUNK)
        queries, query_head, state_factor = reading_queries(rule, span, row, head)
        q = load_tile(queries, span, query_head, features, rule.key_dim)
        beta, q_factor, k_factor = load_coefficients(rule, span, head)
        if rule.attention is not None:
            squares = square_ptrs(rule.attention, rule, span, row, rows[:, None], rows[None, :], CHUNK)
            attention = tl.load(squares, mask=span.mask[:, None], other=0.0).to(tl.float32) * beta[None, :]
        else:
            k = load_tile(rule.k, span, key_head, features, rule.key_dim)
            attention = tl.dot(q, tl.trans(k), input_precision="ieee") * decays(load_totals(rule, span, row)[0], rows)
            attention = attention * (q_factor * rule.scale)[:, None] * (k_factor * beta)[None, :]
        attention = attention.to(q.dtype)
        has_state = continues(rule, batch, span.start)
        slot_of_state = row * rule.n_slots + span.start // CHUNK
        for first in range(0, rule.value_dim, VALUES):
            values = first + tl.arange(0, VALUES)
            state = load_state(states_ptr, rule, slot_of_state, features[:, None], values[None, :], has_state)
            errors = load_tile(by_token(errors_ptr, rule), span, head, values, rule.value_dim)
            out = tl.dot(q, state, input_precision="ieee") * state_factor[:, None]
            out = tl.dot(attention, errors, out, input_precision="ieee")
            store_tile(by_token(out_ptr, rule), out, span, head, values, rule.value_dim)


class Inputs(NamedTuple):
    """The inputs of `gated_delta_rule` that both passes read, in one dtype and with adjacent features.

    Attributes:
        q: (B, T, K, D_k).
        k: (B, T, K, D_k).
        v: (B, T, V, D_v).
        beta: (B, T, V), of any dtype, contiguous.
        initial_state: (B, V, D_k, D_v), of any dtype, contiguous; or None.
        segment_start: (B or 1, T) integers, or None.
        scale: factor of the outputs.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    initial_state: Tensor | None
    segment_start: Tensor | None
    scale: float


class Prepared(NamedTuple):
    """What `prepare` computes, and backward needs: 66 elements per token and value head, and 8 bytes per token and key
    head; with gates per channel D_k + 64 elements more.

    Attributes:
        inverse: (B, V, T, 64) X, the rows of each chunk, in the dtype of the tokens.
        attention: (B, V, T, 64) P, likewise; without elements with gates per head.
        total: (B, V, T) or (B, V, T, D_k) G, see `total_dtype`.
        q_factor: (B, K, T) fp32, 1 / norm of q; without elements if q and k are not normalized.
        k_factor: (B, K, T) fp32, 1 / norm of k, likewise.
    """

    inverse: Tensor
    attention: Tensor
    total: Tensor
    q_factor: Tensor
    k_factor: Tensor


def allocate_prepared(k: Tensor, v: Tensor, normalize: bool, is_per_channel: bool) -> Prepared:
    """Uninitialized results of `prepare`."""
    batch, tokens, heads = v.shape[:3]
    factor_shape = (batch, k.shape[2], tokens) if normalize else (0,)
    square = batch, heads, tokens, CHUNK
    channels = (k.shape[3],) if is_per_channel else ()
    return Prepared(
        v.new_empty(square),
        v.new_empty(square if is_per_channel else (0,)),
        v.new_empty((batch, heads, tokens, *channels), dtype=total_dtype(v)),
        v.new_empty(factor_shape, dtype=torch.float32),
        v.new_empty(factor_shape, dtype=torch.float32),
    )


def rule_of(inputs: Inputs, prepared: Prepared) -> DeltaRule:
    """What kernels read."""
    q, k, v = map(strided, inputs[:3])
    q_factor, k_factor = (factor if factor.numel() > 0 else None for factor in prepared[3:])
    (_, n_tokens, heads, value_dim), (key_heads, key_dim) = inputs.v.shape, inputs.k.shape[2:]
    sizes = n_tokens, cdiv(n_tokens, CHUNK), heads, heads // key_heads, key_dim, value_dim
    table = chunk_table(inputs.segment_start, CHUNK)
    rule = DeltaRule(q, k, v, inputs.beta, prepared.total, q_factor, k_factor, table, *sizes, inputs.scale)
    return rule if prepared.total.dim() == 3 else rule._replace(attention=prepared.attention)


def launch_of(launches: dict[int, Launch], rule: DeltaRule) -> Launch:
    """The launch for these tokens. Tiles of more than 128 keys must leave shared memory for the others."""
    launch = launches[rule.v.ptr.element_size()]
    return launch if rule.key_dim <= 128 else Launch(min(launch.values, 16), launch.warps, stages=1)


def chunk_programs(rule: DeltaRule) -> int:
    """Programs of a kernel with one for each chunk and value head."""
    return len(rule.v.ptr) * rule.n_slots * rule.n_heads


def prepare(rule: DeltaRule, g: Tensor, inverse: Tensor) -> None:
    """Computes the triangular inverses, the sums of g, (B, T, V) and contiguous, and the norms."""
    features = min(FEATURES, padded_size(rule.key_dim))
    options = launch_of(PREPARE, rule).options
    _prepare_kernel[chunk_programs(rule)](rule, g, inverse, NORMALIZATION_EPS, CHUNK, features, **options)


def solve(rule: DeltaRule, inverse: Tensor) -> tuple[DeltaRule, Tensor, Tensor]:
    """Returns the rule, with U and L if gates are per channel; W, (B, V, T, D_k); and X V, (B, T, V, D_v)."""
    is_per_channel, v = rule.attention is not None, rule.v.ptr
    launch = launch_of(SOLVE_CHANNELS if is_per_channel else SOLVE, rule)
    of_keys = len(v), rule.n_heads, rule.n_tokens, rule.key_dim
    if is_per_channel:
        rule = rule._replace(queries=v.new_empty(of_keys), writers=v.new_empty(of_keys))
    readers, errors = v.new_empty(of_keys), empty_result(v)
    features = min(launch.values, padded_size(rule.key_dim, rule.value_dim))
    _solve_kernel[chunk_programs(rule)](rule, inverse, readers, errors, CHUNK, features, **launch.options)
    return rule, readers, errors


def scan(
    rule: DeltaRule, readers: Tensor, errors: Tensor, initial_state: Tensor | None, final_state: Tensor | None
) -> Tensor:
    """Returns the state before each chunk, transposed, (B, V, slots, D_v, D_k).

    Completes `errors`, X V, to E in place, and writes the (B, V, D_k, D_v) `final_state`.
    """
    launch = launch_of(SCAN, rule)
    keys, values = launch.tile(rule.key_dim, rule.value_dim)
    v, shares, blocks = rule.v.ptr, segment_shares(rule.table), cdiv(rule.value_dim, values)
    states = v.new_empty((len(v), rule.n_heads, rule.n_slots, rule.value_dim, rule.key_dim))
    _scan_kernel[len(v) * rule.n_heads * shares * blocks](
        rule, readers, errors, states, initial_state, final_state, shares, blocks, CHUNK, keys, values, **launch.options
    )
    return states


def outputs(rule: DeltaRule, errors: Tensor, states: Tensor) -> Tensor:
    """Returns the (B, T, V, D_v) outputs."""
    launch = launch_of(OUTPUTS, rule)
    keys, values = launch.tile(rule.key_dim, rule.value_dim)
    out = torch.empty_like(errors)
    _outputs_kernel[chunk_programs(rule)](rule, errors, states, out, CHUNK, keys, values, **launch.options)
    return out
