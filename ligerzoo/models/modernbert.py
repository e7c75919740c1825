"""ModernBERT, base and large (Warner et al. 2024).

    tokens -> norm(embedding) -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm
           -> norm(gelu(dense(x))) -> head

Distinctive: an encoder with rotary positions, GeGLU, and local attention in two of three layers.

Tokens attend in both directions. Layers with local attention have a smaller rotary base. The first block has no norm
before attention, since the embeddings are normalized.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ligerzoo.layers import Attention, Decoder, Embedding, GatedMLP, LayerNorm, LMHead, PreNormBlock, RotaryEmbedding
from ligerzoo.models.config import WindowedConfig, check_theta, heads, refuse_unless, rotary_arguments
from ligerzoo.models.masked_lm import MaskedLM, PredictionHead


@dataclass(frozen=True, kw_only=True)
class ModernBertConfig(WindowedConfig):
    """Configuration of ModernBERT. Defaults: those of transformers, which are ModernBERT-base.

    Attributes:
        rms_norm_eps: added to the variance by LayerNorm; `norm_eps` in config.json.
        norm_bias: add biases to the norms.
        attention_bias: add biases to the query, key, value and output projections.
        mlp_bias: add biases to the gate, up and down projections.
        classifier_bias: add a bias to the projection before the head.
        classifier_pooling: hidden state of a text that sequence classifiers see: "cls", that of its first token, or
            "mean", the mean over its tokens.
        decoder_bias: add a bias to the head.
        sliding_window: tokens of local attention on both sides together; `local_attention` in config.json.
        global_attn_every_n_layers: n; the first of every n layers uses full attention, unless `layer_types` is set.
        rope_theta: rotary base of full attention; `global_rope_theta` in config.json.
        rope_scaling: rope scaling of full attention only.
        rope_local_base_freq: rotary base of local attention; `local_rope_theta` in config.json.
    """

    vocab_size: int = 50368
    hidden_size: int = 768
    intermediate_size: int = 1152
    num_hidden_layers: int = 22
    num_attention_heads: int = 12
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    classifier_bias: bool = False
    classifier_pooling: str = "cls"
    decoder_bias: bool = True
    sliding_window: int | None = 128
    global_attn_every_n_layers: int = 3
    rope_theta: float = 160000.0
    rope_local_base_freq: float = 10000.0
    tie_word_embeddings: bool = True

    is_causal: ClassVar[bool] = False

    def validate(self) -> None:
        super().validate()
        check_theta(self, "rope_local_base_freq")
        is_known = self.classifier_pooling in ("cls", "mean")
        refuse_unless(is_known, "classifier_pooling", self.classifier_pooling, "'cls' or 'mean'")

    def slides(self, layer: int) -> bool:
        """Whether the layer uses local attention: all but the first of every `global_attn_every_n_layers` do."""
        return layer % self.global_attn_every_n_layers != 0

    def window(self, layer: int) -> int | None:
        """Window to each side, in tokens including the current one; None for full attention."""
        window = super().window(layer)
        return None if window is None else window // 2 + 1


class ModernBert(MaskedLM):
    """ModernBERT with a head for masked tokens."""

    config: ModernBertConfig

    def __init__(self, config: ModernBertConfig) -> None:
        c, rotary = config, RotaryEmbedding(*rotary_arguments(config), in_fp32=True)
        local_rotary = RotaryEmbedding(c.rotary_size, c.rope_local_base_freq, in_fp32=True)

        def norm() -> LayerNorm:
            return LayerNorm(c.hidden_size, c.rms_norm_eps, c.norm_bias)

        def block(i: int) -> PreNormBlock:
            attention = Attention(
                *heads(c),
                local_rotary if c.is_sliding(i) else rotary,
                window=c.window(i),
                is_causal=False,
                qkv_bias=c.attention_bias,
                output_bias=c.attention_bias,
            )
            mlp = GatedMLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias, activation="gelu")
            return PreNormBlock(norm() if i else nn.Identity(), attention, norm(), mlp)

        embedding = Embedding(c.vocab_size, c.hidden_size)
        encoder = Decoder(embedding, [block(i) for i in range(c.num_hidden_layers)], norm(), input_norm=norm())
        lm_head = LMHead(c.hidden_size, c.vocab_size, bias=c.decoder_bias)
        super().__init__(config, encoder, _prediction_head(c), lm_head)

    def token_head(self) -> PredictionHead:
        return _prediction_head(self.config)

    text_head = token_head


def _prediction_head(config: ModernBertConfig) -> PredictionHead:
    """Returns a head of masked tokens, and of classifiers."""
    norm = LayerNorm(config.hidden_size, config.rms_norm_eps, config.norm_bias)
    return PredictionHead(norm, config.hidden_size, bias=config.classifier_bias)
