"""Rotary position embedding (Su et al. 2021, eq. 34), half-split: feature i turns together with feature i + R/2.

Forward:   y1 = x1 * cos - x2 * sin,   y2 = x2 * cos + x1 * sin,   features from R on pass through.
Backward:  the inverse rotation of the upstream gradient, that is the same with -sin.

Saved: cos and sin. Queries and keys are rotated in one launch, out of place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import next_power_of_2, once_differentiable, register, uses_triton
from ligerzoo.kernels.jit import jit, kernel, tl


def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The same in plain torch: the specification, the CPU path and the tests' oracle."""
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # the same angle for every head
    x1, x2, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], dim=-1).to(x.dtype)


@jit
def _rotate_heads(
    x_ptr, y_ptr, x_head_stride, x_feature_stride, cos, sin, n_heads, head_dim, half,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    heads = tl.arange(0, HEADS)[:, None].to(tl.int64)  # in a (B, N, T, D) layout a long text's heads are far apart
    features = tl.arange(0, HALF)[None, :].to(tl.int64)
    mask = (heads < n_heads) & (features < half)
    source = x_ptr + heads * x_head_stride
    target = y_ptr + heads * head_dim

    x1 = tl.load(source + features * x_feature_stride, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(source + (features + half) * x_feature_stride, mask=mask, other=0.0).to(tl.float32)
    tl.store(target + features, (x1 * cos - x2 * sin).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(target + features + half, (x2 * cos + x1 * sin).to(y_ptr.dtype.element_ty), mask=mask)

    if REST > 0:  # partial rotation
        features = 2 * half + tl.arange(0, REST)[None, :].to(tl.int64)
        mask = (heads < n_heads) & (features < head_dim)
        rest = tl.load(source + features * x_feature_stride, mask=mask, other=0.0)
        tl.store(target + features, rest, mask=mask)


@kernel
def _rotation_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    q_batch_stride, q_token_stride, q_head_stride, q_feature_stride,
    k_batch_stride, k_token_stride, k_head_stride, k_feature_stride,
    angle_batch_stride, n_tokens, n_q_heads, n_k_heads, head_dim, half, direction,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // n_tokens, row % n_tokens
    features = tl.arange(0, HALF)
    angle = batch * angle_batch_stride + token * half + features
    cos = tl.load(cos_ptr + angle, mask=features < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angle, mask=features < half, other=0.0).to(tl.float32)[None, :] * direction

    _rotate_heads(
        q_ptr + batch * q_batch_stride + token * q_token_stride, q_out_ptr + row * n_q_heads * head_dim,
        q_head_stride, q_feature_stride, cos, sin, n_q_heads, head_dim, half, Q_HEADS, HALF, REST,
    )  # fmt: skip
    _rotate_heads(
        k_ptr + batch * k_batch_stride + token * k_token_stride, k_out_ptr + row * n_k_heads * head_dim,
        k_head_stride, k_feature_stride, cos, sin, n_k_heads, head_dim, half, K_HEADS, HALF, REST,
    )  # fmt: skip


def _rotation_fake(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


@register("rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool inverse) -> (Tensor, Tensor)", fake=_rotation_fake)
def _rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    q_out, k_out = _rotation_fake(q, k, cos, sin, inverse)
    batch, tokens, q_heads, head_dim = q.shape
    k_heads, half = k.shape[2], cos.shape[-1]
    cos, sin = cos.contiguous(), sin.contiguous()
    _rotation_kernel[batch * tokens](
        q, k, cos, sin, q_out, k_out, *q.stride(), *k.stride(), cos.stride(0) if cos.shape[0] > 1 else 0,
        tokens, q_heads, k_heads, head_dim, half, -1.0 if inverse else 1.0,
        next_power_of_2(q_heads), next_power_of_2(k_heads), next_power_of_2(half),
        next_power_of_2(head_dim - 2 * half) if head_dim > 2 * half else 0, num_warps=4,
    )  # fmt: skip
    return q_out, k_out


class _RoPE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotation(q, k, cos, sin, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk = _rotation(dq, dk, *ctx.saved_tensors, True)
        return dq, dk, None, None


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys by their positions' angles; gradients flow to `q` and `k`.

    Args:
        q: (B, T, N, D) queries, any strides.
        k: (B, T, K, D) keys, any strides.
        cos: (B or 1, T, R/2) cosines of the angles, R <= D: features from R on pass through unrotated.
        sin: like `cos`.

    Returns:
        The rotated queries and keys, contiguous, in the shapes and dtypes of `q` and `k`.

    Raises:
        ValueError: the shapes do not fit together.
    """
    fits = (
        q.dim() == k.dim() == 4
        and q.shape[:2] == k.shape[:2]
        and q.shape[3] == k.shape[3]
        and cos.dim() == 3
        and cos.shape == sin.shape
        and cos.shape[0] in (1, q.shape[0])
        and cos.shape[1] == q.shape[1]
        and 2 * cos.shape[2] <= q.shape[3]
    )
    if not fits:
        raise ValueError(
            f"rope: q {tuple(q.shape)}, k {tuple(k.shape)}, cos {tuple(cos.shape)} and "
            f"sin {tuple(sin.shape)} do not fit; "
            f"expected (B, T, N, D), (B, T, K, D) and twice (B or 1, T, R/2) with R <= D"
        )
    if uses_triton(q, k, cos, sin):
        return _RoPE.apply(q, k, cos, sin)
    return reference(q, k, cos, sin)
