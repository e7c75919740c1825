"""Where data is: files, directories, glob patterns, Hugging Face datasets and other sequences of dictionaries.

The library `datasets` is optional.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ligerzoo.errors import DataError, first_names

FORMATS = {".jsonl": "JSON Lines", ".ndjson": "JSON Lines", ".txt": "text", ".bin": "tokens", ".npy": "tokens"}
"""The format of a file, by its suffix."""

_REMEDIES = {
    ".json": "Write one JSON object per line, as .jsonl.",
    ".gz": "Decompress the file: training reads it in random order.",
    ".zst": "Decompress the file: training reads it in random order.",
    ".parquet": "Pass datasets.Dataset.from_parquet(file) instead.",
    ".csv": "Pass datasets.Dataset.from_csv(file) instead.",
}

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def find_files(paths: Paths) -> list[Path]:
    """Returns the data files that `paths` name, sorted within each directory and pattern.

    Args:
        paths: a file, a directory (searched recursively), a glob pattern (`**` matches directories), or several.

    Raises:
        DataError: a path does not exist, is empty or matches nothing, a file has another format or occurs twice, or
            the files have different formats.
    """
    files: list[Path] = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        if "://" in str(path):
            raise DataError("data is not downloaded", where=path, expected="a file", remedy="Download it first.")
        files += _expand(Path(path))
    if not files:
        raise DataError("no data files", where="paths", got=repr(paths), expected="at least one file")
    for file in files:
        if file.suffix not in FORMATS:
            raise DataError(
                "not a format of data files", where=file, got=repr(file.suffix), expected=", ".join(FORMATS),
                remedy=_REMEDIES.get(file.suffix),
            )  # fmt: skip
        if file.stat().st_size == 0:
            raise DataError("the file is empty", where=file)
    if len({FORMATS[file.suffix] for file in files}) > 1:
        raise DataError(
            "files of different formats", where="paths", got=first_names(list(map(str, files))), expected="one format"
        )
    resolved = set[Path]()
    for file in files:
        if (target := file.resolve()) in resolved:
            raise DataError("the file is listed twice", where=file, remedy="Use epochs to repeat data.")
        resolved.add(target)
    return files


def _expand(path: Path) -> list[Path]:
    if path.is_dir():
        inner = (file for file in path.rglob("*") if file.suffix in FORMATS and file.is_file())
        files = sorted(file for file in inner if not file.name.startswith("."))
        if not files:
            raise DataError("the directory has no data files", where=path, expected=", ".join(FORMATS))
        return files
    if path.is_file():
        return [path]
    if glob.has_magic(str(path)):
        files = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
        if not files:
            raise DataError("no file matches the pattern", where=path)
        return files
    if os.path.lexists(path):
        raise DataError(
            "not a regular file", where=path, expected="a file or a directory",
            remedy="Write pipes and other streams to a file: training reads it in random order.",
        )  # fmt: skip
    raise DataError("no such file or directory", where=path)


_STATE, _SPLITS = "state.json", "dataset_dict.json"


def is_saved_dataset(data: object) -> bool:
    """Returns whether this is a directory that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    if not isinstance(data, str | os.PathLike):
        return False
    return any((Path(data) / name).is_file() for name in (_STATE, _SPLITS))


def dataset_rows(data: Any) -> tuple[Sequence[Mapping[str, Any]], str, object]:
    """Returns the rows of a dataset, its name for error messages, and a value that identifies its content.

    Args:
        data: a `datasets.Dataset`, the directory of a saved one, or a sequence of dictionaries.

    Raises:
        DataError: there are several splits, the dataset cannot be read at random, or `datasets` is not installed.
    """
    name = "dataset"
    if is_saved_dataset(data):
        name, data = str(data), _load(data)
    if isinstance(data, Mapping):  # a DatasetDict, too
        raise DataError(
            "several splits of a dataset", where=name, got=first_names(list(data)), expected="one split",
            remedy=f"Pass one of them, such as {name}/{next(iter(data), 'train')}."
            if name != "dataset" else "Pass one of them, such as dataset['train'].",
        )  # fmt: skip
    if isinstance(data, str | bytes) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise DataError(
            "cannot be read in random order", where=name, got=type(data).__name__,
            expected="a file, or a sequence of dictionaries such as a datasets.Dataset",
            remedy="Write its records to a .jsonl file.",
        )  # fmt: skip
    return data, name, getattr(data, "_fingerprint", None)


def _load(directory: str | os.PathLike[str]) -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError(
            "a saved Hugging Face dataset needs the library datasets, which is not installed", where=directory,
            remedy="Install it with pip install datasets, or write the records to a .jsonl file.",
        ) from None  # fmt: skip
    try:
        return datasets.load_from_disk(os.fspath(directory))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be loaded: {error}", where=directory) from error
