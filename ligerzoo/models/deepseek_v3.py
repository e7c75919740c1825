"""DeepSeek-V3 and R1, Moonlight, and Kimi-K2 (DeepSeek-AI 2024).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += moe(norm(x)) + shared experts(norm(x)) ] -> norm -> head

Distinctive: latent attention, sigmoid router with balancing bias and groups, shared experts.

Keys and values are projections of one latent vector per token, see `ligerzoo.layers.LatentAttention`. The first layers
use a dense MLP. YaRN also scales the scores.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ligerzoo.errors import ConfigError
from ligerzoo.layers import Embedding, LatentAttention, RotaryEmbedding
from ligerzoo.layers.rope_scaling import yarn_score_factor
from ligerzoo.models.config import rotary_arguments
from ligerzoo.models.llama import llama_decoder
from ligerzoo.models.moe import DeepSeekMoECausalLM, DeepSeekMoEConfig


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(DeepSeekMoEConfig):
    """Configuration of DeepSeek-V3. Defaults: those of transformers' DeepseekV3Config.

    Attributes:
        kv_lora_rank: features of a token's latent vector.
        q_lora_rank: features between the two projections to queries; None for one projection.
        qk_nope_head_dim: features of a head's query and key that are not rotated.
        qk_rope_head_dim: rotated features of a head's query, and of the key that all heads share.
        v_head_dim: features of a head's value.
        rope_interleave: rotate features 2i and 2i + 1 as a pair, instead of i and i + R/2.
        attention_bias: add biases to the first projections of queries and latent vectors, and to the output projection.
    """

    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    num_hidden_layers: int = 61
    num_attention_heads: int = 128
    num_experts: int = 256
    num_experts_per_tok: int = 8
    routed_scaling_factor: float = 2.5
    n_group: int = 8
    topk_group: int = 4
    first_k_dense_replace: int = field(default=3, metadata={"least": 0})
    max_position_embeddings: int = 4096
    kv_lora_rank: int = 512
    q_lora_rank: int | None = 1536
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_interleave: bool = True
    attention_bias: bool = False

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


class DeepseekV3(DeepSeekMoECausalLM):
    """DeepSeek-V3 with a language-model head."""

    config: DeepseekV3Config

    def __init__(self, config: DeepseekV3Config) -> None:
        c, rotary = config, RotaryEmbedding(*rotary_arguments(config), interleaved=config.rope_interleave)

        def attention(layer: int) -> LatentAttention:
            sizes = c.hidden_size, c.num_attention_heads, c.kv_lora_rank, c.qk_nope_head_dim, c.v_head_dim
            scale = yarn_score_factor(c.rope_scaling) * c.key_size**-0.5
            return LatentAttention(*sizes, rotary, q_rank=c.q_lora_rank, scale=scale, bias=c.attention_bias)

        super().__init__(config, llama_decoder(c, attention, c.feed_forward, Embedding(c.vocab_size, c.hidden_size)))
