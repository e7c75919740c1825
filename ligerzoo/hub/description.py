"""Reads config.json: the architecture, the config and the quantized format that it names."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Unpack

from ligerzoo.convert import architecture_to_load
from ligerzoo.convert.architecture import Architecture
from ligerzoo.convert.fields import stored_dtype
from ligerzoo.convert.tasks import task_of
from ligerzoo.entries import Entries
from ligerzoo.errors import ConfigError, unknown_names
from ligerzoo.files.layout import CONFIG_FILE, CONFIG_FILES
from ligerzoo.files.locate import locate_files
from ligerzoo.files.modules import ModuleFiles
from ligerzoo.files.quantized import ENTRY as QUANTIZATION_ENTRY
from ligerzoo.files.quantized import Quantization, read_quantization
from ligerzoo.files.transformers_options import HubOptions
from ligerzoo.files.untrusted import read_json
from ligerzoo.models.language_model import LanguageModel

_OPTIONS = [
    option.name
    for option in inspect.signature(LanguageModel.from_pretrained).parameters.values()
    if option.kind is option.KEYWORD_ONLY
]


@dataclass(frozen=True)
class Description:
    """The model that config.json describes.

    Attributes:
        path: the file.
        raw: its content, without the entry about quantized tensors.
        architecture: the architecture that it names.
        config: our config.
        quantization: how tensors are quantized; None if they are not.
        overrides: values of fields that arguments of `from_pretrained` give.
    """

    path: Path
    raw: dict[str, object]
    architecture: Architecture
    config: Any
    quantization: Quantization | None
    overrides: Entries

    def __post_init__(self) -> None:
        stored_dtype(self.raw)  # raises if it is invalid

    def without_overrides(self) -> Description:
        """Returns the description of config.json alone."""
        config = self.architecture.config_from_hf(self.raw, type(self.config))
        return dataclasses.replace(self, config=config, overrides={})

    def build_on_meta(self, model_class: type[LanguageModel]) -> Any:
        """Builds the model without weights.

        Raises:
            ConfigError: The sizes are too large, or invalid together.
        """
        try:
            with naming_source(self.path):
                return self.architecture.build(self.config, model_class, "meta")
        except RuntimeError as error:  # the number of elements overflows
            raise ConfigError("no model can be built with these sizes", where=self.path, got=error) from error


def read_description(
    raw: dict[str, object],
    path: Path,
    model_class: type[LanguageModel] = LanguageModel,
    overrides: Entries = MappingProxyType({}),
    files: ModuleFiles | None = None,
) -> Description:
    """Reads what config.json says.

    Args:
        raw: its content.
        path: the file.
        model_class: expected class of the model, or a subclass of the user.
        overrides: values of fields, which take precedence.
        files: the files of sentence-transformers in the same directory, for an embedding model.

    Raises:
        ConfigError: It describes another class than `model_class`, or has invalid or unsupported entries; or an
            override is not a field of the config, or has an invalid value.
    """
    with naming_source(path, overrides):
        architecture, config_class = architecture_to_load(raw, model_class, overrides, files or ModuleFiles(""))
        quantization = read_quantization(raw, architecture.quantized_formats)
        if quantization is not None:  # the loaded weights are not quantized, nor the saved ones
            raw = {name: value for name, value in raw.items() if name != QUANTIZATION_ENTRY}
        own_options = task_of(model_class).options
        overrides = {name: given for name, given in overrides.items() if name not in own_options}
        fields = [field.name for field in dataclasses.fields(config_class)]
        for name, nearest in unknown_names(overrides, fields, [*_OPTIONS, *own_options]):
            expected = f"an option of from_pretrained or a field of {config_class.__name__}"
            raise ConfigError("unknown", where=name, expected=expected, remedy=nearest)
        config = architecture.config_from_hf(raw, config_class, overrides)
        return Description(path, raw, architecture, config, quantization, overrides)


def read_config(name_or_path: str | Path, **hub_options: Unpack[HubOptions]) -> Any:
    """Reads the config of a checkpoint, which may have no weights. `AutoModel.from_config` builds a new model from it.

    Args:
        name_or_path: directory with config.json, or id of a repository on the hub.
        hub_options: see `ligerzoo.files.transformers_options.HubOptions`.

    Raises:
        ConfigError: config.json has invalid or unsupported entries, or describes a sequence classifier.
        CheckpointError: config.json is missing or malformed.
    """
    path = locate_files(name_or_path, CONFIG_FILES, **hub_options) / CONFIG_FILE
    return read_description(read_json(path), path).config


@contextlib.contextmanager
def naming_source(source: object, arguments: Collection[str] = ()) -> Iterator[None]:
    """Adds the source of a field to errors about it: a file or object, or an argument of `from_pretrained`."""
    try:
        yield
    except ConfigError as error:
        directory = os.path.dirname(str(source))
        if directory and str(error.where).startswith(directory + os.sep):
            raise  # names another file of the directory
        name = re.match(r"\w*", str(error.where))
        where = f"argument {error.where}" if name and name[0] in arguments else f"{source}, {error.where}"
        raise error.moved_to(where) from error
