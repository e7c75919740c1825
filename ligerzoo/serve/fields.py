"""Checks of the fields of a request's JSON object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ligerzoo.errors import LigerzooError, did_you_mean
from ligerzoo.serve.options import is_integer, show

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
    return isinstance(value, list) and all(is_integer(item, 0, 2**31 - 1) for item in value)


def or_default(value: Any, default: Any) -> Any:
    """Returns a value, or the default if it is None."""
    return default if value is None else value


def check_field(holds: bool, field: str, got: object, expected: str, remedy: str | None = None) -> None:
    """Raises LigerzooError unless the value of a field is valid."""
    if not holds:
        raise LigerzooError("invalid value", where=field, got=show(got), expected=expected, remedy=remedy)
