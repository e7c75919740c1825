"""The JSON files of a processor, and their settings, which are checked for type and range when they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from ligerzoo.checks import Values, instances, integer, is_list, is_number, number, or_none
from ligerzoo.entries import OBJECT, STRING, Entries
from ligerzoo.errors import ConfigError
from ligerzoo.files.layout import PROCESSOR_FILES
from ligerzoo.files.untrusted import read_bytes, read_json
from ligerzoo.text.chat_template import ChatTemplate

T = TypeVar("T")

MAX_SIDE = 2**13  # pixels of a tile


def _are_channels(value: Any) -> bool:
    return is_list(value) and len(value) == 3 and all(map(_is_moderate, value))


def _is_moderate(value: Any) -> bool:
    return is_number(value) and abs(value) < 2**31


POSITIVE = number("a positive number", lambda x: 0 < x < 2**31)
_STRING = or_none(STRING, STRING.expected)
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

    def read(self, name: str, values: Values, default: T) -> T:
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

    def only(self, *names: str) -> Settings:
        """Returns settings without other entries than these."""
        return Settings({name: value for name, value in self._entries.items() if name in names}, self.where)

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


class ProcessorFiles:
    """The JSON files of a processor in one directory. Each of them is optional.

    Attributes:
        directory: the checkpoint directory.
        contents: the bytes of each file of `PROCESSOR_FILES` that exists, by name.
        processor_config: processor_config.json; empty if the file does not exist.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        present = [name for name in PROCESSOR_FILES if (directory / name).exists()]
        self.contents = {name: read_bytes(directory / name) for name in present}
        path = directory / "processor_config.json"
        self.processor_config = self.read(path.name) or Settings({}, path)

    def image_settings(self) -> Settings:
        """Returns the settings of image preprocessing.

        Transformers 5 nests them in processor_config.json, which takes precedence over preprocessor_config.json.

        Raises:
            ConfigError: neither file has them.
        """
        return self._settings("image_processor", "preprocessor_config.json")

    def video_settings(self) -> Settings:
        """Returns the settings of video preprocessing; those of images if no file has any for videos.

        Raises:
            ConfigError: no file has settings for videos or images.
        """
        return self._settings("video_processor", "video_preprocessor_config.json", "preprocessor_config.json")

    def chat_template(self) -> ChatTemplate | None:
        """Returns the processor's chat template, which takes precedence over the tokenizer's, or None."""
        for settings in (self.processor_config, self.read("chat_template.json")):
            if settings is not None and (source := settings.string("chat_template")) is not None:
                return ChatTemplate(source, f"{settings.where}: chat_template")
        return None

    def read(self, name: str) -> Settings | None:
        """Returns a JSON file of the directory as settings, or None if it does not exist."""
        path = self.directory / name
        return Settings(read_json(path), path) if path.exists() else None

    def _settings(self, section: str, *names: str) -> Settings:
        if section in self.processor_config:
            return self.processor_config.section(section)
        for name in names:
            if (settings := self.read(name)) is not None:
                return settings
        remedy = "Download it from the hub; it defines how images are resized and normalized."
        raise ConfigError("there is no preprocessor_config.json", where=self.directory, remedy=remedy)
