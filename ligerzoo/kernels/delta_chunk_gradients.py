"""The chunked backward pass of the gated delta rule, in the notation of `delta_chunks`.

With P the attention within a chunk, dS' the gradient of the state after it, and products of normalized q and k:

    dD  = P^T dO + diag(exp(G_last - G)) K dS'
    dV  = X^T dD                                        the gradient of R, too
    dS  = exp(G_last) dS' + scale Q^T diag(exp(G)) dO - K^T diag(exp(G)) dV

    dQ  = scale (diag(exp(G)) dO S^T + (e o dO D^T) K)
    dK  = dK_read + dK_written,   dK_read    = -diag(exp(G)) dV S^T - (e o dV D^T) K
                                  dK_written = diag(exp(G_last - G)) D dS'^T - (e o dV D^T)^T K + scale (e o dO D^T)^T Q
    dbeta_i = (dD - M^T dV)_i . (R - M D)_i

o is the elementwise product; the e in dK_read and dK_written are without the diagonal where they multiply dV D^T.
exp(G_i) always comes with q_i or a k_i that reads, exp(-G_i) with a k_i that is written, so

    dG_i = q_i . dQ_i + k_i . (dK_read_i - dK_written_i),   dG_last += exp(G_last) <S, dS'> + the sum over j of the part
                                                            of k_j . dK_written_j from dS'

and dg_i is the sum of dG from i on. No beta divides, so that a beta of 0 has its gradient.

Four kernels, after `scan` has computed D and S again:

1. `local_gradients`, for each chunk: P^T dO;
2. `reverse_scan`, for each head and block of values, from the last chunk to the first: dD and dS;
3. `value_gradients`, for each chunk: dV, dbeta and the squares e o dO D^T and e o dV D^T;
4. `key_gradients`, for each chunk and key head: dQ, dK and dg. It adds up the value heads that share a key head.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ligerzoo.kernels.delta_chunks import (
    CHUNK,
    SEGMENT_PROGRAMS,
    ChunkTable,
    Launch,
    Prepared,
    Tokens,
    attention_of_chunk,
    chunk_bounds,
    chunk_count,
    continues,
    decay_over,
    decays,
    is_exact,
    load_factors,
    load_state,
    load_tile,
    load_total,
    optional,
    padded_dim,
    segment_chunks,
    segment_count,
)
from ligerzoo.kernels.dispatch import cdiv
from ligerzoo.kernels.jit import jit, kernel, tl

LOCAL = {2: Launch(values=64, warps=2, stages=2), 4: Launch(values=32, warps=4, stages=1)}
REVERSE_SCAN = {2: Launch(values=16, warps=2, stages=2), 4: Launch(values=16, warps=4, stages=1)}
VALUE_GRADIENTS = {2: Launch(values=32, warps=2, stages=1), 4: Launch(values=16, warps=8, stages=1)}
KEY_GRADIENTS = {2: Launch(values=32, warps=2, stages=1), 4: Launch(values=16, warps=8, stages=1)}
"""By the element size of the tokens' tensors. To be tuned on a GPU."""


@kernel
def _local_kernel(
    q_ptr, k_ptr, total_ptr, q_factor_ptr, k_factor_ptr, starts_ptr, counts_ptr, dout_ptr, ddelta_ptr,
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride,
    dout_batch_stride, dout_token_stride, dout_head_stride, table_stride,
    n_tokens, n_slots, n_heads, group, key_dim, value_dim, scale,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    head, slot, batch = program % n_heads, program // n_heads % n_slots, program // n_heads // n_slots
    key_head = head // group
    key_row = batch * (n_heads // group) + key_head
    rows, features = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    n_chunks = chunk_count(counts_ptr, table_stride, batch, n_tokens, CHUNK)
    for chunk in range(slot, n_chunks, n_slots):
        start, end = chunk_bounds(starts_ptr, table_stride, batch, chunk, n_tokens, CHUNK)
        tokens = start + rows
        in_chunk = tokens < end
        q = load_tile(q_ptr, batch, tokens, key_head, q_batch_stride, q_token_stride, q_head_stride, features,
                      in_chunk, key_dim)  # fmt: skip
        k = load_tile(k_ptr, batch, tokens, key_head, k_batch_stride, k_token_stride, k_head_stride, features,
                      in_chunk, key_dim)  # fmt: skip
        total = load_total(total_ptr, (batch * n_heads + head), tokens, end, n_tokens)
        q_factor = load_factors(q_factor_ptr, key_row, tokens, in_chunk, n_tokens)
        k_factor = load_factors(k_factor_ptr, key_row, tokens, in_chunk, n_tokens)
        attention = attention_of_chunk(q, k, q_factor, k_factor, decays(total, rows, EXACT), scale).to(q.dtype)
        for first in range(0, value_dim, VALUES):
            values = first + tl.arange(0, VALUES)
            dout = load_tile(dout_ptr, batch, tokens, head, dout_batch_stride, dout_token_stride, dout_head_stride,
                             values, in_chunk, value_dim).to(q.dtype)  # fmt: skip
            ddelta = tl.dot(tl.trans(attention), dout, input_precision="ieee")
            offsets = ((batch * n_tokens + tokens[:, None]) * n_heads + head) * value_dim + values[None, :]
            mask = in_chunk[:, None] & (values < value_dim)[None, :]
            tl.store(ddelta_ptr + offsets, ddelta.to(ddelta_ptr.dtype.element_ty), mask=mask)


@kernel
def _reverse_scan_kernel(
    q_ptr, k_ptr, inverse_ptr, total_ptr, q_factor_ptr, k_factor_ptr, segment_start_ptr, starts_ptr, segments_ptr,
    counts_ptr, dout_ptr, ddelta_ptr, dfinal_ptr, dstates_ptr, dinitial_ptr,
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride,
    dout_batch_stride, dout_token_stride, dout_head_stride, table_stride,
    n_tokens, n_slots, n_shares, n_heads, group, key_dim, value_dim, n_blocks, scale,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    block, row, share = program % n_blocks, program // n_blocks // n_shares, program // n_blocks % n_shares
    batch, head = row // n_heads, row % n_heads
    key_head = head // group
    key_row = batch * (n_heads // group) + key_head
    rows, features, values = tl.arange(0, CHUNK), tl.arange(0, KEYS), block * VALUES + tl.arange(0, VALUES)
    state_mask = (features < key_dim)[:, None] & (values < value_dim)[None, :]
    state_offsets = features[:, None] * value_dim + values[None, :]
    n_segments = segment_count(counts_ptr, table_stride, batch)
    for segment in range(share, n_segments, n_shares):
        first, after_last = segment_chunks(segments_ptr, table_stride, batch, segment, n_tokens, CHUNK)
        dstate = tl.zeros((KEYS, VALUES), dtype=tl.float32)
        if dfinal_ptr is not None:
            dfinal = dfinal_ptr + row * key_dim * value_dim + state_offsets
            dstate = tl.load(dfinal, mask=state_mask & (segment == n_segments - 1), other=0.0).to(tl.float32)
        for reverse in range(after_last - first):
            chunk = after_last - 1 - reverse
            start, end = chunk_bounds(starts_ptr, table_stride, batch, chunk, n_tokens, CHUNK)
            tokens = start + rows
            in_chunk = tokens < end
            q = load_tile(q_ptr, batch, tokens, key_head, q_batch_stride, q_token_stride, q_head_stride, features,
                          in_chunk, key_dim)  # fmt: skip
            k = load_tile(k_ptr, batch, tokens, key_head, k_batch_stride, k_token_stride, k_head_stride, features,
                          in_chunk, key_dim)  # fmt: skip
            dout = load_tile(dout_ptr, batch, tokens, head, dout_batch_stride, dout_token_stride, dout_head_stride,
                             values, in_chunk, value_dim).to(tl.float32)  # fmt: skip
            inverse = tl.load(inverse_ptr + (row * n_tokens + tokens[:, None]) * CHUNK + rows[None, :],
                              mask=in_chunk[:, None], other=0.0)  # fmt: skip
            total = load_total(total_ptr, row, tokens, end, n_tokens)
            last_total = tl.load(total_ptr + row * n_tokens + end - 1)
            q_factor = load_factors(q_factor_ptr, key_row, tokens, in_chunk, n_tokens)
            k_factor = load_factors(k_factor_ptr, key_row, tokens, in_chunk, n_tokens)

            rounded = dstate.to(k.dtype)
            slot, exists = _slot_of_gradient(segment_start_ptr, table_stride, batch, end, n_tokens, n_slots, CHUNK)
            dstates = dstates_ptr + (row * n_slots + slot) * key_dim * value_dim + state_offsets
            tl.store(dstates, rounded, mask=state_mask & exists)
            offsets = ((batch * n_tokens + tokens[:, None]) * n_heads + head) * value_dim + values[None, :]
            mask = in_chunk[:, None] & (values < value_dim)[None, :]
            ddelta = tl.load(ddelta_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            read = tl.dot(k, rounded, input_precision="ieee")
            ddelta += (decay_over(last_total - total, EXACT) * k_factor)[:, None] * read
            ddelta = ddelta.to(k.dtype)
            tl.store(ddelta_ptr + offsets, ddelta, mask=mask)
            decay = decay_over(total, EXACT)
            dv = (decay * k_factor)[:, None] * tl.dot(tl.trans(inverse), ddelta, input_precision="ieee")
            dout *= (decay * q_factor * scale)[:, None]
            dstate = decay_over(last_total, EXACT) * dstate + tl.dot(
                tl.trans(q), dout.to(q.dtype), input_precision="ieee"
            )
            dstate -= tl.dot(tl.trans(k), dv.to(k.dtype), input_precision="ieee")
        if dinitial_ptr is not None:
            dinitial = dinitial_ptr + row * key_dim * value_dim + state_offsets
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
    k_ptr, v_ptr, inverse_ptr, total_ptr, k_factor_ptr, segment_start_ptr, starts_ptr, counts_ptr, deltas_ptr,
    states_ptr, dout_ptr, ddelta_ptr, dv_ptr, dbeta_ptr, dattention_ptr, dsystem_ptr,
    k_batch_stride, k_token_stride, k_head_stride, v_batch_stride, v_token_stride, v_head_stride,
    dout_batch_stride, dout_token_stride, dout_head_stride, table_stride,
    n_tokens, n_slots, n_heads, group, key_dim, value_dim, scale,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    head, slot, batch = program % n_heads, program // n_heads % n_slots, program // n_heads // n_slots
    row, key_head = batch * n_heads + head, head // group
    rows, features = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    n_chunks = chunk_count(counts_ptr, table_stride, batch, n_tokens, CHUNK)
    for chunk in range(slot, n_chunks, n_slots):
        start, end = chunk_bounds(starts_ptr, table_stride, batch, chunk, n_tokens, CHUNK)
        tokens = start + rows
        in_chunk = tokens < end
        has_state = continues(segment_start_ptr, table_stride, batch, start, n_tokens)
        k = load_tile(k_ptr, batch, tokens, key_head, k_batch_stride, k_token_stride, k_head_stride, features,
                      in_chunk, key_dim)  # fmt: skip
        k_factor = load_factors(k_factor_ptr, batch * (n_heads // group) + key_head, tokens, in_chunk, n_tokens)
        total = load_total(total_ptr, row, tokens, end, n_tokens)
        squares = (row * n_tokens + tokens[:, None]) * CHUNK + rows[None, :]
        inverse = tl.load(inverse_ptr + squares, mask=in_chunk[:, None], other=0.0)
        factors = decays(total, rows, EXACT)
        read_factor = decay_over(total, EXACT) * k_factor
        products = tl.dot(k, tl.trans(k), input_precision="ieee") * k_factor[:, None] * k_factor[None, :]
        m = tl.where(rows[:, None] > rows[None, :], factors * products, 0.0).to(k.dtype)

        dattention = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        dsystem = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
        dbeta = tl.zeros((CHUNK,), dtype=tl.float32)
        for first in range(0, value_dim, VALUES):
            values = first + tl.arange(0, VALUES)
            offsets = ((batch * n_tokens + tokens[:, None]) * n_heads + head) * value_dim + values[None, :]
            mask = in_chunk[:, None] & (values < value_dim)[None, :]
            delta = tl.load(deltas_ptr + offsets, mask=mask, other=0.0)
            ddelta = tl.load(ddelta_ptr + offsets, mask=mask, other=0.0)
            dout = load_tile(dout_ptr, batch, tokens, head, dout_batch_stride, dout_token_stride,
                             dout_head_stride, values, in_chunk, value_dim).to(k.dtype)  # fmt: skip
            v = load_tile(v_ptr, batch, tokens, head, v_batch_stride, v_token_stride, v_head_stride, values,
                          in_chunk, value_dim)  # fmt: skip
            state = load_state(states_ptr, row * n_slots + start // CHUNK, features, values, key_dim, value_dim,
                               has_state)  # fmt: skip
            dv = tl.dot(tl.trans(inverse), ddelta, input_precision="ieee").to(k.dtype)
            tl.store(dv_ptr + offsets, dv, mask=mask)
            dattention += tl.dot(dout, tl.trans(delta), input_precision="ieee")
            dsystem += tl.dot(dv, tl.trans(delta), input_precision="ieee")
            dsolved = ddelta.to(tl.float32) - tl.dot(tl.trans(m), dv, input_precision="ieee")
            solved = v.to(tl.float32) - tl.dot(k, state, input_precision="ieee") * read_factor[:, None]
            solved -= tl.dot(m, delta, input_precision="ieee")
            dbeta += tl.sum(dsolved * solved, 1)

        dattention *= factors * scale
        dsystem = tl.where(rows[:, None] > rows[None, :], dsystem * factors, 0.0)
        tl.store(dattention_ptr + squares, dattention.to(dattention_ptr.dtype.element_ty), mask=in_chunk[:, None])
        tl.store(dsystem_ptr + squares, dsystem.to(dsystem_ptr.dtype.element_ty), mask=in_chunk[:, None])
        gates = (batch * n_tokens + tokens) * n_heads + head
        tl.store(dbeta_ptr + gates, dbeta.to(dbeta_ptr.dtype.element_ty), mask=in_chunk)


@jit
def _outer_with_state(left_ptr, states_ptr, slot, exists, batch, tokens, head, batch_stride, token_stride, head_stride,
                      features, in_chunk, key_dim, value_dim, like,
                      CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr):  # fmt: skip
    """The product of (T, d_v) rows and a transposed state, (CHUNK, KEYS) in fp32."""
    product = tl.zeros((CHUNK, KEYS), dtype=tl.float32)
    for first in range(0, value_dim, VALUES):
        values = first + tl.arange(0, VALUES)
        left = load_tile(left_ptr, batch, tokens, head, batch_stride, token_stride, head_stride, values, in_chunk,
                         value_dim).to(like.dtype)  # fmt: skip
        state = load_state(states_ptr, slot, features, values, key_dim, value_dim, exists)
        product = tl.dot(left, tl.trans(state), product, input_precision="ieee")
    return product


@kernel
def _key_gradients_kernel(
    q_ptr, k_ptr, total_ptr, q_factor_ptr, k_factor_ptr, segment_start_ptr, starts_ptr, counts_ptr, deltas_ptr,
    states_ptr, dout_ptr, dv_ptr, dstates_ptr, dattention_ptr, dsystem_ptr, dq_ptr, dk_ptr, dg_ptr,
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride,
    dout_batch_stride, dout_token_stride, dout_head_stride, value_batch_stride, value_token_stride, value_head_stride,
    table_stride, n_tokens, n_slots, n_heads, group, key_dim, value_dim, scale,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    n_key_heads = n_heads // group
    key_head, slot = program % n_key_heads, program // n_key_heads % n_slots
    batch = program // n_key_heads // n_slots
    key_row = batch * n_key_heads + key_head
    rows, features = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    n_chunks = chunk_count(counts_ptr, table_stride, batch, n_tokens, CHUNK)
    for chunk in range(slot, n_chunks, n_slots):
        start, end = chunk_bounds(starts_ptr, table_stride, batch, chunk, n_tokens, CHUNK)
        tokens = start + rows
        in_chunk = tokens < end
        has_state = continues(segment_start_ptr, table_stride, batch, start, n_tokens)
        dslot, has_dstate = _slot_of_gradient(segment_start_ptr, table_stride, batch, end, n_tokens, n_slots + 1, CHUNK)
        q = load_tile(q_ptr, batch, tokens, key_head, q_batch_stride, q_token_stride, q_head_stride, features,
                      in_chunk, key_dim)  # fmt: skip
        k = load_tile(k_ptr, batch, tokens, key_head, k_batch_stride, k_token_stride, k_head_stride, features,
                      in_chunk, key_dim)  # fmt: skip
        q_factor = load_factors(q_factor_ptr, key_row, tokens, in_chunk, n_tokens)
        k_factor = load_factors(k_factor_ptr, key_row, tokens, in_chunk, n_tokens)
        q, k = (q * q_factor[:, None]).to(q.dtype), (k * k_factor[:, None]).to(k.dtype)
        dq = tl.zeros((CHUNK, KEYS), dtype=tl.float32)  # of the normalized q and k
        dk = tl.zeros((CHUNK, KEYS), dtype=tl.float32)
        for head in range(key_head * group, (key_head + 1) * group):
            row = batch * n_heads + head
            total = load_total(total_ptr, row, tokens, end, n_tokens)
            last_total = tl.load(total_ptr + row * n_tokens + end - 1)
            decay = decay_over(total, EXACT)
            squares = (row * n_tokens + tokens[:, None]) * CHUNK + rows[None, :]
            dattention = tl.load(dattention_ptr + squares, mask=in_chunk[:, None], other=0.0)
            dsystem = tl.load(dsystem_ptr + squares, mask=in_chunk[:, None], other=0.0)
            # The diagonal has no part in dg: added to dtotal, its terms of q and of k would cancel but for rounding.
            diagonal = tl.sum(tl.where(rows[:, None] == rows[None, :], dattention.to(tl.float32), 0.0), 1)[:, None]
            dattention = tl.where(rows[:, None] > rows[None, :], dattention, 0.0).to(k.dtype)
            state_slot, dstate_slot = row * n_slots + start // CHUNK, row * (n_slots + 1) + dslot

            product = _outer_with_state(
                dout_ptr, states_ptr, state_slot, has_state, batch, tokens, head, dout_batch_stride, dout_token_stride,
                dout_head_stride, features, in_chunk, key_dim, value_dim, k, CHUNK, KEYS, VALUES,
            ) * (decay * scale)[:, None]  # fmt: skip
            product = tl.dot(dattention, k, product, input_precision="ieee")
            dtotal = tl.sum(q.to(tl.float32) * product, 1)
            dq += product + diagonal * k.to(tl.float32)

            product = _outer_with_state(
                dv_ptr, states_ptr, state_slot, has_state, batch, tokens, head, value_batch_stride, value_token_stride,
                value_head_stride, features, in_chunk, key_dim, value_dim, k, CHUNK, KEYS, VALUES,
            ) * decay[:, None]  # fmt: skip
            product = tl.dot(dsystem, k, product, input_precision="ieee")
            dtotal -= tl.sum(k.to(tl.float32) * product, 1)
            dk -= product

            product = _outer_with_state(
                deltas_ptr, dstates_ptr, dstate_slot, has_dstate, batch, tokens, head, value_batch_stride,
                value_token_stride, value_head_stride, features, in_chunk, key_dim, value_dim, k, CHUNK, KEYS, VALUES,
            ) * decay_over(last_total - total, EXACT)[:, None]  # fmt: skip
            dlast = tl.sum(tl.sum(k.to(tl.float32) * product, 1), 0)
            for first in range(0, value_dim, VALUES):
                values = first + tl.arange(0, VALUES)
                state = load_state(states_ptr, state_slot, features, values, key_dim, value_dim, has_state)
                dstate = load_state(dstates_ptr, dstate_slot, features, values, key_dim, value_dim, has_dstate)
                total_product = tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1), 0)
                dlast += total_product * decay_over(last_total, EXACT)
            product = tl.dot(tl.trans(dattention), q, product, input_precision="ieee")
            product -= tl.dot(tl.trans(dsystem), k, input_precision="ieee")
            dtotal -= tl.sum(k.to(tl.float32) * product, 1)
            dk += product + diagonal * q.to(tl.float32)

            dtotal += tl.where(tokens == end - 1, dlast, 0.0)
            gates = (batch * n_tokens + tokens) * n_heads + head
            dg = tl.cumsum(dtotal, 0, reverse=True)
            tl.store(dg_ptr + gates, dg.to(dg_ptr.dtype.element_ty), mask=in_chunk)

        if q_factor_ptr is not None:
            q, k = q.to(tl.float32), k.to(tl.float32)
            dq = q_factor[:, None] * (dq - q * tl.sum(q * dq, 1)[:, None])
            dk = k_factor[:, None] * (dk - k * tl.sum(k * dk, 1)[:, None])
        offsets = ((batch * n_tokens + tokens[:, None]) * n_key_heads + key_head) * key_dim + features[None, :]
        mask = in_chunk[:, None] & (features < key_dim)[None, :]
        tl.store(dq_ptr + offsets, dq.to(dq_ptr.dtype.element_ty), mask=mask)
        tl.store(dk_ptr + offsets, dk.to(dk_ptr.dtype.element_ty), mask=mask)


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


def local_gradients(tokens: Tokens, prepared: Prepared, table: ChunkTable, dout: Tensor, scale: float) -> Tensor:
    """Returns the part of the gradients of the deltas that comes from outputs in the same chunk, (B, T, V, D_v)."""
    q, k, v = tokens
    batch, n_tokens, heads, value_dim = v.shape
    launch = LOCAL[v.element_size()]
    slots = cdiv(n_tokens, CHUNK)
    ddelta = v.new_empty(v.shape)
    _local_kernel[batch * slots * heads](
        q, k, prepared.total, optional(prepared.q_factor), optional(prepared.k_factor), table.starts, table.counts,
        dout, ddelta, *q.stride()[:3], *k.stride()[:3], *dout.stride()[:3], table.stride, n_tokens, slots, heads,
        heads // k.shape[2], k.shape[3], value_dim, scale, CHUNK, padded_dim(k.shape[3]),
        min(launch.values, padded_dim(value_dim)), is_exact(tokens), num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return ddelta


def reverse_scan(
    tokens: Tokens, prepared: Prepared, table: ChunkTable, dout: Tensor, ddelta: Tensor, dfinal: Tensor | None,
    dinitial: Tensor | None, scale: float,
) -> Tensor:  # fmt: skip
    """Completes the gradients of the deltas in place, and writes the gradient of the initial state.

    Returns:
        (B, V, slots + 1, D_k, D_v) gradient of the state before each chunk and, in the last slot, of the final state.
    """
    q, k, v = tokens
    batch, n_tokens, heads, value_dim = v.shape
    key_dim = k.shape[3]
    launch = REVERSE_SCAN[v.element_size()]
    slots, shares = cdiv(n_tokens, CHUNK) + 1, 1 if table.starts is None else SEGMENT_PROGRAMS
    values = min(launch.values, padded_dim(value_dim))
    blocks = cdiv(value_dim, values)
    dstates = v.new_empty((batch, heads, slots, key_dim, value_dim))
    _reverse_scan_kernel[batch * heads * shares * blocks](
        q, k, prepared.inverse, prepared.total, optional(prepared.q_factor), optional(prepared.k_factor),
        table.segment_start, table.starts, table.segments, table.counts, dout, ddelta, dfinal, dstates, dinitial,
        *q.stride()[:3], *k.stride()[:3], *dout.stride()[:3], table.stride, n_tokens, slots, shares, heads,
        heads // k.shape[2], key_dim, value_dim, blocks, scale, CHUNK, padded_dim(key_dim), values, is_exact(tokens),
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return dstates


def value_gradients(
    tokens: Tokens, prepared: Prepared, table: ChunkTable, deltas: Tensor, states: Tensor, dout: Tensor,
    ddelta: Tensor, gradients: Gradients, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Writes the gradients of v and beta. Returns e o dO D^T, scaled, and e o dV D^T, (B, V, T, 64)."""
    _, k, v = tokens
    batch, n_tokens, heads, value_dim = v.shape
    launch = VALUE_GRADIENTS[v.element_size()]
    slots = cdiv(n_tokens, CHUNK)
    dattention, dsystem = (v.new_empty(prepared.inverse.shape) for _ in range(2))
    _value_gradients_kernel[batch * slots * heads](
        k, v, prepared.inverse, prepared.total, optional(prepared.k_factor), table.segment_start, table.starts,
        table.counts, deltas, states, dout, ddelta, gradients.dv, gradients.dbeta, dattention, dsystem,
        *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3], table.stride, n_tokens, slots, heads,
        heads // k.shape[2], k.shape[3], value_dim, scale, CHUNK, padded_dim(k.shape[3]),
        min(launch.values, padded_dim(value_dim)), is_exact(tokens), num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return dattention, dsystem


def key_gradients(
    tokens: Tokens, prepared: Prepared, table: ChunkTable, deltas: Tensor, states: Tensor, dout: Tensor,
    dstates: Tensor, dattention: Tensor, dsystem: Tensor, gradients: Gradients, scale: float,
) -> None:  # fmt: skip
    """Writes the gradients of q, k and g."""
    q, k, v = tokens
    batch, n_tokens, heads, value_dim = v.shape
    launch = KEY_GRADIENTS[v.element_size()]
    slots, key_heads = cdiv(n_tokens, CHUNK), k.shape[2]
    _key_gradients_kernel[batch * slots * key_heads](
        q, k, prepared.total, optional(prepared.q_factor), optional(prepared.k_factor), table.segment_start,
        table.starts, table.counts, deltas, states, dout, gradients.dv, dstates, dattention, dsystem, gradients.dq,
        gradients.dk, gradients.dg, *q.stride()[:3], *k.stride()[:3], *dout.stride()[:3], *deltas.stride()[:3],
        table.stride, n_tokens, slots, heads, heads // key_heads, k.shape[3], value_dim, scale, CHUNK,
        padded_dim(k.shape[3]), min(launch.values, padded_dim(value_dim)), is_exact(tokens), num_warps=launch.warps,
        num_stages=launch.stages,
    )  # fmt: skip
