"""One step of the gated delta rule, see `delta_rule`: a few tokens, with the state updated in place.

A program holds a block of a head's state in registers, and reads and writes it once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.kernels.delta_rule import check_tokens, reference
from ligerzoo.kernels.delta_tiles import NORMALIZATION_EPS, inverse_norm
from ligerzoo.kernels.dispatch import Backend, cdiv, padded_size, uses_triton
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.registration import needs_dispatch
from ligerzoo.tensor_checks import check_tensor

VALUES, WARPS = 16, 4
"""Features of the values per program, and warps. To be tuned on a GPU."""


@jit
def _load_vector(ptr, features, n_features, feature_stride):
    return tl.load(ptr + features * feature_stride, mask=features < n_features, other=0.0).to(tl.float32)


@kernel
def _kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, state_ptr, out_ptr,
    q_batch_stride, q_token_stride, q_head_stride, q_feature_stride,
    k_batch_stride, k_token_stride, k_head_stride, k_feature_stride,
    v_batch_stride, v_token_stride, v_head_stride, v_feature_stride,
    g_batch_stride, g_token_stride, g_head_stride, beta_batch_stride, beta_token_stride, beta_head_stride,
    state_batch_stride, state_head_stride, state_row_stride, state_column_stride,
    n_tokens, n_heads, group, key_dim, value_dim, n_blocks, scale, eps,
    KEYS: tl.constexpr, VALUES: tl.constexpr, NORMALIZE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    block, head, batch = program % n_blocks, program // n_blocks % n_heads, program // n_blocks // n_heads
    key_head = head // group
    features, values = tl.arange(0, KEYS).to(tl.int64), block * VALUES + tl.arange(0, VALUES)
    mask = (features < key_dim)[:, None] & (values < value_dim)[None, :]
    state_ptr += batch * state_batch_stride + head * state_head_stride
    state_ptr += features[:, None] * state_row_stride + values[None, :] * state_column_stride
    state = tl.load(state_ptr, mask=mask, other=0.0).to(tl.float32)
    for token in range(n_tokens):
        q = _load_vector(q_ptr + batch * q_batch_stride + token * q_token_stride + key_head * q_head_stride, features,
                         key_dim, q_feature_stride)  # fmt: skip
        k = _load_vector(k_ptr + batch * k_batch_stride + token * k_token_stride + key_head * k_head_stride, features,
                         key_dim, k_feature_stride)  # fmt: skip
        v = _load_vector(v_ptr + batch * v_batch_stride + token * v_token_stride + head * v_head_stride, values,
                         value_dim, v_feature_stride)  # fmt: skip
        g = tl.load(g_ptr + batch * g_batch_stride + token * g_token_stride + head * g_head_stride).to(tl.float32)
        beta = tl.load(beta_ptr + batch * beta_batch_stride + token * beta_token_stride + head * beta_head_stride)
        if NORMALIZE:
            q *= inverse_norm(tl.sum(q * q, 0), eps, EXACT)
            k *= inverse_norm(tl.sum(k * k, 0), eps, EXACT)
        state *= tl.exp(g)
        delta = beta.to(tl.float32) * (v - tl.sum(state * k[:, None], 0))
        state += k[:, None] * delta[None, :]
        out = tl.sum(state * (q * scale)[:, None], 0)
        offsets = ((batch * n_tokens + token) * n_heads + head) * value_dim + values
        tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=values < value_dim)
    tl.store(state_ptr, state.to(state_ptr.dtype.element_ty), mask=mask)


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
        g: (B, T, V) logarithm of the decay.
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
    key_dim = k.shape[3]
    values = min(VALUES, padded_size(value_dim))
    blocks = cdiv(value_dim, values)
    o = v.new_empty(v.shape)
    _kernel[batch * heads * blocks](
        q, k, v, g, beta, state, o, *q.stride(), *k.stride(), *v.stride(), *g.stride(), *beta.stride(), *state.stride(),
        tokens, heads, heads // k.shape[2], key_dim, value_dim, blocks, scale, NORMALIZATION_EPS,
        padded_size(key_dim), values, normalize, v.dtype == torch.float32, num_warps=WARPS,
    )  # fmt: skip
    return o
