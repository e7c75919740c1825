"""LFM2, MoE models, 8B-A1B and 24B-A2B (Liquid AI 2025).

    tokens -> embedding -> L x [ x += conv or attention(norm(x));  x += moe(norm(x)) ] -> norm -> head

Distinctive: LFM2 with experts that a sigmoid router selects, with a balancing bias.

The first layers use a dense MLP.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ligerzoo.layers import Experts, GatedMLP, MoE, SigmoidRouter
from ligerzoo.models.lfm2 import lfm2_attention
from ligerzoo.models.moe import DeepSeekMoECausalLM, RoutedConfig
from ligerzoo.models.short_conv import ShortConvConfig, short_conv_decoder


@dataclass(frozen=True, kw_only=True)
class Lfm2MoeConfig(ShortConvConfig, RoutedConfig):
    """Configuration of LFM2 with MoE. Defaults: those of transformers' Lfm2MoeConfig, LFM2-8B-A1B.

    Attributes:
        moe_intermediate_size: intermediate features of each expert.
        num_dense_layers: number of layers at the beginning that use a dense MLP.
        use_expert_bias: select experts by scores with a bias.
        norm_topk_prob: divide a token's expert weights by their sum.
        routed_scaling_factor: factor of the weights of the selected experts.
    """

    hidden_size: int = 2048
    intermediate_size: int = 7168
    moe_intermediate_size: int = 1792
    num_experts: int = 32
    num_experts_per_tok: int = 4
    num_dense_layers: int = field(default=2, metadata={"least": 0})
    use_expert_bias: bool = True
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

    def has_mixture(self, layer: int) -> bool:
        """Whether this layer, counted from 0, uses MoE."""
        return layer >= self.num_dense_layers


class Lfm2Moe(DeepSeekMoECausalLM):
    """LFM2 with MoE and a language-model head."""

    config: Lfm2MoeConfig

    def __init__(self, config: Lfm2MoeConfig) -> None:
        c = config

        def feed_forward(layer: int) -> GatedMLP | MoE:
            if not c.has_mixture(layer):
                return GatedMLP(c.hidden_size, c.intermediate_size)
            router = SigmoidRouter(
                c.hidden_size,
                c.num_experts,
                c.num_experts_per_tok,
                renormalize=c.norm_topk_prob,
                scale=c.routed_scaling_factor,
                eps=1e-6,
                balanced=c.use_expert_bias,
                in_fp32=False,
            )
            return MoE(router, Experts(c.hidden_size, c.moe_intermediate_size, c.num_experts))

        super().__init__(config, short_conv_decoder(c, lfm2_attention(c), feed_forward))
