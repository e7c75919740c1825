"""Qwen2.5-VL (Bai et al. 2025, "Qwen2.5-VL Technical Report").

    pixels -> patches -> L' x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> merge 2 x 2 -> vision embeddings
    tokens -> embedding, vision embeddings at image and video tokens -> Qwen2

Distinctive: Qwen2-VL with windowed attention, RMSNorm and SwiGLU in the vision tower; video positions in seconds.

The tower's blocks are built like the decoder's, with RMSNorm and a gated MLP. In all but a few blocks a patch attends
only within a window of its frame, 8 x 8 patches. Temporal positions of a video count seconds instead of frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ligerzoo.errors import LigerzooError
from ligerzoo.layers import Context, GatedMLP, RMSNorm, WindowedVisionTower
from ligerzoo.models.config import are_indices, refuse_unless
from ligerzoo.models.qwen2_vl import Qwen2VisionLM, Qwen2VisionLMConfig
from ligerzoo.models.vision_lm import VisionTowerConfig, patch_merger, tower_parts


@dataclass(frozen=True, kw_only=True)
class Qwen2_5VLVisionConfig(VisionTowerConfig):
    """Configuration of the vision tower. Defaults: those of transformers' Qwen2_5_VLVisionConfig.

    Attributes:
        hidden_size: features of a patch.
        intermediate_size: intermediate features of an MLP.
        out_hidden_size: features of an output token; equals the decoder's `hidden_size`.
        window_size: side of an attention window, in pixels; rounded down to a multiple of a token's side.
        fullatt_block_indexes: indices of the blocks in which a patch attends to its whole frame, counted from 0.
        tokens_per_second: temporal positions per second of video.
    """

    hidden_size: int = 3584
    intermediate_size: int = 3420
    out_hidden_size: int = 3584
    window_size: int = 112
    fullatt_block_indexes: Sequence[int] = field(default_factory=lambda: [7, 15, 23, 31])
    tokens_per_second: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        least = f"at least patch_size * spatial_merge_size, {self.patch_size * self.spatial_merge_size}"
        what = "window smaller than one token"
        refuse_unless(self.window >= 1, "vision_config, window_size", self.window_size, least, what)
        blocks, where = self.fullatt_block_indexes, "vision_config, fullatt_block_indexes"
        refuse_unless(are_indices(blocks), where, blocks, "a list of integers, 0 or more", "invalid block indices")

    @property
    def patch_features(self) -> int:
        return self.hidden_size

    @property
    def token_features(self) -> int:
        return self.out_hidden_size

    @property
    def window(self) -> int:
        """Side of an attention window, in tokens."""
        return self.window_size // self.spatial_merge_size // self.patch_size


@dataclass(frozen=True, kw_only=True)
class Qwen2_5VLConfig(Qwen2VisionLMConfig):
    """Configuration of Qwen2.5-VL."""

    vision_config: Qwen2_5VLVisionConfig = field(default_factory=lambda: Qwen2_5VLVisionConfig(out_hidden_size=8192))


class Qwen2_5VL(Qwen2VisionLM):
    """Qwen2.5-VL with a language-model head."""

    config: Qwen2_5VLConfig
    inputs_per_video = ("frame_interval", "second_per_grid_ts")

    def __init__(self, config: Qwen2_5VLConfig) -> None:
        super().__init__(config, windowed_tower(config.vision_config))

    def embed(
        self, x: Tensor, context: Context, *, second_per_grid_ts: Tensor | Sequence[float] | None = None, **vision: Any
    ) -> Tensor:
        """Embeds tokens, images and videos; see `VisionLM.embed`.

        Args:
            x: `input_ids` or `inputs_embeds` of `forward`.
            context: positions and mask of these tokens.
            second_per_grid_ts: (n,), seconds between consecutive temporal patches (`video_grid_thw[:, 0]`) of each
                video; 1 when None. transformers before 5.18 rounds them down to integers.
            vision: the image and video arguments of `VisionLM.embed`.

        Raises:
            ValueError: the numbers of seconds, patches, grids and vision tokens do not match.
        """
        grid = vision.get("video_grid_thw")
        videos = 0 if grid is None else len(grid)
        intervals = [1.0] * videos if second_per_grid_ts is None else second_per_grid_ts
        # fp64, so that the product is rounded once, as in transformers, which passes a list.
        seconds = torch.as_tensor(intervals, dtype=torch.float64, device=x.device)
        if seconds.shape != (videos,):
            what, expected = f"second_per_grid_ts has shape {tuple(seconds.shape)}", f"({videos},), one value per video"
            raise LigerzooError(what, expected=expected)
        interval = (self.config.vision_config.tokens_per_second * seconds).float()
        return super().embed(x, context, frame_interval=interval, **vision)


def windowed_tower(config: Qwen2_5VLVisionConfig) -> WindowedVisionTower:
    """Builds the vision tower, from patches to embeddings of `out_hidden_size` features."""
    c = config

    def norm() -> RMSNorm:
        return RMSNorm(c.hidden_size, 1e-6)

    def mlp() -> GatedMLP:
        return GatedMLP(c.hidden_size, c.intermediate_size, bias=True)

    parts = *tower_parts(c, norm, mlp), patch_merger(c, norm())
    full_blocks = c.fullatt_block_indexes
    return WindowedVisionTower(*parts, merge_size=c.spatial_merge_size, window=c.window, full_blocks=full_blocks)
