"""SmolLM3 (Bakouch et al. 2025).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: Llama with no position encoding in every fourth layer (NoPE).

NoPE layers (Kazemnejad et al. 2023) do not rotate queries and keys; only the causal mask gives them the order of the
tokens (Yang et al. 2025, "RoPE to NoPE and back again").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ligerzoo.layers import Attention, Embedding, GatedMLP, RotaryEmbedding
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import WindowedConfig, are_indices, heads, refuse_unless, rotary_arguments
from ligerzoo.models.llama import llama_decoder


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(WindowedConfig):
    """Configuration of SmolLM3. Defaults: those of transformers' SmolLM3Config, close to SmolLM3-3B.

    Attributes:
        attention_bias: add biases to the query, key, value and output projections.
        mlp_bias: add biases to the gate, up and down projections.
        no_rope_layers: one flag per layer: despite the name, 1 for rotary positions and 0 for none. Flags beyond the
            last layer are ignored. None: `no_rope_layer_interval` decides.
        no_rope_layer_interval: n; every n-th layer has no rotary positions.
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
    no_rope_layers: Sequence[int] | None = None
    no_rope_layer_interval: int = 4
    use_sliding_window: bool = False

    def validate(self) -> None:
        super().validate()
        flags, layers = self.no_rope_layers, self.num_hidden_layers
        is_valid = flags is None or (are_indices(flags) and len(flags) >= layers and max(flags) <= 1)
        expected = f"a list of at least {layers} flags, each 0 or 1"
        refuse_unless(is_valid, "no_rope_layers", flags, expected, "invalid per-layer flags")

    def rotates(self, layer: int) -> bool:
        """Whether this layer, counted from 0, has rotary positions."""
        if self.no_rope_layers is None:
            return (layer + 1) % self.no_rope_layer_interval != 0
        return bool(self.no_rope_layers[layer])

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
