"""The backward pass of the gated delta rule with a gate per channel: gradients of q, k, beta and g.

In the notation of `delta_channels` and `delta_chunk_gradients`, with dA = scale dO D^T and dB = dV E^T,

    dQ_i         = scale exp(G_i) o (S dO_i) + sum over j <= i of dA_ij exp(G_i - G_j) o k_j
    dK_read_i    = -exp(G_i) o (S dV_i) - sum over j < i of dB_ij beta_j exp(G_i - G_j) o k_j
    N_j          = sum over i > j of dB_ij exp(G_i - G_j) o k_i
    dK_written_j = exp(G_last - G_j) o (dS' D_j) + sum over i >= j of dA_ij exp(G_i - G_j) o q_i - beta_j N_j
    dbeta_j      = dD_j . E_j - k_j . N_j
    dG_i         = q_i o dQ_i + k_i o (dK_read_i - dK_written_i)
    dG_last     += exp(G_last) o <S, dS'> + sum over j of k_j o exp(G_last - G_j) o (dS' D_j)

and dg_i is the sum of dG from i on; <S, dS'> sums over the values. Sums over the rows of other blocks of 16 are matrix
products, relative to G of the block's first row for earlier rows, and of its last row for later ones, so that no
exponent is positive. Sums within a block are computed row by row.

Two kernels replace `query_gradients`, `key_gradients` and `gate_gradients`:

1. `_block_kernel`, for each block of 16 rows and key head: dQ, dK, dbeta and dG but for the additions to dG_last;
2. `_gates_kernel`, for each chunk and block of channels: the latter, and dg.
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
    continues,
    decay_if,
    decay_over,
    gate_offsets,
    load_state,
    load_tile,
    part_of_chunk,
    slot_of_gradient,
    square_ptrs,
)
from ligerzoo.kernels.delta_channels import BLOCK, block_programs, channel_block, channel_blocks, channel_offsets
from ligerzoo.kernels.delta_chunk_gradients import Gradients, load_normalized, store_unnormalized
from ligerzoo.kernels.delta_chunks import chunk_programs, launch_of
from ligerzoo.kernels.delta_tiles import CHUNK, DeltaRule, load_channel_total, load_channel_totals, load_coefficients
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.strided import Strided, strided

BLOCK_GRADIENTS = {2: Launch(values=32, warps=8, stages=1), 4: Launch(values=16, warps=8, stages=1)}
GATE_GRADIENTS = {2: Launch(values=32, warps=2, stages=1), 4: Launch(values=16, warps=8, stages=1)}
"""See `delta_chunks`. To be tuned on a GPU."""


class Given(NamedTuple):
    """What the kernels read apart from the rule.

    Attributes:
        dout: (B, T, V, D_v) gradient of the outputs.
        errors: (B, T, V, D_v) E.
        dv: (B, T, V, D_v) gradient of v.
        states: before each chunk, see `delta_chunks.scan`.
        dstates: their gradients, see `delta_chunk_gradients.reverse_scan`.
        dattention: (B, V, T, 64) dA.
        dsystem: (B, V, T, 64) dB.
        dbeta: (B, T, V) dD_i . E_i, in fp32.
    """

    dout: Strided
    errors: Tensor
    dv: Tensor
    states: Tensor
    dstates: Tensor
    dattention: Tensor
    dsystem: Tensor
    dbeta: Tensor


class _Results(NamedTuple):
    """What `_block_kernel` writes: gradients of q, k and beta, and dG, (B, T, V, D_k) in fp32."""

    dq: Strided
    dk: Strided
    dbeta: Tensor
    dtotals: Tensor


@kernel
def _block_kernel(
    rule, given, results, CHUNK: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr
):
    first_row, key_head, slot, batch = part_of_chunk(rule, rule.n_heads // rule.group, CHUNK, BLOCK)
    rows, own_rows, features = tl.arange(0, CHUNK), first_row + tl.arange(0, BLOCK), tl.arange(0, KEYS)
    for chunk in range(slot, chunk_count(rule.table, rule.n_tokens, batch, CHUNK), rule.n_slots):
        whole = chunk_span(rule.table, rule.n_tokens, batch, chunk, rows, CHUNK)
        own = chunk_span(rule.table, rule.n_tokens, batch, chunk, own_rows, CHUNK)
        has_state = continues(rule, batch, own.start)
        dslot, has_dstate = slot_of_gradient(rule, own, CHUNK)
        start = tl.minimum(own.start + first_row, own.end - 1)
        last = tl.minimum(own.start + first_row + BLOCK - 1, own.end - 1)
        q, q_factor = load_normalized(rule.q, rule.q_factor, rule, own, key_head, features)
        k, k_factor = load_normalized(rule.k, rule.k_factor, rule, own, key_head, features)
        q_gradient = tl.zeros((BLOCK, KEYS), dtype=tl.float32)  # of the normalized q
        k_gradient = tl.zeros((BLOCK, KEYS), dtype=tl.float32)  # of the normalized k
        for head in range(key_head * rule.group, (key_head + 1) * rule.group):
            row = batch * rule.n_heads + head
            slot_of_state, slot_of_dstate = row * rule.n_slots + own.start // CHUNK, row * (rule.n_slots + 1) + dslot
            query = tl.zeros((BLOCK, KEYS), dtype=tl.float32)  # S dO
            read = tl.zeros((BLOCK, KEYS), dtype=tl.float32)  # S dV
            written = tl.zeros((BLOCK, KEYS), dtype=tl.float32)  # dS' E
            for first in range(0, rule.value_dim, VALUES):
                values = first + tl.arange(0, VALUES)
                dout_tile = load_tile(given.dout, own, head, values, rule.value_dim).to(k.dtype)
                dv = load_tile(by_token(given.dv, rule), own, head, values, rule.value_dim)
                errors = load_tile(by_token(given.errors, rule), own, head, values, rule.value_dim)
                state = load_state(given.states, rule, slot_of_state, features[None, :], values[:, None], has_state)
                dstate = load_state(given.dstates, rule, slot_of_dstate, features[None, :], values[:, None], has_dstate)
                query = tl.dot(dout_tile, state, query, input_precision="ieee")
                read = tl.dot(dv, state, read, input_precision="ieee")
                written = tl.dot(errors, dstate, written, input_precision="ieee")

            total = load_channel_totals(rule, own, row, features)
            totals = load_channel_totals(rule, whole, row, features)
            beta = load_coefficients(rule, own, head)[0]
            query *= decay_over(total) * rule.scale
            read *= decay_over(total)
            written *= decay_over(load_channel_total(rule, row, own.end - 1, features)[None, :] - total) * beta[:, None]

            reference = load_channel_total(rule, row, start, features)[None, :]
            earlier = decay_if((rows < first_row)[:, None], reference - totals)
            earlier *= load_normalized(rule.k, rule.k_factor, rule, whole, key_head, features)[0]
            decay = decay_over(total - reference)
            squares = square_ptrs(given.dattention, rule, own, row, own_rows[:, None], rows[None, :], CHUNK)
            dattention = tl.load(squares, mask=own.mask[:, None], other=0.0)
            squares = square_ptrs(given.dsystem, rule, own, row, own_rows[:, None], rows[None, :], CHUNK)
            dsystem = (
                tl.load(squares, mask=own.mask[:, None], other=0.0) * load_coefficients(rule, whole, head)[0][None, :]
            )
            earlier = earlier.to(k.dtype)
            query += decay * tl.dot(dattention, earlier, input_precision="ieee")
            read += decay * tl.dot(dsystem.to(k.dtype), earlier, input_precision="ieee")

            reference = load_channel_total(rule, row, last, features)[None, :]
            later = decay_if((rows >= first_row + BLOCK)[:, None], totals - reference)
            later_q = later * load_normalized(rule.q, rule.q_factor, rule, whole, key_head, features)[0]
            later_k = later * load_normalized(rule.k, rule.k_factor, rule, whole, key_head, features)[0]
            decay = decay_over(reference - total)
            mask = whole.mask[None, :]
            squares = square_ptrs(given.dattention, rule, own, row, rows[None, :], own_rows[:, None], CHUNK)
            dattention = tl.load(squares, mask=mask, other=0.0)
            squares = square_ptrs(given.dsystem, rule, own, row, rows[None, :], own_rows[:, None], CHUNK)
            dsystem = tl.load(squares, mask=mask, other=0.0)
            written += decay * tl.dot(dattention, later_q.to(k.dtype), input_precision="ieee")
            system = decay * tl.dot(dsystem, later_k.to(k.dtype), input_precision="ieee")  # N

            for i in range(BLOCK):
                other = first_row + i
                token = tl.minimum(own.start + other, own.end - 1)
                one_total = load_channel_total(rule, row, token, features)[None, :]
                one_q = _load_row(rule.q, rule.q_factor, rule, batch, token, key_head, features)[None, :]
                one_k = _load_row(rule.k, rule.k_factor, rule, batch, token, key_head, features)[None, :]
                one_beta = tl.load(rule.beta + (batch * rule.n_tokens + token) * rule.n_heads + head).to(tl.float32)
                decay = decay_if((own_rows > other)[:, None], total - one_total) * one_k
                query += _load_line(given.dattention, rule, own, row, own_rows, other, own.mask, CHUNK) * decay
                read += _load_line(given.dsystem, rule, own, row, own_rows, other, own.mask, CHUNK) * one_beta * decay
                exists = own.mask & (own.start + other < own.end)
                decay = decay_if((own_rows < other)[:, None], one_total - total)
                written += _load_line(given.dattention, rule, own, row, other, own_rows, exists, CHUNK) * decay * one_q
                system += _load_line(given.dsystem, rule, own, row, other, own_rows, exists, CHUNK) * decay * one_k

            wide_q, wide_k = q.to(tl.float32), k.to(tl.float32)
            gates = gate_offsets(rule, own, head)
            dbeta = tl.load(given.dbeta + gates, mask=own.mask, other=0.0) - tl.sum(wide_k * system, 1)
            tl.store(results.dbeta + gates, dbeta.to(results.dbeta.dtype.element_ty), mask=own.mask)
            written -= beta[:, None] * system
            # The diagonal of P has no part in dG, see `delta_chunk_gradients`.
            dtotal = wide_q * query - wide_k * (read + written)
            offsets = channel_offsets(own, rule.n_tokens, rule.n_heads, head, features, rule.key_dim)
            tl.store(results.dtotals + offsets, dtotal, mask=own.mask[:, None] & (features < rule.key_dim)[None, :])
            diagonal = _load_line(given.dattention, rule, own, row, own_rows, own_rows, own.mask, CHUNK)
            q_gradient += query + diagonal * wide_k
            k_gradient += written - read + diagonal * wide_q
        store_unnormalized(results.dq, q_gradient, q, q_factor, rule, own, key_head, features)
        store_unnormalized(results.dk, k_gradient, k, k_factor, rule, own, key_head, features)


@jit
def _load_row(x, factor_ptr, rule, batch, token, key_head, features):
    """Normalized q or k of one token, as `load_normalized`."""
    ptr = x.ptr + batch * x.batch_stride + token * x.token_stride + key_head * x.head_stride
    values = tl.load(ptr + features, mask=features < rule.key_dim, other=0.0)
    if factor_ptr is not None:
        row = batch * (rule.n_heads // rule.group) + key_head
        values = (values * tl.load(factor_ptr + row * rule.n_tokens + token)).to(values.dtype)
    return values.to(tl.float32)


@jit
def _load_line(square_ptr, rule, span, row, rows, columns, mask, CHUNK: tl.constexpr):
    """A row, a column or the diagonal of a block of a square, (rows, 1)."""
    elements = square_ptrs(square_ptr, rule, span, row, rows, columns, CHUNK)
    return tl.load(elements, mask=mask, other=0.0).to(tl.float32)[:, None]


@kernel
def _gates_kernel(
    rule, given, dtotals_ptr, dg_ptr, n_blocks, CHUNK: tl.constexpr, FEATURES: tl.constexpr, VALUES: tl.constexpr
):
    features, head, slot, batch = channel_block(rule, n_blocks, FEATURES)
    row, key_head = batch * rule.n_heads + head, head // rule.group
    rows = tl.arange(0, CHUNK)
    for chunk in range(slot, chunk_count(rule.table, rule.n_tokens, batch, CHUNK), rule.n_slots):
        span = chunk_span(rule.table, rule.n_tokens, batch, chunk, rows, CHUNK)
        has_state = continues(rule, batch, span.start)
        dslot, has_dstate = slot_of_gradient(rule, span, CHUNK)
        slot_of_state, slot_of_dstate = row * rule.n_slots + span.start // CHUNK, row * (rule.n_slots + 1) + dslot
        written = tl.zeros((CHUNK, FEATURES), dtype=tl.float32)  # dS' E
        kept = tl.zeros((FEATURES,), dtype=tl.float32)  # <S, dS'>
        for first in range(0, rule.value_dim, VALUES):
            values = first + tl.arange(0, VALUES)
            errors = load_tile(by_token(given.errors, rule), span, head, values, rule.value_dim)
            state = load_state(given.states, rule, slot_of_state, features[None, :], values[:, None], has_state)
            dstate = load_state(given.dstates, rule, slot_of_dstate, features[None, :], values[:, None], has_dstate)
            written = tl.dot(errors, dstate, written, input_precision="ieee")
            kept += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 0)
        last_total = load_channel_total(rule, row, span.end - 1, features)
        beta = load_coefficients(rule, span, head)[0]
        k, _ = load_normalized(rule.k, rule.k_factor, rule, span, key_head, features)
        written *= decay_over(last_total[None, :] - load_channel_totals(rule, span, row, features)) * beta[:, None]
        dlast = tl.sum(k.to(tl.float32) * written, 0) + kept * decay_over(last_total)

        offsets = channel_offsets(span, rule.n_tokens, rule.n_heads, head, features, rule.key_dim)
        mask = span.mask[:, None] & (features < rule.key_dim)[None, :]
        dtotal = tl.load(dtotals_ptr + offsets, mask=mask, other=0.0)
        dtotal += tl.where((span.tokens == span.end - 1)[:, None], dlast[None, :], 0.0)
        dg = tl.cumsum(dtotal, 0, reverse=True)
        tl.store(dg_ptr + offsets, dg.to(dg_ptr.dtype.element_ty), mask=mask)


def key_and_gate_gradients(rule: DeltaRule, given: Given, gradients: Gradients) -> None:
    """Writes the gradients of q, k, beta and g."""
    launch, dg = launch_of(BLOCK_GRADIENTS, rule), gradients.dg
    dtotals = dg if dg.dtype == torch.float32 else torch.empty_like(dg, dtype=torch.float32)
    results = _Results(strided(gradients.dq), strided(gradients.dk), gradients.dbeta, dtotals)
    sizes = CHUNK, BLOCK, *launch.tile(rule.key_dim, rule.value_dim)
    _block_kernel[block_programs(rule) // rule.group](rule, given, results, *sizes, **launch.options)
    launch, (blocks, features) = launch_of(GATE_GRADIENTS, rule), channel_blocks(rule)
    values = launch.tile(rule.key_dim, rule.value_dim)[1]
    _gates_kernel[chunk_programs(rule) * blocks](
        rule, given, dtotals, dg, blocks, CHUNK, features, values, **launch.options
    )
