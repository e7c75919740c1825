"""GLM-4.5V and GLM-4.6V, 106B-A12B (GLM-V Team 2025, "GLM-4.5V and GLM-4.1V-Thinking").

    pixels -> patches -> norm, + positions -> L' x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> norm
           -> convolution 2 x 2 -> norm -> MLP -> vision embeddings
    tokens -> embedding, vision embeddings at image tokens -> GLM-4.5

Distinctive: GLM-4.5 with the vision tower of GLM-4.1V, and M-RoPE.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligerzoo.layers import Attention, Embedding, SectionedRotaryEmbedding
from ligerzoo.models.config import heads, rotary_arguments
from ligerzoo.models.glm4v_vision import Glm4VisionLM, Glm4VisionLMConfig, glm4v_tower
from ligerzoo.models.llama import llama_decoder
from ligerzoo.models.moe import DeepSeekMoEConfig


@dataclass(frozen=True, kw_only=True)
class Glm4vMoeConfig(DeepSeekMoEConfig, Glm4VisionLMConfig):
    """Configuration of GLM-4.5V. Defaults: those of transformers' Glm4vMoeTextConfig.

    Attributes:
        attention_bias: add biases to the query, key and value projections; the output projection never has one.
        router_aux_loss_coef: factor of the load-balancing loss when it is added.
    """

    vocab_size: int = 151424
    intermediate_size: int = 10944
    moe_intermediate_size: int = 1408
    num_hidden_layers: int = 46
    num_attention_heads: int = 96
    num_key_value_heads: int | None = 8
    num_experts: int = 128
    num_experts_per_tok: int = 8
    max_position_embeddings: int = 65536
    rms_norm_eps: float = 1e-5
    attention_bias: bool = True
    router_aux_loss_coef: float = 0.0001
    image_token_id: int = 151363
    video_token_id: int = 151364


class Glm4vMoe(Glm4VisionLM):
    """GLM-4.5V with a language-model head."""

    config: Glm4vMoeConfig

    def __init__(self, config: Glm4vMoeConfig) -> None:
        c, frequencies = config, rotary_arguments(config)
        rotary = SectionedRotaryEmbedding(c.mrope_section, *frequencies)

        def attention(layer: int) -> Attention:
            return Attention(*heads(c), rotary, qkv_bias=c.attention_bias)

        decoder = llama_decoder(c, attention, c.feed_forward, Embedding(c.vocab_size, c.hidden_size))
        super().__init__(c, decoder, glm4v_tower(c.vision_config))
