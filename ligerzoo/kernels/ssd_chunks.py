"""The chunked forward pass of state-space duality (Dao & Gu 2024, section 6): recurrences of many tokens as products.

Within a chunk, let G_i be the sum of g up to token i, e_ij = exp(G_i - G_j), S the state before the chunk, and x, b, c
and y the rows of its tokens. Then

    y_i = exp(G_i) S^T c_i + sum over j <= i of e_ij (c_i . b_j) dt_j x_j + D x_i
    S'  = exp(G_last) S + sum over j of exp(G_last - G_j) dt_j b_j x_j^T

Three kernels:

1. `prepare`, for each part of a chunk and group: G, dt by head, and the products c_i . b_j, which the heads of a group
   share;
2. `scan`, for each head and block of values, from chunk to chunk: S;
3. `outputs`, for each part of a chunk and head: y.

The chunks are those of `chunk_tiles`: K is the number of groups, D_k the size of the state, V heads have D_v features.
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
    chunk_table,
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
    split_program,
    square_ptrs,
    state_block,
    store_tile,
    total_dtype,
)
from ligerzoo.kernels.dispatch import cdiv, empty_result, next_power_of_2
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.strided import Strided, strided

CHUNKS = {2: 128, 4: 64}
"""Tokens of a chunk, by the element size of the tokens' tensors. Longer chunks need fewer states and larger squares."""

PREPARE = {2: Launch(values=64, warps=4, stages=3, registers=128), 4: Launch(values=32, warps=8, stages=1)}
SCAN = {2: Launch(values=32, warps=4, stages=3), 4: Launch(values=16, warps=8, stages=1)}
OUTPUTS = {2: Launch(values=64, warps=2, stages=1), 4: Launch(values=32, warps=8, stages=1)}
"""By the element size. Products have fewer than 64 rows, or programs have 2 warps, see `delta_chunks`."""

ROWS, OUTPUT_ROWS = 32, {2: 64, 4: 32}
"""Tokens of a part of a chunk, in `prepare` and in `outputs`, by the element size."""

FEATURES = 64
"""Features of c and of the states per iteration of `outputs`."""

GATES = 8
"""Heads of which a program of `prepare` adds up g at a time."""


class SSD(NamedTuple):
    """What all kernels of a call read.

    Attributes:
        x: (B, T, V, D_v).
        b: (B, T, K, D_k).
        c: (B, T, K, D_k).
        d: (V,), or None.
        total: (B, V, T) G.
        steps: (B, V, T) dt, in fp32.
        products: (B, K, T, chunk) c_i . b_j, the rows of each chunk.
        table: the chunks.
        n_tokens: T.
        n_slots: chunks of a row of T tokens without segments.
        n_heads: V.
        group: V / K.
        key_dim: D_k.
        value_dim: D_v.
    """

    x: Strided
    b: Strided
    c: Strided
    d: Tensor | None
    total: Tensor
    steps: Tensor
    products: Tensor
    table: ChunkTable
    n_tokens: int
    n_slots: int
    n_heads: int
    group: int
    key_dim: int
    value_dim: int


@kernel
def _prepare_kernel(
    rule, g_ptr, dt_ptr, CHUNK: tl.constexpr, ROWS: tl.constexpr, GATES: tl.constexpr, FEATURES: tl.constexpr
):
    n_groups = rule.n_heads // rule.group
    first_row, key_head, slot, batch = part_of_chunk(rule, n_groups, CHUNK, ROWS)
    rows, own_rows = tl.arange(0, CHUNK), first_row + tl.arange(0, ROWS)
    for chunk in range(slot, chunk_count(rule.table, rule.n_tokens, batch, CHUNK), rule.n_slots):
        whole = chunk_span(rule.table, rule.n_tokens, batch, chunk, rows, CHUNK)
        own = chunk_span(rule.table, rule.n_tokens, batch, chunk, own_rows, CHUNK)
        for first in range(first_row // ROWS * GATES, rule.group, CHUNK // ROWS * GATES):
            of_group = first + tl.arange(0, GATES)
            heads, mask = key_head * rule.group + of_group, whole.mask[:, None] & (of_group < rule.group)[None, :]
            gates = (batch * rule.n_tokens + whole.tokens)[:, None] * rule.n_heads + heads[None, :]
            g = tl.load(g_ptr + gates, mask=mask, other=0.0)
            totals = (batch * rule.n_heads + heads)[None, :] * rule.n_tokens + whole.tokens[:, None]
            tl.store(rule.total + totals, tl.cumsum(g.to(rule.total.dtype.element_ty), 0), mask=mask)
            tl.store(rule.steps + totals, tl.load(dt_ptr + gates, mask=mask, other=0.0).to(tl.float32), mask=mask)
        products = tl.zeros((ROWS, CHUNK), dtype=rule.total.dtype.element_ty)  # of large terms that cancel, as G
        for first in range(0, rule.key_dim, FEATURES):
            features = first + tl.arange(0, FEATURES)
            c = load_tile(rule.c, own, key_head, features, rule.key_dim)
            b = load_columns(rule.b, whole, key_head, features, rule.key_dim)
            products += tl.dot(c, b, input_precision="ieee").to(products.dtype)
        row = batch * n_groups + key_head
        ptrs = square_ptrs(rule.products, rule, own, row, own_rows[:, None], rows[None, :], CHUNK)
        tl.store(ptrs, products.to(rule.products.dtype.element_ty), mask=own.mask[:, None])


@jit
def load_steps(rule, span, row):
    """dt of the span's tokens."""
    return tl.load(rule.steps + row * rule.n_tokens + span.tokens, mask=span.mask, other=0.0)


@kernel
def _scan_kernel(rule, states_ptr, initial_ptr, final_ptr, n_shares, n_blocks, TILE: tl.constexpr):
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
        state = tl.zeros((VALUES, KEYS), dtype=tl.float32)  # transposed
        if initial_ptr is not None:
            initial = initial_ptr + row * state_size + outer_offsets
            state = tl.load(initial, mask=state_mask & (segment == 0), other=0.0).to(tl.float32)
        for chunk in range(first, after_last):
            span = chunk_span(rule.table, rule.n_tokens, batch, chunk, rows, CHUNK)
            states = states_ptr + (row * rule.n_slots + span.start // CHUNK) * state_size + state_offsets
            stored = state_mask & continues(rule, batch, span.start)
            tl.store(states, state.to(states_ptr.dtype.element_ty), mask=stored)
            b = load_tile(rule.b, span, key_head, features, rule.key_dim)
            x = load_columns(rule.x, span, head, values, rule.value_dim)
            total, last_total = load_totals(rule, span, row)
            written = x.to(tl.float32) * (decay_over(last_total - total) * load_steps(rule, span, row))[None, :]
            state = tl.dot(written.to(b.dtype), b, decay_over(last_total) * state, input_precision="ieee")
        if final_ptr is not None:
            final = final_ptr + row * state_size + outer_offsets
            tl.store(final, state, mask=state_mask & (segment == n_segments - 1))


@kernel
def _outputs_kernel(rule, states_ptr, out_ptr, TILE: tl.constexpr):
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
        total = load_totals(rule, own, row)[0]
        has_state = continues(rule, batch, own.start)
        slot_of_state = row * rule.n_slots + own.start // CHUNK
        for first in range(0, rule.value_dim, VALUES):
            values = first + tl.arange(0, VALUES)
            out = tl.zeros((ROWS, VALUES), dtype=tl.float32)
            for first_key in range(0, rule.key_dim, KEYS):
                features = first_key + tl.arange(0, KEYS)
                c = load_tile(rule.c, own, key_head, features, rule.key_dim)
                state = load_state(states_ptr, rule, slot_of_state, features[:, None], values[None, :], has_state)
                out = tl.dot(c, state, out, input_precision="ieee")
            out *= decay_over(total)[:, None]
            for first_column in range(0, first_row + ROWS, ROWS):
                columns = first_column + tl.arange(0, ROWS)
                other = chunk_span(rule.table, rule.n_tokens, batch, chunk, columns, CHUNK)
                x = load_tile(rule.x, other, head, values, rule.value_dim)
                squares = square_ptrs(rule.products, rule, own, group_row, own_rows[:, None], columns[None, :], CHUNK)
                products = tl.load(squares, mask=own.mask[:, None], other=0.0).to(tl.float32)
                difference = total[:, None] - load_totals(rule, other, row)[0][None, :]
                weights = products * decay_over(difference) * load_steps(rule, other, row)[None, :]
                weights = tl.where(own_rows[:, None] >= columns[None, :], weights, 0.0)
                out = tl.dot(weights.to(x.dtype), x, out, input_precision="ieee")
            if rule.d is not None:
                own_x = load_tile(rule.x, own, head, values, rule.value_dim)
                out += tl.load(rule.d + head).to(tl.float32) * own_x.to(tl.float32)
            store_tile(by_token(out_ptr, rule), out, own, head, values, rule.value_dim)


class SSDInputs(NamedTuple):
    """The inputs of `ssd` that both passes read, those of tokens in one dtype and with adjacent features.

    Attributes:
        x: (B, T, V, D_v), any strides but the last.
        b: (B, T, K, D_k), likewise.
        c: (B, T, K, D_k), likewise.
        g: (B, T, V) of any dtype, contiguous.
        dt: (B, T, V) of any dtype, contiguous.
        d: (V,) of any dtype, contiguous; or None.
        initial_state: (B, V, D_k, D_v), of any dtype, contiguous; or None.
        segment_start: (B or 1, T) integers, or None.
    """

    x: Tensor
    b: Tensor
    c: Tensor
    g: Tensor
    dt: Tensor
    d: Tensor | None
    initial_state: Tensor | None
    segment_start: Tensor | None

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return CHUNKS[self.x.element_size()]

    @property
    def slots(self) -> int:
        """Chunks of a row without segments."""
        return cdiv(self.x.shape[1], self.chunk)


def prepare_chunks(inputs: SSDInputs) -> SSD:
    """Computes the sums of g, dt by head and the products. Returns what kernels read."""
    x, b, c, g, dt, d, _, segment_start = inputs
    (batch, n_tokens, heads, value_dim), (groups, key_dim) = x.shape, b.shape[2:]
    chunk, launch = inputs.chunk, PREPARE[x.element_size()]
    total = x.new_empty((batch, heads, n_tokens), dtype=total_dtype(x))
    steps = torch.empty_like(total, dtype=torch.float32)
    products = x.new_empty((batch, groups, n_tokens, chunk))
    sizes = n_tokens, inputs.slots, heads, heads // groups, key_dim, value_dim
    tokens = strided(x), strided(b), strided(c), d
    rule = SSD(*tokens, total, steps, products, chunk_table(segment_start, chunk), *sizes)
    features = min(launch.values, launch.tile(key_dim, value_dim)[0])
    gates = min(GATES, next_power_of_2(rule.group))
    programs = batch * inputs.slots * groups * (chunk // ROWS)
    _prepare_kernel[programs](rule, g, dt, chunk, ROWS, gates, features, **launch.options)
    return rule


def scan_states(rule: SSD, chunk: int, initial_state: Tensor | None, final_state: Tensor | None) -> Tensor:
    """Returns the state before each chunk, transposed, (B, V, slots, D_v, D_k), and writes the (B, V, D_k, D_v)
    `final_state`."""
    x, shares = rule.x.ptr, segment_shares(rule.table)
    launch = SCAN[x.element_size()].for_keys(rule.key_dim)
    keys, values = launch.tile(rule.key_dim, rule.value_dim)
    blocks = cdiv(rule.value_dim, values)
    states = x.new_empty((len(x), rule.n_heads, rule.n_slots, rule.value_dim, rule.key_dim))
    _scan_kernel[len(x) * rule.n_heads * shares * blocks](
        rule, states, initial_state, final_state, shares, blocks, (chunk, keys, values), **launch.options
    )
    return states


def chunk_outputs(rule: SSD, chunk: int, states: Tensor) -> Tensor:
    """Returns the (B, T, V, D_v) outputs."""
    x = rule.x.ptr
    launch, rows = OUTPUTS[x.element_size()], OUTPUT_ROWS[x.element_size()]
    out = empty_result(x)
    keys, values = launch.tile(rule.key_dim, rule.value_dim)
    _outputs_kernel[len(x) * rule.n_slots * rule.n_heads * (chunk // rows)](
        rule, states, out, (chunk, rows, min(FEATURES, keys), values), **launch.options
    )
    return out
