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

from ligerzoo.layers import Attention, Decoder, Embedding, RMSNorm, RotaryEmbedding
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import DecoderConfig, heads, rotary_arguments
from ligerzoo.models.llama import llama_decoder
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
        c, rotary = config, RotaryEmbedding(*rotary_arguments(config))
        super().__init__(config, qwen3_decoder(c, lambda layer: rotary, window=c.window, bias=c.attention_bias))


def qwen3_decoder(
    config: DecoderConfig,
    rotary: Callable[[int], RotaryEmbedding],
    mlp: Callable[[int], nn.Module] | None = None,
    window: Callable[[int], int | None] = lambda layer: None,
    *,
    bias: bool = False,
) -> Decoder:
    """Builds the Qwen3 decoder.

    Args:
        config: config of the architecture.
        rotary: returns the rotary embedding of the block with this index.
        mlp: builds the MLP or MoE layer of the block with this index; None for gated MLPs.
        window: returns the sliding window of the block with this index; None for full attention.
        bias: add biases to the query, key, value and output projections.
    """
    c = config

    def norm() -> RMSNorm:
        return RMSNorm(c.head_size, c.rms_norm_eps)

    def attention(layer: int) -> Attention:
        return Attention(
            *heads(c),
            rotary(layer),
            q_norm=norm(),
            k_norm=norm(),
            window=window(layer),
            qkv_bias=bias,
            output_bias=bias,
        )

    return llama_decoder(c, attention, mlp, Embedding(c.vocab_size, c.hidden_size))
