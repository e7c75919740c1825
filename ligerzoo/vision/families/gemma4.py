"""Gemma 4: images and frames of videos of any shape, as large as a number of tokens allows.

Both sides become whole numbers of squares of k x k patches, with about the image's aspect ratio. An image is a row of
patches, padded to the largest number, with the column and row of each patch. Timestamps separate the frames of a video.
Sized, cut, sampled and written as transformers' `Gemma4ImageProcessor`, `Gemma4VideoProcessor` and `Gemma4Processor`
do. Gemma 4 12B reads each square as one patch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.checks import Values, integer
from ligerzoo.entries import BOOLEAN
from ligerzoo.errors import ImageError
from ligerzoo.text.rendered import Edit, Rendered
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.vision.family import PreprocessedMedia, ProcessorFamily, media_token_id
from ligerzoo.vision.settings import POSITIVE, ProcessorFiles, Settings
from ligerzoo.vision.transforms import BICUBIC, Normalization, resample_of, resize

_SIZES = (70, 140, 280, 560, 1120)
_TOKENS = Values(
    f"one of {', '.join(map(str, _SIZES))}", lambda value: type(value) is int, lambda value: value in _SIZES
)


@dataclass(frozen=True, kw_only=True)
class Gemma4Preprocessor:
    """Cuts images, or frames, into padded rows of patches.

    Attributes:
        max_tokens: largest number of tokens of an image.
        patch_size: side of a patch in pixels.
        pool_size: k, side in patches of the squares that the model pools into one token.
        resample: Pillow's number of the resampling filter.
        normalization: maps bytes to fp32.
    """

    max_tokens: int
    patch_size: int
    pool_size: int
    resample: int
    normalization: Normalization
    normalizes: ClassVar[bool] = False
    """Whether pixels are normalized if no entry says so."""

    @classmethod
    def from_settings(cls, settings: Settings, max_tokens: int, *, merges: bool, **fields: float | int | None) -> Self:
        """Builds it from the entries of preprocessor_config.json.

        Args:
            settings: the entries.
            max_tokens: the largest number of tokens without an entry.
            merges: the model reads a square as one patch.
            fields: further fields of a subclass.

        Raises:
            ConfigError: an entry is malformed or not supported.
        """
        patch = settings.read("patch_size", integer(1, 256), 16)
        pool = settings.read("pooling_kernel_size", integer(1, 16), 3)
        zeros, ones = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        return cls(
            max_tokens=settings.read("max_soft_tokens", _TOKENS, max_tokens),
            patch_size=patch * pool if merges else patch,
            pool_size=1 if merges else pool,
            resample=resample_of(settings, BICUBIC),
            normalization=Normalization.from_settings(settings, mean=zeros, std=ones, default=cls.normalizes),
            **fields,
        )

    def tokens(self, height: int, width: int) -> tuple[int, int]:
        """Returns the rows and columns of tokens of an image of this size in pixels."""
        side = self.patch_size * self.pool_size
        scale = math.sqrt(self.max_tokens * side**2 / (height * width))
        rows, columns = (math.floor(scale * length / side) for length in (height, width))
        if rows == 0:
            return 1, min(width // height, self.max_tokens)
        if columns == 0:
            return min(height // width, self.max_tokens), 1
        return rows, columns

    def __call__(self, frames: Tensor, where: str = "image") -> tuple[Tensor, Tensor]:
        """Cuts images of one size, or the frames of a video, into patches.

        Args:
            frames: uint8 (n, 3, H, W).
            where: their name in error messages.

        Returns:
            The patches, fp32 (n, L, patch_size^2 * 3), padded with zeros to the L patches of `max_tokens` tokens; and
            the column and row of each patch, int64 (n, L, 2), -1 for padding.

        Raises:
            ImageError: the images are too large, or Pillow is not installed.
        """
        size, k = self.patch_size, self.pool_size
        rows, columns = (k * number for number in self.tokens(*frames.shape[2:]))
        resized = [resize(frame, rows * size, columns * size, self.resample, where) for frame in frames]
        pixels = self.normalization(torch.stack(resized)).view(len(frames), 3, rows, size, columns, size)
        patches = pixels.permute(0, 2, 4, 3, 5, 1).reshape(len(frames), rows * columns, -1)
        grid = torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy")
        positions = torch.stack(grid, -1).view(1, -1, 2).expand(len(frames), -1, -1)
        padding = (0, 0, 0, self.max_tokens * k**2 - rows * columns)
        return F.pad(patches, padding), F.pad(positions, padding, value=-1)


@dataclass(frozen=True, kw_only=True)
class Gemma4VideoPreprocessor(Gemma4Preprocessor):
    """Samples the frames of videos, and cuts them into patches.

    Attributes:
        fps: sampled frames per second, if `num_frames` is None; None for all frames.
        num_frames: number of sampled frames, if the video has as many; None for no limit.
    """

    fps: float | None
    num_frames: int | None
    normalizes = True

    @classmethod
    def for_videos(cls, settings: Settings, *, merges: bool) -> Self:
        """Builds it from the entries of video_preprocessor_config.json; the arguments are those of `from_settings`.

        Raises:
            ConfigError: an entry is malformed or not supported.
        """
        fps: float | None = None
        frames: int | None = None
        if not settings.read("do_sample_frames", BOOLEAN, True):
            pass
        elif "fps" in settings:
            settings.require("num_frames", None)
            fps = settings.read("fps", POSITIVE, 1.0)
        else:
            frames = settings.read("num_frames", integer(1, 2**16), 32)
        return cls.from_settings(settings, 70, merges=merges, fps=fps, num_frames=frames)

    def sampled(self, frames: int, fps: float) -> list[int]:
        """Returns the indices of the sampled frames, evenly spaced.

        Args:
            frames: number of frames of the video.
            fps: frames per second of the video.
        """
        count = frames if self.fps is None else max(1, int(frames / fps * self.fps))
        count = min(count, frames, self.num_frames or frames)
        indices: list[int] = (np.arange(count) * frames // count).tolist()
        return indices


class Gemma4ProcessorFamily(ProcessorFamily):
    """Replaces each image by its tokens, and each video by the timestamps and tokens of its frames."""

    model_types: ClassVar[tuple[str, ...]] = ("gemma4",)
    hf_class = "Gemma4Processor"
    image_processor = "Gemma4ImageProcessor"
    merges: ClassVar[bool] = False
    """Whether the model reads a square of patches as one patch."""

    def __init__(self, files: ProcessorFiles, tokenizer: Tokenizer) -> None:
        self.images = Gemma4Preprocessor.from_settings(files.image_settings(), 280, merges=self.merges)
        self.videos = Gemma4VideoPreprocessor.for_videos(files.video_settings(), merges=self.merges)
        named = tokenizer.special_tokens
        self.begin, self.end = named.get("boi_token", "<|image>"), named.get("eoi_token", "<image|>")
        self.audio = named.get("audio_token", "<|audio|>")
        tokens = {"image": named.get("image_token", "<|image|>"), "video": "<|video|>"}
        if tokenizer.token_to_id(tokens["video"]) is None:  # of older repositories, which read no videos
            del tokens["video"]
        self.placeholders = self.soft_tokens = tokens
        self._ids = [media_token_id(token, tokenizer) for token in tokens.values()]

    def prompt_edits(self, prompt: Rendered) -> list[Edit]:
        if prompt.find(self.audio):
            what = "audio is not supported"
            raise ImageError(what, where="text", got=repr(self.audio), remedy="Pass text, images and videos.")
        return []

    def image_text(self, height: int, width: int, where: str = "image") -> str:
        rows, columns = self.images.tokens(height, width)
        return f"{self.begin}{self.soft_tokens['image'] * rows * columns}{self.end}"

    def preprocess_images(self, images: list[list[Tensor]]) -> PreprocessedMedia:
        every = [image for group in images for image in group]
        outputs = [self.images(image[None], f"images[{i}]") for i, image in enumerate(every)]
        patches, positions = (torch.cat(tensors) for tensors in zip(*outputs, strict=True))
        inputs = {"pixel_values": patches, "image_position_ids": positions}
        return PreprocessedMedia(inputs, [self.image_text(*image.shape[1:]) for image in every])

    def preprocess_videos(self, videos: list[Tensor], fps: list[float]) -> PreprocessedMedia:
        outputs, replacements = [], []
        for i, (video, rate) in enumerate(zip(videos, fps, strict=True)):
            indices = self.videos.sampled(len(video), rate)
            outputs.append(self.videos(video[indices], f"videos[{i}]"))
            rows, columns = self.videos.tokens(*video.shape[2:])
            tokens = f"{self.begin}{self.soft_tokens['video'] * rows * columns}{self.end}"
            seconds = [int(index / rate) for index in indices]
            replacements.append(" ".join(f"{time // 60:02d}:{time % 60:02d} {tokens}" for time in seconds))
        patches, positions = (torch.cat(tensors) for tensors in zip(*outputs, strict=True))
        frames = torch.tensor([len(one) for one, _ in outputs])
        inputs = {"pixel_values_videos": patches, "video_position_ids": positions, "num_frames_per_video": frames}
        return PreprocessedMedia(inputs, replacements)

    def derived_inputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns `mm_token_type_ids`, int64 (B, T): 1 at image tokens and 2 at video tokens, as in transformers."""
        ids = inputs["input_ids"]
        return {
            "mm_token_type_ids": sum((kind * (ids == one).long() for kind, one in enumerate(self._ids, 1)), ids * 0)
        }


class Gemma4UnifiedProcessorFamily(Gemma4ProcessorFamily):
    """`Gemma4ProcessorFamily` of Gemma 4 12B, whose patches are the squares of others."""

    model_types = ("gemma4_unified",)
    hf_class = "Gemma4UnifiedProcessor"
    image_processor = "Gemma4UnifiedImageProcessor"
    merges = True


FAMILIES = (Gemma4ProcessorFamily, Gemma4UnifiedProcessorFamily)
