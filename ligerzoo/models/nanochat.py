"""nanochat (Karpathy 2025).

    tokens -> embedding -> norm -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> soft-capped head
    attention: queries and keys of each head -> rotary embedding -> norm -> scores

Distinctive: Llama with norms without weights, also after embedding and rotation; squared ReLU; soft-capped logits.

Positions rotate queries and keys by negative angles. The norm after rotation has no weights, so scores depend on
relative positions only.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.layers import (
    MLP,
    Decoder,
    Embedding,
    LMHead,
    PreNormBlock,
    ReversedRotaryEmbedding,
    RMSNorm,
    RotaryNormAttention,
)
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import DecoderConfig, check_positive, heads, rotary_arguments


@dataclass(frozen=True, kw_only=True)
class NanoChatConfig(DecoderConfig):
    """Configuration of nanochat. Defaults: those of transformers' NanoChatConfig.

    Attributes:
        attention_bias: add biases to the query, key, value and output projections.
        final_logit_softcapping: soft cap of the logits, `cap * tanh(logit / cap)`; None for no cap.
    """

    vocab_size: int = 50304
    hidden_size: int = 768
    intermediate_size: int = 8192
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    attention_bias: bool = False
    final_logit_softcapping: float | None = 15.0

    def validate(self) -> None:
        super().validate()
        check_positive(self, "final_logit_softcapping")


class NanoChat(CausalLM):
    """nanochat with a language-model head."""

    config: NanoChatConfig

    def __init__(self, config: NanoChatConfig) -> None:
        c = config
        rotary = ReversedRotaryEmbedding(*rotary_arguments(c))

        def norm(size: int = c.hidden_size) -> RMSNorm:
            return RMSNorm(size, c.rms_norm_eps, elementwise_affine=False)

        def block() -> PreNormBlock:
            bias, q_norm, k_norm = c.attention_bias, norm(c.head_size), norm(c.head_size)
            attention = RotaryNormAttention(
                *heads(c), rotary, q_norm=q_norm, k_norm=k_norm, qkv_bias=bias, output_bias=bias
            )
            mlp = MLP(c.hidden_size, c.intermediate_size, bias=False, activation="relu2")
            return PreNormBlock(norm(), attention, norm(), mlp)

        embedding = Embedding(c.vocab_size, c.hidden_size)
        decoder = Decoder(embedding, [block() for _ in range(c.num_hidden_layers)], norm(), input_norm=norm())
        head = LMHead(c.hidden_size, c.vocab_size, softcap=c.final_logit_softcapping)
        super().__init__(config, decoder, head)
