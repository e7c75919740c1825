"""Granite 4, such as Granite 4.0 H Tiny and Small (Granite Team, IBM 2025).

    tokens -> embedding * e -> L x [ x += r * mixer(norm(x));  x += r * moe(norm(x)) ] -> norm -> head / l
    mixer: mamba or attention

Distinctive: Granite with Mamba-2 in most layers, no positions, experts plus a shared expert.

Small models have no routed experts, but an MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ligerzoo.layers import (
    Attention,
    Decoder,
    Embedding,
    Experts,
    GatedMLP,
    LMHead,
    MoE,
    RMSNorm,
    RotaryEmbedding,
    Router,
    ScaledMambaBlock,
    ScaledPreNormBlock,
)
from ligerzoo.models.config import check_layer_types, heads, refuse_unless, rotary_arguments
from ligerzoo.models.granite import MultiplierConfig
from ligerzoo.models.moe import MoECausalLM, MoEConfig
from ligerzoo.models.state_space import MambaConfig, mamba


@dataclass(frozen=True, kw_only=True)
class GraniteMoeHybridConfig(MoEConfig, MambaConfig, MultiplierConfig):
    """Configuration of Granite 4. Defaults: those of transformers' GraniteMoeHybridConfig.

    Attributes:
        num_experts: routed experts per layer; 0 for an MLP, the shared expert, alone.
        intermediate_size: intermediate features of each expert.
        shared_intermediate_size: intermediate features of the shared expert, which processes every token.
        layer_types: "linear_attention" (Mamba-2) or "full_attention" for each layer; None for Mamba-2 in all.
        position_embedding_type: "rope" for rotary positions in attention; "nope" or None for no positions.
    """

    num_experts: int = field(default=8, metadata={"least": 0})
    num_experts_per_tok: int = field(default=2, metadata={"least": 0})
    shared_intermediate_size: int = 1024
    layer_types: Sequence[str] | None = None
    position_embedding_type: Literal["nope", "rope"] | None = None

    def validate(self) -> None:
        super().validate()
        check_layer_types(self, self.mixer_types)
        chosen, what = self.num_experts_per_tok, "no experts per token"
        refuse_unless(chosen > 0 or not self.num_experts, "num_experts_per_tok", chosen, "1 or more", what)
        kind = self.position_embedding_type
        refuse_unless(kind in ("nope", "rope", None), "position_embedding_type", kind, "'nope' or 'rope', or None")

    @property
    def mlp_size(self) -> int:
        """Intermediate features of an MLP."""
        return self.shared_intermediate_size

    def is_mamba(self, layer: int) -> bool:
        return self.layer_types is None or self.layer_types[layer] == "linear_attention"

    def has_mixture(self, layer: int) -> bool:
        """Whether this layer, counted from 0, uses MoE."""
        return self.num_experts > 0


class GraniteMoeHybrid(MoECausalLM):
    """Granite 4 with a language-model head."""

    config: GraniteMoeHybridConfig

    def __init__(self, config: GraniteMoeHybridConfig) -> None:
        c, bias, r = config, config.attention_bias, config.residual_multiplier
        rotary = RotaryEmbedding(*rotary_arguments(c)) if c.position_embedding_type == "rope" else None

        def norm() -> RMSNorm:
            return RMSNorm(c.hidden_size, c.rms_norm_eps)

        def block(layer: int) -> ScaledPreNormBlock:
            mlp: MoE | GatedMLP = GatedMLP(c.hidden_size, c.mlp_size)
            shared = None
            if c.num_experts:
                router = Router(c.hidden_size, c.num_experts, c.num_experts_per_tok, renormalize=True)
                mlp, shared = MoE(router, Experts(c.hidden_size, c.intermediate_size, c.num_experts)), mlp
            if c.is_mamba(layer):
                return ScaledMambaBlock(r, norm(), mamba(c), norm(), mlp, shared_mlp=shared)
            scale = c.attention_multiplier
            attention = Attention(*heads(c), rotary, scale=scale, qkv_bias=bias, output_bias=bias)
            return ScaledPreNormBlock(r, norm(), attention, norm(), mlp, shared_mlp=shared)

        layers, embedding = map(block, range(c.num_hidden_layers)), Embedding(c.vocab_size, c.hidden_size)
        decoder = Decoder(embedding, layers, norm(), input_scale=c.embedding_multiplier)
        super().__init__(config, decoder, LMHead(c.hidden_size, c.vocab_size, logit_scale=1 / c.logits_scaling))
