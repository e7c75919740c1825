"""The chunked backward pass of state-space duality, in the notation of `ssd_chunks`.

With dy and dx the gradients of y and x, dS' that of the state after the chunk, and o the elementwise product of
matrices with an element for each pair of tokens, which are 0 for j > i:

    W_ij = e_ij dt_j (dy_i . x_j),   P_ij = (c_i . b_j) W_ij
    dS   = exp(G_last) dS' + sum over i of exp(G_i) c_i dy_i^T
    dc_i = exp(G_i) S dy_i + sum over j of W_ij b_j
    db_j = exp(G_last - G_j) dt_j dS' x_j + sum over i of W_ij c_i
    dx_j = dt_j r_j + D dy_j,   r_j = exp(G_last - G_j) dS'^T b_j + sum over i of e_ij (c_i . b_j) dy_i
    ddt_j = x_j . r_j,   dD = sum over i of x_i . dy_i

The heads of a group add up dc and db, so that one product with b, and one with c, serves all of their W. Each pair of
tokens has a part in G_i - G_j, so

    dG_i = exp(G_i) dy_i . S^T c_i + sum over j of (P_ij - P_ji) - exp(G_last - G_i) dt_i x_i . dS'^T b_i
    dG_last += exp(G_last) <S, dS'> + sum over j of exp(G_last - G_j) dt_j x_j . dS'^T b_j

and dg_i is the sum of dG from i on. Both sums over P are of the same numbers, so that they cancel but for the pairs
that contain i. No dt divides, so that a dt of 0 has its gradient.

Four kernels, after `prepare` and `scan` have computed G, the products and S again:

1. `scan_gradients`, for each head and block of values, from the last chunk to the first: dS;
2. `query_gradients`, for each part of a chunk and up to 16 heads of a group: dc, the sum of W, the terms of dG with P
   or S c, and dD;
3. `key_gradients`, likewise: db, dx, ddt and the rest of dG;
4. `gate_gradients`, for each chunk: dg.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.chunk_tiles import (
    Launch,
    Span,
    by_token,
    chunk_count,
    chunk_span,
    continues,
    decay_over,
    gate_gradients,
    gate_offsets,
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
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.ssd_chunks import ROWS, SSD, load_steps
from ligerzoo.kernels.strided import strided

REVERSE_SCAN = {2: Launch(values=32, warps=8, stages=3), 4: Launch(values=16, warps=8, stages=1)}
QUERY_GRADIENTS = {2: Launch(values=64, warps=8, stages=1), 4: Launch(values=16, warps=8, stages=1)}
KEY_GRADIENTS = {2: Launch(values=64, warps=8, stages=1), 4: Launch(values=16, warps=8, stages=1)}
"""By the element size of the tokens' tensors, see `ssd_chunks`."""

HEADS = 16
"""Heads of a group whose dc and db a program adds up."""


@kernel
def _reverse_scan_kernel(rule, dout, dstates_ptr, ends, n_shares, n_blocks, TILE: tl.constexpr):
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
            c = load_tile(rule.c, span, key_head, features, rule.key_dim)
            read = load_columns(dout, span, head, values, rule.value_dim).to(tl.float32) * decay_over(total)[None, :]
            dstate = tl.dot(read.to(c.dtype), c, decay_over(last_total) * dstate, input_precision="ieee")
        if ends.dinitial is not None:
            dinitial = ends.dinitial + row * state_size + outer_offsets
            tl.store(dinitial, dstate.to(ends.dinitial.dtype.element_ty), mask=state_mask & (segment == 0))


@jit
def _share_of_group(rule, column, HEADS: tl.constexpr):
    """The group, its first head of the program, and the one after its last."""
    n_shares = tl.cdiv(rule.group, HEADS)
    key_head, share = column // n_shares, column % n_shares
    first = key_head * rule.group + share * HEADS
    return key_head, first, tl.minimum(first + HEADS, (key_head + 1) * rule.group)


@jit
def _load_products(rule, span, row, rows, columns, mask, CHUNK: tl.constexpr):
    """c_i . b_j of tokens i of a chunk, `rows`, and j, `columns`; 0 beyond the mask and the chunk."""
    ptrs = square_ptrs(rule.products, rule, span, row, rows, columns, CHUNK)
    return tl.load(ptrs, mask=mask & (span.start + rows < span.end), other=0.0)


@jit
def _tokens_where(span, mask):
    """The span's tokens for which the mask holds, so that others are not loaded."""
    return Span(span.batch, span.start, span.end, span.rows, span.tokens, span.mask & mask)


@kernel
def _query_gradients_kernel(rule, dout, states_ptr, weights_ptr, dc, terms, TILE: tl.constexpr):
    CHUNK: tl.constexpr = TILE[0]
    ROWS: tl.constexpr = TILE[1]
    HEADS: tl.constexpr = TILE[2]
    KEYS: tl.constexpr = TILE[3]
    VALUES: tl.constexpr = TILE[4]
    BLOCKS: tl.constexpr = TILE[5]
    n_groups = rule.n_heads // rule.group
    n_columns = n_groups * tl.cdiv(rule.group, HEADS)
    first_row, column, slot, batch = part_of_chunk(rule, n_columns, CHUNK, ROWS)
    key_head, first_head, after_last = _share_of_group(rule, column, HEADS)
    rows, own_rows, features = tl.arange(0, CHUNK), first_row + tl.arange(0, ROWS), tl.arange(0, KEYS)
    for chunk in range(slot, chunk_count(rule.table, rule.n_tokens, batch, CHUNK), rule.n_slots):
        whole = chunk_span(rule.table, rule.n_tokens, batch, chunk, rows, CHUNK)
        own = chunk_span(rule.table, rule.n_tokens, batch, chunk, own_rows, CHUNK)
        earlier, has_state = _tokens_where(whole, rows < first_row + ROWS), continues(rule, batch, own.start)
        c = load_tile(rule.c, own, key_head, features, rule.key_dim)
        # The diagonal has no part in dg: its terms of c and of b would cancel but for rounding.
        of_row, of_column, row = own_rows[:, None], rows[None, :], batch * n_groups + key_head
        products = _load_products(rule, own, row, of_row, of_column, of_row > of_column, CHUNK)
        weights = tl.zeros((ROWS, CHUNK), dtype=tl.float32)  # W of all heads
        gradient = tl.zeros((ROWS, KEYS), dtype=tl.float32)
        for head in range(first_head, after_last):
            row = batch * rule.n_heads + head
            slot_of_state = row * rule.n_slots + own.start // CHUNK
            weight = tl.zeros((ROWS, CHUNK), dtype=tl.float32)
            read = tl.zeros((ROWS, KEYS), dtype=tl.float32)  # dy S^T
            for block in tl.static_range(BLOCKS):
                values = block * VALUES + tl.arange(0, VALUES)
                dout_tile = load_tile(dout, own, head, values, rule.value_dim).to(c.dtype)
                x = load_columns(rule.x, earlier, head, values, rule.value_dim)
                state = load_state(states_ptr, rule, slot_of_state, features[None, :], values[:, None], has_state)
                weight = tl.dot(dout_tile, x, weight, input_precision="ieee")
                read = tl.dot(dout_tile, state, read, input_precision="ieee")
            skip = tl.sum(tl.where(of_row == of_column, weight, 0.0), 1)
            tl.store(terms.dskip + row * rule.n_tokens + own.tokens, skip, mask=own.mask)
            total, all_totals = load_totals(rule, own, row)[0], load_totals(rule, whole, row)[0]
            decay = decay_over(total[:, None] - all_totals[None, :]) * load_steps(rule, whole, row)[None, :]
            weight = tl.where(of_row >= of_column, weight * decay, 0.0)
            read *= decay_over(total)[:, None]
            weights += weight
            gradient += read
            pairs = weight * products.to(tl.float32)
            dtotal = tl.sum(read * c.to(tl.float32), 1) + tl.sum(pairs, 1)
            tl.store(terms.dtotals + row * rule.n_tokens + own.tokens, dtotal, mask=own.mask)
            part = terms.dtotals + ((2 + first_row // ROWS) * terms.n_rows + row) * rule.n_tokens
            tl.store(part + whole.tokens, -tl.sum(pairs, 0), mask=whole.mask)
        b = load_tile(rule.b, earlier, key_head, features, rule.key_dim)
        rounded = weights.to(b.dtype)
        square = square_ptrs(
            weights_ptr, rule, own, batch * n_columns + column, own_rows[:, None], rows[None, :], CHUNK
        )
        tl.store(square, rounded, mask=own.mask[:, None])
        gradient = tl.dot(rounded, b, gradient, input_precision="ieee")
        store_tile(dc, gradient, own, column, features, rule.key_dim)


@kernel
def _key_gradients_kernel(
    rule, dout, states_ptr, dstates_ptr, weights_ptr, dx_ptr, db, ddt_ptr, terms, TILE: tl.constexpr
):
    CHUNK: tl.constexpr = TILE[0]
    ROWS: tl.constexpr = TILE[1]
    HEADS: tl.constexpr = TILE[2]
    KEYS: tl.constexpr = TILE[3]
    VALUES: tl.constexpr = TILE[4]
    BLOCKS: tl.constexpr = TILE[5]
    n_groups = rule.n_heads // rule.group
    n_columns = n_groups * tl.cdiv(rule.group, HEADS)
    first_row, column, slot, batch = part_of_chunk(rule, n_columns, CHUNK, ROWS)
    key_head, first_head, after_last = _share_of_group(rule, column, HEADS)
    rows, own_rows, features = tl.arange(0, CHUNK), first_row + tl.arange(0, ROWS), tl.arange(0, KEYS)
    PARTS: tl.constexpr = CHUNK // ROWS
    SHARE: tl.constexpr = KEYS // PARTS
    own_features = (first_row // ROWS * SHARE + tl.arange(0, SHARE))[:, None]  # of <S, dS'>
    for chunk in range(slot, chunk_count(rule.table, rule.n_tokens, batch, CHUNK), rule.n_slots):
        whole = chunk_span(rule.table, rule.n_tokens, batch, chunk, rows, CHUNK)
        own = chunk_span(rule.table, rule.n_tokens, batch, chunk, own_rows, CHUNK)
        later, has_state = _tokens_where(whole, rows >= first_row), continues(rule, batch, own.start)
        dslot, has_dstate = slot_of_gradient(rule, own, CHUNK)
        b = load_tile(rule.b, own, key_head, features, rule.key_dim)
        of_row, of_column, row = rows[None, :], own_rows[:, None], batch * n_groups + key_head
        products = _load_products(rule, own, row, of_row, of_column, of_row >= of_column, CHUNK)  # transposed
        gradient = tl.zeros((ROWS, KEYS), dtype=tl.float32)
        for head in range(first_head, after_last):
            row = batch * rule.n_heads + head
            slot_of_state, slot_of_dstate = row * rule.n_slots + own.start // CHUNK, row * (rule.n_slots + 1) + dslot
            total, last_total = load_totals(rule, own, row)
            all_totals = load_totals(rule, whole, row)[0]
            steps, decay_after = load_steps(rule, own, row), decay_over(last_total - total)
            weight = products.to(tl.float32) * decay_over(all_totals[None, :] - total[:, None])
            weight = tl.where(of_row >= of_column, weight, 0.0).to(b.dtype)
            ddt = tl.zeros((ROWS,), dtype=tl.float32)
            dwritten = tl.zeros((ROWS,), dtype=tl.float32)
            kept = tl.zeros((SHARE,), dtype=tl.float32)
            for block in tl.static_range(BLOCKS):
                values = block * VALUES + tl.arange(0, VALUES)
                dout_tile = load_tile(dout, later, head, values, rule.value_dim).to(b.dtype)
                dstate = load_state(dstates_ptr, rule, slot_of_dstate, features[:, None], values[None, :], has_dstate)
                x = load_tile(rule.x, own, head, values, rule.value_dim)
                wide_x = x.to(tl.float32)
                written = tl.dot(b, dstate, input_precision="ieee") * decay_after[:, None]
                dx = tl.dot(weight, dout_tile, written, input_precision="ieee")
                dwritten += tl.sum(wide_x * written, 1)
                ddt += tl.sum(wide_x * dx, 1)
                dx *= steps[:, None]
                if rule.d is not None:
                    own_dout = load_tile(dout, own, head, values, rule.value_dim)
                    dx += tl.load(rule.d + head).to(tl.float32) * own_dout.to(tl.float32)
                store_tile(by_token(dx_ptr, rule), dx, own, head, values, rule.value_dim)
                # Not scaled before: a chain of additions over the products of all heads would be less exact.
                product = tl.dot(x, tl.trans(dstate), input_precision="ieee")
                gradient += product * (decay_after * steps)[:, None]
                own_state = load_state(states_ptr, rule, slot_of_state, own_features, values[None, :], has_state)
                own_dstate = load_state(dstates_ptr, rule, slot_of_dstate, own_features, values[None, :], has_dstate)
                kept += tl.sum(own_state.to(tl.float32) * own_dstate.to(tl.float32), 1)
            tl.store(ddt_ptr + gate_offsets(rule, own, head), ddt.to(ddt_ptr.dtype.element_ty), mask=own.mask)
            dwritten *= steps
            tl.store(terms.dtotals + (terms.n_rows + row) * rule.n_tokens + own.tokens, -dwritten, mask=own.mask)
            part = terms.dtotals + ((2 + PARTS + first_row // ROWS) * terms.n_rows + row) * rule.n_tokens
            tl.store(part + own.start, tl.sum(dwritten, 0) + decay_over(last_total) * tl.sum(kept, 0))
        c = load_tile(rule.c, later, key_head, features, rule.key_dim)
        square = square_ptrs(
            weights_ptr, rule, own, batch * n_columns + column, rows[None, :], own_rows[:, None], CHUNK
        )
        weights = tl.load(square, mask=whole.mask[None, :], other=0.0)
        gradient = tl.dot(weights, c, gradient, input_precision="ieee")
        store_tile(db, gradient, own, column, features, rule.key_dim)


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


class GateTerms(NamedTuple):
    """Uninitialized fp32 terms of the gradients of G and D, which kernels write.

    Attributes:
        dtotals: (terms, B, V, T) those of each token, then those of the last token of a chunk, at its first token.
        dskip: (B, V, T) x . dy.
        n_rows: B * V.
    """

    dtotals: Tensor
    dskip: Tensor
    n_rows: int

    @staticmethod
    def of(rule: SSD, chunk: int) -> GateTerms:
        """Allocates the terms."""
        x = rule.x.ptr
        shape = 2 + 2 * (chunk // ROWS) + 1, len(x), rule.n_heads, rule.n_tokens
        terms = x.new_empty(shape, dtype=torch.float32)
        return GateTerms(terms[:-1], terms[-1], len(x) * rule.n_heads)


class EndGradients(NamedTuple):
    """Gradients of the states at both ends of rows, (B, V, D_k, D_v), or None.

    Attributes:
        dfinal: that of the final state, given.
        dinitial: that of the initial state, written.
    """

    dfinal: Tensor | None
    dinitial: Tensor | None


def scan_gradients(rule: SSD, chunk: int, dout: Tensor, ends: EndGradients) -> Tensor:
    """Writes the gradient of the initial state.

    Returns:
        (B, V, slots + 1, D_v, D_k) gradient of the state before each chunk and, in the last slot, of the final state,
        transposed.
    """
    x, shares, launch = rule.x.ptr, segment_shares(rule.table), REVERSE_SCAN[rule.x.ptr.element_size()]
    keys, values = launch.tile(rule.key_dim, rule.value_dim)
    blocks = cdiv(rule.value_dim, values)
    dstates = x.new_empty((len(x), rule.n_heads, rule.n_slots + 1, rule.value_dim, rule.key_dim))
    _reverse_scan_kernel[len(x) * rule.n_heads * shares * blocks](
        rule, strided(dout), dstates, ends, shares, blocks, (chunk, keys, values), **launch.options
    )
    return dstates


def token_gradients(
    rule: SSD, chunk: int, dout: Tensor, states: Tensor, dstates: Tensor, gradients: SSDGradients
) -> None:
    """Writes the gradients of all inputs but the initial state."""
    x, size, parts, terms = rule.x.ptr, rule.x.ptr.element_size(), chunk // ROWS, GateTerms.of(rule, chunk)
    groups, shares = rule.n_heads // rule.group, cdiv(rule.group, HEADS)
    weights = x.new_empty((len(x), groups * shares, rule.n_tokens, chunk))
    programs = len(x) * rule.n_slots * groups * shares * parts
    db, dc = (_parts_of(gradient, shares) for gradient in (gradients.db, gradients.dc))

    def tile(launch: Launch) -> tuple[int, ...]:
        keys, values = launch.tile(rule.key_dim, rule.value_dim)
        return chunk, ROWS, HEADS, keys, values, cdiv(rule.value_dim, values)

    operands, launch = (rule, strided(dout), states), QUERY_GRADIENTS[size]
    _query_gradients_kernel[programs](*operands, weights, strided(dc), terms, tile(launch), **launch.options)
    results, launch = (gradients.dx, strided(db), gradients.ddt), KEY_GRADIENTS[size]
    _key_gradients_kernel[programs](*operands, dstates, weights, *results, terms, tile(launch), **launch.options)

    gate_gradients(rule.table, terms.dtotals, gradients.dg, chunk, parts)
    if shares > 1:
        for gradient, parts_of_sum in ((gradients.db, db), (gradients.dc, dc)):
            gradient.copy_(parts_of_sum.unflatten(2, (groups, shares)).sum(3))
    if gradients.dd.numel() > 0:
        gradients.dd.copy_(terms.dskip.sum((0, 2)))


def _parts_of(gradient: Tensor, shares: int) -> Tensor:
    """Memory for the parts of a gradient of (B, T, K, D_k), (B, T, K * shares, D_k): fp32, or the gradient itself."""
    batch, n_tokens, groups, key_dim = gradient.shape
    if shares == 1:
        return gradient
    return gradient.new_empty((batch, n_tokens, groups * shares, key_dim), dtype=torch.float32)
