"""Settings of a checkpoint's preprocessor_config.json, checked for type and range when they are read."""

from __future__ import annotations

from typing import Any, TypeVar

from ligerzoo.checks import Values, instances, integer, is_number, number
from ligerzoo.entries import OBJECT, Entries, JsonType
from ligerzoo.errors import ConfigError

T = TypeVar("T")

MAX_SIDE = 2**13  # pixels of a tile


def _are_channels(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 3 and all(map(_is_moderate, value))


def _is_moderate(value: Any) -> bool:
    return is_number(value) and abs(value) < 2**31


POSITIVE = number("a positive number", lambda x: 0 < x < 2**31)
_STRING = instances("a string", lambda value: value is None or isinstance(value, str))
_CHANNELS = instances("three numbers", _are_channels)
_POSITIVE_CHANNELS = instances("three positive numbers", lambda value: _are_channels(value) and min(value) > 0)


class Settings:
    """A JSON object of settings. Entries that are null count as absent.

    The methods raise ConfigError if an entry is malformed.

    Args:
        entries: the parsed JSON object.
        where: the file, for error messages.
    """

    def __init__(self, entries: Entries, where: object) -> None:
        self.where = where
        self._entries = {name: value for name, value in entries.items() if value is not None}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def read(self, name: str, values: Values | JsonType[Any], default: T) -> T:
        """Returns an entry, which is one of the values; `default` if it is absent."""
        value: Any = self._entries.get(name, default)
        if not values.accepts(value):
            raise self._error(name, values.expected)
        return value  # type: ignore[no-any-return]

    def channels(
        self, name: str, default: tuple[float, float, float], *, positive: bool = False
    ) -> tuple[float, float, float]:
        """Returns one number each for red, green and blue. The file may give a single number for all three."""
        if _is_moderate(value := self._entries.get(name)):
            return Settings({name: [value] * 3}, self.where).channels(name, default, positive=positive)
        red, green, blue = self.read(name, _POSITIVE_CHANNELS if positive else _CHANNELS, default)
        return float(red), float(green), float(blue)

    def string(self, name: str) -> str | None:
        """Returns a string, or None if the entry is absent."""
        value: str | None = None
        return self.read(name, _STRING, value)

    def section(self, name: str) -> Settings:
        """Returns a nested object; an empty one if the entry is absent."""
        empty: Entries = {}
        return Settings(self.read(name, OBJECT, empty), f"{self.where}: {name}")

    def require(self, name: str, value: object) -> None:
        """Raises ConfigError if the entry has another value than `value`, the only one that is supported."""
        if self._entries.get(name, value) != value:
            raise self._error(name, f"{value!r} or no entry; other values are not supported")

    def side(self, default: int) -> int:
        """Returns the side in pixels of the square that the entry `size` defines."""
        size = self.section("size")
        height = size.read("height", integer(1, MAX_SIDE), default)
        for name, value in (("width", height), ("shortest_edge", None), ("longest_edge", None)):
            size.require(name, value)
        return height

    def _error(self, name: str, expected: str) -> ConfigError:
        where, got = f"{self.where}: {name}", repr(self._entries[name])
        return ConfigError("unsupported value", where=where, got=got, expected=expected)
