"""SmolLM3 (Bakouch et al. 2025).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: Llama with no position encoding in every fourth layer (NoPE).

NoPE layers (Kazemnejad et al. 2023) do not rotate queries and keys; only the causal mask gives them the order of the
tokens (Yang et al. 2025, "RoPE to NoPE and back again").
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.layers import Attention, Embedding, GatedMLP, RotaryEmbedding
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import NoRopeConfig, WindowedConfig, heads, rotary_arguments
from ligerzoo.models.llama import llama_decoder


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(NoRopeConfig, WindowedConfig):
    """Configuration of SmolLM3. Defaults: those of transformers' SmolLM3Config, close to SmolLM3-3B.

    Attributes:
        attention_bias: add biases to the query, key, value and output projections.
        mlp_bias: add biases to the gate, up and down projections.
        use_sliding_window: use the sliding window in the layers without rotary positions, unless `layer_types` is set.
    """

    vocab_size: int = 128256
    hidden_size: int = 2048
    num_hidden_layers: int = 36
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32768
    rope_theta: float = 2000000.0
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False

    def slides(self, layer: int) -> bool:
        return self.use_sliding_window and not self.rotates(layer)


class SmolLM3(CausalLM):
    """SmolLM3 with a language-model head."""

    config: SmolLM3Config

    def __init__(self, config: SmolLM3Config) -> None:
        c, rotary = config, RotaryEmbedding(*rotary_arguments(config))

        def attention(layer: int) -> Attention:
            bias, rotation = c.attention_bias, rotary if c.rotates(layer) else None
            return Attention(*heads(c), rotation, window=c.window(layer), qkv_bias=bias, output_bias=bias)

        def mlp(layer: int) -> GatedMLP:
            return GatedMLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)

        super().__init__(config, llama_decoder(c, attention, mlp, Embedding(c.vocab_size, c.hidden_size)))
