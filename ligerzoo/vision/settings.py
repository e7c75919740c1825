"""Settings of a checkpoint's preprocessor_config.json, checked for type and range when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.errors import ConfigError

MAX_SIDE = 2**13  # pixels of a tile


class Settings:
    """A JSON object of settings. Entries that are null count as absent.

    The methods return an entry, or `default` if it is absent, and raise ConfigError if it is malformed.

    Args:
        entries: the parsed JSON object.
        where: the file, for error messages.
    """

    def __init__(self, entries: Mapping[str, Any], where: object) -> None:
        self.where = where
        self._entries = {name: value for name, value in entries.items() if value is not None}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def integer(self, name: str, default: int, *, at_most: int, at_least: int = 1) -> int:
        """Returns an integer between `at_least` and `at_most`."""
        value = self._entries.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not at_least <= value <= at_most:
            raise self._error(name, f"an integer between {at_least} and {at_most}")
        return value

    def number(self, name: str, default: float) -> float:
        """Returns a positive number."""
        value = self._entries.get(name, default)
        if not _is_number(value) or not 0 < value < 2**31:
            raise self._error(name, "a positive number")
        return float(value)

    def channels(
        self, name: str, default: tuple[float, float, float], *, positive: bool = False
    ) -> tuple[float, float, float]:
        """Returns one number each for red, green and blue. The file may give a single number for all three."""
        value = self._entries.get(name, default)
        numbers = [value] * 3 if _is_number(value) else value
        if not isinstance(numbers, (list, tuple)) or len(numbers) != 3 or not all(map(_is_number, numbers)):
            raise self._error(name, "three numbers")
        if positive and min(numbers) <= 0:
            raise self._error(name, "three positive numbers")
        return float(numbers[0]), float(numbers[1]), float(numbers[2])

    def boolean(self, name: str, default: bool) -> bool:
        """Returns true or false."""
        value = self._entries.get(name, default)
        if not isinstance(value, bool):
            raise self._error(name, "true or false")
        return value

    def string(self, name: str) -> str | None:
        """Returns a string, or None if the entry is absent."""
        value = self._entries.get(name)
        if value is not None and not isinstance(value, str):
            raise self._error(name, "a string")
        return value

    def section(self, name: str) -> Settings:
        """Returns a nested object; an empty one if the entry is absent."""
        value = self._entries.get(name, {})
        if not isinstance(value, Mapping):
            raise self._error(name, "an object")
        return Settings(value, f"{self.where}: {name}")

    def require(self, name: str, value: object) -> None:
        """Raises ConfigError if the entry has another value than `value`, the only one that is supported."""
        if self._entries.get(name, value) != value:
            raise self._error(name, f"{value!r} or no entry; other values are not supported")

    def side(self, default: int) -> int:
        """Returns the side in pixels of the square that the entry `size` defines."""
        size = self.section("size")
        height = size.integer("height", default, at_most=MAX_SIDE)
        size.require("width", height)
        for name in ("shortest_edge", "longest_edge"):
            size.require(name, None)
        return height

    def _error(self, name: str, expected: str) -> ConfigError:
        return ConfigError(
            "unsupported value", where=f"{self.where}: {name}", got=repr(self._entries[name]), expected=expected
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**31
