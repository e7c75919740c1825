"""GLM-4-9B as of 2024 (Team GLM 2024).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: Llama with interleaved rotary embedding on half of each head, and QKV biases.

The first half of each head's features is rotated, in the pairs (2i, 2i + 1). The query, key and value projections have
biases; the output projection has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ligerzoo.layers import Attention, Embedding, RotaryEmbedding
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import PartialRotaryConfig, heads, rotary_arguments
from ligerzoo.models.llama import llama_decoder


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
        embedding = Embedding(config.vocab_size, config.hidden_size)
        super().__init__(config, llama_decoder(config, glm_attention(config), embedding=embedding))


def glm_attention(config: GlmConfig) -> Callable[[int], Attention]:
    """Returns a function that builds the attention of a block; all blocks share the rotary embedding."""
    rotary = RotaryEmbedding(*rotary_arguments(config), interleaved=True)
    return lambda layer: Attention(*heads(config), rotary, qkv_bias=config.attention_bias)
