"""Qwen 1.5, 2 and 2.5, and models with the same architecture, such as Qwen2.5-Coder and QwQ (Yang et al. 2024).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: Llama with QKV biases; a few long-context models use a sliding window in later layers.

Only the query, key and value projections have biases. The sliding window, if enabled, applies from layer
`max_window_layers` on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ligerzoo.layers import Attention, Decoder, Embedding, RotaryEmbedding
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import WindowedConfig, heads, rotary_arguments
from ligerzoo.models.llama import llama_decoder


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
        super().__init__(config, qwen2_decoder(config, RotaryEmbedding(*rotary_arguments(config))))


def qwen2_decoder(config: Qwen2Config, rotary: RotaryEmbedding) -> Decoder:
    """Builds the Qwen2 decoder with the given rotary embedding."""
    c = config

    def attention(layer: int) -> Attention:
        return Attention(*heads(c), rotary, window=c.window(layer), qkv_bias=True)

    return llama_decoder(c, attention, embedding=Embedding(c.vocab_size, c.hidden_size))
