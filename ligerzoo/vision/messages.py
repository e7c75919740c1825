"""Collects the images and videos of a processor call and replaces their placeholders in the text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

from ligerzoo.checks import POSITIVE
from ligerzoo.errors import ImageError, TokenizerError, did_you_mean
from ligerzoo.vision.io import ImageInput, VideoInput

Messages: TypeAlias = list[dict[str, Any]]

_MEDIA_KEYS = {"image": ("image", "path", "url"), "video": ("video", "path", "url")}


def is_list(value: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Returns whether a value is a list or a tuple."""
    return isinstance(value, list | tuple)


def conversations_in(text: object) -> list[Messages] | None:
    """Returns the conversations, with each image and video under the key "image" or "video"; None for plain texts.

    Raises:
        TokenizerError: the argument is neither texts nor conversations.
        ImageError: a part of a message has more than one image or video, or another type.
    """
    match text:
        case str():
            return None
        case [first, *rest]:
            if all(isinstance(one, str) for one in (first, *rest)):
                return None
            batch = [(first, *rest)] if isinstance(first, Mapping) else (first, *rest)
            return [[_normalize_message(message) for message in _messages(conversation)] for conversation in batch]
    expected = "a text, a list of messages, or a list of these"
    raise TokenizerError("neither text nor messages", where="text", got=repr(text), expected=expected)


def _messages(conversation: object) -> Sequence[object]:
    match conversation:
        case [*messages]:
            return messages
    raise TokenizerError("not a conversation", where="text", got=repr(conversation), expected="a list of messages")


def _normalize_message(message: Any) -> dict[str, Any]:
    match message:
        case {"content": [*parts]}:
            return {**message, "content": [normalize_part(part) for part in parts]}
        case {}:
            return dict(message)
    raise TokenizerError("not a message", where="messages", got=type(message).__name__, expected="a dictionary")


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
                what, expected = f"more than one {kind} in a part", f"one of {', '.join(_MEDIA_KEYS[kind])}"
                raise ImageError(what, where="messages", got=sorted(part), expected=expected)
            rest = {name: value for name, value in part.items() if name not in _MEDIA_KEYS[kind]}
            return {**rest, kind: media[0]} if media else rest
        case {"type": other} if part.keys() & {"image", "video", "path", "url"}:
            what, got, expected = "neither an image nor a video", f"a part of type {other!r}", 'type "image" or "video"'
            remedy = did_you_mean(str(other), _MEDIA_KEYS)
            raise ImageError(what, where="messages", got=got, expected=expected, remedy=remedy)
    return part


def media_in(conversations: Sequence[Messages], kind: str) -> list[list[Any]]:
    """Returns the images, or videos, in the messages of each conversation.

    Args:
        conversations: the conversations, as `conversations_in` returns them.
        kind: "image" or "video".
    """

    def media(conversation: Messages) -> Iterator[Any]:
        for message in conversation:
            for part in message["content"] if is_list(message.get("content")) else ():
                match part:
                    case {"type": str(found)} if found == kind and kind in part:
                        yield part[kind]

    return [list(media(conversation)) for conversation in conversations]


def group_images(images: object, counts: list[int], token: str) -> list[list[ImageInput]]:
    """Groups images by text.

    Args:
        images: an image, a list of images, or a list of lists, one for each text.
        counts: the number of placeholders in each text.
        token: the placeholder, for error messages.

    Raises:
        ImageError: the number of images differs from the number of placeholders.
    """
    listed: list[Any] = list(images) if is_list(images) else [] if images is None else [images]
    if listed and all(map(is_list, listed)):
        if len(listed) != len(counts):
            what = "the number of lists differs from the number of texts"
            raise ImageError(what, where="images", got=len(listed), expected=len(counts))
        for i, (group, count) in enumerate(zip(listed, counts, strict=True)):
            check_count(len(group), count, f"images[{i}]", token)
        return [list(group) for group in listed]
    check_count(len(listed), sum(counts), "images", token)
    rest = iter(listed)
    return [[next(rest) for _ in range(count)] for count in counts]


def check_count(got: int, expected: int, where: str, token: str) -> None:
    """Raises ImageError if the number of images or videos differs from the number of placeholders."""
    if got != expected:
        what = "the number given differs from the number of placeholders in the text"
        remedy = f"Pass one for each {token} in the text. A part of a message names its file as path."
        if got > expected:
            remedy = f"Mark each one by a {token} in the text, or by a part of a message."
        raise ImageError(what, where=where, got=got, expected=expected, remedy=remedy)


def list_videos(videos: object) -> list[VideoInput]:
    """Returns the videos as a list. One video is a 4-dimensional array or a list of frames."""
    listed: list[Any] = [] if videos is None else [videos]
    if is_list(videos) and all(is_list(video) or getattr(video, "ndim", None) == 4 for video in videos):
        listed = list(videos)
    return listed


def list_fps(fps: float | Sequence[float], number: int) -> list[float]:
    """Returns the frames per second of each of `number` videos.

    Raises:
        ImageError: a value is not a positive finite number, or there are not `number` of them.
    """
    values = list(fps) if isinstance(fps, Sequence) else [fps] * number
    if len(values) != number or not all(map(POSITIVE.accepts, values)):
        expected = f"a positive number, or a list of {number}"
        raise ImageError("invalid frames per second", where="fps", got=fps, expected=expected)
    return values
