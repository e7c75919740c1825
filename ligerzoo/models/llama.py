"""Llama 2, 3, 3.1, 3.2 and models with the same architecture (Touvron et al. 2023; Grattafiori et al. 2024).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: pre-norm blocks with RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases by default.

Llama 3.1 and 3.2 rescale the rotary frequencies for long contexts. The config can add biases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from ligerzoo.layers import Attention, Decoder, Embedding, GatedMLP, LMHead, PreNormBlock, RMSNorm, RotaryEmbedding
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Configuration of Llama. Defaults: Llama-2-7B.

    Attributes:
        attention_bias: add biases to the query, key, value and output projections.
        mlp_bias: add biases to the gate, up and down projections.
    """

    attention_bias: bool = False
    mlp_bias: bool = False


class Llama(CausalLM):
    """Llama with a language-model head."""

    config: LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        c = config

        def mlp() -> GatedMLP:
            return GatedMLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)

        super().__init__(
            config,
            llama_decoder(c, llama_attention(c, c.attention_bias), mlp),
            LMHead(c.hidden_size, c.vocab_size),
        )


def llama_attention(config: LlamaConfig, output_bias: bool) -> Callable[[], Attention]:
    """Returns a function that builds the attention of one block; all blocks share the rotary embedding."""
    c = config
    rotary = RotaryEmbedding(c.rotary_size, c.rope_theta, c.rope_scaling, c.max_position_embeddings)

    def attention() -> Attention:
        return Attention(
            c.hidden_size, c.num_attention_heads, c.kv_heads, c.head_size, rotary,
            qkv_bias=c.attention_bias, output_bias=output_bias,
        )  # fmt: skip

    return attention


def llama_decoder(
    config: DecoderConfig,
    attention: Callable[[], nn.Module],
    mlp: Callable[[], nn.Module],
    *,
    positions_skip_padding: bool = False,
) -> Decoder:
    """Builds a decoder of pre-norm blocks with RMSNorm; `attention` and `mlp` make the layers of each block.

    Args:
        config: sizes.
        attention: builds the attention of one block.
        mlp: builds the MLP of one block.
        positions_skip_padding: see `Decoder`.
    """
    c = config

    def norm() -> RMSNorm:
        return RMSNorm(c.hidden_size, c.rms_norm_eps)

    layers = [PreNormBlock(norm(), attention(), norm(), mlp()) for _ in range(c.num_hidden_layers)]
    embedding = Embedding(c.vocab_size, c.hidden_size)
    return Decoder(embedding, layers, norm(), positions_skip_padding=positions_skip_padding)
