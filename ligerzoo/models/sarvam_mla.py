"""Sarvam-105B (Sarvam AI 2026).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += moe(norm(x)) + shared experts(norm(x)) ] -> norm -> head

Distinctive: DeepSeek-V3 with other sizes, one projection to queries, and experts without groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ligerzoo.models.deepseek_v3 import DeepseekV3, DeepseekV3Config


@dataclass(frozen=True, kw_only=True)
class SarvamMLAConfig(DeepseekV3Config):
    """Configuration of Sarvam's latent attention. Defaults: those of transformers' SarvamMLAConfig, Sarvam-105B."""

    vocab_size: int = 262144
    hidden_size: int = 4096
    intermediate_size: int = 16384
    num_hidden_layers: int = 32
    num_attention_heads: int = 64
    num_experts: int = 128
    q_lora_rank: int | None = None
    n_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = field(default=1, metadata={"least": 0})
    initializer_range: float = 0.006


class SarvamMLA(DeepseekV3):
    """Sarvam's latent attention with a language-model head."""

    config: SarvamMLAConfig
