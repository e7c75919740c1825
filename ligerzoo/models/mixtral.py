"""Mixtral 8x7B and 8x22B (Jiang et al. 2024).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += moe(norm(x)) ] -> norm -> head

Distinctive: Mistral with MoE layers: each token uses two of eight experts, weights renormalized.

The weights of a token's experts are the router's probabilities, divided by their sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.layers import Attention, Embedding, Experts, MoE, RotaryEmbedding, Router
from ligerzoo.models.config import heads, refuse_unless, rotary_arguments
from ligerzoo.models.llama import llama_decoder
from ligerzoo.models.moe import MoECausalLM, MoEConfig


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(MoEConfig):
    """Configuration of Mixtral. Defaults: Mixtral-8x7B, with `max_position_embeddings` of 131072.

    Attributes:
        intermediate_size: intermediate features of each expert.
        sliding_window: tokens that a token attends to, including itself; None for full attention.
        router_jitter_noise: multiplicative input noise of MoE layers in training, in [0, 1); see
            `ligerzoo.layers.MoE`.
    """

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    sliding_window: int | None = None
    router_jitter_noise: float = 0.0

    def validate(self) -> None:
        super().validate()
        noise = self.router_jitter_noise
        refuse_unless(noise < 1, "router_jitter_noise", noise, "a number in [0, 1)")


class Mixtral(MoECausalLM):
    """Mixtral with a language-model head."""

    config: MixtralConfig

    def __init__(self, config: MixtralConfig) -> None:
        c, rotary = config, RotaryEmbedding(*rotary_arguments(config))

        def attention(layer: int) -> Attention:
            return Attention(*heads(c), rotary, window=c.sliding_window)

        def mixture(layer: int) -> MoE:
            router = Router(c.hidden_size, c.num_experts, c.num_experts_per_tok, renormalize=True)
            experts = Experts(c.hidden_size, c.intermediate_size, c.num_experts)
            return MoE(router, experts, jitter_noise=c.router_jitter_noise)

        super().__init__(config, llama_decoder(c, attention, mixture, Embedding(c.vocab_size, c.hidden_size)))
