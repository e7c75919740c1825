"""Llama 2, 3, 3.1, 3.2 and the many models built alike (Touvron et al. 2023; Grattafiori et al. 2024).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head

Distinctive: pre-norm blocks with RMSNorm, rotary positions (in Llama 3.1 and 3.2 with frequencies rescaled for long
contexts), queries in groups that share a key and a value, a SwiGLU feed-forward, and no biases unless the config asks
for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ligerzoo.errors import ConfigError
from ligerzoo.layers import Attention, Decoder, GatedMLP, LMHead, PreNormBlock, RMSNorm, RotaryEmbedding
from ligerzoo.layers.rope_scaling import check_rope_scaling
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import check_fields


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The numbers of a Llama, under their names in config.json; defaults are Llama-2-7B's.

    Attributes:
        num_key_value_heads: None means one for each query head.
        head_dim: None means hidden_size / num_attention_heads.
        rope_scaling: `{"rope_type": ..., its parameters}`, see `ligerzoo.layers.RotaryEmbedding`.
        attention_bias: biases on the projections to queries, keys, values and output.
        mlp_bias: biases on the three projections of the feed-forward.
        tie_word_embeddings: the head shares the embedding's weight.
        initializer_range: standard deviation of a new model's matrices.

    Raises:
        ConfigError: naming the field whose value cannot be.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_attention_heads % self.kv_heads:
            raise ConfigError(
                "query heads cannot share key-value heads evenly",
                where="num_key_value_heads",
                got=self.kv_heads,
                expected=f"a divisor of num_attention_heads, {self.num_attention_heads}",
            )
        check_rope_scaling(self.rope_scaling or {}, self.head_size)

    @property
    def kv_heads(self) -> int:
        """The number of key-value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """The size of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


class Llama(CausalLM):
    """Llama with a language-model head.

    Args:
        config: its numbers.
        device: where the weights are made ("meta" makes none).
        dtype: of the weights.
    """

    config: LlamaConfig

    def __init__(
        self, config: LlamaConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        c = config
        make: dict[str, Any] = {"device": device, "dtype": dtype}

        def block() -> PreNormBlock:
            return PreNormBlock(
                RMSNorm(c.hidden_size, c.rms_norm_eps, **make),
                Attention(
                    c.hidden_size, c.num_attention_heads, c.kv_heads, c.head_size,
                    qkv_bias=c.attention_bias, output_bias=c.attention_bias, **make,
                ),
                RMSNorm(c.hidden_size, c.rms_norm_eps, **make),
                GatedMLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias, **make),
            )  # fmt: skip

        decoder = Decoder(
            nn.Embedding(c.vocab_size, c.hidden_size, **make),
            [block() for _ in range(c.num_hidden_layers)],
            RMSNorm(c.hidden_size, c.rms_norm_eps, **make),
            RotaryEmbedding(c.head_size, c.rope_theta, c.rope_scaling, c.max_position_embeddings),
        )
        super().__init__(config, decoder, LMHead(c.hidden_size, c.vocab_size, **make))
