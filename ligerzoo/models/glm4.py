"""GLM-4-0414, 9B and 32B (Team GLM 2024, and the model cards of 2025).

    tokens -> embedding -> L x [ x += norm(attention(norm(x)));  x += norm(mlp(norm(x))) ] -> norm -> head

Distinctive: GLM-4 with sandwich norms: each branch is normalized before and after.

Sandwich norms are from Ding et al. 2021, section 2.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from ligerzoo.layers import Decoder, Embedding, GatedMLP, LMHead, RMSNorm, SandwichBlock
from ligerzoo.models.causal_lm import CausalLM, FactoryKwargs
from ligerzoo.models.glm import GlmConfig, glm_attention


@dataclass(frozen=True, kw_only=True)
class Glm4Config(GlmConfig):
    """Configuration of GLM-4-0414: the fields and defaults of GLM-4."""


class Glm4(CausalLM):
    """GLM-4-0414 with a language-model head."""

    config: Glm4Config

    def __init__(self, config: Glm4Config, **factory_kwargs: Unpack[FactoryKwargs]) -> None:
        c, attention = config, glm_attention(config, **factory_kwargs)

        def norm() -> RMSNorm:
            return RMSNorm(c.hidden_size, c.rms_norm_eps, **factory_kwargs)

        def mlp() -> GatedMLP:
            return GatedMLP(c.hidden_size, c.intermediate_size, **factory_kwargs)

        def block() -> SandwichBlock:
            return SandwichBlock(norm(), attention(), norm(), norm(), mlp(), norm())

        embedding = Embedding(c.vocab_size, c.hidden_size, **factory_kwargs)
        layers = [block() for _ in range(c.num_hidden_layers)]
        super().__init__(
            config, Decoder(embedding, layers, norm()), LMHead(c.hidden_size, c.vocab_size, **factory_kwargs)
        )
