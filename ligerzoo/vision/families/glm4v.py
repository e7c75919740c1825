"""GLM-4.1V, GLM-4.5V and GLM-4.6V: images of any size, and videos whose frames are images, each with its time after it.

Images and videos are rounded, cut, sampled and written as transformers' `Glm4vImageProcessor`, `Glm4vVideoProcessor`
and `Glm4vProcessor` do, and those of GLM-4.6V as `Glm46VVideoProcessor` and `Glm46VProcessor` do. The limits of pixels
hold for all frames of a video together, and for the frames of the one temporal patch of an image.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from ligerzoo.checks import integer, number
from ligerzoo.entries import BOOLEAN
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.vision.families.qwen2_vl import ClipPreprocessor, Qwen2VLProcessorFamily
from ligerzoo.vision.family import PreprocessedMedia
from ligerzoo.vision.settings import ProcessorFiles, Settings

_PIXELS = integer(1, 2**32)
_FPS = number("a positive number, at most 1000", lambda x: 0 < x <= 1000)
_SECONDS = integer(1, 2**16)


def _limits(settings: Settings, longest_edge: int) -> tuple[int, int]:
    """Reads the range of the number of pixels; `longest_edge` is the default of its end."""
    size = settings.section("size")
    return size.read("shortest_edge", _PIXELS, 112**2), size.read("longest_edge", _PIXELS, longest_edge)


class Glm4vImagePreprocessor(ClipPreprocessor):
    """Cuts images into patches. The limits of pixels count an image as the frames of a temporal patch."""

    @classmethod
    def for_images(cls, settings: Settings) -> Self:
        """Builds it from the entries of preprocessor_config.json.

        Raises:
            ConfigError: an entry is malformed or not supported.
        """
        least, most = _limits(settings, 15000 * 28**2)
        return cls._from_settings(settings, min_pixels=least, max_pixels=most)

    def resized(self, height: int, width: int, where: str = "image", frames: int = 1) -> tuple[int, int]:
        """Returns the height and width in pixels to which an image of this size is resized; `frames` is unused.

        Raises:
            ImageError: the aspect ratio is above `MAX_ASPECT_RATIO`.
        """
        return super().resized(height, width, where, self.temporal_patch_size)


@dataclass(frozen=True, kw_only=True)
class Glm4vVideoPreprocessor(ClipPreprocessor):
    """Samples the frames of videos at a fixed rate, and cuts them into patches.

    Attributes:
        fps: sampled frames per second.
        max_duration: seconds of a video; frames of longer ones are sampled evenly, as many as in this time.
        is_sampled: sample frames, instead of reading all.
    """

    fps: float
    max_duration: int
    is_sampled: bool

    @classmethod
    def for_videos(cls, settings: Settings) -> Self:
        """Builds it from the entries of video_preprocessor_config.json.

        Raises:
            ConfigError: an entry is malformed or not supported.
        """
        settings.require("cap_pixels_per_frame", False)
        least, most = _limits(settings, 30000 * 2 * 28**2)
        return cls._from_settings(
            settings,
            fps=settings.read("fps", _FPS, 2),
            max_duration=settings.read("max_duration", _SECONDS, 300),
            is_sampled=settings.read("do_sample_frames", BOOLEAN, True),
            min_pixels=least,
            max_pixels=most,
        )

    def sampled(self, frames: int, fps: float) -> list[int]:
        """Returns the indices of the sampled frames, an even number of them.

        Args:
            frames: number of frames of the video.
            fps: frames per second of the video.
        """
        if not self.is_sampled:
            return list(range(frames))
        # As transformers does where only the frames and their rate are known, not the duration that a file gives.
        duration = round((frames - 1) / fps) + 1
        indices = list(dict.fromkeys(self._indices(frames, fps, duration)))
        return indices + indices[-1:] * (len(indices) % 2)

    def _indices(self, frames: int, fps: float, duration: int) -> Iterator[int]:
        """Yields the indices of the sampled frames, possibly several times; the arguments are those of `sampled`."""
        if duration > self.max_duration:
            count = int(self.max_duration * self.fps)
            if count >= frames:
                yield from range(frames)
            else:
                seconds = np.linspace(0, duration, count, endpoint=True)
                yield from (min(frames - 1, math.ceil(second * fps)) for second in seconds)
            return
        for i in range(max(math.floor(duration * self.fps), 1)):
            index = math.ceil(i * fps / self.fps)
            yield min(frames - 1, index)
            if index >= frames:
                return


@dataclass(frozen=True, kw_only=True)
class Glm46VVideoPreprocessor(Glm4vVideoPreprocessor):
    """Samples the frames of videos at a rate that depends on the duration: fewer per second of a longer video."""

    max_frames: ClassVar[int] = 640
    max_seconds: ClassVar[int] = 2400

    def _indices(self, frames: int, fps: float, duration: int) -> Iterator[int]:
        seconds = min(duration, self.max_seconds)
        rate = self.temporal_patch_size * (3 if seconds <= 30 else 1 if seconds <= 300 else 0.5)
        count = min(int(seconds * rate), self.max_frames)
        found: list[int] = []
        if frames >= count:
            second = 0.0
            for i in range(frames):
                if i * (1 / fps) >= second:
                    second += 1 / rate
                    found.append(i)
                    if second >= duration:
                        break
        if len(found) != count:
            is_short = 0 < len(found) < count
            first, last = (found[0], found[-1]) if is_short else (0, frames - 1)
            found = np.linspace(first, last, count, dtype=int).tolist()
        yield from found


class Glm4vProcessorFamily(Qwen2VLProcessorFamily):
    """Replaces each image by its tokens, and each video by the tokens of its frames, each with its time after it.

    Tokens of frames are those of images. The chat template marks the beginning and the end of a video.
    """

    model_types = ("glm4v", "glm4v_moe")
    hf_class = "Glm4vProcessor"
    image_processor = "Glm4vImageProcessor"
    videos: Glm4vVideoPreprocessor

    def __init__(self, files: ProcessorFiles, tokenizer: Tokenizer) -> None:
        self.images = Glm4vImagePreprocessor.for_images(files.image_settings())
        self.videos = self.video_preprocessor(files.video_settings())
        named = tokenizer.special_tokens
        image = named.get("image_token", "<|image|>")
        self.placeholders = {"image": image, "video": named.get("video_token", "<|video|>")}
        self.soft_tokens = {"image": image, "video": image}

    def video_preprocessor(self, settings: Settings) -> Glm4vVideoPreprocessor:
        return Glm4vVideoPreprocessor.for_videos(settings)

    def time_text(self, seconds: float) -> str:
        """Returns the text after a frame."""
        return str(int(seconds))

    def preprocess_videos(self, videos: list[Tensor], fps: list[float]) -> PreprocessedMedia:
        patches, grids, replacements = [], [], []
        for i, (video, rate) in enumerate(zip(videos, fps, strict=True)):
            indices = self.videos.sampled(len(video), rate)
            one, (t, h, w) = self.videos(video[indices], f"videos[{i}]")
            tokens = self.soft_tokens["video"] * self.videos.num_tokens((1, h, w))
            times = [index / rate for index in indices[::2]][:t]  # of two frames, whatever temporal_patch_size is
            times += times[-1:] * (t - len(times))
            frames = [f"<|begin_of_image|>{tokens}<|end_of_image|>{self.time_text(time)}" for time in times]
            replacements.append("".join(frames))
            patches.append(one)
            grids.append((t, h, w))
        inputs = {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}
        return PreprocessedMedia(inputs, replacements)


class Glm46VProcessorFamily(Glm4vProcessorFamily):
    """GLM-4.6V: other frames of a video, and times in tenths of a second."""

    hf_class = "Glm46VProcessor"
    image_processor = "Glm46VImageProcessor"

    def video_preprocessor(self, settings: Settings) -> Glm46VVideoPreprocessor:
        return Glm46VVideoPreprocessor.for_videos(settings)

    def time_text(self, seconds: float) -> str:
        return f"{seconds:.1f} seconds"


FAMILIES = (Glm4vProcessorFamily, Glm46VProcessorFamily)
