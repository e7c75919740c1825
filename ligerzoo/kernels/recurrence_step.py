"""One step of a linear recurrence: a few tokens, with the state updated in place.

For each value head, with a state S of shape (D_k, D_v), from token to token:

    S = e^g S;   S = S + beta k u^T;   o = scale * S^T q + d v

with u = v - S^T k for the delta rule, else u = v. A program holds a block of a head's state in registers, and reads and
writes it once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.delta_tiles import NORMALIZATION_EPS, inverse_norm
from ligerzoo.kernels.dispatch import cdiv, empty_result, padded_size
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.strided import StridedFeatures, strided

VALUES, WARPS = 16, 4
"""Features of the values per program, and warps. To be tuned on a GPU."""


class _State(NamedTuple):
    """(B, V, D_k, D_v), any strides."""

    ptr: Tensor
    batch_stride: int
    head_stride: int
    row_stride: int
    column_stride: int


class _Sizes(NamedTuple):
    n_tokens: int
    n_heads: int
    group: int
    key_dim: int
    value_dim: int
    n_blocks: int


@jit
def _load_vector(x, batch, token, head, features, n_features):
    ptr = x.ptr + batch * x.batch_stride + token * x.token_stride + head * x.head_stride
    return tl.load(ptr + features * x.feature_stride, mask=features < n_features, other=0.0).to(tl.float32)


@jit
def _load_number(x, batch, token, head):
    return tl.load(x.ptr + batch * x.batch_stride + token * x.token_stride + head * x.head_stride).to(tl.float32)


@kernel
def _kernel(q, k, v, g, beta, state, d_ptr, out_ptr, sizes, scale, eps, TILE: tl.constexpr, RULE: tl.constexpr):
    KEYS: tl.constexpr = TILE[0]
    VALUES: tl.constexpr = TILE[1]
    DELTA: tl.constexpr = RULE[0]
    NORMALIZE: tl.constexpr = RULE[1]
    EXACT: tl.constexpr = RULE[2]
    PER_CHANNEL: tl.constexpr = RULE[3]
    program = tl.program_id(0).to(tl.int64)
    block, row = program % sizes.n_blocks, program // sizes.n_blocks
    head, batch = row % sizes.n_heads, row // sizes.n_heads
    key_head = head // sizes.group
    features, values = tl.arange(0, KEYS).to(tl.int64), block * VALUES + tl.arange(0, VALUES)
    mask = (features < sizes.key_dim)[:, None] & (values < sizes.value_dim)[None, :]
    state_ptrs = state.ptr + batch * state.batch_stride + head * state.head_stride
    state_ptrs += features[:, None] * state.row_stride + values[None, :] * state.column_stride
    s = tl.load(state_ptrs, mask=mask, other=0.0).to(tl.float32)
    for token in range(sizes.n_tokens):
        query = _load_vector(q, batch, token, key_head, features, sizes.key_dim)
        key = _load_vector(k, batch, token, key_head, features, sizes.key_dim)
        value = _load_vector(v, batch, token, head, values, sizes.value_dim)
        if NORMALIZE:
            query *= inverse_norm(tl.sum(query * query, 0), eps, EXACT)
            key *= inverse_norm(tl.sum(key * key, 0), eps, EXACT)
        if PER_CHANNEL:
            s *= tl.exp(_load_vector(g, batch, token, head, features, sizes.key_dim))[:, None]
        else:
            s *= tl.exp(_load_number(g, batch, token, head))
        delta = value
        if DELTA:
            delta -= tl.sum(s * key[:, None], 0)
        delta *= _load_number(beta, batch, token, head)
        s += key[:, None] * delta[None, :]
        out = tl.sum(s * (query * scale)[:, None], 0)
        if d_ptr is not None:
            out += tl.load(d_ptr + head).to(tl.float32) * value
        offsets = ((batch * sizes.n_tokens + token) * sizes.n_heads + head) * sizes.value_dim + values
        tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=values < sizes.value_dim)
    tl.store(state_ptrs, s.to(state.ptr.dtype.element_ty), mask=mask)


class RecurrenceOptions(NamedTuple):
    """Options of `step`.

    Attributes:
        scale: factor of the outputs.
        normalize: normalize q and k, see `delta_rule`.
        is_delta: write what the state lacks of the value, instead of the value.
    """

    scale: float = 1.0
    normalize: bool = False
    is_delta: bool = False


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    d: Tensor | None,
    rule: RecurrenceOptions,
) -> Tensor:
    """Returns the (B, T, V, D_v) outputs. Allocates only these, without a host sync, so a CUDA graph can capture it.

    Args:
        q: (B, T, K, D_k), any strides.
        k: (B, T, K, D_k), any strides.
        v: (B, T, V, D_v), any strides.
        g: (B, T, V) or (B, T, V, D_k), any strides.
        beta: (B, T, V), any strides.
        state: (B, V, D_k, D_v), any strides; overwritten.
        d: (V,) contiguous, or None.
        rule: see `RecurrenceOptions`.
    """
    batch, tokens, heads, value_dim = v.shape
    key_dim, values = k.shape[3], min(VALUES, padded_size(value_dim))
    o, blocks = empty_result(v), cdiv(value_dim, values)
    sizes = _Sizes(tokens, heads, heads // k.shape[2], key_dim, value_dim, blocks)
    tokens_of_heads = (StridedFeatures(x, *x.stride()) for x in (q, k, v))
    gates = StridedFeatures(g, *g.stride()) if g.dim() == 4 else strided(g)
    operands = *tokens_of_heads, gates, strided(beta), _State(state, *state.stride()), d, o
    is_exact = v.dtype == torch.float32
    constants = (padded_size(key_dim), values), (rule.is_delta, rule.normalize, is_exact, g.dim() == 4)
    _kernel[batch * heads * blocks](*operands, sizes, rule.scale, NORMALIZATION_EPS, *constants, num_warps=WARPS)
    return o
