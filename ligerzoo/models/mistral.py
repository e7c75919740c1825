"""Mistral 7B, Mistral Nemo, Mistral Small and others (Jiang et al. 2023).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: Llama with sliding-window attention in the first release, independent `head_dim`, and no biases.

With a window of w, a token attends to the last w tokens, including itself, and L layers carry information up to L * w
tokens ahead. The first Mistral uses a window; later ones use full attention. `head_dim` may differ from
hidden_size / num_attention_heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.layers import Attention, Decoder, Embedding, GatedMLP, LMHead, PreNormBlock, RMSNorm, RotaryEmbedding
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import WindowedConfig


@dataclass(frozen=True, kw_only=True)
class MistralConfig(WindowedConfig):
    """Configuration of Mistral. Defaults: the first Mistral-7B, with `max_position_embeddings` of 131072."""

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096


class Mistral(CausalLM):
    """Mistral with a language-model head."""

    config: MistralConfig

    def __init__(self, config: MistralConfig) -> None:
        c = config
        rotary = RotaryEmbedding(c.rotary_size, c.rope_theta, c.rope_scaling, c.max_position_embeddings)

        def norm() -> RMSNorm:
            return RMSNorm(c.hidden_size, c.rms_norm_eps)

        def block(i: int) -> PreNormBlock:
            attention = Attention(
                c.hidden_size,
                c.num_attention_heads,
                c.kv_heads,
                c.head_size,
                rotary,
                window=c.window(i),
            )
            return PreNormBlock(norm(), attention, norm(), GatedMLP(c.hidden_size, c.intermediate_size))

        embedding = Embedding(c.vocab_size, c.hidden_size)
        layers = [block(i) for i in range(c.num_hidden_layers)]
        super().__init__(config, Decoder(embedding, layers, norm()), LMHead(c.hidden_size, c.vocab_size))
