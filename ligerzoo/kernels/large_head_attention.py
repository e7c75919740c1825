"""Attention of heads larger than those of fused kernels, without a mask: matrix products of blocks of queries.

Forward:   s = q k^T,   m = max(s),   l = log(sum(exp(scale (s - m)))),   p = exp(scale (s - m) - l),   o = p v.
Backward:  p again,   dp = do v^T,   ds = scale p (dp - sum(p dp)),   dq = ds k,   dk = ds^T q,   dv = p^T do.

A tile of a fused kernel holds all features of its queries and keys, so its tiles shrink as heads grow: beyond 256
features it runs at a fraction of a GEMM's rate. Here the products are GEMMs. Scores, dp, dk and dv are in fp32; p and
ds are rounded to the dtype of the inputs, as in fused kernels. A block has all queries that have at most `_MAX_SCORES`
scores, and with causal attention only the keys up to its last query. Two kernels read the scores, in one program for
each row, and hide later keys.

Saved: q, k, v, and m and l, which apart keep p of large scores as exact as a softmax. Query heads that share a key head
are rows of one product, in the order of tokens and then heads.

Shapes: B batch, T queries, S keys, N query heads, K key heads, G = N / K, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.autograd import FusedContext, FusedFunction, if_needed, once_differentiable
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, uses_triton
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.softmax import max_and_sum_exp
from ligerzoo.tensor_checks import check_floats, shape_error

_MAX_SCORES = 2**25  # of a block: 384 MiB of scores, dp, p and ds in backward
_COLUMNS = 2048  # that a program reads at once


def reference(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, is_causal: bool = True) -> Tensor:
    """`large_head_attention` in plain torch: the specification, the CPU path and the test oracle."""
    share = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(share, 2), v.repeat_interleave(share, 2)))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    p = scores.softmax(-1, dtype=accumulation_dtype(q.dtype)).to(q.dtype)
    return (p @ v).transpose(1, 2)


class _Block(NamedTuple):
    """The scores of a block, in a kernel: (B * K, rows, keys), contiguous.

    Attributes:
        rows: queries of a key head.
        keys: columns.
        first: number of the first row among all rows of a key head.
        all_rows: T * G.
        group: G.
    """

    rows: int
    keys: int
    first: int
    all_rows: int
    group: int


@jit
def _row(block, IS_CAUSAL: tl.constexpr):
    """Returns the offset of the program's row in the scores, that of its m and l, and its number of visible keys."""
    program = tl.program_id(0).to(tl.int64)
    row = block.first + program % block.rows
    visible = tl.minimum(row // block.group + 1, block.keys).to(tl.int32) if IS_CAUSAL else block.keys
    return program * block.keys, 2 * (program // block.rows * block.all_rows + row), visible


@kernel
def _forward_kernel(scores_ptr, p_ptr, sums_ptr, block, scale, IS_CAUSAL: tl.constexpr, COLUMNS: tl.constexpr):
    start, query, visible = _row(block, IS_CAUSAL)
    maximum, total = max_and_sum_exp(scores_ptr + start, None, None, scale, visible, COLUMNS)
    log_total = tl.log(total)
    tl.store(sums_ptr + query, maximum)
    tl.store(sums_ptr + query + 1, log_total)
    for first in range(0, block.keys, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        scores = tl.load(scores_ptr + start + columns, mask=columns < visible, other=-float("inf"))
        p = tl.exp((scores - maximum) * scale - log_total)
        tl.store(p_ptr + start + columns, p.to(p_ptr.dtype.element_ty), mask=columns < block.keys)


@kernel
def _backward_kernel(
    scores_ptr, dp_ptr, sums_ptr, p_ptr, ds_ptr, block, scale, IS_CAUSAL: tl.constexpr, COLUMNS: tl.constexpr
):
    start, query, visible = _row(block, IS_CAUSAL)
    maximum, log_total = tl.load(sums_ptr + query), tl.load(sums_ptr + query + 1)
    products = tl.zeros((COLUMNS,), dtype=tl.float32)
    for first in range(0, visible, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        scores = tl.load(scores_ptr + start + columns, mask=columns < visible, other=-float("inf"))
        p = tl.exp((scores - maximum) * scale - log_total)
        products += p * tl.load(dp_ptr + start + columns, mask=columns < visible, other=0.0)
    mean = tl.sum(products, axis=0)
    for first in range(0, block.keys, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        scores = tl.load(scores_ptr + start + columns, mask=columns < visible, other=-float("inf"))
        p = tl.exp((scores - maximum) * scale - log_total)
        ds = scale * p * (tl.load(dp_ptr + start + columns, mask=columns < visible, other=0.0) - mean)
        tl.store(p_ptr + start + columns, p.to(p_ptr.dtype.element_ty), mask=columns < block.keys)
        tl.store(ds_ptr + start + columns, ds.to(ds_ptr.dtype.element_ty), mask=columns < block.keys)


def _tokens_of_block(q: Tensor, keys: int) -> int:
    return max(1, min(q.shape[1], _MAX_SCORES // max(1, q.shape[0] * q.shape[2] * keys)))


def _blocks(q: Tensor, k: Tensor, is_causal: bool) -> Iterator[_Block]:
    """Yields the blocks of q, (B, T, N, D), and k, (B, S, K, D): the largest first, whose memory the others reuse."""
    tokens, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    step = _tokens_of_block(q, keys)
    for start in reversed(range(0, tokens, step)):
        end = min(start + step, tokens)
        visible = min(end, keys) if is_causal else keys
        yield _Block((end - start) * group, visible, start * group, tokens * group, group)


def _queries(x: Tensor, kv_heads: int) -> Tensor:
    """(B, T, N, D) -> (B * K, T * G, D)."""
    batch, tokens, heads, size = x.shape
    by_key_heads = x.unflatten(2, (kv_heads, heads // kv_heads)).transpose(1, 2)
    return by_key_heads.reshape(batch * kv_heads, tokens * (heads // kv_heads), size)


def _keys(x: Tensor) -> Tensor:
    """(B, S, K, D) -> (B * K, S, D)."""
    return x.transpose(1, 2).reshape(x.shape[0] * x.shape[2], x.shape[1], x.shape[3])


def _heads_last(x: Tensor, like: Tensor, kv_heads: int) -> Tensor:
    """The inverse of `_queries`, and with K heads of `_keys`: contiguous, in the shape and dtype of `like`."""
    batch, tokens, heads, size = like.shape
    x = x.view(batch, kv_heads, tokens, heads // kv_heads, size).transpose(1, 2)
    return torch.empty_like(like, memory_format=torch.contiguous_format).copy_(x.reshape(like.shape))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b in fp32."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())


def _allocate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), _allocate_sums(q, k)


def _allocate_sums(q: Tensor, k: Tensor) -> Tensor:
    rows = q.shape[0] * k.shape[2], q.shape[1] * (q.shape[2] // k.shape[2])
    return q.new_empty((*rows, 2), dtype=torch.float32)


def _flops(q: Tensor, k: Tensor, is_causal: bool) -> int:
    """Those of two products of queries and visible keys."""
    batch, tokens, heads, size = q.shape
    hidden = tokens * (tokens - 1) // 2 if is_causal else 0
    return 4 * batch * heads * size * (tokens * k.shape[1] - hidden)


def _scores(q: Tensor, k: Tensor) -> int:
    return q.shape[0] * q.shape[2] * k.shape[1] * _tokens_of_block(q, k.shape[1])


def _forward_peak(q: Tensor, k: Tensor) -> int:
    """q and the output by key heads, and a block; keys and values by heads too, of several rows."""
    by_heads = 2 * k.numel() if q.shape[0] > 1 else 0
    return q.element_size() * (2 * q.numel() + by_heads) + (4 + q.element_size()) * _scores(q, k)


@register("large_head_attention", fake=_allocate, flops=_flops, peak=_forward_peak)
def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Returns the output, and m and l, (B * K, T * G, 2)."""
    heads, sums = k.shape[2], _allocate_sums(q, k)
    queries, keys, values = _queries(q, heads), _keys(k), _keys(v)
    out = torch.empty_like(queries)
    for block in _blocks(q, k, is_causal):
        rows, visible = slice(block.first, block.first + block.rows), slice(block.keys)
        scores = _product(queries[:, rows], keys[:, visible].mT)
        p = torch.empty_like(scores, dtype=q.dtype)
        _forward_kernel[len(scores) * block.rows](scores, p, sums, block, scale, is_causal, _COLUMNS, num_warps=8)
        out[:, rows] = torch.bmm(p, values[:, visible])
        del scores, p
    return _heads_last(out, q, heads), sums


def _backward_peak(q: Tensor, k: Tensor) -> int:
    """q, its gradient and that of the output by key heads, gradients of keys and values in fp32, and a block."""
    by_heads = 2 * k.numel() if q.shape[0] > 1 else 0
    return q.element_size() * (3 * q.numel() + by_heads) + 12 * k.numel() + 2 * (4 + q.element_size()) * _scores(q, k)


@register(
    "large_head_attention_backward",
    fake=lambda q, k, v: tuple([x.new_empty(x.shape) for x in (q, k, v)]),
    flops=lambda q, k, is_causal: 5 * _flops(q, k, is_causal) // 2,
    peak=_backward_peak,
)
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v."""
    heads, keys, values = k.shape[2], _keys(k), _keys(v)
    queries, upstream = _queries(q, heads), _queries(dout, heads)
    dq = torch.empty_like(queries)
    dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (keys, values))
    for block in _blocks(q, k, is_causal):
        rows, visible = slice(block.first, block.first + block.rows), slice(block.keys)
        scores = _product(queries[:, rows], keys[:, visible].mT)
        dp = _product(upstream[:, rows], values[:, visible].mT)
        p, ds = (torch.empty_like(scores, dtype=q.dtype) for _ in range(2))
        _backward_kernel[len(scores) * block.rows](
            scores, dp, sums, p, ds, block, scale, is_causal, _COLUMNS, num_warps=8
        )
        del scores, dp
        dq[:, rows] = torch.bmm(ds, keys[:, visible])
        dk[:, visible] += _product(ds.mT, queries[:, rows])
        dv[:, visible] += _product(p.mT, upstream[:, rows])
        del p, ds
    return _heads_last(dq, q, heads), _heads_last(dk, k, heads), _heads_last(dv, v, heads)


class _LargeHeadAttention(FusedFunction):
    @staticmethod
    def forward(ctx: FusedContext, q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> Tensor:
        out, sums = _forward(q, k, v, scale, is_causal)
        ctx.save_for_backward(q, k, v, sums)
        ctx.options = scale, is_causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FusedContext, dout: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _backward(dout, *ctx.saved_tensors, *ctx.options)
        return if_needed((*gradients, None, None), ctx.needs_input_grad)


def large_head_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, is_causal: bool = True, backend: Backend = "auto"
) -> Tensor:
    """Attention without a mask, softmax(q k^T * scale) v, of heads larger than 256 features.

    Args:
        q: (B, T, N, D), in the dtype of k and v.
        k: (B, S, K, D), K a divisor of N: query heads j*N/K to (j+1)*N/K - 1 share key head j.
        v: (B, S, K, D).
        scale: factor of the scores, positive; None for D^-0.5.
        is_causal: a query attends to the keys up to its own, which requires T = S; False: to all keys.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        (B, T, N, D).

    Raises:
        ValueError: the shapes do not match, or `backend` is unknown or does not support the tensors.
    """
    check_floats("large_head_attention", q=q, k=k, v=v)
    if (
        not q.dim() == k.dim() == 4
        or k.shape != v.shape
        or (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[3])
        or q.shape[2] % k.shape[2]
        or (is_causal and q.shape[1] != k.shape[1])
    ):
        expected = "(B, T, N, D) and (B, S, K, D) twice, N a multiple of K, and T = S with is_causal=True"
        raise shape_error("large_head_attention", expected, q=q, k=k, v=v)
    if not uses_triton(q, k, v, backend=backend):
        return reference(q, k, v, scale, is_causal)
    return _LargeHeadAttention.apply(q, k, v, q.shape[3] ** -0.5 if scale is None else scale, is_causal)
