"""Parses records strictly: lines of JSON, text, and rows of datasets."""

from __future__ import annotations

import json
import re
from typing import Any

from ligerzoo.errors import DataError, quote
from ligerzoo.train.data.records import Record
from ligerzoo.train.data.samples import Source

_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_text(record: Record) -> dict[str, Any] | None:
    """Returns the text of a line, or of lines, as a record of kind "text"; None for blank text.

    Raises:
        DataError: the bytes are not UTF-8, or contain a NUL.
    """
    text = _decoded(record).removesuffix("\r")
    return {"text": text} if text.strip() else None


def parse_row(record: Record) -> dict[str, Any] | None:
    """Returns a row of a dataset.

    Raises:
        DataError: the row is not a dictionary.
    """
    if not isinstance(record.data, dict):
        raise DataError("not a dictionary", where=record.source, got=type(record.data).__name__)
    return record.data


def _decoded(record: Record) -> str:
    data, source = record.data, record.source
    try:
        text: str = data.decode()
    except UnicodeDecodeError as error:
        got = f"byte 0x{data[error.start]:02X} at byte {error.start + 1} of the line"
        raise DataError("invalid UTF-8", where=source, got=got, remedy="Convert the file to UTF-8.") from error
    if "\0" in text:
        raise DataError("contains a NUL byte", where=source, remedy="The file may be damaged, or be UTF-16.")
    return text


def parse_json_line(record: Record) -> dict[str, Any] | None:
    """Parses a line of a JSON Lines file; None for a blank line.

    Raises:
        DataError: the line is not UTF-8, not JSON or not an object, repeats a key, or has invalid characters.
    """
    if not record.data.strip():
        return None
    text, source = _decoded(record), record.source
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        near = quote(text[max(0, error.pos - 20) : error.pos + 20])
        raise DataError(f"broken JSON: {error.msg}", where=source, got=f"{near} at column {error.colno}") from error
    except _RepeatedKeyError as error:
        raise DataError(f"the key {quote(error.args[0])} occurs twice in one object", where=source) from error
    except (RecursionError, ValueError) as error:
        raise DataError(f"broken JSON: {error}", where=source) from error
    if not isinstance(value, dict):
        raise DataError("not a JSON object", where=source, got=quote(text), expected='such as {"text": "..."}')
    if "\\u" in text:  # only escapes can produce these characters
        _check_characters(value, source)
    return value


class _RepeatedKeyError(Exception):
    """An object has two entries with the same key."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        last = {key: index for index, (key, _) in enumerate(pairs)}
        raise _RepeatedKeyError(next(key for index, (key, _) in enumerate(pairs) if last[key] != index))
    return entries


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def _check_characters(value: Any, source: Source) -> None:
    """Refuses texts with half of a surrogate pair or a NUL. Not recursive: values may be deeply nested."""
    pending = [value]
    while pending:
        match pending.pop():
            case str() as text:
                if found := _SURROGATE.search(text):
                    got = f"{found[0]!r} in {quote(text[: found.end()][-20:])}"
                    raise DataError("half of a surrogate pair", where=source, got=got)
                if "\0" in text:
                    raise DataError("contains a NUL character", where=source, got=quote(text))
            case dict() as entries:
                pending += [*entries, *entries.values()]
            case list() as items:
                pending += items
