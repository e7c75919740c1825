"""Gemma 2 (Gemma Team 2024, "Gemma 2: Improving Open Language Models at a Practical Size").

    tokens -> embedding * sqrt(H)
           -> L x [ x += norm(attention(norm(x)));  x += norm(mlp(norm(x))) ] -> norm -> head -> softcap

Distinctive, on top of Gemma: each branch is normalized before and after; every other layer, from the first on, sees a
sliding window only; attention scores and logits are bounded by a tanh; and the scale of the scores is not tied to the
size of the heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

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
from ligerzoo.models.causal_lm import CausalLM, Make
from ligerzoo.models.config import WindowedConfig, check_positive


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(WindowedConfig):
    """The numbers of a Gemma 2; defaults are Gemma-2-2B's.

    Attributes:
        attention_bias: biases on the projections to queries, keys, values and output.
        query_pre_attn_scalar: attention scores are divided by its square root.
        attn_logit_softcapping: the bound of attention scores; None for none.
        final_logit_softcapping: the bound of logits; None for none.
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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")

    def slides(self, layer: int) -> bool:
        """The first layer, the third, and so on."""
        return layer % 2 == 0


class Gemma2(CausalLM):
    """Gemma 2 with a language-model head."""

    config: Gemma2Config

    def __init__(self, config: Gemma2Config, **make: Unpack[Make]) -> None:
        c = config
        rotary = RotaryEmbedding(c.rotary_size, c.rope_theta, c.rope_scaling, c.max_position_embeddings)

        def norm() -> RMSNorm:
            return RMSNorm(c.hidden_size, c.rms_norm_eps, weight_offset=1.0, round_before_scale=False, **make)

        def block(i: int) -> SandwichBlock:
            attention = Attention(
                c.hidden_size, c.num_attention_heads, c.kv_heads, c.head_size, rotary, window=c.window(i),
                scale=c.query_pre_attn_scalar**-0.5, softcap=c.attn_logit_softcapping,
                qkv_bias=c.attention_bias, output_bias=c.attention_bias, **make,
            )  # fmt: skip
            mlp = GatedMLP(c.hidden_size, c.intermediate_size, activation="gelu_tanh", **make)
            return SandwichBlock(norm(), attention, norm(), norm(), mlp, norm())

        embedding = ScaledEmbedding(c.vocab_size, c.hidden_size, c.hidden_size**0.5, **make)
        decoder = Decoder(embedding, [block(i) for i in range(c.num_hidden_layers)], norm())
        super().__init__(
            config, decoder, LMHead(c.hidden_size, c.vocab_size, softcap=c.final_logit_softcapping, **make)
        )
