"""The chunked backward pass of the gated delta rule, in the notation of `delta_chunks`.

With D = diag(beta) E the deltas, P the attention within a chunk, P_ij = scale e_ij (q_i . k_j) for j <= i, dS' the
gradient of the state after the chunk, and products of normalized q and k:

    dD  = P^T dO + diag(exp(G_last - G)) K dS'           as far as D is written to the state and to outputs
    dE  = diag(beta) dD
    dV  = X^T dE
    dS  = exp(G_last) dS' + scale Q^T diag(exp(G)) dO - W^T dE

    dQ  = scale (diag(exp(G)) dO S^T + (e o dO D^T) K)
    dK  = dK_read + dK_written,   dK_read    = -diag(exp(G)) dV S^T - (e o dV D^T) K
                                  dK_written = diag(exp(G_last - G)) D dS'^T - (e o dV D^T)^T K + scale (e o dO D^T)^T Q
    dbeta_i = (dD - M^T dV)_i . E_i = dD_i . E_i - sum over j > i of M_ji (dV_j . E_i)

o is the elementwise product; the e that multiplies dV D^T is without the diagonal. exp(G_i) always comes with q_i or a
k_i that reads, exp(-G_i) with a k_i that is written, so

    dG_i = q_i . dQ_i + k_i . (dK_read_i - dK_written_i),   dG_last += exp(G_last) <S, dS'> + the sum over j of the part
                                                            of k_j . dK_written_j from dS'

and dg_i is the sum of dG from i on. No beta divides, so that a beta of 0 has its gradient.

Six kernels, after `solve` and `scan` have computed W, E and S again:

1. `local_gradients`, for each chunk: P^T dO and the square scale e o dO D^T;
2. `reverse_scan`, for each head and block of values, from the last chunk to the first: dD and dS;
3. `value_gradients`, for each chunk: dV, dbeta and the square e o dV D^T;
4. `query_gradients`, for each half chunk and key head: dQ and its part of dG;
5. `key_gradients`, likewise: dK and the rest of dG. Both add up the value heads that share a key head;
6. `gate_gradients`, for each chunk: dg.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.chunk_tiles import (
    ChunkTable,
    Launch,
    by_token,
    chunk_count,
    chunk_span,
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
    part_of_chunk,
    segment_chunks,
    segment_count,
    segment_shares,
    slot_of_gradient,
    split_program,
    square_ptrs,
    state_block,
    store_columns,
    store_tile,
)
from ligerzoo.kernels.delta_chunks import chunk_programs, launch_of
from ligerzoo.kernels.delta_tiles import (
    CHUNK,
    FEATURES,
    DeltaRule,
    by_head,
    kept_share,
    load_coefficients,
    load_factors,
    reading_queries,
    written_keys,
)
from ligerzoo.kernels.dispatch import cdiv
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.strided import strided

LOCAL = {2: Launch(values=64, warps=2, stages=2), 4: Launch(values=32, warps=8, stages=1)}
REVERSE_SCAN = {2: Launch(values=16, warps=4, stages=2), 4: Launch(values=16, warps=8, stages=1)}
VALUE_GRADIENTS = {2: Launch(values=16, warps=2, stages=3), 4: Launch(values=16, warps=8, stages=1)}
QUERY_GRADIENTS = {2: Launch(values=64, warps=4, stages=1), 4: Launch(values=16, warps=8, stages=1)}
KEY_GRADIENTS = {2: Launch(values=64, warps=4, stages=1), 4: Launch(values=16, warps=8, stages=1)}
"""By the element size of the tokens' tensors, see `delta_chunks`."""

ROWS = 32
"""Tokens of a program of `query_gradients` and `key_gradients`."""


@kernel
def _local_kernel(
    rule, dout, errors_ptr, ddelta_ptr, dattention_ptr,
    CHUNK: tl.constexpr, FEATURES: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    head, slot, batch = split_program(rule.n_heads, rule.n_slots)
    row, key_head = head_rows(rule, batch, head)
    rows = tl.arange(0, CHUNK)
    for chunk in range(slot, chunk_count(rule.table, rule.n_tokens, batch, CHUNK), rule.n_slots):
        span = chunk_span(rule.table, rule.n_tokens, batch, chunk, rows, CHUNK)
        _, q_factor, k_factor = load_coefficients(rule, span, head)
        if rule.attention is not None:
            squares = square_ptrs(rule.attention, rule, span, row, rows[:, None], rows[None, :], CHUNK)
            products = tl.load(squares, mask=span.mask[:, None], other=0.0)
        else:
            products = inner_products(rule.q, rule.k, span, key_head, rule.key_dim, FEATURES)
            total = load_totals(rule, span, row)[0]
            products *= decays(total, rows) * (q_factor * rule.scale)[:, None] * k_factor[None, :]
        transposed = tl.trans(products.to(ddelta_ptr.dtype.element_ty))  # P^T
        dattention = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        for first in range(0, rule.value_dim, VALUES):
            values = first + tl.arange(0, VALUES)
            dout_tile = load_tile(dout, span, head, values, rule.value_dim).to(transposed.dtype)
            errors = load_tile(by_token(errors_ptr, rule), span, head, values, rule.value_dim)
            ddelta = tl.dot(transposed, dout_tile, input_precision="ieee")
            store_tile(by_token(ddelta_ptr, rule), ddelta, span, head, values, rule.value_dim)
            dattention = tl.dot(dout_tile, tl.trans(errors), dattention, input_precision="ieee")
        weights = (load_coefficients(rule, span, head)[0] * rule.scale)[None, :]
        if rule.attention is None:
            weights = decays(load_totals(rule, span, row)[0], rows) * weights
        dattention *= weights
        ptrs = square_ptrs(dattention_ptr, rule, span, row, rows[:, None], rows[None, :], CHUNK)
        tl.store(ptrs, dattention.to(dattention_ptr.dtype.element_ty), mask=span.mask[:, None])


@kernel
def _reverse_scan_kernel(
    rule, dout, readers_ptr, ddelta_ptr, dstates_ptr, dfinal_ptr, dinitial_ptr, n_shares, n_blocks,
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
        dstate = tl.zeros((VALUES, KEYS), dtype=tl.float32)  # transposed
        if dfinal_ptr is not None:
            is_last = segment == n_segments - 1
            dfinal = dfinal_ptr + row * state_size + outer_offsets
            dstate = tl.load(dfinal, mask=state_mask & is_last, other=0.0).to(tl.float32)
        for reverse in range(after_last - first):
            span = chunk_span(rule.table, rule.n_tokens, batch, after_last - 1 - reverse, rows, CHUNK)
            queries, query_head, q_factor = reading_queries(rule, span, row, head)
            keys, key_head, k_factor = written_keys(rule, span, row, head)
            kept, beta = kept_share(rule, span, row, features), load_coefficients(rule, span, head)[0]

            rounded = dstate.to(rule.q.ptr.dtype.element_ty)
            slot, exists = slot_of_gradient(rule, span, CHUNK)
            dstates = dstates_ptr + (row * (rule.n_slots + 1) + slot) * state_size + state_offsets
            tl.store(dstates, rounded, mask=state_mask & exists)

            q = load_tile(queries, span, query_head, features, rule.key_dim)
            scaled_dout = load_columns(dout, span, head, values, rule.value_dim).to(tl.float32)
            scaled_dout *= q_factor[None, :]
            dstate = tl.dot(scaled_dout.to(q.dtype), q, kept * dstate, input_precision="ieee")

            k = load_columns(keys, span, key_head, features, rule.key_dim)
            ddelta = load_columns(by_token(ddelta_ptr, rule), span, head, values, rule.value_dim).to(tl.float32)
            read = tl.dot(rounded, k, input_precision="ieee")
            ddelta += k_factor[None, :] * read
            store_columns(by_token(ddelta_ptr, rule), ddelta, span, head, values, rule.value_dim)

            readers = load_tile(by_head(readers_ptr, rule), span, head, features, rule.key_dim)
            dstate = tl.dot((ddelta * -beta[None, :]).to(k.dtype), readers, dstate, input_precision="ieee")
        if dinitial_ptr is not None:
            dinitial = dinitial_ptr + row * state_size + outer_offsets
            tl.store(dinitial, dstate.to(dinitial_ptr.dtype.element_ty), mask=state_mask & (segment == 0))


@kernel
def _value_gradients_kernel(
    rule, inverse_ptr, errors_ptr, ddelta_ptr, dv_ptr, dbeta_ptr, dsystem_ptr,
    CHUNK: tl.constexpr, FEATURES: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    head, slot, batch = split_program(rule.n_heads, rule.n_slots)
    row, key_head = head_rows(rule, batch, head)
    rows = tl.arange(0, CHUNK)
    for chunk in range(slot, chunk_count(rule.table, rule.n_tokens, batch, CHUNK), rule.n_slots):
        span = chunk_span(rule.table, rule.n_tokens, batch, chunk, rows, CHUNK)
        beta, _, k_factor = load_coefficients(rule, span, head)
        inverse_ptrs = square_ptrs(inverse_ptr, rule, span, row, rows[None, :], rows[:, None], CHUNK)
        transposed = tl.load(inverse_ptrs, mask=span.mask[None, :], other=0.0)
        products = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)  # dV E^T
        dbeta = tl.zeros((CHUNK,), dtype=tl.float32)
        for first in range(0, rule.value_dim, VALUES):
            values = first + tl.arange(0, VALUES)
            errors = load_tile(by_token(errors_ptr, rule), span, head, values, rule.value_dim)
            ddelta = load_tile(by_token(ddelta_ptr, rule), span, head, values, rule.value_dim).to(tl.float32)
            derrors = (ddelta * beta[:, None]).to(errors.dtype)
            dv = tl.dot(transposed, derrors, input_precision="ieee").to(errors.dtype)
            store_tile(by_token(dv_ptr, rule), dv, span, head, values, rule.value_dim)
            dbeta += tl.sum(ddelta * errors.to(tl.float32), 1)
            products = tl.dot(dv, tl.trans(errors), products, input_precision="ieee")

        dsystem = products
        if rule.attention is None:
            total = load_totals(rule, span, row)[0]
            products = tl.where(rows[:, None] > rows[None, :], decays(total, rows) * products, 0.0)
            dsystem = products * beta[None, :]
        dsystem_ptrs = square_ptrs(dsystem_ptr, rule, span, row, rows[:, None], rows[None, :], CHUNK)
        tl.store(dsystem_ptrs, dsystem.to(dsystem_ptr.dtype.element_ty), mask=span.mask[:, None])
        if rule.attention is None:
            products *= k_factor[:, None] * inner_products(rule.k, rule.k, span, key_head, rule.key_dim, FEATURES)
            dbeta -= tl.sum(products, 0) * k_factor
        tl.store(dbeta_ptr + gate_offsets(rule, span, head), dbeta.to(dbeta_ptr.dtype.element_ty), mask=span.mask)


@kernel
def _query_gradients_kernel(
    rule, dout, states_ptr, dattention_ptr, dq, dtotals_ptr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    first_row, key_head, slot, batch = part_of_chunk(rule, rule.n_heads // rule.group, CHUNK, ROWS)
    rows, own_rows, features = tl.arange(0, CHUNK), first_row + tl.arange(0, ROWS), tl.arange(0, KEYS)
    for chunk in range(slot, chunk_count(rule.table, rule.n_tokens, batch, CHUNK), rule.n_slots):
        whole = chunk_span(rule.table, rule.n_tokens, batch, chunk, rows, CHUNK)
        own = chunk_span(rule.table, rule.n_tokens, batch, chunk, own_rows, CHUNK)
        has_state = continues(rule, batch, own.start)
        q, q_factor = load_normalized(rule.q, rule.q_factor, rule, own, key_head, features)
        k, _ = load_normalized(rule.k, rule.k_factor, rule, own, key_head, features)
        all_k, _ = load_normalized(rule.k, rule.k_factor, rule, whole, key_head, features)
        gradient = tl.zeros((ROWS, KEYS), dtype=tl.float32)  # of the normalized q
        for head in range(key_head * rule.group, (key_head + 1) * rule.group):
            row = batch * rule.n_heads + head
            slot_of_state = row * rule.n_slots + own.start // CHUNK
            product = tl.zeros((ROWS, KEYS), dtype=tl.float32)  # dO S^T
            for first in range(0, rule.value_dim, VALUES):
                values = first + tl.arange(0, VALUES)
                dout_tile = load_tile(dout, own, head, values, rule.value_dim).to(k.dtype)
                state = load_state(states_ptr, rule, slot_of_state, features[None, :], values[:, None], has_state)
                product = tl.dot(dout_tile, state, product, input_precision="ieee")
            total = load_totals(rule, own, row)[0]
            product *= (decay_over(total) * rule.scale)[:, None]
            squares = square_ptrs(dattention_ptr, rule, own, row, own_rows[:, None], rows[None, :], CHUNK)
            is_before = own_rows[:, None] > rows[None, :]
            dattention = tl.load(squares, mask=own.mask[:, None] & is_before, other=0.0)
            product = tl.dot(dattention, all_k, product, input_precision="ieee")
            # The diagonal has no part in dg: added to dtotal, its terms of q and of k would cancel but for rounding.
            dtotal = tl.sum(q.to(tl.float32) * product, 1)
            tl.store(dtotals_ptr + row * rule.n_tokens + own.tokens, dtotal, mask=own.mask)
            diagonal = square_ptrs(dattention_ptr, rule, own, row, own_rows, own_rows, CHUNK)
            dattention = tl.load(diagonal, mask=own.mask, other=0.0).to(tl.float32)
            gradient += product + dattention[:, None] * k.to(tl.float32)
        store_unnormalized(dq, gradient, q, q_factor, rule, own, key_head, features)


@kernel
def _key_gradients_kernel(
    rule, errors_ptr, dv_ptr, states_ptr, dstates_ptr, dattention_ptr, dsystem_ptr, dk, dtotals_ptr, n_rows,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    first_row, key_head, slot, batch = part_of_chunk(rule, rule.n_heads // rule.group, CHUNK, ROWS)
    rows, own_rows, features = tl.arange(0, CHUNK), first_row + tl.arange(0, ROWS), tl.arange(0, KEYS)
    for chunk in range(slot, chunk_count(rule.table, rule.n_tokens, batch, CHUNK), rule.n_slots):
        whole = chunk_span(rule.table, rule.n_tokens, batch, chunk, rows, CHUNK)
        own = chunk_span(rule.table, rule.n_tokens, batch, chunk, own_rows, CHUNK)
        has_state = continues(rule, batch, own.start)
        dslot, has_dstate = slot_of_gradient(rule, own, CHUNK)
        q, _ = load_normalized(rule.q, rule.q_factor, rule, own, key_head, features)
        k, k_factor = load_normalized(rule.k, rule.k_factor, rule, own, key_head, features)
        all_q, _ = load_normalized(rule.q, rule.q_factor, rule, whole, key_head, features)
        all_k, _ = load_normalized(rule.k, rule.k_factor, rule, whole, key_head, features)
        gradient = tl.zeros((ROWS, KEYS), dtype=tl.float32)  # of the normalized k
        for head in range(key_head * rule.group, (key_head + 1) * rule.group):
            row = batch * rule.n_heads + head
            slot_of_state, slot_of_dstate = row * rule.n_slots + own.start // CHUNK, row * (rule.n_slots + 1) + dslot
            read = tl.zeros((ROWS, KEYS), dtype=tl.float32)  # dV S^T
            written = tl.zeros((ROWS, KEYS), dtype=tl.float32)  # E dS'^T
            kept = tl.zeros((KEYS,), dtype=tl.float32)  # <S, dS'>
            for first in range(0, rule.value_dim, VALUES):
                values = first + tl.arange(0, VALUES)
                dv = load_tile(by_token(dv_ptr, rule), own, head, values, rule.value_dim)
                errors = load_tile(by_token(errors_ptr, rule), own, head, values, rule.value_dim)
                state = load_state(states_ptr, rule, slot_of_state, features[None, :], values[:, None], has_state)
                dstate = load_state(dstates_ptr, rule, slot_of_dstate, features[None, :], values[:, None], has_dstate)
                read = tl.dot(dv, state, read, input_precision="ieee")
                written = tl.dot(errors, dstate, written, input_precision="ieee")
                kept += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 0)

            total, last_total = load_totals(rule, own, row)
            beta = load_coefficients(rule, own, head)[0]
            squares = square_ptrs(dsystem_ptr, rule, own, row, own_rows[:, None], rows[None, :], CHUNK)
            dsystem = tl.load(squares, mask=own.mask[:, None], other=0.0)
            read = tl.dot(dsystem, all_k, read * decay_over(total)[:, None], input_precision="ieee")

            written *= (decay_over(last_total - total) * beta)[:, None]
            dlast = tl.sum(tl.sum(k.to(tl.float32) * written, 1), 0)
            dlast += tl.where(first_row == 0, tl.sum(kept, 0) * decay_over(last_total), 0.0)
            is_after = own_rows[:, None] < rows[None, :]
            transposed = square_ptrs(dattention_ptr, rule, own, row, rows[None, :], own_rows[:, None], CHUNK)
            dattention = tl.load(transposed, mask=whole.mask[None, :] & is_after, other=0.0)
            transposed = square_ptrs(dsystem_ptr, rule, own, row, rows[None, :], own_rows[:, None], CHUNK)
            dsystem = tl.load(transposed, mask=whole.mask[None, :], other=0.0)
            written = tl.dot(dattention, all_q, written, input_precision="ieee")
            written -= tl.dot(dsystem, all_k, input_precision="ieee")

            dtotal = -tl.sum(k.to(tl.float32) * (read + written), 1)
            tl.store(dtotals_ptr + (n_rows + row) * rule.n_tokens + own.tokens, dtotal, mask=own.mask)
            part = dtotals_ptr + ((2 + first_row // ROWS) * n_rows + row) * rule.n_tokens
            tl.store(part + own.start, dlast)
            diagonal = square_ptrs(dattention_ptr, rule, own, row, own_rows, own_rows, CHUNK)
            dattention = tl.load(diagonal, mask=own.mask, other=0.0).to(tl.float32)
            gradient += written - read + dattention[:, None] * q.to(tl.float32)
        store_unnormalized(dk, gradient, k, k_factor, rule, own, key_head, features)


@jit
def load_normalized(x, factor_ptr, rule, span, key_head, features):
    """Normalized q or k of some tokens, and the factors of the normalization."""
    factors = load_factors(factor_ptr, rule, span, span.batch * (rule.n_heads // rule.group) + key_head)
    tile = load_tile(x, span, key_head, features, rule.key_dim)
    return (tile * factors[:, None]).to(tile.dtype), factors


@jit
def store_unnormalized(x, gradient, normalized, factors, rule, span, key_head, features):
    """Stores the gradient of q or k, given that of its normalized rows."""
    if rule.k_factor is not None:
        normalized = normalized.to(tl.float32)
        gradient = factors[:, None] * (gradient - normalized * tl.sum(normalized * gradient, 1)[:, None])
    store_tile(x, gradient, span, key_head, features, rule.key_dim)


class Gradients(NamedTuple):
    """The gradients of the inputs of `gated_delta_rule`, contiguous, in their dtypes.

    Attributes:
        dq: (B, T, K, D_k).
        dk: (B, T, K, D_k).
        dv: (B, T, V, D_v).
        dg: (B, T, V) or (B, T, V, D_k).
        dbeta: (B, T, V).
        dinitial: (B, V, D_k, D_v), or without elements.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dinitial: Tensor


def local_gradients(rule: DeltaRule, errors: Tensor, dout: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Returns P^T dO, (B, T, V, D_v), and scale e o dO D^T, (B, V, T, 64), as `inverse`."""
    launch = launch_of(LOCAL, rule)
    keys, values = launch.tile(rule.key_dim, rule.value_dim)
    ddelta, dattention = torch.empty_like(errors), torch.empty_like(inverse)
    _local_kernel[chunk_programs(rule)](
        rule, strided(dout), errors, ddelta, dattention, CHUNK, min(FEATURES, keys), values, **launch.options
    )
    return ddelta, dattention


def reverse_scan(
    rule: DeltaRule, readers: Tensor, dout: Tensor, ddelta: Tensor, dfinal: Tensor | None, dinitial: Tensor | None
) -> Tensor:
    """Completes `ddelta`, P^T dO, to dD in place, and writes the gradient of the initial state.

    Returns:
        (B, V, slots + 1, D_v, D_k) gradient of the state before each chunk and, in the last slot, of the final state,
        transposed.
    """
    launch = launch_of(REVERSE_SCAN, rule)
    sizes = CHUNK, *launch.tile(rule.key_dim, rule.value_dim)
    shares, blocks = segment_shares(rule.table), cdiv(rule.value_dim, sizes[-1])
    dstates = ddelta.new_empty((len(ddelta), rule.n_heads, rule.n_slots + 1, rule.value_dim, rule.key_dim))
    _reverse_scan_kernel[len(ddelta) * rule.n_heads * shares * blocks](
        rule, strided(dout), readers, ddelta, dstates, dfinal, dinitial, shares, blocks, *sizes, **launch.options
    )
    return dstates


def value_gradients(
    rule: DeltaRule, inverse: Tensor, errors: Tensor, ddelta: Tensor, dv: Tensor, dbeta: Tensor
) -> Tensor:
    """Writes the gradients of v and beta. Returns e o dV D^T, (B, V, T, 64).

    With gates per channel `dbeta` is the part dD_i . E_i, and the result dV E^T.
    """
    launch = launch_of(VALUE_GRADIENTS, rule)
    keys, values = launch.tile(rule.key_dim, rule.value_dim)
    dsystem, sizes = torch.empty_like(inverse), (CHUNK, min(FEATURES, keys), values)
    _value_gradients_kernel[chunk_programs(rule)](
        rule, inverse, errors, ddelta, dv, dbeta, dsystem, *sizes, **launch.options
    )
    return dsystem


def allocate_dtotals(v: Tensor) -> Tensor:
    """Uninitialized (2 + 64 / ROWS, B, V, T) fp32: two parts of dG that depend on the token, and terms of dG_last.

    Terms of dG_last are at the first token of each chunk.
    """
    return v.new_empty((2 + CHUNK // ROWS, v.shape[0], v.shape[2], v.shape[1]), dtype=torch.float32)


def query_gradients(
    rule: DeltaRule, states: Tensor, dout: Tensor, dattention: Tensor, gradients: Gradients, dtotals: Tensor
) -> None:
    """Writes the gradient of q, and its part of `dtotals`."""
    launch = launch_of(QUERY_GRADIENTS, rule)
    sizes = CHUNK, ROWS, *launch.tile(rule.key_dim, rule.value_dim)
    _query_gradients_kernel[_key_programs(rule)](
        rule, strided(dout), states, dattention, strided(gradients.dq), dtotals, *sizes, **launch.options
    )


def key_gradients(
    rule: DeltaRule, errors: Tensor, states: tuple[Tensor, Tensor], squares: tuple[Tensor, Tensor],
    gradients: Gradients, dtotals: Tensor,
) -> None:  # fmt: skip
    """Writes the gradient of k, and its part of `dtotals`.

    Args:
        rule: what kernels read.
        errors: E.
        states: of each chunk, and their gradients.
        squares: scale e o dO D^T and e o dV D^T.
        gradients: has the gradient of v.
        dtotals: see `allocate_dtotals`.
    """
    launch = launch_of(KEY_GRADIENTS, rule)
    sizes = CHUNK, ROWS, *launch.tile(rule.key_dim, rule.value_dim)
    dk, n_rows = strided(gradients.dk), len(errors) * rule.n_heads
    _key_gradients_kernel[_key_programs(rule)](
        rule, errors, gradients.dv, *states, *squares, dk, dtotals, n_rows, *sizes, **launch.options
    )


def _key_programs(rule: DeltaRule) -> int:
    """Programs of a kernel with one for each half chunk and key head."""
    return len(rule.v.ptr) * rule.n_slots * (rule.n_heads // rule.group) * (CHUNK // ROWS)


@kernel(unspecialized=("n_tokens",))  # so that a segment is added up as the segment alone
def _gate_gradients_kernel(dtotals_ptr, dg_ptr, table, n_tokens, n_slots, n_heads, n_rows, SIZES: tl.constexpr):
    CHUNK: tl.constexpr = SIZES[0]
    TERMS: tl.constexpr = SIZES[1]
    PARTS: tl.constexpr = SIZES[2]
    head, slot, batch = split_program(n_heads, n_slots)
    row = batch * n_heads + head
    rows = tl.arange(0, CHUNK)
    for chunk in range(slot, chunk_count(table, n_tokens, batch, CHUNK), n_slots):
        span = chunk_span(table, n_tokens, batch, chunk, rows, CHUNK)
        dtotal = tl.load(dtotals_ptr + row * n_tokens + span.tokens, mask=span.mask, other=0.0)
        for term in tl.static_range(1, TERMS):
            dtotal += tl.load(dtotals_ptr + (term * n_rows + row) * n_tokens + span.tokens, mask=span.mask, other=0.0)
        for part in tl.static_range(PARTS):
            dlast = tl.load(dtotals_ptr + ((TERMS + part) * n_rows + row) * n_tokens + span.start)
            dtotal += tl.where(span.tokens == span.end - 1, dlast, 0.0)
        dg = tl.cumsum(dtotal, 0, reverse=True)
        gates = (batch * n_tokens + span.tokens) * n_heads + head
        tl.store(dg_ptr + gates, dg.to(dg_ptr.dtype.element_ty), mask=span.mask)


def gate_gradients(table: ChunkTable, dtotals: Tensor, dg: Tensor, chunk: int, parts: int) -> None:
    """Writes the gradient of g, (B, T, V).

    Args:
        table: the chunks.
        dtotals: (terms + parts, B, V, T) fp32, terms of the gradient of G: those of tokens, then those of the last
            token of a chunk, which are at its first token.
        dg: the gradient.
        chunk: tokens of a chunk.
        parts: terms of the last token.
    """
    terms, batch, heads, n_tokens = dtotals.shape
    slots = cdiv(n_tokens, chunk)
    _gate_gradients_kernel[batch * slots * heads](
        dtotals, dg, table, n_tokens, slots, heads, batch * heads, (chunk, terms - parts, parts), num_warps=1
    )
