"""JSON of requests and responses, and checks of its fields."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

from ligerzoo import checks
from ligerzoo.checks import Values, instances, integer
from ligerzoo.errors import LigerzooError, did_you_mean, quote

T = TypeVar("T")

_SURROGATE = re.compile("[\ud800-\udfff]|\\\\u[dD][89a-fA-F]")
_ITEMS = 256  # that are encoded at once


def parse_strict_json(text: str | bytes) -> Any:
    """Parses JSON.

    Raises:
        ValueError, RecursionError: it is malformed, or has NaN, Infinity or half of a surrogate pair in a text or name,
            which Python's parser accepts.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    value = json.loads(text, parse_constant=_refuse_constant)
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("half of a surrogate pair, which is not a character") from error
    return value


def encode_json(value: object) -> bytes:
    """Returns JSON text, like json.dumps, but in parts: json.dumps stops all threads until it has finished.

    Raises:
        ValueError: a number is NaN or infinite.
    """
    return _encode(value).encode()


def _encode(value: object) -> str:
    if isinstance(value, dict) and any(isinstance(item, dict | list) for item in value.values()):
        return "{" + ",".join(f"{_dumps(name)}:{_encode(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        if any(isinstance(item, dict | list) for item in value):
            return "[" + ",".join(map(_encode, value)) + "]"
        parts = (_dumps(value[start : start + _ITEMS])[1:-1] for start in range(0, len(value), _ITEMS))
        return "[" + ",".join(parts) + "]"
    return _dumps(value)


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


Fields = Mapping[str, object]
"""A JSON object of a client."""

Json = dict[str, object]
"""A JSON object for a client."""

TOKEN_ID = integer(0, 2**31 - 1)
FLAG = checks.FLAG._replace(expected="true or false")
STRING = instances("a text", lambda value: isinstance(value, str))
OBJECT = instances("an object", lambda value: isinstance(value, dict))
IDS = instances("a list of token ids", lambda value: isinstance(value, list) and all(map(TOKEN_ID.accepts, value)))

_REPR = reprlib.Repr()
_REPR.maxstring = 200

Neutral = Mapping[str, tuple[tuple[object, ...], str | None]]
"""Unsupported fields: the values without an effect, and what to do instead."""


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
            expected = " or ".join(map(repr, values)) or "no such field"
            raise LigerzooError("not supported", where=name, got=show(value), expected=expected, remedy=remedy)


def show(value: object) -> str:
    """Returns a JSON value, shortened, for a message."""
    return quote(_REPR.repr(value))
