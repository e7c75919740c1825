"""Granite 3, dense models (Granite Team, IBM 2024, "Granite 3.0 Language Models").

    tokens -> embedding * e -> L x [ x += r * attention(norm(x));  x += r * mlp(norm(x)) ] -> norm -> head / l

Distinctive: Llama with four muP multipliers: embeddings, attention scores, residual branches and logits.

The multipliers follow muP (Yang et al. 2022): `e` multiplies the embeddings, `r` multiplies what each branch adds to
the residual stream, `l` divides the logits, and one scales the attention scores in place of 1 / sqrt(head_dim).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from ligerzoo.layers import (
    Attention,
    Decoder,
    Embedding,
    GatedMLP,
    LMHead,
    RotaryEmbedding,
    ScaledPreNormBlock,
)
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import DecoderConfig, check_positive, heads, rotary_arguments
from ligerzoo.models.llama import LlamaConfig, llama_decoder


@dataclass(frozen=True, kw_only=True)
class MultiplierConfig(DecoderConfig):
    """Configuration of a decoder with muP multipliers.

    Attributes:
        attention_bias: add biases to the query, key, value and output projections.
        embedding_multiplier: factor of the embeddings.
        attention_multiplier: factor of the attention scores, in place of 1 / sqrt(head_dim).
        residual_multiplier: factor of the output of each attention and MLP branch.
        logits_scaling: divisor of the logits; must be positive.
    """

    attention_bias: bool = False
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    def validate(self) -> None:
        super().validate()
        check_positive(self, "logits_scaling", "attention_multiplier")


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(LlamaConfig, MultiplierConfig):
    """Configuration of Granite. Defaults: those of Llama, and 1 for every multiplier."""


class Granite(CausalLM):
    """Granite with a language-model head."""

    config: GraniteConfig

    def __init__(self, config: GraniteConfig) -> None:
        c, rotary = config, RotaryEmbedding(*rotary_arguments(config))

        def attention(layer: int) -> Attention:
            return Attention(
                *heads(c), rotary, scale=c.attention_multiplier, qkv_bias=c.attention_bias, output_bias=c.attention_bias
            )

        def mlp(layer: int) -> GatedMLP:
            return GatedMLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)

        super().__init__(config, *granite_parts(c, attention, mlp))


def granite_parts(
    config: MultiplierConfig,
    attention: Callable[[int], nn.Module],
    mlp: Callable[[int], nn.Module],
    shared_mlp: Callable[[], nn.Module | None] = lambda: None,
) -> tuple[Decoder, LMHead]:
    """Builds a decoder and a head with muP multipliers.

    Args:
        config: sizes and multipliers.
        attention: builds the attention of the block with this index, which scales its scores.
        mlp: builds the MLP or MoE layer of the block with this index.
        shared_mlp: builds the `shared_mlp` of a block.
    """
    c, embedding = config, Embedding(config.vocab_size, config.hidden_size)

    def block(*parts: nn.Module) -> ScaledPreNormBlock:
        return ScaledPreNormBlock(c.residual_multiplier, *parts, shared_mlp=shared_mlp())

    decoder = llama_decoder(c, attention, mlp, embedding, block=block, input_scale=c.embedding_multiplier)
    return decoder, LMHead(c.hidden_size, c.vocab_size, logit_scale=1 / c.logits_scaling)
