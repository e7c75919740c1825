"""Granite Swash, dense models, such as Granite Swash 2B (Granite Team, IBM 2026).

    tokens -> embedding * e -> L x [ x += r * attention(norm(x));  x += r * mlp(norm(x)) ] -> norm -> head / l

Distinctive: Granite with attention sinks, sliding windows in three of four layers, rotary base per layer.

A layer whose base is 0 has no positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ligerzoo.checks import is_list
from ligerzoo.layers import GatedMLP, RotaryEmbedding, SinkAttention
from ligerzoo.layers.rope_scaling import is_theta
from ligerzoo.models.causal_lm import CausalLM
from ligerzoo.models.config import WindowedConfig, heads, refuse_unless
from ligerzoo.models.granite import MultiplierConfig, granite_parts


@dataclass(frozen=True, kw_only=True)
class SwashConfig(MultiplierConfig, WindowedConfig):
    """Configuration of Granite Swash, dense or MoE.

    Attributes:
        layer_types: None: every fourth layer uses full attention, the first one included.
        layer_rope_theta: rotary base of each layer, 0 for no positions; None for `rope_theta` in all layers.
    """

    sliding_window: int | None = 128
    layer_rope_theta: Sequence[float] | None = None

    def validate(self) -> None:
        super().validate()
        thetas, layers = self.layer_rope_theta, self.num_hidden_layers
        if thetas is not None:
            holds = is_list(thetas) and len(thetas) == layers and all(is_theta(t) or t == 0 for t in thetas)
            expected = f"a list of {layers} numbers, each 0, or above 1 and up to 1e30"
            refuse_unless(holds, "layer_rope_theta", thetas, expected, "invalid rotary bases")

    def slides(self, layer: int) -> bool:
        """Whether this layer, counted from 0, uses the sliding window if `layer_types` is None."""
        return layer % 4 != 0


@dataclass(frozen=True, kw_only=True)
class GraniteSWAConfig(SwashConfig):
    """Configuration of Granite Swash. Defaults: those of transformers' GraniteSWAConfig, Granite Swash 2B.

    Attributes:
        mlp_bias: add biases to the gate, up and down projections.
    """

    vocab_size: int = 100352
    hidden_size: int = 2560
    intermediate_size: int = 8192
    num_hidden_layers: int = 24
    num_attention_heads: int = 20
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    mlp_bias: bool = False


class GraniteSWA(CausalLM):
    """Granite Swash with a language-model head."""

    config: GraniteSWAConfig

    def __init__(self, config: GraniteSWAConfig) -> None:
        c = config

        def mlp(layer: int) -> GatedMLP:
            return GatedMLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)

        super().__init__(config, *granite_parts(c, swash_attention(c), mlp))


def swash_attention(config: SwashConfig) -> Callable[[int], SinkAttention]:
    """Returns a function that builds the attention of a block; blocks of one base share the rotary embedding."""
    c, bias = config, config.attention_bias
    thetas = c.layer_rope_theta or [c.rope_theta] * c.num_hidden_layers
    rotary = {t: RotaryEmbedding(c.rotary_size, t, c.rope_scaling, c.max_position_embeddings) for t in {*thetas} - {0}}

    def attention(layer: int) -> SinkAttention:
        rotation, window, scale = rotary.get(thetas[layer]), c.window(layer), c.attention_multiplier
        return SinkAttention(*heads(c), rotation, window=window, scale=scale, qkv_bias=bias, output_bias=bias)

    return attention
