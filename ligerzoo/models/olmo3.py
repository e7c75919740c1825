"""OLMo 3 (OLMo Team 2025).

    tokens -> embedding -> L x [ x += norm(attention(x));  x += norm(mlp(x)) ] -> norm -> head

Distinctive: OLMo 2 with sliding windows in three of four layers, YaRN in the others only.

Sliding-window layers never see positions beyond those of pretraining, so their rotary frequencies are not scaled.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.layers import RotaryEmbedding
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import WindowedConfig, check_theta, rotary_arguments
from ligerzoo.models.olmo2 import Olmo2Config, olmo2_decoder


@dataclass(frozen=True, kw_only=True)
class Olmo3Config(Olmo2Config, WindowedConfig):
    """Configuration of OLMo 3. Defaults: those of transformers' Olmo3Config, close to OLMo-3-7B.

    Attributes:
        layer_types: None: every fourth layer uses full attention, the others the sliding window.
        rope_theta: rotary base of full-attention layers.
        rope_scaling: rope scaling of full-attention layers only.
        rope_local_base_freq: rotary base of sliding-window layers; None for `rope_theta`.
    """

    sliding_window: int | None = 4096
    rope_theta: float = 500000.0
    rope_local_base_freq: float | None = None

    def validate(self) -> None:
        super().validate()
        if self.rope_local_base_freq is not None:
            check_theta(self, "rope_local_base_freq")

    def slides(self, layer: int) -> bool:
        return (layer + 1) % 4 != 0


class Olmo3(CausalLM):
    """OLMo 3 with a language-model head."""

    config: Olmo3Config

    def __init__(self, config: Olmo3Config) -> None:
        c = config
        full = RotaryEmbedding(*rotary_arguments(c), in_fp32=True)
        local = RotaryEmbedding(c.rotary_size, c.rope_local_base_freq or c.rope_theta, in_fp32=True)
        layers = range(c.num_hidden_layers)
        rotary = [local if c.is_sliding(layer) else full for layer in layers]
        decoder = olmo2_decoder(c, rotary, [c.window(layer) for layer in layers])
        super().__init__(config, decoder)
