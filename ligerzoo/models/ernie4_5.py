"""ERNIE 4.5, dense model, 0.3B (Baidu ERNIE Team 2025).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: Llama with interleaved rotary embedding in fp32, and an independent `head_dim`.

Each pair (2i, 2i + 1) of a head's features is rotated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ligerzoo.layers import Attention, GatedMLP, RotaryEmbedding
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import DecoderConfig, heads, rotary_arguments
from ligerzoo.models.llama import llama_decoder


@dataclass(frozen=True, kw_only=True)
class Ernie4_5Config(DecoderConfig):
    """Configuration of ERNIE 4.5. Defaults: those of transformers' Ernie4_5Config, close to ERNIE-4.5-0.3B.

    Attributes:
        use_bias: add biases to all projections of attention and MLP.
    """

    vocab_size: int = 103424
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 18
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    tie_word_embeddings: bool = True
    use_bias: bool = False


class Ernie4_5(CausalLM):
    """ERNIE 4.5 with a language-model head."""

    config: Ernie4_5Config

    def __init__(self, config: Ernie4_5Config) -> None:
        c = config

        def mlp(layer: int) -> GatedMLP:
            return GatedMLP(c.hidden_size, c.intermediate_size, bias=c.use_bias)

        super().__init__(config, llama_decoder(c, ernie4_5_attention(c, c.use_bias), mlp))


def ernie4_5_attention(config: DecoderConfig, bias: bool) -> Callable[[int], Attention]:
    """Returns a function that builds the attention of a block; all blocks share the rotary embedding."""
    rotary = RotaryEmbedding(*rotary_arguments(config), interleaved=True, in_fp32=True)
    return lambda layer: Attention(*heads(config), rotary, qkv_bias=bias, output_bias=bias)
