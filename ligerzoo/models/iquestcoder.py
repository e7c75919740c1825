"""IQuest-Coder-V1-40B (IQuest Lab 2026).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: Llama with other sizes, and a `head_dim` independent of `hidden_size`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.models.llama import Llama, LlamaConfig


@dataclass(frozen=True, kw_only=True)
class IQuestCoderConfig(LlamaConfig):
    """Configuration of IQuest-Coder. Defaults: those of transformers' IQuestCoderConfig, IQuest-Coder-V1-40B."""

    vocab_size: int = 76800
    hidden_size: int = 5120
    intermediate_size: int = 27648
    num_hidden_layers: int = 80
    num_attention_heads: int = 40
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5


class IQuestCoder(Llama):
    """IQuest-Coder with a language-model head."""

    config: IQuestCoderConfig
