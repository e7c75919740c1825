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

from ligerzoo.kernels.delta_chunks import (
    SEGMENT_PROGRAMS,
    Launch,
    Prepared,
    Tokens,
    is_exact,
    launch_of,
    optional,
)
from ligerzoo.kernels.delta_tiles import (
    CHUNK,
    FEATURES,
    ChunkTable,
    chunk_count,
    chunk_tokens,
    continues,
    decay_over,
    decays,
    head_rows,
    inner_products,
    load_betas,
    load_columns,
    load_factors,
    load_state,
    load_tile,
    load_total,
    segment_chunks,
    segment_count,
    split_program,
    state_block,
)
from ligerzoo.kernels.dispatch import cdiv, padded_size
from ligerzoo.kernels.jit import jit, kernel, tl

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
    q_ptr, k_ptr, beta_ptr, total_ptr, q_factor_ptr, k_factor_ptr, starts_ptr, counts_ptr, errors_ptr, dout_ptr,
    ddelta_ptr, dattention_ptr,
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride,
    dout_batch_stride, dout_token_stride, dout_head_stride, table_stride,
    n_tokens, n_slots, n_heads, group, key_dim, value_dim, scale,
    CHUNK: tl.constexpr, FEATURES: tl.constexpr, VALUES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    head, slot, batch = split_program(n_heads, n_slots)
    row, key_head, key_row = head_rows(batch, head, n_heads, group)
    rows = tl.arange(0, CHUNK)
    n_chunks = chunk_count(counts_ptr, table_stride, batch, n_tokens, CHUNK)
    for chunk in range(slot, n_chunks, n_slots):
        start, end, tokens, in_chunk = chunk_tokens(starts_ptr, table_stride, batch, chunk, rows, n_tokens, CHUNK)
        total = load_total(total_ptr, row, tokens, end, n_tokens)
        q_factor = load_factors(q_factor_ptr, key_row, tokens, in_chunk, n_tokens)
        k_factor = load_factors(k_factor_ptr, key_row, tokens, in_chunk, n_tokens)
        products = inner_products(
            q_ptr, k_ptr, batch, start, rows, key_head, q_batch_stride, q_token_stride, q_head_stride, k_batch_stride,
            k_token_stride, k_head_stride, in_chunk, key_dim, CHUNK, FEATURES,
        )  # fmt: skip
        products *= decays(total, rows, EXACT) * (q_factor * scale)[:, None] * k_factor[None, :]
        transposed = tl.trans(products.to(ddelta_ptr.dtype.element_ty))  # P^T
        dattention = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        first_value = ((batch * n_tokens + start) * n_heads + head) * value_dim
        for first in range(0, value_dim, VALUES):
            values = first + tl.arange(0, VALUES)
            offsets = rows[:, None] * (n_heads * value_dim) + values[None, :]
            mask = in_chunk[:, None] & (values < value_dim)[None, :]
            dout = load_tile(dout_ptr, batch, start, rows, head, dout_batch_stride, dout_token_stride, dout_head_stride,
                             values, in_chunk, value_dim).to(transposed.dtype)  # fmt: skip
            errors = tl.load(errors_ptr + first_value + offsets, mask=mask, other=0.0)
            ddelta = tl.dot(transposed, dout, input_precision="ieee")
            tl.store(ddelta_ptr + first_value + offsets, ddelta.to(ddelta_ptr.dtype.element_ty), mask=mask)
            dattention = tl.dot(dout, tl.trans(errors), dattention, input_precision="ieee")
        beta = load_betas(beta_ptr, batch, tokens, head, n_heads, in_chunk, n_tokens)
        dattention *= decays(total, rows, EXACT) * (beta * scale)[None, :]
        squares = rows[:, None] * CHUNK + rows[None, :]
        dattention_ptrs = dattention_ptr + (row * n_tokens + start) * CHUNK + squares
        tl.store(dattention_ptrs, dattention.to(dattention_ptr.dtype.element_ty), mask=in_chunk[:, None])


@kernel
def _reverse_scan_kernel(
    q_ptr, k_ptr, beta_ptr, readers_ptr, total_ptr, q_factor_ptr, k_factor_ptr, segment_start_ptr, starts_ptr,
    segments_ptr, counts_ptr, dout_ptr, ddelta_ptr, dfinal_ptr, dstates_ptr, dinitial_ptr,
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride,
    dout_batch_stride, dout_token_stride, dout_head_stride, table_stride,
    n_tokens, n_slots, n_shares, n_heads, group, key_dim, value_dim, n_blocks, scale,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    block, share, row = split_program(n_blocks, n_shares)
    batch, head = row // n_heads, row % n_heads
    _, key_head, key_row = head_rows(batch, head, n_heads, group)
    rows = tl.arange(0, CHUNK)
    features, values, state_mask = state_block(block, key_dim, value_dim, KEYS, VALUES)
    state_offsets = values[:, None] * key_dim + features[None, :]
    outer_offsets = features[None, :] * value_dim + values[:, None]  # of (d_k, d_v)
    n_segments = segment_count(counts_ptr, table_stride, batch)
    for segment in range(share, n_segments, n_shares):
        first, after_last = segment_chunks(segments_ptr, table_stride, batch, segment, n_tokens, CHUNK)
        dstate = tl.zeros((VALUES, KEYS), dtype=tl.float32)  # transposed
        if dfinal_ptr is not None:
            is_last = segment == n_segments - 1
            dfinal = dfinal_ptr + row * key_dim * value_dim + outer_offsets
            dstate = tl.load(dfinal, mask=state_mask & is_last, other=0.0).to(tl.float32)
        for reverse in range(after_last - first):
            chunk = after_last - 1 - reverse
            start, end, tokens, in_chunk = chunk_tokens(starts_ptr, table_stride, batch, chunk, rows, n_tokens, CHUNK)
            ddelta_ptrs = ddelta_ptr + ((batch * n_tokens + start) * n_heads + head) * value_dim
            ddelta_ptrs += rows[None, :] * (n_heads * value_dim) + values[:, None]
            mask = in_chunk[None, :] & (values < value_dim)[:, None]
            total = load_total(total_ptr, row, tokens, end, n_tokens)
            last_total = tl.load(total_ptr + row * n_tokens + end - 1)
            beta = load_betas(beta_ptr, batch, tokens, head, n_heads, in_chunk, n_tokens)
            q_factor = load_factors(q_factor_ptr, key_row, tokens, in_chunk, n_tokens)
            k_factor = load_factors(k_factor_ptr, key_row, tokens, in_chunk, n_tokens)

            rounded = dstate.to(q_ptr.dtype.element_ty)
            slot, exists = _slot_of_gradient(segment_start_ptr, table_stride, batch, end, n_tokens, n_slots, CHUNK)
            dstates = dstates_ptr + (row * n_slots + slot) * key_dim * value_dim + state_offsets
            tl.store(dstates, rounded, mask=state_mask & exists)

            q = load_tile(q_ptr, batch, start, rows, key_head, q_batch_stride, q_token_stride, q_head_stride, features,
                          in_chunk, key_dim)  # fmt: skip
            dout = load_columns(dout_ptr, batch, start, rows, head, dout_batch_stride, dout_token_stride,
                                dout_head_stride, values, in_chunk, value_dim).to(tl.float32)  # fmt: skip
            dout *= (decay_over(total, EXACT) * q_factor * scale)[None, :]
            dstate = tl.dot(dout.to(q.dtype), q, decay_over(last_total, EXACT) * dstate, input_precision="ieee")

            k = load_columns(k_ptr, batch, start, rows, key_head, k_batch_stride, k_token_stride, k_head_stride,
                             features, in_chunk, key_dim)  # fmt: skip
            ddelta = tl.load(ddelta_ptrs, mask=mask, other=0.0).to(tl.float32)
            read = tl.dot(rounded, k, input_precision="ieee")
            ddelta += (decay_over(last_total - total, EXACT) * k_factor)[None, :] * read
            tl.store(ddelta_ptrs, ddelta.to(k.dtype), mask=mask)

            readers = load_tile(readers_ptr, row, start, rows, 0, n_tokens * key_dim, key_dim, 0, features, in_chunk,
                                key_dim)  # fmt: skip
            dstate = tl.dot((ddelta * -beta[None, :]).to(k.dtype), readers, dstate, input_precision="ieee")
        if dinitial_ptr is not None:
            dinitial = dinitial_ptr + row * key_dim * value_dim + outer_offsets
            tl.store(dinitial, dstate.to(dinitial_ptr.dtype.element_ty), mask=state_mask & (segment == 0))


@jit
def _slot_of_gradient(segment_start_ptr, table_stride, batch, end, n_tokens, n_slots, CHUNK: tl.constexpr):
    """The slot of the gradient of the state before token `end`, and whether this state has an effect.

    The last slot is that of the final state. A state at the end of any other segment has no effect.
    """
    is_last = end == n_tokens
    slot = tl.where(is_last, n_slots - 1, end // CHUNK)
    exists = is_last | continues(segment_start_ptr, table_stride, batch, tl.minimum(end, n_tokens - 1), n_tokens)
    return slot, exists


@kernel
def _value_gradients_kernel(
    k_ptr, beta_ptr, inverse_ptr, total_ptr, k_factor_ptr, starts_ptr, counts_ptr, errors_ptr, ddelta_ptr, dv_ptr,
    dbeta_ptr, dsystem_ptr,
    k_batch_stride, k_token_stride, k_head_stride, table_stride,
    n_tokens, n_slots, n_heads, group, key_dim, value_dim,
    CHUNK: tl.constexpr, FEATURES: tl.constexpr, VALUES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    head, slot, batch = split_program(n_heads, n_slots)
    row, key_head, key_row = head_rows(batch, head, n_heads, group)
    rows = tl.arange(0, CHUNK)
    n_chunks = chunk_count(counts_ptr, table_stride, batch, n_tokens, CHUNK)
    for chunk in range(slot, n_chunks, n_slots):
        start, end, tokens, in_chunk = chunk_tokens(starts_ptr, table_stride, batch, chunk, rows, n_tokens, CHUNK)
        beta = load_betas(beta_ptr, batch, tokens, head, n_heads, in_chunk, n_tokens)
        first_square = (row * n_tokens + start) * CHUNK
        transposed = tl.load(inverse_ptr + first_square + rows[None, :] * CHUNK + rows[:, None],
                             mask=in_chunk[None, :], other=0.0)  # fmt: skip
        products = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)  # dV E^T
        dbeta = tl.zeros((CHUNK,), dtype=tl.float32)
        first_value = ((batch * n_tokens + start) * n_heads + head) * value_dim
        for first in range(0, value_dim, VALUES):
            values = first + tl.arange(0, VALUES)
            offsets = rows[:, None] * (n_heads * value_dim) + values[None, :]
            mask = in_chunk[:, None] & (values < value_dim)[None, :]
            errors = tl.load(errors_ptr + first_value + offsets, mask=mask, other=0.0)
            ddelta = tl.load(ddelta_ptr + first_value + offsets, mask=mask, other=0.0).to(tl.float32)
            derrors = (ddelta * beta[:, None]).to(errors.dtype)
            dv = tl.dot(transposed, derrors, input_precision="ieee").to(errors.dtype)
            tl.store(dv_ptr + first_value + offsets, dv, mask=mask)
            dbeta += tl.sum(ddelta * errors.to(tl.float32), 1)
            products = tl.dot(dv, tl.trans(errors), products, input_precision="ieee")

        k_factor = load_factors(k_factor_ptr, key_row, tokens, in_chunk, n_tokens)
        total = load_total(total_ptr, row, tokens, end, n_tokens)
        products = tl.where(rows[:, None] > rows[None, :], decays(total, rows, EXACT) * products, 0.0)
        dsystem = products * beta[None, :]
        dsystem_ptrs = dsystem_ptr + first_square + rows[:, None] * CHUNK + rows[None, :]
        tl.store(dsystem_ptrs, dsystem.to(dsystem_ptr.dtype.element_ty), mask=in_chunk[:, None])
        products *= k_factor[:, None] * inner_products(
            k_ptr, k_ptr, batch, start, rows, key_head, k_batch_stride, k_token_stride, k_head_stride, k_batch_stride,
            k_token_stride, k_head_stride, in_chunk, key_dim, CHUNK, FEATURES,
        )  # fmt: skip
        dbeta -= tl.sum(products, 0) * k_factor
        gates = (batch * n_tokens + tokens) * n_heads + head
        tl.store(dbeta_ptr + gates, dbeta.to(dbeta_ptr.dtype.element_ty), mask=in_chunk)


@kernel
def _query_gradients_kernel(
    q_ptr, k_ptr, total_ptr, q_factor_ptr, k_factor_ptr, segment_start_ptr, starts_ptr, counts_ptr, states_ptr,
    dout_ptr, dattention_ptr, dq_ptr, dtotals_ptr,
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride,
    dout_batch_stride, dout_token_stride, dout_head_stride, table_stride,
    n_tokens, n_slots, n_heads, group, key_dim, value_dim, scale,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    first_row, key_head, slot, batch = _part_of_chunk(n_slots, n_heads // group, CHUNK, ROWS)
    n_key_heads = n_heads // group
    key_row = batch * n_key_heads + key_head
    rows, own_rows, features = tl.arange(0, CHUNK), first_row + tl.arange(0, ROWS), tl.arange(0, KEYS)
    n_chunks = chunk_count(counts_ptr, table_stride, batch, n_tokens, CHUNK)
    for chunk in range(slot, n_chunks, n_slots):
        start, end, tokens, in_chunk = chunk_tokens(starts_ptr, table_stride, batch, chunk, own_rows, n_tokens, CHUNK)
        has_state = continues(segment_start_ptr, table_stride, batch, start, n_tokens)
        q, q_factor = _load_normalized(q_ptr, q_factor_ptr, batch, key_row, start, own_rows, key_head, q_batch_stride,
                                       q_token_stride, q_head_stride, features, end, key_dim, n_tokens)  # fmt: skip
        k, _ = _load_normalized(k_ptr, k_factor_ptr, batch, key_row, start, own_rows, key_head, k_batch_stride,
                                k_token_stride, k_head_stride, features, end, key_dim, n_tokens)  # fmt: skip
        all_k, _ = _load_normalized(k_ptr, k_factor_ptr, batch, key_row, start, rows, key_head, k_batch_stride,
                                    k_token_stride, k_head_stride, features, end, key_dim, n_tokens)  # fmt: skip
        dq = tl.zeros((ROWS, KEYS), dtype=tl.float32)  # of the normalized q
        for head in range(key_head * group, (key_head + 1) * group):
            row = batch * n_heads + head
            product = tl.zeros((ROWS, KEYS), dtype=tl.float32)  # dO S^T
            for first in range(0, value_dim, VALUES):
                values = first + tl.arange(0, VALUES)
                dout = load_tile(dout_ptr, batch, start, own_rows, head, dout_batch_stride, dout_token_stride,
                                 dout_head_stride, values, in_chunk, value_dim).to(k.dtype)  # fmt: skip
                state = load_state(states_ptr, row * n_slots + start // CHUNK, features[None, :], values[:, None],
                                   key_dim, value_dim, has_state)  # fmt: skip
                product = tl.dot(dout, state, product, input_precision="ieee")
            product *= (decay_over(load_total(total_ptr, row, tokens, end, n_tokens), EXACT) * scale)[:, None]
            squares = dattention_ptr + (row * n_tokens + start) * CHUNK
            is_before = own_rows[:, None] > rows[None, :]
            dattention = tl.load(squares + own_rows[:, None] * CHUNK + rows[None, :],
                                 mask=in_chunk[:, None] & is_before, other=0.0)  # fmt: skip
            product = tl.dot(dattention, all_k, product, input_precision="ieee")
            # The diagonal has no part in dg: added to dtotal, its terms of q and of k would cancel but for rounding.
            dtotal = tl.sum(q.to(tl.float32) * product, 1)
            tl.store(dtotals_ptr + row * n_tokens + tokens, dtotal, mask=in_chunk)
            diagonal = tl.load(squares + own_rows * (CHUNK + 1), mask=in_chunk, other=0.0).to(tl.float32)
            dq += product + diagonal[:, None] * k.to(tl.float32)
        _store_unnormalized(dq_ptr, dq, q, q_factor, q_factor_ptr, batch * n_tokens + start, own_rows, in_chunk,
                            n_key_heads, key_head, features, key_dim)  # fmt: skip


@kernel
def _key_gradients_kernel(
    q_ptr, k_ptr, beta_ptr, total_ptr, q_factor_ptr, k_factor_ptr, segment_start_ptr, starts_ptr, counts_ptr,
    errors_ptr, states_ptr, dv_ptr, dstates_ptr, dattention_ptr, dsystem_ptr, dk_ptr, dtotals_ptr,
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride, table_stride,
    n_tokens, n_slots, n_heads, n_rows, group, key_dim, value_dim,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    first_row, key_head, slot, batch = _part_of_chunk(n_slots, n_heads // group, CHUNK, ROWS)
    n_key_heads = n_heads // group
    key_row = batch * n_key_heads + key_head
    rows, own_rows, features = tl.arange(0, CHUNK), first_row + tl.arange(0, ROWS), tl.arange(0, KEYS)
    n_chunks = chunk_count(counts_ptr, table_stride, batch, n_tokens, CHUNK)
    for chunk in range(slot, n_chunks, n_slots):
        start, end, tokens, in_chunk = chunk_tokens(starts_ptr, table_stride, batch, chunk, own_rows, n_tokens, CHUNK)
        all_in_chunk = start + rows < end
        has_state = continues(segment_start_ptr, table_stride, batch, start, n_tokens)
        dslot, has_dstate = _slot_of_gradient(segment_start_ptr, table_stride, batch, end, n_tokens, n_slots + 1, CHUNK)
        q, _ = _load_normalized(q_ptr, q_factor_ptr, batch, key_row, start, own_rows, key_head, q_batch_stride,
                                q_token_stride, q_head_stride, features, end, key_dim, n_tokens)  # fmt: skip
        k, k_factor = _load_normalized(k_ptr, k_factor_ptr, batch, key_row, start, own_rows, key_head, k_batch_stride,
                                       k_token_stride, k_head_stride, features, end, key_dim, n_tokens)  # fmt: skip
        all_q, _ = _load_normalized(q_ptr, q_factor_ptr, batch, key_row, start, rows, key_head, q_batch_stride,
                                    q_token_stride, q_head_stride, features, end, key_dim, n_tokens)  # fmt: skip
        all_k, _ = _load_normalized(k_ptr, k_factor_ptr, batch, key_row, start, rows, key_head, k_batch_stride,
                                    k_token_stride, k_head_stride, features, end, key_dim, n_tokens)  # fmt: skip
        dk = tl.zeros((ROWS, KEYS), dtype=tl.float32)  # of the normalized k
        for head in range(key_head * group, (key_head + 1) * group):
            row = batch * n_heads + head
            first_value = ((batch * n_tokens + start) * n_heads + head) * value_dim
            read = tl.zeros((ROWS, KEYS), dtype=tl.float32)  # dV S^T
            written = tl.zeros((ROWS, KEYS), dtype=tl.float32)  # E dS'^T
            kept = tl.zeros((KEYS,), dtype=tl.float32)  # <S, dS'>
            for first in range(0, value_dim, VALUES):
                values = first + tl.arange(0, VALUES)
                offsets = own_rows[:, None] * (n_heads * value_dim) + values[None, :]
                mask = in_chunk[:, None] & (values < value_dim)[None, :]
                dv = tl.load(dv_ptr + first_value + offsets, mask=mask, other=0.0)
                errors = tl.load(errors_ptr + first_value + offsets, mask=mask, other=0.0)
                state = load_state(states_ptr, row * n_slots + start // CHUNK, features[None, :], values[:, None],
                                   key_dim, value_dim, has_state)  # fmt: skip
                dstate = load_state(dstates_ptr, row * (n_slots + 1) + dslot, features[None, :], values[:, None],
                                    key_dim, value_dim, has_dstate)  # fmt: skip
                read = tl.dot(dv, state, read, input_precision="ieee")
                written = tl.dot(errors, dstate, written, input_precision="ieee")
                kept += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 0)

            total = load_total(total_ptr, row, tokens, end, n_tokens)
            last_total = tl.load(total_ptr + row * n_tokens + end - 1)
            beta = load_betas(beta_ptr, batch, tokens, head, n_heads, in_chunk, n_tokens)
            first_square = (row * n_tokens + start) * CHUNK
            squares, transposed = own_rows[:, None] * CHUNK + rows[None, :], rows[None, :] * CHUNK + own_rows[:, None]
            dsystem = tl.load(dsystem_ptr + first_square + squares, mask=in_chunk[:, None], other=0.0)
            read = tl.dot(dsystem, all_k, read * decay_over(total, EXACT)[:, None], input_precision="ieee")

            written *= (decay_over(last_total - total, EXACT) * beta)[:, None]
            dlast = tl.sum(tl.sum(k.to(tl.float32) * written, 1), 0)
            dlast += tl.where(first_row == 0, tl.sum(kept, 0) * decay_over(last_total, EXACT), 0.0)
            is_after = own_rows[:, None] < rows[None, :]
            dattention = tl.load(dattention_ptr + first_square + transposed, mask=all_in_chunk[None, :] & is_after,
                                 other=0.0)  # fmt: skip
            dsystem = tl.load(dsystem_ptr + first_square + transposed, mask=all_in_chunk[None, :], other=0.0)
            written = tl.dot(dattention, all_q, written, input_precision="ieee")
            written -= tl.dot(dsystem, all_k, input_precision="ieee")

            dtotal = -tl.sum(k.to(tl.float32) * (read + written), 1)
            tl.store(dtotals_ptr + (n_rows + row) * n_tokens + tokens, dtotal, mask=in_chunk)
            tl.store(dtotals_ptr + ((2 + first_row // ROWS) * n_rows + row) * n_tokens + start, dlast)
            diagonal = tl.load(dattention_ptr + first_square + own_rows * (CHUNK + 1), mask=in_chunk, other=0.0)
            dk += written - read + diagonal.to(tl.float32)[:, None] * q.to(tl.float32)
        _store_unnormalized(dk_ptr, dk, k, k_factor, k_factor_ptr, batch * n_tokens + start, own_rows, in_chunk,
                            n_key_heads, key_head, features, key_dim)  # fmt: skip


@jit
def _part_of_chunk(n_slots, n_key_heads, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """The first row of the program's part of a chunk, its key head, slot and batch element."""
    program = tl.program_id(0).to(tl.int64)
    PARTS: tl.constexpr = CHUNK // ROWS
    first_row, program = (program % PARTS).to(tl.int32) * ROWS, program // PARTS
    return first_row, program % n_key_heads, program // n_key_heads % n_slots, program // n_key_heads // n_slots


@jit
def _load_normalized(ptr, factor_ptr, batch, key_row, start, rows, head, batch_stride, token_stride, head_stride,
                     features, end, key_dim, n_tokens):  # fmt: skip
    """Normalized q or k of some tokens, and the factors of the normalization."""
    in_chunk = start + rows < end
    factors = load_factors(factor_ptr, key_row, start + rows, in_chunk, n_tokens)
    tile = load_tile(
        ptr, batch, start, rows, head, batch_stride, token_stride, head_stride, features, in_chunk, key_dim
    )
    return (tile * factors[:, None]).to(tile.dtype), factors


@jit
def _store_unnormalized(ptr, gradient, normalized, factors, factor_ptr, first_token, rows, mask, n_heads, head,
                        features, key_dim):  # fmt: skip
    """Stores the gradient of q or k, given that of its normalized rows."""
    if factor_ptr is not None:
        normalized = normalized.to(tl.float32)
        gradient = factors[:, None] * (gradient - normalized * tl.sum(normalized * gradient, 1)[:, None])
    ptr += (first_token * n_heads + head) * key_dim
    offsets = rows[:, None] * (n_heads * key_dim) + features[None, :]
    tl.store(ptr + offsets, gradient.to(ptr.dtype.element_ty), mask=mask[:, None] & (features < key_dim)[None, :])


@kernel(unspecialized=("n_tokens",))  # so that a segment is added up as the segment alone
def _gate_gradients_kernel(
    dtotals_ptr, starts_ptr, counts_ptr, dg_ptr, table_stride, n_tokens, n_slots, n_heads, n_rows,
    CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    head, slot, batch = split_program(n_heads, n_slots)
    row = batch * n_heads + head
    rows = tl.arange(0, CHUNK)
    n_chunks = chunk_count(counts_ptr, table_stride, batch, n_tokens, CHUNK)
    for chunk in range(slot, n_chunks, n_slots):
        start, end, tokens, in_chunk = chunk_tokens(starts_ptr, table_stride, batch, chunk, rows, n_tokens, CHUNK)
        dtotal = tl.load(dtotals_ptr + row * n_tokens + tokens, mask=in_chunk, other=0.0)
        dtotal += tl.load(dtotals_ptr + (n_rows + row) * n_tokens + tokens, mask=in_chunk, other=0.0)
        for part in tl.static_range(PARTS):
            dlast = tl.load(dtotals_ptr + ((2 + part) * n_rows + row) * n_tokens + start)
            dtotal += tl.where(tokens == end - 1, dlast, 0.0)
        dg = tl.cumsum(dtotal, 0, reverse=True)
        gates = (batch * n_tokens + tokens) * n_heads + head
        tl.store(dg_ptr + gates, dg.to(dg_ptr.dtype.element_ty), mask=in_chunk)


class Gradients(NamedTuple):
    """The gradients of the inputs of `gated_delta_rule`, contiguous, in their dtypes.

    Attributes:
        dq: (B, T, K, D_k).
        dk: (B, T, K, D_k).
        dv: (B, T, V, D_v).
        dg: (B, T, V).
        dbeta: (B, T, V).
        dinitial: (B, V, D_k, D_v), or without elements.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dinitial: Tensor


def local_gradients(
    tokens: Tokens, beta: Tensor, prepared: Prepared, table: ChunkTable, errors: Tensor, dout: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns P^T dO, (B, T, V, D_v), and scale e o dO D^T, (B, V, T, 64)."""
    q, k, v = tokens
    batch, n_tokens, heads, value_dim = v.shape
    launch = launch_of(LOCAL, tokens)
    slots = cdiv(n_tokens, CHUNK)
    ddelta, dattention = v.new_empty(v.shape), v.new_empty(prepared.inverse.shape)
    _local_kernel[batch * slots * heads](
        q, k, beta, prepared.total, optional(prepared.q_factor), optional(prepared.k_factor), table.starts,
        table.counts, errors, dout, ddelta, dattention, *q.stride()[:3], *k.stride()[:3], *dout.stride()[:3],
        table.stride, n_tokens, slots, heads, heads // k.shape[2], k.shape[3], value_dim, scale, CHUNK,
        min(FEATURES, padded_size(k.shape[3])), min(launch.values, padded_size(value_dim)), is_exact(tokens),
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return ddelta, dattention


def reverse_scan(
    tokens: Tokens, beta: Tensor, prepared: Prepared, table: ChunkTable, readers: Tensor, dout: Tensor,
    ddelta: Tensor, dfinal: Tensor | None, dinitial: Tensor | None, scale: float,
) -> Tensor:  # fmt: skip
    """Completes `ddelta`, P^T dO, to dD in place, and writes the gradient of the initial state.

    Returns:
        (B, V, slots + 1, D_v, D_k) gradient of the state before each chunk and, in the last slot, of the final state,
        transposed.
    """
    q, k, v = tokens
    batch, n_tokens, heads, value_dim = v.shape
    key_dim = k.shape[3]
    launch = launch_of(REVERSE_SCAN, tokens)
    slots, shares = cdiv(n_tokens, CHUNK) + 1, 1 if table.starts is None else SEGMENT_PROGRAMS
    values = min(launch.values, padded_size(value_dim))
    blocks = cdiv(value_dim, values)
    dstates = v.new_empty((batch, heads, slots, value_dim, key_dim))
    _reverse_scan_kernel[batch * heads * shares * blocks](
        q, k, beta, readers, prepared.total, optional(prepared.q_factor), optional(prepared.k_factor),
        table.segment_start, table.starts, table.segments, table.counts, dout, ddelta, dfinal, dstates, dinitial,
        *q.stride()[:3], *k.stride()[:3], *dout.stride()[:3], table.stride, n_tokens, slots, shares, heads,
        heads // k.shape[2], key_dim, value_dim, blocks, scale, CHUNK, padded_size(key_dim), values, is_exact(tokens),
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return dstates


def value_gradients(
    tokens: Tokens, beta: Tensor, prepared: Prepared, table: ChunkTable, errors: Tensor, ddelta: Tensor,
    gradients: Gradients,
) -> Tensor:  # fmt: skip
    """Writes the gradients of v and beta. Returns e o dV D^T, (B, V, T, 64)."""
    _, k, v = tokens
    batch, n_tokens, heads, value_dim = v.shape
    launch = launch_of(VALUE_GRADIENTS, tokens)
    slots = cdiv(n_tokens, CHUNK)
    dsystem = v.new_empty(prepared.inverse.shape)
    _value_gradients_kernel[batch * slots * heads](
        k, beta, prepared.inverse, prepared.total, optional(prepared.k_factor), table.starts, table.counts, errors,
        ddelta, gradients.dv, gradients.dbeta, dsystem, *k.stride()[:3], table.stride, n_tokens, slots, heads,
        heads // k.shape[2], k.shape[3], value_dim, CHUNK, min(FEATURES, padded_size(k.shape[3])),
        min(launch.values, padded_size(value_dim)), is_exact(tokens), num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return dsystem


def allocate_dtotals(v: Tensor) -> Tensor:
    """Uninitialized (2 + 64 / ROWS, B, V, T) fp32: two parts of dG that depend on the token, and terms of dG_last.

    Terms of dG_last are at the first token of each chunk.
    """
    return v.new_empty((2 + CHUNK // ROWS, v.shape[0], v.shape[2], v.shape[1]), dtype=torch.float32)


def query_gradients(
    tokens: Tokens, prepared: Prepared, table: ChunkTable, states: Tensor, dout: Tensor, dattention: Tensor,
    gradients: Gradients, dtotals: Tensor, scale: float,
) -> None:  # fmt: skip
    """Writes the gradient of q, and its part of `dtotals`."""
    q, k, v = tokens
    batch, n_tokens, heads, value_dim = v.shape
    launch = launch_of(QUERY_GRADIENTS, tokens)
    slots, key_heads = cdiv(n_tokens, CHUNK), k.shape[2]
    _query_gradients_kernel[batch * slots * key_heads * (CHUNK // ROWS)](
        q, k, prepared.total, optional(prepared.q_factor), optional(prepared.k_factor), table.segment_start,
        table.starts, table.counts, states, dout, dattention, gradients.dq, dtotals, *q.stride()[:3],
        *k.stride()[:3], *dout.stride()[:3], table.stride, n_tokens, slots, heads, heads // key_heads, k.shape[3],
        value_dim, scale, CHUNK, ROWS, padded_size(k.shape[3]), min(launch.values, padded_size(value_dim)),
        is_exact(tokens), num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip


def key_gradients(
    tokens: Tokens, beta: Tensor, prepared: Prepared, table: ChunkTable, errors: Tensor, states: Tensor,
    dstates: Tensor, dattention: Tensor, dsystem: Tensor, gradients: Gradients, dtotals: Tensor,
) -> None:  # fmt: skip
    """Writes the gradient of k, and its part of `dtotals`."""
    q, k, v = tokens
    batch, n_tokens, heads, value_dim = v.shape
    launch = launch_of(KEY_GRADIENTS, tokens)
    slots, key_heads = cdiv(n_tokens, CHUNK), k.shape[2]
    _key_gradients_kernel[batch * slots * key_heads * (CHUNK // ROWS)](
        q, k, beta, prepared.total, optional(prepared.q_factor), optional(prepared.k_factor), table.segment_start,
        table.starts, table.counts, errors, states, gradients.dv, dstates, dattention, dsystem, gradients.dk, dtotals,
        *q.stride()[:3], *k.stride()[:3], table.stride, n_tokens, slots, heads, batch * heads, heads // key_heads,
        k.shape[3], value_dim, CHUNK, ROWS, padded_size(k.shape[3]), min(launch.values, padded_size(value_dim)),
        is_exact(tokens), num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip


def gate_gradients(table: ChunkTable, dtotals: Tensor, gradients: Gradients) -> None:
    """Writes the gradient of g."""
    _, batch, heads, n_tokens = dtotals.shape
    slots = cdiv(n_tokens, CHUNK)
    _gate_gradients_kernel[batch * slots * heads](
        dtotals, table.starts, table.counts, gradients.dg, table.stride, n_tokens, slots, heads, batch * heads, CHUNK,
        CHUNK // ROWS, num_warps=1,
    )  # fmt: skip
