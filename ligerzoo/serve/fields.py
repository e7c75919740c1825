"""Fields of the JSON objects of clients, and their checks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from ligerzoo import checks
from ligerzoo.checks import Values, instances, integer, is_text
from ligerzoo.entries import is_array, is_object
from ligerzoo.errors import LigerzooError, did_you_mean
from ligerzoo.serve.strict_json import parse_strict_json

T = TypeVar("T")

Fields = Mapping[str, object]
"""A JSON object of a client."""

Json = dict[str, object]
"""A JSON object for a client."""

TOKEN_ID = integer(0, 2**31 - 1)
FLAG = checks.FLAG._replace(expected="true or false")
STRING = instances("a text", is_text)
OBJECT = instances("an object", is_object)
IDS = instances("a list of token ids", lambda value: is_array(value) and all(map(TOKEN_ID.accepts, value)))

_ENCODER = json.JSONEncoder(ensure_ascii=False, default=str)
_SHOWN = 200  # characters of a value in a message

Neutral = Mapping[str, tuple[tuple[object, ...], str | None]]
"""Unsupported fields: the values without an effect, and what to do instead."""


def parse_object(text: str | bytes, where: str) -> Fields:
    """Parses a JSON object of a client; see `parse_strict_json`.

    Raises:
        LigerzooError: it is malformed, or no object.
    """
    try:
        fields = parse_strict_json(text)
    except (ValueError, RecursionError) as error:
        raise LigerzooError("not valid JSON", where=where, got=error) from error
    return cast(Fields, checked(fields, where, OBJECT._replace(expected="a JSON object")))


def read(fields: Fields, name: str, values: Values, default: T, where: str | None = None) -> T:
    """Returns a field, or the default if it is absent or null.

    Raises:
        LigerzooError: it is none of the values. Names it, or `where`.
    """
    value = fields.get(name)
    return default if value is None else cast("T", checked(value, where or name, values))


def checked(value: object, where: str, values: Values, remedy: str | None = None) -> Any:
    """Returns a value; raises LigerzooError unless it is one of these."""
    check_field(values.accepts(value), where, value, values.expected, remedy)
    return value


def check_field(holds: bool, field: str, got: object, expected: str, remedy: str | None = None) -> None:
    """Raises LigerzooError unless the value of a field is valid."""
    if not holds:
        raise LigerzooError("invalid value", where=field, got=show(got), expected=expected, remedy=remedy)


def check_names(fields: Fields, supported: Sequence[str], neutral: Neutral) -> None:
    """Raises LigerzooError if a field is unknown, or unsupported with a value that would have an effect."""
    for name, value in fields.items():
        if name in supported or (name in neutral and value is None):
            continue
        if name not in neutral:
            raise LigerzooError("unknown field", where=name[:100], remedy=did_you_mean(name[:100], supported))
        values, remedy = neutral[name]
        if value not in values:
            expected = " or ".join(map(show, values)) or "no such field"
            raise LigerzooError("not supported", where=name, got=show(value), expected=expected, remedy=remedy)


def show(value: object) -> str:
    """Returns a value as JSON, shortened and escaped, for a message."""
    text, parts = "", _ENCODER.iterencode(value)
    while len(text) <= _SHOWN and (part := next(parts, None)) is not None:
        text += part
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in shown)
