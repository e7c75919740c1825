"""Qwen2-VL and Qwen2.5-VL: images and videos keep their resolution and become a varying number of tokens.

Both sides are rounded to a multiple of patch_size * merge_size, with the aspect ratio kept and the number of pixels
within limits (Wang et al., "Qwen2-VL", 2024, section 2.1; rounded as transformers' `smart_resize` does). The result is
cut into patches of `temporal_patch_size` frames. An image is a video of one frame. The last frame is repeated until the
number of frames is a multiple of `temporal_patch_size`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ligerzoo.checks import integer
from ligerzoo.errors import ImageError
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.vision.family import PreprocessedMedia, ProcessorFamily
from ligerzoo.vision.io import MAX_PIXELS
from ligerzoo.vision.settings import ProcessorFiles, Settings
from ligerzoo.vision.transforms import BICUBIC, CLIP_MEAN, CLIP_STD, RGB, Normalization, resample_of, resize

MAX_ASPECT_RATIO = 200


@dataclass(frozen=True, kw_only=True)
class Qwen2VLPreprocessor:
    """Cuts images or videos into patches.

    Attributes:
        min_pixels, max_pixels: range of the number of pixels of a resized frame.
        patch_size: side of a patch in pixels.
        merge_size: side, in patches, of the squares that the model merges into one token.
        temporal_patch_size: number of frames that a patch covers.
        resample: Pillow's number of the resampling filter.
        normalization: maps bytes to fp32.
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
        """Builds it from the entries of preprocessor_config.json.

        The entries `min_pixels` and `max_pixels` take precedence over `size.shortest_edge` and `size.longest_edge`.

        Raises:
            ConfigError: an entry is malformed or not supported.
        """
        return cls._from_settings(settings, **cls._limits(settings, 4 * 28**2, 1280 * 28**2))

    @classmethod
    def for_videos(cls, settings: Settings) -> Qwen2VLPreprocessor:
        """Builds it from the entries of video_preprocessor_config.json or, without one, preprocessor_config.json.

        It uses all frames of a video. Settings that ask for sampling are refused.

        Raises:
            ConfigError: an entry is malformed or not supported.
        """
        settings.require("do_sample_frames", False)
        settings.require("cap_pixels_per_frame", False)
        return cls._from_settings(settings, **cls._limits(settings, 128 * 28**2, 768 * 28**2))

    @staticmethod
    def _limits(settings: Settings, min_pixels: int, max_pixels: int) -> dict[str, Any]:
        """Reads the limits of pixels, with the defaults of a kind of media."""
        size, pixels = settings.section("size"), integer(1, MAX_PIXELS)
        shortest = size.read("shortest_edge", pixels, min_pixels)
        longest = size.read("longest_edge", pixels, max_pixels)
        return {
            "min_pixels": settings.read("min_pixels", pixels, shortest),
            "max_pixels": settings.read("max_pixels", pixels, longest),
        }

    @classmethod
    def _from_settings(
        cls, settings: Settings, patch_size: int = 14, mean: RGB = CLIP_MEAN, std: RGB = CLIP_STD, **fields: Any
    ) -> Self:
        """Reads the settings that images and videos have, with the defaults of a family; `fields` are the others."""
        return cls(
            patch_size=settings.read("patch_size", integer(1, 256), patch_size),
            merge_size=settings.read("merge_size", integer(1, 16), 2),
            temporal_patch_size=settings.read("temporal_patch_size", integer(1, 8), 2),
            resample=resample_of(settings, BICUBIC),
            normalization=Normalization.from_settings(settings, mean=mean, std=std),
            **fields,
        )

    def __call__(self, frames: Tensor, where: str = "image") -> tuple[Tensor, tuple[int, int, int]]:
        """Cuts an image or a video into normalized patches.

        Args:
            frames: uint8 (T, 3, H, W); an image has T = 1.
            where: the name of the image or video in error messages.

        Returns:
            The patches, fp32 (t * h * w, 3 * temporal_patch_size * patch_size**2), and their grid (t, h, w); see `cut`.

        Raises:
            ImageError: the aspect ratio is above `MAX_ASPECT_RATIO`, or Pillow is not installed.
        """
        patches, grid = self.cut(frames, where)
        return self.normalization(patches).flatten(1), grid

    def cut(self, frames: Tensor, where: str = "image") -> tuple[Tensor, tuple[int, int, int]]:
        """Resizes an image or a video and cuts it into patches without normalizing them.

        Returns:
            The patches, uint8 (t * h * w, 3, temporal_patch_size * patch_size**2), and their grid (t, h, w). The rows
            are ordered by time, merged square, and patch within the square. The features of a row are ordered by
            channel, frame, pixel row and pixel column.
        """
        height, width = self.resized(frames.shape[2], frames.shape[3], where, len(frames))
        frames = torch.stack([resize(frame, height, width, self.resample, where) for frame in frames])
        t = math.ceil(len(frames) / self.temporal_patch_size)
        numbers = torch.arange(t * self.temporal_patch_size, device="cpu")
        frames = frames[numbers.clamp(max=len(frames) - 1)]
        patch, merge = self.patch_size, self.merge_size
        h, w = height // patch, width // patch
        blocks = frames.reshape(t, self.temporal_patch_size, 3, h // merge, merge, patch, w // merge, merge, patch)
        return blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, 3, -1), (t, h, w)

    def resized(self, height: int, width: int, where: str = "image", frames: int = 1) -> tuple[int, int]:
        """Returns the height and width in pixels to which an image of this size is resized.

        Args:
            height, width: size in pixels.
            where: the name of the image or video in error messages.
            frames: number of frames of a video; unused, since the limits of pixels hold for each frame.

        Raises:
            ImageError: the aspect ratio is above `MAX_ASPECT_RATIO`.
        """
        return self._within_limits(height, width, where, 1, 1)

    def _within_limits(self, height: int, width: int, where: str, frames: int, rounded_frames: int) -> tuple[int, int]:
        """Returns height and width such that the pixels of this number of frames are within the limits.

        Args:
            height, width: size in pixels.
            where: the name of the image or video in error messages.
            frames: number of frames, for the scale.
            rounded_frames: number of frames, for the comparison with the limits.
        """
        if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
            got, expected = f"{width} x {height} pixels", f"an aspect ratio of at most {MAX_ASPECT_RATIO}"
            what, remedy = "the image is too long and thin", "Crop the image."
            raise ImageError(what, where=where, got=got, expected=expected, remedy=remedy)
        unit = self.patch_size * self.merge_size
        tall, wide = round(height / unit) * unit, round(width / unit) * unit
        if rounded_frames * tall * wide > self.max_pixels:
            shrink = math.sqrt(frames * height * width / self.max_pixels)
            tall = max(unit, math.floor(height / shrink / unit) * unit)
            wide = max(unit, math.floor(width / shrink / unit) * unit)
        elif rounded_frames * tall * wide < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (frames * height * width))
            tall, wide = math.ceil(height * grow / unit) * unit, math.ceil(width * grow / unit) * unit
        return tall, wide

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Returns the number of prompt tokens for a grid (t, h, w) of patches."""
        return math.prod(grid) // self.merge_size**2


@dataclass(frozen=True, kw_only=True)
class ClipPreprocessor(Qwen2VLPreprocessor):
    """Cuts videos into patches, with limits for all frames together.

    Attributes:
        min_pixels, max_pixels: range of the number of pixels of all resized frames of a video together.
    """

    def resized(self, height: int, width: int, where: str = "video", frames: int = 1) -> tuple[int, int]:
        """Returns the height and width in pixels to which the frames of a video of this size are resized.

        Raises:
            ImageError: the aspect ratio is above `MAX_ASPECT_RATIO`, or the video is shorter than a temporal patch.
        """
        temporal, unit = self.temporal_patch_size, self.patch_size * self.merge_size
        if frames < temporal:
            what, remedy = "the video has too few frames", "Repeat the frame, or pass it as an image."
            raise ImageError(what, where=where, got=frames, expected=f"at least {temporal}", remedy=remedy)
        if min(height, width) < unit:
            scale = max(unit / height, unit / width)
            height, width = int(height * scale), int(width * scale)
        return self._within_limits(height, width, where, frames, round(frames / temporal) * temporal)


class Qwen2VLProcessorFamily(ProcessorFamily):
    """Replaces each image or video by one token for each merge_size x merge_size patches."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen2_vl",)
    hf_class = "Qwen2VLProcessor"
    image_processor = "Qwen2VLImageProcessor"

    def __init__(self, files: ProcessorFiles, tokenizer: Tokenizer) -> None:
        self.images = Qwen2VLPreprocessor.for_images(files.image_settings())
        self.videos = self.video_preprocessor(files.video_settings())
        named = tokenizer.special_tokens
        self.placeholders = {
            "image": named.get("image_token", "<|image_pad|>"),
            "video": named.get("video_token", "<|video_pad|>"),
        }
        self.soft_tokens = self.placeholders

    def video_preprocessor(self, settings: Settings) -> Qwen2VLPreprocessor:
        """Builds the preprocessor of videos."""
        return Qwen2VLPreprocessor.for_videos(settings)

    def image_text(self, height: int, width: int, where: str = "image") -> str:
        tall, wide = self.images.resized(height, width, where)
        patch = self.images.patch_size
        return self.soft_tokens["image"] * self.images.num_tokens((1, tall // patch, wide // patch))

    def preprocess_images(self, images: list[list[Tensor]]) -> PreprocessedMedia:
        clips = [image[None] for group in images for image in group]
        return self._preprocess(self.images, clips, "image", "pixel_values")

    def preprocess_videos(self, videos: list[Tensor], fps: list[float]) -> PreprocessedMedia:
        return self._preprocess(self.videos, videos, "video", "pixel_values_videos")

    def _preprocess(
        self, preprocessor: Qwen2VLPreprocessor, clips: list[Tensor], kind: str, name: str
    ) -> PreprocessedMedia:
        outputs = [preprocessor(clip, f"{kind}s[{i}]") for i, clip in enumerate(clips)]
        grids = [grid for _, grid in outputs]
        replacements = [self.soft_tokens[kind] * preprocessor.num_tokens(grid) for grid in grids]
        inputs = {name: torch.cat([patches for patches, _ in outputs]), f"{kind}_grid_thw": torch.tensor(grids)}
        return PreprocessedMedia(inputs, replacements)


class Qwen2_5VLProcessorFamily(Qwen2VLProcessorFamily):
    """Qwen2-VL's preprocessing, plus the seconds that a patch of a video covers."""

    model_types = ("qwen2_5_vl",)
    hf_class = "Qwen2_5_VLProcessor"

    def preprocess_videos(self, videos: list[Tensor], fps: list[float]) -> PreprocessedMedia:
        inputs, replacements = super().preprocess_videos(videos, fps)
        seconds = [self.videos.temporal_patch_size / frames for frames in fps]
        return PreprocessedMedia({**inputs, "second_per_grid_ts": torch.tensor(seconds)}, replacements)


FAMILIES = (Qwen2VLProcessorFamily, Qwen2_5VLProcessorFamily)
