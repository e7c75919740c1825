"""Shared by GLM-4.1V and GLM-4.5V: the vision tower, and videos whose frames are marked as images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.errors import LigerzooError
from ligerzoo.layers import (
    BicubicPositionEmbedding,
    DownsamplingVisionTower,
    GatedMLP,
    PatchEmbedding,
    ProjectedGatedMLP,
    RMSNorm,
)
from ligerzoo.models.config import PartialRotaryConfig, refuse_unless
from ligerzoo.models.vision_lm import SectionedVisionLM, SectionedVisionLMConfig, VisionTowerConfig, tower_parts


@dataclass(frozen=True, kw_only=True)
class Glm4vVisionConfig(VisionTowerConfig):
    """Configuration of the vision tower. Defaults: those of transformers' Glm4vVisionConfig.

    Attributes:
        hidden_size: features of a patch.
        intermediate_size: intermediate features of the MLP after the merge.
        out_hidden_size: features of an output token, which equal the decoder's `hidden_size`; also the intermediate
            features of the MLPs of blocks.
        image_size: side in pixels of the square that the learned positions cover.
        rms_norm_eps: eps of the RMSNorms.
        attention_bias: add biases to the query, key and value projections.
    """

    depth: int = 24
    num_heads: int = 12
    hidden_size: int = 1536
    intermediate_size: int = 13696
    out_hidden_size: int = 4096
    image_size: int = 336
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        size, expected = self.image_size, f"at least patch_size, {self.patch_size}"
        refuse_unless(size >= self.patch_size, "vision_config, image_size", size, expected)

    @property
    def patch_features(self) -> int:
        return self.hidden_size

    @property
    def token_features(self) -> int:
        return self.out_hidden_size


@dataclass(frozen=True, kw_only=True)
class Glm4VisionLMConfig(PartialRotaryConfig, SectionedVisionLMConfig):
    """Configuration of GLM-4 with a vision tower.

    Attributes:
        image_start_token_id: token before an image or a frame; unused by the model.
        image_end_token_id: token after an image or a frame; unused by the model.
        video_start_token_id: token before a video. Image tokens between it and the next `video_end_token_id` are those
            of the video's frames.
        video_end_token_id: token after a video.
        video_token_id: placeholder token of a video, which the processor replaces by image tokens.
    """

    vision_config: Glm4vVisionConfig = field(default_factory=Glm4vVisionConfig)
    num_hidden_layers: int = 40
    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float = 0.5
    mrope_section: Sequence[int] = field(default_factory=lambda: [8, 12, 12])
    image_token_id: int = 151343
    video_token_id: int = 151344
    image_start_token_id: int = 151339
    image_end_token_id: int = 151340
    video_start_token_id: int = 151341
    video_end_token_id: int = 151342


class Glm4VisionLM(SectionedVisionLM):
    """GLM-4 with a vision tower; the arguments are those of `SectionedVisionLM`.

    Text separates the frames of a video. Their tokens are image tokens, between those that begin and end the video.
    """

    config: Glm4VisionLMConfig
    separates_frames = True
    inputs_per_token = ("mm_token_type_ids",)

    def placeholder_masks(
        self, input_ids: Tensor, token_types: Tensor | None = None, segment_start: Tensor | None = None
    ) -> dict[str, Tensor]:
        """See `LanguageModel.placeholder_masks`. Image tokens of type 2, if types are given, are those of frames.

        In transformers, a batch has images or videos, and all image tokens are theirs.
        """
        is_image, is_video = super().placeholder_masks(input_ids).values()
        in_video = is_image & self._in_videos(input_ids, token_types, segment_start)
        return {"pixel_values": is_image & ~in_video, "pixel_values_videos": is_video | in_video}

    def _in_videos(self, input_ids: Tensor, token_types: Tensor | None, segment_start: Tensor | None) -> Tensor:
        """Returns which tokens are within videos, (B, T) bool; tokens after the end of `token_types` are not."""
        rows, tokens = input_ids.shape
        if token_types is not None:
            if token_types.ndim != 2 or len(token_types) != rows or token_types.shape[1] > tokens:
                what = f"mm_token_type_ids has shape {tuple(token_types.shape)}"
                raise LigerzooError(what, expected=f"{(rows, tokens)}, one per token")
            return F.pad(token_types == 2, (0, tokens - token_types.shape[1])).to(input_ids.device)
        index, c = torch.arange(1, tokens + 1, device=input_ids.device), self.config
        marks = (c.video_start_token_id, c.video_end_token_id)
        begin, end = ((index * (input_ids == mark)).cummax(1).values for mark in marks)
        return begin > (end if segment_start is None else torch.maximum(end, segment_start))


def glm4v_tower(config: Glm4vVisionConfig) -> DownsamplingVisionTower:
    """Builds the vision tower, from patches to embeddings of `out_hidden_size` features."""
    c, m = config, config.spatial_merge_size

    def norm() -> RMSNorm:
        return RMSNorm(c.hidden_size, c.rms_norm_eps)

    def mlp() -> GatedMLP:
        return GatedMLP(c.hidden_size, c.out_hidden_size)

    biases = {"patch_bias": True, "qkv_bias": c.attention_bias, "output_bias": False}
    return DownsamplingVisionTower(
        BicubicPositionEmbedding(c.image_size // c.patch_size, c.hidden_size),
        *tower_parts(c, norm, mlp, **biases),
        ProjectedGatedMLP(c.out_hidden_size, c.intermediate_size),
        post_conv_layernorm=norm(),
        downsample=PatchEmbedding((c.hidden_size, m, m), c.out_hidden_size, bias=True),
        post_layernorm=norm(),
        merge_size=m,
    )
