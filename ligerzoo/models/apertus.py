"""Apertus, 8B and 70B (Hernández-Cano et al. 2025).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head
    attention: queries and keys of each head -> norm -> rotary embedding -> scores

Distinctive: Llama 3.1 with QK-norm, and the trainable activation xIELU in an MLP without a gate.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ligerzoo.layers import XIELU, Attention, RMSNorm, RotaryEmbedding, UngatedMLP
from ligerzoo.layers.rope_scaling import Scaling
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import DecoderConfig, heads, rotary_arguments
from ligerzoo.models.llama import llama_decoder


def _llama3() -> Scaling:
    return {
        "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ApertusConfig(DecoderConfig):
    """Configuration of Apertus. Defaults: those of transformers' ApertusConfig.

    Attributes:
        attention_bias: add biases to the query, key, value and output projections.
    """

    vocab_size: int = 131072
    intermediate_size: int = 14336
    max_position_embeddings: int = 65536
    rms_norm_eps: float = 1e-5
    rope_theta: float = 12000000.0
    rope_scaling: Scaling | None = field(default_factory=_llama3)
    attention_bias: bool = False


class Apertus(CausalLM):
    """Apertus with a language-model head."""

    config: ApertusConfig

    def __init__(self, config: ApertusConfig) -> None:
        c, rotary = config, RotaryEmbedding(*rotary_arguments(config))

        def norm() -> RMSNorm:
            return RMSNorm(c.head_size, c.rms_norm_eps)

        def attention(layer: int) -> Attention:
            bias = c.attention_bias
            return Attention(*heads(c), rotary, q_norm=norm(), k_norm=norm(), qkv_bias=bias, output_bias=bias)

        def mlp(layer: int) -> UngatedMLP:
            return UngatedMLP(c.hidden_size, c.intermediate_size, activation=XIELU())

        super().__init__(config, llama_decoder(c, attention, mlp))
