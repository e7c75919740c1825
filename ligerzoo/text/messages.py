"""The messages of a conversation, in the form that chat templates read."""

import contextlib
import difflib
import json
import reprlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ligerzoo.checks import is_list, is_text
from ligerzoo.entries import LIST, OBJECT, Reader, is_object
from ligerzoo.errors import ImageError, LigerzooError, TokenizerError, did_you_mean, quote

Messages = list[dict[str, Any]]
T = TypeVar("T")

_MEDIA_KEYS = {"image": ("image", "path", "url"), "video": ("video", "path", "url")}

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""The names of a message's reasoning. Most templates read the first one, that of gpt-oss the second."""

MESSAGE_FIELDS = ("role", "content", "tool_calls", "tool_call_id", "name", *REASONING_FIELDS)

_read = Reader(LigerzooError).read
_ARGUMENTS = OBJECT._replace(expected="a JSON object")


def checked_objects(values: object, where: str) -> Messages:
    """Returns a list of dictionaries.

    Raises:
        TokenizerError: it is something else.
    """
    if is_list(values) and all(map(is_object, values)):
        return [dict(value) for value in values]
    raise TokenizerError("not a list of dictionaries", where=where, got=reprlib.repr(values))


def check_message_names(message: Mapping[str, object], where: str) -> None:
    """Checks the role of a message and the names of its fields, which are not None.

    Fields that templates read, such as `documents`, are allowed, unless their name resembles that of a missing field.

    Raises:
        LigerzooError: the role is missing or unknown, or a field seems to be misspelled.
    """
    refuse_misspelled(message, MESSAGE_FIELDS, where)
    role = message.get("role")
    if role not in ROLES:
        remedy = did_you_mean(role, ROLES)
        got = "no role" if role is None else quote(role)
        raise LigerzooError("unknown role", where=where, got=got, expected=", ".join(ROLES), remedy=remedy)


def refuse_misspelled(fields: Mapping[str, object], accepted: Sequence[str], where: str | None = None) -> None:
    """Raises LigerzooError for a field whose name resembles that of an accepted one, which is missing."""
    absent = [name for name in accepted if name not in fields]
    for name in fields:
        if name not in accepted and (near := difflib.get_close_matches(name.lower(), absent, n=1, cutoff=0.8)):
            raise LigerzooError(f"unknown field {quote(name)}", where=where, remedy=f"Did you mean {near[0]!r}?")


def normalized_messages(messages: object) -> Messages:
    """Returns messages without entries whose value is None, and with their reasoning under all of its names.

    Raises:
        TokenizerError: they are not a list of dictionaries.
    """
    return [
        _with_reasoning({name: value for name, value in message.items() if value is not None})
        for message in checked_objects(messages, "messages")
    ]


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    name = next((name for name in REASONING_FIELDS if name in message), None)
    if name is None:
        return message
    return {"thinking": message[name], **message, "reasoning_content": message[name]}


class OpenMessage:
    """The last message of a conversation, which the model continues: a tag at its end shows where the prompt ends.

    Args:
        messages: normalized messages.
        field: the field of the last message that is continued, or True for "content".
        source: source of the chat template.

    Attributes:
        messages: the messages, with the tag.

    Raises:
        TokenizerError: the message has no such text, or the template does not read the field.
    """

    def __init__(self, messages: Messages, field: str | bool, source: str) -> None:
        name = field if is_text(field) else "content"
        self._where = f"continue_final_message={field!r}"
        self._tag = f"CONTINUE{secrets.token_hex(8)} "  # unpredictable: no message can contain it
        last = messages[-1]
        names = [name]
        if name in REASONING_FIELDS:
            names = [other for other in REASONING_FIELDS if other in last and last[other] == last.get(name)]
        if last.get(name) is None:
            what = f"the last message has no {name!r} to continue"
            raise TokenizerError(what, where=self._where, got=f"fields {list(last)}")
        if not any(other in source for other in names):
            raise TokenizerError(f"the chat template does not read {name!r}", where=self._where)
        self._text, tagged = self._tagged(last[name])
        self.messages = [*messages[:-1], {**last, **dict.fromkeys(names, tagged)}]

    def _tagged(self, content: Any) -> tuple[str, Any]:
        """Returns the text to continue, and the content with the tag after it."""
        if is_text(content):
            return content, content + self._tag
        for index in reversed(range(len(content)) if is_list(content) else ()):
            match content[index]:
                case {"text": str(text)}:
                    part = {**content[index], "text": text + self._tag}
                    return text, [*content[:index], part, *content[index + 1 :]]
        raise TokenizerError("the last message has no text to continue", where=self._where, got=reprlib.repr(content))

    def cut(self, rendered: str) -> str:
        """Returns a rendered conversation up to the end of the message.

        Raises:
            TokenizerError: the template does not render the whole message.
        """
        end = rendered.rfind(self._tag.strip())
        if end < 0 or self._text.strip() not in rendered:
            raise TokenizerError("the chat template changes the last message", where=self._where)
        keeps_spaces = rendered.startswith(self._tag, end)
        return rendered[:end] if keeps_spaces else rendered[:end].rstrip()


def with_parsed_arguments(message: Mapping[str, object], where: str) -> dict[str, Any]:
    """Returns a message whose tool calls have their arguments as objects, which templates read.

    OpenAI's format has the arguments as JSON text. No arguments are an empty object.

    Args:
        message: the message.
        where: its name for errors.

    Raises:
        LigerzooError: the tool calls are not a list of objects, or the arguments are not a JSON object.
    """
    calls = message.get("tool_calls")
    if calls is None:
        return dict(message)
    where = f"{where}.tool_calls"
    listed = _read(LIST, calls, where)
    return {**message, "tool_calls": [_parsed_call(call, f"{where}[{i}]") for i, call in enumerate(listed)]}


def _parsed_call(value: object, where: str) -> dict[str, object]:
    call = _read(OBJECT, value, where)
    if OBJECT.accepts(function := call.get("function")):
        return {**call, "function": _parsed_call(function, f"{where}.function")}
    if "arguments" not in call and "name" not in call:
        return dict(call)
    arguments, where = call.get("arguments"), f"{where}.arguments"
    if is_text(arguments) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            what, got = f"not valid JSON: {error}", quote(arguments)
            raise LigerzooError(what, where=where, got=got, expected="a JSON object") from error
    return {**call, "arguments": _read(_ARGUMENTS, arguments or {}, where)}


def trying_text_arguments(render: Callable[[Messages], T], messages: Messages) -> T:
    """Renders messages; if the template fails, with the arguments of tool calls as JSON text.

    Most templates read objects. A few, such as that of DeepSeek-V3, concatenate the arguments with other text.

    Raises:
        TokenizerError: of the first attempt.
    """
    try:
        return render(messages)
    except TokenizerError:
        as_text = [_with_text_arguments(message) for message in messages]
        if as_text != messages:
            with contextlib.suppress(TokenizerError):
                return render(as_text)
        raise


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        texts = {name: json.dumps(item, ensure_ascii=False) for name, item in call.items() if name == "arguments"}
        return {**call, **texts, **({"function": as_text(call["function"])} if "function" in call else {})}

    if "tool_calls" not in message:
        return message
    return {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]}


def normalize_media(message: Any) -> dict[str, Any]:
    """Returns a message with each image and video under the key "image" or "video".

    Raises:
        TokenizerError: the message is not a dictionary.
        ImageError: see `normalize_part`.
    """
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
