"""The base class of processor families: how one family of models preprocesses the images and videos of a prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from torch import Tensor

from ligerzoo.errors import ImageError, TokenizerError
from ligerzoo.text.rendered import Edit, Rendered
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.vision.settings import ProcessorFiles


class PreprocessedMedia(NamedTuple):
    """The preprocessed images, or videos, of a batch of prompts.

    Attributes:
        inputs: model inputs by name.
        replacements: for each image or video, the text that replaces its placeholder in the prompt.
    """

    inputs: dict[str, Tensor]
    replacements: list[str]


class ProcessorFamily(ABC):
    """How the checkpoints of one model family preprocess images and videos.

    A subclass holds the preprocessors that the checkpoint's files configure.

    Args:
        files: the processor's files.
        tokenizer: the checkpoint's tokenizer.

    Attributes:
        model_types: values of `model_type` in config.json.
        hf_class: name of the processor class in transformers.
        image_processor: name of the image processor class in transformers.
        placeholders: the token that marks an image (`"image"`) or, if supported, a video (`"video"`) in a prompt.
        soft_tokens: for the same keys, the token whose embeddings the model replaces by image features.
    """

    model_types: ClassVar[tuple[str, ...]]
    hf_class: ClassVar[str]
    image_processor: ClassVar[str]
    placeholders: dict[str, str]
    soft_tokens: dict[str, str]

    @abstractmethod
    def __init__(self, files: ProcessorFiles, tokenizer: Tokenizer) -> None: ...

    @abstractmethod
    def image_text(self, height: int, width: int, where: str = "image") -> str:
        """Returns the text that replaces the placeholder of an image of this size in pixels.

        Raises:
            ImageError: the family does not support images of this size.
        """

    @abstractmethod
    def preprocess_images(self, images: list[list[Tensor]]) -> PreprocessedMedia:
        """Preprocesses the images of a batch.

        Args:
            images: for each prompt its images, uint8 (3, H, W).
        """

    def preprocess_videos(self, videos: list[Tensor], fps: list[float]) -> PreprocessedMedia:
        """Preprocesses the videos of a batch.

        Args:
            videos: the videos of all prompts, uint8 (T, 3, H, W).
            fps: frames per second of each video.

        Raises:
            ImageError: the family does not support videos.
        """
        what = f"{self.model_types[0]} models read images only"
        raise ImageError(what, where="videos", remedy="Pass images instead.")

    def prompt_edits(self, prompt: Rendered) -> list[Edit]:
        """Returns what changes the prompt to what the tokenizer expects; nothing by default."""
        return []

    def derived_inputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns further model inputs that are computed from the token ids and the other inputs.

        `position_ids`, if given, begin at 0 in each segment of a packed row.
        """
        return {}


def media_token_id(token: str, tokenizer: Tokenizer) -> int:
    """Returns the id of an image or video token.

    Raises:
        TokenizerError: the vocabulary does not contain the token.
    """
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        what = "the vocabulary has no token that marks images or videos"
        raise TokenizerError(what, where="tokenizer.json", expected=repr(token))
    return token_id
