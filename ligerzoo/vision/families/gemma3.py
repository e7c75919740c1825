"""Gemma 3: each image is resized to one square, whatever its aspect ratio, and becomes a fixed number of tokens.

With pan and scan (off by default) a long image is also cut into a few crops along its long side. Each crop becomes
another square after the whole image (Gemma Team, "Gemma 3", 2025, section 2.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ligerzoo.checks import integer
from ligerzoo.entries import BOOLEAN
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.vision.family import PreprocessedMedia, ProcessorFamily, media_token_id
from ligerzoo.vision.settings import MAX_SIDE, POSITIVE, ProcessorFiles, Settings
from ligerzoo.vision.transforms import BILINEAR, HALF, Normalization, resample_of, resize


@dataclass(frozen=True, kw_only=True)
class Gemma3Preprocessor:
    """Resizes images to squares.

    Attributes:
        side: side of the squares in pixels.
        do_pan_and_scan: whether to add crops of long images.
        min_crop_size: smallest side of a crop in pixels; an image whose crops would be smaller gets none.
        max_num_crops: largest number of crops of an image.
        min_ratio: smallest aspect ratio (long side / short side) of an image that gets crops.
        resample: Pillow's number of the resampling filter.
        normalization: maps bytes to fp32.
    """

    side: int
    do_pan_and_scan: bool
    min_crop_size: int
    max_num_crops: int
    min_ratio: float
    resample: int
    normalization: Normalization

    @classmethod
    def from_settings(cls, settings: Settings) -> Gemma3Preprocessor:
        """Builds it from the entries of preprocessor_config.json.

        Raises:
            ConfigError: an entry is malformed or not supported.
        """
        return cls(
            side=settings.side(224),
            do_pan_and_scan=settings.read("do_pan_and_scan", BOOLEAN, False),
            min_crop_size=settings.read("pan_and_scan_min_crop_size", integer(1, MAX_SIDE), 256),
            max_num_crops=settings.read("pan_and_scan_max_num_crops", integer(1, 64), 4),
            min_ratio=settings.read("pan_and_scan_min_ratio_to_activate", POSITIVE, 1.2),
            resample=resample_of(settings, BILINEAR),
            normalization=Normalization.from_settings(settings, mean=HALF, std=HALF),
        )

    def __call__(self, image: Tensor) -> Tensor:
        """Resizes and normalizes an image and its crops.

        Args:
            image: uint8 (3, H, W).

        Returns:
            fp32 (1 + number of crops, 3, side, side).

        Raises:
            ImageError: Pillow is not installed.
        """
        views = [image, *self.crops(image)]
        squares = [resize(view, self.side, self.side, self.resample) for view in views]
        return self.normalization(torch.stack(squares))

    def crops(self, image: Tensor) -> list[Tensor]:
        """Returns the pan-and-scan crops of an image along its long side; an empty list if it gets none."""
        height, width = image.shape[1:]
        if (length := self._crop_length(height, width)) is None:
            return []
        return list(torch.split(image, length, dim=2 if width >= height else 1))

    def num_crops(self, height: int, width: int) -> int:
        """Returns the number of crops of an image of this size in pixels."""
        length = self._crop_length(height, width)
        return 0 if length is None else math.ceil(max(height, width) / length)

    def _crop_length(self, height: int, width: int) -> int | None:
        """Returns the length of a crop along the long side in pixels; None if the image gets no crops."""
        short, long = sorted((height, width))
        if not self.do_pan_and_scan or long / short < self.min_ratio:
            return None
        number = min(long // self.min_crop_size, math.floor(long / short + 0.5))
        number = min(max(2, number), self.max_num_crops)
        length = math.ceil(long / number)
        return None if min(length, short) < self.min_crop_size else length


class Gemma3ProcessorFamily(ProcessorFamily):
    """Replaces each image, and each crop, by the same number of soft tokens between a begin and an end token."""

    model_types = ("gemma3",)
    hf_class = "Gemma3Processor"
    image_processor = "Gemma3ImageProcessor"

    def __init__(self, files: ProcessorFiles, tokenizer: Tokenizer) -> None:
        self.images = Gemma3Preprocessor.from_settings(files.image_settings())
        named = tokenizer.special_tokens
        begin, end = named.get("boi_token", "<start_of_image>"), named.get("eoi_token", "<end_of_image>")
        soft = named.get("image_token", "<image_soft_token>")
        self.placeholders, self.soft_tokens = {"image": begin}, {"image": soft}
        self._soft_id = media_token_id(soft, tokenizer)
        length = files.processor_config.read("image_seq_length", integer(1, 2**14), 256)
        self._square = f"\n\n{begin}{soft * length}{end}\n\n"

    def image_text(self, height: int, width: int, where: str = "image") -> str:
        return self._replacement(self.images.num_crops(height, width))

    def preprocess_images(self, images: list[list[Tensor]]) -> PreprocessedMedia:
        squares = [self.images(image) for group in images for image in group]
        replacements = [self._replacement(len(views) - 1) for views in squares]
        return PreprocessedMedia({"pixel_values": torch.cat(squares)}, replacements)

    def _replacement(self, crops: int) -> str:
        if crops == 0:
            return self._square
        parts = " ".join([self._square] * crops)
        return f"Here is the original image {self._square} and here are some crops to help you see better {parts}"

    def derived_inputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns `token_type_ids`, int64 (B, T): 1 at image tokens, which attend to each other in both directions."""
        return {"token_type_ids": torch.eq(inputs["input_ids"], self._soft_id).long()}


FAMILIES = (Gemma3ProcessorFamily,)
