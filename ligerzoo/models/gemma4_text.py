"""Gemma 4, text only, dense and MoE, such as Gemma 4 E4B, 31B and 26B-A4B (Gemma Team 2026).

    tokens -> embedding * sqrt(H)
           -> L x [ x += norm(attention(norm(x)));  x += norm(norm(mlp(norm(x))) + norm(experts(norm(x))))
                    x += norm(project(gelu(gate(x)) * per-layer embedding));  x *= scalar ] -> norm -> head -> softcap

Distinctive: Gemma 3 with larger heads in full attention, shared keys and values, per-layer embeddings.

Full-attention layers rotate a quarter of the features of heads twice as large, and may use keys as values. RMSNorm
normalizes queries, keys and values per head, and scores have no scale. The last layers attend to the keys and values
of the last layer of their kind before them. A mixture of experts, if any, is parallel to the MLP of every layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.layers import (
    Attention,
    Decoder,
    Experts,
    GatedMLP,
    LayerInput,
    Linear,
    LMHead,
    ParallelMixture,
    PerLayerDecoder,
    RMSNorm,
    RotaryEmbedding,
    ScaledEmbedding,
    ScaledRouter,
    ScaledSandwichBlock,
    SharedKeysAttention,
    SharingAttention,
    TiedValueAttention,
)
from ligerzoo.models.config import rotary_arguments
from ligerzoo.models.gemma4_config import Gemma4DecoderConfig
from ligerzoo.models.moe import DeepSeekMoECausalLM


@dataclass(frozen=True, kw_only=True)
class Gemma4TextConfig(Gemma4DecoderConfig):
    """Configuration of Gemma 4, text only."""


class Gemma4Text(DeepSeekMoECausalLM):
    """Gemma 4 with a language-model head, text only."""

    config: Gemma4TextConfig

    def __init__(self, config: Gemma4TextConfig) -> None:
        c = config
        head = LMHead(c.hidden_size, c.vocab_size, softcap=c.final_logit_softcapping)
        super().__init__(config, gemma4_decoder(c), head)


def gemma4_decoder(config: Gemma4DecoderConfig) -> Decoder:
    """Builds the decoder that Gemma 4 uses with and without images."""
    c, size, features = config, config.hidden_size, config.hidden_size_per_layer_input
    rotary, local_rotary = RotaryEmbedding(*rotary_arguments(c)), RotaryEmbedding(c.head_size, c.rope_local_base_freq)

    def norm(size: int = size, *, affine: bool = True) -> RMSNorm:
        return RMSNorm(size, c.rms_norm_eps, round_before_scale=False, elementwise_affine=affine)

    def attention(i: int) -> Attention:
        slides, shares = c.is_sliding(i), c.shares_keys(i)
        kind, dim = ("sliding", c.head_size) if slides else ("full", c.global_head_dim)
        with_values = TiedValueAttention if c.attention_k_eq_v and not slides else SharingAttention
        return (SharedKeysAttention if shares else with_values)(
            size,
            c.num_attention_heads,
            c.kv_heads if slides else c.num_global_key_value_heads or c.kv_heads,
            dim,
            local_rotary if slides else rotary,
            q_norm=norm(dim),
            k_norm=None if shares else norm(dim),
            v_norm=None if shares else norm(dim, affine=False),
            shared_as=kind if shares or c.is_source(i) else None,
            window=c.window(i),
            scale=1.0,
            is_causal=c.is_causal,
            qkv_bias=c.attention_bias,
            output_bias=c.attention_bias,
        )

    def block(i: int) -> ScaledSandwichBlock:
        factor = 2 if c.use_double_wide_mlp and c.shares_keys(i) else 1
        mlp = GatedMLP(size, factor * c.intermediate_size, activation="gelu_tanh")
        layer_input = mixture = None
        if features:
            gate, projection = Linear(size, features, bias=False), Linear(features, size, bias=False)
            layer_input = LayerInput(i, gate, projection, norm())
        if c.num_experts and c.num_experts_per_tok and c.moe_intermediate_size and c.enable_moe_block:
            router = ScaledRouter(size, c.num_experts, c.num_experts_per_tok, c.rms_norm_eps)
            experts = Experts(size, c.moe_intermediate_size, c.num_experts, activation="gelu_tanh")
            mixture = ParallelMixture(router, experts, norm(), norm(), norm())
        parts = norm(), attention(i), norm(), norm(), mlp, norm()
        return ScaledSandwichBlock(*parts, layer_input=layer_input, mixture=mixture)

    embedding = ScaledEmbedding(c.vocab_size, size, size**0.5)
    layers = [block(i) for i in range(c.num_hidden_layers)]
    if not features:
        return Decoder(embedding, layers, norm())
    entries = c.vocab_size_per_layer_input
    return PerLayerDecoder(embedding, layers, norm(), num_embeddings=entries, features=features, eps=c.rms_norm_eps)
