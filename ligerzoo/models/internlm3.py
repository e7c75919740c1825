"""InternLM3-8B (Shanghai AI Laboratory 2025).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: Llama with two key-value heads, and a `head_dim` independent of `hidden_size`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.models.config import refuse_unless
from ligerzoo.models.llama import Llama, LlamaConfig


@dataclass(frozen=True, kw_only=True)
class InternLM3Config(LlamaConfig):
    """Configuration of InternLM3. Defaults: those of transformers' InternLM3Config, InternLM3-8B.

    Attributes:
        attention_bias: add biases to the query, key, value and output projections; called `qkv_bias` in config.json.
        mlp_bias: add biases to the gate, up and down projections, as to the others; called `bias` in config.json.
    """

    vocab_size: int = 128512
    intermediate_size: int = 10240
    num_hidden_layers: int = 48
    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-5

    def validate(self) -> None:
        super().validate()
        same, what = self.mlp_bias == self.attention_bias, "another bias than in attention"
        refuse_unless(same, "mlp_bias", self.mlp_bias, f"attention_bias, {self.attention_bias}", what)


class InternLM3(Llama):
    """InternLM3 with a language-model head."""

    config: InternLM3Config
