"""Ministral 8B (Mistral AI 2024).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: Mistral with `layer_types`: each layer uses either sliding-window or full attention.

A typical pattern is one full-attention layer before every three sliding-window layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.models.mistral import Mistral, MistralConfig


@dataclass(frozen=True, kw_only=True)
class MinistralConfig(MistralConfig):
    """Configuration of Ministral. Defaults: those of Mistral, with a `head_dim` of 128."""

    head_dim: int | None = 128


class Ministral(Mistral):
    """Ministral with a language-model head."""

    config: MinistralConfig
