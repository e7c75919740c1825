"""Youtu-LLM-2B (Tencent Youtu Lab 2025).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: DeepSeek-V3's latent attention in a small dense model.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.latent import LatentConfig, latent_attention
from ligerzoo.models.llama import llama_decoder


@dataclass(frozen=True, kw_only=True)
class YoutuConfig(LatentConfig):
    """Configuration of Youtu. Defaults: those of transformers' YoutuConfig, Youtu-LLM-2B."""

    vocab_size: int = 128256
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_attention_heads: int = 16
    max_position_embeddings: int = 131072
    tie_word_embeddings: bool = True
    initializer_range: float = 2 / (5 * 2048) ** 0.5


class Youtu(CausalLM):
    """Youtu with a language-model head."""

    config: YoutuConfig

    def __init__(self, config: YoutuConfig) -> None:
        super().__init__(config, llama_decoder(config, latent_attention(config)))
