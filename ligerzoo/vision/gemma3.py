"""Images for Gemma 3: each is resized to one square, whatever its aspect ratio.

With "pan and scan" (off unless the file turns it on) a long image is also cut into a few crops along its long side, and
each becomes one more square after the whole (Gemma Team, "Gemma 3", 2025, section 2.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ligerzoo.vision.settings import MAX_SIDE, Settings
from ligerzoo.vision.transforms import BILINEAR, HALF, Normalization, resample_of, resize


@dataclass(frozen=True, kw_only=True)
class Gemma3Preprocessor:
    """Resizes images to squares.

    Attributes:
        side: of the squares, in pixels.
        do_pan_and_scan: whether crops are made.
        min_crop_size: crops with a side of fewer pixels are not made.
        max_num_crops: the most crops of an image.
        min_ratio: crops are made where the long side is at least so many times the short one.
        resample: Pillow's number of the filter to resize with.
        normalization: what turns bytes into numbers.
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
        """As a preprocessor_config.json has it.

        Raises:
            ConfigError: an entry is malformed, or asks for what is not supported.
        """
        return cls(
            side=settings.side(224),
            do_pan_and_scan=settings.boolean("do_pan_and_scan", False),
            min_crop_size=settings.integer("pan_and_scan_min_crop_size", 256, at_most=MAX_SIDE),
            max_num_crops=settings.integer("pan_and_scan_max_num_crops", 4, at_most=64),
            min_ratio=settings.number("pan_and_scan_min_ratio_to_activate", 1.2),
            resample=resample_of(settings, BILINEAR),
            normalization=Normalization.from_settings(settings, mean=HALF, std=HALF),
        )

    def __call__(self, image: Tensor) -> Tensor:
        """The image, uint8 (3, H, W), as squares: fp32 (1 + its crops, 3, side, side).

        Raises:
            ImageError: Pillow is not installed.
        """
        views = [image, *self.crops(image)]
        squares = [resize(view, self.side, self.side, self.resample) for view in views]
        return self.normalization(torch.stack(squares))

    def crops(self, image: Tensor) -> list[Tensor]:
        """What pan and scan cuts the image into, along its long side; nothing for an image that needs none."""
        short, long = sorted(image.shape[1:])
        if not self.do_pan_and_scan or long / short < self.min_ratio:
            return []
        number = min(long // self.min_crop_size, math.floor(long / short + 0.5))
        number = min(max(2, number), self.max_num_crops)
        length = math.ceil(long / number)
        if min(length, short) < self.min_crop_size:
            return []
        long_axis = 2 if image.shape[2] >= image.shape[1] else 1
        return list(torch.split(image, length, dim=long_axis))
