"""OLMo 2 (OLMo Team 2024, "2 OLMo 2 Furious").

    tokens -> embedding -> L x [ x += norm(attention(x));  x += norm(mlp(x)) ] -> norm -> head

Distinctive: post-norm blocks, QK-norm over all heads together, and fp32 rotary embedding.

Each branch is normalized after it, not before. Queries and keys are normalized before rotation, all heads of a token as
one vector. RMSNorm rounds once, after scaling. The rotation is computed in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ligerzoo.layers import (
    AllHeadsRMSNorm,
    Attention,
    Decoder,
    Embedding,
    GatedMLP,
    PostNormBlock,
    RMSNorm,
    RotaryEmbedding,
)
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import DecoderConfig, heads, rotary_arguments


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(DecoderConfig):
    """Configuration of OLMo 2. Defaults: those of transformers' Olmo2Config, close to OLMo-2-7B.

    Attributes:
        attention_bias: add biases to the query, key, value and output projections.
    """

    vocab_size: int = 50304
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False


class Olmo2(CausalLM):
    """OLMo 2 with a language-model head."""

    config: Olmo2Config

    def __init__(self, config: Olmo2Config) -> None:
        c = config
        rotary = RotaryEmbedding(*rotary_arguments(c), in_fp32=True)
        decoder = olmo2_decoder(c, [rotary] * c.num_hidden_layers, [None] * c.num_hidden_layers)
        super().__init__(config, decoder)


def olmo2_decoder(config: Olmo2Config, rotary: Sequence[RotaryEmbedding], windows: Sequence[int | None]) -> Decoder:
    """Builds the OLMo 2 decoder with the given rotary embedding and sliding window of each layer."""
    c = config
    blocks = [olmo2_block(c, rotary[layer], windows[layer]) for layer in range(c.num_hidden_layers)]
    return Decoder(Embedding(c.vocab_size, c.hidden_size), blocks, olmo_norm(c))


def olmo2_block(config: Olmo2Config, rotary: RotaryEmbedding | None, window: int | None = None) -> PostNormBlock:
    """Builds a block of OLMo 2."""
    c = config

    def norm_of(heads: int) -> AllHeadsRMSNorm:
        return AllHeadsRMSNorm(heads * c.head_size, c.rms_norm_eps, round_before_scale=False)

    attention = Attention(
        *heads(c),
        rotary,
        window=window,
        q_norm=norm_of(c.num_attention_heads),
        k_norm=norm_of(c.kv_heads),
        qkv_bias=c.attention_bias,
        output_bias=c.attention_bias,
    )
    return PostNormBlock(attention, olmo_norm(c), GatedMLP(c.hidden_size, c.intermediate_size), olmo_norm(c))


def olmo_norm(config: Olmo2Config) -> RMSNorm:
    """Builds a norm of hidden states, which rounds once."""
    return RMSNorm(config.hidden_size, config.rms_norm_eps, round_before_scale=False)
