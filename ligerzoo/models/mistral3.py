"""Mistral Small 3.1 and 3.2, and Ministral 3, with images (Mistral AI 2025; Liu et al. 2026).

    pixels -> patches -> norm -> L' x [ x += attention(norm(x));  x += mlp(norm(x)) ]
           -> norm -> merge m x m -> MLP -> image embeddings
    tokens -> embedding, image embeddings at image tokens -> Mistral's or Ministral 3's decoder

Distinctive: Mistral with images of any size; break tokens separate the rows of an image.

Pairs of features of the tower's heads rotate by row and column in alternation. Tokens of images have the positions of
text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ligerzoo.kernels.activation import Activation
from ligerzoo.layers import MergingProjector, RasterPatchMerger, RMSNorm
from ligerzoo.layers.rope_scaling import Scaling
from ligerzoo.models.config import refuse_unless
from ligerzoo.models.ministral3 import Ministral3Config, ministral3_decoder
from ligerzoo.models.mistral3_vision import Mistral3VisionConfig, pixel_tower, refuse_other_activation
from ligerzoo.models.pixel_lm import PixelLM


@dataclass(frozen=True, kw_only=True)
class Mistral3Config(Ministral3Config):
    """Configuration of Mistral Small 3.1, or Ministral 3, with images. Unless noted, fields are those of the decoder.

    Defaults: those of transformers' Mistral3Config, Mistral Small 3.1 24B. With `llama_4_scaling_beta` in
    `rope_scaling`, the decoder is that of Ministral 3, else that of Mistral.

    Attributes:
        vision_config: config of the vision tower.
        image_token_id: placeholder token that image embeddings replace.
        spatial_merge_size: side of a square of patches that is merged into one token.
        vision_feature_layer: number of blocks of the tower that run; or, if negative, -1 for all, -2 for all but one.
        projector_hidden_act: activation between the linear layers after the tower, "gelu" or "silu".
        multimodal_projector_bias: add biases to these two layers.
    """

    hidden_size: int = 5120
    intermediate_size: int = 32768
    num_hidden_layers: int = 40
    max_position_embeddings: int = 131072
    rope_theta: float = 1e9
    rope_scaling: Scaling | None = None
    tie_word_embeddings: bool = True
    vision_config: Mistral3VisionConfig = field(
        default_factory=lambda: Mistral3VisionConfig(image_size=1540, patch_size=14)
    )
    image_token_id: int = 10
    spatial_merge_size: int = 2
    vision_feature_layer: int = field(default=-1, metadata={"least": -(2**31)})
    projector_hidden_act: Activation = "gelu"
    multimodal_projector_bias: bool = False

    def validate(self) -> None:
        super().validate()
        blocks = self.vision_config.num_hidden_layers
        expected = f"an integer, {-blocks - 1} to {blocks}"
        is_block = -blocks - 1 <= self.vision_feature_layer <= blocks
        refuse_unless(is_block, "vision_feature_layer", self.vision_feature_layer, expected)
        refuse_other_activation("projector_hidden_act", self.projector_hidden_act)
        is_token = 0 <= self.image_token_id < self.vocab_size
        refuse_unless(is_token, "image_token_id", self.image_token_id, f"a token id, 0 to {self.vocab_size - 1}")
        side, expected = self.spatial_merge_size, "fewer than 2^63 features in a square of patches"
        refuse_unless(side**2 * self.vision_config.hidden_size < 2**63, "spatial_merge_size", side, expected)

    @property
    def all_layers(self) -> int:
        return self.num_hidden_layers + self.vision_config.num_hidden_layers


class Mistral3(PixelLM):
    """Mistral Small 3.1, or Ministral 3, with images and a language-model head."""

    config: Mistral3Config

    def __init__(self, config: Mistral3Config) -> None:
        c, v, layer, size = config, config.vision_config, config.vision_feature_layer, config.vision_config.hidden_size
        norm, merger = RMSNorm(size, c.rms_norm_eps), RasterPatchMerger(size, c.spatial_merge_size)
        act, bias = c.projector_hidden_act, c.multimodal_projector_bias
        super().__init__(
            c,
            ministral3_decoder(c),
            vision_tower=pixel_tower(v, layer if layer >= 0 else v.num_hidden_layers + 1 + layer),
            multi_modal_projector=MergingProjector(norm, merger, size, c.hidden_size, activation=act, bias=bias),
        )
