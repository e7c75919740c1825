"""Llama 3.2 Vision: each image is fitted into a canvas of up to four square tiles, side by side or stacked.

The preprocessor takes the canvas that enlarges the image least or, if the image fits into none, shrinks it least. Of
equally good canvases it takes the smallest. The image goes to the top left corner of its canvas; the rest is black.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ligerzoo.checks import integer
from ligerzoo.text.rendered import Edit, Rendered
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.vision.family import PreprocessedMedia, ProcessorFamily, media_token_id
from ligerzoo.vision.io import MAX_PIXELS
from ligerzoo.vision.settings import ProcessorFiles, Settings
from ligerzoo.vision.transforms import BILINEAR, HALF, Normalization, resample_of, resize


@dataclass(frozen=True, kw_only=True)
class MllamaPreprocessor:
    """Cuts images into tiles.

    Attributes:
        side: side of a tile in pixels.
        max_image_tiles: largest number of tiles of an image.
        resample: Pillow's number of the resampling filter.
        normalization: maps bytes to fp32.
    """

    side: int
    max_image_tiles: int
    resample: int
    normalization: Normalization

    @classmethod
    def from_settings(cls, settings: Settings) -> MllamaPreprocessor:
        """Builds it from the entries of preprocessor_config.json.

        Raises:
            ConfigError: an entry is malformed or not supported.
        """
        settings.require("do_pad", True)
        side = settings.side(224)
        return cls(
            side=side,
            max_image_tiles=settings.read("max_image_tiles", integer(1, min(64, MAX_PIXELS // side**2)), 4),
            resample=resample_of(settings, BILINEAR),
            normalization=Normalization.from_settings(settings, mean=HALF, std=HALF),
        )

    @property
    def arrangements(self) -> list[tuple[int, int]]:
        """All canvases as (rows, columns) of tiles.

        Their order is part of the model: `aspect_ratio_ids` are indices into this list plus 1.
        """
        numbers = range(1, self.max_image_tiles + 1)
        return [(rows, columns) for rows in numbers for columns in numbers if rows * columns <= self.max_image_tiles]

    def __call__(self, image: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Cuts an image into normalized tiles.

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
        """Returns the (rows, columns) of the canvas for an image of this size in pixels."""

        def scale(rows: int, columns: int) -> float:
            return min(rows * self.side / height, columns * self.side / width)

        scales = [scale(*tiles) for tiles in self.arrangements]
        best = min((value for value in scales if value >= 1), default=max(scales))
        candidates = [tiles for tiles, value in zip(self.arrangements, scales, strict=True) if value == best]
        return min(candidates, key=math.prod)

    def _fitted(self, height: int, width: int, canvas_height: int, canvas_width: int) -> tuple[int, int]:
        """Returns the height and width of the resized image on its canvas.

        A small image is enlarged to one tile at most: its canvas may have more tiles only because the image is long.
        """
        tallest = min(max(height, self.side), canvas_height)
        widest = min(max(width, self.side), canvas_width)
        if widest / width < tallest / height:
            return min(max(1, math.floor(height * (widest / width))), tallest), widest
        return tallest, min(max(1, math.floor(width * (tallest / height))), widest)


class MllamaProcessorFamily(ProcessorFamily):
    """Keeps one token for each image; the text reads the image tiles through cross-attention."""

    model_types = ("mllama",)
    hf_class = "MllamaProcessor"
    image_processor = "MllamaImageProcessor"

    def __init__(self, files: ProcessorFiles, tokenizer: Tokenizer) -> None:
        self.images = MllamaPreprocessor.from_settings(files.image_settings())
        self.placeholders = {"image": tokenizer.special_tokens.get("image_token", "<|image|>")}
        self.soft_tokens = self.placeholders
        self._image_id = media_token_id(self.placeholders["image"], tokenizer)
        self._bos = tokenizer.bos_token or ""

    def prompt_edits(self, prompt: Rendered) -> list[Edit]:
        """Inserts a BOS token after the images at the beginning of the prompt, unless the prompt contains one."""
        if not self._bos or prompt.find(self._bos):
            return []
        end = 0
        for first, last in prompt.find(self.placeholders["image"]):
            end = last if first == end else end
        return [Edit(end, end, self._bos)]

    def image_text(self, height: int, width: int, where: str = "image") -> str:
        return self.placeholders["image"]

    def preprocess_images(self, images: list[list[Tensor]]) -> PreprocessedMedia:
        """Preprocesses the images of B prompts, padded to N images for each prompt and M = max_image_tiles tiles.

        Returns:
            The inputs `pixel_values`, fp32 (B, N, M, 3, side, side), zero at padding; `aspect_ratio_ids`,
            int64 (B, N), 0 at padding; `aspect_ratio_mask`, int64 (B, N, M), 1 at tiles and at the first tile of a
            padding image.
        """
        shape = len(images), max(map(len, images)), self.images.max_image_tiles
        pixels = torch.zeros(*shape, 3, self.images.side, self.images.side, dtype=torch.float32, device="cpu")
        ids = torch.zeros(shape[:2], dtype=torch.int64)
        mask = torch.zeros(shape, dtype=torch.int64)
        mask[:, :, 0] = 1
        for row, group in enumerate(images):
            for i, image in enumerate(group):
                tiles, arrangement = self.images(image)
                pixels[row, i, : len(tiles)] = tiles
                ids[row, i] = 1 + self.images.arrangements.index(arrangement)
                mask[row, i, : len(tiles)] = 1
        inputs = {"pixel_values": pixels, "aspect_ratio_ids": ids, "aspect_ratio_mask": mask}
        return PreprocessedMedia(inputs, [self.placeholders["image"]] * sum(map(len, images)))

    def derived_inputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns `cross_attention_mask`, int64 (B, T, N, M): 1 where a token attends to a tile.

        Text attends to the image before it in its segment; after several consecutive images, to all of them.
        """
        if "aspect_ratio_mask" not in inputs:
            return {}
        ids, tiles = inputs["input_ids"], inputs["aspect_ratio_mask"]
        mask = torch.zeros(*ids.shape, *tiles.shape[1:], dtype=torch.int64)
        segment_ends = _segment_ends(inputs.get("position_ids"), ids)
        for row in range(len(ids)):
            starts = torch.nonzero(torch.eq(ids[row], self._image_id)).flatten().tolist()
            ends = segment_ends[row, starts].tolist()
            end = following = -1
            for i in reversed(range(len(starts))):
                if i == len(starts) - 1 or ends[i] != ends[i + 1]:
                    end = following = ends[i]
                if starts[i] + 1 != following:
                    end = following
                mask[row, starts[i] : end, i] = tiles[row, i]
                following = starts[i]
        return {"cross_attention_mask": mask}


def _segment_ends(position_ids: Tensor | None, input_ids: Tensor) -> Tensor:
    """Returns the index after the last token of each token's segment, int64 (B, T)."""
    tokens = input_ids.shape[1]
    if position_ids is None:
        return torch.full(input_ids.shape, tokens)
    starts = torch.arange(tokens).masked_fill(position_ids != 0, tokens)
    following = torch.cat([starts[:, 1:], torch.full((len(starts), 1), tokens)], 1)
    return following.flip(1).cummin(1).values.flip(1)


FAMILIES = (MllamaProcessorFamily,)
