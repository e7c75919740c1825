"""Finds and reads the files of sentence-transformers in a checkpoint: modules.json and the configs that it names.

Each module after the first one has a directory, which holds its config.json and model.safetensors.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ligerzoo.entries import OBJECT, STRING, Entries, Reader, is_array, is_object, shown
from ligerzoo.errors import CheckpointError, quote
from ligerzoo.files.layout import CONFIG_FILE, MODULE_FILES, MODULES_FILE, SINGLE_FILE, TRANSFORMER_FILES, is_plain_name
from ligerzoo.files.untrusted import parse_json, read_bytes

_MAX_MODULES = 32
_CLASS = re.compile(r"sentence_transformers(\.\w+)*\.(?P<name>\w+)")


class Module(NamedTuple):
    """An entry of modules.json.

    Attributes:
        path: its directory in the checkpoint; "" for the checkpoint's.
        class_name: name of its class in sentence-transformers, such as "Pooling".
    """

    path: str
    class_name: str


@dataclass(frozen=True)
class ModuleFiles:
    """The files of sentence-transformers in a checkpoint.

    Attributes:
        directory: the checkpoint's directory, for error messages.
        contents: contents of the files, by relative path.
        modules: the entries of modules.json; empty without this file.
        entries: the JSON objects in the other files, by relative path.
    """

    directory: str
    contents: Mapping[str, bytes] = field(default_factory=dict)
    modules: tuple[Module, ...] = ()
    entries: Mapping[str, Entries] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: str | Path, contents: Mapping[str, bytes]) -> "ModuleFiles":
        """Parses the contents of files, of which others than those of sentence-transformers are ignored.

        Raises:
            CheckpointError: a file is malformed.
        """
        parsed = {
            name: parse_json(content, Path(directory, name)) for name, content in contents.items() if _is_own(name)
        }
        modules = tuple(_modules(parsed.pop(MODULES_FILE, []), Path(directory, MODULES_FILE)))
        read = Reader(CheckpointError, problem="is not a JSON object").read
        entries = {name: read(OBJECT, value, Path(directory, name)) for name, value in parsed.items()}
        return cls(str(directory), contents, modules, entries)

    @property
    def transformer(self) -> str:
        """The name of the first module's config, which may not exist."""
        return next((name for name in TRANSFORMER_FILES if name in self.entries), TRANSFORMER_FILES[0])

    def where(self, name: str) -> str:
        """Returns the path of a file, for error messages."""
        return str(PurePosixPath(self.directory, name))


def _is_own(name: str) -> bool:
    return name in MODULE_FILES or (name.endswith(f"/{CONFIG_FILE}"))


def module_files(directory: Path) -> list[str]:
    """Returns the paths of the modules' files in a directory that has modules.json: configs and weights."""
    path = directory / MODULES_FILE
    modules = _modules(parse_json(read_bytes(path), path), path) if os.path.lexists(path) else ()
    return [f"{module.path}/{name}" for module in modules if module.path for name in (CONFIG_FILE, SINGLE_FILE)]


def read_modules(directory: Path, others: Mapping[str, bytes]) -> ModuleFiles:
    """Reads the files of sentence-transformers in a directory: none if it has no modules.json.

    Args:
        directory: the directory.
        others: contents of further files, such as those of the tokenizer, by relative path.

    Raises:
        CheckpointError: a file is malformed, or modules.json has an invalid path or a class of another library.
    """
    if not os.path.lexists(directory / MODULES_FILE):
        return ModuleFiles(str(directory), others)
    names = [*MODULE_FILES, *(name for name in module_files(directory) if name.endswith(CONFIG_FILE))]
    contents = {name: read_bytes(directory / name) for name in names if os.path.lexists(directory / name)}
    return ModuleFiles.of(directory, {**others, **contents})


def _modules(value: object, path: Path) -> Iterator[Module]:
    """Yields the entries of modules.json."""
    if not is_array(value) or len(value) > _MAX_MODULES:
        expected = f"a list of at most {_MAX_MODULES} modules"
        raise CheckpointError("not a list of modules", where=path, got=shown(value), expected=expected)
    for index, entry in enumerate(value):
        where = f"{path}, module {index}"
        if not is_object(entry) or not all(STRING.accepts(entry.get(name)) for name in ("path", "type")):
            expected = "an object with path and type"
            raise CheckpointError("not a module", where=where, got=shown(entry), expected=expected)
        match, name = _CLASS.fullmatch(entry["type"]), entry["path"].rstrip("/")
        if match is None:
            what, expected = "a class of another library, whose code would run", "a class of sentence_transformers"
            raise CheckpointError(what, where=where, got=quote(entry["type"]), expected=expected)
        if name and not is_plain_name(name):
            expected = "the name of a directory in the checkpoint's directory"
            raise CheckpointError("invalid path", where=where, got=quote(name), expected=expected)
        yield Module(name, match["name"])
