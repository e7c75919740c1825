"""Gemma 3 on text alone (Gemma Team 2025, "Gemma 3 Technical Report"), and EmbeddingGemma (Vera et al. 2025).

    tokens -> embedding * sqrt(H)
           -> L x [ x += norm(attention(norm(x)));  x += norm(mlp(norm(x))) ] -> norm -> head

Distinctive, against Gemma 2: queries and keys are normalized head by head, in place of the bound on the scores; five
layers with a sliding window go before each that sees all; and the two kinds have rotary positions of their own: of a
large base, and rescaled for long contexts, in the full layers, and neither in the sliding ones. EmbeddingGemma's tokens
also see those after them.
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
from ligerzoo.layers.rope_scaling import check_theta
from ligerzoo.models.causal_lm import CausalLM, Make
from ligerzoo.models.config import WindowedConfig, check_positive


@dataclass(frozen=True, kw_only=True)
class Gemma3DecoderConfig(WindowedConfig):
    """The numbers of a Gemma 3's decoder; defaults are those that Gemma-3-4B leaves out where it has no others.

    Attributes:
        sliding_window: how many tokens a token sees in a sliding layer, itself included.
        sliding_window_pattern: every so many-th layer sees all, where `layer_types` does not say.
        rope_theta: base of the full layers' rotary positions.
        rope_scaling: of the full layers' alone.
        rope_local_base_freq: base of the sliding layers'.
        attention_bias: biases on the projections to queries, keys, values and output.
        query_pre_attn_scalar: attention scores are divided by its square root.
    """

    vocab_size: int = 262208
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    max_position_embeddings: int = 131072
    tie_word_embeddings: bool = True
    sliding_window: int | None = 4096
    sliding_window_pattern: int = 6
    rope_theta: float = 1e6
    rope_local_base_freq: float = 1e4
    attention_bias: bool = False
    query_pre_attn_scalar: float = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "query_pre_attn_scalar")
        check_theta(self.rope_local_base_freq, "rope_local_base_freq")

    def slides(self, layer: int) -> bool:
        """All layers but the last of each pattern."""
        return (layer + 1) % self.sliding_window_pattern != 0


@dataclass(frozen=True, kw_only=True)
class Gemma3TextConfig(Gemma3DecoderConfig):
    """The numbers of a Gemma 3 on text alone.

    Attributes:
        sliding_window: of a bidirectional model, how many tokens a token sees on both sides together.
        final_logit_softcapping: the bound of logits; None for none.
        use_bidirectional_attention: tokens also see those after them.
    """

    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "final_logit_softcapping")

    def window(self, layer: int) -> int | None:
        """How far a token sees in this layer, itself included, to each side that it sees; None for all."""
        window = super().window(layer)
        return window // 2 + 1 if window is not None and self.use_bidirectional_attention else window


class Gemma3Text(CausalLM):
    """Gemma 3 with a language-model head."""

    config: Gemma3TextConfig

    def __init__(self, config: Gemma3TextConfig, **make: Unpack[Make]) -> None:
        c = config
        decoder = gemma3_decoder(c, is_causal=not c.use_bidirectional_attention, **make)
        super().__init__(
            config, decoder, LMHead(c.hidden_size, c.vocab_size, softcap=c.final_logit_softcapping, **make)
        )


def gemma3_decoder(config: Gemma3DecoderConfig, *, is_causal: bool = True, **make: Unpack[Make]) -> Decoder:
    """The decoder of Gemma 3, with images or without."""
    c = config
    rotary = RotaryEmbedding(c.rotary_size, c.rope_theta, c.rope_scaling, c.max_position_embeddings)
    local_rotary = RotaryEmbedding(c.rotary_size, c.rope_local_base_freq)

    def norm(size: int = c.hidden_size) -> RMSNorm:
        return RMSNorm(size, c.rms_norm_eps, weight_offset=1.0, round_before_scale=False, **make)

    def block(i: int) -> SandwichBlock:
        attention = Attention(
            c.hidden_size, c.num_attention_heads, c.kv_heads, c.head_size,
            local_rotary if c.is_sliding(i) else rotary,
            q_norm=norm(c.head_size), k_norm=norm(c.head_size), window=c.window(i),
            scale=c.query_pre_attn_scalar**-0.5, is_causal=is_causal,
            qkv_bias=c.attention_bias, output_bias=c.attention_bias, **make,
        )  # fmt: skip
        mlp = GatedMLP(c.hidden_size, c.intermediate_size, activation="gelu_tanh", **make)
        return SandwichBlock(norm(), attention, norm(), norm(), mlp, norm())

    embedding = ScaledEmbedding(c.vocab_size, c.hidden_size, c.hidden_size**0.5, **make)
    return Decoder(embedding, [block(i) for i in range(c.num_hidden_layers)], norm())
