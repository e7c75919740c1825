"""The entries of a checkpoint's preprocessor_config.json, read with suspicion: each has a type and a range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ligerzoo.errors import ConfigError

MAX_SIDE = 2**13  # of a tile, in pixels


class Settings:
    """One object of settings. A null counts as absent.

    Args:
        entries: the object, as JSON has it.
        where: the file it is from, for errors.
    """

    def __init__(self, entries: Mapping[str, Any], where: object) -> None:
        self.where = where
        self._entries = {name: value for name, value in entries.items() if value is not None}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def integer(self, name: str, default: int, *, at_most: int, at_least: int = 1) -> int:
        value = self._entries.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not at_least <= value <= at_most:
            raise self._misfit(name, f"an integer between {at_least} and {at_most}")
        return value

    def number(self, name: str, default: float) -> float:
        """A positive number."""
        value = self._entries.get(name, default)
        if not _is_number(value) or not 0 < value < 2**31:
            raise self._misfit(name, "a positive number")
        return float(value)

    def channels(
        self, name: str, default: tuple[float, float, float], *, positive: bool = False
    ) -> tuple[float, float, float]:
        """A number each for red, green and blue, which may be given as one for all."""
        value = self._entries.get(name, default)
        numbers = [value] * 3 if _is_number(value) else value
        if not isinstance(numbers, (list, tuple)) or len(numbers) != 3 or not all(map(_is_number, numbers)):
            raise self._misfit(name, "three numbers")
        if positive and min(numbers) <= 0:
            raise self._misfit(name, "three positive numbers")
        return float(numbers[0]), float(numbers[1]), float(numbers[2])

    def boolean(self, name: str, default: bool) -> bool:
        value = self._entries.get(name, default)
        if not isinstance(value, bool):
            raise self._misfit(name, "true or false")
        return value

    def string(self, name: str) -> str | None:
        value = self._entries.get(name)
        if value is not None and not isinstance(value, str):
            raise self._misfit(name, "a text")
        return value

    def section(self, name: str) -> Settings:
        """An entry that is an object itself; an empty one where there is none."""
        value = self._entries.get(name, {})
        if not isinstance(value, Mapping):
            raise self._misfit(name, "an object")
        return Settings(value, f"{self.where}: {name}")

    def require(self, name: str, value: object) -> None:
        """Refuse whatever asks for something else than `value`, which is what is done when the entry is absent."""
        if self._entries.get(name, value) != value:
            raise self._misfit(name, f"{value!r} or no entry: nothing else is supported")

    def side(self, default: int) -> int:
        """The side in pixels of the squares that `size` asks for."""
        size = self.section("size")
        height = size.integer("height", default, at_most=MAX_SIDE)
        size.require("width", height)
        for name in ("shortest_edge", "longest_edge"):
            size.require(name, None)
        return height

    def _misfit(self, name: str, expected: str) -> ConfigError:
        return ConfigError(
            "is not what it should be", where=f"{self.where}: {name}", got=repr(self._entries[name]), expected=expected
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**31
