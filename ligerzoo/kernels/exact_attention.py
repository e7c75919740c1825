"""Causal attention to cached keys with the bits that cuDNN's attention gives the same queries in a whole text.

    y_t = softmax(q_t K^T * scale) V    over the keys up to t's own, or the last of them, as many as the window

cuDNN's forward on Hopper gives a query the same bits whatever follows it in the text. A decode step has other shapes,
for which no kernel of cuDNN's does so. This one repeats its order of operations for head sizes of 64 and 128 in bf16.
With c = round(scale * log2(e)), for tiles of 128 keys in order:

    s = round(q k * c)                      the products sum over the features in order, 16 at a time
    m' = max(m, max s),   a = 2^(m - m'),   p = 2^(s - m')
    l = fma(l, a, sum p)                    of each of 4 lanes; lane i has the columns 8j + 2i and 8j + 2i + 1, in order
    o = o a + bf16(p) V                     the products sum over the keys in order, 16 at a time

and at the end y = o * (1 / l) with l = (l_0 + l_1) + (l_2 + l_3), and the logsumexp fma(m, log(2), log(2) lg2(l)) with
the GPU's approximate lg2. The order of the sums was found by attending to keys of which one has the weight 1 and others
half an ulp of it: what remains of them shows which were added up first. Tests compare with cuDNN on a GPU, bit by bit;
`reference` has other roundings.

cuDNN has no windows, and its order for head size 256 is not known. There, this kernel is the forward pass of exact
training too (`fused_attention`), for 256 with tiles of 64 keys. Tiles in which a query sees no key do not change its
results, so they do not depend on the queries that share its program.

Not differentiable by itself.
"""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.checks import AT_LEAST_1, check, or_none
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, cdiv, empty_result, uses_triton
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.math import approximate_log
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.strided import Strided, strided
from ligerzoo.tensor_checks import check_floats, check_tensor

HEAD_SIZES = (64, 128, 256)
"""Head sizes that the kernel supports."""


class _Tiling(NamedTuple):
    """How programs divide the work.

    Attributes:
        keys: of a tile.
        stages: tiles of keys and values in flight.
        rows: queries of a tile and warps, for few and for many.
    """

    keys: int
    stages: int
    rows: tuple[tuple[int, int], ...]


_TILINGS = {
    64: _Tiling(128, 3, ((16, 4), (64, 4), (128, 8))),
    128: _Tiling(128, 3, ((16, 4), (64, 4), (128, 8))),
    256: _Tiling(64, 2, ((16, 4), (64, 8))),
}


def follows_cudnn(head_dim: int) -> bool:
    """Whether the kernel gives queries the bits that cuDNN gives them: its order for 256 is not known."""
    return head_dim != 256


def reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    last: Tensor,
    scale: float | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`exact_attention_with_lse` in plain torch, with other roundings."""
    wide = accumulation_dtype(q.dtype)
    group = q.shape[2] // keys.shape[2]
    keys, values = (x.transpose(1, 2).to(wide).repeat_interleave(group, 1) for x in (keys, values))
    scores = q.transpose(1, 2).to(wide) @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    last, index = last[:, None, :, None], torch.arange(keys.shape[2], device=q.device)
    hidden = index > last
    if window is not None:
        hidden = hidden | (index <= last - window)
    scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ values).transpose(1, 2).to(q.dtype), scores.logsumexp(-1)


@jit
def _add_2(total, x):
    first, second = tl.split(x)
    return (total + first) + second


@jit
def _add_4(total, x):
    first, second = tl.split(x)
    return _add_2(_add_2(total, first), second)


@jit
def _add_8(total, x):
    first, second = tl.split(x)
    return _add_4(_add_4(total, first), second)


@jit
def _add_16(total, x):
    first, second = tl.split(x)
    return _add_8(_add_8(total, first), second)


@jit
def _lane_sums(x, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """(ROWS, KEYS) -> (ROWS, 4): the sums of the lanes, each over its columns from left to right."""
    zeros = tl.zeros((ROWS, 4), dtype=tl.float32)
    if KEYS == 128:
        x = tl.reshape(x, (ROWS, 2, 2, 2, 2, 4, 2))  # column 8j + 2 lane + parity, with the bits of j
        first, second = tl.split(tl.permute(x, (0, 5, 6, 4, 3, 2, 1)))
        return _add_16(_add_16(zeros, first), second)
    else:
        first, second = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, 2, 2, 4, 2)), (0, 4, 5, 3, 2, 1)))
        return _add_8(_add_8(zeros, first), second)


@kernel
def _attention_kernel(
    q, k, v, last_keys, out_ptr, lse_ptr, scale, window, n_tokens, n_kv_heads, group, n_tiles,
    ROWS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    tile, row = program % n_tiles, program // n_tiles
    kv_head, batch = row % n_kv_heads, row // n_kv_heads
    rows = tile * ROWS + tl.arange(0, ROWS)  # the query heads that share the key head, token by token
    tokens, heads = rows // group, kv_head * group + rows % group
    features, in_text = tl.arange(0, DIM), tokens < n_tokens
    last_ptr = last_keys.ptr + batch * last_keys.batch_stride
    last = tl.load(last_ptr + tokens * last_keys.token_stride, mask=in_text, other=0)
    q_ptrs = q.ptr + batch * q.batch_stride + (tokens * q.token_stride + heads * q.head_stride)[:, None]
    queries = tl.load(q_ptrs + features[None, :], mask=in_text[:, None], other=0.0)
    k_row = k.ptr + batch * k.batch_stride + kv_head * k.head_stride
    v_row = v.ptr + batch * v.batch_stride + kv_head * v.head_stride

    maximum = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
    totals = tl.zeros((ROWS, 4), dtype=tl.float32)
    sums = tl.zeros((ROWS, DIM), dtype=tl.float32)
    n_keys, first_tile = tl.max(last, axis=0) + 1, 0
    first = tl.zeros_like(last)
    if window is not None:
        first = tl.maximum(last - window + 1, 0)
        first_tile = tl.min(tl.where(in_text, first, n_keys), axis=0) // KEYS * KEYS
    for start in range(first_tile, n_keys, KEYS):
        index = start + tl.arange(0, KEYS).to(tl.int64)
        in_cache = index < n_keys
        k_offsets, v_offsets = index[None, :] * k.token_stride, index[:, None] * v.token_stride
        keys = tl.load(k_row + k_offsets + features[:, None], mask=in_cache[None, :], other=0.0)
        scores = tl.dot(queries, keys) * scale
        visible = index[None, :] <= last[:, None]
        if window is not None:
            visible = visible & (index[None, :] >= first[:, None])
        scores = tl.where(visible, scores, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        if window is not None:  # a query may see no key of a tile
            new_maximum = tl.maximum(new_maximum, -1e30)
        decay = tl.exp2(maximum - new_maximum)
        p = tl.exp2(scores - new_maximum[:, None])
        totals = tl.fma(totals, tl.broadcast_to(decay[:, None], (ROWS, 4)), _lane_sums(p, ROWS, KEYS))
        values = tl.load(v_row + v_offsets + features[None, :], mask=in_cache[:, None], other=0.0)
        sums = tl.dot(p.to(values.dtype), values, sums * decay[:, None])
        maximum = new_maximum

    even, odd = tl.split(tl.reshape(totals, (ROWS, 2, 2)))
    left, right = tl.split(even + odd)
    y = sums * (1.0 / (left + right))[:, None]
    out = out_ptr + ((batch * n_tokens + tokens) * n_kv_heads * group + heads)[:, None] * DIM + features[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=in_text[:, None])
    lse = tl.fma(maximum, tl.full((ROWS,), 0.6931471805599453, tl.float32), approximate_log(left + right))
    tl.store(lse_ptr + (batch * n_kv_heads * group + heads) * n_tokens + tokens, lse, mask=in_text)


def _fp32(x: float) -> float:
    """x rounded to fp32."""
    return ctypes.c_float(x).value


def _allocate(q: Tensor) -> tuple[Tensor, Tensor]:
    batch, n_tokens, n_heads, _ = q.shape
    return empty_result(q), q.new_empty((batch, n_heads, n_tokens), dtype=torch.float32)


@register("exact_attention", fake=_allocate)
def _forward(
    q: Tensor, keys: Tensor, values: Tensor, last: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Returns the output, (B, T, N, D), and the logsumexp of the scores, (B, N, T)."""
    batch, n_tokens, n_heads, head_dim = q.shape
    n_kv_heads = keys.shape[2]
    group = n_heads // n_kv_heads
    out, lse = _allocate(q)
    q, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, keys, values))
    n_keys, stages, tiles = _TILINGS[head_dim]
    rows, warps = next(tile for tile in tiles if n_tokens * group <= tile[0] or tile is tiles[-1])
    n_tiles = cdiv(n_tokens * group, rows)
    last_keys = Strided(last, last.stride(0) if len(last) > 1 else 0, last.stride(1), 0)
    scale = _fp32(_fp32(scale) * _fp32(math.log2(math.e)))
    _attention_kernel[batch * n_kv_heads * n_tiles](
        *map(strided, (q, keys, values)),
        last_keys,
        out,
        lse,
        scale,
        window,
        *(n_tokens, n_kv_heads, group, n_tiles, rows, head_dim, n_keys),
        num_warps=warps,
        num_stages=stages,
        enable_fp_fusion=False,
    )
    return out, lse


def exact_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    last: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attends from some tokens of each sequence to the keys of a cache, with the bits of cuDNN's causal attention.

    That holds on Hopper GPUs in bf16, for D = 64 or 128. Not differentiable.

    Args:
        q: (B, T, N, D) queries, adjacent features, D = 64, 128 or 256.
        keys: (B, S, K, D), adjacent features, K a divisor of N: query heads j*N/K to (j+1)*N/K - 1 share key head j.
        values: (B, S, K, D), adjacent features.
        last: (B or 1, T) int64, index of the last key that each query attends to, less than S.
        scale: factor of the scores; None for D^-0.5.
        window: keys that a query attends to at most, including the last; None for all.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference, with other roundings).

    Returns:
        (B, T, N, D).

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: the shapes or dtypes do not match, or `backend` is unknown or does not support the tensors.
    """
    check_floats("exact_attention", q=q, keys=keys, values=values)
    check_tensor("exact_attention", "last", last, "integer")
    check("exact_attention", or_none(AT_LEAST_1), window=window)
    shapes_match = (
        q.dim() == keys.dim() == 4
        and keys.shape == values.shape
        and (keys.shape[0], keys.shape[3]) == (q.shape[0], q.shape[3])
        and q.shape[2] % keys.shape[2] == 0
        and q.shape[3] in HEAD_SIZES
        and last.shape in ((len(q), q.shape[1]), (1, q.shape[1]))
    )
    if not shapes_match:
        raise ValueError(
            f"exact_attention: q is {tuple(q.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)} and last "
            f"{tuple(last.shape)}; expected shapes (B, T, N, D), (B, S, K, D) twice and (B or 1, T), N a multiple of "
            f"K, D in {HEAD_SIZES}"
        )
    return exact_attention_with_lse(q, keys, values, last, scale, window, backend)[0]


def exact_attention_with_lse(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    last: Tensor,
    scale: float | None = None,
    window: int | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """`exact_attention` without checks, and the logsumexp of each query's scores, (B, N, T) fp32."""
    with torch.no_grad():
        if not uses_triton(q, keys, values, backend=backend):
            return reference(q, keys, values, last, scale, window)
        return _forward(q, keys, values, last, q.shape[-1] ** -0.5 if scale is None else scale, window)
