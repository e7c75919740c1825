"""The images and videos of a call of a processor, from its arguments and from its messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

from ligerzoo.checks import POSITIVE, is_list, is_text
from ligerzoo.entries import is_object
from ligerzoo.errors import ImageError, TokenizerError
from ligerzoo.text.messages import Messages, normalize_media
from ligerzoo.vision.io import ImageInput, VideoInput


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
            if all(map(is_text, (first, *rest))):
                return None
            batch = [(first, *rest)] if is_object(first) else (first, *rest)
            return [[normalize_media(message) for message in _messages(conversation)] for conversation in batch]
    expected = "a text, a list of messages, or a list of these"
    raise TokenizerError("neither text nor messages", where="text", got=repr(text), expected=expected)


def _messages(conversation: object) -> Sequence[object]:
    match conversation:
        case [*messages]:
            return messages
    raise TokenizerError("not a conversation", where="text", got=repr(conversation), expected="a list of messages")


class MediaInputs(NamedTuple):
    """The images and videos of a call.

    Attributes:
        images: an image, a list of images, or a list of lists, one for each text.
        videos: the videos of all texts.
        fps: frames per second of all videos, or of each.
    """

    images: object
    videos: list[VideoInput]
    fps: float | Sequence[float]

    @classmethod
    def collect(
        cls, conversations: Sequence[Messages], images: object, videos: object, fps: float | Sequence[float]
    ) -> Self:
        """Returns the images and videos of messages or, where these have none, those that are given.

        Raises:
            ImageError: both have some.
        """
        clips = _list_videos(videos)
        if any(groups := _media_in(conversations, "image")):
            _refuse_duplicates(images is not None, "images")
            images = groups
        if any(groups := _media_in(conversations, "video")):
            _refuse_duplicates(bool(clips), "videos")
            clips = [clip for group in groups for clip in group]
        return cls(images, clips, fps)

    def grouped_images(self, counts: list[int], token: str) -> list[list[ImageInput]]:
        """Returns the images of each text.

        Args:
            counts: the number of placeholders in each text.
            token: the placeholder, for error messages.

        Raises:
            ImageError: the number of images differs from the number of placeholders.
        """
        images = self.images
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

    def fps_of_each(self) -> list[float]:
        """Returns the frames per second of each video.

        Raises:
            ImageError: a value is not a positive finite number, or there are not as many as videos.
        """
        number = len(self.videos)
        values = list(self.fps) if isinstance(self.fps, Sequence) else [self.fps] * number
        if len(values) != number or not all(map(POSITIVE.accepts, values)):
            expected = f"a positive number, or a list of {number}"
            raise ImageError("invalid frames per second", where="fps", got=self.fps, expected=expected)
        return values


def _refuse_duplicates(is_duplicate: bool, where: str) -> None:
    if is_duplicate:
        raise ImageError("given both in the messages and as an argument", where=where, remedy="Give them once.")


def _media_in(conversations: Sequence[Messages], kind: str) -> list[list[Any]]:
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


def check_count(got: int, expected: int, where: str, token: str) -> None:
    """Raises ImageError if the number of images or videos differs from the number of placeholders."""
    if got != expected:
        what = "the number given differs from the number of placeholders in the text"
        remedy = f"Pass one for each {token} in the text. A part of a message names its file as path."
        if got > expected:
            remedy = f"Mark each one by a {token} in the text, or by a part of a message."
        raise ImageError(what, where=where, got=got, expected=expected, remedy=remedy)


def _list_videos(videos: object) -> list[VideoInput]:
    """Returns the videos as a list. One video is a 4-dimensional array or a list of frames."""
    listed: list[Any] = [] if videos is None else [videos]
    if is_list(videos) and all(is_list(video) or getattr(video, "ndim", None) == 4 for video in videos):
        listed = list(videos)
    return listed
