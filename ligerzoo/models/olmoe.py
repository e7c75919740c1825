"""OLMoE-1B-7B (Muennighoff et al. 2024, "OLMoE: Open Mixture-of-Experts Language Models").

    tokens -> embedding -> L x [ x += attention(norm(x));  x += moe(norm(x)) ] -> norm -> head

Distinctive: many small experts, eight per token, and QK-norm over all heads together.

Queries and keys are normalized before rotation, all heads of a token as one vector. The router's softmax runs over all
experts, so the weights of the selected ones do not add up to one.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.layers import AllHeadsRMSNorm, Attention, Embedding, Experts, MoE, RotaryEmbedding, Router
from ligerzoo.models.config import heads, rotary_arguments
from ligerzoo.models.llama import llama_decoder
from ligerzoo.models.moe import MoECausalLM, MoEConfig


@dataclass(frozen=True, kw_only=True)
class OlmoeConfig(MoEConfig):
    """Configuration of OLMoE. Defaults: those of transformers' OlmoeConfig, OLMoE-1B-7B.

    Attributes:
        intermediate_size: intermediate features of each expert.
        attention_bias: add biases to the query, key, value and output projections.
        norm_topk_prob: divide a token's expert weights by their sum, so that they add up to one.
    """

    vocab_size: int = 50304
    hidden_size: int = 2048
    intermediate_size: int = 2048
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    num_experts: int = 64
    num_experts_per_tok: int = 8
    router_aux_loss_coef: float = 0.01
    attention_bias: bool = False
    norm_topk_prob: bool = False


class Olmoe(MoECausalLM):
    """OLMoE with a language-model head."""

    config: OlmoeConfig

    def __init__(self, config: OlmoeConfig) -> None:
        c, rotary = config, RotaryEmbedding(*rotary_arguments(config))

        def norm_of(heads: int) -> AllHeadsRMSNorm:
            return AllHeadsRMSNorm(heads * c.head_size, c.rms_norm_eps)

        def attention(layer: int) -> Attention:
            return Attention(
                *heads(c),
                rotary,
                q_norm=norm_of(c.num_attention_heads),
                k_norm=norm_of(c.kv_heads),
                qkv_bias=c.attention_bias,
                output_bias=c.attention_bias,
            )

        def mixture(layer: int) -> MoE:
            router = Router(c.hidden_size, c.num_experts, c.num_experts_per_tok, renormalize=c.norm_topk_prob)
            return MoE(router, Experts(c.hidden_size, c.intermediate_size, c.num_experts))

        super().__init__(config, llama_decoder(c, attention, mixture, Embedding(c.vocab_size, c.hidden_size)))
