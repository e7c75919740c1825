"""Kimi Linear, 48B-A3B (Kimi Team 2025).

    tokens -> embedding -> L x [ x += linear or attention(norm(x));  x += moe(norm(x)) ] -> norm -> head

Distinctive: gated delta rule with a decay per channel; latent attention without positions, every fourth layer.

Experts, shared ones too, are those of DeepSeek-V3. The first layer uses a dense MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ligerzoo.layers import Embedding, KimiDeltaAttention, LatentAttention
from ligerzoo.models.config import check_layer_types, refuse_unless
from ligerzoo.models.glm4_moe_lite import MLP_TYPES
from ligerzoo.models.hybrid import LinearAttentionConfig
from ligerzoo.models.latent import LatentConfig
from ligerzoo.models.llama import llama_decoder
from ligerzoo.models.moe import DeepSeekMoECausalLM, DeepSeekMoEConfig


@dataclass(frozen=True, kw_only=True)
class KimiLinearConfig(LinearAttentionConfig, DeepSeekMoEConfig, LatentConfig):
    """Configuration of Kimi Linear. Defaults: those of transformers' KimiLinearConfig.

    Attributes:
        layer_types: None: layers 4, 8, ..., counted from 0, use full attention.
        mlp_layer_types: "dense" or "sparse" (MoE) for each layer; None: `first_k_dense_replace` decides.
        linear_num_heads: heads of linear attention.
        linear_head_dim: their features, of keys and of values.
        linear_conv_kernel_dim: inputs that an output of the convolution depends on.
    """

    vocab_size: int = 163840
    hidden_size: int = 2304
    intermediate_size: int = 9216
    moe_intermediate_size: int = 1024
    num_hidden_layers: int = 27
    num_experts: int = 256
    num_experts_per_tok: int = 8
    routed_scaling_factor: float = 2.446
    q_lora_rank: int | None = None
    max_position_embeddings: int = 1048576
    rms_norm_eps: float = 1e-5
    mlp_layer_types: Sequence[str] | None = None
    linear_num_heads: int = 32
    linear_head_dim: int = 128
    linear_conv_kernel_dim: int = 4

    use_rope: ClassVar[bool] = False

    def validate(self) -> None:
        super().validate()
        check_layer_types(self, MLP_TYPES, "mlp_layer_types")
        refuse_unless(self.rope_scaling is None, "rope_scaling", self.rope_scaling, "None", "no rotary embedding")

    def alternates(self, layer: int) -> bool:
        return layer == 0 or layer % 4 != 0

    def has_mixture(self, layer: int) -> bool:
        """Whether this layer, counted from 0, uses MoE."""
        types = self.mlp_layer_types
        return super().has_mixture(layer) if types is None else types[layer] == "sparse"


class KimiLinear(DeepSeekMoECausalLM):
    """Kimi Linear with a language-model head."""

    config: KimiLinearConfig

    def __init__(self, config: KimiLinearConfig) -> None:
        c, embedding = config, Embedding(config.vocab_size, config.hidden_size)

        def mixer(layer: int) -> KimiDeltaAttention | LatentAttention:
            if c.is_linear(layer):
                sizes = c.hidden_size, c.linear_num_heads, c.linear_head_dim
                return KimiDeltaAttention(*sizes, conv_kernel_size=c.linear_conv_kernel_dim, eps=c.rms_norm_eps)
            latent = c.hidden_size, c.num_attention_heads, c.kv_lora_rank, c.qk_nope_head_dim, c.v_head_dim
            rank, size = c.q_lora_rank, c.qk_rope_head_dim
            return LatentAttention(*latent, rotary=None, q_rank=rank, rope_dim=size, bias=c.attention_bias)

        super().__init__(config, llama_decoder(c, mixer, c.feed_forward, embedding))
