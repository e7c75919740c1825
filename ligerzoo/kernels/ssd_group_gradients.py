"""The gradients of b and c of state-space duality, whose heads share them by group; see `ssd_chunk_gradients`.

The heads of a group add up dc and db, so that one product with b, and one with c, serves the W of all of them. Two
kernels, each for up to 16 heads of a group:

1. `pair_weights`, for each tile of a chunk's pairs of tokens: the sum of W dt over the heads, the sums over P, and dD;
2. `group_gradients`, for each part of a chunk: dc, and once more db, with the terms of gates through states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.kernels.chunk_tiles import (
    Launch,
    chunk_count,
    chunk_span,
    continues,
    decay_over,
    load_columns,
    load_state,
    load_tile,
    load_totals,
    part_of_chunk,
    slot_of_gradient,
    split_program,
    square_ptrs,
    store_tile,
)
from ligerzoo.kernels.dispatch import cdiv
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.ssd_chunk_gradients import PAIR_ROWS, GateTerms, SSDGradients
from ligerzoo.kernels.ssd_chunks import ROWS, SSD, load_steps
from ligerzoo.kernels.strided import strided

PAIR_WEIGHTS = {2: Launch(values=64, warps=1, stages=2), 4: Launch(values=16, warps=8, stages=1)}
GROUP_GRADIENTS = {2: Launch(values=64, warps=2, stages=2), 4: Launch(values=16, warps=8, stages=1)}
"""By the element size of the tokens' tensors, see `ssd_chunks`."""

HEADS = 16
"""Heads of a group whose dc and db a program adds up."""


@jit
def _share_of_group(rule, column, HEADS: tl.constexpr):
    """The group, its first head of the program, and the one after its last."""
    n_shares = tl.cdiv(rule.group, HEADS)
    key_head, share = column // n_shares, column % n_shares
    first = key_head * rule.group + share * HEADS
    return key_head, first, tl.minimum(first + HEADS, (key_head + 1) * rule.group)


@jit
def _tile_of_triangle(index, PARTS: tl.constexpr):
    """The part of the rows, and that of the columns, of a tile on or below the diagonal of a chunk."""
    row_part = tl.full((), 0, dtype=tl.int32)
    for part in tl.static_range(1, PARTS):
        row_part += (index >= part * (part + 1) // 2).to(tl.int32)
    return row_part, index - row_part * (row_part + 1) // 2


@kernel
def _pair_weights_kernel(rule, dout, weights_ptr, terms, TILE: tl.constexpr):
    CHUNK: tl.constexpr = TILE[0]
    ROWS: tl.constexpr = TILE[1]
    HEADS: tl.constexpr = TILE[2]
    VALUES: tl.constexpr = TILE[3]
    BLOCKS: tl.constexpr = TILE[4]
    PARTS: tl.constexpr = CHUNK // ROWS
    n_groups = rule.n_heads // rule.group
    n_columns = n_groups * tl.cdiv(rule.group, HEADS)
    index, program, batch = split_program(PARTS * (PARTS + 1) // 2, n_columns * rule.n_slots)
    column, slot = program % n_columns, program // n_columns
    row_part, column_part = _tile_of_triangle(index.to(tl.int32), PARTS)
    key_head, first_head, after_last = _share_of_group(rule, column, HEADS)
    rows, columns = row_part * ROWS + tl.arange(0, ROWS), column_part * ROWS + tl.arange(0, ROWS)
    group_row, of_row, of_column = batch * n_groups + key_head, rows[:, None], columns[None, :]
    for chunk in range(slot, chunk_count(rule.table, rule.n_tokens, batch, CHUNK), rule.n_slots):
        readers = chunk_span(rule.table, rule.n_tokens, batch, chunk, rows, CHUNK)
        writers = chunk_span(rule.table, rule.n_tokens, batch, chunk, columns, CHUNK)
        squares = square_ptrs(rule.products, rule, readers, group_row, of_row, of_column, CHUNK)
        products = tl.load(squares, mask=readers.mask[:, None] & (of_row > of_column), other=0.0)
        weights = tl.zeros((ROWS, ROWS), dtype=tl.float32)  # of all heads
        for head in range(first_head, after_last):
            row = batch * rule.n_heads + head
            weight = tl.zeros((ROWS, ROWS), dtype=tl.float32)
            for block in tl.static_range(BLOCKS):
                values = block * VALUES + tl.arange(0, VALUES)
                x = load_columns(rule.x, writers, head, values, rule.value_dim)
                dout_tile = load_tile(dout, readers, head, values, rule.value_dim).to(x.dtype)
                weight = tl.dot(dout_tile, x, weight, input_precision="ieee")
            difference = load_totals(rule, readers, row)[0][:, None] - load_totals(rule, writers, row)[0][None, :]
            weight = tl.where(of_row >= of_column, weight * decay_over(difference), 0.0)
            steps = load_steps(rule, writers, row)[None, :]
            pairs = weight * products.to(tl.float32)
            weights += weight * steps
            sums = terms.pairs + (column_part * terms.n_rows + row) * rule.n_tokens
            tl.store(sums + readers.tokens, tl.sum(pairs * steps, 1), mask=readers.mask)
            sums = terms.pairs + ((row_part + 1) * terms.n_rows + row) * rule.n_tokens
            tl.store(sums + writers.tokens, tl.sum(pairs, 0), mask=writers.mask)
            if row_part == column_part:
                skip = tl.sum(tl.where(of_row == of_column, weight, 0.0), 0)
                tl.store(terms.skip + row * rule.n_tokens + writers.tokens, skip, mask=writers.mask)
        squares = square_ptrs(weights_ptr, rule, readers, batch * n_columns + column, of_row, of_column, CHUNK)
        tl.store(squares, weights.to(weights_ptr.dtype.element_ty), mask=readers.mask[:, None])


@kernel
def _group_gradients_kernel(
    rule, tokens, own_features, other_features, states_ptr, weights_ptr, gradient_of_own, terms_ptr,
    AFTER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dc from dy and the states before chunks; `AFTER`: db from x and the gradients of the states after chunks."""
    CHUNK: tl.constexpr = TILE[0]
    ROWS: tl.constexpr = TILE[1]
    HEADS: tl.constexpr = TILE[2]
    KEYS: tl.constexpr = TILE[3]
    VALUES: tl.constexpr = TILE[4]
    BLOCKS: tl.constexpr = TILE[5]
    n_columns = rule.n_heads // rule.group * tl.cdiv(rule.group, HEADS)
    first_row, column, slot, batch = part_of_chunk(rule, n_columns, CHUNK, ROWS)
    key_head, first_head, after_last = _share_of_group(rule, column, HEADS)
    square_row, own_rows, features = batch * n_columns + column, first_row + tl.arange(0, ROWS), tl.arange(0, KEYS)
    for chunk in range(slot, chunk_count(rule.table, rule.n_tokens, batch, CHUNK), rule.n_slots):
        own = chunk_span(rule.table, rule.n_tokens, batch, chunk, own_rows, CHUNK)
        if AFTER:
            n_slots, first_other, end = rule.n_slots + 1, first_row, CHUNK
            slot_in_row, exists = slot_of_gradient(rule, own, CHUNK)
        else:
            n_slots, first_other, end = rule.n_slots, 0, first_row + ROWS
            slot_in_row, exists = own.start // CHUNK, continues(rule, batch, own.start)
        own_tile = load_tile(own_features, own, key_head, features, rule.key_dim)
        gradient = tl.zeros((ROWS, KEYS), dtype=tl.float32)
        for head in range(first_head, after_last):
            row = batch * rule.n_heads + head
            of_head = tl.zeros((ROWS, KEYS), dtype=tl.float32)
            for block in tl.static_range(BLOCKS):
                values = block * VALUES + tl.arange(0, VALUES)
                tile = load_tile(tokens, own, head, values, rule.value_dim).to(own_tile.dtype)
                state = load_state(
                    states_ptr, rule, row * n_slots + slot_in_row, features[None, :], values[:, None], exists
                )
                of_head = tl.dot(tile, state, of_head, input_precision="ieee")
            # Not scaled before: a chain of additions over the products of all heads would be less exact.
            total, last_total = load_totals(rule, own, row)
            if AFTER:
                of_head *= decay_over(last_total - total)[:, None]
                gradient += of_head * load_steps(rule, own, row)[:, None]
            else:
                of_head *= decay_over(total)[:, None]
                gradient += of_head
            term = tl.sum(of_head * own_tile.to(tl.float32), 1)
            tl.store(terms_ptr + row * rule.n_tokens + own.tokens, term, mask=own.mask)
        for first in range(first_other, end, ROWS):
            rows = first + tl.arange(0, ROWS)
            others = chunk_span(rule.table, rule.n_tokens, batch, chunk, rows, CHUNK)
            other_tile = load_tile(other_features, others, key_head, features, rule.key_dim)
            if AFTER:
                squares = square_ptrs(weights_ptr, rule, own, square_row, rows[None, :], own_rows[:, None], CHUNK)
            else:
                squares = square_ptrs(weights_ptr, rule, own, square_row, own_rows[:, None], rows[None, :], CHUNK)
            weights = tl.load(squares, mask=own.mask[:, None] & others.mask[None, :], other=0.0)
            gradient = tl.dot(weights, other_tile, gradient, input_precision="ieee")
        store_tile(gradient_of_own, gradient, own, column, features, rule.key_dim)


def group_shares(rule: SSD) -> int:
    """Programs that share the heads of a group."""
    return cdiv(rule.group, HEADS)


def pair_weights(rule: SSD, chunk: int, dout: Tensor, terms: GateTerms) -> Tensor:
    """Writes the terms of gates with pairs and of D.

    Returns:
        (B, K * shares, T, chunk) the sums of W dt over heads, on and below the diagonal.
    """
    x, size, columns = rule.x.ptr, rule.x.ptr.element_size(), rule.n_heads // rule.group * group_shares(rule)
    launch, rows = PAIR_WEIGHTS[size], PAIR_ROWS[size]
    parts, (_, values) = chunk // rows, launch.tile(rule.key_dim, rule.value_dim)
    weights = x.new_empty((len(x), columns, rule.n_tokens, chunk))
    _pair_weights_kernel[len(x) * rule.n_slots * columns * (parts * (parts + 1) // 2)](
        rule, strided(dout), weights, terms, (chunk, rows, HEADS, values, cdiv(rule.value_dim, values)),
        **launch.options,
    )  # fmt: skip
    return weights


def group_gradients(
    rule: SSD, chunk: int, dout: Tensor, states: Tensor, dstates: Tensor, terms: GateTerms, gradients: SSDGradients
) -> None:
    """Writes db, dc, and the terms of gates through states and with pairs, and those of D."""
    x, shares = rule.x.ptr, group_shares(rule)
    launch = GROUP_GRADIENTS[x.element_size()].for_keys(rule.key_dim)
    groups, weights = rule.n_heads // rule.group, pair_weights(rule, chunk, dout, terms)
    keys, values = launch.tile(rule.key_dim, rule.value_dim)
    tile = chunk, ROWS, HEADS, keys, values, cdiv(rule.value_dim, values)
    for after, operands, gradient, term in (
        (False, (strided(dout), rule.c, rule.b, states), gradients.dc, terms.read),
        (True, (rule.x, rule.b, rule.c, dstates), gradients.db, terms.written),
    ):
        parts = _parts_of(gradient, shares)
        _group_gradients_kernel[len(x) * rule.n_slots * groups * shares * (chunk // ROWS)](
            rule, *operands, weights, strided(parts), term, after, tile, **launch.options
        )
        if shares > 1:
            gradient.copy_(parts.unflatten(2, (groups, shares)).sum(3))


def _parts_of(gradient: Tensor, shares: int) -> Tensor:
    """Memory for the parts of a gradient of (B, T, K, D_k), (B, T, K * shares, D_k): fp32, or the gradient itself."""
    batch, n_tokens, groups, key_dim = gradient.shape
    if shares == 1:
        return gradient
    return gradient.new_empty((batch, n_tokens, groups * shares, key_dim), dtype=torch.float32)
