"""Mellum 2, such as Mellum2-12B-A2.5B (JetBrains 2026).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += moe(norm(x)) ] -> norm -> head

Distinctive: Qwen3-MoE with sliding windows in some layers, whose rotary base is smaller.

The rotary frequencies of full-attention layers may be scaled for long contexts; those of sliding-window layers are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ligerzoo.layers import RotaryEmbedding
from ligerzoo.models.config import WindowedConfig, check_layer_types, check_theta, rotary_arguments
from ligerzoo.models.moe import MixedMoEConfig, MoECausalLM
from ligerzoo.models.qwen3 import qwen3_decoder
from ligerzoo.models.qwen3_moe import qwen3_moe_mlp


@dataclass(frozen=True, kw_only=True)
class MellumConfig(MixedMoEConfig, WindowedConfig):
    """Configuration of Mellum. Defaults: those of transformers' MellumConfig, Mellum2-12B-A2.5B.

    Attributes:
        layer_types: None: full attention in all layers.
        mlp_layer_types: "sparse" (MoE) or "dense" for each layer; None: MoE in all layers.
        rope_theta: rotary base of full-attention layers.
        rope_scaling: rope scaling of full-attention layers only.
        rope_local_base_freq: rotary base of sliding-window layers.
        attention_bias: add biases to the query, key, value and output projections.
    """

    vocab_size: int = 98304
    hidden_size: int = 2304
    intermediate_size: int = 7168
    num_hidden_layers: int = 28
    num_key_value_heads: int | None = 4
    head_dim: int | None = 128
    max_position_embeddings: int = 131072
    rope_theta: float = 500000.0
    rope_local_base_freq: float = 10000.0
    sliding_window: int | None = 1024
    moe_intermediate_size: int = 896
    num_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = True
    mlp_layer_types: Sequence[str] | None = None
    attention_bias: bool = False

    def validate(self) -> None:
        super().validate()
        check_theta(self, "rope_local_base_freq")
        check_layer_types(self, ("sparse", "dense"), "mlp_layer_types")

    def slides(self, layer: int) -> bool:
        """Whether this layer, counted from 0, uses the sliding window if `layer_types` is None."""
        return False

    def has_mixture(self, layer: int) -> bool:
        """Whether this layer, counted from 0, uses MoE."""
        return self.mlp_layer_types is None or self.mlp_layer_types[layer] == "sparse"


class Mellum(MoECausalLM):
    """Mellum with a language-model head."""

    config: MellumConfig

    def __init__(self, config: MellumConfig) -> None:
        c, full = config, RotaryEmbedding(*rotary_arguments(config))
        local = RotaryEmbedding(c.rotary_size, c.rope_local_base_freq)

        def rotary(layer: int) -> RotaryEmbedding:
            return local if c.is_sliding(layer) else full

        mlp = partial(qwen3_moe_mlp, c)
        super().__init__(config, qwen3_decoder(c, rotary, mlp, c.window, bias=c.attention_bias))
