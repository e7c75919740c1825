"""Qwen3.5 and Qwen3.6, MoE models, text only, such as Qwen3.6-35B-A3B (Qwen Team 2026).

    tokens -> embedding -> L x [ x += mixer(norm(x));  x += moe(norm(x)) ] -> norm -> head

Distinctive: Qwen3.5 with MoE and a gated shared expert in every layer; renormalized expert weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.layers import Decoder, LMHead, RotaryEmbedding, SharedExpertMoE
from ligerzoo.models.hybrid import GatedDeltaConfig, gated_delta_decoder
from ligerzoo.models.moe import MoECausalLM, MoEConfig, shared_expert_moe


@dataclass(frozen=True, kw_only=True)
class Qwen3_5MoeTextConfig(GatedDeltaConfig, MoEConfig):
    """Configuration of Qwen3.5 with MoE, text only. Defaults: those of transformers' Qwen3_5MoeTextConfig.

    Attributes:
        intermediate_size: unused, since every layer uses MoE.
        moe_intermediate_size: intermediate features of each expert.
        shared_expert_intermediate_size: intermediate features of the shared expert.
    """

    vocab_size: int = 248320
    hidden_size: int = 2048
    num_hidden_layers: int = 40
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 2
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_experts: int = 256
    num_experts_per_tok: int = 8


class Qwen3_5MoeText(MoECausalLM):
    """Qwen3.5 with MoE and a language-model head, text only."""

    config: Qwen3_5MoeTextConfig

    def __init__(self, config: Qwen3_5MoeTextConfig) -> None:
        head = LMHead(config.hidden_size, config.vocab_size)
        super().__init__(config, qwen3_5_moe_decoder(config), head)


def qwen3_5_moe_decoder(config: Qwen3_5MoeTextConfig, rotary: RotaryEmbedding | None = None) -> Decoder:
    """Builds the decoder with MoE layers; the arguments are those of `gated_delta_decoder`."""
    c = config

    def moe(i: int) -> SharedExpertMoE:
        return shared_expert_moe(c, c.moe_intermediate_size, c.shared_expert_intermediate_size, renormalize=True)

    return gated_delta_decoder(c, moe, rotary)
