"""Flint (Recursive Superintelligence 2026).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head
    mlp of later layers: experts(x) + shared expert(x)

Distinctive: Qwen3-MoE with attention sinks, sigmoid routers, a shared expert; positions only in sliding-window layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ligerzoo.layers import (
    DeepSeekMoE,
    Embedding,
    Experts,
    GatedMLP,
    LogitRouter,
    RMSNorm,
    RotaryEmbedding,
    SinkAttention,
)
from ligerzoo.models.config import WindowedConfig, heads, rotary_arguments
from ligerzoo.models.llama import llama_decoder
from ligerzoo.models.moe import MoECausalLM, SparseStepMoEConfig


@dataclass(frozen=True, kw_only=True)
class FlintConfig(SparseStepMoEConfig, WindowedConfig):
    """Configuration of Flint. Defaults: those of transformers' FlintConfig.

    Attributes:
        layer_types: None: full attention in the first two layers, every fourth one and the last one.
        shared_expert_intermediate_size: intermediate features of the shared expert.
        attention_bias: add biases to the query, key, value and output projections.
    """

    vocab_size: int = 150144
    intermediate_size: int = 6144
    num_hidden_layers: int = 49
    num_key_value_heads: int | None = 4
    head_dim: int | None = 128
    max_position_embeddings: int = 262144
    sliding_window: int | None = 513
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 1024
    num_experts: int = 256
    num_experts_per_tok: int = 6
    norm_topk_prob: bool = True
    router_aux_loss_coef: float = 0.0005
    mlp_only_layers: Sequence[int] = field(default_factory=lambda: [0, 1])
    attention_bias: bool = False

    def slides(self, layer: int) -> bool:
        """Whether this layer, counted from 0, uses the sliding window if `layer_types` is None."""
        return layer >= 2 and layer % 4 != 1 and layer < self.num_hidden_layers - 1


class Flint(MoECausalLM):
    """Flint with a language-model head."""

    config: FlintConfig

    def __init__(self, config: FlintConfig) -> None:
        c, rotary, bias = config, RotaryEmbedding(*rotary_arguments(config)), config.attention_bias

        def norm(size: int = c.hidden_size) -> RMSNorm:
            return RMSNorm(size, c.rms_norm_eps, round_before_scale=False)

        def attention(layer: int) -> SinkAttention:
            window, norms = c.window(layer), (norm(c.head_size), norm(c.head_size))
            return SinkAttention(
                *heads(c),
                None if window is None else rotary,
                q_norm=norms[0],
                k_norm=norms[1],
                window=window,
                qkv_bias=bias,
                output_bias=bias,
            )

        def mlp(layer: int) -> GatedMLP | DeepSeekMoE:
            if not c.has_mixture(layer):
                return GatedMLP(c.hidden_size, c.intermediate_size)
            router = LogitRouter(c.hidden_size, c.num_experts, c.num_experts_per_tok, renormalize=c.norm_topk_prob)
            experts = Experts(c.hidden_size, c.moe_intermediate_size, c.num_experts)
            return DeepSeekMoE(router, experts, GatedMLP(c.hidden_size, c.shared_expert_intermediate_size))

        embedding = Embedding(c.vocab_size, c.hidden_size)
        super().__init__(config, llama_decoder(c, attention, mlp, embedding, norm=norm))
