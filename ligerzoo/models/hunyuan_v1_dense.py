"""Hunyuan, dense models, 0.5B to 7B (Tencent Hunyuan 2025).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head
    attention: queries and keys of each head -> rotary embedding -> norm -> scores

Distinctive: Llama with QK-norm after rotation, which makes scores depend on absolute positions.

The weights of the norms scale features that were rotated already, so shifting all positions changes the scores. Default
positions therefore skip padding. `alpha` in a "dynamic" `rope_scaling` means a larger, fixed theta.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.layers import RMSNorm, RotaryEmbedding, RotaryNormAttention
from ligerzoo.layers.rope_scaling import is_positive, is_theta
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import DecoderConfig, heads, refuse_unless
from ligerzoo.models.llama import llama_decoder


@dataclass(frozen=True, kw_only=True)
class HunYuanDenseV1Config(DecoderConfig):
    """Configuration of Hunyuan. Defaults: those of transformers' HunYuanDenseV1Config.

    Attributes:
        attention_bias: add biases to the query, key, value and output projections.
        rope_scaling: `alpha` with the type "dynamic" replaces the dynamic scaling by a theta of
            `rope_theta * alpha ** (D / (D - 2))` for all lengths.
    """

    vocab_size: int = 290943
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False

    def validate(self) -> None:
        super().validate()
        alpha = (self.rope_scaling or {}).get("alpha")
        if alpha is None:
            return
        expected = "a number up to 1e6 that gives a theta above 1, and a head_dim above 2"
        is_valid = is_positive(alpha) and alpha <= 1e6 and self.head_size > 2 and is_theta(self._stretched_theta(alpha))
        refuse_unless(is_valid, "rope_scaling, alpha", alpha, expected)

    def _stretched_theta(self, alpha: float) -> float:
        """NTK-aware scaling: theta for `alpha` times the context."""
        return float(self.rope_theta * alpha ** (self.head_size / (self.head_size - 2)))

    def rotary(self) -> RotaryEmbedding:
        """Returns the rotary embedding."""
        theta, scaling = self.rope_theta, self.rope_scaling
        if scaling and scaling.get("rope_type") == "dynamic" and scaling.get("alpha") is not None:
            theta, scaling = self._stretched_theta(scaling["alpha"]), None
        return RotaryEmbedding(self.rotary_size, theta, scaling, self.max_position_embeddings)


class HunYuanDenseV1(CausalLM):
    """Hunyuan with a language-model head."""

    config: HunYuanDenseV1Config

    def __init__(self, config: HunYuanDenseV1Config) -> None:
        c, rotary = config, config.rotary()

        def norm() -> RMSNorm:
            return RMSNorm(c.head_size, c.rms_norm_eps)

        def attention(layer: int) -> RotaryNormAttention:
            bias = c.attention_bias
            return RotaryNormAttention(*heads(c), rotary, q_norm=norm(), k_norm=norm(), qkv_bias=bias, output_bias=bias)

        super().__init__(config, llama_decoder(c, attention, positions_skip_padding=True))
