"""Latent attention at the heads of DeepSeek-V3 and GLM-4.7-Flash, forward and backward.

    python -m benchmarks.latent_attention --out benchmarks/results/latent_attention.json

Causal attention of expanded keys and values at 4,096 and 16,384 tokens. The rows of
128-feature heads, as many as take equal FLOPs, run cuDNN at equal key and value sizes: the goal is at least 0.85 of its
rate. Other providers pad values to the size of the keys, or use FlexAttention. `benchmarks.latent_decoding` measures
decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.operations import normal, visible_pairs
from benchmarks.row import OURS, Direction, Floor, Function, Goal, Provider, Row
from benchmarks.suite import Size, suite_command

EQUAL_DIM, SHARE = 128, 0.85
TRAINING: tuple[Direction, ...] = ("forward_backward",)


class Heads(NamedTuple):
    """Number of heads, features of keys and of values."""

    number: int
    keys: int
    values: int


MODELS = {"DeepSeek-V3": Heads(128, 192, 128), "GLM-4.7-Flash": Heads(20, 256, 256)}


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Loops over the heads, with activation checkpointing. q: (1, T, N, D), k: (1, T, N, D), v: (1, T, N, V)."""

    def head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        future = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(1)
        return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(future, -torch.inf).softmax(-1) @ v

    heads = [checkpoint(head, q[0, :, i], k[0, :, i], v[0, :, i], use_reentrant=False) for i in range(q.shape[2])]
    return torch.stack(heads, 1)[None]


def our_attention() -> Function:
    from ligerzoo.layers.latent_attention import attend_unequal

    return attend_unequal


def padded() -> Function:
    from ligerzoo.layers import attend

    return lambda q, k, v: attend(q, k, F.pad(v, (0, q.shape[-1] - v.shape[-1])))[..., : v.shape[-1]]


def flex_attention() -> Function:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens = q.shape[1]
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, tokens, tokens, device=str(q.device))
        return compiled(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask).transpose(1, 2)  # type: ignore[no-any-return]

    return call


def training_row(tokens: int, heads: Heads, variant: str, goal: Goal, *, is_limit: bool = False) -> Row:
    def inputs() -> dict[str, Tensor]:
        sizes = {"q": heads.keys, "k": heads.keys, "v": heads.values}
        return {name: normal(1, tokens, heads.number, size) for name, size in sizes.items()}

    pairs = 2 * visible_pairs(tokens, tokens) * heads.number
    forward, backward = pairs * (heads.keys + heads.values), pairs * (3 * heads.keys + 2 * heads.values)
    providers = {OURS: Provider(our_attention)}
    if not is_limit:
        providers |= {
            "padded values": Provider(padded, needs_gpu=True),
            "torch.compile": Provider(flex_attention, "FlexAttention", needs_gpu=True),
        }
    return Row(
        "attention of equal heads" if is_limit else "latent attention, expanded",
        (tokens, *heads),
        inputs,
        attention,
        providers,
        Floor(forward, forward + backward, "FLOPs"),
        goal,
        variant,
    )


def rows(size: Size) -> Iterator[Row]:
    for name, heads in MODELS.items():
        for tokens in (size(4096), size(16384)):
            equal = Heads(heads.number * (heads.keys + heads.values) // (2 * EQUAL_DIM), EQUAL_DIM, EQUAL_DIM)
            limit = training_row(tokens, equal, f"FLOPs of {name}", Goal(of_peer=None), is_limit=True)
            yield limit
            goal = Goal(of_row=(limit.name, 1 / SHARE), directions=TRAINING)
            yield training_row(tokens, heads, name, goal)


if __name__ == "__main__":
    suite_command(rows, what=__doc__, out=Path("benchmarks/results/latent_attention.json"), seconds=1.0)
