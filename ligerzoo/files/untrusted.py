"""Opens and reads untrusted files: regular files of limited size, with one clear error for each that is not valid.

The errors say what to do with files of other formats.
"""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

from ligerzoo.errors import CheckpointError, TokenizerError, first_names, quote
from ligerzoo.files.layout import ADAPTER_CONFIG_FILE, TOKENIZER_INPUTS

_MAX_JSON_BYTES = 32 * 2**20  # the index of a checkpoint with 100,000 tensors has 10 MB
_MAX_VOCABULARY_BYTES = 2**27  # of tokenizer.json; Gemma 3's, one of the largest, has a quarter of this
_MAX_FILE_BYTES = 2**24  # of every other file of a tokenizer

_PICKLE = (
    "Only safetensors files are read, because loading a pickle runs code. If you trust the checkpoint, convert it: "
    "load it with transformers and call save_pretrained."
)
_CONVERT = (
    "Use the repository in Hugging Face's format (the model's id on the hub, often with -hf), or convert it with "
    "transformers' conversion script, convert_{}_weights_to_hf.py."
)
_REMEDIES = {
    "adapter_model.bin": _PICKLE,
    "adapter_config.json": "This is an adapter, without the base model: merge them with `ligerzoo fuse BASE ADAPTER "
    "OUTPUT`, or load the base model and call ligerzoo.adapters.load_adapter(model, directory).",
    "*.gguf": "Convert it: load it with transformers' from_pretrained(directory, gguf_file=...) and call "
    "save_pretrained, for the tokenizer too.",
    "consolidated*.safetensors": _CONVERT.format("mistral"),
    "consolidated*.pth": _CONVERT.format("llama"),
    "*.bin": _PICKLE,
    "*.pt": _PICKLE,
    "*.pth": _PICKLE,
    "*.ckpt": _PICKLE,
    "*.safetensors": "Pass its directory, which also holds config.json.",
    "*.json": "Pass its directory.",
}
"""What to do, by pattern of a file's name; the first applies."""


def read_json(path: str | Path) -> dict[str, Any]:
    """Reads a JSON object from a file of at most 32 MiB, in UTF-8 with or without a byte order mark.

    Raises:
        CheckpointError: The file does not exist, is too large, is not JSON or too deeply nested, has an object with a
            duplicate key, or is not an object.
    """
    path = Path(path)
    value = parse_json(read_bytes(path), path)
    if not isinstance(value, dict):
        raise CheckpointError("is not a JSON object", where=path, got=type(value).__name__)
    return value


def parse_json(content: bytes, path: Path) -> object:
    """Returns the value in the content of a JSON file, in UTF-8 with or without a byte order mark.

    Raises:
        CheckpointError: It is not JSON or too deeply nested, or has an object with a duplicate key.
    """
    try:
        return json.loads(str(content, "utf-8-sig"), object_pairs_hook=unique_entries)
    except (ValueError, RecursionError) as error:
        raise malformed(path, "JSON", error) from error


def read_bytes(path: Path) -> bytes:
    """Reads a JSON file of at most 32 MiB.

    Raises:
        CheckpointError: The file does not exist, is not a regular file, cannot be read, or is too large.
    """
    with reporting_errors(path), open_regular(path) as file:
        content = file.read(_MAX_JSON_BYTES + 1) or b""  # None from a file in /proc without data yet
    if len(content) > _MAX_JSON_BYTES:
        raise CheckpointError("file is too large", where=path, expected=f"at most {_MAX_JSON_BYTES} bytes of JSON")
    return content


def read_tokenizer_files(directory: Path) -> dict[str, bytes]:
    """Returns the contents of the files in a directory that `TOKENIZER_INPUTS` match, by relative path.

    Raises:
        TokenizerError: A file is not a regular file, or is too large.
    """
    files = {}
    for pattern in TOKENIZER_INPUTS:
        limit = _MAX_VOCABULARY_BYTES if pattern == "tokenizer.json" else _MAX_FILE_BYTES
        paths = sorted(directory.glob(pattern)) if "*" in pattern else [directory / pattern]
        for path in filter(os.path.lexists, paths):
            if not path.is_file():  # a broken link or a pipe is a damaged checkpoint, not an absent file
                raise TokenizerError("is not a readable file", where=path, remedy="Download the checkpoint again.")
            with path.open("rb") as file:
                content = file.read(limit + 1)
            if len(content) > limit:
                raise TokenizerError("the file is too large", where=path, expected=f"at most {limit} bytes")
            files[path.relative_to(directory).as_posix()] = content
    return files


@contextlib.contextmanager
def reading_directory(directory: str | Path) -> Iterator[None]:
    """Ensures that all files opened in the block belong to one version of the directory.

    Keeps the directory open until the block ends. Its inode number cannot be reused until then, so an equal number
    means that no process replaced the directory. Files opened in the block may be read later.

    Raises:
        CheckpointError: The directory does not exist, or was replaced during the block. The latter takes precedence
            over other errors in the block.
    """
    try:
        descriptor = os.open(directory, os.O_DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY))
    except OSError as error:
        problems = {errno.ENOENT: "no such directory", errno.ENOTDIR: "is not a directory"}
        problem = problems.get(error.errno or 0, f"cannot be opened: {error.strerror}")
        raise CheckpointError(problem, where=directory, expected="a directory with a checkpoint's files") from error
    failure: Exception | None = None
    try:
        try:
            yield
        except Exception as error:
            failure = error
        if not is_at(descriptor, directory):
            raise CheckpointError(
                "was replaced while it was read", where=directory, remedy="Load it again."
            ) from failure
        if failure is not None:
            raise failure
    finally:
        os.close(descriptor)


def is_at(descriptor: int, path: str | Path) -> bool:
    """Returns whether a path refers to an open file or directory."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading. Opening or reading other kinds, such as a named pipe, may block forever."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
        kind = kinds.get(stat.S_IFMT(mode), "a device")
        raise CheckpointError("not a regular file", where=path, got=kind, expected="a regular file")
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


@contextlib.contextmanager
def reporting_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        of_others = remedy_for(_names_in(path.parent) or ()) if path.name == "config.json" else None
        kind = "an adapter" if path.name == ADAPTER_CONFIG_FILE else "a whole checkpoint"
        remedy = of_others or f"Pass the directory of {kind} in Hugging Face format."
        raise CheckpointError("no such file", where=path, got=files_in(path.parent), remedy=remedy) from error
    except OSError as error:
        raise CheckpointError("cannot be read", where=path, got=error.strerror or error) from error


def files_in(directory: Path) -> str | None:
    """Returns the names of some files for a message; None if the directory cannot be read."""
    names = _names_in(directory)
    return None if names is None else first_names(names) or "an empty directory"


def _names_in(directory: Path) -> list[str] | None:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return None


def malformed(path: Path, kind: str, error: Exception) -> CheckpointError:
    """Returns an error that says what an invalid file contains instead."""
    with reporting_errors(path), path.open("rb") as file:
        beginning = file.read(64).lstrip()
    got, remedy = quote(error), "The file may be damaged or incomplete: download it again."
    if beginning.startswith(b"version https://git-lfs"):
        got, remedy = "a git-lfs pointer", "Run `git lfs pull` in the repository."
    elif beginning.startswith(b"<"):
        got, remedy = "a web page", "Download the file again; log in first if the repository is gated."
    return CheckpointError(f"not a valid {kind} file", where=path, got=got, remedy=remedy)


class RepeatedKeyError(ValueError):
    """An object of JSON has two entries with the same key."""

    def __init__(self, key: str) -> None:
        super().__init__(f"duplicate key {key!r}")
        self.key = key


def unique_entries(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Returns the entries of an object of JSON, as `object_pairs_hook`. Raises RepeatedKeyError."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        last = {key: index for index, (key, _) in enumerate(pairs)}
        raise RepeatedKeyError(next(key for index, (key, _) in enumerate(pairs) if last[key] != index))
    return entries


def remedy_for(names: Sequence[str], *, is_given: bool = False) -> str | None:
    """Returns what to do with files of other formats; None if none of the names is one.

    Args:
        names: names of files.
        is_given: the user named the file instead of its directory.
    """
    own = ("*.safetensors", "*.json")
    patterns = [pattern for pattern in _REMEDIES if is_given or pattern not in own]
    return next((_REMEDIES[p] for p in patterns if any(fnmatchcase(name.lower(), p) for name in names)), None)
