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

The chunks are those of `delta_tiles`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.delta_tiles import (
    CHUNK,
    FEATURES,
    NORMALIZATION_EPS,
    ChunkTable,
    chunk_count,
    chunk_tokens,
    continues,
    decay_over,
    decays,
    head_rows,
    inner_products,
    inverse_norm,
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


class Launch(NamedTuple):
    """Sizes of a kernel's launch.

    Attributes:
        values: features of the values per program, or per iteration; 0 for a kernel without values.
        warps: warps per program.
        stages: iterations of a loop whose loads overlap.
    """

    values: int
    warps: int
    stages: int


PREPARE = {2: Launch(values=0, warps=2, stages=1), 4: Launch(values=0, warps=8, stages=1)}
SOLVE = {2: Launch(values=32, warps=1, stages=3), 4: Launch(values=32, warps=8, stages=1)}
SCAN = {2: Launch(values=16, warps=4, stages=3), 4: Launch(values=16, warps=8, stages=1)}
OUTPUTS = {2: Launch(values=64, warps=2, stages=1), 4: Launch(values=16, warps=8, stages=1)}
"""By the element size of the tokens' tensors; those of 2 bytes were measured by `benchmarks.delta_launches`.

Triton uses the instructions `wgmma` for products of 2-byte elements with at least 64 rows in programs with a multiple
of 4 warps. ptxas 12.8 compiles some of them to code that accesses illegal memory (triton issue 11366). So programs with
products of 64 rows have 2 warps. The products of `scan` and `reverse_scan` have a row per feature of the values, and
those of `query_gradients` and `key_gradients` a row per token of half a chunk.
"""

SEGMENT_PROGRAMS = 16
"""Programs per row, head and block of values that share the segments of a packed row in `scan`."""


@jit
def _inverse_of_unit_lower(a, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
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
def _prepare_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, starts_ptr, counts_ptr, inverse_ptr, total_ptr, q_factor_ptr, k_factor_ptr,
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride, table_stride,
    n_tokens, n_slots, n_heads, group, key_dim, eps,
    CHUNK: tl.constexpr, FEATURES: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, slot, batch = split_program(n_heads, n_slots)
    row, key_head, key_row = head_rows(batch, head, n_heads, group)
    rows = tl.arange(0, CHUNK)
    n_chunks = chunk_count(counts_ptr, table_stride, batch, n_tokens, CHUNK)
    for chunk in range(slot, n_chunks, n_slots):
        start, _, tokens, in_chunk = chunk_tokens(starts_ptr, table_stride, batch, chunk, rows, n_tokens, CHUNK)
        gates = (batch * n_tokens + tokens) * n_heads + head
        total = tl.cumsum(tl.load(g_ptr + gates, mask=in_chunk, other=0.0).to(total_ptr.dtype.element_ty), 0)
        beta = load_betas(beta_ptr, batch, tokens, head, n_heads, in_chunk, n_tokens)
        tl.store(total_ptr + row * n_tokens + tokens, total, mask=in_chunk)

        products = inner_products(
            k_ptr, k_ptr, batch, start, rows, key_head, k_batch_stride, k_token_stride, k_head_stride, k_batch_stride,
            k_token_stride, k_head_stride, in_chunk, key_dim, CHUNK, FEATURES,
        )  # fmt: skip
        if k_factor_ptr is not None:
            squares = tl.sum(tl.where(rows[:, None] == rows[None, :], products, 0.0), 1)
            k_factor = inverse_norm(squares, eps, EXACT)
            products *= k_factor[:, None] * k_factor[None, :]
            if head % group == 0:
                squares = tl.zeros((CHUNK,), dtype=tl.float32)
                for first in range(0, key_dim, FEATURES):
                    features = first + tl.arange(0, FEATURES)
                    q = load_tile(q_ptr, batch, start, rows, key_head, q_batch_stride, q_token_stride, q_head_stride,
                                  features, in_chunk, key_dim).to(tl.float32)  # fmt: skip
                    squares += tl.sum(q * q, 1)
                factors = key_row * n_tokens + tokens
                tl.store(k_factor_ptr + factors, k_factor, mask=in_chunk)
                tl.store(q_factor_ptr + factors, inverse_norm(squares, eps, EXACT), mask=in_chunk)

        system = tl.where(rows[:, None] > rows[None, :], decays(total, rows, EXACT) * products * beta[None, :], 0.0)
        inverse = _inverse_of_unit_lower(system, CHUNK, PRECISION)
        inverse_of_chunk = inverse_ptr + (row * n_tokens + start) * CHUNK
        offsets = rows[:, None] * CHUNK + rows[None, :]
        tl.store(inverse_of_chunk + offsets, inverse.to(inverse_ptr.dtype.element_ty), mask=in_chunk[:, None])


@kernel
def _solve_kernel(
    k_ptr, v_ptr, inverse_ptr, total_ptr, k_factor_ptr, starts_ptr, counts_ptr, readers_ptr, errors_ptr,
    k_batch_stride, k_token_stride, k_head_stride, v_batch_stride, v_token_stride, v_head_stride, table_stride,
    n_tokens, n_slots, n_heads, group, key_dim, value_dim,
    CHUNK: tl.constexpr, FEATURES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    head, slot, batch = split_program(n_heads, n_slots)
    row, key_head, key_row = head_rows(batch, head, n_heads, group)
    rows = tl.arange(0, CHUNK)
    n_chunks = chunk_count(counts_ptr, table_stride, batch, n_tokens, CHUNK)
    for chunk in range(slot, n_chunks, n_slots):
        start, end, tokens, in_chunk = chunk_tokens(starts_ptr, table_stride, batch, chunk, rows, n_tokens, CHUNK)
        inverse = tl.load(inverse_ptr + (row * n_tokens + start) * CHUNK + rows[:, None] * CHUNK + rows[None, :],
                          mask=in_chunk[:, None], other=0.0)  # fmt: skip
        total = load_total(total_ptr, row, tokens, end, n_tokens)
        k_factor = load_factors(k_factor_ptr, key_row, tokens, in_chunk, n_tokens)
        scaled = (inverse.to(tl.float32) * (decay_over(total, EXACT) * k_factor)[None, :]).to(inverse.dtype)
        for first in range(0, key_dim, FEATURES):
            features = first + tl.arange(0, FEATURES)
            k = load_tile(k_ptr, batch, start, rows, key_head, k_batch_stride, k_token_stride, k_head_stride, features,
                          in_chunk, key_dim)  # fmt: skip
            readers = tl.dot(scaled, k, input_precision="ieee").to(readers_ptr.dtype.element_ty)
            offsets = rows[:, None] * key_dim + features[None, :]
            tl.store(
                readers_ptr + (row * n_tokens + start) * key_dim + offsets,
                readers,
                mask=in_chunk[:, None] & (features < key_dim)[None, :],
            )
        for first in range(0, value_dim, FEATURES):
            values = first + tl.arange(0, FEATURES)
            v = load_tile(v_ptr, batch, start, rows, head, v_batch_stride, v_token_stride, v_head_stride, values,
                          in_chunk, value_dim)  # fmt: skip
            errors = tl.dot(inverse, v, input_precision="ieee").to(errors_ptr.dtype.element_ty)
            offsets = rows[:, None] * (n_heads * value_dim) + values[None, :]
            first_value = ((batch * n_tokens + start) * n_heads + head) * value_dim
            tl.store(errors_ptr + first_value + offsets, errors, mask=in_chunk[:, None] & (values < value_dim)[None, :])


@kernel
def _scan_kernel(
    k_ptr, beta_ptr, readers_ptr, total_ptr, k_factor_ptr, initial_ptr, segment_start_ptr, starts_ptr, segments_ptr,
    counts_ptr, errors_ptr, states_ptr, final_ptr,
    k_batch_stride, k_token_stride, k_head_stride, table_stride,
    n_tokens, n_slots, n_shares, n_heads, group, key_dim, value_dim, n_blocks,
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
        state = tl.zeros((VALUES, KEYS), dtype=tl.float32)  # transposed
        if initial_ptr is not None:
            state = tl.load(initial_ptr + row * key_dim * value_dim + outer_offsets, mask=state_mask & (segment == 0),
                            other=0.0).to(tl.float32)  # fmt: skip
        for chunk in range(first, after_last):
            start, end, tokens, in_chunk = chunk_tokens(starts_ptr, table_stride, batch, chunk, rows, n_tokens, CHUNK)
            k = load_tile(k_ptr, batch, start, rows, key_head, k_batch_stride, k_token_stride, k_head_stride, features,
                          in_chunk, key_dim)  # fmt: skip
            readers = load_columns(readers_ptr, row, start, rows, 0, n_tokens * key_dim, key_dim, 0, features, in_chunk,
                                   key_dim)  # fmt: skip
            error_ptrs = errors_ptr + ((batch * n_tokens + start) * n_heads + head) * value_dim
            error_ptrs += rows[None, :] * (n_heads * value_dim) + values[:, None]
            mask = in_chunk[None, :] & (values < value_dim)[:, None]
            errors = tl.load(error_ptrs, mask=mask, other=0.0).to(tl.float32)
            total = load_total(total_ptr, row, tokens, end, n_tokens)
            last_total = tl.load(total_ptr + row * n_tokens + end - 1)
            beta = load_betas(beta_ptr, batch, tokens, head, n_heads, in_chunk, n_tokens)
            k_factor = load_factors(k_factor_ptr, key_row, tokens, in_chunk, n_tokens)

            rounded = state.to(k.dtype)
            has_state = continues(segment_start_ptr, table_stride, batch, start, n_tokens)
            slot = (row * n_slots + start // CHUNK) * key_dim * value_dim
            tl.store(states_ptr + slot + state_offsets, rounded, mask=state_mask & has_state)
            errors -= tl.dot(rounded, readers, input_precision="ieee")
            tl.store(error_ptrs, errors.to(k.dtype), mask=mask)
            written = errors * (decay_over(last_total - total, EXACT) * k_factor * beta)[None, :]
            state = tl.dot(written.to(k.dtype), k, decay_over(last_total, EXACT) * state, input_precision="ieee")
        if final_ptr is not None:
            final = final_ptr + row * key_dim * value_dim + outer_offsets
            tl.store(final, state, mask=state_mask & (segment == n_segments - 1))


@kernel
def _outputs_kernel(
    q_ptr, k_ptr, beta_ptr, total_ptr, q_factor_ptr, k_factor_ptr, segment_start_ptr, starts_ptr, counts_ptr,
    errors_ptr, states_ptr, out_ptr,
    q_batch_stride, q_token_stride, q_head_stride, k_batch_stride, k_token_stride, k_head_stride, table_stride,
    n_tokens, n_slots, n_heads, group, key_dim, value_dim, scale,
    CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    head, slot, batch = split_program(n_heads, n_slots)
    row, key_head, key_row = head_rows(batch, head, n_heads, group)
    rows, features = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    n_chunks = chunk_count(counts_ptr, table_stride, batch, n_tokens, CHUNK)
    for chunk in range(slot, n_chunks, n_slots):
        start, end, tokens, in_chunk = chunk_tokens(starts_ptr, table_stride, batch, chunk, rows, n_tokens, CHUNK)
        q = load_tile(q_ptr, batch, start, rows, key_head, q_batch_stride, q_token_stride, q_head_stride, features,
                      in_chunk, key_dim)  # fmt: skip
        k = load_tile(k_ptr, batch, start, rows, key_head, k_batch_stride, k_token_stride, k_head_stride, features,
                      in_chunk, key_dim)  # fmt: skip
        total = load_total(total_ptr, row, tokens, end, n_tokens)
        q_factor = load_factors(q_factor_ptr, key_row, tokens, in_chunk, n_tokens)
        k_factor = load_factors(k_factor_ptr, key_row, tokens, in_chunk, n_tokens)
        beta = load_betas(beta_ptr, batch, tokens, head, n_heads, in_chunk, n_tokens)
        attention = tl.dot(q, tl.trans(k), input_precision="ieee") * decays(total, rows, EXACT)
        attention = (attention * (q_factor * scale)[:, None] * (k_factor * beta)[None, :]).to(q.dtype)
        state_factor = decay_over(total, EXACT) * q_factor * scale
        has_state = continues(segment_start_ptr, table_stride, batch, start, n_tokens)
        first_value = ((batch * n_tokens + start) * n_heads + head) * value_dim
        for first in range(0, value_dim, VALUES):
            values = first + tl.arange(0, VALUES)
            state = load_state(states_ptr, row * n_slots + start // CHUNK, features[:, None], values[None, :], key_dim,
                               value_dim, has_state)  # fmt: skip
            mask = in_chunk[:, None] & (values < value_dim)[None, :]
            offsets = rows[:, None] * (n_heads * value_dim) + values[None, :]
            errors = tl.load(errors_ptr + first_value + offsets, mask=mask, other=0.0)
            out = tl.dot(q, state, input_precision="ieee") * state_factor[:, None]
            out = tl.dot(attention, errors, out, input_precision="ieee")
            tl.store(out_ptr + first_value + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


class Tokens(NamedTuple):
    """The tensors of the tokens, with adjacent features.

    Attributes:
        q: (B, T, K, D_k).
        k: (B, T, K, D_k).
        v: (B, T, V, D_v).
    """

    q: Tensor
    k: Tensor
    v: Tensor


class Prepared(NamedTuple):
    """What `prepare` computes, and backward needs: 66 elements per token and value head, and 8 bytes per token and key
    head.

    Attributes:
        inverse: (B, V, T, 64) X, the rows of each chunk, in the dtype of the tokens.
        total: (B, V, T) G, see `total_dtype`.
        q_factor: (B, K, T) fp32, 1 / norm of q; without elements if q and k are not normalized.
        k_factor: (B, K, T) fp32, 1 / norm of k, likewise.
    """

    inverse: Tensor
    total: Tensor
    q_factor: Tensor
    k_factor: Tensor


def total_dtype(v: Tensor) -> torch.dtype:
    """The dtype of G: fp64 for fp32 tokens. The error of a small difference of large sums is as large as theirs."""
    return torch.float64 if v.dtype == torch.float32 else torch.float32


def allocate_prepared(k: Tensor, v: Tensor, normalize: bool) -> Prepared:
    """Uninitialized results of `prepare`."""
    batch, tokens, heads = v.shape[:3]
    factor_shape = (batch, k.shape[2], tokens) if normalize else (0,)
    return Prepared(
        v.new_empty((batch, heads, tokens, CHUNK)),
        v.new_empty((batch, heads, tokens), dtype=total_dtype(v)),
        v.new_empty(factor_shape, dtype=torch.float32),
        v.new_empty(factor_shape, dtype=torch.float32),
    )


def optional(tensor: Tensor) -> Tensor | None:
    """None for a tensor without elements."""
    return tensor if tensor.numel() > 0 else None


def is_exact(tokens: Tokens) -> bool:
    """Whether elementwise functions must be exact in fp32."""
    return tokens.v.dtype == torch.float32


def launch_of(launches: dict[int, Launch], tokens: Tokens) -> Launch:
    """The launch for these tokens. Tiles of more than 128 keys must leave shared memory for the others."""
    launch = launches[tokens.v.element_size()]
    return launch if tokens.k.shape[3] <= 128 else Launch(min(launch.values, 16), launch.warps, stages=1)


def prepare(tokens: Tokens, g: Tensor, beta: Tensor, table: ChunkTable, normalize: bool) -> Prepared:
    """Computes the triangular inverses, the sums of g and the norms; `g` and `beta` are (B, T, V), contiguous."""
    q, k, v = tokens
    batch, n_tokens, heads, _ = v.shape
    launch = launch_of(PREPARE, tokens)
    prepared = allocate_prepared(k, v, normalize)
    slots = cdiv(n_tokens, CHUNK)
    _prepare_kernel[batch * slots * heads](
        q, k, g, beta, table.starts, table.counts, prepared.inverse, prepared.total, optional(prepared.q_factor),
        optional(prepared.k_factor), *q.stride()[:3], *k.stride()[:3], table.stride, n_tokens, slots, heads,
        heads // k.shape[2], k.shape[3], NORMALIZATION_EPS, CHUNK, min(FEATURES, padded_size(k.shape[3])),
        is_exact(tokens), "ieee" if is_exact(tokens) else "tf32", num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return prepared


def solve(tokens: Tokens, prepared: Prepared, table: ChunkTable) -> tuple[Tensor, Tensor]:
    """Returns W, (B, V, T, D_k), and X V, (B, T, V, D_v)."""
    _, k, v = tokens
    batch, n_tokens, heads, value_dim = v.shape
    key_dim = k.shape[3]
    launch = launch_of(SOLVE, tokens)
    slots = cdiv(n_tokens, CHUNK)
    readers, errors = v.new_empty((batch, heads, n_tokens, key_dim)), v.new_empty(v.shape)
    _solve_kernel[batch * slots * heads](
        k, v, prepared.inverse, prepared.total, optional(prepared.k_factor), table.starts, table.counts, readers,
        errors, *k.stride()[:3], *v.stride()[:3], table.stride, n_tokens, slots, heads, heads // k.shape[2], key_dim,
        value_dim, CHUNK, min(launch.values, padded_size(key_dim, value_dim)), is_exact(tokens),
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return readers, errors


def scan(
    tokens: Tokens, beta: Tensor, prepared: Prepared, table: ChunkTable, readers: Tensor, errors: Tensor,
    initial_state: Tensor | None, final_state: Tensor | None,
) -> Tensor:  # fmt: skip
    """Returns the state before each chunk, transposed, (B, V, slots, D_v, D_k).

    Completes `errors`, X V, to E in place, and writes the (B, V, D_k, D_v) `final_state`.
    """
    _, k, v = tokens
    batch, n_tokens, heads, value_dim = v.shape
    key_dim = k.shape[3]
    launch = launch_of(SCAN, tokens)
    slots, shares = cdiv(n_tokens, CHUNK), 1 if table.starts is None else SEGMENT_PROGRAMS
    values = min(launch.values, padded_size(value_dim))
    blocks = cdiv(value_dim, values)
    states = v.new_empty((batch, heads, slots, value_dim, key_dim))
    _scan_kernel[batch * heads * shares * blocks](
        k, beta, readers, prepared.total, optional(prepared.k_factor), initial_state, table.segment_start,
        table.starts, table.segments, table.counts, errors, states, final_state, *k.stride()[:3], table.stride,
        n_tokens, slots, shares, heads, heads // k.shape[2], key_dim, value_dim, blocks, CHUNK, padded_size(key_dim),
        values, is_exact(tokens), num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return states


def outputs(
    tokens: Tokens, beta: Tensor, prepared: Prepared, table: ChunkTable, errors: Tensor, states: Tensor, scale: float
) -> Tensor:
    """Returns the (B, T, V, D_v) outputs."""
    q, k, v = tokens
    batch, n_tokens, heads, value_dim = v.shape
    launch = launch_of(OUTPUTS, tokens)
    slots = cdiv(n_tokens, CHUNK)
    out = v.new_empty(v.shape)
    _outputs_kernel[batch * slots * heads](
        q, k, beta, prepared.total, optional(prepared.q_factor), optional(prepared.k_factor), table.segment_start,
        table.starts, table.counts, errors, states, out, *q.stride()[:3], *k.stride()[:3], table.stride, n_tokens,
        slots, heads, heads // k.shape[2], k.shape[3], value_dim, scale, CHUNK, padded_size(k.shape[3]),
        min(launch.values, padded_size(value_dim)), is_exact(tokens), num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return out
