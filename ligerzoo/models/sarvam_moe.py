"""Sarvam-30B (Sarvam AI 2026).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += moe(norm(x)) + shared experts(norm(x)) ] -> norm -> head

Distinctive: GLM-4.5 whose heads are rotated whole, with queries, keys and values stored as one tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.models.glm4_moe import Glm4Moe, Glm4MoeConfig


@dataclass(frozen=True, kw_only=True)
class SarvamMoEConfig(Glm4MoeConfig):
    """Configuration of Sarvam's MoE. Defaults: those of transformers' SarvamMoEConfig, Sarvam-30B."""

    vocab_size: int = 262144
    intermediate_size: int = 8192
    moe_intermediate_size: int = 1024
    num_hidden_layers: int = 19
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 4
    head_dim: int | None = 64
    num_experts_per_tok: int = 6
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-6
    rope_theta: float = 8000000.0
    partial_rotary_factor: float = 1.0
    use_qk_norm: bool = True
    initializer_range: float = 0.006


class SarvamMoE(Glm4Moe):
    """Sarvam's MoE with a language-model head."""

    config: SarvamMoEConfig
