"""Qwen3.5, Qwen3.6 and Qwen3.8, dense models, text only (Qwen Team 2026).

    tokens -> embedding -> L x [ x += mixer(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: three layers of linear attention (gated delta rule) per layer of gated full attention.

A mixer is either a `GatedDeltaNet`, with a state instead of a KV cache, or a `GatedAttention` with an RMSNorm per query
and key head and rotary positions for a quarter of the features. RMSNorm stores its scale minus 1 and rounds once.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.layers import Decoder, GatedMLP, LMHead, RotaryEmbedding
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.hybrid import GatedDeltaConfig, gated_delta_decoder


@dataclass(frozen=True, kw_only=True)
class Qwen3_5TextConfig(GatedDeltaConfig):
    """Configuration of Qwen3.5, text only. Defaults: those of transformers' Qwen3_5TextConfig."""

    vocab_size: int = 248320
    intermediate_size: int = 12288
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 4


class Qwen3_5Text(CausalLM):
    """Qwen3.5 with a language-model head, text only."""

    config: Qwen3_5TextConfig

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        head = LMHead(config.hidden_size, config.vocab_size)
        super().__init__(config, qwen3_5_decoder(config), head)


def qwen3_5_decoder(config: Qwen3_5TextConfig, rotary: RotaryEmbedding | None = None) -> Decoder:
    """Builds the decoder with dense MLPs; the arguments are those of `gated_delta_decoder`."""
    c = config

    def mlp(i: int) -> GatedMLP:
        return GatedMLP(c.hidden_size, c.intermediate_size)

    return gated_delta_decoder(c, mlp, rotary)
