"""Phi-3, 3.5, 4 and 4-mini (Abdin et al. 2024; Abouelenin et al. 2025).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: Llama with LongRoPE in long-context models, partial rotary embedding (Phi-4-mini), sliding window
(Phi-3-mini-4k).

LongRoPE (Ding et al. 2024) rotates all tokens of a sequence by different frequencies once the sequence is longer than
the original context. Phi-4-mini rotates only the first three quarters of each head's features. Phi-3-mini-4k uses a
sliding window in every layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.layers import Attention, Embedding, RotaryEmbedding
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import PartialRotaryConfig, heads
from ligerzoo.models.llama import llama_decoder


@dataclass(frozen=True, kw_only=True)
class Phi3Config(PartialRotaryConfig):
    """Configuration of Phi-3. Defaults: Phi-3-mini-4k, without its sliding window of 2047 tokens.

    Attributes:
        original_max_position_embeddings: longest sequence, in tokens, for which LongRoPE uses its short factors. It
            overrides the entry of the same name in `rope_scaling`.
        sliding_window: tokens that a token attends to in every layer, including itself; None for full attention.
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

    def __init__(self, config: Phi3Config) -> None:
        c = config
        original = {"original_max_position_embeddings": c.original_max_position_embeddings}
        scaling = {**(c.rope_scaling or {}), **original}
        rotary = RotaryEmbedding(c.rotary_size, c.rope_theta, scaling, c.max_position_embeddings)

        def attention(layer: int) -> Attention:
            return Attention(*heads(c), rotary, window=c.sliding_window)

        embedding = Embedding(c.vocab_size, c.hidden_size)
        # With LongRoPE, longer sequences are rotated by other frequencies.
        limit = c.original_max_position_embeddings if rotary.rope_type == "longrope" else None
        super().__init__(config, llama_decoder(c, attention, embedding=embedding, max_valid_cache_length=limit))
