"""EXAONE 3.0, EXAONE 3.5 and EXAONE Deep (LG AI Research 2024).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: Llama with other sizes, under names of GPT-2 in checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.models.llama import Llama, LlamaConfig


@dataclass(frozen=True, kw_only=True)
class ExaoneConfig(LlamaConfig):
    """Configuration of EXAONE. Defaults: those of transformers' ExaoneConfig, EXAONE-3.0-7.8B."""

    vocab_size: int = 102400
    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0


class Exaone(Llama):
    """EXAONE with a language-model head."""

    config: ExaoneConfig
