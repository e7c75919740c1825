"""Ministral 3, text model (Liu et al. 2026).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: Mistral with YaRN for long contexts, and queries scaled up with their position.

YaRN stretches the rotary frequencies for contexts longer than those of pretraining. The query scaling keeps attention
as sharp over more keys (as in Llama 4).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ligerzoo.checks import is_number
from ligerzoo.layers import Attention, Context, Decoder, Embedding, RotaryEmbedding
from ligerzoo.layers.rope_scaling import Scaling, is_positive
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import DecoderConfig, heads, refuse_unless, rotary_arguments
from ligerzoo.models.llama import llama_decoder


def _yarn() -> Scaling:
    return {
        "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Ministral3Config(DecoderConfig):
    """Configuration of Ministral 3. Defaults: those of transformers' Ministral3Config.

    Attributes:
        sliding_window: tokens that a token attends to, including itself; None for full attention.
        rope_scaling: the rope type and its parameters, and `llama_4_scaling_beta`, the `growth` of
            `GrowingQueryAttention`. Without `llama_4_scaling_beta` queries are not scaled.
    """

    vocab_size: int = 131072
    intermediate_size: int = 14336
    num_hidden_layers: int = 34
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 262144
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    rope_scaling: Scaling | None = field(default_factory=_yarn)
    sliding_window: int | None = None

    def validate(self) -> None:
        super().validate()
        growth = (self.rope_scaling or {}).get("llama_4_scaling_beta")
        is_zero = is_number(growth) and growth == 0
        expected = "a positive number, or 0 or null for no query scaling"
        is_valid = growth is None or is_zero or is_positive(growth)
        refuse_unless(is_valid, "rope_scaling, llama_4_scaling_beta", growth, expected)

    @property
    def query_growth(self) -> float:
        """The `llama_4_scaling_beta` of `rope_scaling`; 0 if absent."""
        return (self.rope_scaling or {}).get("llama_4_scaling_beta") or 0.0


class GrowingQueryAttention(Attention):
    """Attention that multiplies rotated queries by `1 + growth * ln(1 + floor((position + shift) / period))`.

    Args:
        growth: 0 leaves queries unscaled.
        period: number of consecutive positions that share a factor; sums below `period` have a factor of 1.
        arguments: positional arguments of `Attention`.
        shift: added to positions.
        options: keyword arguments of `Attention`.
    """

    def __init__(self, growth: float, period: int, *arguments: Any, shift: int = 0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.growth, self.period, self.shift = growth, period, shift

    def apply_rotary(self, q: Tensor, k: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        q, k = super().apply_rotary(q, k, context)
        factor = 1 + self.growth * torch.log(1 + torch.floor((context.position_ids + self.shift) / self.period))
        return q * factor[..., None, None].to(q.dtype), k


class Ministral3(CausalLM):
    """Ministral 3 with a language-model head."""

    config: Ministral3Config

    def __init__(self, config: Ministral3Config) -> None:
        super().__init__(config, ministral3_decoder(config))


def ministral3_decoder(config: Ministral3Config) -> Decoder:
    """Builds the decoder that Ministral 3 uses with and without images."""
    c, rotary = config, RotaryEmbedding(*rotary_arguments(config))

    def attention(layer: int) -> GrowingQueryAttention:
        growth = c.query_growth, rotary.original_max_position
        return GrowingQueryAttention(*growth, *heads(c), rotary, window=c.sliding_window)

    embedding = Embedding(c.vocab_size, c.hidden_size)
    return llama_decoder(c, attention, embedding=embedding, positions_skip_padding=c.query_growth > 0)
