"""Mistral 7B, Mistral Nemo, Mistral Small and others (Jiang et al. 2023).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: Llama with sliding-window attention in the first release, independent `head_dim`, and no biases.

With a window of w, a token attends to the last w tokens, including itself, and L layers carry information up to L * w
tokens ahead. The first Mistral uses a window; later ones use full attention. `head_dim` may differ from
hidden_size / num_attention_heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.layers import Attention, Embedding, RotaryEmbedding
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import WindowedConfig, heads, rotary_arguments
from ligerzoo.models.llama import llama_decoder


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
        c, rotary = config, RotaryEmbedding(*rotary_arguments(config))

        def attention(layer: int) -> Attention:
            return Attention(*heads(c), rotary, window=c.window(layer))

        embedding = Embedding(c.vocab_size, c.hidden_size)
        super().__init__(config, llama_decoder(c, attention, embedding=embedding))
