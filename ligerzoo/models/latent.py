"""Shared by decoders with latent attention (DeepSeek-AI 2024): configuration, and the attention of a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from ligerzoo.errors import ConfigError
from ligerzoo.layers import LatentAttention, RotaryEmbedding
from ligerzoo.layers.rope_scaling import yarn_score_factor
from ligerzoo.models.config import DecoderConfig, rotary_arguments


@dataclass(frozen=True, kw_only=True)
class LatentConfig(DecoderConfig):
    """Configuration of a decoder with latent attention.

    Attributes:
        kv_lora_rank: features of a token's latent vector.
        q_lora_rank: features between the two projections to queries; None for one projection.
        qk_nope_head_dim: features of a head's query and key that are not rotated.
        qk_rope_head_dim: rotated features of a head's query, and of the key that all heads share.
        v_head_dim: features of a head's value.
        rope_interleave: rotate features 2i and 2i + 1 as a pair, instead of i and i + R/2.
        attention_bias: add biases to the first projections of queries and latent vectors, and to the output projection.
    """

    kv_lora_rank: int = 512
    q_lora_rank: int | None = 1536
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_interleave: bool = True
    attention_bias: bool = False

    splits_hidden_size: ClassVar[bool] = False

    def validate(self) -> None:
        super().validate()
        for name, only in (("num_key_value_heads", self.num_attention_heads), ("head_dim", self.qk_rope_head_dim)):
            if getattr(self, name) not in (None, only):
                raise ConfigError("not a size of latent attention", where=name, got=getattr(self, name), expected=only)

    @property
    def head_size(self) -> int:
        """Rotated features per head, which config.json calls `head_dim`."""
        return self.qk_rope_head_dim

    @property
    def key_size(self) -> int:
        """Features of a head's key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def value_size(self) -> int:
        """Features of a head's value."""
        return self.v_head_dim


def latent_attention(config: LatentConfig, *, in_fp32: bool = False) -> Callable[[int], LatentAttention]:
    """Returns a function that builds the attention of a block. YaRN scales the scores too.

    Args:
        config: sizes.
        in_fp32: rotate in fp32, see `RotaryEmbedding`.
    """
    c = config
    rotary = RotaryEmbedding(*rotary_arguments(c), interleaved=c.rope_interleave, in_fp32=in_fp32)

    def attention(layer: int) -> LatentAttention:
        sizes = c.hidden_size, c.num_attention_heads, c.kv_lora_rank, c.qk_nope_head_dim, c.v_head_dim
        scale = yarn_score_factor(c.rope_scaling) * c.key_size**-0.5
        return LatentAttention(*sizes, rotary, q_rank=c.q_lora_rank, scale=scale, bias=c.attention_bias)

    return attention
