"""The chunks of linear recurrences, such as the gated delta rule and Mamba-2: which tokens belong to each, and what
kernels load of them.

A state S of shape (D_k, D_v) decays by exp(g) at each token. G is the sum of g from the start of the chunk to a token.

Chunks begin at the start of each segment, so that a segment has the results of the segment alone, bit by bit. With
chunks of C tokens, a row of T tokens has at most ceil(T / C) chunks that continue a segment, each of which begins in
another block of C tokens: that block is the slot of its state. So memory and grids depend on T only, and the host does
not read the segments.

Functions for kernels take what a kernel reads as `rule`: a NamedTuple with the fields `table`, `total` (B, V, T),
`n_tokens`, `n_slots` (ceil(T / C)), `n_heads` (V), `group` (V / K for K heads of keys), `key_dim` (D_k) and `value_dim`
(D_v).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import padded_size
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.math import exp
from ligerzoo.kernels.strided import Strided

SEGMENT_PROGRAMS = 16
"""Programs per row, head and block of values that share the segments of a packed row in a scan."""


class Launch(NamedTuple):
    """Sizes of a kernel's launch.

    Attributes:
        values: features of the values per program, or per iteration; 0 for a kernel without values.
        warps: warps per program.
        stages: iterations of a loop whose loads overlap.
        registers: at most, of a thread, so that more programs run at a time; 0 for those that the compiler takes. It
            takes many for what comes before a loop, and spills of these cost little.
    """

    values: int
    warps: int
    stages: int
    registers: int = 0

    @property
    def options(self) -> dict[str, int]:
        """The options of Triton's launch."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        if self.registers > 0 and torch.version.hip is None:  # an option of NVIDIA GPUs
            options["maxnreg"] = self.registers
        return options

    def for_keys(self, key_dim: int) -> Launch:
        """With more warps for tiles of more than 128 keys, so that their elements fit into registers."""
        return self._replace(warps=min(8, self.warps * max(1, padded_size(key_dim) // 128)))

    def tile(self, key_dim: int, value_dim: int) -> tuple[int, int]:
        """Features of a tile of all keys, and of the values per program, or per iteration."""
        return padded_size(key_dim), min(self.values, padded_size(value_dim))


class ChunkTable(NamedTuple):
    """The chunks of packed rows; of rows that are not packed, Nones.

    Attributes:
        segment_start: (B or 1, T) integers, the first token of each token's segment.
        starts: (B or 1, T + 1) int32, the first token of each chunk, then T.
        segments: (B or 1, T + 1) int32, the first chunk of each segment, then the number of chunks.
        counts: (B or 1, 2) int32, the number of chunks and of segments.
        stride: distance of rows in `starts` and `segments`; 0 for one row that describes all.
    """

    segment_start: Tensor | None = None
    starts: Tensor | None = None
    segments: Tensor | None = None
    counts: Tensor | None = None
    stride: int = 0


class Span(NamedTuple):
    """Tokens of a chunk, in a kernel.

    Attributes:
        batch: the batch element.
        start: the chunk's first token.
        end: one past its last token.
        rows: the tokens, counted from `start`.
        tokens: the tokens, int64.
        mask: which of them are in the chunk.
    """

    batch: tl.tensor
    start: tl.tensor
    end: tl.tensor
    rows: tl.tensor
    tokens: tl.tensor
    mask: tl.tensor


@kernel
def _table_kernel(table, n_tokens, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    segment_start_ptr = table.segment_start + row * n_tokens
    starts_ptr = table.starts + row * (n_tokens + 1)
    segments_ptr = table.segments + row * (n_tokens + 1)
    n_chunks = tl.full((), 0, dtype=tl.int32)
    n_segments = tl.full((), 0, dtype=tl.int32)
    for first in range(0, n_tokens, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        in_row = tokens < n_tokens
        within = tokens - tl.load(segment_start_ptr + tokens, mask=in_row, other=0).to(tl.int32)
        begins_chunk = in_row & (within % CHUNK == 0)
        begins_segment = in_row & (within == 0)
        chunks = n_chunks + tl.cumsum(begins_chunk.to(tl.int32), 0)  # up to each token
        segments = n_segments + tl.cumsum(begins_segment.to(tl.int32), 0)
        tl.store(starts_ptr + chunks - 1, tokens, mask=begins_chunk)
        tl.store(segments_ptr + segments - 1, chunks - 1, mask=begins_segment)
        n_chunks += tl.sum(begins_chunk.to(tl.int32), 0)
        n_segments += tl.sum(begins_segment.to(tl.int32), 0)
    tl.store(starts_ptr + n_chunks, n_tokens)
    tl.store(segments_ptr + n_segments, n_chunks)
    tl.store(table.counts + row * 2, n_chunks)
    tl.store(table.counts + row * 2 + 1, n_segments)


def chunk_table(segment_start: Tensor | None, chunk: int) -> ChunkTable:
    """The chunks of `chunk` tokens of rows with these segments, computed without a host sync."""
    if segment_start is None:
        return ChunkTable()
    segment_start = segment_start.contiguous()
    rows, tokens = segment_start.shape
    starts, segments = (segment_start.new_empty((rows, tokens + 1), dtype=torch.int32) for _ in range(2))
    counts = segment_start.new_empty((rows, 2), dtype=torch.int32)
    table = ChunkTable(segment_start, starts, segments, counts, tokens + 1 if rows > 1 else 0)
    _table_kernel[rows](table, tokens, chunk, 1024, num_warps=4)
    return table


@jit
def split_program(n_inner, n_middle):
    """The inner, middle and outer index of the program, int64. Programs are ordered as (outer, middle, inner)."""
    program = tl.program_id(0).to(tl.int64)
    return program % n_inner, program // n_inner % n_middle, program // n_inner // n_middle


@jit
def part_of_chunk(rule, n_columns, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """The first row of the program's part of a chunk, its column (of heads or keys), slot and batch element."""
    program = tl.program_id(0).to(tl.int64)
    PARTS: tl.constexpr = CHUNK // ROWS
    first_row, program = (program % PARTS).to(tl.int32) * ROWS, program // PARTS
    column, program = program % n_columns, program // n_columns
    return first_row, column, program % rule.n_slots, program // rule.n_slots


@jit
def head_rows(rule, batch, head):
    """The row of a value head in (B, V, ...), and its key head."""
    return batch * rule.n_heads + head, head // rule.group


@jit
def chunk_count(table, n_tokens, batch, CHUNK: tl.constexpr):
    """The number of chunks of a row."""
    if table.counts is not None:
        n_chunks = tl.load(table.counts + tl.where(table.stride > 0, batch, 0) * 2)
    else:
        n_chunks = tl.cdiv(n_tokens, CHUNK)
    return n_chunks


@jit
def segment_count(table, batch):
    """The number of segments of a row."""
    if table.counts is not None:
        n_segments = tl.load(table.counts + tl.where(table.stride > 0, batch, 0) * 2 + 1)
    else:
        n_segments = tl.full((), 1, dtype=tl.int32)
    return n_segments


@jit
def segment_chunks(table, n_tokens, batch, segment, CHUNK: tl.constexpr):
    """The first chunk of a segment, and the one after its last."""
    if table.segments is not None:
        first = tl.load(table.segments + batch * table.stride + segment)
        end = tl.load(table.segments + batch * table.stride + segment + 1)
    else:
        first = 0
        end = tl.cdiv(n_tokens, CHUNK)
    return first, end


@jit
def chunk_span(table, n_tokens, batch, chunk, rows, CHUNK: tl.constexpr):
    """These rows of a chunk."""
    if table.starts is not None:
        start = tl.load(table.starts + batch * table.stride + chunk).to(tl.int64)
        end = tl.load(table.starts + batch * table.stride + chunk + 1).to(tl.int64)
    else:
        start = tl.cast(chunk, tl.int64) * CHUNK
        end = tl.minimum(start + CHUNK, n_tokens)
    tokens = start + rows
    return Span(batch, start, end, rows, tokens, tokens < end)


@jit
def continues(rule, batch, token):
    """Whether the chunk that begins at the token has a state before it: that of its segment, or the initial one."""
    if rule.table.segment_start is not None:
        row = rule.table.segment_start + tl.where(rule.table.stride > 0, batch, 0) * rule.n_tokens
        has_state = (tl.load(row + token) != token) | (token == 0)
    else:
        has_state = token >= 0
    return has_state


@jit
def by_token(ptr, rule):
    """A contiguous (B, T, V, D_v)."""
    token_stride = rule.n_heads * rule.value_dim
    return Strided(ptr, tl.cast(rule.n_tokens, tl.int64) * token_stride, token_stride, rule.value_dim)


@jit
def tile_ptr(x, span, head):
    """The first feature of a head of the span's first token."""
    return x.ptr + (span.batch * x.batch_stride + span.start * x.token_stride + head * x.head_stride)


@jit
def load_tile(x, span, head, features, n_features):
    """The features of a head of the span's tokens; zeros beyond chunk and features.

    Offsets within a chunk have 32 bits, which takes fewer registers.
    """
    offsets = span.rows[:, None] * x.token_stride + features[None, :]
    mask = span.mask[:, None] & (features < n_features)[None, :]
    return tl.load(tile_ptr(x, span, head) + offsets, mask=mask, other=0.0)


@jit
def store_tile(x, tile, span, head, features, n_features):
    """Stores what `load_tile` loads."""
    offsets = span.rows[:, None] * x.token_stride + features[None, :]
    mask = span.mask[:, None] & (features < n_features)[None, :]
    tl.store(tile_ptr(x, span, head) + offsets, tile.to(x.ptr.dtype.element_ty), mask=mask)


@jit
def load_columns(x, span, head, features, n_features):
    """`load_tile`, transposed: (features, tokens). Triton overlaps the loads of an operand, but not of a transpose."""
    offsets = span.rows[None, :] * x.token_stride + features[:, None]
    mask = span.mask[None, :] & (features < n_features)[:, None]
    return tl.load(tile_ptr(x, span, head) + offsets, mask=mask, other=0.0)


@jit
def store_columns(x, tile, span, head, features, n_features):
    """Stores what `load_columns` loads."""
    offsets = span.rows[None, :] * x.token_stride + features[:, None]
    mask = span.mask[None, :] & (features < n_features)[:, None]
    tl.store(tile_ptr(x, span, head) + offsets, tile.to(x.ptr.dtype.element_ty), mask=mask)


@jit
def inner_products(a, b, span, head, n_features, FEATURES: tl.constexpr):
    """a_i . b_j of the tokens of a chunk, by blocks of features, which takes fewer registers."""
    products = tl.zeros((span.rows.shape[0], span.rows.shape[0]), dtype=tl.float32)
    for first in range(0, n_features, FEATURES):
        features = first + tl.arange(0, FEATURES)
        a_tile = load_tile(a, span, head, features, n_features)
        b_tile = load_tile(b, span, head, features, n_features)
        products = tl.dot(a_tile, tl.trans(b_tile), products, input_precision="ieee")
    return products


@jit
def square_ptrs(ptr, rule, span, row, rows, cols, CHUNK: tl.constexpr):
    """Elements of a square of (rows, T, CHUNK), that of a chunk."""
    return ptr + (row * rule.n_tokens + span.start) * CHUNK + (rows * CHUNK + cols)


@jit
def load_totals(rule, span, row):
    """G of the chunk, that of its last token beyond the chunk, so that no difference is positive; and of this token."""
    totals = rule.total + row * rule.n_tokens
    return tl.load(totals + tl.minimum(span.tokens, span.end - 1)), tl.load(totals + span.end - 1)


@jit
def load_state(states_ptr, rule, slot, features, values, exists):
    """The block of a state in this slot; zeros if it does not exist.

    `features[:, None]` and `values[None, :]` load (features, values); `features[None, :]` and `values[:, None]` load
    the transpose, (values, features).
    """
    mask = (features < rule.key_dim) & (values < rule.value_dim) & exists
    offsets = values * rule.key_dim + features  # of 32 bits, so that the tile takes one sum of 64 bits, not two
    return tl.load(states_ptr + slot * rule.key_dim * rule.value_dim + offsets, mask=mask, other=0.0)


@jit
def state_block(rule, block, KEYS: tl.constexpr, VALUES: tl.constexpr):
    """A block of the values of a state, (values, features): its features, its values, and which elements exist."""
    features, values = tl.arange(0, KEYS), block.to(tl.int32) * VALUES + tl.arange(0, VALUES)
    return features, values, (values < rule.value_dim)[:, None] & (features < rule.key_dim)[None, :]


@jit
def gate_offsets(rule, span, head):
    """Of (B, T, V)."""
    return (span.batch * rule.n_tokens + span.tokens) * rule.n_heads + head


@jit
def decay_over(difference):
    """The exponential of a difference of sums of g, in fp32. It is exact for sums in fp64, those of fp32 tokens."""
    return exp(difference.to(tl.float32), difference.dtype == tl.float64)


@jit
def decay_if(mask, difference):
    """`decay_over` where a mask holds, else 0. Differences that do not hold may be positive."""
    return tl.where(mask, decay_over(tl.minimum(difference, 0.0)), 0.0)


@jit
def decays(total, rows):
    """e_ij = exp(G_i - G_j) for j <= i, else 0."""
    return tl.where(rows[:, None] >= rows[None, :], decay_over(total[:, None] - total[None, :]), 0.0)


@jit
def slot_of_gradient(rule, span, CHUNK: tl.constexpr):
    """The slot of the gradient of the state after a chunk, and whether this state has an effect.

    The last slot is that of the final state. A state at the end of any other segment has no effect.
    """
    is_last = span.end == rule.n_tokens
    slot = tl.where(is_last, rule.n_slots, span.end // CHUNK)
    return slot, is_last | continues(rule, span.batch, tl.minimum(span.end, rule.n_tokens - 1))


def total_dtype(tokens: Tensor) -> torch.dtype:
    """The dtype of G: fp64 for fp32 tokens. The error of a small difference of large sums is as large as theirs."""
    return torch.float64 if tokens.dtype == torch.float32 else torch.float32


def segment_shares(table: ChunkTable) -> int:
    """Programs per row, head and block of values of a scan."""
    return 1 if table.starts is None else SEGMENT_PROGRAMS
