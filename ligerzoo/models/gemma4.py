"""Gemma 4 with images and videos, such as Gemma 4 E2B, E4B, 26B-A4B and 31B (Gemma Team 2026).

    pixels -> patches + columns and rows -> L' x [ x += norm(attention(norm(x)));  x += norm(mlp(norm(x))) ]
           -> mean of k x k patches -> norm -> image embeddings
    tokens -> embedding, image embeddings at image and video tokens -> Gemma 4

Distinctive: a vision tower for images of any shape, whose linear layers may clip.

Heads of the tower rotate one half by the column and the other by the row of a patch. In the decoder, tokens of images
have the per-layer embeddings of padding; in layers with a sliding window they may attend to each other in both
directions. Audio is not read: its tower is kept in the files.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ligerzoo.layers import Linear, LMHead, NormedProjection, PaddedVisionTower, RMSNorm
from ligerzoo.models.gemma4_multimodal import Gemma4Multimodal, Gemma4MultimodalConfig
from ligerzoo.models.gemma4_text import gemma4_decoder
from ligerzoo.models.gemma4_vision import Gemma4VisionConfig, padded_tower


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(Gemma4MultimodalConfig):
    """Configuration of Gemma 4.

    Attributes:
        vision_config: config of the vision tower; None for a model that reads text only.
    """

    vision_config: Gemma4VisionConfig | None = field(default_factory=Gemma4VisionConfig)

    @property
    def all_layers(self) -> int:
        return self.num_hidden_layers + (0 if self.vision_config is None else self.vision_config.num_hidden_layers)


class Gemma4(Gemma4Multimodal):
    """Gemma 4 with a language-model head. Text separates the frames of a video."""

    config: Gemma4Config
    vision_tower: PaddedVisionTower
    embed_vision: NormedProjection

    def __init__(self, config: Gemma4Config) -> None:
        c, v = config, config.vision_config
        head = LMHead(c.hidden_size, c.vocab_size, softcap=c.final_logit_softcapping)
        if v is None:
            super().__init__(c, gemma4_decoder(c), head)
            return
        norm = RMSNorm(v.hidden_size, v.rms_norm_eps, round_before_scale=False, elementwise_affine=False)
        projection = NormedProjection(norm, Linear(v.hidden_size, c.hidden_size, bias=False))
        super().__init__(c, gemma4_decoder(c), head, vision_tower=padded_tower(v), embed_vision=projection)
        self.patches_per_token = v.pooling_kernel_size**2

    def embed_patches(self, patches: Tensor, positions: Tensor) -> Tensor:
        """See `Gemma4Multimodal.embed_patches`."""
        return self.embed_vision(self.vision_tower(patches, positions))  # type: ignore[no-any-return]
