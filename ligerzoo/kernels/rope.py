"""Rotary position embedding (Su et al. 2021, eq. 34).

Pair i of the R rotated features is rotated by angle i. In the half-split layout it has features i and i + R/2; in the
interleaved layout of the paper, features 2i and 2i + 1.

Forward:   y1 = x1 * cos - x2 * sin,   y2 = x2 * cos + x1 * sin;   features R and above are copied.
Backward:  the inverse rotation of the upstream gradient: the same formula with -sin.

Saved: cos and sin. One launch rotates queries and keys, out of place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.kernels.autograd import FusedContext, FusedFunction, once_differentiable
from ligerzoo.kernels.dispatch import Backend, next_power_of_2, uses_triton
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.registration import register
from ligerzoo.tensor_checks import check_floats


def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """`rope` in plain torch: the specification, the CPU path and the test oracle."""
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    pairs = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # the same angle for every head
    rotated, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    x1, x2 = rotated.unflatten(-1, (pairs, 2)).unbind(-1) if interleaved else rotated.chunk(2, -1)
    features = [x1 * cos - x2 * sin, x2 * cos + x1 * sin]
    if interleaved:
        features = [torch.stack(features, -1).flatten(-2)]
    return torch.cat([*features, rest], -1).to(x.dtype)


@jit
def _rotate_heads(
    x_ptr, y_ptr, x_head_stride, x_feature_stride, cos, sin, n_heads, head_dim, half,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    heads = tl.arange(0, HEADS)[:, None].to(tl.int64)  # in a (B, N, T, D) layout the head stride may be large
    source = x_ptr + heads * x_head_stride
    target = y_ptr + heads * head_dim

    if INTERLEAVED:  # loads and stores both features of a pair together, and splits them in registers
        features = tl.arange(0, 2 * HALF)[None, :].to(tl.int64)
        mask = (heads < n_heads) & (features < 2 * half)
        x = tl.load(source + features * x_feature_stride, mask=mask, other=0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(x, (HEADS, HALF, 2)))
        y = tl.reshape(tl.join(x1 * cos - x2 * sin, x2 * cos + x1 * sin), (HEADS, 2 * HALF))
        tl.store(target + features, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        features = tl.arange(0, HALF)[None, :].to(tl.int64)
        mask = (heads < n_heads) & (features < half)
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
    cos_ptr, sin_ptr, q_ptr, k_ptr, q_out_ptr, k_out_ptr,
    q_batch_stride, q_token_stride, q_head_stride, q_feature_stride,
    k_batch_stride, k_token_stride, k_head_stride, k_feature_stride,
    angle_batch_stride, angle_token_stride, angle_pair_stride,
    n_tokens, n_q_heads, n_k_heads, head_dim, half, direction,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // n_tokens, row % n_tokens
    features = tl.arange(0, HALF).to(tl.int64)
    angle = batch * angle_batch_stride + token * angle_token_stride + features * angle_pair_stride
    cos = tl.load(cos_ptr + angle, mask=features < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angle, mask=features < half, other=0.0).to(tl.float32)[None, :] * direction

    if Q_HEADS > 0:
        _rotate_heads(
            q_ptr + batch * q_batch_stride + token * q_token_stride, q_out_ptr + row * n_q_heads * head_dim,
            q_head_stride, q_feature_stride, cos, sin, n_q_heads, head_dim, half, Q_HEADS, HALF, REST, INTERLEAVED,
        )  # fmt: skip
    if K_HEADS > 0:
        _rotate_heads(
            k_ptr + batch * k_batch_stride + token * k_token_stride, k_out_ptr + row * n_k_heads * head_dim,
            k_head_stride, k_feature_stride, cos, sin, n_k_heads, head_dim, half, K_HEADS, HALF, REST, INTERLEAVED,
        )  # fmt: skip


def _allocate(cos: Tensor, q: Tensor | None, k: Tensor | None) -> tuple[Tensor, Tensor]:
    q_out, k_out = (cos.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k))
    return q_out, k_out


@register("rope", fake=_allocate)
def _rotation(
    cos: Tensor, sin: Tensor, q: Tensor | None, k: Tensor | None, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    """The rotated queries and keys; empty for None."""
    q_out, k_out = _allocate(cos, q, k)
    batch, tokens, _, head_dim = next(x.shape for x in (q, k) if x is not None)
    half = cos.shape[-1]
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    q_heads, q_tile, q_strides = _heads(q)
    k_heads, k_tile, k_strides = _heads(k)
    tile_half = next_power_of_2(half)
    _rotation_kernel[batch * tokens](
        cos, sin, q, k, q_out, k_out, *q_strides, *k_strides, cos.stride(0) if cos.shape[0] > 1 else 0,
        *cos.stride()[1:], tokens, q_heads, k_heads, head_dim, half, -1.0 if inverse else 1.0, q_tile, k_tile,
        tile_half, next_power_of_2(head_dim - 2 * half) if head_dim > 2 * half else 0, interleaved,
        num_warps=min(16, max(4, max(q_tile, k_tile) * tile_half // 512)),
    )  # fmt: skip
    return q_out, k_out


def _heads(x: Tensor | None) -> tuple[int, int, tuple[int, ...]]:
    """The number of heads, the number of heads of a tile, and the strides."""
    return (0, 0, (0,) * 4) if x is None else (x.shape[2], next_power_of_2(x.shape[2]), x.stride())


class _RoPE(FusedFunction):
    @staticmethod
    def forward(
        ctx: FusedContext, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        if not torch.compiler.is_compiling():  # the compiler does not support it: an unused output gets zeros
            ctx.set_materialize_grads(False)
        rotated = _rotation(cos, sin, q, k, interleaved, False)
        # The rotation of a frozen input must not require a gradient: attention would compute it in vain.
        frozen = [y for y, needed in zip(rotated, ctx.needs_input_grad, strict=False) if not needed]
        ctx.mark_non_differentiable(*frozen)
        return rotated

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
        needs_q, needs_k = ctx.needs_input_grad[:2]
        dq, dk = dq if needs_q else None, dk if needs_k else None
        if dq is None and dk is None:
            return None, None, None, None, None
        cos, sin = ctx.saved_tensors
        q_gradient, k_gradient = _rotation(cos, sin, dq, dk, ctx.interleaved, True)
        return None if dq is None else q_gradient, None if dk is None else k_gradient, None, None, None


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys by the angles of their positions. Differentiable in `q` and `k`.

    Args:
        q: (B, T, N, D) queries, any strides.
        k: (B, T, K, D) keys, any strides.
        cos: (B or 1, T, R/2) cosines of the angles, any strides, R <= D. Features R and above are copied unrotated.
            With fp32 cosines the rotation runs in fp32 and is rounded once, whatever the dtype of `q` and `k`.
        sin: (B or 1, T, R/2) sines of the angles. Views with the strides of `cos` are not copied, such as
            the first half of angles that transformers repeats for both features of a pair.
        interleaved: whether the pairs are features 2i and 2i + 1, or i and i + R/2.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        The rotated queries and keys, contiguous, in the shapes and dtypes of `q` and `k`.

    Raises:
        ValueError: the shapes do not match.
    """
    check_floats("rope", q=q, k=k, cos=cos, sin=sin)
    shapes_match = (
        q.dim() == k.dim() == 4
        and q.shape[:2] == k.shape[:2]
        and q.shape[3] == k.shape[3]
        and cos.dim() == 3
        and cos.shape == sin.shape
        and (cos.shape[0] == 1 or cos.shape[0] == q.shape[0])  # dynamo does not support `in` with symbolic sizes
        and cos.shape[1] == q.shape[1]
        and 2 * cos.shape[2] <= q.shape[3]
    )
    if not shapes_match:
        raise ValueError(
            f"rope: q is {tuple(q.shape)}, k {tuple(k.shape)}, cos {tuple(cos.shape)} and sin {tuple(sin.shape)}; "
            "expected shapes (B, T, N, D), (B, T, K, D), and (B or 1, T, R/2) with R <= D for both cos and sin"
        )
    if uses_triton(q, k, cos, sin, backend=backend):
        return _RoPE.apply(q, k, cos, sin, interleaved)
    return reference(q, k, cos, sin, interleaved)
