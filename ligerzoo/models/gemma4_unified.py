"""Gemma 4 12B with images and videos, without a vision tower (Gemma Team 2026).

    pixels -> patches of 48 x 48 pixels -> norm(project(norm(x))) + columns and rows -> norm -> norm -> image embeddings
    tokens -> embedding, image embeddings at image and video tokens -> Gemma 4

Distinctive: Gemma 4 that projects patches of raw pixels into the decoder, without a tower.

In layers with a sliding window, tokens of an image attend to each other in both directions. Audio is not read: its
projection is kept in the files.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ligerzoo.layers import Linear, LMHead, NormedProjection, PatchProjector, RMSNorm
from ligerzoo.models.config import check_fields
from ligerzoo.models.gemma4_multimodal import Gemma4Multimodal, Gemma4MultimodalConfig
from ligerzoo.models.gemma4_text import gemma4_decoder


@dataclass(frozen=True, kw_only=True)
class Gemma4UnifiedVisionConfig:
    """Configuration of the projection of patches. Defaults: Gemma 4 12B.

    Attributes:
        patch_size: side of the smaller patches of the processor, in pixels.
        pooling_kernel_size: side of a square of smaller patches that is one patch of the model.
        mm_embed_dim: features of a patch.
        mm_posemb_size: largest number of columns, or rows, of patches.
    """

    patch_size: int = 16
    pooling_kernel_size: int = 3
    mm_embed_dim: int = 3840
    mm_posemb_size: int = 1120
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Gemma4UnifiedConfig(Gemma4MultimodalConfig):
    """Configuration of Gemma 4 12B. The fields of per-layer embeddings and mixtures have no other values.

    Attributes:
        vision_config: config of the projection of patches; None for a model that reads text only.
    """

    vision_config: Gemma4UnifiedVisionConfig | None = field(default_factory=Gemma4UnifiedVisionConfig)
    max_position_embeddings: int = 262144
    sliding_window: int | None = 1024
    use_bidirectional_attention: str | None = "vision"
    hidden_size_per_layer_input: int = field(default=0, metadata={"least": 0})


class Gemma4Unified(Gemma4Multimodal):
    """Gemma 4 12B with a language-model head. Text separates the frames of a video."""

    config: Gemma4UnifiedConfig
    embed_vision: PatchProjector

    def __init__(self, config: Gemma4UnifiedConfig) -> None:
        c, v = config, config.vision_config
        head = LMHead(c.hidden_size, c.vocab_size, softcap=c.final_logit_softcapping)
        if v is None:
            super().__init__(c, gemma4_decoder(c), head)
            return
        size, pixels = v.mm_embed_dim, 3 * (v.patch_size * v.pooling_kernel_size) ** 2
        norm = RMSNorm(size, v.rms_norm_eps, round_before_scale=False, elementwise_affine=False)
        embedder = NormedProjection(norm, Linear(size, c.hidden_size, bias=False))
        projector = PatchProjector(pixels, size, v.mm_posemb_size, embedder)
        super().__init__(c, gemma4_decoder(c), head, embed_vision=projector)

    def embed_patches(self, patches: Tensor, positions: Tensor) -> Tensor:
        """See `Gemma4Multimodal.embed_patches`."""
        return self.embed_vision(patches, positions)  # type: ignore[no-any-return]
