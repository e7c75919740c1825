"""Qwen3, dense models (Yang et al. 2025).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head
    attention: queries and keys of each head -> norm -> rotary embedding -> scores

Distinctive: Qwen2 with QK-norm instead of biases, and a `head_dim` independent of `hidden_size`.

QK-norm is an RMSNorm over the features of each head before rotation, with one weight for all heads (Dehghani et al.
2023, section 2). All heads together may be wider or narrower than `hidden_size`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from ligerzoo.layers import Attention, Decoder, Embedding, GatedMLP, LMHead, PreNormBlock, RMSNorm, RotaryEmbedding
from ligerzoo.models.causal_lm import CausalLM, FactoryKwargs
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

    def __init__(self, config: Qwen3Config, **factory_kwargs: Unpack[FactoryKwargs]) -> None:
        c = config
        rotary = RotaryEmbedding(c.rotary_size, c.rope_theta, c.rope_scaling, c.max_position_embeddings)

        def norm(size: int = c.hidden_size) -> RMSNorm:
            return RMSNorm(size, c.rms_norm_eps, **factory_kwargs)

        def block(layer: int) -> PreNormBlock:
            attention = Attention(
                c.hidden_size, c.num_attention_heads, c.kv_heads, c.head_size, rotary,
                q_norm=norm(c.head_size), k_norm=norm(c.head_size), window=c.window(layer),
                qkv_bias=c.attention_bias, output_bias=c.attention_bias, **factory_kwargs,
            )  # fmt: skip
            return PreNormBlock(
                norm(), attention, norm(), GatedMLP(c.hidden_size, c.intermediate_size, **factory_kwargs)
            )

        embedding = Embedding(c.vocab_size, c.hidden_size, **factory_kwargs)
        layers = [block(layer) for layer in range(c.num_hidden_layers)]
        super().__init__(
            config, Decoder(embedding, layers, norm()), LMHead(c.hidden_size, c.vocab_size, **factory_kwargs)
        )
