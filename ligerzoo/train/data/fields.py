"""The fields of a record of each kind: parsing, checks, and the markers of messages that are not trained.

Errors name the field; `ligerzoo.train.data.samples.naming` adds file and line.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from ligerzoo.checks import is_text
from ligerzoo.entries import BOOLEAN, LIST, NUMBER, OBJECT, STRING, Entries, Reader, is_array, is_object, list_of
from ligerzoo.errors import DataError, did_you_mean, first_names, quote
from ligerzoo.files.untrusted import RepeatedKeyError, unique_entries
from ligerzoo.text.messages import (
    MESSAGE_FIELDS,
    Messages,
    check_message_names,
    normalize_part,
    refuse_misspelled,
    with_parsed_arguments,
)
from ligerzoo.train.data.records import Fields
from ligerzoo.train.data.samples import naming

Kind = Literal["text", "completion", "chat", "preference", "labelled", "prompt", "pair"]
"""What a record is; see `FIELDS`."""

KINDS: tuple[Kind, ...] = get_args(Kind)

_CHAT_FIELDS = ("tools", "chat_template_kwargs", "images")


class _Names(NamedTuple):
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


FIELDS: dict[Kind, _Names] = {
    "preference": _Names(("chosen", "rejected"), ("prompt", "margin", *_CHAT_FIELDS)),
    "labelled": _Names(("prompt", "completion", "label"), _CHAT_FIELDS),
    "chat": _Names(("messages",), _CHAT_FIELDS),
    "completion": _Names(("prompt", "completion"), _CHAT_FIELDS),
    "text": _Names(("text",)),
    "prompt": _Names(("prompt",), _CHAT_FIELDS),
    "pair": _Names(("query", "positive"), ("negative", "negatives")),
}
"""The required and optional fields of each kind. A record is of the first kind whose required fields it has.

Pairs may have negatives with numbers too, such as "negative_1"."""

_OTHER_NAMES = {"anchor": "query"}
"""Names of sentence-transformers, and ours."""

_NEGATIVE = re.compile(r"negative_(\d+)")


_MESSAGES = LIST._replace(expected="a list of messages")
_MESSAGE = OBJECT._replace(expected='{"role": ..., "content": ...}')
_TOOLS = list_of(OBJECT, "a list of objects")


# Records


def parse_text(data: bytes) -> Fields | None:
    """Returns the text of a line, or of lines, as a record of kind "text"; None for blank text.

    Raises:
        DataError: the bytes are not UTF-8, or contain a NUL.
    """
    text = decoded(data).removesuffix("\r")
    return {"text": text} if text.strip() else None


def parse_fields(data: bytes) -> Fields | None:
    """Parses a line of a JSON Lines file, or an item of a JSON array; None if it is blank.

    Raises:
        DataError: it is not UTF-8, not JSON or not an object, repeats a key, or has invalid characters.
    """
    if not data.strip():
        return None
    text = decoded(data)
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        near = quote(text[max(0, error.pos - 20) : error.pos + 20])
        raise DataError(f"broken JSON: {error.msg}", got=f"{near} at column {error.colno}") from error
    except RepeatedKeyError as error:
        raise DataError(f"the key {quote(error.key)} occurs twice in one object") from error
    except (RecursionError, ValueError) as error:
        raise DataError(f"broken JSON: {error}") from error
    if "\\u" in text:  # only escapes can produce these characters
        _check_characters(value)
    if is_object(value):
        return value
    raise DataError("not a JSON object", got=quote(text), expected='such as {"text": "..."}')


def decoded(data: bytes) -> str:
    """Returns UTF-8 as text. Raises DataError if it is not, or contains a NUL."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        got = f"byte 0x{data[error.start]:02X} at byte {error.start + 1} of the line"
        raise DataError("invalid UTF-8", got=got, remedy="Convert the file to UTF-8.") from error
    if "\0" in text:
        raise DataError("contains a NUL byte", remedy="The file may be damaged, or be UTF-16.")
    return text


_DECODER = json.JSONDecoder(object_pairs_hook=unique_entries)
_SURROGATE = re.compile("[\ud800-\udfff]")


def _check_characters(value: object) -> None:
    """Refuses texts with half of a surrogate pair or a NUL. Not recursive: values may be deeply nested."""
    pending = [value]
    while pending:
        match pending.pop():
            case str() as text:
                if found := _SURROGATE.search(text):
                    raise DataError(
                        "half of a surrogate pair", got=f"{found[0]!r} in {quote(text[: found.end()][-20:])}"
                    )
                if "\0" in text:
                    raise DataError("contains a NUL character", got=quote(text))
            case dict() as entries:
                pending += [*entries, *entries.values()]
            case list() as items:
                pending += items


def record_kind(record: Fields, chosen: Collection[str] = ()) -> Kind:
    """Returns the kind of a record.

    Args:
        chosen: the fields that --map names, see `refuse_two_kinds`.

    Raises:
        DataError: the record has the required fields of no kind, or would have those of another kind than "prompt"
            if a field were not null; or it is both a conversation and a completion.
    """
    present = _present(record)
    kinds = [kind for kind, names in FIELDS.items() if present.keys() >= set(names.required)]
    if kinds[:1] == ["chat"] and "completion" in kinds:
        refuse_two_kinds(present, chosen)
        return "chat" if "messages" in chosen else "completion"
    found = kinds[0] if kinds else None
    required = [name for names in FIELDS.values() for name in names.required]
    null = [name for name, value in record.items() if value is None and name in required]
    if null and found in (None, "prompt"):  # a column that another kind fills, or a missing completion
        raise null_field(null[0], present)
    if found is not None:
        return found
    expected = "; or ".join(" and ".join(names.required) for names in FIELDS.values())
    got, remedy = f"fields {first_names([*present])}" if present else "no fields", _remedy(present)
    raise DataError("not a record of a known kind", got=got, expected=expected, remedy=remedy)


def _remedy(present: Fields) -> str:
    """Returns what to do about a record of no known kind: which columns of it may be our fields."""
    lower = {name.lower(): name for name in present}
    required = dict.fromkeys(name for names in FIELDS.values() for name in names.required)
    texts = [name for name, value in present.items() if is_text(value)]
    for name, items in present.items():
        match items:
            case [{"role": _}, *_]:
                return f"Say that it is a conversation: --map messages={name}."
            case [{"from": _}, *_]:
                return f"Say that it is a conversation: --map conversations={name}."
            case [{}, *_]:
                return f"If {name!r} are the records, write this list to a file."
    for names in FIELDS.values():
        if all(name in lower for name in names.required):
            pairs = " ".join(f"{name}={lower[name]}" for name in names.required)
            return f"Say which columns they are: --map {pairs}."
    near = (did_you_mean(name, required) for name in present if name not in required)
    if (found := next(filter(None, near), None)) is not None:
        return found
    columns = f"prompt={texts[0]} completion={texts[1]}" if len(texts) == 2 else "prompt=question"
    return f"Say which columns they are, such as --map {columns}."


def refuse_two_kinds(record: Fields, chosen: Collection[str] = ()) -> None:
    """Raises DataError if a record is both a conversation and a completion.

    Args:
        chosen: the fields that --map names: none is raised if these are of one of the two.
    """
    kinds = FIELDS["chat"].required, FIELDS["completion"].required
    names = [name for fields in kinds for name in fields]
    is_chosen = [any(name in chosen for name in fields) for fields in kinds]
    if is_chosen[0] == is_chosen[1] and all(record.get(name) is not None for name in names):
        expected = "messages, or prompt and completion"
        remedy = "Remove a column, or choose: --map messages=messages, or --map prompt=prompt completion=completion."
        raise DataError("a record of two kinds", got=f"fields {first_names(names)}", expected=expected, remedy=remedy)


def check_record(record: Fields, kind: Kind) -> Fields:
    """Returns the fields of the record that are not None.

    Other fields, such as ids, are allowed unless their name resembles that of a field that the record lacks.

    Raises:
        DataError: a required field is missing, or an optional one seems to be misspelled.
    """
    names, present = FIELDS[kind], _present(record)
    numbered = filter(_NEGATIVE.fullmatch, present) if kind == "pair" else ()
    accepted = (*names.required, *names.optional, *numbered)
    refuse_misspelled(present, accepted)
    for name in names.required:
        if name not in present and name in record:
            raise null_field(name, present)
        if name not in present:
            raise missing_field(name, present, " and ".join(names.required))
    if present.get("images") and "images" not in accepted:
        what, expected = f"images are not supported in records of kind {kind!r}", "records with messages"
        raise DataError(what, expected=expected)
    return present


def unread_fields(record: Fields, kind: Kind) -> list[str]:
    """Returns the fields of a record of a kind that it does not read, such as ids."""
    names, present = FIELDS[kind], _present(record)
    if not present.keys() >= {*names.required}:  # which is an error when it is read
        return []
    read = {*names.required, *names.optional, *(filter(_NEGATIVE.fullmatch, present) if kind == "pair" else ())}
    return [name for name in present if name not in read]


def no_completion(unread: Sequence[str], methods: str) -> DataError:
    """Returns the error of records that have a prompt and other fields, but no completion.

    Args:
        unread: the other fields, at least one.
        methods: the methods that train prompts alone.
    """
    required = dict.fromkeys(name for names in FIELDS.values() for name in names.required)
    column = unread[0] if len(unread) == 1 else "COLUMN"
    remedy = f"Say which column it is: --map completion={column}; or train prompts alone with --method {methods}."
    for name in unread:
        for near in difflib.get_close_matches(name.lower(), required, n=1, cutoff=0.8):
            remedy = f"Did you mean {near!r} by {name!r}?"
    what, expected = "the field 'completion' is missing", "text, prompt and completion, or messages"
    return DataError(what, got=f"prompt, and not read: {first_names(unread)}", expected=expected, remedy=remedy)


def _present(record: Fields) -> Fields:
    """Returns the fields that are not None, by our names."""
    given = {name: value for name, value in record.items() if value is not None}
    ours = {theirs: name for theirs, name in _OTHER_NAMES.items() if name not in given}
    return {ours.get(name, name): value for name, value in given.items()}


def null_field(name: str, present: Fields) -> DataError:
    """Returns the error of a required field that is null."""
    got = f"values of {first_names([*present])}" if present else None
    remedy = "Fill it in, or leave out the record."
    return DataError(f"the field {name!r} is null", got=got, expected="a value", remedy=remedy)


def missing_field(name: str, present: Fields, expected: str | None = None, *, remedy: str | None = None) -> DataError:
    """Returns the error of a required field that is missing, with a remedy unless a similar field is present."""
    for near in difflib.get_close_matches(name, present, n=1):
        remedy = f"Did you mean {name!r} by {near!r}?"
    what, got = f"the field {name!r} is missing", f"fields {first_names([*present])}"
    return DataError(what, got=got, expected=expected, remedy=remedy)


# Fields


def text_field(record: Fields, name: str, *, may_be_blank: bool = False) -> str:
    """Returns a field that is a string.

    Raises:
        DataError: it is something else, or empty or only spaces.
    """
    value = _read(STRING, record[name], name)
    if not may_be_blank and not value.strip():
        raise DataError(f"{name} is empty", got=quote(value))
    return value


def flag_field(record: Fields, name: str) -> bool:
    """Returns a field that is true or false.

    Raises:
        DataError: it is something else.
    """
    return _read(BOOLEAN, record[name], name)


def number_field(record: Fields, name: str, default: float) -> float:
    """Returns a field that is a finite number, or the default without it.

    Raises:
        DataError: it is something else.
    """
    number = _read(NUMBER, record.get(name, default), name)
    if not math.isfinite(number):
        raise DataError(f"the field {name!r} is not finite", got=number, expected="a number")
    return number


class PairTexts(NamedTuple):
    """The texts of a pair."""

    query: str
    positive: str
    negatives: list[str]


def pair_texts(record: Fields) -> PairTexts:
    """Returns the texts of a record of kind "pair", with its negatives in the order of their numbers.

    Raises:
        DataError: a text is something else, or empty.
    """
    numbered = {name: int(found[1]) for name in record if (found := _NEGATIVE.fullmatch(name))}
    names = [*filter(record.__contains__, ("negative", "negatives")), *sorted(numbered, key=numbered.__getitem__)]
    negatives: list[str] = []
    for name in names:
        texts = record[name] if is_array(record[name]) else [record[name]]
        negatives += [text_field({name: text}, name) for text in texts]
    return PairTexts(text_field(record, "query"), text_field(record, "positive"), negatives)


def messages_field(record: Fields, name: str) -> Messages:
    """Returns a field that is a list of messages, with only the fields that are not None.

    Parts with an image become `{"type": "image", "image": ...}`, or `{"type": "image"}` if the image is elsewhere.
    Arguments of tool calls become objects. A message that is not to be trained has `"train": False`, see `with_marker`.

    Raises:
        DataError: the list is empty, or a message is malformed.
    """
    value = record[name]
    if value == []:
        raise DataError(f"{name} is an empty list", expected="a list of messages")
    messages = _read(_MESSAGES, value, name)
    return [_checked_message(message, f"{name}[{index}]") for index, message in enumerate(messages)]


def _checked_message(value: object, where: str) -> dict[str, Any]:
    message = _read(_MESSAGE, value, where)
    present = {str(name): entry for name, entry in message.items() if entry is not None}
    refuse_misspelled(present, MESSAGE_FIELDS, where)
    if "role" not in present or not present.keys() & {"content", "tool_calls"}:
        fields = [f"{name} (null)" if value is None else str(name) for name, value in message.items()]
        got, expected = f"fields {first_names(fields)}", "role, and content or tool_calls"
        raise DataError(f"{where} lacks a field", got=got, expected=expected)
    check_message_names(present, where)
    role, content = present["role"], present.get("content", "")
    match content:
        case str():
            texts = [content]
        case list():
            present["content"] = parts = [_checked_part(part, where) for part in content]
            texts = [part["text"] for part in parts if part["type"] == "text"]
        case _:
            raise _wrong_content(content, where)
    if role == "assistant" and not present.get("tool_calls") and not any(text.strip() for text in texts):
        raise DataError("the assistant's content is empty", where=where, got=quote(content))
    return with_marker(with_parsed_arguments(present, where), where)


def _checked_part(part: object, where: str) -> dict[str, Any]:
    """Returns a part of a message, a text or an image."""
    if not is_object(part):
        raise _wrong_content(part, where)
    with naming(where):
        normalized: dict[str, Any] = normalize_part({name: value for name, value in part.items() if value is not None})
    match normalized:
        case {"type": "text", "text": str()}:
            return normalized
        case {"type": "image", "image": image}:
            return {"type": "image", "image": image}
        case {"type": "image"}:
            return {"type": "image"}
        case {"type": str(kind)} if kind != "text":
            raise DataError(f"content of type {quote(kind)} is not supported", where=where)
    raise _wrong_content(part, where)


def _wrong_content(content: object, where: str) -> DataError:
    expected = 'a string, or a list of {"type": "text", "text": ...} and {"type": "image", "image": ...}'
    return DataError("content has a wrong type", where=where, got=_described(content), expected=expected)


class TemplateFields(NamedTuple):
    """The tools and variables that a record gives the chat template.

    Attributes:
        tools: see `Tokenizer.apply_chat_template`.
        variables: further variables of the template.
    """

    tools: list[Entries] | None
    variables: Mapping[str, Any]


_RESERVED_VARIABLES = {
    *("messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "padding_side", "return_tensors"),
}
"""What `chat_template_kwargs` may not set: arguments of `Tokenizer.apply_chat_template`."""


def template_fields(record: Fields) -> TemplateFields:
    """Returns the tools (None for none) and further variables of the chat template.

    Raises:
        DataError: `tools` is not a list of objects (or its JSON text), or `chat_template_kwargs` is not an object or
            sets what training sets.
    """
    tools, variables = record.get("tools"), record.get("chat_template_kwargs", {})
    if is_text(tools):  # datasets whose tools have different schemas store JSON
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(f"broken JSON: {error}", where="tools") from error
    listed = None if tools is None else _read(_TOOLS, tools, "tools")
    variables = _read(OBJECT, variables, "chat_template_kwargs")
    if reserved := sorted(_RESERVED_VARIABLES.intersection(variables)):
        what = f"{reserved[0]!r} is not a variable of the record"
        remedy = "Only variables that the chat template itself defines may be set, such as enable_thinking."
        raise DataError(what, where="chat_template_kwargs", remedy=remedy)
    return TemplateFields(listed or None, dict(variables))


def _described(value: object) -> str:
    names = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return f"{names.get(type(value), type(value).__name__)}, {quote(value)}"


_read = Reader(DataError, _described).read


# Markers


TRAINED = "train"
"""The field of a checked message that is not trained: False. Other messages lack it."""

_MARKERS = {
    **dict.fromkeys(("train", "training", "trainable", "trained", "loss", "loss_mask", "weight"), True),
    "masked": False,
}
"""The markers, and which value means that the message is trained. `loss_mask` multiplies the loss."""

_WORDS = {"train", "training", "trained", "trainable", "loss", "mask", "masks", "masked", "weight", "weights"}
"""Words of field names that seem to be about training."""


def with_marker(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a message with one marker, `TRAINED`, if it has any that is false.

    Args:
        message: the message, with a role.
        where: its name for errors.

    Raises:
        DataError: a marker has another value than true, false, 1 or 0; markers contradict each other; a message that
            is never trained is marked as trained; or a field seems to be a marker but is unknown.
    """
    given = {name: _is_trained(message[name], name, where) for name in _MARKERS if name in message}
    others = {name: value for name, value in message.items() if name not in _MARKERS}
    if suspect := next(filter(_resembles_marker, others), None):
        what = f"unknown field {quote(suspect)}, which seems to say what is trained"
        expected = f"{', '.join(_MARKERS)}, each true or false"
        raise DataError(what, where=where, expected=expected, remedy="Remove or rename the field.")
    if len({*given.values()}) > 1:
        raise DataError("fields contradict each other", where=where, got=", ".join(given))
    is_trained = all(given.values())
    if given and is_trained and message["role"] != "assistant":
        got = f"role {quote(message['role'])} with {', '.join(given)}"
        raise DataError("only messages of the assistant are trained", where=where, got=got, remedy="Remove the field.")
    return others if is_trained else {**others, TRAINED: False}


def _is_trained(value: object, name: str, where: str) -> bool:
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value) == _MARKERS[name]
    what, expected = f"{name} has an unsupported value", "true, false, 1 or 0"
    raise DataError(what, where=where, got=quote(value), expected=expected)


def _resembles_marker(name: str) -> bool:
    words = re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", name).lower())
    near = (marker for marker in difflib.get_close_matches(name.lower(), _MARKERS, cutoff=0.8))
    return not _WORDS.isdisjoint(words) or any(marker[0] == name[:1].lower() for marker in near)
