"""Bamba, 9B (IBM, Princeton, CMU and UIUC 2024).

    tokens -> embedding -> L x [ x += mamba or attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: Llama with Mamba-2 instead of attention in most layers, and partial rotary positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ligerzoo.layers import Attention, Decoder, Embedding, GatedMLP, MambaBlock, PreNormBlock, RMSNorm, RotaryEmbedding
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import are_indices, heads, refuse_unless, rotary_arguments
from ligerzoo.models.state_space import MambaConfig, mamba


@dataclass(frozen=True, kw_only=True)
class BambaConfig(MambaConfig):
    """Configuration of Bamba. Defaults: those of transformers' BambaConfig.

    Attributes:
        attn_layer_indices: indices of the layers with attention, counted from 0; None for none.
        attention_bias: add biases to the query, key, value and output projections.
        mlp_bias: add biases to the gate, up and down projections.
    """

    vocab_size: int = 128000
    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 262144
    rms_norm_eps: float = 1e-5
    attn_layer_indices: Sequence[int] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False

    def validate(self) -> None:
        super().validate()
        layers, what = self.attn_layer_indices, "invalid layer indices"
        is_valid = layers is None or are_indices(layers)
        refuse_unless(is_valid, "attn_layer_indices", layers, "a list of integers, 0 or more", what)

    def is_mamba(self, layer: int) -> bool:
        return layer not in (self.attn_layer_indices or ())

    @property
    def rotary_size(self) -> int:
        """Rotated features per head."""
        return self.head_size // 2


class Bamba(CausalLM):
    """Bamba with a language-model head."""

    config: BambaConfig

    def __init__(self, config: BambaConfig) -> None:
        c, bias, rotary = config, config.attention_bias, RotaryEmbedding(*rotary_arguments(config))

        def norm() -> RMSNorm:
            return RMSNorm(c.hidden_size, c.rms_norm_eps)

        def block(layer: int) -> PreNormBlock:
            mlp = GatedMLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
            if c.is_mamba(layer):
                return MambaBlock(norm(), mamba(c), norm(), mlp)
            attention = Attention(*heads(c), rotary, qkv_bias=bias, output_bias=bias)
            return PreNormBlock(norm(), attention, norm(), mlp)

        embedding = Embedding(c.vocab_size, c.hidden_size)
        super().__init__(config, Decoder(embedding, map(block, range(c.num_hidden_layers)), norm()))
