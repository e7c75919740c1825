"""Qwen3-VL: images as in Qwen2-VL; a timestamp as text before the tokens of each temporal patch of a video.

A video is sampled at a fixed rate. Its limits of pixels hold for all frames together (Bai et al., "Qwen3-VL Technical
Report", 2025; sampled, rounded and written as transformers' `Qwen3VLVideoProcessor` and `Qwen3VLProcessor` do).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ligerzoo.checks import integer
from ligerzoo.entries import BOOLEAN
from ligerzoo.text.rendered import Edit, Rendered
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.vision.families.qwen2_vl import ClipPreprocessor, Qwen2VLProcessorFamily
from ligerzoo.vision.family import PreprocessedMedia
from ligerzoo.vision.io import MAX_PIXELS
from ligerzoo.vision.settings import POSITIVE, ProcessorFiles, Settings
from ligerzoo.vision.transforms import HALF

_MAX_FRAMES = 2**16


@dataclass(frozen=True, kw_only=True)
class Qwen3VLVideoPreprocessor(ClipPreprocessor):
    """Samples the frames of videos, and cuts them into patches.

    Attributes:
        fps: sampled frames per second; None for all frames.
        min_frames, max_frames: range of the number of sampled frames, if the video has as many.
    """

    fps: float | None
    min_frames: int
    max_frames: int

    @classmethod
    def for_videos(cls, settings: Settings) -> Qwen3VLVideoPreprocessor:
        """Builds it from the entries of video_preprocessor_config.json.

        Raises:
            ConfigError: an entry is malformed or not supported.
        """
        settings.require("cap_pixels_per_frame", False)
        settings.require("num_frames", None)
        size, pixels, frames = settings.section("size"), integer(1, MAX_PIXELS), integer(1, _MAX_FRAMES)
        is_sampled = settings.read("do_sample_frames", BOOLEAN, True)
        return cls._from_settings(
            settings,
            patch_size=16,
            mean=HALF,
            std=HALF,
            min_pixels=size.read("shortest_edge", pixels, 128 * 32**2),
            max_pixels=size.read("longest_edge", pixels, 768 * 32**2),
            fps=settings.read("fps", POSITIVE, 2.0) if is_sampled else None,
            min_frames=settings.read("min_frames", frames, 4),
            max_frames=settings.read("max_frames", frames, 768),
        )

    def sampled(self, frames: int, fps: float) -> list[int]:
        """Returns the indices of the sampled frames, evenly spaced.

        Args:
            frames: number of frames of the video.
            fps: frames per second of the video.
        """
        if self.fps is None:
            return list(range(frames))
        count = min(max(int(frames / fps * self.fps), self.min_frames), self.max_frames, frames)
        indices: list[int] = np.linspace(0, frames - 1, count).round().astype(int).tolist()
        return indices

    def timestamps(self, indices: list[int], fps: float) -> list[float]:
        """Returns the time of each temporal patch in seconds: the mean of its first and its last frame."""
        size = self.temporal_patch_size
        padded = indices + indices[-1:] * (-len(indices) % size)
        seconds = [index / fps for index in padded]
        return [(first + last) / 2 for first, last in zip(seconds[::size], seconds[size - 1 :: size], strict=True)]


class Qwen3VLProcessorFamily(Qwen2VLProcessorFamily):
    """Replaces each image by its tokens, and each video by a timestamp and the tokens of each temporal patch.

    It is the family of Qwen3-VL, of Qwen3.5 and of their MoE models.

    As in Qwen's reference, the vision start and end tokens that the chat template puts around a video are replaced,
    too, since each temporal patch has its own. transformers 5 keeps them around the whole.
    """

    model_types = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
    hf_class = "Qwen3VLProcessor"
    videos: Qwen3VLVideoPreprocessor

    def __init__(self, files: ProcessorFiles, tokenizer: Tokenizer) -> None:
        super().__init__(files, tokenizer)
        named = tokenizer.special_tokens
        self.vision_start = named.get("vision_start_token", "<|vision_start|>")
        self.vision_end = named.get("vision_end_token", "<|vision_end|>")

    def video_preprocessor(self, settings: Settings) -> Qwen3VLVideoPreprocessor:
        return Qwen3VLVideoPreprocessor.for_videos(settings)

    def prompt_edits(self, prompt: Rendered) -> list[Edit]:
        video = self.placeholders["video"]
        return [Edit(*span, video) for span in prompt.find(self.vision_start + video + self.vision_end)]

    def preprocess_videos(self, videos: list[Tensor], fps: list[float]) -> PreprocessedMedia:
        patches, grids, replacements = [], [], []
        for i, (video, rate) in enumerate(zip(videos, fps, strict=True)):
            indices = self.videos.sampled(len(video), rate)
            one, (t, h, w) = self.videos(video[indices], f"videos[{i}]")
            tokens = self.vision_start + self.soft_tokens["video"] * self.videos.num_tokens((1, h, w)) + self.vision_end
            times = self.videos.timestamps(indices, rate)
            replacements.append("".join(f"<{time:.1f} seconds>{tokens}" for time in times))
            patches.append(one)
            grids.append((t, h, w))
        inputs = {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}
        return PreprocessedMedia(inputs, replacements)


FAMILIES = (Qwen3VLProcessorFamily,)
