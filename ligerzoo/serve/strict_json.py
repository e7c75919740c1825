"""JSON that both sides read in the same way: without NaN and half characters, and encoded in parts."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

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
