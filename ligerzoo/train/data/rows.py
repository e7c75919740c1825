"""Hugging Face datasets, and other sequences of dictionaries, as data. The library `datasets` is optional."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ligerzoo.errors import DataError, first_names

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
