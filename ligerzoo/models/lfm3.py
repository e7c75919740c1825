"""LFM3, such as LFM3-1.7B (Liquid AI 2026).

    tokens -> embedding -> L x [ x += norm(conv or attention(norm(x)));  x += norm(mlp(norm(x))) ] -> norm -> head
    attention: norm(q), norm(k) -> rotary embedding -> scores -> each head * sigmoid(gate(x))

Distinctive: LFM2 with sandwich norms, a gate per attention head, and sliding windows.

Sliding-window layers have a smaller rotary base. Full attention rotates half of the feature pairs. Of four layers, two
are convolutions, which see seven tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ligerzoo.layers import Attention, GatedMLP, GateProjectionAttention, RMSNorm, RotaryEmbedding
from ligerzoo.layers.rope_scaling import Scaling
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import check_theta, heads, rotary_arguments
from ligerzoo.models.short_conv import ShortConvConfig, short_conv_decoder


@dataclass(frozen=True, kw_only=True)
class Lfm3Config(ShortConvConfig):
    """Configuration of LFM3. Defaults: those of transformers' Lfm3Config, LFM3-1.7B.

    Attributes:
        layer_types: "conv", "sliding_attention" or "full_attention" for each layer; None: the third of four layers uses
            full attention, and the first a sliding window, except for the very first.
        sliding_window: tokens that a token attends to in a sliding-window layer, including itself.
        rope_theta: rotary base of full-attention layers.
        rope_scaling: rope scaling of full-attention layers only.
        rope_local_base_freq: rotary base of sliding-window layers.
        attention_bias: add biases to the query, key, value and output projections.
        use_sandwich_norm: normalize the outputs of both branches, too.
        use_attention_gate: multiply the output of each head by a gate.
    """

    vocab_size: int = 128000
    hidden_size: int = 2048
    intermediate_size: int = 7680
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 4
    head_dim: int | None = 128
    conv_L_cache: int = 7
    sliding_window: int | None = 256
    rope_scaling: Scaling | None = field(
        default_factory=lambda: {"rope_type": "proportional", "partial_rotary_factor": 0.5}
    )
    rope_local_base_freq: float = 1e4
    attention_bias: bool = False
    use_sandwich_norm: bool = True
    use_attention_gate: bool = True

    mixer_types = ("conv", "full_attention", "sliding_attention")

    def validate(self) -> None:
        super().validate()
        check_theta(self, "rope_local_base_freq")

    def kind(self, layer: int) -> str:
        """What this layer, counted from 0, mixes tokens with: one of `mixer_types`."""
        default = "full_attention" if layer % 4 == 2 else "sliding_attention" if layer % 4 == 0 and layer else "conv"
        return default if self.layer_types is None else self.layer_types[layer]

    def is_conv(self, layer: int) -> bool:
        return self.kind(layer) == "conv"

    def window(self, layer: int) -> int | None:
        """Tokens that a token attends to in this layer, including itself; None for full attention."""
        return self.sliding_window if self.kind(layer) == "sliding_attention" else None


class Lfm3(CausalLM):
    """LFM3 with a language-model head."""

    config: Lfm3Config

    def __init__(self, config: Lfm3Config) -> None:
        c, full = config, RotaryEmbedding(*rotary_arguments(config), in_fp32=True)
        local = RotaryEmbedding(c.rotary_size, c.rope_local_base_freq, in_fp32=True)
        gated, bias = c.use_attention_gate, c.attention_bias
        make: Callable[..., Attention] = partial(GateProjectionAttention, gate_size=1) if gated else Attention

        def attention(i: int, q_norm: RMSNorm, k_norm: RMSNorm) -> Attention:
            rotary = full if c.kind(i) == "full_attention" else local
            return make(
                *heads(c), rotary, q_norm=q_norm, k_norm=k_norm, window=c.window(i), qkv_bias=bias, output_bias=bias
            )

        def mlp(i: int) -> GatedMLP:
            return GatedMLP(c.hidden_size, c.intermediate_size)

        super().__init__(config, short_conv_decoder(c, attention, mlp, is_sandwich=c.use_sandwich_norm))
