"""Images for Llama 3.2 Vision: each is fitted into a canvas of up to four square tiles, side by side or stacked.

The canvas is the one that needs the least enlarging, or else the least shrinking, and of two the smaller. The image
goes to its top left corner; the rest is black.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ligerzoo.vision.io import MAX_PIXELS
from ligerzoo.vision.settings import Settings
from ligerzoo.vision.transforms import BILINEAR, HALF, Normalization, resample_of, resize


@dataclass(frozen=True, kw_only=True)
class MllamaPreprocessor:
    """Cuts images into tiles.

    Attributes:
        side: of a tile, in pixels.
        max_image_tiles: the most tiles of an image.
        resample: Pillow's number of the filter to resize with.
        normalization: what turns bytes into numbers.
    """

    side: int
    max_image_tiles: int
    resample: int
    normalization: Normalization

    @classmethod
    def from_settings(cls, settings: Settings) -> MllamaPreprocessor:
        """As a preprocessor_config.json has it.

        Raises:
            ConfigError: an entry is malformed, or asks for what is not supported.
        """
        settings.require("do_pad", True)
        side = settings.side(224)
        return cls(
            side=side,
            max_image_tiles=settings.integer("max_image_tiles", 4, at_most=min(64, MAX_PIXELS // side**2)),
            resample=resample_of(settings, BILINEAR),
            normalization=Normalization.from_settings(settings, mean=HALF, std=HALF),
        )

    @property
    def arrangements(self) -> list[tuple[int, int]]:
        """The canvases there are, as (rows, columns) of tiles. Their order is part of the model: `aspect_ratio_ids`
        count them from one."""
        numbers = range(1, self.max_image_tiles + 1)
        return [(rows, columns) for rows in numbers for columns in numbers if rows * columns <= self.max_image_tiles]

    def __call__(self, image: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """The tiles of an image.

        Args:
            image: uint8 (3, H, W).

        Returns:
            The tiles row by row, fp32 (rows * columns, 3, side, side), and (rows, columns).

        Raises:
            ImageError: Pillow is not installed.
        """
        rows, columns = self.arrangement(image.shape[1], image.shape[2])
        canvas = torch.zeros(3, rows * self.side, columns * self.side, dtype=torch.uint8, device="cpu")
        height, width = self._fitted(image.shape[1], image.shape[2], canvas.shape[1], canvas.shape[2])
        canvas[:, :height, :width] = resize(image, height, width, self.resample)
        tiles = canvas.reshape(3, rows, self.side, columns, self.side).permute(1, 3, 0, 2, 4).flatten(0, 1)
        return self.normalization(tiles), (rows, columns)

    def arrangement(self, height: int, width: int) -> tuple[int, int]:
        """The (rows, columns) of the canvas for an image of this size."""

        def scale(rows: int, columns: int) -> float:
            return min(rows * self.side / height, columns * self.side / width)

        scales = [scale(*tiles) for tiles in self.arrangements]
        best = min((value for value in scales if value >= 1), default=max(scales))
        candidates = [tiles for tiles, value in zip(self.arrangements, scales, strict=True) if value == best]
        return min(candidates, key=math.prod)

    def _fitted(self, height: int, width: int, canvas_height: int, canvas_width: int) -> tuple[int, int]:
        """The size of the image on its canvas. It grows to one tile at most: a canvas may have more of them only
        because the image is long."""
        tallest = min(max(height, self.side), canvas_height)
        widest = min(max(width, self.side), canvas_width)
        if widest / width < tallest / height:
            return min(max(1, math.floor(height * (widest / width))), tallest), widest
        return tallest, min(max(1, math.floor(width * (tallest / height))), widest)
