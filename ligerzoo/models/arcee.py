"""Arcee Foundation Model, AFM-4.5B (Arcee AI 2025).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: Llama with squared ReLU in an MLP without a gate.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.layers import UngatedMLP
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.llama import LlamaConfig, llama_attention, llama_decoder


@dataclass(frozen=True, kw_only=True)
class ArceeConfig(LlamaConfig):
    """Configuration of AFM. Defaults: those of transformers' ArceeConfig.

    Attributes:
        mlp_bias: add biases to the up and down projections.
    """

    hidden_size: int = 2560
    intermediate_size: int = 18432
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5


class Arcee(CausalLM):
    """AFM with a language-model head."""

    config: ArceeConfig

    def __init__(self, config: ArceeConfig) -> None:
        c = config

        def mlp(layer: int) -> UngatedMLP:
            return UngatedMLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)

        super().__init__(config, llama_decoder(c, llama_attention(c, c.attention_bias), mlp))
