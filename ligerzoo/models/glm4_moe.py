"""GLM-4.5, GLM-4.6 and GLM-4.7, and the Air models (GLM Team 2025).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += moe(norm(x)) + shared experts(norm(x)) ] -> norm -> head

Distinctive: grouped queries with partial rotary embedding, sigmoid router with balancing bias, shared experts.

The first half of each head's features is rotated, in the pairs (i, i + R/2). The first layers use a dense MLP. The
large models normalize queries and keys per head before rotation.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.layers import Attention, Decoder, Embedding, LMHead, PreNormBlock, RMSNorm, RotaryEmbedding
from ligerzoo.models.config import PartialRotaryConfig
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
        c = config
        rotary = RotaryEmbedding(c.rotary_size, c.rope_theta, c.rope_scaling, c.max_position_embeddings)

        def norm(size: int = c.hidden_size) -> RMSNorm:
            return RMSNorm(size, c.rms_norm_eps)

        def block(i: int) -> PreNormBlock:
            q_norm, k_norm = (norm(c.head_size), norm(c.head_size)) if c.use_qk_norm else (None, None)
            attention = Attention(
                c.hidden_size, c.num_attention_heads, c.kv_heads, c.head_size, rotary,
                q_norm=q_norm, k_norm=k_norm, qkv_bias=c.attention_bias,
            )  # fmt: skip
            return PreNormBlock(norm(), attention, norm(), c.feed_forward(i))

        embedding = Embedding(c.vocab_size, c.hidden_size)
        layers = [block(i) for i in range(c.num_hidden_layers)]
        super().__init__(config, Decoder(embedding, layers, norm()), LMHead(c.hidden_size, c.vocab_size))
