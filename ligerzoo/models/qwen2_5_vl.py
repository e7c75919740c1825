"""Qwen2.5-VL (Bai et al. 2025, "Qwen2.5-VL Technical Report").

    pixels -> patches -> L' x [ x += attention(norm(x));  x += mlp(norm(x)) ] -> 2 x 2 merged into one -> embeddings
    tokens, and these in the places of images and videos -> Qwen2

Distinctive, against Qwen2-VL: the tower's blocks are built as the decoder's, with RMSNorm and a gated feed-forward, and
in all but a few of them patches see only a window of their frame, 8 x 8 patches; and a video's positions in time go by
seconds, and not by frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor

from ligerzoo.errors import ConfigError
from ligerzoo.layers import Context, GatedMLP, RMSNorm, WindowedVisionTower
from ligerzoo.models.causal_lm import Make
from ligerzoo.models.vision_lm import VisionLM, VisionLMConfig, VisionTowerConfig, tower_parts


@dataclass(frozen=True, kw_only=True)
class Qwen2_5VLVisionConfig(VisionTowerConfig):
    """The numbers of the vision tower; defaults are those of transformers' Qwen2_5_VLVisionConfig.

    Attributes:
        hidden_size: the features of a patch.
        intermediate_size: the width of the feed-forwards.
        out_hidden_size: the features of a token, which are the decoder's.
        window_size: the side of a window, in pixels; it is rounded down to whole tokens.
        fullatt_block_indexes: the numbers of the blocks in which a patch sees all of its frame.
        tokens_per_second: how many positions in time a video takes for each of its seconds.
    """

    hidden_size: int = 3584
    intermediate_size: int = 3420
    out_hidden_size: int = 3584
    window_size: int = 112
    fullatt_block_indexes: Sequence[int] = field(default_factory=lambda: [7, 15, 23, 31])
    tokens_per_second: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise ConfigError(
                "windows smaller than a token", where="vision_config, window_size", got=self.window_size,
                expected=f"at least patch_size * spatial_merge_size, {self.patch_size * self.spatial_merge_size}",
            )  # fmt: skip
        blocks = self.fullatt_block_indexes
        if not isinstance(blocks, list | tuple) or not all(type(block) is int and block >= 0 for block in blocks):
            raise ConfigError(
                "no numbers of blocks", where="vision_config, fullatt_block_indexes", got=repr(blocks)[:200],
                expected="a list of whole numbers",
            )  # fmt: skip

    @property
    def patch_features(self) -> int:
        return self.hidden_size

    @property
    def token_features(self) -> int:
        return self.out_hidden_size

    @property
    def window(self) -> int:
        """The side of a window, in tokens."""
        return self.window_size // self.spatial_merge_size // self.patch_size


@dataclass(frozen=True, kw_only=True)
class Qwen2_5VLConfig(VisionLMConfig):
    """The numbers of a Qwen2.5-VL."""

    vision_config: Qwen2_5VLVisionConfig = field(default_factory=lambda: Qwen2_5VLVisionConfig(out_hidden_size=8192))


class Qwen2_5VL(VisionLM):
    """Qwen2.5-VL with a language-model head."""

    config: Qwen2_5VLConfig

    def __init__(self, config: Qwen2_5VLConfig, **make: Unpack[Make]) -> None:
        super().__init__(config, vision_tower(config.vision_config, **make), **make)

    def embed(
        self,
        x: Tensor,
        context: Context,
        *,
        second_per_grid_ts: Tensor | Sequence[float] | None = None,
        **vision: Any,
    ) -> Tensor:
        """As `VisionLM.embed`, which has the other arguments.

        Args:
            x: what `forward` has as `input_ids` or `inputs_embeds`.
            context: where they stand.
            second_per_grid_ts: (n,), the seconds from frame to frame of each video, a frame being one of its grid; 1
                when None. (Transformers before 5.18 rounds them down to whole ones.)
            vision: images and videos.

        Raises:
            ValueError: seconds, patches, grids and tokens do not fit together.
        """
        grid = vision.get("video_grid_thw")
        videos = 0 if grid is None else len(grid)
        told = [1.0] * videos if second_per_grid_ts is None else second_per_grid_ts
        # In fp64, to round once, as transformers does with a list.
        seconds = torch.as_tensor(told, dtype=torch.float64, device=x.device)
        if seconds.shape != (videos,):
            raise ValueError(
                f"second_per_grid_ts has shape {tuple(seconds.shape)}; expected ({videos},), one for each video"
            )
        interval = (self.config.vision_config.tokens_per_second * seconds).float()
        return super().embed(x, context, frame_interval=interval, **vision)


def vision_tower(config: Qwen2_5VLVisionConfig, **make: Unpack[Make]) -> WindowedVisionTower:
    """The tower, from patches to embeddings of the decoder's size."""
    c = config

    def norm() -> RMSNorm:
        return RMSNorm(c.hidden_size, 1e-6, **make)

    def mlp() -> GatedMLP:
        return GatedMLP(c.hidden_size, c.intermediate_size, bias=True, **make)

    return WindowedVisionTower(
        *tower_parts(c, norm, mlp, **make),
        merge_size=c.spatial_merge_size, window=c.window, full_blocks=c.fullatt_block_indexes,
    )  # fmt: skip
