"""Mistral Small 3.1 and Ministral 3: images of any size up to a longest side, with break tokens between their rows.

An image is shrunk until it fits, and both sides are rounded up to whole numbers of merged patches, as transformers'
`PixtralImageProcessor` does. The images of a batch are padded at the right and the bottom to one size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ligerzoo.checks import integer
from ligerzoo.errors import ImageError
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.vision.family import PreprocessedMedia, ProcessorFamily, media_token_id
from ligerzoo.vision.settings import MAX_SIDE, ProcessorFiles, Settings
from ligerzoo.vision.transforms import BICUBIC, CLIP_MEAN, CLIP_STD, Normalization, resample_of, resize


@dataclass(frozen=True, kw_only=True)
class Mistral3Preprocessor:
    """Resizes images to whole numbers of tokens.

    Attributes:
        max_height, max_width: largest height and width of an image in pixels, before they are rounded up.
        side: side in pixels of the square that becomes one token.
        resample: Pillow's number of the resampling filter.
        normalization: maps bytes to fp32.
    """

    max_height: int
    max_width: int
    side: int
    resample: int
    normalization: Normalization

    @classmethod
    def from_settings(cls, settings: Settings, side: int) -> Mistral3Preprocessor:
        """Builds it from the entries of preprocessor_config.json, but for `patch_size`, which has no effect.

        Args:
            settings: the entries.
            side: side in pixels of the square that becomes one token.

        Raises:
            ConfigError: an entry is malformed or not supported.
        """
        settings.require("do_pad", True)
        settings.require("do_center_crop", False)
        size, sides = settings.section("size"), integer(1, MAX_SIDE)
        if "longest_edge" in size or "height" not in size:
            height = width = size.read("longest_edge", sides, 1024)
        else:
            height, width = (size.read(name, sides, 1024) for name in ("height", "width"))
        return cls(
            max_height=height,
            max_width=width,
            side=side,
            resample=resample_of(settings, BICUBIC),
            normalization=Normalization.from_settings(settings, mean=CLIP_MEAN, std=CLIP_STD),
        )

    def __call__(self, image: Tensor, where: str = "image") -> Tensor:
        """Resizes and normalizes an image, uint8 (3, H, W) -> fp32 (3, rows * side, columns * side).

        Raises:
            ImageError: the image is too thin, or Pillow is not installed.
        """
        rows, columns = self.tokens(image.shape[1], image.shape[2], where)
        resized = resize(image, rows * self.side, columns * self.side, self.resample, where)
        return self.normalization(resized[None])[0]

    def tokens(self, height: int, width: int, where: str = "image") -> tuple[int, int]:
        """Returns the rows and columns of tokens of an image of this size in pixels.

        Raises:
            ImageError: nothing is left of the shorter side of a shrunk image.
        """
        ratio = max(height / self.max_height, width / self.max_width)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        if min(height, width) < 1:
            expected = f"a shorter side of at least a pixel, once the image fits {self.max_height} x {self.max_width}"
            raise ImageError("the image is too thin", where=where, got=f"{height} x {width} pixels", expected=expected)
        return math.ceil(height / self.side), math.ceil(width / self.side)


class Mistral3ProcessorFamily(ProcessorFamily):
    """Replaces each image by its tokens, with a break token after each row but the last, which an end token follows."""

    model_types = ("mistral3",)
    hf_class = "PixtralProcessor"
    image_processor = "PixtralImageProcessor"

    def __init__(self, files: ProcessorFiles, tokenizer: Tokenizer) -> None:
        own = files.processor_config
        side = own.read("patch_size", integer(1, 256), 16) * own.read("spatial_merge_size", integer(1, 16), 1)
        self.images = Mistral3Preprocessor.from_settings(files.image_settings(), side)
        names = ("image", "image_break", "image_end")
        defaults = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
        tokens = [own.string(f"{name}_token") or token for name, token in zip(names, defaults, strict=True)]
        for token in tokens:
            media_token_id(token, tokenizer)
        self._token, self._break, self._end = tokens
        self.placeholders = self.soft_tokens = {"image": self._token}

    def image_text(self, height: int, width: int, where: str = "image") -> str:
        return self._text(*self.images.tokens(height, width, where))

    def _text(self, rows: int, columns: int) -> str:
        return self._break.join([self._token * columns] * rows) + self._end

    def preprocess_images(self, images: list[list[Tensor]]) -> PreprocessedMedia:
        """Preprocesses the images of a batch.

        Returns:
            The inputs `pixel_values`, fp32 (n, 3, height, width), zero at padding, and `image_sizes`, int64 (n, 2), the
            height and width of each image in pixels.
        """
        every = [image for group in images for image in group]
        outputs = [self.images(image, f"images[{i}]") for i, image in enumerate(every)]
        sizes = torch.tensor([image.shape[1:] for image in outputs])
        height, width = sizes.amax(0).tolist()
        pixels = torch.stack([F.pad(x, (0, width - x.shape[2], 0, height - x.shape[1])) for x in outputs])
        replacements = [self._text(*one) for one in (sizes // self.images.side).tolist()]
        return PreprocessedMedia({"pixel_values": pixels, "image_sizes": sizes}, replacements)


FAMILIES = (Mistral3ProcessorFamily,)
