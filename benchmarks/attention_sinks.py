"""Attention with sinks, as in gpt-oss: 16,384 tokens, 64 query and 8 key heads of 64 features, forward and backward.

    python -m benchmarks.attention_sinks --out benchmarks/results/attention_sinks.json

Causal attention, and with the window of 128 tokens of every second layer. Each is measured against FlexAttention with
its logsumexp, whose result is scaled as in transformers; and causal attention against our own with an eager elementwise
part. The rows without sinks are the limit: they run the same kernels. Measured as in `benchmarks.operations`. TFLOP/s
count 4 FLOPs per visible pair and feature forward, and 14 forward and backward: the goal of 450 is stated in ms.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.operations import normal, visible_pairs
from benchmarks.row import OURS, Direction, Floor, Function, Goal, Provider, Row
from benchmarks.suite import Size, suite_command

TOKENS, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 16384, 64, 8, 64, 128
TRAINING: tuple[Direction, ...] = ("forward_backward",)
FASTEST = 450e12
"""FLOP/s, the goal of causal attention with sinks."""


def attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int) -> Tensor:
    """Loops over the heads, with activation checkpointing."""

    def head(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        distance = torch.arange(len(q), device=q.device)[:, None] - torch.arange(len(k), device=q.device)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill((distance < 0) | (distance >= window), -torch.inf)
        return torch.cat([scores, sink.expand(len(q), 1)], -1).softmax(-1)[:, :-1] @ v

    share = q.shape[2] // k.shape[2]
    heads = [
        checkpoint(head, q[0, :, i], k[0, :, i // share], v[0, :, i // share], sinks[i], use_reentrant=False)
        for i in range(q.shape[2])
    ]
    return torch.stack(heads, 1)[None]


def attention_without_sinks(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    return attention(q, k, v, q.new_full((q.shape[2],), -torch.inf), window)


def our_attention(window: int) -> Function:
    from ligerzoo.layers import Context, attend

    @functools.cache
    def context(tokens: int, device: torch.device) -> Context:  # shared by all layers of a forward
        return Context(torch.empty(1, tokens, device=device))

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return attend(q, k, v, context(q.shape[1], q.device).mask(k.shape[1], window=window), sinks=sinks)

    return call


def eager_epilogue() -> Function:
    from ligerzoo.kernels import sink_attention

    return partial(sink_attention, backend="torch")


def flex_attention(window: int) -> Function:
    """FlexAttention as its documentation recommends, with the sinks in a compiled function of its logsumexp."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    @functools.cache
    def block_mask(tokens: int, device: torch.device) -> Any:
        sees = lambda b, h, q, k: (k <= q) & (q - k < window)  # noqa: E731
        return create_block_mask(sees, None, None, tokens, tokens, device=str(device))

    def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Any) -> Tensor:
        out, aux = flex_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
        )
        share = torch.sigmoid(aux.lse - sinks.float()[:, None])
        return (out * share[..., None]).to(q.dtype).transpose(1, 2)

    compiled = torch.compile(with_sinks)
    return lambda q, k, v, sinks: compiled(q, k, v, sinks, block_mask(q.shape[1], q.device))


def attention_row(tokens: int, window: int, *, has_sinks: bool, goal: Goal) -> Row:
    def inputs() -> dict[str, Tensor]:
        shapes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        tensors = {name: normal(1, tokens, heads, HEAD_DIM) for name, heads in shapes.items()}
        return {**tensors, "sinks": normal(HEADS)} if has_sinks else tensors

    products = 4 * visible_pairs(tokens, window) * HEADS * HEAD_DIM
    is_causal = window >= tokens
    providers = {OURS: Provider(lambda: our_attention(window))}
    if has_sinks:
        note = "FlexAttention, sinks from its logsumexp"
        providers["torch.compile"] = Provider(lambda: flex_attention(window), note, needs_gpu=True)
        if is_causal:
            providers[f"{OURS}, eager elementwise part"] = Provider(eager_epilogue, needs_gpu=True)
    return Row(
        "attention with sinks" if has_sinks else "attention without sinks",
        (tokens, HEADS, KV_HEADS, HEAD_DIM),
        inputs,
        partial(attention if has_sinks else attention_without_sinks, window=window),
        providers,
        Floor(products, 3.5 * products, "FLOPs"),
        goal,
        "causal" if is_causal else f"window {window}",
        shared=frozenset({"sinks"}),
    )


def rows(size: Size) -> Iterator[Row]:
    tokens = size(TOKENS)
    for window in (tokens, size(WINDOW)):
        limit = attention_row(tokens, window, has_sinks=False, goal=Goal(of_peer=None))
        yield limit
        is_causal = window == tokens
        flops = 14 * visible_pairs(tokens, window) * HEADS * HEAD_DIM
        goal = Goal(
            of_peer=1 / 1.3 if is_causal else 1.0, ms=round(flops / FASTEST * 1e3, 3) if is_causal else None,
            of_row=(limit.name, 1.05 if is_causal else 1.25), directions=TRAINING,
        )  # fmt: skip
        yield attention_row(tokens, window, has_sinks=True, goal=goal)


if __name__ == "__main__":
    suite_command(rows, what=__doc__, out=Path("benchmarks/results/attention_sinks.json"), seconds=1.0)
