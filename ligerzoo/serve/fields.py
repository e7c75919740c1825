"""JSON of requests and responses, and checks of its fields."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ligerzoo.checks import Values, integer
from ligerzoo.errors import LigerzooError, did_you_mean, quote

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


TOKEN_ID = integer(0, 2**31 - 1)

_REPR = reprlib.Repr()
_REPR.maxstring = 200

Neutral = Mapping[str, tuple[tuple[Any, ...], str | None]]
"""Unsupported fields: the values without an effect, and what to do instead."""


def check_names(fields: Mapping[str, Any], supported: Sequence[str], neutral: Neutral) -> None:
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


def flag(fields: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """Returns a field that is true or false."""
    return bool(or_default(optional_flag(fields, name), default))


def optional_flag(fields: Mapping[str, Any], name: str) -> bool | None:
    """Returns a field that is true or false, or None if it is absent."""
    value: bool | None = fields.get(name)
    check_field(isinstance(value, bool | None), name, value, "true or false")
    return value


def is_ids(value: object) -> bool:
    """Returns whether a JSON value is a list of token ids."""
    return isinstance(value, list) and all(map(TOKEN_ID.accepts, value))


def or_default(value: Any, default: Any) -> Any:
    """Returns a value, or the default if it is None."""
    return default if value is None else value


def check_field(holds: bool, field: str, got: object, expected: str, remedy: str | None = None) -> None:
    """Raises LigerzooError unless the value of a field is valid."""
    if not holds:
        raise LigerzooError("invalid value", where=field, got=show(got), expected=expected, remedy=remedy)


def check_value(field: str, got: object, values: Values) -> None:
    """Raises LigerzooError unless the value of a field is one of these."""
    check_field(values.accepts(got), field, got, values.expected)


def show(value: object) -> str:
    """Returns a JSON value, shortened, for a message."""
    return quote(_REPR.repr(value))
