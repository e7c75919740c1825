"""Records that other programs write, as ours: columns with other names, Alpaca fields, ShareGPT conversations."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ligerzoo.checks import is_text
from ligerzoo.entries import is_array, is_object
from ligerzoo.errors import DataError, did_you_mean, first_names, quote
from ligerzoo.train.data.fields import FIELDS, Kind, missing_field, null_field, text_field
from ligerzoo.train.data.records import Fields
from ligerzoo.train.data.samples import Source

_ALPACA = ("instruction", "input", "output", "system", "history")
_SHAREGPT = ("conversations", "system", "image")

FIELD_NAMES = dict.fromkeys(
    [
        *(name for names in FIELDS.values() for name in (*names.required, *names.optional)),
        *("anchor", *_ALPACA, *_SHAREGPT),
    ]
)
"""The names that columns can be given."""


# Columns


def parse_columns(texts: Sequence[str]) -> dict[str, str]:
    """Returns the columns of the data by our names, given texts such as "prompt=question".

    Raises:
        DataError: a text has another form, a field is unknown, or a field or a column is given twice.
    """
    columns: dict[str, str] = {}
    for text in texts:
        field, is_pair, column = text.partition("=")
        expected = "FIELD=COLUMN, such as prompt=question"
        if not (field and is_pair and column):
            raise DataError("not a field and its column", where="option map", got=repr(text), expected=expected)
        if field not in FIELD_NAMES:
            swapped = f"Write {column}={field}: our field first." if column in FIELD_NAMES else None
            remedy, expected = swapped or did_you_mean(field, FIELD_NAMES), ", ".join(FIELD_NAMES)
            raise DataError("unknown field", where="option map", got=repr(field), expected=expected, remedy=remedy)
        pairs = [f"{name}={other}" for name, other in columns.items() if field == name or column == other]
        if pairs:
            what = f"the {'field' if field in columns else 'column'} is given twice"
            got, expected = f"{pairs[0]} and {text}", "each field and each column once"
            raise DataError(what, where="option map", got=got, expected=expected)
        columns[field] = column
    return columns


def check_column_names(columns: Mapping[str, str], firsts: Sequence[tuple[Source, Fields]]) -> None:
    """Raises DataError for a column that no source has.

    Args:
        firsts: the first record of each source, and where it is.
    """
    names = list(dict.fromkeys(name for _, fields in firsts for name in fields))
    missing = [column for column in columns.values() if column not in names]
    if missing and firsts:
        raise _no_column(missing[0], names).replaced(where=firsts[0][0])


def _no_column(column: str, names: Sequence[str]) -> DataError:
    what, got = f"there is no column {column!r}, which --map names", f"columns {first_names(names)}"
    return DataError(what, got=got, remedy=did_you_mean(column, names))


def with_our_names(record: Fields, columns: Mapping[str, str]) -> Fields:
    """Returns a record with the columns by our names.

    Raises:
        DataError: the record lacks a column, but has a field with our name for it.
    """
    for field, column in columns.items():
        if field in record and column not in record:
            raise _no_column(column, [*record])
    columns = {field: column for field, column in columns.items() if column in record}
    taken = {*columns, *columns.values()}
    others = {name: value for name, value in record.items() if name not in taken}
    return {**others, **{field: record[column] for field, column in columns.items()}}


_LISTS = ("messages", "tools", "images", "negatives", "chat_template_kwargs", "conversations", "history")
_TEXTS = ("prompt", "completion", "chosen", "rejected")
_FLAGS = {"true": True, "1": True, "false": False, "0": False}
_MESSAGES = re.compile(r"""\[\s*\{\s*(["'])(role|content|from|value)\1\s*:""")


def typed_cells(record: Fields) -> Fields:
    """Returns the cells of a row of CSV with values of other types than text: labels, and JSON, such as messages.

    Raises:
        DataError: a cell is not JSON.
    """
    return {name: _typed(name, cell) for name, cell in record.items()}


def _typed(name: str, cell: object) -> object:
    if not is_text(cell):
        return cell
    if name == "label":
        return _FLAGS.get(cell.lower(), cell)
    if name == "margin":
        return _number(cell)
    if name in _LISTS or (name in _TEXTS and _MESSAGES.match(cell)):
        try:
            return json.loads(cell)
        except ValueError as error:
            remedy = "Write lists with json.dumps; this is Python's notation." if "'" in cell[:4] else None
            raise DataError(f"not JSON: {error}", where=name, got=quote(cell), remedy=remedy) from error
    return cell


def _number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


# Layouts


Message = dict[str, object]


class RecordLayout(NamedTuple):
    """Fields of another program.

    Attributes:
        name: what they are called.
        convert: returns a record with our fields, given its own, the kind that it should have, or "auto", and whether
            there is a chat template.
    """

    name: str
    convert: Callable[[Fields, str, bool], Fields]


def layout_of(record: Fields, kind: Kind | str) -> RecordLayout | None:
    """Returns the layout of data, given its first record; None for our own fields.

    Args:
        kind: what a record should be; "auto" for anything.
    """
    present = {name for name, value in record.items() if value is not None}
    if kind in ("text", "pair") or present & {"messages", "query", "anchor"}:
        return None
    if "conversations" in present:
        return SHAREGPT
    if "instruction" in present and "prompt" not in present:
        return ALPACA
    return None


def _from_alpaca(record: Fields, kind: str, has_template: bool) -> Fields:
    """Returns Alpaca fields as messages; or as texts, without a chat template."""
    system, history = _optional(record, "system"), record.get("history") or []
    question = [_text(record, "instruction"), *_optional(record, "input")]
    others = {name: value for name, value in record.items() if name not in _ALPACA or kind == "prompt"}
    messages = [_message("system", text) for text in system]
    for index, pair in enumerate(history):
        if not (is_array(pair) and len(pair) == 2):
            expected = "a list of an instruction and its answer"
            raise DataError("wrong type", where=f"history[{index}]", got=quote(pair), expected=expected)
        messages += map(_message, ("user", "assistant"), pair)
    messages.append(_message("user", "\n\n".join(question)))
    if history and not has_template:
        what, remedy = "earlier messages need a chat template", "Give one with --chat-template."
        raise DataError(what, where="history", remedy=remedy)
    prompt = messages if has_template else "".join(f"{text}\n\n" for text in (*system, *question))

    def answer(name: str) -> object:
        text = _text(record, name)
        return [_message("assistant", text)] if has_template else text

    if kind == "prompt":
        return {**others, "prompt": prompt}
    if "chosen" in record or kind == "preference":
        return {**others, "prompt": prompt, "chosen": answer("chosen"), "rejected": answer("rejected")}
    if "label" in record or not has_template:
        return {**others, "prompt": prompt, "completion": answer("output")}
    return {**others, "messages": [*messages, _message("assistant", _text(record, "output"))]}


def _message(role: str, content: object) -> Message:
    return {"role": role, "content": content}


def _text(record: Fields, name: str) -> str:
    if name in record and record[name] is None:
        raise null_field(name, record)
    if name not in record:
        raise missing_field(name, record, remedy=f"Say which column it is: --map {name}=COLUMN.")
    return text_field(record, name)


def _optional(record: Fields, name: str) -> list[str]:
    """Returns a text that is not blank, or nothing."""
    text = "" if record.get(name) is None else text_field(record, name, may_be_blank=True)
    return [text] if text.strip() else []


_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bard", "bing"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response"), "tool"),
    "system": "system",
}
_IMAGE = "<image>"


def _from_sharegpt(record: Fields, kind: str, has_template: bool) -> Fields:
    """Returns the conversations of ShareGPT as messages."""
    images = record.get("images") or ([] if record.get("image") is None else [record["image"]])
    others = {name: value for name, value in record.items() if name not in (*_SHAREGPT, "images")}
    if images:
        others["images"] = images
    if others.get("tools") == "":
        del others["tools"]

    def messages(name: str) -> list[Message]:
        entries = record.get(name)
        if is_text(entries) and name != "conversations":
            return [_message("assistant", entries)]
        entries = [entries] if is_object(entries) else entries
        if not is_array(entries) or not entries:
            expected = 'a list of {"from": "human" or "gpt", "value": ...}'
            raise DataError("wrong type", where=name, got=quote(entries), expected=expected)
        return [_as_message(entry, f"{name}[{index}]", bool(images)) for index, entry in enumerate(entries)]

    found = [*(_message("system", text) for text in _optional(record, "system")), *messages("conversations")]
    answers = 0 if found[-1]["role"] != "assistant" else 1
    if kind == "prompt":
        return {**others, "prompt": found[: len(found) - answers], "conversations": record["conversations"]}
    if "chosen" in record or kind == "preference":
        return {**others, "prompt": found, "chosen": messages("chosen"), "rejected": messages("rejected")}
    if "label" in record:
        return {**others, "prompt": found[:-1], "completion": found[-1:]}
    return {**others, "messages": found}


def _as_message(entry: object, where: str, has_images: bool) -> Message:
    if not is_object(entry):
        raise _no_message(entry, where)
    match dict(entry):
        case {"from": "function_call", "value": str(call), **others}:
            try:
                found = json.loads(call)
            except ValueError as error:
                raise DataError(f"not JSON: {error}", where=where, got=quote(call)) from error
            calls = found if is_array(found) else [found]
            return {
                **others,
                "role": "assistant",
                "tool_calls": [{"type": "function", "function": one} for one in calls],
            }
        case {"from": str(sender), "value": str(text), **others} if sender in _ROLES:
            if not has_images or _IMAGE not in text:
                return {**others, "role": _ROLES[sender], "content": text}
            parts: list[Message] = []
            for index, piece in enumerate(text.split(_IMAGE)):
                parts += [{"type": "image"}] * (index > 0)
                parts += [{"type": "text", "text": piece.strip("\n")}] if piece.strip() else []
            return {**others, "role": _ROLES[sender], "content": parts}
        case {"from": str(sender), "value": str()}:
            remedy = did_you_mean(sender, _ROLES)
            raise DataError("unknown sender", where=where, got=quote(sender), expected=", ".join(_ROLES), remedy=remedy)
        case {"role": _, **others}:
            return {**others, "role": entry["role"]}
    raise _no_message(entry, where)


def _no_message(entry: object, where: str) -> DataError:
    expected = '{"from": "human" or "gpt", "value": ...}'
    return DataError("not a message", where=where, got=quote(entry), expected=expected)


ALPACA = RecordLayout("Alpaca fields (instruction, input, output)", _from_alpaca)
SHAREGPT = RecordLayout("ShareGPT fields (conversations, from, value)", _from_sharegpt)
