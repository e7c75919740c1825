"""GLM-4.5, GLM-4.6 and GLM-4.7, and the Air models (GLM Team 2025).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += moe(norm(x)) + shared experts(norm(x)) ] -> norm -> head

Distinctive: grouped queries with partial rotary embedding, sigmoid router with balancing bias, shared experts.

The first half of each head's features is rotated, in the pairs (i, i + R/2). The first layers use a dense MLP. The
large models normalize queries and keys per head before rotation.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.layers import Attention, Embedding, RMSNorm, RotaryEmbedding
from ligerzoo.models.config import PartialRotaryConfig, heads, rotary_arguments
from ligerzoo.models.llama import llama_decoder
from ligerzoo.models.moe import DeepSeekMoECausalLM, DeepSeekMoEConfig


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(DeepSeekMoEConfig, PartialRotaryConfig):
    """Configuration of GLM-4.5 and its successors. Defaults: those of transformers' Glm4MoeConfig (GLM-4.5-Air).

    Attributes:
        attention_bias: add biases to the query, key and value projections; the output projection never has one.
        use_qk_norm: normalize the queries and keys of each head.
    """

    vocab_size: int = 151552
    intermediate_size: int = 10944
    moe_intermediate_size: int = 1408
    num_hidden_layers: int = 46
    num_attention_heads: int = 96
    num_key_value_heads: int | None = 8
    num_experts: int = 128
    num_experts_per_tok: int = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float = 0.5
    attention_bias: bool = False
    use_qk_norm: bool = False


class Glm4Moe(DeepSeekMoECausalLM):
    """GLM-4.5 with a language-model head."""

    config: Glm4MoeConfig

    def __init__(self, config: Glm4MoeConfig) -> None:
        c, rotary = config, RotaryEmbedding(*rotary_arguments(config))

        def norm() -> RMSNorm | None:
            return RMSNorm(c.head_size, c.rms_norm_eps) if c.use_qk_norm else None

        def attention(layer: int) -> Attention:
            return Attention(*heads(c), rotary, q_norm=norm(), k_norm=norm(), qkv_bias=c.attention_bias)

        super().__init__(config, llama_decoder(c, attention, c.feed_forward, Embedding(c.vocab_size, c.hidden_size)))
