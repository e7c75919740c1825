"""Gemma (Gemma Team 2024, "Gemma: Open Models Based on Gemini Research and Technology").

    tokens -> embedding * sqrt(H) -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: Llama with scaled, tied embeddings, RMSNorm weights offset by 1, GeGLU, and independent `head_dim`.

Embeddings are multiplied by sqrt(hidden_size). RMSNorm stores its scale minus 1 and rounds once, after scaling. All
heads together may be wider than `hidden_size`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.layers import (
    Attention,
    Decoder,
    GatedMLP,
    LMHead,
    PreNormBlock,
    RMSNorm,
    RotaryEmbedding,
    ScaledEmbedding,
)
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(DecoderConfig):
    """Configuration of Gemma. Defaults: Gemma-7B.

    Attributes:
        attention_bias: add biases to the query, key, value and output projections.
    """

    vocab_size: int = 256000
    hidden_size: int = 3072
    intermediate_size: int = 24576
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 16
    head_dim: int | None = 256
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    attention_bias: bool = False


class Gemma(CausalLM):
    """Gemma with a language-model head."""

    config: GemmaConfig

    def __init__(self, config: GemmaConfig) -> None:
        c = config
        rotary = RotaryEmbedding(c.rotary_size, c.rope_theta, c.rope_scaling, c.max_position_embeddings)

        def norm() -> RMSNorm:
            return RMSNorm(c.hidden_size, c.rms_norm_eps, weight_offset=1.0, round_before_scale=False)

        def block() -> PreNormBlock:
            attention = Attention(
                c.hidden_size, c.num_attention_heads, c.kv_heads, c.head_size, rotary,
                qkv_bias=c.attention_bias, output_bias=c.attention_bias,
            )  # fmt: skip
            mlp = GatedMLP(c.hidden_size, c.intermediate_size, activation="gelu_tanh")
            return PreNormBlock(norm(), attention, norm(), mlp)

        embedding = ScaledEmbedding(c.vocab_size, c.hidden_size, c.hidden_size**0.5)
        layers = [block() for _ in range(c.num_hidden_layers)]
        super().__init__(config, Decoder(embedding, layers, norm()), LMHead(c.hidden_size, c.vocab_size))
