"""Attention of Gemma 4 E4B, 8 query and 2 key heads, forward and backward.

    python -m benchmarks.large_heads --out benchmarks/results/large_heads.json

Full attention of heads of 512 features, which neither cuDNN nor FlashAttention computes, by `large_head_attention`; and
the window of 512 tokens of heads of 256 features, by FlexAttention. The others: FlexAttention, for heads of 512 in the
tiles that we found fastest, since its own do not fit into the shared memory; and torch's SDPA, causal in its
memory-efficient kernel, which needs a key head for each query head. Measured as in `benchmarks.operations`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from benchmarks.operations import attention_row
from benchmarks.row import Function, Goal, Provider, Row
from benchmarks.suite import Size, suite_command

HEADS, KV_HEADS, WINDOW = 8, 2, 512


def causal_attention() -> Function:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return call


def rows(size: Size) -> Iterator[Row]:
    for tokens in (size(4096), size(8192), size(16384)):
        full = attention_row("Gemma 4", tokens, HEADS, KV_HEADS, 512, tokens, None, Goal())
        yield replace(full, providers={**full.providers, "torch": Provider(causal_attention, "causal")})
    yield attention_row("Gemma 4", size(8192), HEADS, KV_HEADS, 256, size(WINDOW), None, Goal())


if __name__ == "__main__":
    suite_command(rows, what=__doc__, out=Path("benchmarks/results/large_heads.json"), seconds=0.8)
