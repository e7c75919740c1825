"""Gemma 3, text only (Gemma Team 2025, "Gemma 3 Technical Report"), and EmbeddingGemma (Vera et al. 2025).

    tokens -> embedding * sqrt(H)
           -> L x [ x += norm(attention(norm(x)));  x += norm(mlp(norm(x))) ] -> norm -> head

Distinctive: Gemma 2 with QK-norm instead of score soft-capping, five sliding-window layers per full-attention layer.

RMSNorm normalizes queries and keys per head. The two kinds of layer have separate rotary embeddings: full-attention
layers use a large base, rescaled for long contexts; sliding-window layers use a small base without rescaling.
EmbeddingGemma attends in both directions.
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
from ligerzoo.models.config import WindowedConfig, check_positive, check_theta, heads, rotary_arguments


@dataclass(frozen=True, kw_only=True)
class Gemma3DecoderConfig(WindowedConfig):
    """Configuration of the Gemma 3 decoder. Defaults: those of transformers' Gemma3TextConfig.

    The config.json of Gemma-3-4B relies on these defaults for the fields it leaves out.

    Attributes:
        sliding_window: tokens that a token attends to in a sliding-window layer, including itself.
        sliding_window_pattern: n; every n-th layer uses full attention, unless `layer_types` is set.
        rope_theta: rotary base of full-attention layers.
        rope_scaling: rope scaling of full-attention layers only.
        rope_local_base_freq: rotary base of sliding-window layers.
        attention_bias: add biases to the query, key, value and output projections.
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

    def validate(self) -> None:
        super().validate()
        check_positive(self, "query_pre_attn_scalar")
        check_theta(self, "rope_local_base_freq")

    def slides(self, layer: int) -> bool:
        """Whether the layer uses a sliding window: all but every `sliding_window_pattern`-th do."""
        return (layer + 1) % self.sliding_window_pattern != 0


@dataclass(frozen=True, kw_only=True)
class Gemma3TextConfig(Gemma3DecoderConfig):
    """Configuration of Gemma 3, text only.

    Attributes:
        sliding_window: for a bidirectional model, tokens that a token attends to on both sides together.
        final_logit_softcapping: soft cap of the logits, `cap * tanh(logit / cap)`; None for no cap.
        use_bidirectional_attention: tokens also attend to later tokens.
    """

    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool = False

    def validate(self) -> None:
        super().validate()
        check_positive(self, "final_logit_softcapping")

    def window(self, layer: int) -> int | None:
        """Window to each attended side, in tokens including the current one; None for full attention."""
        window = super().window(layer)
        return window // 2 + 1 if window is not None and self.use_bidirectional_attention else window


class Gemma3Text(CausalLM):
    """Gemma 3 with a language-model head, text only."""

    config: Gemma3TextConfig

    def __init__(self, config: Gemma3TextConfig) -> None:
        c = config
        decoder = gemma3_decoder(c, is_causal=not c.use_bidirectional_attention)
        super().__init__(config, decoder, LMHead(c.hidden_size, c.vocab_size, softcap=c.final_logit_softcapping))


def gemma3_decoder(config: Gemma3DecoderConfig, *, is_causal: bool = True) -> Decoder:
    """Builds the decoder that Gemma 3 uses with and without images."""
    c = config
    rotary = RotaryEmbedding(*rotary_arguments(c))
    local_rotary = RotaryEmbedding(c.rotary_size, c.rope_local_base_freq)

    def norm(size: int = c.hidden_size) -> RMSNorm:
        return RMSNorm(size, c.rms_norm_eps, weight_offset=1.0, round_before_scale=False)

    def block(i: int) -> SandwichBlock:
        attention = Attention(
            *heads(c),
            local_rotary if c.is_sliding(i) else rotary,
            q_norm=norm(c.head_size),
            k_norm=norm(c.head_size),
            window=c.window(i),
            scale=c.query_pre_attn_scalar**-0.5,
            is_causal=is_causal,
            qkv_bias=c.attention_bias,
            output_bias=c.attention_bias,
        )
        mlp = GatedMLP(c.hidden_size, c.intermediate_size, activation="gelu_tanh")
        return SandwichBlock(norm(), attention, norm(), norm(), mlp, norm())

    embedding = ScaledEmbedding(c.vocab_size, c.hidden_size, c.hidden_size**0.5)
    return Decoder(embedding, [block(i) for i in range(c.num_hidden_layers)], norm())
