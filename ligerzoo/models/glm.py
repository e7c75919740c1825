"""GLM-4-9B as of 2024 (Team GLM 2024).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: Llama with interleaved rotary embedding on half of each head, and QKV biases.

The first half of each head's features is rotated, in the pairs (2i, 2i + 1). The query, key and value projections have
biases; the output projection has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ligerzoo.layers import Attention, Decoder, Embedding, GatedMLP, LMHead, PreNormBlock, RMSNorm, RotaryEmbedding
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import PartialRotaryConfig


@dataclass(frozen=True, kw_only=True)
class GlmConfig(PartialRotaryConfig):
    """Configuration of GLM-4. Defaults: GLM-4-9B-Chat.

    Attributes:
        attention_bias: add biases to the query, key and value projections; the output projection never has one.
    """

    vocab_size: int = 151552
    intermediate_size: int = 13696
    num_hidden_layers: int = 40
    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1.5625e-7
    partial_rotary_factor: float = 0.5
    attention_bias: bool = True


class Glm(CausalLM):
    """GLM-4 with a language-model head."""

    config: GlmConfig

    def __init__(self, config: GlmConfig) -> None:
        c, attention = config, glm_attention(config)

        def norm() -> RMSNorm:
            return RMSNorm(c.hidden_size, c.rms_norm_eps)

        def mlp() -> GatedMLP:
            return GatedMLP(c.hidden_size, c.intermediate_size)

        embedding = Embedding(c.vocab_size, c.hidden_size)
        layers = [PreNormBlock(norm(), attention(), norm(), mlp()) for _ in range(c.num_hidden_layers)]
        super().__init__(config, Decoder(embedding, layers, norm()), LMHead(c.hidden_size, c.vocab_size))


def glm_attention(config: GlmConfig) -> Callable[[], Attention]:
    """Returns a function that builds the attention of one block; all blocks share the rotary embedding."""
    c = config
    rotary = RotaryEmbedding(c.rotary_size, c.rope_theta, c.rope_scaling, c.max_position_embeddings, interleaved=True)

    def attention() -> Attention:
        return Attention(
            c.hidden_size, c.num_attention_heads, c.kv_heads, c.head_size, rotary, qkv_bias=c.attention_bias
        )

    return attention
