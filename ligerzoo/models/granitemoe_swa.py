"""Granite Swash, MoE models, such as Granite Swash 3B-A600M (Granite Team, IBM 2026).

    tokens -> embedding * e -> L x [ x += r * attention(norm(x));  x += r * moe(norm(x)) ] -> norm -> head / l

Distinctive: Granite Swash with MoE layers, and optionally a shared expert.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ligerzoo.layers import Experts, GatedMLP, MoE, Router
from ligerzoo.models.granite import granite_parts
from ligerzoo.models.granite_swa import SwashConfig, swash_attention
from ligerzoo.models.moe import MoECausalLM, MoEConfig


@dataclass(frozen=True, kw_only=True)
class GraniteMoeSWAConfig(MoEConfig, SwashConfig):
    """Configuration of Granite Swash with MoE. Defaults: those of transformers' GraniteMoeSWAConfig.

    Attributes:
        intermediate_size: intermediate features of each expert.
        shared_intermediate_size: intermediate features of the shared expert, which processes every token; 0 for none.
    """

    sliding_window: int | None = 128
    shared_intermediate_size: int = field(default=0, metadata={"least": 0})


class GraniteMoeSWA(MoECausalLM):
    """Granite Swash with MoE and a language-model head."""

    config: GraniteMoeSWAConfig

    def __init__(self, config: GraniteMoeSWAConfig) -> None:
        c = config

        def mixture(layer: int) -> MoE:
            router = Router(c.hidden_size, c.num_experts, c.num_experts_per_tok, renormalize=True)
            return MoE(router, Experts(c.hidden_size, c.intermediate_size, c.num_experts))

        def shared_mlp() -> GatedMLP | None:
            return GatedMLP(c.hidden_size, c.shared_intermediate_size) if c.shared_intermediate_size else None

        super().__init__(config, *granite_parts(c, swash_attention(c), mixture, shared_mlp))
