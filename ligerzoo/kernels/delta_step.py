"""One step of the gated delta rule, see `delta_rule`: a few tokens, with the state updated in place.

A program holds a block of a head's state in registers, and reads and writes it once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.delta_rule import check_tokens, reference
from ligerzoo.kernels.delta_tiles import NORMALIZATION_EPS, inverse_norm
from ligerzoo.kernels.dispatch import Backend, cdiv, empty_result, padded_size, uses_triton
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.registration import needs_dispatch
from ligerzoo.kernels.strided import StridedFeatures, strided
from ligerzoo.tensor_checks import check_tensor

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
def _kernel(
    q, k, v, g, beta, state, out_ptr, sizes, scale, eps,
    KEYS: tl.constexpr, VALUES: tl.constexpr, NORMALIZE: tl.constexpr, EXACT: tl.constexpr, PER_CHANNEL: tl.constexpr,
):  # fmt: skip
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
        delta = _load_number(beta, batch, token, head) * (value - tl.sum(s * key[:, None], 0))
        s += key[:, None] * delta[None, :]
        out = tl.sum(s * (query * scale)[:, None], 0)
        offsets = ((batch * sizes.n_tokens + token) * sizes.n_heads + head) * sizes.value_dim + values
        tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=values < sizes.value_dim)
    tl.store(state_ptrs, s.to(state.ptr.dtype.element_ty), mask=mask)


def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    scale: float | None = None,
    normalize: bool = True,
    backend: Backend = "auto",
) -> Tensor:
    """Continues `gated_delta_rule` by one token or a few, and updates the state in place. Not differentiable.

    It allocates only its result and does not synchronize with the host, so a CUDA graph can capture it.

    Args:
        q: (B, T, K, D_k) queries, T small.
        k: (B, T, K, D_k) keys.
        v: (B, T, V, D_v) values.
        g: (B, T, V) or (B, T, V, D_k) logarithm of the decay.
        beta: (B, T, V) writing strength.
        state: (B, V, D_k, D_v) any strides, fp32 for the accuracy of `gated_delta_rule`; overwritten.
        scale: see `gated_delta_rule`.
        normalize: see `gated_delta_rule`.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        (B, T, V, D_v) outputs in the dtype of `v`.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: the shapes or dtypes do not match, or `backend` does not support the tensors.
    """
    check_tokens("gated_delta_step", q, k, v, g, beta)
    check_tensor("gated_delta_step", "state", state, shapes=[(len(v), v.shape[2], k.shape[3], v.shape[3])])
    with torch.no_grad():
        if not uses_triton(q, k, v, g, beta, state, backend=backend) or needs_dispatch(q, k, v, g, beta, state):
            o, new_state = reference(q, k, v, g, beta, state, None, scale, normalize)
            state.copy_(new_state)
            return o.to(v.dtype)
        with torch.cuda.device(v.device if v.is_cuda else -1):
            return _step(q, k, v, g, beta, state, k.shape[-1] ** -0.5 if scale is None else scale, normalize)


def _step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float, normalize: bool
) -> Tensor:
    batch, tokens, heads, value_dim = v.shape
    key_dim, values = k.shape[3], min(VALUES, padded_size(value_dim))
    o, blocks = empty_result(v), cdiv(value_dim, values)
    sizes = _Sizes(tokens, heads, heads // k.shape[2], key_dim, value_dim, blocks)
    tokens_of_heads = (StridedFeatures(x, *x.stride()) for x in (q, k, v))
    gates = StridedFeatures(g, *g.stride()) if g.dim() == 4 else strided(g)
    operands = *tokens_of_heads, gates, strided(beta), _State(state, *state.stride()), o
    constants = padded_size(key_dim), values, normalize, v.dtype == torch.float32, g.dim() == 4
    _kernel[batch * heads * blocks](*operands, sizes, scale, NORMALIZATION_EPS, *constants, num_warps=WARPS)
    return o
