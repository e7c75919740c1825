"""Seed-OSS-36B (ByteDance Seed 2025).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: Llama with QKV biases, and a `head_dim` independent of `hidden_size`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.layers import GatedMLP
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.llama import LlamaConfig, llama_attention, llama_decoder


@dataclass(frozen=True, kw_only=True)
class SeedOssConfig(LlamaConfig):
    """Configuration of Seed-OSS. Defaults: those of transformers' SeedOssConfig, close to Seed-OSS-36B.

    Attributes:
        attention_bias: add biases to the query, key and value projections.
        attention_out_bias: add a bias to the output projection.
    """

    vocab_size: int = 155136
    intermediate_size: int = 27648
    num_hidden_layers: int = 64
    num_attention_heads: int = 80
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 524288
    attention_bias: bool = True
    attention_out_bias: bool = False


class SeedOss(CausalLM):
    """Seed-OSS with a language-model head."""

    config: SeedOssConfig

    def __init__(self, config: SeedOssConfig) -> None:
        c = config

        def mlp(layer: int) -> GatedMLP:
            return GatedMLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)

        super().__init__(config, llama_decoder(c, llama_attention(c, c.attention_out_bias), mlp))
