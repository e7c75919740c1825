"""Phi-3, 3.5, 4 and 4-mini (Abdin et al. 2024; Abouelenin et al. 2025).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: Llama's block; in the long-context models LongRoPE (Ding et al. 2024), which turns all tokens of a text by
other frequencies once it is longer than the original context; in Phi-4-mini a rotation of the first three quarters of
each head's features only; in Phi-3-mini-4k a sliding window in every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from torch import nn

from ligerzoo.layers import Attention, Decoder, GatedMLP, KVCache, LMHead, PreNormBlock, RMSNorm, RotaryEmbedding
from ligerzoo.models.causal_lm import CausalLM, Make
from ligerzoo.models.config import PartialRotaryConfig


@dataclass(frozen=True, kw_only=True)
class Phi3Config(PartialRotaryConfig):
    """The numbers of a Phi-3; defaults are Phi-3-mini-4k's, but for its sliding window of 2047.

    Attributes:
        original_max_position_embeddings: the longest text that LongRoPE leaves its short factors, whatever
            `rope_scaling` itself says.
        sliding_window: how many tokens a token sees in any layer, itself included; None for all before it.
    """

    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    original_max_position_embeddings: int = 4096
    sliding_window: int | None = None


class Phi3(CausalLM):
    """Phi-3 with a language-model head."""

    config: Phi3Config

    def __init__(self, config: Phi3Config, **make: Unpack[Make]) -> None:
        c = config
        original = {"original_max_position_embeddings": c.original_max_position_embeddings}
        scaling = {**(c.rope_scaling or {}), **original}
        rotary = RotaryEmbedding(c.rotary_size, c.rope_theta, scaling, c.max_position_embeddings)

        def norm() -> RMSNorm:
            return RMSNorm(c.hidden_size, c.rms_norm_eps, **make)

        def block() -> PreNormBlock:
            attention = Attention(
                c.hidden_size, c.num_attention_heads, c.kv_heads, c.head_size, rotary, window=c.sliding_window, **make
            )
            return PreNormBlock(norm(), attention, norm(), GatedMLP(c.hidden_size, c.intermediate_size, **make))

        embedding = nn.Embedding(c.vocab_size, c.hidden_size, **make)
        layers = [block() for _ in range(c.num_hidden_layers)]
        super().__init__(config, Decoder(embedding, layers, norm()), LMHead(c.hidden_size, c.vocab_size, **make))
        self._longest_for_cache = c.original_max_position_embeddings if rotary.rope_type == "longrope" else None

    def new_cache(self, capacity: int | None = None) -> KVCache:
        """An empty cache, see `CausalLM.new_cache`. LongRoPE turns the keys of a longer text otherwise, so what is
        cached of a text that has the original context at most is of no use beyond it."""
        cache = super().new_cache(capacity)
        cache.useful_until = self._longest_for_cache
        return cache
