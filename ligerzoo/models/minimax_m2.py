"""MiniMax-M2 (MiniMax 2025).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += moe(norm(x)) ] -> norm -> head

Distinctive: Mixtral with a sigmoid router, partial rotary embedding, and QK norm over all heads together.

The first half of each head's features is rotated, in the pairs (i, i + R/2). The router has a bias for balanced load,
which only selects experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.layers import AllHeadsRMSNorm, Attention, Embedding, Experts, MoE, RotaryEmbedding, SigmoidRouter
from ligerzoo.models.config import PartialRotaryConfig, heads, rotary_arguments
from ligerzoo.models.llama import llama_decoder
from ligerzoo.models.mixtral import MixtralConfig
from ligerzoo.models.moe import MoECausalLM


@dataclass(frozen=True, kw_only=True)
class MiniMaxM2Config(MixtralConfig, PartialRotaryConfig):
    """Configuration of MiniMax-M2. Defaults: those of transformers' MiniMaxM2Config."""

    vocab_size: int = 200064
    hidden_size: int = 3072
    intermediate_size: int = 1536
    num_hidden_layers: int = 62
    num_attention_heads: int = 48
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    num_experts: int = 256
    num_experts_per_tok: int = 8
    max_position_embeddings: int = 196608
    rms_norm_eps: float = 1e-6
    rope_theta: float = 5e6


class MiniMaxM2(MoECausalLM):
    """MiniMax-M2 with a language-model head."""

    config: MiniMaxM2Config

    def __init__(self, config: MiniMaxM2Config) -> None:
        c, rotary = config, RotaryEmbedding(*rotary_arguments(config))

        def norm(num_heads: int) -> AllHeadsRMSNorm:
            return AllHeadsRMSNorm(num_heads * c.head_size, c.rms_norm_eps)

        def attention(layer: int) -> Attention:
            return Attention(*heads(c), rotary, q_norm=norm(c.num_attention_heads), k_norm=norm(c.kv_heads))

        def mixture(layer: int) -> MoE:
            router = SigmoidRouter(c.hidden_size, c.num_experts, c.num_experts_per_tok, renormalize=True, in_fp32=False)
            experts = Experts(c.hidden_size, c.intermediate_size, c.num_experts)
            return MoE(router, experts, jitter_noise=c.router_jitter_noise)

        super().__init__(config, llama_decoder(c, attention, mixture, Embedding(c.vocab_size, c.hidden_size)))
