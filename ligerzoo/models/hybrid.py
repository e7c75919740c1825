"""Shared by hybrids of linear and full attention: configuration of the layers, and the blocks of Qwen's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from ligerzoo.layers import (
    Decoder,
    Embedding,
    GatedAttention,
    GatedDeltaNet,
    LinearAttentionBlock,
    PreNormBlock,
    RMSNorm,
    RotaryEmbedding,
)
from ligerzoo.models.config import (
    DecoderConfig,
    PartialRotaryConfig,
    check_layer_types,
    heads,
    refuse_unless,
    rotary_arguments,
)

_MIXER_TYPES = ("linear_attention", "full_attention")


@dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig(DecoderConfig):
    """Configuration of a decoder with linear attention in some layers.

    Attributes:
        layer_types: "linear_attention" or "full_attention" for each layer; None: `alternates` decides.
    """

    layer_types: Sequence[str] | None = None

    def validate(self) -> None:
        super().validate()
        check_layer_types(self, _MIXER_TYPES)

    def alternates(self, layer: int) -> bool:
        """Whether this layer, counted from 0, uses linear attention if `layer_types` is None."""
        raise NotImplementedError

    def is_linear(self, layer: int) -> bool:
        """Whether this layer, counted from 0, uses linear attention."""
        return self.alternates(layer) if self.layer_types is None else self.layer_types[layer] == "linear_attention"


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig(LinearAttentionConfig, PartialRotaryConfig):
    """Configuration of a decoder with gated delta rule layers and output-gated attention layers (Qwen).

    Attributes:
        attention_bias: add biases to the query, key, value and output projections of full attention.
        full_attention_interval: n; every n-th layer uses full attention, unless `layer_types` is set.
        linear_num_key_heads: query and key heads of linear attention.
        linear_num_value_heads: value heads of linear attention, a multiple of `linear_num_key_heads`.
        linear_key_head_dim: features of a query or key head of linear attention.
        linear_value_head_dim: features of a value head of linear attention.
        linear_conv_kernel_dim: inputs that an output of the convolution depends on.
    """

    head_dim: int | None = 256
    partial_rotary_factor: float = 0.25
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    full_attention_interval: int = 4
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4

    def validate(self) -> None:
        super().validate()
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        what = "invalid number of value heads of linear attention"
        expected = f"a multiple of linear_num_key_heads, {keys}"
        refuse_unless(values % keys == 0, "linear_num_value_heads", values, expected, what)

    def alternates(self, layer: int) -> bool:
        return (layer + 1) % self.full_attention_interval != 0


def gated_delta_decoder(
    config: GatedDeltaConfig, mlp: Callable[[int], nn.Module], rotary: RotaryEmbedding | None = None
) -> Decoder:
    """Builds a decoder of gated delta rule and gated attention blocks.

    Args:
        config: the sizes.
        mlp: returns the MLP or MoE of a layer, counted from 0.
        rotary: rotary embedding of full attention; None for that of text.
    """
    c = config
    rotary = rotary or RotaryEmbedding(*rotary_arguments(c))

    def norm(size: int = c.hidden_size) -> RMSNorm:
        return RMSNorm(size, c.rms_norm_eps, weight_offset=1.0, round_before_scale=False)

    def block(i: int) -> PreNormBlock:
        if c.is_linear(i):
            heads_and_sizes = c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
            sizes = c.hidden_size, c.linear_num_key_heads, *heads_and_sizes
            mixer = GatedDeltaNet(*sizes, conv_kernel_size=c.linear_conv_kernel_dim, eps=c.rms_norm_eps)
            return LinearAttentionBlock(norm(), mixer, norm(), mlp(i))
        bias, q_norm, k_norm = c.attention_bias, norm(c.head_size), norm(c.head_size)
        attention = GatedAttention(*heads(c), rotary, q_norm=q_norm, k_norm=k_norm, qkv_bias=bias, output_bias=bias)
        return PreNormBlock(norm(), attention, norm(), mlp(i))

    embedding = Embedding(c.vocab_size, c.hidden_size)
    return Decoder(embedding, [block(i) for i in range(c.num_hidden_layers)], norm())
