"""Muse Glimmer 30B, text only (Meta 2026).

    tokens -> embedding -> norm -> L x [ x += norm(attention(norm(x)));  x += norm(mlp(norm(x))) ] -> norm -> head
    attention: norm(q) * s, norm(k) -> rotary embedding in most layers -> scores -> * sigmoid(gate(x))

Distinctive: Gemma 2's blocks with output-gated attention; full attention has no positions; norms without weights.

Every fourth layer, counted from the last one, uses full attention. Logits are multiplied by a constant and soft-capped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ligerzoo.checks import is_list
from ligerzoo.layers import (
    Decoder,
    GatedMLP,
    GateProjectionAttention,
    LMHead,
    NormalizedEmbedding,
    RMSNorm,
    RotaryEmbedding,
    SandwichBlock,
)
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import WindowedConfig, check_positive, heads, refuse_unless, rotary_arguments


@dataclass(frozen=True, kw_only=True)
class MuseGlimmerTextConfig(WindowedConfig):
    """Configuration of Muse Glimmer's decoder. Defaults: Muse Glimmer 30B.

    Attributes:
        layer_types: None: every fourth layer, counted from the last one, uses full attention.
        layer_rope_theta: for each layer 0, for no positions, or `rope_theta`; None: every fourth layer, counted from
            the last one, has no positions.
        attention_bias: add biases to the query, key, value and output projections.
        qk_scale_factor: attention scores are multiplied by it, and by head_dim^-0.5.
        post_norm_eps: eps of the norms after the branches.
        output_multiplier: factor of the logits.
        final_logit_softcapping: soft cap of the logits, after the factor; None for no cap.
    """

    vocab_size: int = 202048
    hidden_size: int = 6656
    intermediate_size: int = 19968
    num_hidden_layers: int = 52
    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = 2048
    layer_rope_theta: Sequence[float] | None = None
    attention_bias: bool = False
    qk_scale_factor: float = 3.87
    post_norm_eps: float = 1e-8
    output_multiplier: float = 0.19611613513818404
    final_logit_softcapping: float | None = 20.0

    def validate(self) -> None:
        super().validate()
        check_positive(self, "final_logit_softcapping", "qk_scale_factor")
        thetas, layers = self.layer_rope_theta, self.num_hidden_layers
        is_valid = is_list(thetas) and len(thetas) == layers and all(t in (0, self.rope_theta) for t in thetas)
        expected = f"a list of {layers} numbers, each 0 or rope_theta, {self.rope_theta}"
        refuse_unless(thetas is None or is_valid, "layer_rope_theta", thetas, expected, "invalid rotary bases")

    def slides(self, layer: int) -> bool:
        return (self.num_hidden_layers - 1 - layer) % 4 != 0

    def rotates(self, layer: int) -> bool:
        """Whether this layer, counted from 0, has rotary positions."""
        return self.slides(layer) if self.layer_rope_theta is None else self.layer_rope_theta[layer] != 0


class MuseGlimmerText(CausalLM):
    """Muse Glimmer's decoder with a language-model head."""

    config: MuseGlimmerTextConfig

    def __init__(self, config: MuseGlimmerTextConfig) -> None:
        super().__init__(config, *glimmer_parts(config))


def glimmer_parts(config: MuseGlimmerTextConfig) -> tuple[Decoder, LMHead]:
    """Builds the decoder and the head."""
    c, rotary = config, RotaryEmbedding(*rotary_arguments(config))

    def norm(eps: float = c.rms_norm_eps) -> RMSNorm:
        return RMSNorm(c.hidden_size, eps, weight_offset=1.0, round_before_scale=False)

    def plain_norm(size: int = c.head_size) -> RMSNorm:
        return RMSNorm(size, c.rms_norm_eps, elementwise_affine=False)

    def block(i: int) -> SandwichBlock:
        rotation, window, scale = rotary if c.rotates(i) else None, c.window(i), c.qk_scale_factor * c.head_size**-0.5
        sizes, q_norm, k_norm, bias = heads(c), plain_norm(), plain_norm(), c.attention_bias
        attention = GateProjectionAttention(
            *sizes, rotation, q_norm=q_norm, k_norm=k_norm, window=window, scale=scale, qkv_bias=bias, output_bias=bias
        )
        mlp = GatedMLP(c.hidden_size, c.intermediate_size)
        return SandwichBlock(norm(), attention, norm(c.post_norm_eps), norm(), mlp, norm(c.post_norm_eps))

    embedding = NormalizedEmbedding(c.vocab_size, c.hidden_size, plain_norm(c.hidden_size))
    final_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, round_before_scale=False)
    cap, factor = c.final_logit_softcapping, c.output_multiplier
    decoder = Decoder(embedding, map(block, range(c.num_hidden_layers)), final_norm)
    return decoder, LMHead(c.hidden_size, c.vocab_size, softcap=cap, logit_scale=factor)
