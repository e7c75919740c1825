"""Qwen 1.5, 2 and 2.5, and models with the same architecture, such as Qwen2.5-Coder and QwQ (Yang et al. 2024).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: Llama with QKV biases; a few long-context models use a sliding window in later layers.

Only the query, key and value projections have biases. The sliding window, if enabled, applies from layer
`max_window_layers` on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ligerzoo.layers import Attention, Decoder, Embedding, GatedMLP, LMHead, PreNormBlock, RMSNorm, RotaryEmbedding
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import WindowedConfig


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(WindowedConfig):
    """Configuration of Qwen2. Defaults: those of transformers' Qwen2Config.

    Attributes:
        use_sliding_window: enable the sliding window.
        max_window_layers: index of the first layer with a sliding window, unless `layer_types` is set. Despite the
            name, the layers before it use full attention.
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

    def __init__(self, config: Qwen2Config) -> None:
        c = config
        rotary = RotaryEmbedding(c.rotary_size, c.rope_theta, c.rope_scaling, c.max_position_embeddings)
        super().__init__(config, qwen2_decoder(c, rotary), LMHead(c.hidden_size, c.vocab_size))


def qwen2_decoder(config: Qwen2Config, rotary: RotaryEmbedding) -> Decoder:
    """Builds the Qwen2 decoder with the given rotary embedding."""
    c = config

    def norm() -> RMSNorm:
        return RMSNorm(c.hidden_size, c.rms_norm_eps)

    def block(layer: int) -> PreNormBlock:
        attention = Attention(
            c.hidden_size, c.num_attention_heads, c.kv_heads, c.head_size, rotary, window=c.window(layer), qkv_bias=True
        )
        return PreNormBlock(norm(), attention, norm(), GatedMLP(c.hidden_size, c.intermediate_size))

    embedding = Embedding(c.vocab_size, c.hidden_size)
    return Decoder(embedding, [block(layer) for layer in range(c.num_hidden_layers)], norm())
