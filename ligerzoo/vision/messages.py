"""Finding the images and videos of a call, in the many ways to hand them over, and their places in the text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from ligerzoo.errors import ImageError, TokenizerError

Conversation: TypeAlias = list[dict[str, Any]]

_PAYLOADS = {"image": ("image", "path", "url"), "video": ("video", "path", "url")}


def conversations_in(text: Any) -> list[Conversation] | None:
    """The conversations, with every image and video under "image" or "video"; None if it is texts that were given."""
    if isinstance(text, str):
        return None
    if not isinstance(text, Sequence) or not text:
        raise TokenizerError("is neither text nor messages", where="text", got=repr(text))
    if all(isinstance(one, str) for one in text):
        return None
    batch = [text] if isinstance(text[0], Mapping) else text
    return [[_tidied(message) for message in _messages(conversation)] for conversation in batch]


def _messages(conversation: Any) -> Sequence[Any]:
    if isinstance(conversation, Sequence) and not isinstance(conversation, str):
        return conversation
    raise TokenizerError("is not a conversation", where="text", got=repr(conversation), expected="a list of messages")


def _tidied(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TokenizerError("is not a message", where="messages", got=type(message).__name__, expected="a dictionary")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        return {**message, "content": [_tidied_part(part) for part in content]}
    return dict(message)


def _tidied_part(part: Any) -> Any:
    """A part in one spelling of the several there are."""
    match part:
        case {"type": "image_url", "image_url": {"url": url}} | {"type": "image_url", "image_url": url}:
            return {"type": "image", "image": url}
        case {"type": "image" | "video" as kind}:
            payloads = [part[name] for name in _PAYLOADS[kind] if part.get(name) is not None]
            if len(payloads) > 1:
                expected = "one of " + ", ".join(_PAYLOADS[kind])
                raise ImageError(f"more than one {kind}", where="messages", got=sorted(part), expected=expected)
            rest = {name: value for name, value in part.items() if name not in _PAYLOADS[kind]}
            return {**rest, kind: payloads[0]} if payloads else rest
    return part


def in_parts(conversations: Sequence[Conversation], kind: str) -> list[list[Any]]:
    """The images or videos that stand in the messages of each conversation."""
    contents = [[message.get("content") for message in conversation] for conversation in conversations]
    parts = [[part for content in group if isinstance(content, list) for part in content] for group in contents]
    return [
        [part[kind] for part in group if isinstance(part, Mapping) and part.get("type") == kind and kind in part]
        for group in parts
    ]


def grouped(images: Any, counts: list[int], token: str) -> list[list[Any]]:
    """The images of each text, which has places for as many as `counts` says."""
    listed = list(images) if isinstance(images, (list, tuple)) else [] if images is None else [images]
    if listed and all(isinstance(group, (list, tuple)) for group in listed):
        if len(listed) != len(counts):
            raise ImageError("as many lists as texts are needed", where="images", got=len(listed), expected=len(counts))
        for i, (group, count) in enumerate(zip(listed, counts, strict=True)):
            check_number(len(group), count, f"images[{i}]", token)
        return [list(group) for group in listed]
    check_number(len(listed), sum(counts), "images", token)
    rest = iter(listed)
    return [[next(rest) for _ in range(count)] for count in counts]


def check_number(got: int, expected: int, where: str, token: str) -> None:
    if got != expected:
        raise ImageError(
            "as many are needed as the text has places for",
            where=where,
            got=got,
            expected=expected,
            remedy=f"The place of each is a {token} in the text, or a part of a message.",
        )


def listed_videos(videos: Any) -> list[Any]:
    """One video is an array, or a list of frames; a list of those is several."""
    if videos is None:
        return []
    if isinstance(videos, (list, tuple)) and all(
        isinstance(video, (list, tuple)) or (isinstance(video, (Tensor, np.ndarray)) and video.ndim == 4)
        for video in videos
    ):
        return list(videos)
    return [videos]


def speeds_of(fps: float | Sequence[float], number: int) -> list[float]:
    speeds = list(fps) if isinstance(fps, Sequence) else [fps] * number
    if len(speeds) != number or not all(isinstance(speed, (int, float)) and 0 < speed < math.inf for speed in speeds):
        raise ImageError("bad frames per second", where="fps", got=fps, expected=f"one positive number, or {number}")
    return speeds


def widened(text: str, places: Mapping[str, Iterator[str]]) -> str:
    """The text with what stands for each image and video in their places."""
    if not places:
        return text
    return re.sub("|".join(map(re.escape, places)), lambda match: next(places[match[0]]), text)
