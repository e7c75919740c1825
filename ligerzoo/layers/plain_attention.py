"""Attention in plain torch, with all scores in memory, in the notation of `attention_paths`."""

from __future__ import annotations

import torch
from torch import Tensor

from ligerzoo.kernels.dispatch import accumulation_dtype
from ligerzoo.kernels.fp8 import from_storage
from ligerzoo.layers.attention_call import AttentionCall


def attend_and_record(call: AttentionCall, record: list[Tensor]) -> Tensor:
    """`attend` in plain torch, which appends the probabilities (B, N, T, S) to `record`."""
    dtype = call.q.dtype
    k, v = from_storage(call.k, dtype), from_storage(call.v, dtype)
    probabilities = attention_probabilities(call._replace(k=k, v=v, mask=call.additive(dtype)))
    record.append(probabilities)
    return apply_probabilities(probabilities, v)


def reference(call: AttentionCall) -> Tensor:
    """`attend` in plain torch, with an additive mask or none; see `attention_probabilities`."""
    return apply_probabilities(attention_probabilities(call), call.v)


def attention_probabilities(call: AttentionCall) -> Tensor:
    """Returns the probabilities (B, N, T, S) of a call with an additive mask, or none.

    Scores are in the dtype of the inputs, the softmax in fp32.
    """
    q, k, _, mask, scale, softcap, is_causal, sinks = call
    q, k = q.transpose(1, 2), _repeat_heads(k, q.shape[2])
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask  # type: ignore[operator]
    elif is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(
            1 + scores.shape[-1] - scores.shape[-2]
        )
        scores = scores.masked_fill(future, torch.finfo(scores.dtype).min)
    wide = accumulation_dtype(q.dtype)
    if sinks is None:
        return scores.softmax(-1, dtype=wide).to(q.dtype)
    column = sinks.to(wide)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores.to(wide), column], -1).softmax(-1)[..., :-1].to(q.dtype)


def apply_probabilities(probabilities: Tensor, v: Tensor) -> Tensor:
    """probabilities: (B, N, T, S), v: (B, S, K, D) -> (B, T, N, D)."""
    return (probabilities @ _repeat_heads(v, probabilities.shape[1])).transpose(1, 2)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """(B, S, K, D) -> (B, N, S, D): repeats each key-value head for its N / K query heads."""
    return x.transpose(1, 2).repeat_interleave(heads // x.shape[2], dim=1)
