"""Muse Glimmer 30B with images and videos (Meta 2026).

    pixels -> patches + learned positions -> norm -> L' x [ x += attention(norm(x));  x += mlp(norm(x)) ]
           -> norm -> pixel shuffle 2 x 2 -> MLP -> norm -> vision embeddings
    tokens -> embedding, vision embeddings at image and video tokens -> Muse Glimmer's decoder

Distinctive: Muse Glimmer with a windowed vision tower, learned resampled positions and pixel shuffle.

In three of four blocks of the tower a patch attends only within a window of its frame, 32 x 32 patches. Tokens of
images and videos have the positions of text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ligerzoo.layers import MLP, Linear, RasterVisionTower, RMSNorm
from ligerzoo.layers.projection import activate_and_project
from ligerzoo.models.config import refuse_unless
from ligerzoo.models.muse_glimmer_text import MuseGlimmerTextConfig, glimmer_parts
from ligerzoo.models.muse_glimmer_vision import MuseGlimmerVisionConfig, glimmer_tower
from ligerzoo.models.vision_lm import VisionLM, VisionLMConfig


@dataclass(frozen=True, kw_only=True)
class MuseGlimmerConfig(MuseGlimmerTextConfig, VisionLMConfig):
    """Configuration of Muse Glimmer.

    Attributes:
        out_hidden_size: features of a merged patch: those of its patches together.
        projector_hidden_size: features between the linear layers after the tower.
    """

    vision_config: MuseGlimmerVisionConfig = field(default_factory=MuseGlimmerVisionConfig)
    image_token_id: int = 200092
    video_token_id: int = 200091
    out_hidden_size: int = 6144
    projector_hidden_size: int = 4096

    def validate(self) -> None:
        super().validate()
        v, where = self.vision_config, "out_hidden_size"
        size = v.spatial_merge_size**2 * v.hidden_size
        refuse_unless(self.out_hidden_size == size, where, self.out_hidden_size, f"merge_size^2 * hidden_size, {size}")


class MuseGlimmer(VisionLM):
    """Muse Glimmer with a language-model head. Text separates the frames of a video."""

    config: MuseGlimmerConfig
    tower_name = "vision_tower"
    separates_frames = True
    vision_tower: RasterVisionTower
    vision_adapter: MLP
    vision_projection: Linear
    perception_emb_norm: RMSNorm

    def __init__(self, config: MuseGlimmerConfig) -> None:
        c, inner = config, config.projector_hidden_size
        super().__init__(
            c,
            *glimmer_parts(c),
            vision_tower=glimmer_tower(c.vision_config),
            vision_adapter=MLP(c.out_hidden_size, inner, inner, bias=False),
            vision_projection=Linear(inner, c.hidden_size, bias=False),
            perception_emb_norm=RMSNorm(c.hidden_size, c.rms_norm_eps, elementwise_affine=False),
        )

    def embed_patches(self, patches: Tensor, grid_thw: Tensor) -> Tensor:
        """See `VisionLM.embed_patches`."""
        inner = self.vision_adapter(self.vision_tower(patches, grid_thw))
        x = activate_and_project(inner, "gelu", self.vision_projection)
        return self.perception_emb_norm(x)  # type: ignore[no-any-return]
