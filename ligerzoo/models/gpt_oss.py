"""gpt-oss, such as gpt-oss-20b and gpt-oss-120b (OpenAI 2025).

    tokens -> embedding -> L x [ x += attention(norm(x));  x += moe(norm(x)) ] -> norm -> head

Distinctive: attention sinks, a sliding window in every second layer, experts with biases and clamped SwiGLU.

A sink is a learned logit per head, which joins the softmax of each query. The router selects the experts with the
largest logits, and applies the softmax to these logits alone: the same as dividing their probabilities by the sum. The
context is extended by YaRN, whose bounds are not rounded to integers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ligerzoo.kernels import ClampedSwiGLU
from ligerzoo.layers import Embedding, Experts, MoE, RMSNorm, RotaryEmbedding, Router, SinkAttention
from ligerzoo.layers.rope_scaling import Scaling
from ligerzoo.models.config import WindowedConfig, check_positive, heads, rotary_arguments
from ligerzoo.models.llama import llama_decoder
from ligerzoo.models.moe import MoECausalLM, MoEConfig

YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""The default context extension."""


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(MoEConfig, WindowedConfig):
    """Configuration of gpt-oss. Defaults: those of transformers' GptOssConfig, close to gpt-oss-120b.

    Attributes:
        intermediate_size: intermediate features of each expert.
        layer_types: None: every second layer uses the sliding window, the first one included.
        attention_bias: add biases to the query, key, value and output projections.
        swiglu_limit: bound of gate and up projections, see `ligerzoo.kernels.ClampedSwiGLU`.
        swiglu_alpha: factor of the gate within the sigmoid.
    """

    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_hidden_layers: int = 36
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 8
    head_dim: int | None = 64
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 150000.0
    rope_scaling: Scaling | None = field(default_factory=lambda: dict(YARN))
    sliding_window: int | None = 128
    num_experts: int = 128
    num_experts_per_tok: int = 4
    attention_bias: bool = True
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702

    def validate(self) -> None:
        super().validate()
        check_positive(self, "swiglu_limit", "swiglu_alpha")

    def slides(self, layer: int) -> bool:
        """Whether this layer, counted from 0, uses the sliding window if `layer_types` is None."""
        return layer % 2 == 0


class GptOss(MoECausalLM):
    """gpt-oss with a language-model head."""

    config: GptOssConfig

    def __init__(self, config: GptOssConfig) -> None:
        c, rotary = config, RotaryEmbedding(*rotary_arguments(config))
        activation = ClampedSwiGLU(c.swiglu_limit, c.swiglu_alpha)

        def norm() -> RMSNorm:
            return RMSNorm(c.hidden_size, c.rms_norm_eps, round_before_scale=False)

        def attention(layer: int) -> SinkAttention:
            bias = c.attention_bias
            return SinkAttention(*heads(c), rotary, window=c.window(layer), qkv_bias=bias, output_bias=bias)

        def mixture(layer: int) -> MoE:
            sizes = c.hidden_size, c.intermediate_size, c.num_experts
            router = Router(c.hidden_size, c.num_experts, c.num_experts_per_tok, renormalize=True, bias=True)
            return MoE(router, Experts(*sizes, bias=True, activation=activation))

        embedding = Embedding(c.vocab_size, c.hidden_size)
        super().__init__(config, llama_decoder(c, attention, mixture, embedding, norm=norm))
