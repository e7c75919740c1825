"""Qwen3, dense models (Yang et al. 2025).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head
    attention: queries and keys of each head -> norm -> rotary embedding -> scores

Distinctive: Qwen2 with QK-norm instead of biases, and a `head_dim` independent of `hidden_size`.

QK-norm is an RMSNorm over the features of each head before rotation, with one weight for all heads (Dehghani et al.
2023, section 2). All heads together may be wider or narrower than `hidden_size`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from ligerzoo.layers import Attention, Decoder, Embedding, GatedMLP, LMHead, PreNormBlock, RMSNorm, RotaryEmbedding
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import DecoderConfig
from ligerzoo.models.qwen2 import Qwen2Config


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(Qwen2Config):
    """Configuration of Qwen3. Defaults: those of transformers' Qwen3Config.

    Attributes:
        attention_bias: add biases to the query, key, value and output projections.
    """

    head_dim: int | None = 128
    attention_bias: bool = False


class Qwen3(CausalLM):
    """Qwen3 with a language-model head."""

    config: Qwen3Config

    def __init__(self, config: Qwen3Config) -> None:
        c = config
        rotary = RotaryEmbedding(c.rotary_size, c.rope_theta, c.rope_scaling, c.max_position_embeddings)

        def mlp(layer: int) -> GatedMLP:
            return GatedMLP(c.hidden_size, c.intermediate_size)

        decoder = qwen3_decoder(c, rotary, mlp, c.window, bias=c.attention_bias)
        super().__init__(config, decoder, LMHead(c.hidden_size, c.vocab_size))


def qwen3_decoder(
    config: DecoderConfig,
    rotary: RotaryEmbedding,
    mlp: Callable[[int], nn.Module],
    window: Callable[[int], int | None] = lambda layer: None,
    *,
    bias: bool = False,
) -> Decoder:
    """Builds the Qwen3 decoder.

    Args:
        config: config of the architecture.
        rotary: rotary embedding of queries and keys.
        mlp: builds the MLP or MoE layer of the block with this index.
        window: returns the sliding window of the block with this index; None for full attention.
        bias: add biases to the query, key, value and output projections.
    """
    c = config

    def norm(size: int = c.hidden_size) -> RMSNorm:
        return RMSNorm(size, c.rms_norm_eps)

    def block(layer: int) -> PreNormBlock:
        attention = Attention(
            c.hidden_size, c.num_attention_heads, c.kv_heads, c.head_size, rotary,
            q_norm=norm(c.head_size), k_norm=norm(c.head_size), window=window(layer),
            qkv_bias=bias, output_bias=bias,
        )  # fmt: skip
        return PreNormBlock(norm(), attention, norm(), mlp(layer))

    embedding = Embedding(c.vocab_size, c.hidden_size)
    return Decoder(embedding, [block(layer) for layer in range(c.num_hidden_layers)], norm())
