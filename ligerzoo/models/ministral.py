"""Ministral 8B (Mistral AI 2024).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: a Mistral whose `layer_types` say which layers slide and which see everything, such as one of the latter
before every three of the former.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.models.mistral import Mistral, MistralConfig


@dataclass(frozen=True, kw_only=True)
class MinistralConfig(MistralConfig):
    """The numbers of a Ministral; defaults are those of a Mistral."""

    head_dim: int | None = 128


class Ministral(Mistral):
    """Ministral with a language-model head."""

    config: MinistralConfig
