"""Conversations with images and videos to a vision-language model's inputs.

The checkpoint's tokenizer and its image preprocessing are put together here: every place of an image in the prompt is
widened to as many tokens as the model makes of that image. How that is done differs by family (`families`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from ligerzoo.errors import ImageError, TokenizerError
from ligerzoo.files.atomic import reading_directory, replace_files
from ligerzoo.text import tokenizer as tokenizer_files
from ligerzoo.text.tokenizer import PaddingSide, Tokenizer
from ligerzoo.vision import read_image, read_video
from ligerzoo.vision.families import FILE_NAMES, Family, Files, Seen, id_of
from ligerzoo.vision.messages import (
    check_number,
    conversations_in,
    grouped,
    in_parts,
    listed_videos,
    speeds_of,
    widened,
)  # fmt: skip

FILE_PATTERNS = (*tokenizer_files.FILE_PATTERNS, *FILE_NAMES, "config.json")
"""The files that a processor is read from, as glob patterns inside a checkpoint's directory."""

DEFAULT_FPS = 24.0  # of a video that nobody knows the speed of, as in transformers 5


class Processor:
    """A checkpoint's tokenizer and its preprocessing of images and videos.

    Args:
        tokenizer: whose chat templates are those of the processor.
        family: what is done with images.
        files: contents by name of the files that say so, as `save_pretrained` is to write them.

    Attributes:
        tokenizer: for text alone, and to decode what the model answers.
        family: with the settings of the preprocessing.
    """

    def __init__(self, tokenizer: Tokenizer, family: Family, files: Mapping[str, bytes]) -> None:
        self.tokenizer, self.family, self._files = tokenizer, family, files
        for token in family.placeholders.values():
            id_of(token, tokenizer)  # which is checked now, and not when the first image comes
        self._soft_ids = {kind: id_of(token, tokenizer) for kind, token in family.soft_tokens.items()}

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> Self:
        """Read a checkpoint's processor from a directory, or download the few files it needs from the hub.

        Args:
            name_or_path: a directory, or a hub id such as "org/name".
            revision: the branch, tag or commit on the hub.
            token: the access token for the hub; None takes the one of the login.
            cache_dir: where downloads are kept; None is the hub library's own place.
            local_files_only: never ask the hub, use what was downloaded before.

        Raises:
            ConfigError: the model is none that sees images, or its preprocessing is not supported.
            CheckpointError: a file is malformed, or the directory was replaced while it was read.
            TokenizerError: there is no tokenizer.json, it is malformed, or it has no token for images.
        """
        from ligerzoo.files.locate import locate_files

        directory = locate_files(
            name_or_path,
            FILE_PATTERNS,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
        )
        with reading_directory(directory):
            files = Files(directory)
            family = files.family()
            tokenizer = Tokenizer.from_pretrained(directory)
            if (template := files.chat_template()) is not None:
                tokenizer.chat_templates["default"] = template
            return cls(tokenizer, family(files, tokenizer), files.contents)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the files this processor was read from, byte for byte, those of its tokenizer among them.

        Each file is replaced in one step. Files of another processor that was saved there before are removed.
        config.json, which names the family too, is the model's to save.
        """
        self.tokenizer.save_pretrained(directory)
        replace_files(Path(directory), self._files, FILE_NAMES)

    def __call__(
        self,
        text: str | Sequence[str] | Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        *,
        images: Any = None,
        videos: Any = None,
        fps: float | Sequence[float] = DEFAULT_FPS,
        padding_side: PaddingSide = "left",
        add_special_tokens: bool = True,
        add_generation_prompt: bool = False,
        return_tensors: Literal["pt"] = "pt",
    ) -> dict[str, Tensor]:
        """A model's inputs for one text or conversation, or for several that are padded to the longest.

        A conversation is a list of messages whose `content` is a text or a list of parts: `{"type": "text", "text":
        ...}`; `{"type": "image", "image": ...}`, where the image is anything that `ligerzoo.vision.read_image` takes
        and may also be called "path" or "url"; `{"type": "video", "video": ...}` in the same way, as `read_video` takes
        it; or `{"type": "image_url", "image_url": {"url": ...}}`. Nothing is downloaded.

        Args:
            text: a text with the placeholders of its images, or a conversation; or a list of B of them.
            images: the images in the order of their places: one, a list, or a list of lists, one for each text. Parts
                of a conversation that are only `{"type": "image"}` take theirs from here.
            videos: likewise one video or a list of videos; a list of images is one video.
            fps: frames per second of all videos, or of each. Only Qwen2.5-VL takes notice.
            padding_side: "left" (for generation) or "right".
            add_special_tokens: whether a text gets what tokenizer.json puts around every text. What a chat template
                writes gets it unless it begins with a BOS token already.
            add_generation_prompt: whether a conversation ends with the beginning of the model's answer.
            return_tensors: "pt", the only kind there is.

        Returns:
            `input_ids` and `attention_mask`, int64 (B, T), and what the family adds under the names it has in
            transformers: `pixel_values` and `image_grid_thw`, `pixel_values_videos` and `video_grid_thw`, and so on.

        Raises:
            ImageError: an image or a video cannot be read, or is too large or too thin; or there are more or fewer than
                places for them.
            TokenizerError: the chat template refuses the messages, or a text cannot be encoded.
        """
        if return_tensors != "pt":
            raise TokenizerError("unknown kind", where="return_tensors", got=return_tensors, expected='"pt"')
        videos = listed_videos(videos)
        conversations = conversations_in(text)
        if conversations is None:
            texts: list[Any] = [text] if isinstance(text, str) else list(text)
        else:
            if any(groups := in_parts(conversations, "image")):
                _refuse_twice(images is not None, "images")
                images = groups
            if any(groups := in_parts(conversations, "video")):
                _refuse_twice(bool(videos), "videos")
                videos = [video for group in groups for video in group]
            texts = self.tokenizer.apply_chat_template(
                conversations, add_generation_prompt=add_generation_prompt, tokenize=False
            )
            bos = self.tokenizer.bos_token
            add_special_tokens = bos is None or not texts[0].startswith(bos)
        texts = [self.family.prompt(one) for one in texts]

        seen = self._see_images(texts, images) | self._see_videos(texts, videos, fps)
        places = {self.family.placeholders[kind]: iter(found.places) for kind, found in seen.items()}
        inputs = self.tokenizer(
            [widened(one, places) for one in texts],
            padding_side=padding_side,
            return_tensors="pt",
            add_special_tokens=add_special_tokens,
        )
        self._check_tokens(inputs["input_ids"], seen)
        for found in seen.values():
            inputs |= found.inputs
        return {**inputs, **self.family.more_inputs(inputs)}

    def _see_images(self, texts: list[str], images: Any) -> dict[str, Seen]:
        """What the family makes of the images; nothing where there are none."""
        token = self.family.placeholders["image"]
        groups = grouped(images, [one.count(token) for one in texts], token)
        if not any(groups):
            return {}
        number = count()
        read = [[read_image(image, f"images[{next(number)}]") for image in group] for group in groups]
        return {"image": self.family.see_images(read)}

    def _see_videos(self, texts: list[str], videos: list[Any], fps: float | Sequence[float]) -> dict[str, Seen]:
        if "video" in self.family.placeholders:
            token = self.family.placeholders["video"]
            check_number(len(videos), sum(one.count(token) for one in texts), "videos", token)
        if not videos:
            return {}
        read = [read_video(video, f"videos[{i}]") for i, video in enumerate(videos)]
        return {"video": self.family.see_videos(read, speeds_of(fps, len(videos)))}

    def _check_tokens(self, input_ids: Tensor, seen: Mapping[str, Seen]) -> None:
        """Refuse texts that spell the tokens out which stand for what was seen."""
        for kind, token in self.family.soft_tokens.items():
            expected = sum(place.count(token) for place in seen[kind].places) if kind in seen else 0
            got = int(torch.eq(input_ids, self._soft_ids[kind]).sum())
            if got != expected:
                raise ImageError(
                    f"the prompt has another number of {token!r} than its {kind}s need",
                    where="text",
                    got=got,
                    expected=expected,
                )


def load(name_or_path: str | Path, *, revision: str | None = None) -> Processor | Tokenizer:
    """What makes a model's inputs: the checkpoint's processor, or its tokenizer where there are no images to prepare.

    Args:
        name_or_path: a directory, or a hub id such as "org/name".
        revision: the branch, tag or commit on the hub.

    Raises:
        LigerzooError: as the `from_pretrained` of either does.
    """
    from ligerzoo.files.locate import locate_files

    directory = locate_files(name_or_path, FILE_PATTERNS, revision=revision)
    with reading_directory(directory):
        has_processor = Files(directory).tell_of_images()
        return Processor.from_pretrained(directory) if has_processor else Tokenizer.from_pretrained(directory)


def _refuse_twice(twice: bool, where: str) -> None:
    if twice:
        raise ImageError("given in the messages and beside them too", where=where)
