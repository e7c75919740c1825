"""Kolibri 1 (Aleph Alpha 2026).

    tokens -> embedding -> L x [ x += norm(attention(norm(x)));  x += norm(moe(norm(x))) ] -> norm -> head
    moe: experts(x) + shared expert(x)

Distinctive: GLM-4-0414's four norms, EXAONE 4's attention, and experts selected by biased logits in all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.layers import (
    Attention,
    Decoder,
    DeepSeekMoE,
    Embedding,
    Experts,
    GatedMLP,
    LogitRouter,
    RMSNorm,
    RotaryEmbedding,
)
from ligerzoo.models.config import WindowedConfig, heads, rotary_arguments
from ligerzoo.models.glm4 import Glm4Block
from ligerzoo.models.moe import DeepSeekMoECausalLM, RoutedConfig


@dataclass(frozen=True, kw_only=True)
class Kolibri1Config(RoutedConfig, WindowedConfig):
    """Configuration of Kolibri 1. Defaults: those of transformers' Kolibri1Config.

    Attributes:
        layer_types: None: every fifth layer uses full attention, without positions.
        moe_intermediate_size: intermediate features of each expert.
        shared_expert_intermediate_size: intermediate features of the shared expert.
        norm_topk_prob: divide a token's expert weights by their sum.
    """

    vocab_size: int = 128000
    hidden_size: int = 2560
    num_hidden_layers: int = 50
    num_attention_heads: int = 48
    num_key_value_heads: int | None = 4
    head_dim: int | None = 128
    max_position_embeddings: int = 262144
    sliding_window: int | None = 513
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    num_experts: int = 384
    num_experts_per_tok: int = 6
    norm_topk_prob: bool = False

    def slides(self, layer: int) -> bool:
        """Whether this layer, counted from 0, uses the sliding window if `layer_types` is None."""
        return (layer + 1) % 5 != 0

    def rotates(self, layer: int) -> bool:
        """Whether this layer, counted from 0, has rotary positions."""
        return self.sliding_window is None or self.is_sliding(layer)


class Kolibri1(DeepSeekMoECausalLM):
    """Kolibri 1 with a language-model head."""

    config: Kolibri1Config

    def __init__(self, config: Kolibri1Config) -> None:
        c, rotary = config, RotaryEmbedding(*rotary_arguments(config))

        def norm(size: int = c.hidden_size) -> RMSNorm:
            return RMSNorm(size, c.rms_norm_eps)

        def mixture() -> DeepSeekMoE:
            sizes = c.hidden_size, c.num_experts, c.num_experts_per_tok
            router = LogitRouter(*sizes, renormalize=c.norm_topk_prob, balanced=True)
            experts = Experts(c.hidden_size, c.moe_intermediate_size, c.num_experts)
            return DeepSeekMoE(router, experts, GatedMLP(c.hidden_size, c.shared_expert_intermediate_size))

        def block(i: int) -> Glm4Block:
            rotation, q_norm, k_norm = rotary if c.rotates(i) else None, norm(c.head_size), norm(c.head_size)
            attention = Attention(*heads(c), rotation, q_norm=q_norm, k_norm=k_norm, window=c.window(i))
            return Glm4Block(norm(), attention, norm(), norm(), mixture(), norm())

        embedding, layers = Embedding(c.vocab_size, c.hidden_size), [block(i) for i in range(c.num_hidden_layers)]
        super().__init__(config, Decoder(embedding, layers, norm()))
