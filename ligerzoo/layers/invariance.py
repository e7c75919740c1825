"""Whether a GPU computes what exact results rest on: bits of a token that do not depend on what shares its call.

cuBLAS and cuDNN promise nothing of this: it was found by measurement, on some GPUs and versions. So it is measured
again where `exact=True` is asked for, once per process, GPU, kind of attention, update and shape of experts. That takes
2 to 8 seconds on an H200 (gpt-oss: 17 where no kernel is compiled yet), mostly to compile kernels and to plan
attention, and 0.1 GB. `ligerzoo doctor` counts longer, with the shapes of a model.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ligerzoo.kernels import apply_sinks
from ligerzoo.kernels.exact_attention import exact_attention_with_lse, follows_cudnn
from ligerzoo.kernels.lora import compute_lora_linears
from ligerzoo.kernels.low_rank import LowRank
from ligerzoo.kernels.row_sums import split_row_sums
from ligerzoo.layers.attention_paths import attend
from ligerzoo.layers.context import Context
from ligerzoo.layers.masks import AttentionMask
from ligerzoo.layers.projection import linear

ROWS = 4096
"""Largest number of rows of a product."""

SHAPES, QUICK_ROWS = ((512, 2048), (4096, 4096), (1024, 4096), (2048, 8192), (1024, 14336), (64, 2880)), 2048
"""Outputs and features of the products of the quick check, and their rows."""

UPDATED_SHAPES = ((512, 2048), (4096, 4096), (2048, 8192))
"""Those of products with low-rank updates."""

MAX_PADDING = 300
"""Largest number of padding tokens."""

_MAX_OUTPUTS = 2**27
"""Numbers that a product may have."""


class Count(NamedTuple):
    """How many of some results differ, and what they are."""

    differing: int
    total: int
    what: str

    def __str__(self) -> str:
        return f"{self.differing} of {self.total:,} {self.what} differ"


class HeadShape(NamedTuple):
    """Sizes and kind of attention.

    Attributes:
        heads: query heads.
        kv_heads: key heads.
        size: features of a head.
        scale: factor of the scores; None for the default.
        window: tokens that a token attends to, including itself; None for all.
        has_sinks: whether the heads have sinks.
    """

    heads: int
    kv_heads: int
    size: int
    scale: float | None = None
    window: int | None = None
    has_sinks: bool = False

    def mask(self, q: Tensor) -> AttentionMask | Tensor | None:
        """The mask of exact training, for texts of as many tokens as q, (B, T, N, D), has."""
        is_forced = not follows_cudnn(self.size)
        return Context(q.flatten(2), exact=True).mask(q.shape[1], window=self.window, force=is_forced)


@torch.no_grad()
def count_products(weights: Iterable[Tensor], chance: random.Random, draws: int = 8, rows: int = ROWS) -> Count:
    """Compares rows of products with the same rows computed in calls of fewer rows.

    Args:
        weights: (O, H) each.
        chance: chooses the rows.
        draws: calls for each weight.
        rows: largest number of rows.
    """
    differing = total = 0
    with split_row_sums(False):
        for weight in weights:
            most = max(2, min(rows, _MAX_OUTPUTS // len(weight)))
            x = _normal(chance, weight, most, weight.shape[1])
            whole = linear(x, weight)
            for _ in range(draws):
                few = min(most, chance.choice([1, 2, chance.randint(3, 64), chance.randint(65, rows)]))
                some = slice(start := chance.randint(0, most - few), start + few)
                total += 1
                differing += not torch.equal(linear(x[some].clone(), weight), whole[some])
    return Count(differing, total, "products of some rows")


@torch.no_grad()
def count_updates(
    weights: Iterable[Tensor], updates: Iterable[tuple[int, float]], chance: random.Random, rows: int = ROWS
) -> Count:
    """Compares rows of products with low-rank updates (LoRA) with the same rows computed in calls of fewer rows.

    Args:
        weights: (O, H) each.
        updates: the rank and the scale of each.
        chance: chooses the rows.
        rows: largest number of rows.
    """
    differing = total = 0
    with split_row_sums(False):
        for weight, (rank, scale) in product(weights, updates):
            x, bias = _normal(chance, weight, rows, weight.shape[1]), _normal(chance, weight, len(weight))
            update = LowRank(
                _normal(chance, weight, rank, weight.shape[1]).float() * rank**-0.5,
                _normal(chance, weight, len(weight), rank).float(),
                scale,
            )
            for bias_or_none in (None, bias):
                (whole,) = compute_lora_linears(x, [weight], [bias_or_none], [update], None, "auto")
                for few in (1, chance.randint(2, 64), 65, chance.randint(66, rows - 1)):
                    some = slice(start := chance.randint(0, rows - few), start + few)
                    (y,) = compute_lora_linears(x[some].clone(), [weight], [bias_or_none], [update], None, "auto")
                    total += 1
                    differing += not torch.equal(y, whole[some])
    return Count(differing, total, "products with LoRA of some rows")


@torch.no_grad()
def count_attention(like: Tensor, shape: HeadShape, chance: random.Random, draws: int = 8, most: int = 2048) -> Count:
    """Compares causal attention of a text with that of its beginning, with padding, in a batch, and to cached keys.

    Args:
        like: has the dtype and the device.
        shape: of the heads.
        chance: chooses the lengths.
        draws: number of texts.
        most: largest number of tokens of a text.
    """
    differing = total = 0
    sinks = _normal(chance, like, shape.heads) if shape.has_sinks else None
    for _ in range(draws):
        length = chance.choice([1, 2, chance.randint(3, 200), chance.randint(201, most)])
        padding = chance.randint(1, MAX_PADDING)
        q, k, v = (
            _normal(chance, like, 2, length + padding, heads, shape.size)
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        batch = attend(q, k, v, shape.mask(q), shape.scale, sinks=sinks)
        q_alone, k_alone, v_alone = (x[1:, :length].clone() for x in (q, k, v))
        alone = attend(q_alone, k_alone, v_alone, shape.mask(q_alone), shape.scale, sinks=sinks)
        some = slice(chance.randint(0, length - 1), length)
        last = torch.arange(length, device=like.device)[None, some]
        keys, values = k[1:, :length], v[1:, :length]
        cached, lse = exact_attention_with_lse(q[1:, some], keys, values, last, shape.scale, shape.window)
        if sinks is not None:
            cached = apply_sinks(cached, lse, sinks)
        total += 2
        differing += (not torch.equal(batch[1:, :length], alone)) + (not torch.equal(cached, alone[:, some]))
    return Count(differing, total, "texts in a batch, with padding, or attending to a cache")


def count_experts(layers: Iterable[nn.Module], chance: random.Random, rows: int = ROWS) -> Count:
    """Compares tokens of mixtures of experts with the same tokens computed in calls of fewer, and with gradients.

    Args:
        layers: `MoE` layers.
        chance: chooses the tokens.
        rows: tokens of the largest call.
    """
    differing = total = 0
    with split_row_sums(False):
        for layer in layers:
            router = layer.get_parameter("gate.weight")
            x = _normal(chance, router, rows, router.shape[1])
            with torch.no_grad():
                whole = layer(x)
            for few in (1, chance.randint(2, 16), chance.randint(17, 64), 65, chance.randint(66, rows - 1)):
                some = slice(start := chance.randint(0, rows - few), start + few)
                for with_gradients in (False, True):
                    with torch.set_grad_enabled(with_gradients):
                        y = layer(x[some].clone().requires_grad_(with_gradients))
                    total += 1
                    differing += not torch.equal(y, whole[some])
    return Count(differing, total, "mixtures of experts of some tokens")


def _normal(chance: random.Random, like: Tensor, *shape: int) -> Tensor:
    """Random numbers, without a change of torch's own generators."""
    generator = torch.Generator(like.device).manual_seed(chance.getrandbits(62))
    return torch.randn(shape, generator=generator, device=like.device, dtype=like.dtype)


@cache
def machine_obstacles(
    device: torch.device, heads: frozenset[HeadShape], updates: frozenset[tuple[int, float]] = frozenset()
) -> tuple[str, ...]:
    """Returns what prevents exact results in bf16 on a GPU: what a check of seconds finds.

    Args:
        device: the GPU.
        heads: of attention.
        updates: rank and scale of low-rank updates.
    """
    chance, like = random.Random(0), torch.empty(0, device=device, dtype=torch.bfloat16)
    with torch.autocast(device.type, enabled=False):
        weights = (_normal(chance, like, *shape) for shape in SHAPES)
        counts = [count_products(weights, chance, 4, QUICK_ROWS)]
        counts += [count_attention(like, shape, chance, draws=3, most=600) for shape in sorted(heads, key=str)]
        if updates:
            weights = (_normal(chance, like, *shape) for shape in UPDATED_SHAPES)
            counts.append(count_updates(weights, sorted(updates), chance, QUICK_ROWS + 1))
    return tuple(str(count) for count in counts if count.differing)


_OF_EXPERTS: dict[tuple[torch.device, str], Count] = {}


def expert_obstacles(layers: Iterable[nn.Module], device: torch.device) -> tuple[str, ...]:
    """Returns what prevents exact results of mixtures of experts: equal layers share a check of less than a second."""
    kinds = {(device, repr(layer)): layer for layer in layers}
    with torch.autocast(device.type, enabled=False):
        for kind in kinds.keys() - _OF_EXPERTS.keys():
            _OF_EXPERTS[kind] = count_experts([kinds[kind]], random.Random(0), QUICK_ROWS)
    return tuple(str(count) for count in map(_OF_EXPERTS.__getitem__, kinds) if count.differing)
