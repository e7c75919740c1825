"""Falcon-H1, such as Falcon-H1-0.5B to 34B (Falcon LLM Team, TII 2025).

    tokens -> embedding * e -> L x [ h = norm(x);  x += a * attention(b * h) + c * mamba(h);  x += mlp(norm(x)) ]
           -> norm -> head * l

Distinctive: attention and Mamba-2 in parallel in each block, and muP multipliers of every part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ligerzoo.checks import is_list, is_number
from ligerzoo.layers import (
    Attention,
    Decoder,
    Embedding,
    LMHead,
    Mamba2Scales,
    ParallelMambaBlock,
    RMSNorm,
    RotaryEmbedding,
    ScaledGatedMLP,
)
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import check_positive, heads, refuse_unless, rotary_arguments
from ligerzoo.models.state_space import MambaConfig, mamba


@dataclass(frozen=True, kw_only=True)
class FalconH1Config(MambaConfig):
    """Configuration of Falcon-H1. Defaults: those of transformers' FalconH1Config.

    Attributes:
        mamba_d_ssm: inner features of Mamba-2; None for `mamba_expand` times the hidden size.
        mamba_rms_norm: normalize the outputs of Mamba-2; `mamba_norm_before_gate` before they are gated.
        mamba_proj_bias: add a bias to the input projection of Mamba-2; `projectors_bias` to the output projection.
        attention_bias: add biases to the query, key, value and output projections.
        mlp_bias: add biases to the gate, up and down projections.
        embedding_multiplier: factor of the embeddings of token ids; `lm_head_multiplier` of the logits.
        key_multiplier: factor of the keys.
        attention_in_multiplier: factor of the input of attention; `attention_out_multiplier` of its output.
        ssm_in_multiplier: factor of the input of Mamba-2; `ssm_out_multiplier` of its output.
        ssm_multipliers: factors of Mamba-2's gates, inputs, matrices B and C, and step sizes.
        mlp_multipliers: factors of the outputs of the gate and down projections.
    """

    vocab_size: int = 128000
    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-5
    mamba_d_ssm: int | None = 1024
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    projectors_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    lm_head_multiplier: float = 1.0
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    ssm_multipliers: Sequence[float] = field(default_factory=lambda: [1.0] * 5)
    mlp_multipliers: Sequence[float] = field(default_factory=lambda: [1.0] * 2)

    def validate(self) -> None:
        super().validate()
        check_positive(self, "key_multiplier")
        for name, count in (("ssm_multipliers", 5), ("mlp_multipliers", 2)):
            values = getattr(self, name)
            holds = is_list(values) and len(values) == count and all(map(is_number, values))
            refuse_unless(holds, name, values, f"a list of {count} numbers")

    @property
    def mamba_inner_size(self) -> int:
        """Inner features of a state-space model."""
        return super().mamba_inner_size if self.mamba_d_ssm is None else self.mamba_d_ssm


class FalconH1(CausalLM):
    """Falcon-H1 with a language-model head."""

    config: FalconH1Config

    def __init__(self, config: FalconH1Config) -> None:
        c, bias, rotary = config, config.attention_bias, RotaryEmbedding(*rotary_arguments(config))
        multipliers = c.attention_out_multiplier, c.attention_in_multiplier, c.ssm_out_multiplier
        norms = {"norm": c.mamba_rms_norm, "norm_before_gate": c.mamba_norm_before_gate}
        scales = Mamba2Scales(c.ssm_in_multiplier, *c.ssm_multipliers)

        def norm() -> RMSNorm:
            return RMSNorm(c.hidden_size, c.rms_norm_eps)

        def block(layer: int) -> ParallelMambaBlock:
            scale = c.key_multiplier * c.head_size**-0.5
            attention = Attention(*heads(c), rotary, scale=scale, qkv_bias=bias, output_bias=bias)
            mixer = mamba(c, out_bias=c.projectors_bias, scales=scales, **norms)
            mlp = ScaledGatedMLP(c.hidden_size, c.intermediate_size, *c.mlp_multipliers, bias=c.mlp_bias)
            return ParallelMambaBlock(multipliers, mixer, norm(), attention, norm(), mlp)

        embedding, layers = Embedding(c.vocab_size, c.hidden_size), map(block, range(c.num_hidden_layers))
        head = LMHead(c.hidden_size, c.vocab_size, logit_scale=c.lm_head_multiplier)
        super().__init__(config, Decoder(embedding, layers, norm(), token_scale=c.embedding_multiplier), head)
