"""Image transforms that all families share: resizing and normalization."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ligerzoo.checks import integer
from ligerzoo.entries import BOOLEAN
from ligerzoo.vision.io import check_size, pillow
from ligerzoo.vision.settings import POSITIVE, Settings

LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # Pillow's numbers of its resampling filters; preprocessor_config.json uses them

RGB = tuple[float, float, float]
CLIP_MEAN: RGB = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: RGB = (0.26862954, 0.26130258, 0.27577711)
HALF: RGB = (0.5, 0.5, 0.5)


def resize(image: Tensor, height: int, width: int, resample: int, where: str = "image") -> Tensor:
    """Resizes an image with Pillow, because the models were trained with Pillow's rounding.

    Args:
        image: uint8 (3, H, W).
        height, width: size of the result in pixels.
        resample: Pillow's number of the resampling filter.
        where: the name of the image in error messages.

    Returns:
        uint8 (3, height, width).

    Raises:
        ImageError: the result would have more than `MAX_PIXELS` pixels, or Pillow is not installed.
    """
    check_size(height, width, where)
    rows = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
    resized = pillow().fromarray(rows).resize((width, height), resample=resample)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)


@dataclass(frozen=True, kw_only=True)
class Normalization:
    """Computes (byte * rescale_factor - mean) / std, with one mean and std for each channel."""

    mean: RGB
    std: RGB
    rescale_factor: float = 1 / 255

    @classmethod
    def from_settings(cls, settings: Settings, *, mean: RGB, std: RGB, default: bool | None = None) -> Normalization:
        """Builds it from the entries of preprocessor_config.json.

        Args:
            settings: the entries.
            mean, std: the family's defaults.
            default: whether it normalizes without the entry `do_normalize`, which may then be false, for a mean of 0
                and a std of 1; None if it must.

        Raises:
            ConfigError: an entry is malformed, or disables a step.
        """
        for step in ("do_convert_rgb", "do_rescale", *(("do_normalize",) if default is None else ())):
            settings.require(step, True)
        if default is not None and not settings.read("do_normalize", BOOLEAN, default):
            settings, mean, std = settings.only("rescale_factor"), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        return cls(
            mean=settings.channels("image_mean", mean),
            std=settings.channels("image_std", std, positive=True),
            rescale_factor=settings.read("rescale_factor", POSITIVE, 1 / 255),
        )

    def __call__(self, values: Tensor) -> Tensor:
        """Normalizes uint8 (N, 3, ...) to fp32 (N, 3, ...), on any device.

        Computes the result of each of the 256 byte values once and looks it up. As in transformers, the product is in
        fp64 and the rest in fp32.
        """
        levels = (torch.arange(256, dtype=torch.float64, device=values.device) * self.rescale_factor).float()
        result = torch.empty(values.shape, dtype=torch.float32, device=values.device)
        for channel, (mean, std) in enumerate(zip(self.mean, self.std, strict=True)):
            result[:, channel] = ((levels - mean) / std)[values[:, channel].int()]
        return result


def resample_of(settings: Settings, default: int) -> int:
    """Returns Pillow's number of the resampling filter."""
    settings.require("do_resize", True)
    return settings.read("resample", integer(0, 5), default)
