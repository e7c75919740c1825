"""Qwen 1.5, 2 and 2.5, and what is built alike, such as Qwen2.5-Coder and QwQ (Yang et al. 2024).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: Llama's block, with biases on the projections to queries, keys and values and on nothing else, and, in a
few long-context models, a sliding window in the layers from a given one on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Unpack

from torch import nn

from ligerzoo.layers import Attention, Decoder, GatedMLP, LMHead, PreNormBlock, RMSNorm, RotaryEmbedding
from ligerzoo.models.causal_lm import CausalLM, Make
from ligerzoo.models.config import WindowedConfig


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(WindowedConfig):
    """The numbers of a Qwen2; defaults are those of transformers' Qwen2Config.

    Attributes:
        use_sliding_window: whether any layer has the sliding window at all.
        max_window_layers: the first layer that has it, if `layer_types` does not say which have; those before it see
            everything, for all that their name says.
    """

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32768
    sliding_window: int | None = 4096
    use_sliding_window: bool = False
    max_window_layers: int = field(default=28, metadata={"least": 0})

    def slides(self, layer: int) -> bool:
        return self.use_sliding_window and layer >= self.max_window_layers


class Qwen2(CausalLM):
    """Qwen2 with a language-model head."""

    config: Qwen2Config

    def __init__(self, config: Qwen2Config, **make: Unpack[Make]) -> None:
        c = config
        rotary = RotaryEmbedding(c.rotary_size, c.rope_theta, c.rope_scaling, c.max_position_embeddings)
        super().__init__(config, qwen2_decoder(c, rotary, **make), LMHead(c.hidden_size, c.vocab_size, **make))


def qwen2_decoder(config: Qwen2Config, rotary: RotaryEmbedding, **make: Unpack[Make]) -> Decoder:
    """The decoder of Qwen2, and of what is built alike but for the rotary embedding."""
    c = config

    def norm() -> RMSNorm:
        return RMSNorm(c.hidden_size, c.rms_norm_eps, **make)

    def block(layer: int) -> PreNormBlock:
        attention = Attention(
            c.hidden_size, c.num_attention_heads, c.kv_heads, c.head_size, rotary,
            window=c.window(layer), qkv_bias=True, **make,
        )  # fmt: skip
        return PreNormBlock(norm(), attention, norm(), GatedMLP(c.hidden_size, c.intermediate_size, **make))

    embedding = nn.Embedding(c.vocab_size, c.hidden_size, **make)
    return Decoder(embedding, [block(layer) for layer in range(c.num_hidden_layers)], norm())
