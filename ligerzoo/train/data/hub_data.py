"""Datasets of the library `datasets`, saved or on the hub, and Parquet files on the hub, which are streamed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeGuard, cast

from ligerzoo.errors import DataError, did_you_mean, first_names
from ligerzoo.train.data.parquet import ParquetReader
from ligerzoo.train.data.records import Fields, RecordReader, RowReader, needs_extra, suffix_of

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_SCHEME, _REPOSITORIES = "hf://", "datasets/"
_NAME = r"[A-Za-z0-9][\w.-]*"
_NEEDS = "is neither a file nor a directory, and a dataset of the hub needs"
_FILES = (
    ".jsonl",
    ".ndjson",
    ".json",
    ".csv",
    ".tsv",
    ".parquet",
    ".txt",
    ".bin",
    ".npy",
    ".gz",
    ".zst",
    ".arrow",
    ".xlsx",
)
_DATASET = re.compile(rf"(?P<repo>{_NAME}/{_NAME})(?:@(?P<revision>[^/:]+))?(?:/(?P<rest>[^:]+))?(?::(?P<split>.+))?")


def is_path(value: object) -> TypeGuard[str | os.PathLike[str]]:
    """Returns whether a value is the path of a file or directory."""
    return isinstance(value, str | os.PathLike)


class HubData(NamedTuple):
    """Data on the hub: a dataset with its config and split, or files of its repository.

    Attributes:
        name: as it was given.
        repo: such as "org/name".
        revision: branch, tag or commit; None for the newest.
        rest: the config, or a path or pattern of files; None for the whole dataset.
        split: None for the only one.
    """

    name: str
    repo: str
    revision: str | None
    rest: str | None
    split: str | None

    @property
    def is_file(self) -> bool:
        """Whether it is one or more files of a repository."""
        return self.rest is not None and suffix_of(self.rest) in _FILES


def hub_data(name: str) -> HubData | None:
    """Returns the data on the hub that is named, such as `org/name:train`; None if it is a local path.

    Raises:
        DataError: it begins with hf://, and is malformed.
    """
    is_url = name.startswith(_SCHEME)
    found = _DATASET.fullmatch(name.removeprefix(_SCHEME).removeprefix(_REPOSITORIES) if is_url else name)
    is_local = Path(name.partition("/")[0]).exists() or suffix_of(name) in _FILES
    if found is not None and (is_url or not is_local):
        return HubData(name, found["repo"], found["revision"], found["rest"], found["split"])
    if is_url:
        expected = "such as hf://datasets/org/name:train or hf://datasets/org/name/data/*.parquet"
        raise DataError("not a dataset of the hub", where=name, expected=expected)
    return None


def open_hub_data(data: HubData) -> RecordReader:
    """Opens data on the hub: Parquet files as a stream, others as `datasets` downloads them.

    Raises:
        DataError: it cannot be loaded, or has several splits.
    """
    if data.is_file and data.rest is not None and suffix_of(data.rest) == ".parquet":
        return _streamed(data)
    with needs_extra(_NEEDS, "datasets", where=data.name):
        import datasets
    given = {"data_files": data.rest} if data.is_file else {"name": data.rest}
    try:
        loaded = datasets.load_dataset(data.repo, split=data.split, revision=data.revision, **given)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        what = "is neither a file nor a directory, and the dataset of the hub cannot be loaded"
        raise DataError(f"{what}: {error}", where=data.name) from error
    if isinstance(loaded, Mapping) and len(loaded) == 1:
        (loaded,) = loaded.values()
    return RowReader(*dataset_rows(loaded, data.name))


def _streamed(data: HubData) -> ParquetReader:
    from huggingface_hub import HfFileSystem
    from huggingface_hub.errors import HfHubHTTPError

    files = HfFileSystem()
    revision = "" if data.revision is None else f"@{data.revision}"
    try:
        names = sorted(files.glob(f"{_REPOSITORIES}{data.repo}{revision}/{data.rest}"))
        details = {name: files.info(name) for name in names}
    except (OSError, HfHubHTTPError) as error:
        raise DataError(f"cannot be read: {error}", where=data.name) from error
    if not names:
        raise DataError("no file of the repository has this name", where=data.name)

    def identity(name: str) -> list[object]:
        return [name, details[name]["size"], details[name].get("blob_id")]

    return ParquetReader(names, identity, lambda name: files.open(name, "rb"))


def data_identity(name: str) -> object:
    """Returns what is equal for all names of one file, saved dataset or dataset of the hub."""
    if (on_hub := hub_data(name)) is not None:
        return on_hub._replace(name="")
    path, split = (Path(name), "") if os.path.lexists(name) else _parted(name)
    return path.resolve(), split


def saved_datasets(directory: Path) -> list[str]:
    """Returns the saved datasets in a directory, those with splits by the name of each split."""
    found: list[str] = []
    for path in sorted(
        file.parent for file in directory.rglob("dataset_info.json") if (file.parent / _STATE).is_file()
    ):
        has_splits = (path.parent / _SPLITS).is_file()
        found.append(f"{path.parent}:{path.name}" if has_splits else str(path))
    return found


def is_saved_dataset(data: object) -> TypeGuard[str | os.PathLike[str]]:
    """Returns whether this is a directory that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote.

    The name of a split may follow the directory, as in `directory:train`.
    """
    if not is_path(data):
        return False
    return any((path / name).is_file() for path in (Path(data), _parted(data)[0]) for name in (_STATE, _SPLITS))


def _parted(data: str | os.PathLike[str]) -> tuple[Path, str]:
    directory, _, split = os.fspath(data).rpartition(":")
    return (Path(directory), split) if directory else (Path(data), "")


def open_rows(data: object) -> RowReader:
    """Opens a dataset of the library `datasets`, the directory of a saved one, or a sequence of dictionaries.

    Raises:
        DataError: there are several splits, the dataset cannot be read at random, or `datasets` is not installed.
    """
    if not is_saved_dataset(data):
        return RowReader(*dataset_rows(data, "dataset"))
    directory, split = (Path(data), "") if Path(data).is_dir() else _parted(data)
    loaded = _load(directory)
    if split:
        splits: Mapping[str, object] = loaded if isinstance(loaded, Mapping) else {}
        if split not in splits:
            got, remedy = first_names([*splits]) or "one dataset without splits", did_you_mean(split, splits)
            raise DataError(f"there is no split {split!r}", where=data, got=got, remedy=remedy)
        loaded = splits[split]
    return RowReader(*dataset_rows(loaded, os.fspath(data)))


def dataset_rows(data: object, name: str) -> tuple[Sequence[Fields], str, object]:
    """Returns the rows of a dataset, its name for error messages, and a value that identifies its content.

    Raises:
        DataError: there are several splits, or the dataset cannot be read at random.
    """
    if isinstance(data, Mapping):  # a DatasetDict, too
        example = "dataset['train']" if name == "dataset" else f"{name}:{next(iter(data), 'train')}"
        remedy, got = f"Pass one of them, such as {example}.", first_names(list(data))
        raise DataError("several splits of a dataset", where=name, got=got, expected="one split", remedy=remedy)
    if isinstance(data, str | bytes) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        got, remedy = type(data).__name__, "Write its records to a .jsonl file."
        expected = "a file, or a sequence of dictionaries such as a datasets.Dataset"
        raise DataError("cannot be read in random order", where=name, got=got, expected=expected, remedy=remedy)
    return cast("Sequence[Fields]", data), name, getattr(data, "_fingerprint", None)


def _load(directory: Path) -> object:
    with needs_extra("a saved Hugging Face dataset needs", "datasets", where=directory):
        import datasets
    try:
        return datasets.load_from_disk(directory)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be loaded: {error}", where=directory) from error
