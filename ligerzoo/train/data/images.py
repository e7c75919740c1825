"""Images of conversations: their tokens in samples, and their pixels in batches.

A sample holds the sizes of its images only. Their pixels are read from the record again when a batch needs them, so
memory does not grow with the data, and a saved position contains no images.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligerzoo.checks import is_text
from ligerzoo.entries import is_array, is_object
from ligerzoo.errors import DataError, quote
from ligerzoo.text.messages import Messages
from ligerzoo.text.rendered import Edit, Rendered
from ligerzoo.train import processes
from ligerzoo.train.data.records import Fields
from ligerzoo.train.data.samples import Sample, Source, naming
from ligerzoo.vision import read_image
from ligerzoo.vision.io import MAX_PIXELS, image_size
from ligerzoo.vision.processor import Processor

_READERS = 4  # threads that decode the images of a batch

_SCHEMES = ("data:", "file://", "http://", "https://")

Size = tuple[int, int]
"""Height and width in pixels."""


def image_parts(messages: Messages) -> list[dict[str, object]]:
    """Returns the parts of messages that are images or placeholders of images."""
    contents = (message.get("content") for message in messages)
    return [part for content in contents if is_array(content) for part in content if part["type"] == "image"]


def images_of(messages: Messages, fields: Fields) -> list[object]:
    """Returns the images of a conversation in the order of its placeholders, as the record gives them.

    Args:
        messages: from `messages_field`. A part `{"type": "image"}` without an image takes the next one of `images`.
        fields: the record, with an optional list `images`.

    Raises:
        DataError: `images` is not a list, or the numbers of images and placeholders differ.
    """
    parts = image_parts(messages)
    own = [part["image"] for part in parts if "image" in part]
    listed = fields.get("images", [])
    if not is_array(listed):
        raise DataError("wrong type", where="images", got=quote(listed), expected="a list of images")
    if own and listed:
        what = "images are given both in the messages and in the field 'images'"
        raise DataError(what, remedy="Give them once.")
    if len(own or listed) != len(parts):
        what = "the number of images differs from the number of placeholders"
        expected = f"{len(parts)}, one for each part of type 'image'"
        remedy = 'Mark each image of the field "images" by a part {"type": "image"} of a message.'
        raise DataError(what, got=f"{len(own or listed)} images", expected=expected, remedy=remedy)
    return [*(own or listed)]


class ImageEncoder:
    """Replaces the image placeholders of rendered conversations, as the processor of the model does."""

    def __init__(self, processor: Processor) -> None:
        self._family, self._tokenizer = processor.family, processor.tokenizer
        self._placeholder = self._family.placeholders["image"]
        self._soft_token = self._family.soft_tokens["image"]
        self._soft_id = processor.image_token_id
        self._adds_bos = self._tokenizer.encode("a")[:1] == [self._tokenizer.bos_token_id]

    def sizes(self, images: Sequence[object], source: Source) -> list[Size]:
        """Returns the sizes of images, of files from their header.

        Raises:
            ImageError: an image cannot be read, is too large, or is on the network.
        """
        return [image_size(locate(image, source), f"images[{i}]") for i, image in enumerate(images)]

    def edits(self, rendered: Rendered, sizes: Sequence[Size]) -> list[Edit]:
        """Returns the replacements of the placeholders in a rendered conversation.

        Args:
            sizes: sizes of the images.

        Raises:
            DataError: the template renders another number of placeholders than images, or no BOS token where the
                processor would add one.
        """
        found = rendered.find(self._placeholder)
        if len(found) != len(sizes):
            what = f"the chat template renders another number of {self._placeholder!r} than there are images"
            raise DataError(what, got=len(found), expected=len(sizes))
        bos = self._tokenizer.bos_token
        if self._family.prompt_edits(rendered) or (self._adds_bos and bos is not None and not rendered.find(bos)):
            what = "the chat template renders no BOS token, which the model expects with images"
            raise DataError(what, got=quote(rendered.text[:40]), expected=repr(bos))
        texts = [self._family.image_text(*size, where=f"images[{i}]") for i, size in enumerate(sizes)]
        return [Edit(*span, new) for span, new in zip(found, texts, strict=True)]

    def check_tokens(self, input_ids: Sequence[int], edits: Sequence[Edit]) -> None:
        """Refuses conversations whose text contains tokens that the model would replace by images.

        Raises:
            DataError: the number of image tokens is not that of the images.
        """
        got, expected = input_ids.count(self._soft_id), sum(edit.text.count(self._soft_token) for edit in edits)
        if got != expected:
            what = f"the text contains {self._soft_token!r}, which marks an image"
            raise DataError(what, got=f"{got} tokens", expected=f"{expected}, those of its images")


class PixelBudget:
    """Bounds the pixels that the threads of a process decode at a time: decoders use several times their memory.

    Args:
        pixels: the bound; a larger image is decoded alone.
    """

    def __init__(self, pixels: int) -> None:
        self._pixels = self._free = pixels
        self._changed = threading.Condition()

    @contextmanager
    def reserved(self, pixels: int) -> Iterator[None]:
        """Waits until an image of this size may be decoded, in this context."""
        pixels = min(pixels, self._pixels)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= pixels)
            self._free -= pixels
        try:
            yield
        finally:
            with self._changed:
                self._free += pixels
                self._changed.notify_all()


@functools.cache
def _budget_of_process() -> PixelBudget:
    """Returns this process's share of the pixels that the processes of a host decode at a time."""
    return PixelBudget(MAX_PIXELS // processes.world_size_of_host())


class SampleImages:
    """Reads the images of samples, and makes model inputs of them.

    Args:
        images_of_record: returns the images of a record in order, reading it again.

    Attributes:
        images_of_record: as given.
    """

    def __init__(self, processor: Processor, images_of_record: Callable[[Source], list[object]]) -> None:
        self._family, self.images_of_record = processor.family, images_of_record

    def read(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Returns the images of samples in order, uint8 (3, H, W).

        Raises:
            DataError: an image cannot be read, or is not the one whose size the sample has.
        """
        listed = []
        for sample in samples:
            if sample.images:
                given = self.images_of_record(sample.source)
                if len(given) < len(sample.images):
                    raise _changed(sample.source)
                listed += [(i, image, sample) for i, image in enumerate(given[: len(sample.images)])]

        def read_one(item: tuple[int, object, Sample]) -> Tensor:
            index, image, sample = item
            height, width = sample.images[index].size
            with naming(sample.source), _budget_of_process().reserved(height * width):
                pixels = read_image(locate(image, sample.source), f"images[{index}]")
            if tuple(pixels.shape[1:]) != sample.images[index].size:
                raise _changed(sample.source)
            return pixels

        if len(listed) < 2:
            return list(map(read_one, listed))
        with ThreadPoolExecutor(_READERS, thread_name_prefix="ligerzoo-images") as threads:
            return list(threads.map(read_one, listed))

    def inputs(self, layout: Sequence[Sequence[Sample]], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the model inputs of the images of a batch; none without images.

        Args:
            layout: the segments of each row.
            inputs: `input_ids` and `position_ids`, (B, T).

        Raises:
            DataError: see `read`.
        """
        samples = [segment for row in layout for segment in row]
        pixels = iter(self.read(samples))
        groups = [[next(pixels) for segment in row for _ in segment.images] for row in layout]
        if not any(groups):
            return {}
        found = dict(self._family.preprocess_images(groups).inputs)
        return {**found, **self._family.derived_inputs({**inputs, **found})}

    def prompt(self, sample: Sample) -> dict[str, Tensor]:
        """Returns the model inputs of a sample as a prompt, with one row."""
        ids = torch.tensor([sample.input_ids])
        return {"input_ids": ids, **self.inputs([[sample]], {"input_ids": ids})}


def locate(image: object, source: Source) -> Any:
    """Returns an image of a record as `read_image` takes it: names of files are relative to the data file.

    Hugging Face datasets store an image as `{"bytes": ..., "path": ...}`, either of which may be None.
    """
    if is_object(image) and (image.keys() & {"bytes", "path"}):
        image = image.get("path") if image.get("bytes") is None else image["bytes"]
    if is_text(image) and source.unit == "byte" and not image.startswith(_SCHEMES):
        return Path(source.name).parent / image
    return image


def _changed(source: Source) -> DataError:
    return DataError("an image has changed since it was read first", where=source)
