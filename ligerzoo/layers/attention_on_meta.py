"""What a fused attention kernel allocates, keeps for backward and computes, for tensors on meta, which have no data.

Flash, cuDNN and FlexAttention all save q, k, v, the output and the logsumexp of each query's scores in fp32. Their
backward accumulates dq in fp32 and needs one fp32 number for each query, the sum of dout * out (Dao 2023, algorithm 2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ligerzoo.kernels.autograd import FusedFunction, once_differentiable
from ligerzoo.kernels.registration import register


def _pairs(q: Tensor, k: Tensor, is_causal: bool) -> int:
    """Number of pairs of a query and a visible key, in all heads."""
    rows, tokens, heads, _ = q.shape
    keys = k.shape[1]
    return rows * heads * (tokens * keys - (tokens * (tokens - 1) // 2 if is_causal else 0))


def _flops(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> int:
    """The products of scores and of values."""
    return 2 * _pairs(q, k, is_causal) * (q.shape[-1] + v.shape[-1])


def _backward_flops(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> int:
    """The products of scores, computed again, dq and dk, and those of dv and of the gradients of probabilities."""
    return 2 * _pairs(q, k, is_causal) * (3 * q.shape[-1] + 2 * v.shape[-1])


def _allocate(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[-1])), q.new_empty(
        (q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32
    )


@register("attention_on_meta", fake=_allocate, flops=_flops)
def _forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Returns the output and the logsumexp."""
    return _allocate(q, k, v, is_causal)


def _allocate_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _backward_peak(q: Tensor, k: Tensor, v: Tensor) -> int:
    gradients = q.element_size() * (q.numel() + k.numel() + v.numel())
    return gradients + torch.float32.itemsize * (q.numel() + q.numel() // q.shape[-1])


@register(
    "attention_on_meta_backward",
    fake=_allocate_gradients,
    flops=_backward_flops,
    peak=_backward_peak,
)
def _backward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v."""
    return _allocate_gradients(q, k, v)


class _Attention(FusedFunction):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
        out, logsumexp = _forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.mark_non_differentiable(logsumexp)
        ctx.is_causal = is_causal
        return out, logsumexp

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        q, k, v, _, _ = ctx.saved_tensors
        return *_backward(q, k, v, ctx.is_causal), None


def attention_on_meta(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Returns the shapes of attention's output and logsumexp; keeps for backward what a fused kernel keeps.

    Args:
        q: (B, T, N, D), on meta.
        k: (B, S, K, D).
        v: (B, S, K, E), E = D except for latent attention.
        is_causal: counts the operations of visible keys only. Those that a window or packing hides are counted.
    """
    out, logsumexp = _Attention.apply(q, k, v, is_causal)
    return out, logsumexp
