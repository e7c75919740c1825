"""ERNIE 4.5, MoE text models, 21B-A3B and 300B-A47B (Baidu ERNIE Team 2025).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp or moe(norm(x)) ] -> norm -> head

Distinctive: ERNIE 4.5 with MoE: softmax routers with a balancing bias, shared experts, a biased head.

The bias selects experts, and does not weight them. Routers are computed in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from ligerzoo.layers import (
    BiasedRouter,
    Decoder,
    DeepSeekMoE,
    Embedding,
    Experts,
    GatedMLP,
    LMHead,
    MoE,
    PreNormBlock,
    RMSNorm,
)
from ligerzoo.models.ernie4_5 import ernie4_5_attention
from ligerzoo.models.moe import MoECausalLM, MoEConfig


@dataclass(frozen=True, kw_only=True)
class Ernie4_5MoeConfig(MoEConfig):
    """Configuration of ERNIE 4.5 MoE. Defaults: those of transformers' Ernie4_5_MoeConfig, close to 21B-A3B.

    Attributes:
        use_bias: add biases to all projections of attention, of dense MLPs and of shared experts, and to the head.
        intermediate_size: intermediate features of a dense MLP.
        moe_intermediate_size: intermediate features of each expert.
        moe_num_shared_experts: experts that process every token; may be 0.
        moe_layer_start_index: index of the first layer that may use MoE, counted from 0.
        moe_layer_end_index: index of the last layer that may use MoE; -1 for the last layer.
        moe_layer_interval: n; of these layers, those with an index of n - 1, 2n - 1, ... use MoE.
        moe_norm_min: the sum by which a token's expert weights are divided is at least this.
    """

    vocab_size: int = 103424
    hidden_size: int = 2560
    intermediate_size: int = 12288
    num_hidden_layers: int = 28
    num_attention_heads: int = 20
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    tie_word_embeddings: bool = True
    num_experts: int = 64
    num_experts_per_tok: int = 6
    moe_intermediate_size: int = 1536
    moe_num_shared_experts: int = field(default=2, metadata={"least": 0})
    moe_layer_start_index: int = field(default=1, metadata={"least": 0})
    moe_layer_end_index: int = field(default=-1, metadata={"least": -1})
    moe_layer_interval: int = 1
    moe_norm_min: float = 1e-12
    use_bias: bool = False

    def has_mixture(self, layer: int) -> bool:
        """Whether this layer, counted from 0, uses MoE."""
        last = self.num_hidden_layers - 1 if self.moe_layer_end_index == -1 else self.moe_layer_end_index
        return self.moe_layer_start_index <= layer <= last and (layer + 1) % self.moe_layer_interval == 0


class Ernie4_5Moe(MoECausalLM):
    """ERNIE 4.5 MoE with a language-model head."""

    config: Ernie4_5MoeConfig

    def __init__(self, config: Ernie4_5MoeConfig) -> None:
        c, attention = config, ernie4_5_attention(config, config.use_bias)

        def norm() -> RMSNorm:
            return RMSNorm(c.hidden_size, c.rms_norm_eps)

        def mlp(size: int) -> GatedMLP:
            return GatedMLP(c.hidden_size, size, bias=c.use_bias)

        def feed_forward(layer: int) -> nn.Module:
            if not c.has_mixture(layer):
                return mlp(c.intermediate_size)
            router = BiasedRouter(c.hidden_size, c.num_experts, c.num_experts_per_tok, min_sum=c.moe_norm_min)
            experts = Experts(c.hidden_size, c.moe_intermediate_size, c.num_experts)
            if not c.moe_num_shared_experts:
                return MoE(router, experts)
            return DeepSeekMoE(router, experts, mlp(c.moe_num_shared_experts * c.moe_intermediate_size))

        def block(layer: int) -> PreNormBlock:
            after = feed_forward(layer)
            return PreNormBlock(norm(), attention(layer), norm(), after)

        embedding = Embedding(c.vocab_size, c.hidden_size)
        decoder = Decoder(embedding, map(block, range(c.num_hidden_layers)), norm())
        super().__init__(config, decoder, LMHead(c.hidden_size, c.vocab_size, bias=c.use_bias))
