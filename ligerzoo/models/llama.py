"""Llama 2, 3, 3.1, 3.2 and the many models built alike (Touvron et al. 2023; Grattafiori et al. 2024).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: pre-norm blocks with RMSNorm, rotary positions (in Llama 3.1 and 3.2 with frequencies rescaled for long
contexts), queries in groups that share a key and a value, a SwiGLU feed-forward, and no biases unless the config asks
for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from torch import nn

from ligerzoo.layers import Attention, Decoder, GatedMLP, LMHead, PreNormBlock, RMSNorm, RotaryEmbedding
from ligerzoo.models.causal_lm import CausalLM, Make
from ligerzoo.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """The numbers of a Llama; defaults are Llama-2-7B's.

    Attributes:
        attention_bias: biases on the projections to queries, keys, values and output.
        mlp_bias: biases on the three projections of the feed-forward.
    """

    attention_bias: bool = False
    mlp_bias: bool = False


class Llama(CausalLM):
    """Llama with a language-model head."""

    config: LlamaConfig

    def __init__(self, config: LlamaConfig, **make: Unpack[Make]) -> None:
        c = config
        rotary = RotaryEmbedding(c.rotary_size, c.rope_theta, c.rope_scaling, c.max_position_embeddings)

        def norm() -> RMSNorm:
            return RMSNorm(c.hidden_size, c.rms_norm_eps, **make)

        def block() -> PreNormBlock:
            attention = Attention(
                c.hidden_size, c.num_attention_heads, c.kv_heads, c.head_size, rotary,
                qkv_bias=c.attention_bias, output_bias=c.attention_bias, **make,
            )  # fmt: skip
            mlp = GatedMLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias, **make)
            return PreNormBlock(norm(), attention, norm(), mlp)

        embedding = nn.Embedding(c.vocab_size, c.hidden_size, **make)
        layers = [block() for _ in range(c.num_hidden_layers)]
        super().__init__(config, Decoder(embedding, layers, norm()), LMHead(c.hidden_size, c.vocab_size, **make))
