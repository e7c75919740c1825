"""DeepSeek-V3 and R1, Moonlight, and Kimi-K2 (DeepSeek-AI 2024).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += moe(norm(x)) + shared experts(norm(x)) ] -> norm -> head

Distinctive: latent attention, sigmoid router with balancing bias and groups, shared experts.

Keys and values are projections of one latent vector per token, see `ligerzoo.layers.LatentAttention`. The first layers
use a dense MLP. YaRN also scales the scores.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ligerzoo.layers import Embedding
from ligerzoo.models.latent import LatentConfig, latent_attention
from ligerzoo.models.llama import llama_decoder
from ligerzoo.models.moe import DeepSeekMoECausalLM, DeepSeekMoEConfig


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(DeepSeekMoEConfig, LatentConfig):
    """Configuration of DeepSeek-V3. Defaults: those of transformers' DeepseekV3Config."""

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


class DeepseekV3(DeepSeekMoECausalLM):
    """DeepSeek-V3 with a language-model head."""

    config: DeepseekV3Config

    def __init__(self, config: DeepseekV3Config) -> None:
        c, embedding = config, Embedding(config.vocab_size, config.hidden_size)
        super().__init__(config, llama_decoder(c, latent_attention(c), c.feed_forward, embedding))
