"""OLMo Hybrid, 7B (OLMo Team 2026).

    tokens -> embedding -> L x [ x += linear(norm(x));  x += mlp(norm(x))  or
                                 x += norm(attention(x));  x += norm(mlp(x)) ] -> norm -> head

Distinctive: OLMo 2 with pre-norm gated delta rule layers, three of four; negative eigenvalues.

Writing strengths up to 2 let the state change its sign along a key. Some checkpoints have no positions (NoPE).
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.layers import (
    Decoder,
    Embedding,
    GatedMLP,
    LinearAttentionBlock,
    PostNormBlock,
    RotaryEmbedding,
    SeparateDeltaNet,
)
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import refuse_unless, rotary_arguments
from ligerzoo.models.hybrid import LinearAttentionConfig
from ligerzoo.models.olmo2 import Olmo2Config, olmo2_block, olmo_norm


@dataclass(frozen=True, kw_only=True)
class OlmoHybridConfig(LinearAttentionConfig, Olmo2Config):
    """Configuration of OLMo Hybrid. Defaults: those of transformers' OlmoHybridConfig, close to Olmo-Hybrid-7B.

    Attributes:
        use_rope: rotate queries and keys of full attention; false for no positions (NoPE).
        layer_types: None: every fourth layer uses full attention, or the last one of fewer than four.
        linear_num_key_heads: query and key heads of linear attention; None for `num_attention_heads`.
        linear_num_value_heads: value heads, a multiple of the key heads; None likewise.
        linear_key_head_dim: features of a query or key head of linear attention; None for three quarters of
            `hidden_size`, divided by the key heads.
        linear_value_head_dim: features of a value head of linear attention; None for twice those of a key head.
        linear_conv_kernel_dim: inputs that an output of the convolution depends on.
        linear_allow_neg_eigval: writing strengths are up to 2 instead of 1.
    """

    vocab_size: int = 100352
    hidden_size: int = 3840
    num_attention_heads: int = 30
    max_position_embeddings: int = 65536
    rms_norm_eps: float = 1e-6
    use_rope: bool = True
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_conv_kernel_dim: int = 4
    linear_allow_neg_eigval: bool = True

    def validate(self) -> None:
        super().validate()
        keys, values = self.linear_heads
        refuse_unless(values % keys == 0, "linear_num_value_heads", values, f"a multiple of the {keys} key heads")
        size, expected = self.linear_key_head_dim, "a number, or fewer key heads"
        refuse_unless(self.linear_sizes[0] > 0, "linear_key_head_dim", size, expected, "no features for a key head")
        for name in ("rope_theta", "rope_scaling"):
            value, default = getattr(self, name), getattr(type(self), name)
            expected = f"{default} with use_rope=False"
            refuse_unless(self.use_rope or value == default, name, value, expected, "no rotary embedding")

    def alternates(self, layer: int) -> bool:
        return layer % 4 != 3 and (self.num_hidden_layers > 3 or layer + 1 < self.num_hidden_layers)

    @property
    def linear_heads(self) -> tuple[int, int]:
        """Key heads and value heads of linear attention."""
        heads = self.num_attention_heads
        return self.linear_num_key_heads or heads, self.linear_num_value_heads or heads

    @property
    def linear_sizes(self) -> tuple[int, int]:
        """Features of a key head and of a value head of linear attention."""
        keys = self.linear_key_head_dim or int(0.75 * self.hidden_size / self.linear_heads[0])
        return keys, self.linear_value_head_dim or 2 * keys


class OlmoHybrid(CausalLM):
    """OLMo Hybrid with a language-model head."""

    config: OlmoHybridConfig

    def __init__(self, config: OlmoHybridConfig) -> None:
        c, rotary = config, RotaryEmbedding(*rotary_arguments(config), in_fp32=True) if config.use_rope else None

        def block(layer: int) -> LinearAttentionBlock | PostNormBlock:
            if not c.is_linear(layer):
                return olmo2_block(c, rotary)
            sizes, conv = (c.hidden_size, *c.linear_heads, *c.linear_sizes), c.linear_conv_kernel_dim
            strength = 2.0 if c.linear_allow_neg_eigval else 1.0
            mixer = SeparateDeltaNet(*sizes, conv_kernel_size=conv, max_strength=strength, eps=1e-5)
            return LinearAttentionBlock(olmo_norm(c), mixer, olmo_norm(c), GatedMLP(c.hidden_size, c.intermediate_size))

        embedding = Embedding(c.vocab_size, c.hidden_size)
        super().__init__(config, Decoder(embedding, map(block, range(c.num_hidden_layers)), olmo_norm(c)))
