"""The chunked backward pass of state-space duality, in the notation of `ssd_chunks`.

With dy and dx the gradients of y and x, dS' that of the state after the chunk, and for each pair of tokens, j <= i,

    W_ij = e_ij (dy_i . x_j),   P_ij = (c_i . b_j) W_ij

the gradients are

    dS    = exp(G_last) dS' + sum over i of exp(G_i) c_i dy_i^T
    dc_i  = exp(G_i) S dy_i + sum over j of W_ij dt_j b_j
    db_j  = exp(G_last - G_j) dt_j dS' x_j + sum over i of W_ij dt_j c_i
    dx_j  = dt_j (exp(G_last - G_j) dS'^T b_j + sum over i of e_ij (c_i . b_j) dy_i) + D dy_j
    ddt_j = exp(G_last - G_j) x_j . dS'^T b_j + sum over i of P_ij
    dD    = sum over i of x_i . dy_i

No dt divides, so that a dt of 0 has its gradient. G_i - G_j is in each term of the pair i and j, so

    dG_i = exp(G_i) dy_i . S^T c_i + sum over j of P_ij dt_j - dt_i ddt_i
    dG_last += exp(G_last) <S, dS'> + sum over j of exp(G_last - G_j) dt_j x_j . dS'^T b_j

and dg_i is the sum of dG from i on. Both sums over P are of the same numbers, so that they cancel but for the pairs
that contain i. Pairs of a token with itself are left out of dG, where they would cancel but for rounding.

After `prepare` and `scan` have computed G, the products and S again, three kernels here and two of
`ssd_group_gradients`:

1. `reverse_scan`, for each head and block of values, from the last chunk to the first: dS, and <S, dS'>;
2. `input_gradients`, for each part of a chunk and head: dx;
3. `pair_weights`: the sums over P, dD, and W for 4.;
4. `group_gradients`: dc and db, and the terms of dG and ddt with S and dS';
5. `step_gradients`, for each chunk and head: dg and ddt.
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
    decay_over,
    head_rows,
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
    store_tile,
)
from ligerzoo.kernels.dispatch import cdiv
from ligerzoo.kernels.jit import kernel, tl
from ligerzoo.kernels.ssd_chunks import FEATURES, OUTPUT_ROWS, SSD, load_steps
from ligerzoo.kernels.strided import strided

REVERSE_SCAN = {2: Launch(values=32, warps=4, stages=3), 4: Launch(values=16, warps=8, stages=1)}
INPUT_GRADIENTS = {2: Launch(values=64, warps=2, stages=1, registers=168), 4: Launch(values=32, warps=8, stages=1)}
"""By the element size of the tokens' tensors, see `ssd_chunks`."""

PAIR_ROWS = {2: 32, 4: 32}
"""Tokens of the rows, and of the columns, of a tile of W, by the element size."""


class GateTerms(NamedTuple):
    """Uninitialized fp32 terms of the gradients of g, dt and D, which kernels write.

    Attributes:
        pairs: (parts + 1, B, V, T) for a token of part p of its chunk, its sum over the row of P in the tiles (p, 0) to
            (p, p), then the sum over its column in the tiles (p, p) to (parts - 1, p).
        read: (B, V, T) exp(G_i) dy_i . S^T c_i.
        written: (B, V, T) exp(G_last - G_j) x_j . dS'^T b_j.
        skip: (B, V, T) x . dy.
        kept: (blocks of values, B, V, T) exp(G_last) <S, dS'> of a chunk, at its first token.
        n_rows: B * V.
    """

    pairs: Tensor
    read: Tensor
    written: Tensor
    skip: Tensor
    kept: Tensor
    n_rows: int

    @staticmethod
    def of(rule: SSD, chunk: int) -> GateTerms:
        """Allocates the terms."""
        total, size = rule.total, rule.x.ptr.element_size()
        _, values = REVERSE_SCAN[size].tile(rule.key_dim, rule.value_dim)

        def terms(*shape: int) -> Tensor:
            return total.new_empty((*shape, *total.shape), dtype=torch.float32)

        pairs, kept = terms(chunk // PAIR_ROWS[size] + 1), terms(cdiv(rule.value_dim, values))
        return GateTerms(pairs, terms(), terms(), terms(), kept, len(total) * rule.n_heads)


@kernel
def _reverse_scan_kernel(rule, dout, states_ptr, dstates_ptr, ends, terms, n_shares, n_blocks, TILE: tl.constexpr):
    CHUNK: tl.constexpr = TILE[0]
    KEYS: tl.constexpr = TILE[1]
    VALUES: tl.constexpr = TILE[2]
    block, share, row = split_program(n_blocks, n_shares)
    batch, head = row // rule.n_heads, row % rule.n_heads
    key_head = head // rule.group
    rows = tl.arange(0, CHUNK)
    features, values, state_mask = state_block(rule, block, KEYS, VALUES)
    state_size = rule.key_dim * rule.value_dim
    state_offsets = values[:, None] * rule.key_dim + features[None, :]
    outer_offsets = features[None, :] * rule.value_dim + values[:, None]  # of (d_k, d_v)
    n_segments = segment_count(rule.table, batch)
    for segment in range(share, n_segments, n_shares):
        first, after_last = segment_chunks(rule.table, rule.n_tokens, batch, segment, CHUNK)
        dstate = tl.zeros((VALUES, KEYS), dtype=tl.float32)  # transposed
        if ends.dfinal is not None:
            is_last = segment == n_segments - 1
            dfinal = ends.dfinal + row * state_size + outer_offsets
            dstate = tl.load(dfinal, mask=state_mask & is_last, other=0.0).to(tl.float32)
        for reverse in range(after_last - first):
            span = chunk_span(rule.table, rule.n_tokens, batch, after_last - 1 - reverse, rows, CHUNK)
            slot, exists = slot_of_gradient(rule, span, CHUNK)
            dstates = dstates_ptr + (row * (rule.n_slots + 1) + slot) * state_size
            tl.store(dstates + state_offsets, dstate.to(dstates_ptr.dtype.element_ty), mask=state_mask & exists)
            total, last_total = load_totals(rule, span, row)
            slot_of_state = row * rule.n_slots + span.start // CHUNK
            has_state = state_mask & continues(rule, batch, span.start)
            state = tl.load(states_ptr + slot_of_state * state_size + state_offsets, mask=has_state, other=0.0)
            kept = decay_over(last_total) * tl.sum(tl.sum(dstate * state.to(tl.float32), 1), 0)
            tl.store(terms.kept + (block * terms.n_rows + row) * rule.n_tokens + span.start, kept)
            c = load_tile(rule.c, span, key_head, features, rule.key_dim)
            read = load_columns(dout, span, head, values, rule.value_dim).to(tl.float32) * decay_over(total)[None, :]
            dstate = tl.dot(read.to(c.dtype), c, decay_over(last_total) * dstate, input_precision="ieee")
        if ends.dinitial is not None:
            dinitial = ends.dinitial + row * state_size + outer_offsets
            tl.store(dinitial, dstate.to(ends.dinitial.dtype.element_ty), mask=state_mask & (segment == 0))


@kernel
def _input_gradients_kernel(rule, dout, dstates_ptr, dx_ptr, TILE: tl.constexpr):
    CHUNK: tl.constexpr = TILE[0]
    ROWS: tl.constexpr = TILE[1]
    KEYS: tl.constexpr = TILE[2]
    VALUES: tl.constexpr = TILE[3]
    first_row, head, slot, batch = part_of_chunk(rule, rule.n_heads, CHUNK, ROWS)
    row, key_head = head_rows(rule, batch, head)
    group_row = batch * (rule.n_heads // rule.group) + key_head
    own_rows = first_row + tl.arange(0, ROWS)
    for chunk in range(slot, chunk_count(rule.table, rule.n_tokens, batch, CHUNK), rule.n_slots):
        own = chunk_span(rule.table, rule.n_tokens, batch, chunk, own_rows, CHUNK)
        total, last_total = load_totals(rule, own, row)
        slot_in_row, exists = slot_of_gradient(rule, own, CHUNK)
        slot_of_dstate = row * (rule.n_slots + 1) + slot_in_row
        for first in range(0, rule.value_dim, VALUES):
            values = first + tl.arange(0, VALUES)
            dx = tl.zeros((ROWS, VALUES), dtype=tl.float32)
            for first_key in range(0, rule.key_dim, KEYS):
                features = first_key + tl.arange(0, KEYS)
                b = load_tile(rule.b, own, key_head, features, rule.key_dim)
                dstate = load_state(dstates_ptr, rule, slot_of_dstate, features[:, None], values[None, :], exists)
                dx = tl.dot(b, dstate, dx, input_precision="ieee")
            dx *= decay_over(last_total - total)[:, None]
            for first_reader in range(first_row, CHUNK, ROWS):
                readers = first_reader + tl.arange(0, ROWS)
                later = chunk_span(rule.table, rule.n_tokens, batch, chunk, readers, CHUNK)
                dout_tile = load_tile(dout, later, head, values, rule.value_dim).to(rule.x.ptr.dtype.element_ty)
                squares = square_ptrs(rule.products, rule, own, group_row, readers[None, :], own_rows[:, None], CHUNK)
                products = tl.load(squares, mask=later.mask[None, :], other=0.0).to(tl.float32)  # transposed
                difference = load_totals(rule, later, row)[0][None, :] - total[:, None]
                weights = tl.where(readers[None, :] >= own_rows[:, None], products * decay_over(difference), 0.0)
                dx = tl.dot(weights.to(dout_tile.dtype), dout_tile, dx, input_precision="ieee")
            dx *= load_steps(rule, own, row)[:, None]
            if rule.d is not None:
                own_dout = load_tile(dout, own, head, values, rule.value_dim)
                dx += tl.load(rule.d + head).to(tl.float32) * own_dout.to(tl.float32)
            store_tile(by_token(dx_ptr, rule), dx, own, head, values, rule.value_dim)


@kernel(unspecialized=("n_tokens",))  # so that a segment is added up as the segment alone
def _step_gradients_kernel(
    terms, total_ptr, steps_ptr, products_ptr, dg_ptr, ddt_ptr, table, n_tokens, n_slots, n_heads, group,
    SIZES: tl.constexpr,
):  # fmt: skip
    CHUNK: tl.constexpr = SIZES[0]
    PAIR_ROWS: tl.constexpr = SIZES[1]
    BLOCKS: tl.constexpr = SIZES[2]
    head, slot, batch = split_program(n_heads, n_slots)
    row, rows = batch * n_heads + head, tl.arange(0, CHUNK)
    wide = total_ptr.dtype.element_ty  # large terms cancel in dg, as in G
    group_row = batch * (n_heads // group) + head // group
    for chunk in range(slot, chunk_count(table, n_tokens, batch, CHUNK), n_slots):
        span = chunk_span(table, n_tokens, batch, chunk, rows, CHUNK)
        tokens, mask = row * n_tokens + span.tokens, span.mask
        written = tl.load(terms.written + tokens, mask=mask, other=0.0).to(wide)
        dtotal = tl.load(terms.read + tokens, mask=mask, other=0.0).to(wide)
        of_columns = written
        for part in tl.static_range(CHUNK // PAIR_ROWS + 1):
            pairs = tl.load(terms.pairs + part * terms.n_rows * n_tokens + tokens, mask=mask, other=0.0).to(wide)
            is_row = part <= rows // PAIR_ROWS
            dtotal += tl.where(is_row, pairs, 0.0)
            of_columns += tl.where(is_row, 0.0, pairs)
        steps = tl.load(steps_ptr + tokens, mask=mask, other=0.0).to(wide)
        dtotal -= steps * of_columns
        dlast = tl.sum(steps * written, 0)
        for block in tl.static_range(BLOCKS):
            dlast += tl.load(terms.kept + (block * terms.n_rows + row) * n_tokens + span.start)
        dtotal += tl.where(span.tokens == span.end - 1, dlast, 0.0)
        own_products = products_ptr + ((group_row * n_tokens + span.tokens) * CHUNK + rows)
        of_itself = tl.load(own_products, mask=mask, other=0.0).to(tl.float32)
        ddt = of_columns + of_itself * tl.load(terms.skip + tokens, mask=mask, other=0.0)
        gates = (batch * n_tokens + span.tokens) * n_heads + head
        tl.store(dg_ptr + gates, tl.cumsum(dtotal, 0, reverse=True).to(dg_ptr.dtype.element_ty), mask=mask)
        tl.store(ddt_ptr + gates, ddt.to(ddt_ptr.dtype.element_ty), mask=mask)


class SSDGradients(NamedTuple):
    """The gradients of the inputs of `ssd`, contiguous, in their dtypes.

    Attributes:
        dx: (B, T, V, D_v).
        db: (B, T, K, D_k).
        dc: (B, T, K, D_k).
        dg: (B, T, V).
        ddt: (B, T, V).
        dd: (V,), or without elements.
        dinitial: (B, V, D_k, D_v), or without elements.
    """

    dx: Tensor
    db: Tensor
    dc: Tensor
    dg: Tensor
    ddt: Tensor
    dd: Tensor
    dinitial: Tensor


class EndGradients(NamedTuple):
    """Gradients of the states at both ends of rows, (B, V, D_k, D_v), or None.

    Attributes:
        dfinal: that of the final state, given.
        dinitial: that of the initial state, written.
    """

    dfinal: Tensor | None
    dinitial: Tensor | None


def scan_gradients(rule: SSD, chunk: int, dout: Tensor, states: Tensor, ends: EndGradients, terms: GateTerms) -> Tensor:
    """Writes the gradient of the initial state, and terms of gates.

    Returns:
        (B, V, slots + 1, D_v, D_k) gradient of the state before each chunk and, in the last slot, of the final state,
        transposed.
    """
    x, shares = rule.x.ptr, segment_shares(rule.table)
    launch = REVERSE_SCAN[x.element_size()].for_keys(rule.key_dim)
    keys, values = launch.tile(rule.key_dim, rule.value_dim)
    blocks = len(terms.kept)
    dstates = x.new_empty((len(x), rule.n_heads, rule.n_slots + 1, rule.value_dim, rule.key_dim))
    _reverse_scan_kernel[len(x) * rule.n_heads * shares * blocks](
        rule, strided(dout), states, dstates, ends, terms, shares, blocks, (chunk, keys, values), **launch.options
    )
    return dstates


def input_gradients(rule: SSD, chunk: int, dout: Tensor, dstates: Tensor, dx: Tensor) -> None:
    """Writes the gradient of x, (B, T, V, D_v)."""
    size = rule.x.ptr.element_size()
    launch, rows = INPUT_GRADIENTS[size], OUTPUT_ROWS[size]
    keys, values = launch.tile(rule.key_dim, rule.value_dim)
    _input_gradients_kernel[len(dout) * rule.n_slots * rule.n_heads * (chunk // rows)](
        rule, strided(dout), dstates, dx, (chunk, rows, min(FEATURES, keys), values), **launch.options
    )


def step_gradients(rule: SSD, chunk: int, terms: GateTerms, gradients: SSDGradients) -> None:
    """Writes the gradients of g, dt and D."""
    sizes = chunk, PAIR_ROWS[rule.x.ptr.element_size()], len(terms.kept)
    _step_gradients_kernel[len(rule.total) * rule.n_slots * rule.n_heads](
        terms, rule.total, rule.steps, rule.products, gradients.dg, gradients.ddt, rule.table, rule.n_tokens,
        rule.n_slots, rule.n_heads, rule.group, sizes, num_warps=1,
    )  # fmt: skip
    if gradients.dd.numel() > 0:
        gradients.dd.copy_(terms.skip.sum((0, 2)))
