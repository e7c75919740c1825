"""Collects the images and videos of a processor call and replaces their placeholders in the text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from ligerzoo.errors import ImageError, TokenizerError, did_you_mean

Messages: TypeAlias = list[dict[str, Any]]

_MEDIA_KEYS = {"image": ("image", "path", "url"), "video": ("video", "path", "url")}


def conversations_in(text: Any) -> list[Messages] | None:
    """Returns the conversations, with each image and video under the key "image" or "video"; None for plain texts.

    Raises:
        TokenizerError: the argument is neither texts nor conversations.
        ImageError: a part of a message has more than one image or video, or another type.
    """
    if isinstance(text, str):
        return None
    if not isinstance(text, Sequence) or not text:
        expected = "a text, a list of messages, or a list of these"
        raise TokenizerError("neither text nor messages", where="text", got=repr(text), expected=expected)
    if all(isinstance(one, str) for one in text):
        return None
    batch = [text] if isinstance(text[0], Mapping) else text
    return [[_normalize_message(message) for message in _messages(conversation)] for conversation in batch]


def _messages(conversation: Any) -> Sequence[Any]:
    if isinstance(conversation, Sequence) and not isinstance(conversation, str):
        return conversation
    raise TokenizerError("not a conversation", where="text", got=repr(conversation), expected="a list of messages")


def _normalize_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TokenizerError("not a message", where="messages", got=type(message).__name__, expected="a dictionary")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        return {**message, "content": [normalize_part(part) for part in content]}
    return dict(message)


def normalize_part(part: Any) -> Any:
    """Returns the part of a message with its image or video, if any, under the key "image" or "video".

    Raises:
        ImageError: the part has more than one image or video, or another type.
    """
    match part:
        case {"type": "image_url", "image_url": {"url": url}} | {"type": "image_url", "image_url": url}:
            return {"type": "image", "image": url}
        case {"type": "image" | "video" as kind}:
            media = [part[name] for name in _MEDIA_KEYS[kind] if part.get(name) is not None]
            if len(media) > 1:
                expected = "one of " + ", ".join(_MEDIA_KEYS[kind])
                raise ImageError(
                    f"more than one {kind} in a part", where="messages", got=sorted(part), expected=expected
                )
            rest = {name: value for name, value in part.items() if name not in _MEDIA_KEYS[kind]}
            return {**rest, kind: media[0]} if media else rest
        case {"type": other} if part.keys() & {"image", "video", "path", "url"}:
            raise ImageError(
                "neither an image nor a video", where="messages", got=f"a part of type {other!r}",
                expected='type "image" or "video"', remedy=did_you_mean(str(other), _MEDIA_KEYS),
            )  # fmt: skip
    return part


def media_in(conversations: Sequence[Messages], kind: str) -> list[list[Any]]:
    """Returns the images, or videos, in the messages of each conversation.

    Args:
        conversations: the conversations, as `conversations_in` returns them.
        kind: "image" or "video".
    """
    contents = [[message.get("content") for message in conversation] for conversation in conversations]
    parts = [[part for content in group if isinstance(content, list) for part in content] for group in contents]
    return [
        [part[kind] for part in group if isinstance(part, Mapping) and part.get("type") == kind and kind in part]
        for group in parts
    ]


def group_images(images: Any, counts: list[int], token: str) -> list[list[Any]]:
    """Groups images by text.

    Args:
        images: an image, a list of images, or a list of lists, one for each text.
        counts: the number of placeholders in each text.
        token: the placeholder, for error messages.

    Raises:
        ImageError: the number of images differs from the number of placeholders.
    """
    listed = list(images) if isinstance(images, (list, tuple)) else [] if images is None else [images]
    if listed and all(isinstance(group, (list, tuple)) for group in listed):
        if len(listed) != len(counts):
            raise ImageError(
                "the number of lists differs from the number of texts",
                where="images",
                got=len(listed),
                expected=len(counts),
            )
        for i, (group, count) in enumerate(zip(listed, counts, strict=True)):
            check_count(len(group), count, f"images[{i}]", token)
        return [list(group) for group in listed]
    check_count(len(listed), sum(counts), "images", token)
    rest = iter(listed)
    return [[next(rest) for _ in range(count)] for count in counts]


def check_count(got: int, expected: int, where: str, token: str) -> None:
    """Raises ImageError if the number of images or videos differs from the number of placeholders."""
    if got != expected:
        marked = f"Mark each one by a {token} in the text, or by a part of a message."
        given = f"Pass one for each {token} in the text. A part of a message names its file as path."
        raise ImageError(
            "the number given differs from the number of placeholders in the text",
            where=where,
            got=got,
            expected=expected,
            remedy=marked if got > expected else given,
        )


def list_videos(videos: Any) -> list[Any]:
    """Returns the videos as a list. One video is a 4-dimensional array or a list of frames."""
    if videos is None:
        return []
    if isinstance(videos, (list, tuple)) and all(
        isinstance(video, (list, tuple)) or (isinstance(video, (Tensor, np.ndarray)) and video.ndim == 4)
        for video in videos
    ):
        return list(videos)
    return [videos]


def list_fps(fps: float | Sequence[float], number: int) -> list[float]:
    """Returns the frames per second of each of `number` videos.

    Raises:
        ImageError: a value is not a positive finite number, or there are not `number` of them.
    """
    values = list(fps) if isinstance(fps, Sequence) else [fps] * number
    if len(values) != number or not all(isinstance(value, (int, float)) and 0 < value < math.inf for value in values):
        expected = f"a positive number, or a list of {number}"
        raise ImageError("invalid frames per second", where="fps", got=fps, expected=expected)
    return values
