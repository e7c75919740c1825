"""Qwen1.5-MoE-A2.7B and Qwen2-57B-A14B (Qwen Team 2024; Yang et al. 2024).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += moe(norm(x)) + gated shared expert(norm(x)) ]
           -> norm -> head

Distinctive: Qwen2 with MoE layers plus a gated shared expert; expert weights are not renormalized.

Every token also goes through one shared expert, scaled by a sigmoid gate. The weights of the selected experts do not
add up to one. The query, key and value projections have biases. Some layers may use a dense MLP instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ligerzoo.layers import Attention, Embedding, GatedMLP, RotaryEmbedding, SharedExpertMoE
from ligerzoo.models.config import WindowedConfig, heads, rotary_arguments
from ligerzoo.models.llama import llama_decoder
from ligerzoo.models.moe import MoECausalLM, SparseStepMoEConfig, shared_expert_moe


@dataclass(frozen=True, kw_only=True)
class Qwen2MoeConfig(SparseStepMoEConfig, WindowedConfig):
    """Configuration of Qwen2-MoE. Defaults: Qwen1.5-MoE-A2.7B.

    Attributes:
        shared_expert_intermediate_size: intermediate features of the shared expert.
        qkv_bias: add biases to the query, key and value projections.
        max_window_layers: with a `sliding_window`, every other layer below this index uses it, starting with layer 0,
            unless `layer_types` is set.
    """

    intermediate_size: int = 5632
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 16
    moe_intermediate_size: int = 1408
    shared_expert_intermediate_size: int = 5632
    num_experts: int = 60
    num_experts_per_tok: int = 4
    qkv_bias: bool = True
    max_window_layers: int = field(default=28, metadata={"least": 0})

    def slides(self, layer: int) -> bool:
        return layer % 2 == 0 and layer < self.max_window_layers


class Qwen2Moe(MoECausalLM):
    """Qwen2-MoE with a language-model head."""

    config: Qwen2MoeConfig

    def __init__(self, config: Qwen2MoeConfig) -> None:
        c, rotary = config, RotaryEmbedding(*rotary_arguments(config))

        def attention(layer: int) -> Attention:
            return Attention(*heads(c), rotary, window=c.window(layer), qkv_bias=c.qkv_bias)

        def mlp(layer: int) -> GatedMLP | SharedExpertMoE:
            if not c.has_mixture(layer):
                return GatedMLP(c.hidden_size, c.intermediate_size)
            return shared_expert_moe(
                c, c.moe_intermediate_size, c.shared_expert_intermediate_size, renormalize=c.norm_topk_prob
            )

        super().__init__(config, llama_decoder(c, attention, mlp, Embedding(c.vocab_size, c.hidden_size)))
