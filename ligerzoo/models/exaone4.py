"""EXAONE 4, 1.2B and 32B (LG AI Research 2025).

    tokens -> embedding -> L x [ x += norm(attention(x));  x += norm(mlp(x)) ] -> norm -> head
    attention: queries and keys of each head -> norm -> rotary embedding in sliding-window layers -> scores

Distinctive: OLMo 2's blocks with QK-norm per head; no positions in a hybrid model's full-attention layers.

The 32B model uses a sliding window in three of four layers. The 1.2B model has no window, and rotates in all layers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ligerzoo.checks import is_text
from ligerzoo.layers import Attention, Decoder, Embedding, GatedMLP, PostNormBlock, RMSNorm, RotaryEmbedding
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import WindowedConfig, heads, refuse_unless, rotary_arguments


@dataclass(frozen=True, kw_only=True)
class Exaone4Config(WindowedConfig):
    """Configuration of EXAONE 4. Defaults: those of transformers' Exaone4Config.

    Attributes:
        sliding_window: None for full attention with rotary positions in all layers.
        sliding_window_pattern: n: every n-th layer uses full attention; or a string such as "LLLG", which repeats: L
            for a sliding-window (local) layer, G for full (global) attention, which the last layer always uses; None
            for full attention in all layers. `layer_types` takes precedence.
    """

    vocab_size: int = 102400
    intermediate_size: int = 16384
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = 4096
    sliding_window_pattern: int | str | None = 4

    def validate(self) -> None:
        super().validate()
        pattern = self.sliding_window_pattern
        is_pattern = not is_text(pattern) or re.fullmatch("[LG]+", pattern) is not None
        expected = "a positive integer, or a string of L (sliding window) and G (full attention)"
        refuse_unless(is_pattern, "sliding_window_pattern", pattern, expected, "invalid pattern")

    def slides(self, layer: int) -> bool:
        pattern = self.sliding_window_pattern
        if isinstance(pattern, str):
            return pattern[layer % len(pattern)] == "L" and layer < self.num_hidden_layers - 1
        return pattern is not None and (layer + 1) % pattern != 0

    def rotates(self, layer: int) -> bool:
        """Whether this layer, counted from 0, has rotary positions."""
        return self.sliding_window is None or self.is_sliding(layer)


class Exaone4(CausalLM):
    """EXAONE 4 with a language-model head."""

    config: Exaone4Config

    def __init__(self, config: Exaone4Config) -> None:
        c = config
        rotary = RotaryEmbedding(*rotary_arguments(c))

        def norm(size: int = c.hidden_size) -> RMSNorm:
            return RMSNorm(size, c.rms_norm_eps)

        def block(i: int) -> PostNormBlock:
            rotation, q_norm, k_norm = rotary if c.rotates(i) else None, norm(c.head_size), norm(c.head_size)
            attention = Attention(*heads(c), rotation, q_norm=q_norm, k_norm=k_norm, window=c.window(i))
            mlp = GatedMLP(c.hidden_size, c.intermediate_size)
            return PostNormBlock(attention, norm(), mlp, norm())

        embedding = Embedding(c.vocab_size, c.hidden_size)
        decoder = Decoder(embedding, map(block, range(c.num_hidden_layers)), norm())
        super().__init__(config, decoder)
