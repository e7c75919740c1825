"""DeepSeek-V2, DeepSeek-V2-Lite and DeepSeek-Coder-V2 (DeepSeek-AI 2024).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm -> head
    mlp of later layers: experts(x) + shared experts(x)

Distinctive: latent attention as in DeepSeek-V3, and softmax routers limited to the best groups of experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ligerzoo.layers import Embedding, GroupedRouter
from ligerzoo.models.config import refuse_unless
from ligerzoo.models.latent import LatentConfig, latent_attention
from ligerzoo.models.llama import llama_decoder
from ligerzoo.models.moe import DeepSeekMoECausalLM, DeepSeekMoEConfig


@dataclass(frozen=True, kw_only=True)
class DeepseekV2Config(DeepSeekMoEConfig, LatentConfig):
    """Configuration of DeepSeek-V2. Defaults: those of transformers' DeepseekV2Config, and six experts per token.

    Attributes:
        norm_topk_prob: must be false.
        rope_interleave: must be true.
    """

    vocab_size: int = 102400
    moe_intermediate_size: int = 1407
    num_experts: int = 64
    num_experts_per_tok: int = 6
    n_shared_experts: int = 2
    norm_topk_prob: bool = False
    first_k_dense_replace: int = field(default=0, metadata={"least": 0})

    def validate(self) -> None:
        super().validate()
        refuse_unless(not self.norm_topk_prob, "norm_topk_prob", True, "false", "not supported")
        refuse_unless(self.rope_interleave, "rope_interleave", False, "true", "not supported")

    def router(self) -> GroupedRouter:
        """Returns the router of an MoE layer."""
        return GroupedRouter(
            self.hidden_size,
            self.num_experts,
            self.num_experts_per_tok,
            num_groups=self.n_group,
            num_selected_groups=self.topk_group,
            scale=self.routed_scaling_factor,
        )


class DeepseekV2(DeepSeekMoECausalLM):
    """DeepSeek-V2 with a language-model head."""

    config: DeepseekV2Config

    def __init__(self, config: DeepseekV2Config) -> None:
        c, embedding = config, Embedding(config.vocab_size, config.hidden_size)
        super().__init__(config, llama_decoder(c, latent_attention(c, in_fp32=True), c.feed_forward, embedding))
