"""Rotary position embedding (Su et al. 2021, eq. 34).

Pair i of the R rotated features is rotated by angle i. In the half-split layout it has features i and i + R/2; in the
interleaved layout of the paper, features 2i and 2i + 1.

Forward:   y1 = x1 * cos - x2 * sin,   y2 = x2 * cos + x1 * sin;   features R and above are copied.
Backward:  the inverse rotation of the upstream gradient: the same formula with -sin.

Saved: cos and sin. One launch rotates queries and keys, out of place.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.autograd import FusedContext, FusedFunction, once_differentiable
from ligerzoo.kernels.dispatch import Backend, empty_result, next_power_of_2, uses_triton
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.registration import register
from ligerzoo.tensor_checks import check_floats, explains_options, shape_error


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


class _Heads(NamedTuple):
    """Heads to rotate and their results, as the kernel takes them; no pointer and 0 heads for None."""

    ptr: Tensor | None
    out: Tensor
    n_heads: int
    batch_stride: int
    token_stride: int
    head_stride: int
    feature_stride: int


class _Angles(NamedTuple):
    """Cosines and sines, as the kernel takes them, and -1 for the inverse rotation or 1."""

    cos: Tensor
    sin: Tensor
    batch_stride: int
    token_stride: int
    pair_stride: int
    direction: float


class _Sizes(NamedTuple):
    """Numbers of tokens of a sequence, of features of a head, and of their pairs."""

    n_tokens: int
    head_dim: int
    half: int


@jit
def _rotate_heads(
    x, row, cos, sin, sizes, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr
):
    n_tokens, head_dim, half = sizes
    n_heads, x_feature_stride = x.n_heads, x.feature_stride
    heads = tl.arange(0, HEADS)[:, None].to(tl.int64)  # in a (B, N, T, D) layout the head stride may be large
    source = x.ptr + row // n_tokens * x.batch_stride + row % n_tokens * x.token_stride + heads * x.head_stride
    target = x.out + row * n_heads * head_dim + heads * head_dim

    if INTERLEAVED:  # loads and stores both features of a pair together, and splits them in registers
        features = tl.arange(0, 2 * HALF)[None, :].to(tl.int64)
        mask = (heads < n_heads) & (features < 2 * half)
        pairs = tl.load(source + features * x_feature_stride, mask=mask, other=0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(pairs, (HEADS, HALF, 2)))
        y = tl.reshape(tl.join(x1 * cos - x2 * sin, x2 * cos + x1 * sin), (HEADS, 2 * HALF))
        tl.store(target + features, y.to(x.out.dtype.element_ty), mask=mask)
    else:
        features = tl.arange(0, HALF)[None, :].to(tl.int64)
        mask = (heads < n_heads) & (features < half)
        x1 = tl.load(source + features * x_feature_stride, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(source + (features + half) * x_feature_stride, mask=mask, other=0.0).to(tl.float32)
        tl.store(target + features, (x1 * cos - x2 * sin).to(x.out.dtype.element_ty), mask=mask)
        tl.store(target + features + half, (x2 * cos + x1 * sin).to(x.out.dtype.element_ty), mask=mask)

    if REST > 0:  # partial rotation
        features = 2 * half + tl.arange(0, REST)[None, :].to(tl.int64)
        mask = (heads < n_heads) & (features < head_dim)
        rest = tl.load(source + features * x_feature_stride, mask=mask, other=0.0)
        tl.store(target + features, rest, mask=mask)


@kernel
def _rotation_kernel(
    angles, q, k, sizes, TILES: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr
):
    Q_HEADS: tl.constexpr = TILES[0]
    K_HEADS: tl.constexpr = TILES[1]
    row, half = tl.program_id(0).to(tl.int64), sizes.half
    batch, token = row // sizes.n_tokens, row % sizes.n_tokens
    features = tl.arange(0, HALF).to(tl.int64)
    angle = batch * angles.batch_stride + token * angles.token_stride + features * angles.pair_stride
    cos = tl.load(angles.cos + angle, mask=features < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angles.sin + angle, mask=features < half, other=0.0).to(tl.float32)[None, :] * angles.direction
    if Q_HEADS > 0:
        _rotate_heads(q, row, cos, sin, sizes, Q_HEADS, HALF, REST, INTERLEAVED)
    if K_HEADS > 0:
        _rotate_heads(k, row, cos, sin, sizes, K_HEADS, HALF, REST, INTERLEAVED)


def _allocate(cos: Tensor, q: Tensor | None, k: Tensor | None) -> tuple[Tensor, Tensor]:
    return cos.new_empty(0) if q is None else empty_result(q), cos.new_empty(0) if k is None else empty_result(k)


class _Launch(NamedTuple):
    """Tile sizes: heads of queries and of keys, pairs, features that are copied; and the warps of a program."""

    heads: tuple[int, int]
    half: int
    rest: int
    warps: int


@functools.cache
def _launch(q_heads: int, k_heads: int, half: int, rest: int) -> _Launch:
    heads, half = (_tile(q_heads), _tile(k_heads)), next_power_of_2(half)
    return _Launch(heads, half, _tile(rest), min(16, max(4, max(heads) * half // 512)))


def _tile(n: int) -> int:
    return next_power_of_2(n) if n else 0


@register("rope", fake=_allocate)
def _rotation(
    cos: Tensor, sin: Tensor, q: Tensor | None, k: Tensor | None, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    """The rotated queries and keys; empty for None."""
    q_out, k_out = _allocate(cos, q, k)
    n_rows, tokens, _, head_dim = k_out.shape if q is None else q.shape
    n_angles, _, half = cos.shape
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    batch, token, pair = cos.stride()
    angles = _Angles(cos, sin, batch if n_angles > 1 else 0, token, pair, -1.0 if inverse else 1.0)
    queries, keys, sizes = _heads(q, q_out), _heads(k, k_out), _Sizes(tokens, head_dim, half)
    *tiles, warps = _launch(queries.n_heads, keys.n_heads, half, head_dim - 2 * half)
    _rotation_kernel[n_rows * tokens](angles, queries, keys, sizes, *tiles, interleaved, num_warps=warps)
    return q_out, k_out


def _heads(x: Tensor | None, out: Tensor) -> _Heads:
    return _Heads(None, out, 0, 0, 0, 0, 0) if x is None else _Heads(x, out, x.shape[2], *x.stride())


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


def _match(q: torch.Size, k: torch.Size, cos: torch.Size, sin: torch.Size) -> bool:
    if not (len(q) == len(k) == 4 and len(cos) == 3 and cos == sin):
        return False
    (rows, tokens, _, head_dim), (k_rows, k_tokens, _, k_head_dim), (n_angles, n_positions, half) = q, k, cos
    return (
        (rows == k_rows and tokens == k_tokens == n_positions and head_dim == k_head_dim and 2 * half <= head_dim)
        and (n_angles == 1 or n_angles == rows)  # dynamo does not support `in` with symbolic sizes
    )


@explains_options
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
    if not _match(q.shape, k.shape, cos.shape, sin.shape):
        expected = "shapes (B, T, N, D), (B, T, K, D), and (B or 1, T, R/2) with R <= D for both cos and sin"
        raise shape_error("rope", expected, q=q, k=k, cos=cos, sin=sin)
    if uses_triton(q, k, cos, sin, backend=backend):
        return _RoPE.apply(q, k, cos, sin, interleaved)
    return reference(q, k, cos, sin, interleaved)
