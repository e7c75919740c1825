"""Processors: a checkpoint's tokenizer and image preprocessing, which prepare the inputs of a vision-language model.

A processor replaces each image placeholder in a prompt by as many tokens as the model uses for that image. Each model
family does this in its own way; see `ligerzoo.vision.family`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal, Self, Unpack

import torch
from torch import Tensor

from ligerzoo.checks import as_list
from ligerzoo.errors import ConfigError, ImageError, TokenizerError
from ligerzoo.files.atomic import replace_files
from ligerzoo.files.layout import PROCESSOR_FILES, PROCESSOR_INPUTS
from ligerzoo.files.locate import locate_files
from ligerzoo.files.transformers_options import TextOptions, text_options
from ligerzoo.files.untrusted import reading_directory
from ligerzoo.text.rendered import Edit, Rendered
from ligerzoo.text.special_text import SpecialTokens
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.text.tokenizer_files import PaddingSide
from ligerzoo.vision import read_image, read_video
from ligerzoo.vision.families import FAMILIES
from ligerzoo.vision.family import PreprocessedMedia, ProcessorFamily, media_token_id
from ligerzoo.vision.io import ImageInput
from ligerzoo.vision.media import MediaInputs, check_count, conversations_in
from ligerzoo.vision.settings import ProcessorFiles

VISION_MODEL_TYPES = tuple(dict.fromkeys(name for family in FAMILIES for name in family.model_types))
"""Values of `model_type` in the config.json of models that read images."""

DEFAULT_FPS = 24.0  # as in transformers 5


class Processor:
    """A checkpoint's tokenizer and its preprocessing of images and videos.

    Args:
        tokenizer: the tokenizer, with the processor's chat templates.
        family: the preprocessing of images and videos.
        files: the contents of the processor's JSON files by name; `save_pretrained` writes them.

    Attributes:
        tokenizer: the tokenizer, for text without images and to decode the model's output.
        family: the preprocessing, with its settings.

    Raises:
        TokenizerError: the vocabulary has no image or video token.
    """

    def __init__(self, tokenizer: Tokenizer, family: ProcessorFamily, files: Mapping[str, bytes]) -> None:
        self.tokenizer, self.family, self._files = tokenizer, family, files
        for token in family.placeholders.values():
            media_token_id(token, tokenizer)  # a missing token is an error now, not at the first image
        self._soft_ids = {kind: media_token_id(token, tokenizer) for kind, token in family.soft_tokens.items()}

    @property
    def image_token_id(self) -> int:
        """Id of the token whose embeddings the model replaces by those of an image."""
        return self._soft_ids["image"]

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **options: Unpack[TextOptions]) -> Self:
        """Loads a checkpoint's processor from a directory or from the hub.

        Args:
            name_or_path: a directory, or a hub id such as "org/name".
            options: as in `Tokenizer.from_pretrained`.

        Raises:
            ConfigError: the model reads no images, its preprocessing is not supported, or an option is unknown.
            CheckpointError: a file is malformed, or the directory was replaced during the read.
            TokenizerError: tokenizer.json is missing or malformed, or has no image token.
        """
        hub_options = text_options(options, "Processor.from_pretrained")
        directory = locate_files(name_or_path, PROCESSOR_INPUTS, **hub_options)
        with reading_directory(directory):
            files = ProcessorFiles(directory)
            family = family_of(files)
            tokenizer = Tokenizer.from_pretrained(directory)
            if (template := files.chat_template()) is not None:
                tokenizer.chat_templates["default"] = template
            return cls(tokenizer, family(files, tokenizer), files.contents)

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes the processor's and the tokenizer's files, byte for byte as they were loaded.

        Replaces each file atomically and removes the files of a processor that was saved there before. Does not write
        config.json, which names the family too: the model saves it.
        """
        self.tokenizer.save_pretrained(directory)
        replace_files(Path(directory), self._files, PROCESSOR_FILES)

    def read_image(self, image: ImageInput) -> Tensor:
        """Returns an image as uint8 RGB (3, H, W); see `ligerzoo.vision.read_image`."""
        return read_image(image)

    def __call__(
        self,
        text: str | Sequence[str] | Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        *,
        images: object = None,
        videos: object = None,
        fps: float | Sequence[float] = DEFAULT_FPS,
        padding_side: PaddingSide = "left",
        add_special_tokens: bool = True,
        add_generation_prompt: bool = False,
        special_tokens: SpecialTokens = "control",
        return_tensors: Literal["pt"] = "pt",
    ) -> dict[str, Tensor]:
        """Prepares the model inputs of one prompt, or of several prompts padded to the longest.

        A conversation is a list of messages. The `content` of a message is a text or a list of parts:

        - `{"type": "text", "text": ...}`
        - `{"type": "image", "image": ...}`: anything that `ligerzoo.vision.read_image` accepts. The key may also be
          "path" or "url".
        - `{"type": "video", "video": ...}`: likewise, for `read_video`.
        - `{"type": "image_url", "image_url": {"url": ...}}`

        Nothing is downloaded.

        Args:
            text: a text with image placeholders, a conversation, or a list of B texts or conversations.
            images: images in the order of their placeholders: one image, a list, or one list for each text. Parts
                `{"type": "image"}` without an image take theirs from here.
            videos: one video or a list of videos, in the same way. A list of images is one video.
            fps: frames per second of all videos, or of each. Qwen2-VL does not use it.
            padding_side: "left" (for generation) or "right".
            add_special_tokens: whether to add the special tokens that tokenizer.json puts around a text. The output of
                a chat template gets them only if it does not begin with a BOS token.
            add_generation_prompt: whether to end a conversation with the beginning of the model's answer.
            special_tokens: what a special token means that is written in a message: "text" for its characters, so that
                a message cannot end itself or mark an image, or "control" for the special token. In texts, all are
                control tokens.
            return_tensors: "pt" is the only supported value.

        Returns:
            `input_ids` and `attention_mask`, int64 (B, T), and the family's inputs under their names in transformers:
            `pixel_values` and `image_grid_thw`, `pixel_values_videos` and `video_grid_thw`, and so on.

        Raises:
            ImageError: an image or video cannot be read, is too large or too thin; or the number of images or videos
                differs from the number of placeholders.
            TokenizerError: the chat template refuses the messages, or a text cannot be encoded.
        """
        if return_tensors != "pt":
            raise TokenizerError("unsupported value", where="return_tensors", got=repr(return_tensors), expected='"pt"')
        conversations = conversations_in(text)
        given = MediaInputs.collect(conversations or [], images, videos, fps)
        if conversations is None:
            prompts = _plain_prompts(text, special_tokens)
        else:
            render = partial(self.tokenizer.render_chat, add_generation_prompt=add_generation_prompt)
            prompts = [render(one, special_tokens=special_tokens) for one in conversations]
            bos = self.tokenizer.bos_token
            add_special_tokens = bos is None or (0, len(bos)) not in prompts[0].find(bos)[:1]
        prompts = [one.edited(self.family.prompt_edits(one)) for one in prompts]

        media = self._preprocess(prompts, given)
        replacements = {kind: iter(one.replacements) for kind, one in media.items()}
        prompts = [one.edited(self._replacing_placeholders(one, replacements)) for one in prompts]
        rows = [self.tokenizer.encode_rendered(one, add_special_tokens)[0] for one in prompts]
        inputs = self.tokenizer.pad({"input_ids": rows}, padding_side=padding_side, return_tensors="pt")
        self._check_soft_tokens(inputs["input_ids"], media)
        for one in media.values():
            inputs |= one.inputs
        return {**inputs, **self.family.derived_inputs(inputs)}

    def _replacing_placeholders(self, prompt: Rendered, replacements: Mapping[str, Iterator[str]]) -> list[Edit]:
        """Returns the edits that replace each placeholder by the next text of its kind."""
        return sorted(
            Edit(*span, next(texts))
            for kind, texts in replacements.items()
            for span in prompt.find(self.family.placeholders[kind])
        )

    def _preprocess(self, prompts: list[Rendered], given: MediaInputs) -> dict[str, PreprocessedMedia]:
        """Returns the preprocessed images under "image", and videos under "video", if there are any."""
        media, placeholders = {}, self.family.placeholders
        counts = {kind: [len(one.find(token)) for one in prompts] for kind, token in placeholders.items()}
        if any(groups := given.grouped_images(counts["image"], placeholders["image"])):
            number = count()
            images = [[read_image(image, f"images[{next(number)}]") for image in group] for group in groups]
            media["image"] = self.family.preprocess_images(images)
        if "video" in placeholders:
            check_count(len(given.videos), sum(counts["video"]), "videos", placeholders["video"])
        if given.videos:
            videos = [read_video(video, f"videos[{i}]") for i, video in enumerate(given.videos)]
            media["video"] = self.family.preprocess_videos(videos, given.fps_of_each())
        return media

    def _check_soft_tokens(self, input_ids: Tensor, media: Mapping[str, PreprocessedMedia]) -> None:
        """Refuses prompts whose own text contains soft tokens: the model would replace their embeddings too."""
        replacements = [text for one in media.values() for text in one.replacements]
        for kind, token in self.family.soft_tokens.items():
            expected = sum(text.count(token) for text in replacements)
            got = int(torch.eq(input_ids, self._soft_ids[kind]).sum())
            if got != expected:
                what = f"the number of {token!r} tokens in the prompt does not match its {kind}s"
                remedy = f'Remove {token!r} from the text, or pass special_tokens="text" with messages.'
                raise ImageError(what, where="text", got=got, expected=expected, remedy=remedy)


def load_processor_or_tokenizer(name_or_path: str | Path, *, revision: str | None = None) -> Processor | Tokenizer:
    """Loads a checkpoint's processor, or its tokenizer if the checkpoint has no image preprocessing.

    Args:
        name_or_path: a directory, or a hub id such as "org/name".
        revision: branch, tag or commit on the hub.

    Raises:
        LigerzooError: see `Processor.from_pretrained` and `Tokenizer.from_pretrained`.
    """
    directory = locate_files(name_or_path, PROCESSOR_INPUTS, revision=revision)
    with reading_directory(directory):
        if has_image_preprocessing(ProcessorFiles(directory)):
            return Processor.from_pretrained(directory)
        return Tokenizer.from_pretrained(directory)


def tokenizer_of(processor: Processor | Tokenizer) -> Tokenizer:
    """Returns the tokenizer of a processor; a tokenizer unchanged."""
    return processor.tokenizer if isinstance(processor, Processor) else processor


def family_of(files: ProcessorFiles) -> type[ProcessorFamily]:
    """Returns the family that config.json's `model_type` names or, without config.json, that `processor_class` names.

    Raises:
        ConfigError: no family has this name, or the image processor is another family's.
    """
    where: object
    if (config := files.read("config.json")) is not None:
        where, name = f"{config.where}: model_type", config.string("model_type")
        families = [family for family in FAMILIES if name in family.model_types]
    else:
        where = f"{files.directory}: processor_class"
        name = _processor_class(files)
        families = [family for family in FAMILIES if family.hf_class == name]
    if not families:
        what, expected = "not a supported vision-language model", f"one of {', '.join(VISION_MODEL_TYPES)}"
        remedy = "Pass no images, and load a model that reads text only with ligerzoo.Tokenizer."
        raise ConfigError(what, where=where, got=repr(name), expected=expected, remedy=remedy)
    settings, family = files.image_settings(), families[0]
    if families[1:]:  # GLM-4.6V has the types of models of GLM-4.1V and GLM-4.5V
        name = _processor_class(files)
        family = next((family for family in families if family.hf_class == name), family)
    image_processor = settings.string("image_processor_type")
    if image_processor not in (None, *(family.image_processor + suffix for suffix in ("", "Fast", "Pil"))):
        what, where = f"not the image processor of {family.hf_class}", f"{settings.where}: image_processor_type"
        raise ConfigError(what, where=where, got=repr(image_processor), expected=family.image_processor)
    return family


def _processor_class(files: ProcessorFiles) -> str | None:
    return files.processor_config.string("processor_class") or files.image_settings().string("processor_class")


def has_image_preprocessing(files: ProcessorFiles) -> bool:
    """Returns whether the model reads images and its files say how to preprocess them."""
    config = files.read("config.json")
    reads_images = config is None or config.string("model_type") in VISION_MODEL_TYPES
    return reads_images and not files.contents.keys().isdisjoint(["preprocessor_config.json", "processor_config.json"])


def _plain_prompts(text: Any, special_tokens: SpecialTokens) -> list[Rendered]:
    if special_tokens != "control":
        what, got = "given with texts, whose placeholders are special tokens", repr(special_tokens)
        remedy = "Pass messages instead of texts."
        raise TokenizerError(what, where="special_tokens", got=got, expected='"control"', remedy=remedy)
    return [Rendered(one, None, None) for one in as_list(text, str)]
