"""Attention sinks: one learned logit per head that takes part in the softmax over the keys, but has no value.

With the output o and the logsumexp l of attention without sinks, for each query and the sink logit b of its head:

Forward:   o' = o * s(l - b),   l' = log(exp(l) + exp(b)),   s the sigmoid.
Backward:  delta = sum of do' * o',   dl = s(b - l) * delta,   db = -sum of dl over the queries,   do = s(l - b) * do'.

This follows from the softmax over [scores, b] (OpenAI 2025, gpt-oss). So any attention kernel that returns its
logsumexp has sinks. Either `apply_sinks` continues with its results, whose gradients are do and dl. Or, without the
copies of do and of o, the kernel's own backward gets o', l' and do' in place of o, l and do: its probabilities are
exp(score - l'), those of the softmax with the sink, and its row sums are delta. `sink_attention` does that with the
kernels of torch: cuDNN's and Flash Attention 2 on a GPU, and its Flash Attention for a CPU.

Saved: o and l by `apply_sinks`, and q, k, v, o' and l by `sink_attention`. A program of the two elementwise kernels
has some queries of one head.

Shapes: B batch, T queries, S keys, N query heads, K key heads, D head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligerzoo.kernels.autograd import FusedFunction, once_differentiable
from ligerzoo.kernels.dispatch import Backend, accumulation_dtype, cdiv, next_power_of_2, uses_triton
from ligerzoo.kernels.fused_attention import AttentionKernel, TorchAttention, attention_kernel
from ligerzoo.kernels.jit import jit, kernel, tl
from ligerzoo.kernels.math import exp, sigmoids
from ligerzoo.kernels.registration import register
from ligerzoo.kernels.strided import strided
from ligerzoo.tensor_checks import check_floats, shape_error

_TILE = 4096  # elements of a program


def reference(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """`apply_sinks` in plain torch: the specification, the CPU path and the test oracle."""
    wide = accumulation_dtype(out.dtype)
    share = torch.sigmoid(lse.to(wide) - sinks.to(wide)[:, None])
    return (out.to(wide) * share.transpose(1, 2)[..., None]).to(out.dtype)


class _Sizes(NamedTuple):
    n_tokens: int
    n_heads: int
    head_dim: int


class _Queries(NamedTuple):
    """Some queries of a head, in a kernel: their elements, contiguous, and their rows in (B, N, T)."""

    batch: tl.tensor
    head: tl.tensor
    tokens: tl.tensor
    features: tl.tensor
    elements: tl.tensor
    mask: tl.tensor
    rows: tl.tensor
    in_text: tl.tensor


@jit
def _queries(sizes, TOKENS: tl.constexpr, DIM: tl.constexpr):
    """Those of the program."""
    program, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(sizes.n_tokens, TOKENS)
    head, block = program % sizes.n_heads, program // sizes.n_heads % blocks
    batch = program // sizes.n_heads // blocks
    tokens, features = block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, DIM)
    elements = ((batch * sizes.n_tokens + tokens) * sizes.n_heads + head)[:, None] * sizes.head_dim + features[None, :]
    rows, in_text = (batch * sizes.n_heads + head) * sizes.n_tokens + tokens, tokens < sizes.n_tokens
    mask = in_text[:, None] & (features < sizes.head_dim)[None, :]
    return _Queries(batch, head, tokens, features, elements, mask, rows, in_text)


@jit
def _load(x, queries):
    offsets = queries.batch * x.batch_stride + queries.head * x.head_stride
    offsets += queries.tokens[:, None] * x.token_stride + queries.features[None, :]
    return tl.load(x.ptr + offsets, mask=queries.mask, other=0.0).to(tl.float32)


@kernel
def _forward_kernel(out, lse_ptr, sink_ptr, y_ptr, sizes, TOKENS: tl.constexpr, DIM: tl.constexpr):
    queries = _queries(sizes, TOKENS, DIM)
    lse = tl.load(lse_ptr + queries.rows, mask=queries.in_text, other=0.0)
    share, _ = sigmoids(lse - tl.load(sink_ptr + queries.head).to(tl.float32), True)
    y = _load(out, queries) * share[:, None]
    tl.store(y_ptr + queries.elements, y.to(y_ptr.dtype.element_ty), mask=queries.mask)


@kernel
def _backward_kernel(
    dy, values, lse_ptr, sink_ptr, dout_ptr, dlse_ptr, joint_ptr, sizes, TOKENS: tl.constexpr, DIM: tl.constexpr
):
    queries = _queries(sizes, TOKENS, DIM)
    upstream = _load(dy, queries)
    delta = tl.sum(upstream * _load(values, queries), axis=1)
    lse = tl.load(lse_ptr + queries.rows, mask=queries.in_text, other=0.0)
    sink = tl.load(sink_ptr + queries.head).to(tl.float32)
    share, sink_share = sigmoids(lse - sink, True)
    if dout_ptr is not None:  # the values are the output without sinks
        delta *= share
        dout = (upstream * share[:, None]).to(dout_ptr.dtype.element_ty)
        tl.store(dout_ptr + queries.elements, dout, mask=queries.mask)
    else:
        joint = tl.maximum(lse, sink) + tl.log(1.0 + exp(-tl.abs(lse - sink), True))
        tl.store(joint_ptr + queries.rows, joint, mask=queries.in_text)
    tl.store(dlse_ptr + queries.rows, sink_share * delta, mask=queries.in_text)


def _launch(out: Tensor) -> tuple[int, int, int]:
    """Returns the number of programs for (B, T, N, D), and the tokens and features of each."""
    rows, tokens, heads, head_dim = out.shape
    dim = next_power_of_2(head_dim)
    block = max(1, _TILE // dim)
    return rows * heads * cdiv(tokens, block), block, dim


@register("apply_sinks", fake=lambda out: out.new_empty(out.shape))
def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor, triton: bool) -> Tensor:
    """out: (B, T, N, D), lse: (B, N, T) -> (B, T, N, D), contiguous."""
    if not triton:
        return reference(out, lse, sinks).contiguous()
    y, out = out.new_empty(out.shape), out if out.stride(-1) == 1 else out.contiguous()
    programs, tokens, dim = _launch(out)
    vectors = lse.contiguous(), sinks.contiguous()
    _forward_kernel[programs](strided(out), *vectors, y, _Sizes(*out.shape[1:]), tokens, dim, num_warps=4)
    return y


@register("apply_sinks_backward", fake=lambda out, lse: (out.new_empty(out.shape), lse.new_empty(lse.shape)))
def _backward(dy: Tensor, out: Tensor, lse: Tensor, sinks: Tensor, triton: bool) -> tuple[Tensor, Tensor]:
    """Returns do and dl from the output without sinks."""
    if not triton:
        wide = accumulation_dtype(out.dtype)
        difference = lse.to(wide) - sinks.to(wide)[:, None]
        share = torch.sigmoid(difference)
        dlse = torch.sigmoid(-difference) * share * (dy.to(wide) * out).sum(-1).transpose(1, 2)
        dout = (dy * share.transpose(1, 2)[..., None]).to(out.dtype)
        return dout.contiguous(), dlse.to(lse.dtype).contiguous()
    dout, dlse = out.new_empty(out.shape), lse.new_empty(lse.shape)
    _launch_backward(dy, out, lse, sinks, dout, dlse, None)
    return dout, dlse


@register("sink_gradients", fake=lambda lse: (lse.new_empty(lse.shape), lse.new_empty(lse.shape)))
def sink_gradients(dy: Tensor, y: Tensor, lse: Tensor, sinks: Tensor, triton: bool) -> tuple[Tensor, Tensor]:
    """Returns dl and l' from the output with sinks."""
    if not triton:
        wide = accumulation_dtype(y.dtype)
        dlse = torch.sigmoid(sinks.to(wide)[:, None] - lse) * (dy.to(wide) * y).sum(-1).transpose(1, 2)
        joint = torch.logaddexp(lse.to(wide), sinks.to(wide)[:, None])
        return dlse.to(lse.dtype).contiguous(), joint.to(lse.dtype).contiguous()
    dlse, joint = lse.new_empty(lse.shape), lse.new_empty(lse.shape)
    _launch_backward(dy, y, lse, sinks, None, dlse, joint)
    return dlse, joint


def _launch_backward(
    dy: Tensor, values: Tensor, lse: Tensor, sinks: Tensor, dout: Tensor | None, dlse: Tensor, joint: Tensor | None
) -> None:
    dy, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (dy, values))
    programs, tokens, dim = _launch(values)
    inputs = strided(dy), strided(values), lse.contiguous(), sinks.contiguous()
    _backward_kernel[programs](*inputs, dout, dlse, joint, _Sizes(*values.shape[1:]), tokens, dim, num_warps=4)


def sink_gradient(dlse: Tensor, sinks: Tensor) -> Tensor:
    return -dlse.sum((0, 2)).to(sinks.dtype)


class _ApplySinks(FusedFunction):
    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, sinks: Tensor, triton: bool) -> Tensor:
        ctx.save_for_backward(out, lse, sinks)
        ctx.triton = triton
        return add_sinks(out, lse, sinks, triton)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs_out, needs_lse, needs_sinks, _ = ctx.needs_input_grad
        out, lse, sinks = ctx.saved_tensors
        dout, dlse = _backward(dy, out, lse, sinks, ctx.triton)
        dsinks = sink_gradient(dlse, sinks) if needs_sinks else None
        return dout if needs_out else None, dlse if needs_lse else None, dsinks, None


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Adds attention sinks to the result of attention: `out * sigmoid(lse - sinks)` for each query and head.

    Args:
        out: (B, T, N, D), the output of attention, any strides.
        lse: (B, N, T), the logsumexp of each query's scores, in fp32 (fp64 for `out` in fp64). It is differentiated
            like `out`.
        sinks: (N,), the logit of each head's sink, of any floating-point dtype.
        backend: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        (B, T, N, D), contiguous.

    Raises:
        ValueError: the shapes do not match, or `backend` is unknown or does not support the tensors.
    """
    check_floats("apply_sinks", out=out, lse=lse, sinks=sinks)
    rows, tokens, heads = out.shape[:3] if out.dim() == 4 else (0, 0, 0)
    if out.dim() != 4 or lse.shape != (rows, heads, tokens) or sinks.shape != (heads,):
        raise shape_error("apply_sinks", "shapes (B, T, N, D), (B, N, T) and (N,)", out=out, lse=lse, sinks=sinks)
    lse = lse.to(accumulation_dtype(lse.dtype))
    return _ApplySinks.apply(out, lse, sinks, uses_triton(out, lse, sinks, backend=backend))


class _SinkAttention(FusedFunction):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, attention: TorchAttention, triton: bool
    ) -> Tensor:
        out, lse = attention.forward(*(x.transpose(1, 2) for x in (q, k, v)))
        y = add_sinks(out.transpose(1, 2), lse, sinks, triton)
        ctx.save_for_backward(q, k, v, sinks, y, lse)
        ctx.options = attention, triton
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, y, lse = ctx.saved_tensors
        attention, triton = ctx.options
        dlse, joint = sink_gradients(dy, y, lse, sinks, triton)
        dsinks = sink_gradient(dlse, sinks) if ctx.needs_input_grad[3] else None
        gradients = attention.backward(*(x.transpose(1, 2) for x in (dy, q, k, v, y)), joint)
        return *(x.transpose(1, 2) for x in gradients), dsinks, None, None


def sink_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = True,
    kernel: AttentionKernel | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attention with sinks, by a kernel of torch: softmax([q k^T * scale, sinks]) [v, 0], without a mask.

    Args:
        q: (B, T, N, D).
        k: (B, S, K, D), K a divisor of N: query heads j*N/K to (j+1)*N/K - 1 share key head j.
        v: (B, S, K, D).
        sinks: (N,), the logit of each head's sink, of any floating-point dtype.
        scale: factor of the scores; None for D^-0.5.
        is_causal: a query attends to the keys up to its own, which requires T = S; False: to all keys.
        kernel: "cudnn", "flash" or "cpu"; None for that of `attention_kernel`.
        backend: of the elementwise part: "auto" (Triton where supported), "triton" or "torch" (the reference).

    Returns:
        (B, T, N, D), contiguous.

    Raises:
        ValueError: the shapes do not match, or no kernel of torch supports the tensors.
    """
    check_floats("sink_attention", q=q, k=k, v=v, sinks=sinks)
    if (
        not q.dim() == k.dim() == 4
        or k.shape != v.shape
        or (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[3])
        or q.shape[2] % k.shape[2]
        or sinks.shape != q.shape[2:3]
        or (is_causal and q.shape[1] != k.shape[1])
    ):
        causal = ", and T = S with is_causal=True" if is_causal else ""
        expected = f"(B, T, N, D), (B, S, K, D) twice and (N,), N a multiple of K{causal}"
        raise shape_error("sink_attention", expected, q=q, k=k, v=v, sinks=sinks)
    kernel = kernel or attention_kernel(q, k, v, is_causal)
    if kernel is None:
        raise ValueError(
            f"sink_attention: {q.dtype} on {q.device} with head size {q.shape[-1]}; expected bf16 or fp16 and a "
            f"multiple of 8 on a GPU, or fp32 on a CPU. Use ligerzoo.layers.attend"
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    triton = uses_triton(q, sinks, backend=backend)
    return _SinkAttention.apply(q, k, v, sinks, TorchAttention(kernel, scale, is_causal), triton)
