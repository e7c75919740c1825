"""Qwen3-Next, such as Qwen3-Next-80B-A3B and Qwen3-Coder-Next (Qwen Team 2025).

    tokens -> embedding -> L x [ x += mixer(norm(x));  x += moe(norm(x)) ] -> norm -> head

Distinctive: linear and gated full attention as in Qwen3.5, MoE with a gated shared expert.

Some layers may use a dense MLP instead of MoE.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.layers import GatedMLP, LMHead, SharedExpertMoE
from ligerzoo.models.hybrid import GatedDeltaConfig, gated_delta_decoder
from ligerzoo.models.moe import MoECausalLM, SparseStepMoEConfig, shared_expert_moe


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(GatedDeltaConfig, SparseStepMoEConfig):
    """Configuration of Qwen3-Next. Defaults: those of transformers' Qwen3NextConfig.

    Attributes:
        shared_expert_intermediate_size: intermediate features of the shared expert.
    """

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 48
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 2
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_experts: int = 512
    num_experts_per_tok: int = 10
    norm_topk_prob: bool = True


class Qwen3Next(MoECausalLM):
    """Qwen3-Next with a language-model head."""

    config: Qwen3NextConfig

    def __init__(self, config: Qwen3NextConfig) -> None:
        c = config

        def mlp(i: int) -> GatedMLP | SharedExpertMoE:
            if not c.has_mixture(i):
                return GatedMLP(c.hidden_size, c.intermediate_size)
            return shared_expert_moe(
                c, c.moe_intermediate_size, c.shared_expert_intermediate_size, renormalize=c.norm_topk_prob
            )

        head = LMHead(c.hidden_size, c.vocab_size)
        super().__init__(config, gated_delta_decoder(c, mlp), head)
