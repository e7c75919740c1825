"""Reading the JSON files of a processor."""

from __future__ import annotations

from pathlib import Path

from ligerzoo.errors import ConfigError
from ligerzoo.files.untrusted import read_bytes, read_json
from ligerzoo.text.chat_template import ChatTemplate
from ligerzoo.vision.settings import Settings

FILE_NAMES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
)
"""The files of a processor, without its tokenizer's."""


class ProcessorFiles:
    """The JSON files of a processor in one directory. Each of them is optional.

    Attributes:
        directory: the checkpoint directory.
        contents: the bytes of each file of `FILE_NAMES` that exists, by name.
        processor_config: processor_config.json; empty if the file does not exist.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        present = [name for name in FILE_NAMES if (directory / name).exists()]
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
