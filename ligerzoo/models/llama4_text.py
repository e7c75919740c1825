"""Llama 4, text model, Scout and Maverick (Meta 2025).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += moe(norm(x)) ] -> norm -> head

Distinctive: attention in chunks, except in NoPE layers; sigmoid router that scales the experts' inputs.

Three of four layers rotate queries and keys, normalize them after that, and attend within chunks of 8,192 tokens. The
others have no positions; their queries grow with the position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ligerzoo.layers import Attention, GatedMLP, RMSNorm, RotaryEmbedding, RotaryNormAttention, ScaledInputMoE
from ligerzoo.models.config import NoRopeConfig, are_indices, check_layer_types, heads, refuse_unless, rotary_arguments
from ligerzoo.models.llama import llama_decoder
from ligerzoo.models.ministral3 import GrowingQueryAttention
from ligerzoo.models.moe import DeepSeekMoECausalLM, RoutedConfig, scaled_input_moe


@dataclass(frozen=True, kw_only=True)
class Llama4TextConfig(NoRopeConfig, RoutedConfig):
    """Configuration of Llama 4's text model. Defaults: those of transformers' Llama4TextConfig.

    Attributes:
        intermediate_size: intermediate features of each expert, and of the shared expert.
        intermediate_size_mlp: intermediate features of a dense MLP.
        moe_layers: indices of the MoE layers, counted from 0; None: `interleave_moe_layer_step` decides.
        interleave_moe_layer_step: n; every n-th layer uses MoE.
        use_qk_norm: normalize rotated queries and keys.
        attention_chunk_size: tokens of a chunk; None for full attention in all layers.
        layer_types: "chunked_attention" or "full_attention" for each layer; None: those that rotate have chunks.
        attn_temperature_tuning: multiply queries without rotary positions by a factor that grows with the position.
        floor_scale: number of consecutive positions that share a factor.
        attn_scale: growth of the factor.
        attention_bias: add biases to the query, key, value and output projections.
    """

    vocab_size: int = 202048
    hidden_size: int = 5120
    intermediate_size: int = 8192
    intermediate_size_mlp: int = 16384
    num_hidden_layers: int = 48
    num_attention_heads: int = 40
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    num_experts: int = 16
    num_experts_per_tok: int = 1
    moe_layers: Sequence[int] | None = None
    interleave_moe_layer_step: int = 1
    use_qk_norm: bool = True
    attention_chunk_size: int | None = 8192
    layer_types: Sequence[str] | None = None
    attn_temperature_tuning: bool = True
    floor_scale: int = 8192
    attn_scale: float = 0.1
    attention_bias: bool = False

    def validate(self) -> None:
        super().validate()
        check_layer_types(self, ("chunked_attention", "full_attention"))
        layers = self.moe_layers
        refuse_unless(layers is None or are_indices(layers), "moe_layers", layers, "a list of integers, 0 or more")

    def has_mixture(self, layer: int) -> bool:
        """Whether this layer, counted from 0, uses MoE."""
        layers = self.moe_layers
        return (layer + 1) % self.interleave_moe_layer_step == 0 if layers is None else layer in layers

    def chunk(self, layer: int) -> int | None:
        """Tokens of a chunk in this layer, counted from 0; None for full attention."""
        is_chunked = self.rotates(layer) if self.layer_types is None else self.layer_types[layer] == "chunked_attention"
        return self.attention_chunk_size if is_chunked else None


class Llama4Text(DeepSeekMoECausalLM):
    """Llama 4's text model with a language-model head."""

    config: Llama4TextConfig

    def __init__(self, config: Llama4TextConfig) -> None:
        c, rotary = config, RotaryEmbedding(*rotary_arguments(config), interleaved=True, in_fp32=True)

        def norm() -> RMSNorm | None:
            return RMSNorm(c.head_size, c.rms_norm_eps, elementwise_affine=False) if c.use_qk_norm else None

        def attention(i: int) -> Attention:
            sizes, bias, chunk = heads(c), c.attention_bias, c.chunk(i)
            if c.rotates(i):
                return RotaryNormAttention(
                    *sizes, rotary, q_norm=norm(), k_norm=norm(), chunk=chunk, qkv_bias=bias, output_bias=bias
                )
            growth = c.attn_scale if c.attn_temperature_tuning else 0.0, c.floor_scale
            return GrowingQueryAttention(*growth, *sizes, shift=1, chunk=chunk, qkv_bias=bias, output_bias=bias)

        def mlp(i: int) -> GatedMLP | ScaledInputMoE:
            if c.has_mixture(i):
                return scaled_input_moe(c, c.intermediate_size)
            return GatedMLP(c.hidden_size, c.intermediate_size_mlp)

        super().__init__(config, llama_decoder(c, attention, mlp, positions_skip_padding=True))
