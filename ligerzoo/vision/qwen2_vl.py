"""Images and videos for Qwen2-VL and Qwen2.5-VL, which see every image in its own resolution.

Both sides are rounded to a multiple of patch * merge, keeping the aspect ratio and the number of pixels within limits
(Wang et al., "Qwen2-VL", 2024, section 2.1; the rounding is that of transformers' `smart_resize`). The image is then
cut into patches of `temporal_patch_size` frames: an image is a video of one frame, and the last frame of a video is
repeated until they come out even.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ligerzoo.errors import ImageError
from ligerzoo.vision.io import MAX_PIXELS
from ligerzoo.vision.settings import Settings
from ligerzoo.vision.transforms import BICUBIC, CLIP_MEAN, CLIP_STD, Normalization, resample_of, resize

MAX_ASPECT_RATIO = 200


@dataclass(frozen=True, kw_only=True)
class Qwen2VLPreprocessor:
    """Cuts images, or videos, into patches.

    Attributes:
        min_pixels, max_pixels: how many pixels a frame has after resizing, as nearly as its aspect ratio allows.
        patch_size: the side of a patch in pixels.
        merge_size: the side in patches of the squares that the model merges into one token.
        temporal_patch_size: how many frames a patch covers.
        resample: Pillow's number of the filter to resize with.
        normalization: what turns bytes into numbers.
    """

    min_pixels: int
    max_pixels: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    resample: int
    normalization: Normalization

    @classmethod
    def for_images(cls, settings: Settings) -> Qwen2VLPreprocessor:
        """As a preprocessor_config.json has it. The limits stand there as `min_pixels` and `max_pixels`, or else as
        `shortest_edge` and `longest_edge` of `size`.

        Raises:
            ConfigError: an entry is malformed, or asks for what is not supported.
        """
        return cls._from_settings(settings, min_pixels=4 * 28**2, max_pixels=1280 * 28**2)

    @classmethod
    def for_videos(cls, settings: Settings) -> Qwen2VLPreprocessor:
        """As a video_preprocessor_config.json has it, or else the preprocessor_config.json. All the frames that are
        given are taken: none are sampled.

        Raises:
            ConfigError: an entry is malformed, or asks for what is not supported.
        """
        settings.require("do_sample_frames", False)
        settings.require("cap_pixels_per_frame", False)
        return cls._from_settings(settings, min_pixels=128 * 28**2, max_pixels=768 * 28**2)

    @classmethod
    def _from_settings(cls, settings: Settings, *, min_pixels: int, max_pixels: int) -> Qwen2VLPreprocessor:
        size = settings.section("size")
        shortest = size.integer("shortest_edge", min_pixels, at_most=MAX_PIXELS)
        longest = size.integer("longest_edge", max_pixels, at_most=MAX_PIXELS)
        return cls(
            min_pixels=settings.integer("min_pixels", shortest, at_most=MAX_PIXELS),
            max_pixels=settings.integer("max_pixels", longest, at_most=MAX_PIXELS),
            patch_size=settings.integer("patch_size", 14, at_most=256),
            merge_size=settings.integer("merge_size", 2, at_most=16),
            temporal_patch_size=settings.integer("temporal_patch_size", 2, at_most=8),
            resample=resample_of(settings, BICUBIC),
            normalization=Normalization.from_settings(settings, mean=CLIP_MEAN, std=CLIP_STD),
        )

    def __call__(self, frames: Tensor, where: str = "image") -> tuple[Tensor, tuple[int, int, int]]:
        """The patches of an image or a video, as the model sees them.

        Args:
            frames: uint8 (T, 3, H, W); an image has T = 1.
            where: what errors call it.

        Returns:
            The patches, fp32 (t * h * w, 3 * temporal_patch_size * patch_size**2), and their grid (t, h, w); see `cut`.

        Raises:
            ImageError: one side is more than 200 times as long as the other; or Pillow is not installed.
        """
        patches, grid = self.cut(frames, where)
        return self.normalization(patches).flatten(1), grid

    def cut(self, frames: Tensor, where: str = "image") -> tuple[Tensor, tuple[int, int, int]]:
        """Resized and cut into patches that still are bytes.

        Returns:
            The patches, uint8 (t * h * w, 3, temporal_patch_size * patch_size**2), and their grid (t, h, w). The rows
            go through time, then through the squares that are merged, then through the patches of a square; the
            features of a row through channels, frames, rows and columns of pixels.
        """
        height, width = self.resized(frames.shape[2], frames.shape[3], where)
        frames = torch.stack([resize(frame, height, width, self.resample, where) for frame in frames])
        t = math.ceil(len(frames) / self.temporal_patch_size)
        numbers = torch.arange(t * self.temporal_patch_size, device="cpu")
        frames = frames[numbers.clamp(max=len(frames) - 1)]
        patch, merge = self.patch_size, self.merge_size
        h, w = height // patch, width // patch
        blocks = frames.reshape(t, self.temporal_patch_size, 3, h // merge, merge, patch, w // merge, merge, patch)
        return blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, 3, -1), (t, h, w)

    def resized(self, height: int, width: int, where: str = "image") -> tuple[int, int]:
        """The height and width in pixels that an image of this size is resized to.

        Raises:
            ImageError: one side is more than 200 times as long as the other.
        """
        if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
            raise ImageError(
                "is too long and thin",
                where=where,
                got=f"{width} x {height} pixels",
                expected=f"sides whose ratio is at most {MAX_ASPECT_RATIO}",
                remedy="Crop it.",
            )
        unit = self.patch_size * self.merge_size
        tall, wide = round(height / unit) * unit, round(width / unit) * unit
        if tall * wide > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            tall = max(unit, math.floor(height / shrink / unit) * unit)
            wide = max(unit, math.floor(width / shrink / unit) * unit)
        elif tall * wide < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            tall, wide = math.ceil(height * grow / unit) * unit, math.ceil(width * grow / unit) * unit
        return tall, wide

    def tokens(self, grid: tuple[int, int, int]) -> int:
        """How many tokens of the prompt the patches of this grid become."""
        return math.prod(grid) // self.merge_size**2
