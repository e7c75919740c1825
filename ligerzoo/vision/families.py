"""What each family of vision-language models does with the images and videos of a prompt.

A class per family holds the preprocessing that the checkpoint's files ask for, says with how many tokens an image
stands in the prompt, and which inputs the model gets besides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ligerzoo.errors import ConfigError, ImageError, TokenizerError
from ligerzoo.files.checkpoint import read_bytes, read_json
from ligerzoo.text.chat_template import ChatTemplate
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.vision import Gemma3Preprocessor, MllamaPreprocessor, Qwen2VLPreprocessor, Settings

FILE_NAMES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
)
"""The files of a processor beside its tokenizer's."""


class Files:
    """The JSON files of a processor, of which any may be absent.

    Attributes:
        contents: of those there are, as they stand on disk, by name.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        present = [name for name in FILE_NAMES if (directory / name).exists()]
        self.contents = {name: read_bytes(directory / name) for name in present}
        self.whole = self._read("processor_config.json") or Settings({}, directory / "processor_config.json")

    def images(self) -> Settings:
        """How images are preprocessed. Transformers 5 nests it in processor_config.json, which goes first."""
        return self._settings("image_processor", "preprocessor_config.json")

    def videos(self) -> Settings:
        """How videos are preprocessed; where no file tells, as images are."""
        return self._settings("video_processor", "video_preprocessor_config.json", "preprocessor_config.json")

    def chat_template(self) -> ChatTemplate | None:
        """The template that only processors read, and which goes before those of the tokenizer."""
        for settings in (self.whole, self._read("chat_template.json")):
            if settings is not None and (source := settings.string("chat_template")) is not None:
                return ChatTemplate(source, f"{settings.where}: chat_template")
        return None

    def family(self) -> type[Family]:
        """The class for this checkpoint's `model_type`; without a config.json, for its `processor_class`."""
        config = self._read("config.json")
        where: object
        if config is not None:
            where, name = config.where, config.string("model_type")
            found = next((family for family in FAMILIES if family.model_type == name), None)
        else:
            where = self.directory
            name = self.whole.string("processor_class") or self.images().string("processor_class")
            found = next((family for family in FAMILIES if family.hf_class == name), None)
        if found is None:
            raise ConfigError(
                "no model that sees images, or none that is known",
                where=where,
                got=repr(name),
                expected=f"one of {', '.join(family.model_type for family in FAMILIES)}",
                remedy="It reads text alone, through ligerzoo.Tokenizer.",
            )
        self._check_image_processor(found)
        return found

    def tell_of_images(self) -> bool:
        """Whether they are of a model that sees images, and say how these are preprocessed."""
        config = self._read("config.json")
        sees = config is None or config.string("model_type") in [family.model_type for family in FAMILIES]
        return sees and not self.contents.keys().isdisjoint(["preprocessor_config.json", "processor_config.json"])

    def _check_image_processor(self, family: type[Family]) -> None:
        settings = self.images()
        name = settings.string("image_processor_type")
        if name not in (None, *(family.image_processor + suffix for suffix in ("", "Fast", "Pil"))):
            raise ConfigError(
                f"is not {family.model_type}'s",
                where=f"{settings.where}: image_processor_type",
                got=repr(name),
                expected=family.image_processor,
            )

    def _read(self, name: str) -> Settings | None:
        path = self.directory / name
        return Settings(read_json(path), path) if path.exists() else None

    def _settings(self, section: str, *names: str) -> Settings:
        if section in self.whole:
            return self.whole.section(section)
        for name in names:
            if (settings := self._read(name)) is not None:
                return settings
        raise ConfigError(
            "there is no preprocessor_config.json",
            where=self.directory,
            remedy="Without it nobody knows how images are to be resized and normalized.",
        )


class Seen(NamedTuple):
    """What a family makes of the images or videos of a prompt.

    Attributes:
        inputs: the model's inputs, by their names.
        places: for each image the text that stands for it in the prompt.
    """

    inputs: dict[str, Tensor]
    places: list[str]


class Family(ABC):
    """What the checkpoints of one family do with images. The constructor reads their files.

    Attributes:
        model_type: as config.json names it.
        hf_class: transformers' class of processor.
        image_processor: transformers' class of image processor.
        placeholders: for images, and for videos where there are any, the token that a prompt marks the place of one
            with.
        soft_tokens: for each the token whose embedding the model replaces by what it saw there.
    """

    model_type: ClassVar[str]
    hf_class: ClassVar[str]
    image_processor: ClassVar[str]
    placeholders: dict[str, str]
    soft_tokens: dict[str, str]

    @abstractmethod
    def __init__(self, files: Files, tokenizer: Tokenizer) -> None: ...

    @abstractmethod
    def see_images(self, images: list[list[Tensor]]) -> Seen:
        """The images, uint8 (3, H, W), of each text."""

    def see_videos(self, videos: list[Tensor], fps: list[float]) -> Seen:
        """The videos, uint8 (T, 3, H, W), of all texts, and their frames per second."""
        raise ImageError(f"{self.model_type} sees images only", where="videos")

    def prompt(self, text: str) -> str:
        """A text as the tokenizer gets it."""
        return text

    def more_inputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs that follow from the token ids and the others."""
        return {}


def id_of(token: str, tokenizer: Tokenizer) -> int:
    """The id of a token that marks the place of an image or video.

    Raises:
        TokenizerError: there is none.
    """
    found = tokenizer.token_to_id(token)
    if found is None:
        raise TokenizerError("lacks a token that marks images or videos", where="tokenizer.json", expected=repr(token))
    return found


class Qwen2VL(Family):
    """Images and videos in their own resolution: one token for each merge_size x merge_size patches."""

    model_type = "qwen2_vl"
    hf_class = "Qwen2VLProcessor"
    image_processor = "Qwen2VLImageProcessor"

    def __init__(self, files: Files, tokenizer: Tokenizer) -> None:
        self.images = Qwen2VLPreprocessor.for_images(files.images())
        self.videos = Qwen2VLPreprocessor.for_videos(files.videos())
        named = tokenizer.special_tokens
        self.placeholders = {
            "image": named.get("image_token", "<|image_pad|>"),
            "video": named.get("video_token", "<|video_pad|>"),
        }
        self.soft_tokens = self.placeholders

    def see_images(self, images: list[list[Tensor]]) -> Seen:
        clips = [image[None] for group in images for image in group]
        patches, grids, places = self._see(self.images, clips, "image")
        return Seen({"pixel_values": patches, "image_grid_thw": grids}, places)

    def see_videos(self, videos: list[Tensor], fps: list[float]) -> Seen:
        patches, grids, places = self._see(self.videos, videos, "video")
        return Seen({"pixel_values_videos": patches, "video_grid_thw": grids}, places)

    def _see(
        self, preprocessor: Qwen2VLPreprocessor, clips: list[Tensor], kind: str
    ) -> tuple[Tensor, Tensor, list[str]]:
        seen = [preprocessor(clip, f"{kind}s[{i}]") for i, clip in enumerate(clips)]
        grids = [grid for _, grid in seen]
        places = [self.soft_tokens[kind] * preprocessor.tokens(grid) for grid in grids]
        return torch.cat([patches for patches, _ in seen]), torch.tensor(grids), places


class Qwen2_5VL(Qwen2VL):
    """As Qwen2-VL, and the model is told how many seconds a patch of a video lasts."""

    model_type = "qwen2_5_vl"
    hf_class = "Qwen2_5_VLProcessor"

    def see_videos(self, videos: list[Tensor], fps: list[float]) -> Seen:
        inputs, places = super().see_videos(videos, fps)
        seconds = [self.videos.temporal_patch_size / frames for frames in fps]
        return Seen({**inputs, "second_per_grid_ts": torch.tensor(seconds)}, places)


class Gemma3(Family):
    """Every image, or crop of one, is one square and always as many tokens, between two that begin and end it."""

    model_type = "gemma3"
    hf_class = "Gemma3Processor"
    image_processor = "Gemma3ImageProcessor"

    def __init__(self, files: Files, tokenizer: Tokenizer) -> None:
        self.images = Gemma3Preprocessor.from_settings(files.images())
        named = tokenizer.special_tokens
        begin, end = named.get("boi_token", "<start_of_image>"), named.get("eoi_token", "<end_of_image>")
        soft = named.get("image_token", "<image_soft_token>")
        self.placeholders, self.soft_tokens = {"image": begin}, {"image": soft}
        self._soft_id = id_of(soft, tokenizer)
        length = files.whole.integer("image_seq_length", 256, at_most=2**14)
        self._square = f"\n\n{begin}{soft * length}{end}\n\n"

    def see_images(self, images: list[list[Tensor]]) -> Seen:
        squares = [self.images(image) for group in images for image in group]
        return Seen({"pixel_values": torch.cat(squares)}, [self._place(len(views) - 1) for views in squares])

    def _place(self, crops: int) -> str:
        if crops == 0:
            return self._square
        parts = " ".join([self._square] * crops)
        return f"Here is the original image {self._square} and here are some crops to help you see better {parts}"

    def more_inputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`token_type_ids`, int64 (B, T): 1 where there is an image, inside of which attention goes both ways."""
        return {"token_type_ids": torch.eq(inputs["input_ids"], self._soft_id).long()}


class Mllama(Family):
    """The text looks at the tiles of its images by cross-attention: each image is one token in it."""

    model_type = "mllama"
    hf_class = "MllamaProcessor"
    image_processor = "MllamaImageProcessor"

    def __init__(self, files: Files, tokenizer: Tokenizer) -> None:
        self.images = MllamaPreprocessor.from_settings(files.images())
        self.placeholders = {"image": tokenizer.special_tokens.get("image_token", "<|image|>")}
        self.soft_tokens = self.placeholders
        self._image_id = id_of(self.placeholders["image"], tokenizer)
        self._bos = tokenizer.bos_token or ""

    def prompt(self, text: str) -> str:
        """The text with a BOS token, after the images that it begins with."""
        if self._bos in text:
            return text
        token = self.placeholders["image"]
        rest = text
        while rest.startswith(token):
            rest = rest[len(token) :]
        return text[: len(text) - len(rest)] + self._bos + rest

    def see_images(self, images: list[list[Tensor]]) -> Seen:
        """`pixel_values`, fp32 (B, images, tiles, 3, side, side), zero where a text has fewer images or an image has
        fewer tiles; `aspect_ratio_ids`, (B, images), 0 for no image; `aspect_ratio_mask`, (B, images, tiles), 1 for
        a tile and for the first of no image."""
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
        return Seen(inputs, [self.placeholders["image"]] * sum(map(len, images)))

    def more_inputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`cross_attention_mask`, int64 (B, T, images, tiles): 1 where a token looks at a tile. Text looks at the image
        before it; of several images in a row, at all of them."""
        if "aspect_ratio_mask" not in inputs:
            return {}
        ids, tiles = inputs["input_ids"], inputs["aspect_ratio_mask"]
        mask = torch.zeros(*ids.shape, *tiles.shape[1:], dtype=torch.int64)
        for row in range(len(ids)):
            starts = torch.nonzero(torch.eq(ids[row], self._image_id)).flatten().tolist()
            end = following = ids.shape[1]
            for i in reversed(range(len(starts))):
                if starts[i] + 1 != following:
                    end = following
                mask[row, starts[i] : end, i] = tiles[row, i]
                following = starts[i]
        return {"cross_attention_mask": mask}


FAMILIES: tuple[type[Family], ...] = (Qwen2VL, Qwen2_5VL, Gemma3, Mllama)
