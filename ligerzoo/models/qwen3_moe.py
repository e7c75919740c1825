"""Qwen3, MoE models, such as Qwen3-30B-A3B and Qwen3-235B-A22B (Yang et al. 2025).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += moe(norm(x)) ] -> norm -> head

Distinctive: Qwen3 with MoE layers of many small experts, eight per token.

QK-norm is an RMSNorm per head before rotation, with one weight for all heads. Some layers may use a dense MLP instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import nn

from ligerzoo.layers import Experts, GatedMLP, MoE, RotaryEmbedding, Router
from ligerzoo.models.config import rotary_arguments
from ligerzoo.models.moe import MixedMoEConfig, MoECausalLM, SparseStepMoEConfig
from ligerzoo.models.qwen3 import qwen3_decoder


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(SparseStepMoEConfig):
    """Configuration of Qwen3-MoE. Defaults: those of transformers' Qwen3MoeConfig.

    Attributes:
        sliding_window: tokens that a token attends to, including itself; None for full attention.
        attention_bias: add biases to the query, key, value and output projections.
    """

    intermediate_size: int = 6144
    num_key_value_heads: int | None = 4
    num_experts: int = 128
    num_experts_per_tok: int = 8
    sliding_window: int | None = None
    attention_bias: bool = False


class Qwen3Moe(MoECausalLM):
    """Qwen3-MoE with a language-model head."""

    config: Qwen3MoeConfig

    def __init__(self, config: Qwen3MoeConfig) -> None:
        c = config
        rotary = RotaryEmbedding(*rotary_arguments(c))
        decoder = qwen3_decoder(
            c, lambda layer: rotary, partial(qwen3_moe_mlp, c), lambda layer: c.sliding_window, bias=c.attention_bias
        )
        super().__init__(config, decoder)


def qwen3_moe_mlp(config: MixedMoEConfig, layer: int) -> nn.Module:
    """Builds the MoE layer, or the dense MLP, of the block with this index."""
    c = config
    if not c.has_mixture(layer):
        return GatedMLP(c.hidden_size, c.intermediate_size)
    return MoE(
        Router(c.hidden_size, c.num_experts, c.num_experts_per_tok, renormalize=c.norm_topk_prob),
        Experts(c.hidden_size, c.moe_intermediate_size, c.num_experts),
    )
