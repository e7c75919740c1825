"""The fields of a record of each kind, their checks, and the markers of messages that are not trained."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from ligerzoo.errors import DataError, ImageError, LigerzooError, did_you_mean, first_names, quote
from ligerzoo.text.messages import with_parsed_arguments
from ligerzoo.train.data.samples import Source
from ligerzoo.vision.messages import normalize_part

Kind = Literal["text", "completion", "chat", "preference", "labelled", "prompt"]
"""What a record is; see `FIELDS`."""

KINDS: tuple[Kind, ...] = get_args(Kind)

Fields = Mapping[str, Any]
Messages = list[dict[str, Any]]

_TEMPLATE_FIELDS = ("tools", "chat_template_kwargs")

_RESERVED_VARIABLES = {
    "messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "padding_side", "return_tensors",
}  # fmt: skip
"""What `chat_template_kwargs` may not set: arguments of `Tokenizer.apply_chat_template`."""


class _Names(NamedTuple):
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


FIELDS: dict[Kind, _Names] = {
    "preference": _Names(("chosen", "rejected"), ("prompt", *_TEMPLATE_FIELDS)),
    "labelled": _Names(("prompt", "completion", "label"), _TEMPLATE_FIELDS),
    "chat": _Names(("messages",), (*_TEMPLATE_FIELDS, "images")),
    "completion": _Names(("prompt", "completion"), (*_TEMPLATE_FIELDS, "images")),
    "text": _Names(("text",)),
    "prompt": _Names(("prompt",), _TEMPLATE_FIELDS),
}
"""The required and optional fields of each kind. A record is of the first kind whose required fields it has."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_MESSAGE_FIELDS = (
    "role",
    "content",
    "tool_calls",
    "tool_call_id",
    "name",
    "reasoning_content",
    "reasoning",
    "thinking",
)


def record_kind(record: Fields, source: Source) -> Kind:
    """Returns the kind of a record.

    Raises:
        DataError: the record has the required fields of no kind, or would have those of another kind than "prompt"
            if a field were not null.
    """
    present = [name for name, value in record.items() if value is not None]
    found = next((kind for kind, names in FIELDS.items() if {*present}.issuperset(names.required)), None)
    required = {name for names in FIELDS.values() for name in names.required}
    null = [name for name, value in record.items() if value is None and name in required]
    if null and found in (None, "prompt"):  # a column that another kind fills, or a missing completion
        raise _null(null[0], present, source)
    if found is not None:
        return found
    if "conversations" in present:
        remedy: str | None = (
            'Write {"messages": [{"role": "user", "content": ...}, ...]}: "from" becomes "role", with "human" as '
            '"user" and "gpt" as "assistant"; "value" becomes "content".'
        )
    else:
        accepted = [name for names in FIELDS.values() for name in names.required]
        remedies = (did_you_mean(name, accepted) for name in record if name not in accepted)
        remedy = next((remedy for remedy in remedies if remedy), None)
    raise DataError(
        "not a record of a known kind", where=source, got=f"fields {first_names(present)}",
        expected="; or ".join(" and ".join(names.required) for names in FIELDS.values()), remedy=remedy,
    )  # fmt: skip


def check_record(record: Fields, kind: Kind, source: Source) -> dict[str, Any]:
    """Returns the fields of the record that are not None.

    Other fields, such as ids, are allowed unless their name resembles that of a field that the record lacks.

    Raises:
        DataError: a required field is missing, or an optional one seems to be misspelled.
    """
    names, null = FIELDS[kind], {name for name, value in record.items() if value is None}
    record = {name: value for name, value in record.items() if name not in null}
    accepted = (*names.required, *names.optional)
    _refuse_misspelled(record, accepted, source)
    for name in names.required:
        if name in null:
            raise _null(name, list(record), source)
        if name not in record:
            raise DataError(
                f"the field {name!r} is missing", where=source, got=f"fields {first_names(list(record))}",
                expected=" and ".join(names.required), remedy=did_you_mean(name, record),
            )  # fmt: skip
    if record.get("images") and "images" not in accepted:
        raise refused_images(kind, source)
    return record


def _null(name: str, present: Sequence[str], source: Source) -> DataError:
    """Returns the error of a required field that is null."""
    return DataError(
        f"the field {name!r} is null", where=source, got=f"values of {first_names(present)}" if present else None,
        expected="a value", remedy="Fill it in, or leave out the record.",
    )  # fmt: skip


def refused_images(kind: Kind, source: Source) -> DataError:
    """Returns the error of a record with images whose kind cannot have any."""
    return DataError(
        f"images are not supported in records of kind {kind!r}", where=source,
        expected="kind 'chat', or 'completion' with messages",
        remedy="Images are trained with --method sft; the methods dpo, kto, orpo, simpo, cpo and grpo train text only.",
    )  # fmt: skip


def _refuse_misspelled(record: Fields, accepted: Sequence[str], source: Source) -> None:
    absent = [name for name in accepted if name not in record]
    for name in record:
        if name not in accepted and (near := difflib.get_close_matches(name.lower(), absent, n=1, cutoff=0.8)):
            raise DataError(f"unknown field {quote(name)}", where=source, remedy=f"Did you mean {near[0]!r}?")


def text_field(record: Fields, name: str, source: Source, *, may_be_blank: bool = False) -> str:
    """Returns a field that is a string.

    Raises:
        DataError: it is something else, or empty or only spaces.
    """
    value = record[name]
    if not isinstance(value, str):
        raise DataError(f"{name}: wrong type", where=source, got=_described(value), expected="a string")
    if not may_be_blank and not value.strip():
        raise DataError(f"{name} is empty", where=source, got=quote(value))
    return value


def flag_field(record: Fields, name: str, source: Source) -> bool:
    """Returns a field that is true or false.

    Raises:
        DataError: it is something else.
    """
    if not isinstance(value := record[name], bool):
        raise DataError(f"{name}: wrong type", where=source, got=_described(value), expected="true or false")
    return value


def messages_field(record: Fields, name: str, source: Source) -> Messages:
    """Returns a field that is a list of messages, with only the fields that are not None.

    Parts with an image become `{"type": "image", "image": ...}`, or `{"type": "image"}` if the image is elsewhere.
    Arguments of tool calls become objects. A message that is not to be trained has `"train": False`, see `with_marker`.

    Raises:
        DataError: the list is empty, or a message is malformed.
    """
    value = record[name]
    if value == []:
        raise DataError(f"{name} is an empty list", where=source, expected="a list of messages")
    if not isinstance(value, list):
        raise DataError(f"{name}: wrong type", where=source, got=_described(value), expected="a list of messages")
    return [_checked_message(message, f"{name}[{index}]", source) for index, message in enumerate(value)]


def is_messages(value: object) -> bool:
    """Returns whether a field holds messages instead of text."""
    return isinstance(value, list)


def _checked_message(message: object, where: str, source: Source) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(
            f"{where}: wrong type", where=source, got=_described(message), expected='{"role": ..., "content": ...}'
        )
    present = {str(name): value for name, value in message.items() if value is not None}
    if "role" not in present or not present.keys() & {"content", "tool_calls"}:
        fields = [f"{name} (null)" if value is None else str(name) for name, value in message.items()]
        raise DataError(
            f"{where} lacks a field", where=source, got=f"fields {first_names(fields)}",
            expected="role, and content or tool_calls",
            remedy=did_you_mean("role" if "role" not in present else "content", present),
        )  # fmt: skip
    _refuse_misspelled(present, _MESSAGE_FIELDS, source)
    role, content = present["role"], present.get("content", "")
    if role not in ROLES:
        raise DataError(
            f"{where}: unknown role", where=source, got=quote(role), expected=", ".join(ROLES),
            remedy=did_you_mean(str(role), ROLES),
        )  # fmt: skip
    if isinstance(content, list):
        present["content"] = [_checked_part(part, where, source) for part in content]
    elif not isinstance(content, str):
        raise _wrong_content(content, where, source)
    parts = present.get("content", [])
    texts = [parts] if isinstance(parts, str) else [part["text"] for part in parts if part["type"] == "text"]
    if role == "assistant" and not present.get("tool_calls") and not any(text.strip() for text in texts):
        raise DataError(f"{where}: the assistant's content is empty", where=source, got=quote(content))
    try:
        present = with_parsed_arguments(present, where)
    except LigerzooError as error:
        raise DataError(str(error), where=source) from error
    return with_marker(present, where, source)


def _checked_part(part: object, where: str, source: Source) -> dict[str, Any]:
    """Returns a part of a message, a text or an image."""
    if not isinstance(part, Mapping):
        raise _wrong_content(part, where, source)
    try:
        normalized: dict[str, Any] = normalize_part({name: value for name, value in part.items() if value is not None})
    except ImageError as error:
        raise DataError(f"{where}: {error}", where=source) from error
    match normalized:
        case {"type": "text", "text": str()}:
            return normalized
        case {"type": "image", "image": image}:
            return {"type": "image", "image": image}
        case {"type": "image"}:
            return {"type": "image"}
        case {"type": str(kind)} if kind != "text":
            raise DataError(f"{where}: content of type {quote(kind)} is not supported", where=source)
    raise _wrong_content(part, where, source)


def _wrong_content(content: object, where: str, source: Source) -> DataError:
    expected = 'a string, or a list of {"type": "text", "text": ...} and {"type": "image", "image": ...}'
    return DataError(f"{where}: content has a wrong type", where=source, got=_described(content), expected=expected)


def template_fields(record: Fields, source: Source) -> tuple[list[dict[str, Any]] | None, dict[str, Any]]:
    """Returns the tools (None for none) and further variables of the chat template.

    Raises:
        DataError: `tools` is not a list of objects (or its JSON text), or `chat_template_kwargs` is not an object or
            sets what training sets.
    """
    tools, variables = record.get("tools"), record.get("chat_template_kwargs", {})
    if isinstance(tools, str):  # datasets whose tools have different schemas store JSON
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(f"tools: broken JSON: {error}", where=source) from error
    if not (tools is None or (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools))):
        raise DataError("tools: wrong type", where=source, got=_described(tools), expected="a list of objects")
    if not isinstance(variables, Mapping):
        raise DataError(
            "chat_template_kwargs: wrong type", where=source, got=_described(variables), expected="an object"
        )
    if reserved := sorted(set(variables) & _RESERVED_VARIABLES):
        raise DataError(
            f"chat_template_kwargs: {reserved[0]!r} is not a variable of the record", where=source,
            remedy="Only variables that the chat template itself defines may be set, such as enable_thinking.",
        )  # fmt: skip
    return tools or None, dict(variables)


def _described(value: object) -> str:
    names = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return f"{names.get(type(value), type(value).__name__)}, {quote(value)}"


TRAINED = "train"
"""The field of a checked message that is not trained: False. Other messages lack it."""

_MARKERS = {
    "train": True, "training": True, "trainable": True, "trained": True, "loss": True, "loss_mask": True,
    "weight": True, "masked": False,
}  # fmt: skip
"""The markers, and which value means that the message is trained. `loss_mask` multiplies the loss."""

_WORDS = {"train", "training", "trained", "trainable", "loss", "mask", "masks", "masked", "weight", "weights"}
"""Words of field names that seem to be about training."""


def with_marker(message: Mapping[str, Any], where: str, source: Source) -> dict[str, Any]:
    """Returns a message with one marker, `TRAINED`, if it has any that is false.

    Args:
        message: the message, with a role.
        where: its name for errors.
        source: the record.

    Raises:
        DataError: a marker has another value than true, false, 1 or 0; markers contradict each other; a message that
            is never trained is marked as trained; or a field seems to be a marker but is unknown.
    """
    given = {name: _is_trained(message[name], name, where, source) for name in _MARKERS if name in message}
    others = {name: value for name, value in message.items() if name not in _MARKERS}
    for name in others:
        if _resembles_marker(name):
            raise DataError(
                f"{where}: unknown field {quote(name)}, which seems to say what is trained", where=source,
                expected=f"{', '.join(_MARKERS)}, each true or false", remedy="Remove or rename the field.",
            )  # fmt: skip
    if len({*given.values()}) > 1:
        raise DataError(f"{where}: fields contradict each other", where=source, got=", ".join(given))
    is_trained = all(given.values())
    if given and is_trained and message["role"] != "assistant":
        raise DataError(
            f"{where}: only messages of the assistant are trained", where=source,
            got=f"role {quote(message['role'])} with {', '.join(given)}", remedy="Remove the field.",
        )  # fmt: skip
    return others if is_trained else {**others, TRAINED: False}


def _is_trained(value: Any, name: str, where: str, source: Source) -> bool:
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise DataError(
            f"{where}: {name} has an unsupported value", where=source, got=quote(value), expected="true, false, 1 or 0"
        )
    return bool(value) == _MARKERS[name]


def _resembles_marker(name: str) -> bool:
    words = re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", name).lower())
    near = (marker for marker in difflib.get_close_matches(name.lower(), _MARKERS, cutoff=0.8))
    return not _WORDS.isdisjoint(words) or any(marker[0] == name[:1].lower() for marker in near)
