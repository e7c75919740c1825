"""HyperCLOVA X SEED Think 14B (NAVER Cloud 2025).

    tokens -> embedding * e -> L x [ x += r * norm(attention(norm(x)));  x += r * norm(mlp(norm(x))) ]
           -> norm -> head * l

Distinctive: Granite's four multipliers, and norms before and after each branch.

Other than in Granite, `l` multiplies the logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ligerzoo.layers import (
    Attention,
    Embedding,
    GatedMLP,
    LMHead,
    RMSNorm,
    RotaryEmbedding,
    ScaledPreNormBlock,
)
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import check_positive, heads, rotary_arguments
from ligerzoo.models.llama import LlamaConfig, llama_decoder


@dataclass(frozen=True, kw_only=True)
class HyperCLOVAXConfig(LlamaConfig):
    """Configuration of HyperCLOVA X. Defaults: those of transformers' HyperCLOVAXConfig, which are Llama's.

    Attributes:
        embedding_multiplier: factor of the embeddings.
        attention_multiplier: factor of the attention scores; None for 1 / sqrt(head_dim).
        residual_multiplier: factor of the output of each attention and MLP branch.
        logits_scaling: factor of the logits.
        use_post_norm: normalize the output of each branch.
    """

    embedding_multiplier: float = 1.0
    attention_multiplier: float | None = None
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    use_post_norm: bool = True

    def validate(self) -> None:
        super().validate()
        check_positive(self, "attention_multiplier")


class PeriNormBlock(ScaledPreNormBlock):
    """Block whose branches are normalized before and after, then multiplied by a constant.

    Args:
        post_norms: the norm after attention, and that after the MLP.
        parts: arguments of `ScaledPreNormBlock`.
    """

    def __init__(self, post_norms: tuple[nn.Module, nn.Module], multiplier: float, *parts: nn.Module) -> None:
        super().__init__(multiplier, *parts)
        self.post_norm1, self.post_norm2 = post_norms

    def scale_mixed(self, x: Tensor) -> Tensor:
        return self.multiplier * self.post_norm1(x)  # type: ignore[no-any-return]

    def scale_mlp(self, x: Tensor) -> Tensor:
        return self.multiplier * self.post_norm2(x)  # type: ignore[no-any-return]


class HyperCLOVAX(CausalLM):
    """HyperCLOVA X with a language-model head."""

    config: HyperCLOVAXConfig

    def __init__(self, config: HyperCLOVAXConfig) -> None:
        c, rotary, bias = config, RotaryEmbedding(*rotary_arguments(config)), config.attention_bias

        def attention(layer: int) -> Attention:
            return Attention(*heads(c), rotary, scale=c.attention_multiplier, qkv_bias=bias, output_bias=bias)

        def mlp(layer: int) -> GatedMLP:
            return GatedMLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)

        def block(*parts: nn.Module) -> ScaledPreNormBlock:
            if not c.use_post_norm:
                return ScaledPreNormBlock(c.residual_multiplier, *parts)
            norms = RMSNorm(c.hidden_size, c.rms_norm_eps), RMSNorm(c.hidden_size, c.rms_norm_eps)
            return PeriNormBlock(norms, c.residual_multiplier, *parts)

        embedding = Embedding(c.vocab_size, c.hidden_size)
        decoder = llama_decoder(c, attention, mlp, embedding, block=block, input_scale=c.embedding_multiplier)
        super().__init__(config, decoder, LMHead(c.hidden_size, c.vocab_size, logit_scale=c.logits_scaling))
