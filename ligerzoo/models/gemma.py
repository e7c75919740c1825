"""Gemma (Gemma Team 2024, "Gemma: Open Models Based on Gemini Research and Technology").

    tokens -> embedding * sqrt(H) -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: Llama with scaled, tied embeddings, RMSNorm weights offset by 1, GeGLU, and independent `head_dim`.

Embeddings are multiplied by sqrt(hidden_size). RMSNorm stores its scale minus 1 and rounds once, after scaling. All
heads together may be wider than `hidden_size`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.layers import Attention, GatedMLP, RMSNorm, RotaryEmbedding, ScaledEmbedding
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import DecoderConfig, heads, rotary_arguments
from ligerzoo.models.llama import llama_decoder


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
        c, rotary = config, RotaryEmbedding(*rotary_arguments(config))

        def norm() -> RMSNorm:
            return RMSNorm(c.hidden_size, c.rms_norm_eps, weight_offset=1.0, round_before_scale=False)

        def attention(layer: int) -> Attention:
            return Attention(*heads(c), rotary, qkv_bias=c.attention_bias, output_bias=c.attention_bias)

        def mlp(layer: int) -> GatedMLP:
            return GatedMLP(c.hidden_size, c.intermediate_size, activation="gelu_tanh")

        embedding = ScaledEmbedding(c.vocab_size, c.hidden_size, c.hidden_size**0.5)
        super().__init__(config, llama_decoder(c, attention, mlp, embedding, norm=norm))
