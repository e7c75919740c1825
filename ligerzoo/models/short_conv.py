"""Shared by decoders with short convolutions in some layers (LFM2 and LFM3): configuration, and their blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ligerzoo.layers import (
    Attention,
    ConvBlock,
    ConvSandwichBlock,
    Decoder,
    Embedding,
    PreNormBlock,
    RMSNorm,
    SandwichBlock,
    ShortConv,
)
from ligerzoo.models.config import DecoderConfig, check_layer_types


@dataclass(frozen=True, kw_only=True)
class ShortConvConfig(DecoderConfig):
    """Configuration of a decoder with short convolutions (LFM2).

    Attributes:
        layer_types: "conv" or "full_attention" for each layer.
        conv_bias: add biases to the convolutions and their projections.
        conv_L_cache: tokens that a convolution sees, the last one included.
    """

    vocab_size: int = 65536
    num_hidden_layers: int = 32
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 128000
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    tie_word_embeddings: bool = True
    layer_types: Sequence[str] | None = None
    conv_bias: bool = False
    conv_L_cache: int = 3

    mixer_types: ClassVar[tuple[str, ...]] = ("conv", "full_attention")

    def validate(self) -> None:
        super().validate()
        check_layer_types(self, self.mixer_types)

    def is_conv(self, layer: int) -> bool:
        """Whether this layer, counted from 0, is a convolution."""
        return self.layer_types is not None and self.layer_types[layer] == "conv"


def short_conv_decoder(
    config: ShortConvConfig,
    attention: Callable[[int, RMSNorm, RMSNorm], Attention],
    mlp: Callable[[int], nn.Module],
    *,
    is_sandwich: bool = False,
) -> Decoder:
    """Builds the decoder.

    Args:
        config: sizes.
        attention: builds the attention of a layer, counted from 0, with these norms of queries and keys.
        mlp: builds the MLP or MoE of a layer.
        is_sandwich: blocks have norms after the branches too.
    """
    c = config

    def norm(size: int = c.hidden_size) -> RMSNorm:
        return RMSNorm(size, c.rms_norm_eps)

    def mixer(i: int) -> nn.Module:
        if c.is_conv(i):
            return ShortConv(c.hidden_size, c.conv_L_cache, bias=c.conv_bias)
        return attention(i, norm(c.head_size), norm(c.head_size))

    def block(i: int) -> nn.Module:
        if is_sandwich:
            sandwich = ConvSandwichBlock if c.is_conv(i) else SandwichBlock
            return sandwich(norm(), mixer(i), norm(), norm(), mlp(i), norm())
        return (ConvBlock if c.is_conv(i) else PreNormBlock)(norm(), mixer(i), norm(), mlp(i))

    return Decoder(Embedding(c.vocab_size, c.hidden_size), map(block, range(c.num_hidden_layers)), norm())
