"""Llama 2, 3, 3.1, 3.2 and models with the same architecture (Touvron et al. 2023; Grattafiori et al. 2024).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: pre-norm blocks with RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases by default.

Llama 3.1 and 3.2 rescale the rotary frequencies for long contexts. The config can add biases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from ligerzoo.layers import Attention, Decoder, Embedding, GatedMLP, PreNormBlock, RMSNorm, RotaryEmbedding
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import DecoderConfig, heads, rotary_arguments


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

        def mlp(layer: int) -> GatedMLP:
            return GatedMLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)

        super().__init__(config, llama_decoder(c, llama_attention(c, c.attention_bias), mlp))


def llama_attention(config: LlamaConfig, output_bias: bool) -> Callable[[int], Attention]:
    """Returns a function that builds the attention of a block; all blocks share the rotary embedding."""
    c, rotary = config, RotaryEmbedding(*rotary_arguments(config))

    def attention(layer: int) -> Attention:
        return Attention(*heads(c), rotary, qkv_bias=c.attention_bias, output_bias=output_bias)

    return attention


def llama_decoder(
    config: DecoderConfig,
    attention: Callable[[int], nn.Module],
    mlp: Callable[[int], nn.Module] | None = None,
    embedding: nn.Module | None = None,
    *,
    norm: Callable[[], nn.Module] | None = None,
    block: Callable[..., nn.Module] = PreNormBlock,
    input_scale: float = 1.0,
    positions_skip_padding: bool = False,
    max_valid_cache_length: int | None = None,
) -> Decoder:
    """Builds a decoder of pre-norm blocks.

    Args:
        config: sizes.
        attention: builds the attention of the block with this index.
        mlp: builds the MLP of the block with this index; None for gated ones.
        embedding: the embedding; None for one that is initialized after the blocks.
        norm: builds a norm; None for RMSNorm.
        block: builds a block of the parts of `PreNormBlock`.
        input_scale: see `Decoder`, as for `positions_skip_padding` and `max_valid_cache_length`.
    """
    c = config
    mlp = mlp or (lambda layer: GatedMLP(c.hidden_size, c.intermediate_size))
    norm = norm or (lambda: RMSNorm(c.hidden_size, c.rms_norm_eps))
    layers = [block(norm(), attention(i), norm(), mlp(i)) for i in range(c.num_hidden_layers)]
    return Decoder(
        embedding or Embedding(c.vocab_size, c.hidden_size),
        layers,
        norm(),
        input_scale=input_scale,
        positions_skip_padding=positions_skip_padding,
        max_valid_cache_length=max_valid_cache_length,
    )
