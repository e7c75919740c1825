"""LFM2, dense models, 350M to 2.6B (Liquid AI 2025).

    tokens -> embedding -> L x [ x += conv or attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head
    conv: (b, c, v) = in(x) -> out(c * convolution(b * v))

Distinctive: Llama with QK-norm per head, and gated short convolutions instead of attention in most layers.

A convolution sees the last three tokens, which are all that its cache keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ligerzoo.layers import Attention, GatedMLP, RMSNorm, RotaryEmbedding
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import are_indices, heads, refuse_unless, rotary_arguments
from ligerzoo.models.short_conv import ShortConvConfig, short_conv_decoder


@dataclass(frozen=True, kw_only=True)
class Lfm2Config(ShortConvConfig):
    """Configuration of LFM2. Defaults: those of transformers' Lfm2Config.

    Attributes:
        layer_types: None: `full_attn_idxs` decides.
        full_attn_idxs: indices of the layers with attention, counted from 0; None for all.
        block_auto_adjust_ff_dim: MLPs have two thirds of `intermediate_size` as intermediate features, times a factor,
            rounded up to a multiple.
        block_ffn_dim_multiplier: the factor; None for neither factor nor multiple.
        block_multiple_of: the multiple.
    """

    hidden_size: int = 2560
    intermediate_size: int = 12288
    full_attn_idxs: Sequence[int] | None = None
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: float | None = 1.0
    block_multiple_of: int = 256

    def validate(self) -> None:
        super().validate()
        layers, what = self.full_attn_idxs, "invalid layer indices"
        is_valid = layers is None or are_indices(layers)
        refuse_unless(is_valid, "full_attn_idxs", layers, "a list of integers, 0 or more", what)
        refuse_unless(self.mlp_size > 0, "intermediate_size", self.intermediate_size, "more intermediate features")

    def is_conv(self, layer: int) -> bool:
        indices = self.full_attn_idxs
        return super().is_conv(layer) if self.layer_types or indices is None else layer not in indices

    @property
    def mlp_size(self) -> int:
        """Intermediate features of an MLP."""
        if not self.block_auto_adjust_ff_dim:
            return self.intermediate_size
        size, factor, multiple = (
            int(2 * self.intermediate_size / 3),
            self.block_ffn_dim_multiplier,
            self.block_multiple_of,
        )
        return size if factor is None else -(-int(factor * size) // multiple) * multiple


class Lfm2(CausalLM):
    """LFM2 with a language-model head."""

    config: Lfm2Config

    def __init__(self, config: Lfm2Config) -> None:
        c = config

        def mlp(layer: int) -> GatedMLP:
            return GatedMLP(c.hidden_size, c.mlp_size)

        super().__init__(config, short_conv_decoder(c, lfm2_attention(c), mlp))


def lfm2_attention(config: ShortConvConfig) -> Callable[[int, RMSNorm, RMSNorm], Attention]:
    """Returns a function that builds the attention of a layer; all layers share the rotary embedding."""
    c, rotary = config, RotaryEmbedding(*rotary_arguments(config))

    def attention(layer: int, q_norm: RMSNorm, k_norm: RMSNorm) -> Attention:
        return Attention(*heads(c), rotary, q_norm=q_norm, k_norm=k_norm)

    return attention
