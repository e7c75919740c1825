"""Muse Glimmer: images of any size, and videos whose frames are separated by timestamps.

Both sides are whole numbers of merged patches, with about the image's aspect ratio and a limited number of tokens. The
result is cut into patches of `temporal_patch_size` frames, row by row. An image is repeated as the frames of one patch.
Resized with Pillow's Lanczos filter, rounded and written as transformers' `MuseGlimmerImageProcessor` and
`MuseGlimmerProcessor` do.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from ligerzoo.checks import integer
from ligerzoo.entries import BOOLEAN
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.vision.family import PreprocessedMedia, ProcessorFamily
from ligerzoo.vision.settings import POSITIVE, ProcessorFiles, Settings
from ligerzoo.vision.transforms import HALF, LANCZOS, Normalization, resample_of, resize

_MAX_TOKENS, _MAX_FRAMES = 2**16, 2**16


@dataclass(frozen=True, kw_only=True)
class MuseGlimmerPreprocessor:
    """Cuts images or videos into patches.

    Attributes:
        max_tokens: largest number of tokens of an image, or of a frame of a video.
        patch_size: side of a patch in pixels.
        merge_size: side, in patches, of the squares that the model merges into one token.
        temporal_patch_size: number of frames that a patch covers.
        resample: Pillow's number of the resampling filter.
        normalization: maps bytes to fp32.
    """

    max_tokens: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    resample: int
    normalization: Normalization

    @classmethod
    def from_settings(cls, settings: Settings, limit: str, default: int, **fields: float | None) -> Self:
        """Builds it from the entries of preprocessor_config.json.

        Args:
            settings: the entries.
            limit: the entry that limits the number of tokens.
            default: the limit without this entry.
            fields: further fields of a subclass.

        Raises:
            ConfigError: an entry is malformed or not supported.
        """
        return cls(
            max_tokens=settings.read(limit, integer(1, _MAX_TOKENS), default),
            patch_size=settings.read("patch_size", integer(1, 256), 14),
            merge_size=settings.read("merge_size", integer(1, 16), 2),
            temporal_patch_size=settings.read("temporal_patch_size", integer(1, 8), 2),
            resample=resample_of(settings, LANCZOS),
            normalization=Normalization.from_settings(settings, mean=HALF, std=HALF),
            **fields,
        )

    def __call__(self, frames: Tensor, where: str = "image") -> tuple[Tensor, tuple[int, int, int]]:
        """Cuts an image or a video into normalized patches.

        Args:
            frames: uint8 (T, 3, H, W); an image has T = 1. The last frame is repeated to fill a patch.
            where: the name of the image or video in error messages.

        Returns:
            The patches, fp32 (t * h * w, temporal_patch_size * 3 * patch_size**2), and their grid (t, h, w).

        Raises:
            ImageError: the image is too large, or Pillow is not installed.
        """
        rows, columns = self.tokens(frames.shape[2], frames.shape[3])
        h, w, patch, size = rows * self.merge_size, columns * self.merge_size, self.patch_size, self.temporal_patch_size
        resized = [resize(frame, h * patch, w * patch, self.resample, where) for frame in frames]
        pixels = self.normalization(torch.stack(resized + resized[-1:] * (-len(resized) % size)))
        blocks = pixels.view(-1, size, 3, h, patch, w, patch).permute(0, 3, 5, 1, 2, 4, 6)
        return blocks.reshape(len(blocks) * h * w, -1), (len(blocks), h, w)

    def tokens(self, height: int, width: int) -> tuple[int, int]:
        """Returns the rows and columns of tokens of an image of this size in pixels.

        Of the whole numbers next to the exact ones, scaled down to the limit, those with the closest aspect ratio.
        """
        unit = self.patch_size * self.merge_size
        rows, columns = height / unit, width / unit
        if rows * columns > self.max_tokens:
            ratio = columns / rows
            rows = (self.max_tokens / ratio) ** 0.5
            columns = rows * ratio
        sides = [(math.floor(side), math.ceil(side)) for side in (rows, columns)]
        grids = {(h, w) for h, w in itertools.product(*sides) if min(h, w) > 0 and h * w <= self.max_tokens}
        if not grids:
            return max(1, round(rows)), max(1, round(columns))
        return min(grids, key=lambda grid: abs(grid[0] / grid[1] - height / width))


@dataclass(frozen=True, kw_only=True)
class MuseGlimmerVideoPreprocessor(MuseGlimmerPreprocessor):
    """Samples the frames of videos, and cuts them into patches.

    Attributes:
        fps: sampled frames per second; None for all frames.
        num_frames: largest number of sampled frames.
    """

    fps: float | None
    num_frames: int

    @classmethod
    def for_videos(cls, settings: Settings) -> Self:
        """Builds it from the entries of video_preprocessor_config.json.

        Raises:
            ConfigError: an entry is malformed or not supported.
        """
        settings.require("frame_timestamp_format", "Time: {timestamp:.1f}s")
        is_sampled = settings.read("do_sample_frames", BOOLEAN, True)
        fps = settings.read("fps", POSITIVE, 2.0) if is_sampled else None
        frames = settings.read("num_frames", integer(1, _MAX_FRAMES), 96)
        return cls.from_settings(settings, "max_video_frame_tokens", 144, fps=fps, num_frames=frames)

    def sampled(self, frames: int, fps: float) -> list[int]:
        """Returns the indices of the sampled frames, evenly spaced: whole patches, if the video has as many frames.

        Args:
            frames: number of frames of the video.
            fps: frames per second of the video.
        """
        if self.fps is None:
            return list(range(frames))
        size, count = self.temporal_patch_size, min(int(frames * self.fps / fps), self.num_frames, frames)
        count = min(max(size, count // size * size), frames)
        indices: list[int] = torch.linspace(0, frames - 1, count, device="cpu").long().tolist()
        return indices


class MuseGlimmerProcessorFamily(ProcessorFamily):
    """Replaces each image by its tokens, and each video by the timestamps and tokens of its frames."""

    model_types: ClassVar[tuple[str, ...]] = ("muse_glimmer",)
    hf_class = "MuseGlimmerProcessor"
    image_processor = "MuseGlimmerImageProcessor"

    def __init__(self, files: ProcessorFiles, tokenizer: Tokenizer) -> None:
        self.images = MuseGlimmerPreprocessor.from_settings(files.image_settings(), "max_image_tokens", 4096)
        self.videos = MuseGlimmerVideoPreprocessor.for_videos(files.video_settings())
        self.placeholders = self.soft_tokens = {"image": "<|patch|>", "video": "<|video|>"}

    def image_text(self, height: int, width: int, where: str = "image") -> str:
        rows, columns = self.images.tokens(height, width)
        return f"<|image_start|>{self.soft_tokens['image'] * rows * columns}<|image_end|>"

    def preprocess_images(self, images: list[list[Tensor]]) -> PreprocessedMedia:
        every = [image for group in images for image in group]
        outputs = [self.images(image[None], f"images[{i}]") for i, image in enumerate(every)]
        inputs = {
            "pixel_values": torch.cat([patches for patches, _ in outputs]),
            "image_grid_thw": torch.tensor([grid for _, grid in outputs]),
        }
        return PreprocessedMedia(inputs, [self.image_text(*image.shape[1:]) for image in every])

    def preprocess_videos(self, videos: list[Tensor], fps: list[float]) -> PreprocessedMedia:
        patches, grids, replacements = [], [], []
        for i, (video, rate) in enumerate(zip(videos, fps, strict=True)):
            indices = self.videos.sampled(len(video), rate)
            one, (t, h, w) = self.videos(video[indices], f"videos[{i}]")
            tokens = self.soft_tokens["video"] * (h * w // self.videos.merge_size**2)
            times = [index / rate for index in indices[:: self.videos.temporal_patch_size]]
            frames = "<|vid_frame_separator|>".join(f"Time: {time:.1f}s{tokens}" for time in times)
            replacements.append(f"<|vid_start|>{frames}<|vid_end|>")
            patches.append(one)
            grids.append((t, h, w))
        inputs = {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}
        return PreprocessedMedia(inputs, replacements)


FAMILIES = (MuseGlimmerProcessorFamily,)
