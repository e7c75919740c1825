"""GLM-4-0414, 9B and 32B (Team GLM 2024, and the model cards of 2025).

    tokens -> embedding -> L x [ x += norm(attention(norm(x)));  x += norm(mlp(norm(x))) ] -> norm -> head

Distinctive: GLM-4 with sandwich norms: each branch is normalized before and after.

Sandwich norms are from Ding et al. 2021, section 2.4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from ligerzoo.layers import Attention, Context, Decoder, Embedding, GatedMLP, LayerCache, RMSNorm, SandwichBlock
from ligerzoo.layers.norm import add_and_normalize, normalize
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import DecoderConfig
from ligerzoo.models.glm import GlmConfig, glm_attention


@dataclass(frozen=True, kw_only=True)
class Glm4Config(GlmConfig):
    """Configuration of GLM-4-0414: the fields and defaults of GLM-4."""


class Glm4Block(SandwichBlock):
    """`SandwichBlock` with the names of GLM-4's norms: `post_attention_layernorm` comes before the MLP.

    Args:
        input_layernorm: norm before attention.
        self_attn: the attention.
        post_self_attn_layernorm: norm after attention.
        post_attention_layernorm: norm before the MLP.
        mlp: the MLP.
        post_mlp_layernorm: norm after the MLP.
    """

    def __init__(
        self, input_layernorm: nn.Module, self_attn: nn.Module, post_self_attn_layernorm: nn.Module,
        post_attention_layernorm: nn.Module, mlp: nn.Module, post_mlp_layernorm: nn.Module,
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm  # optimizer states of transformers have this order
        self.post_self_attn_layernorm = post_self_attn_layernorm
        self.mlp = mlp
        self.post_mlp_layernorm = post_mlp_layernorm

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        normalized, x = normalize(x, self.input_layernorm)
        attended = self.post_self_attn_layernorm(self.self_attn(normalized, context, cache))
        normalized, x = add_and_normalize(x, attended, self.post_attention_layernorm)
        return x + self.post_mlp_layernorm(self.mlp(normalized, context))  # type: ignore[no-any-return]


class Glm4(CausalLM):
    """GLM-4-0414 with a language-model head."""

    config: Glm4Config

    def __init__(self, config: Glm4Config) -> None:
        super().__init__(config, glm4_decoder(config, glm_attention(config)))


def glm4_decoder(config: DecoderConfig, attention: Callable[[int], Attention]) -> Decoder:
    """Builds the GLM-4-0414 decoder; `attention` builds that of the block with this index."""
    c = config

    def norm() -> RMSNorm:
        return RMSNorm(c.hidden_size, c.rms_norm_eps)

    def block(i: int) -> Glm4Block:
        return Glm4Block(norm(), attention(i), norm(), norm(), GatedMLP(c.hidden_size, c.intermediate_size), norm())

    embedding = Embedding(c.vocab_size, c.hidden_size)
    layers = [block(i) for i in range(c.num_hidden_layers)]
    return Decoder(embedding, layers, norm())
