"""GLM-4.7-Flash (GLM Team 2025).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += moe(norm(x)) + shared experts(norm(x)) ] -> norm -> head

Distinctive: DeepSeek-V3 with heads of 256 features for keys and values, and no expert groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ligerzoo.models.config import check_layer_types
from ligerzoo.models.deepseek_v3 import DeepseekV3, DeepseekV3Config

MLP_TYPES = ("dense", "sparse")


@dataclass(frozen=True, kw_only=True)
class Glm4MoeLiteConfig(DeepseekV3Config):
    """Configuration of GLM-4.7-Flash. Defaults: those of transformers' Glm4MoeLiteConfig.

    Attributes:
        mlp_layer_types: "dense" or "sparse" (MoE) for each layer; None: `first_k_dense_replace` decides.
    """

    vocab_size: int = 154880
    hidden_size: int = 2048
    intermediate_size: int = 10240
    moe_intermediate_size: int = 1536
    num_hidden_layers: int = 47
    num_attention_heads: int = 20
    num_experts: int = 64
    num_experts_per_tok: int = 4
    routed_scaling_factor: float = 1.8
    n_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = field(default=1, metadata={"least": 0})
    max_position_embeddings: int = 202752
    rms_norm_eps: float = 1e-5
    q_lora_rank: int | None = 768
    qk_nope_head_dim: int = 192
    v_head_dim: int = 256
    mlp_layer_types: Sequence[str] | None = None

    def validate(self) -> None:
        super().validate()
        check_layer_types(self, MLP_TYPES, "mlp_layer_types")

    def has_mixture(self, layer: int) -> bool:
        """Whether this layer, counted from 0, uses MoE."""
        types = self.mlp_layer_types
        return super().has_mixture(layer) if types is None else types[layer] == "sparse"


class Glm4MoeLite(DeepseekV3):
    """GLM-4.7-Flash with a language-model head."""

    config: Glm4MoeLiteConfig
