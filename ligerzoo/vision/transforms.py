"""The steps that every family shares: resize an image, and turn its bytes into the numbers that a model sees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ligerzoo.vision.io import check_size, pillow
from ligerzoo.vision.settings import Settings

BILINEAR, BICUBIC = 2, 3  # Pillow's numbers of its filters, which the files use

RGB = tuple[float, float, float]
CLIP_MEAN: RGB = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: RGB = (0.26862954, 0.26130258, 0.27577711)
HALF: RGB = (0.5, 0.5, 0.5)


def resize(image: Tensor, height: int, width: int, resample: int, where: str = "image") -> Tensor:
    """An image in another size, through Pillow's filters, whose rounding models were trained on.

    Args:
        image: uint8 (3, H, W).
        height, width: those of the result.
        resample: Pillow's number of the filter.
        where: what errors call the image.

    Returns:
        uint8 (3, height, width).

    Raises:
        ImageError: there would be too many pixels, or Pillow is not installed.
    """
    check_size(height, width, where)
    rows = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
    resized = pillow().fromarray(rows).resize((width, height), resample=resample)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)


@dataclass(frozen=True, kw_only=True)
class Normalization:
    """(byte * rescale_factor - mean) / std, with the mean and std of each channel."""

    mean: RGB
    std: RGB
    rescale_factor: float = 1 / 255

    @classmethod
    def from_settings(cls, settings: Settings, *, mean: RGB, std: RGB) -> Normalization:
        """As a preprocessor_config.json has it; `mean` and `std` are those of the family where it has none.

        Raises:
            ConfigError: an entry is malformed, or asks for an image that is not normalized.
        """
        for step in ("do_convert_rgb", "do_rescale", "do_normalize"):
            settings.require(step, True)
        return cls(
            mean=settings.channels("image_mean", mean),
            std=settings.channels("image_std", std, positive=True),
            rescale_factor=settings.number("rescale_factor", 1 / 255),
        )

    def __call__(self, values: Tensor) -> Tensor:
        """fp32 (N, 3, ...) of uint8 (N, 3, ...), on any device.

        A byte has 256 values, so each is computed once, with the product in fp64 and the rest in fp32 as transformers
        does.
        """
        levels = (torch.arange(256, dtype=torch.float64, device=values.device) * self.rescale_factor).float()
        result = torch.empty(values.shape, dtype=torch.float32, device=values.device)
        for channel, (mean, std) in enumerate(zip(self.mean, self.std, strict=True)):
            result[:, channel] = ((levels - mean) / std)[values[:, channel].int()]
        return result


def resample_of(settings: Settings, default: int) -> int:
    """The filter to resize with, as Pillow's number."""
    settings.require("do_resize", True)
    return settings.integer("resample", default, at_least=0, at_most=5)
