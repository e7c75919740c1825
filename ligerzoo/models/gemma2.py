"""Gemma 2 (Gemma Team 2024, "Gemma 2: Improving Open Language Models at a Practical Size").

    tokens -> embedding * sqrt(H)
           -> L x [ x += norm(attention(norm(x)));  x += norm(mlp(norm(x))) ] -> norm -> head -> softcap

Distinctive: Gemma with sandwich norms, alternating sliding-window layers, and tanh soft-capping of attention scores and
logits.

Each branch is normalized before and after. Every other layer, starting with the first, uses a sliding window.
`query_pre_attn_scalar` sets the scale of the attention scores, independent of `head_dim`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.layers import (
    Attention,
    Decoder,
    GatedMLP,
    LMHead,
    RMSNorm,
    RotaryEmbedding,
    SandwichBlock,
    ScaledEmbedding,
)
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import WindowedConfig, check_positive, heads, rotary_arguments


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(WindowedConfig):
    """Configuration of Gemma 2. Defaults: Gemma-2-2B.

    Attributes:
        sliding_window: tokens that a token attends to in a sliding-window layer, including itself; None for full
            attention in every layer.
        attention_bias: add biases to the query, key, value and output projections.
        query_pre_attn_scalar: attention scores are divided by its square root.
        attn_logit_softcapping: soft cap of the attention scores, `cap * tanh(score / cap)`; None for no cap.
        final_logit_softcapping: soft cap of the logits; None for no cap.
    """

    vocab_size: int = 256000
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    sliding_window: int | None = 4096
    attention_bias: bool = False
    query_pre_attn_scalar: float = 256
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0

    def validate(self) -> None:
        super().validate()
        check_positive(self, "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")

    def slides(self, layer: int) -> bool:
        """Whether the layer uses a sliding window: layers 0, 2, 4 and so on do."""
        return layer % 2 == 0


class Gemma2(CausalLM):
    """Gemma 2 with a language-model head."""

    config: Gemma2Config

    def __init__(self, config: Gemma2Config) -> None:
        c, bias = config, config.attention_bias
        rotary = RotaryEmbedding(*rotary_arguments(c))

        def norm() -> RMSNorm:
            return RMSNorm(c.hidden_size, c.rms_norm_eps, weight_offset=1.0, round_before_scale=False)

        def block(i: int) -> SandwichBlock:
            window, scale, cap = c.window(i), c.query_pre_attn_scalar**-0.5, c.attn_logit_softcapping
            attention = Attention(
                *heads(c), rotary, window=window, scale=scale, softcap=cap, qkv_bias=bias, output_bias=bias
            )
            mlp = GatedMLP(c.hidden_size, c.intermediate_size, activation="gelu_tanh")
            return SandwichBlock(norm(), attention, norm(), norm(), mlp, norm())

        embedding = ScaledEmbedding(c.vocab_size, c.hidden_size, c.hidden_size**0.5)
        decoder = Decoder(embedding, [block(i) for i in range(c.num_hidden_layers)], norm())
        super().__init__(config, decoder, LMHead(c.hidden_size, c.vocab_size, softcap=c.final_logit_softcapping))
