"""Mistral 7B, Mistral Nemo, Mistral Small and others (Jiang et al. 2023).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: a Llama whose attention slides: with a window w, which the first Mistral had and later ones do not, a token
sees the last w tokens, itself included, and L layers carry what it knows up to L * w tokens on. Heads may be larger or
smaller than hidden_size / num_attention_heads, and nothing has a bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from torch import nn

from ligerzoo.layers import Attention, Decoder, GatedMLP, LMHead, PreNormBlock, RMSNorm, RotaryEmbedding
from ligerzoo.models.causal_lm import CausalLM, Make
from ligerzoo.models.config import WindowedConfig


@dataclass(frozen=True, kw_only=True)
class MistralConfig(WindowedConfig):
    """The numbers of a Mistral; defaults are those of the first Mistral-7B, for longer texts."""

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096


class Mistral(CausalLM):
    """Mistral with a language-model head."""

    config: MistralConfig

    def __init__(self, config: MistralConfig, **make: Unpack[Make]) -> None:
        c = config
        rotary = RotaryEmbedding(c.rotary_size, c.rope_theta, c.rope_scaling, c.max_position_embeddings)

        def norm() -> RMSNorm:
            return RMSNorm(c.hidden_size, c.rms_norm_eps, **make)

        def block(i: int) -> PreNormBlock:
            attention = Attention(
                c.hidden_size, c.num_attention_heads, c.kv_heads, c.head_size, rotary, window=c.window(i), **make
            )
            return PreNormBlock(norm(), attention, norm(), GatedMLP(c.hidden_size, c.intermediate_size, **make))

        embedding = nn.Embedding(c.vocab_size, c.hidden_size, **make)
        layers = [block(i) for i in range(c.num_hidden_layers)]
        super().__init__(config, Decoder(embedding, layers, norm()), LMHead(c.hidden_size, c.vocab_size, **make))
