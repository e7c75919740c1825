"""Finds data, and reads its records at random: each kind of storage divides its data into blocks, read in any order.

A block of a text file is a range of bytes. It owns the lines that begin in it. So blocks need no index of the lines:
the first block of a file of any size is read at once. The library `datasets` is optional.
"""

from __future__ import annotations

import glob
import hashlib
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from ligerzoo.errors import DataError, first_names
from ligerzoo.train.data.samples import Source

_REMEDIES = {
    ".json": "Write one JSON object per line, as .jsonl.",
    ".gz": "Decompress the file: training reads it in random order.",
    ".zst": "Decompress the file: training reads it in random order.",
    ".parquet": "Pass datasets.Dataset.from_parquet(file) instead.",
    ".csv": "Pass datasets.Dataset.from_csv(file) instead.",
}

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def find_files(paths: Paths, formats: Mapping[str, object]) -> list[Path]:
    """Returns the data files that `paths` name, sorted within each directory and pattern.

    Args:
        paths: a file, a directory (searched recursively), a glob pattern (`**` matches directories), or several.
        formats: the format of a file, by its suffix.

    Raises:
        DataError: a path does not exist, is empty or matches nothing, a file has another format or occurs twice, or
            the files have different formats.
    """
    files: list[Path] = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        if "://" in str(path):
            raise DataError("data is not downloaded", where=path, expected="a file", remedy="Download it first.")
        files += _expand(Path(path), formats)
    if not files:
        raise DataError("no data files", where="paths", got=repr(paths), expected="at least one file")
    for file in files:
        if file.suffix not in formats:
            expected, remedy = ", ".join(formats), _REMEDIES.get(file.suffix)
            what = "not a format of data files"
            raise DataError(what, where=file, got=repr(file.suffix), expected=expected, remedy=remedy)
        if file.stat().st_size == 0:
            raise DataError("the file is empty", where=file)
    if len({formats[file.suffix] for file in files}) > 1:
        got = first_names(list(map(str, files)))
        raise DataError("files of different formats", where="paths", got=got, expected="one format")
    resolved = set[Path]()
    for file in files:
        if (target := file.resolve()) in resolved:
            raise DataError("the file is listed twice", where=file, remedy="Use epochs to repeat data.")
        resolved.add(target)
    return files


def _expand(path: Path, formats: Mapping[str, object]) -> list[Path]:
    if path.is_dir():
        inner = (file for file in path.rglob("*") if file.suffix in formats and file.is_file())
        files = sorted(file for file in inner if not file.name.startswith("."))
        if not files:
            raise DataError("the directory has no data files", where=path, expected=", ".join(formats))
        return files
    if path.is_file():
        return [path]
    if glob.has_magic(str(path)):
        files = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
        if not files:
            raise DataError("no file matches the pattern", where=path)
        return files
    if os.path.lexists(path):
        remedy = "Write pipes and other streams to a file: training reads it in random order."
        raise DataError("not a regular file", where=path, expected="a file or a directory", remedy=remedy)
    raise DataError("no such file or directory", where=path)


_STATE, _SPLITS = "state.json", "dataset_dict.json"


def is_path(value: object) -> TypeGuard[str | os.PathLike[str]]:
    """Returns whether a value is the path of a file or directory."""
    return isinstance(value, str | os.PathLike)


def is_saved_dataset(data: object) -> TypeGuard[str | os.PathLike[str]]:
    """Returns whether this is a directory that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""
    if not is_path(data):
        return False
    return any((Path(data) / name).is_file() for name in (_STATE, _SPLITS))


def dataset_rows(data: object) -> tuple[Sequence[Mapping[str, Any]], str, object]:
    """Returns the rows of a dataset, its name for error messages, and a value that identifies its content.

    Args:
        data: a `datasets.Dataset`, the directory of a saved one, or a sequence of dictionaries.

    Raises:
        DataError: there are several splits, the dataset cannot be read at random, or `datasets` is not installed.
    """
    name = "dataset"
    if is_saved_dataset(data):
        name = os.fspath(data)
        data = _load(name)
    if isinstance(data, Mapping):  # a DatasetDict, too
        example = "dataset['train']" if name == "dataset" else f"{name}/{next(iter(data), 'train')}"
        remedy, got = f"Pass one of them, such as {example}.", first_names(list(data))
        raise DataError("several splits of a dataset", where=name, got=got, expected="one split", remedy=remedy)
    if isinstance(data, str | bytes) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        got, remedy = type(data).__name__, "Write its records to a .jsonl file."
        expected = "a file, or a sequence of dictionaries such as a datasets.Dataset"
        raise DataError("cannot be read in random order", where=name, got=got, expected=expected, remedy=remedy)
    return cast("Sequence[Mapping[str, Any]]", data), name, getattr(data, "_fingerprint", None)


def _load(directory: str) -> object:
    try:
        import datasets
    except ImportError:
        what = "a saved Hugging Face dataset needs the library datasets, which is not installed"
        remedy = "Install it with pip install datasets, or write the records to a .jsonl file."
        raise DataError(what, where=directory, remedy=remedy) from None
    try:
        return datasets.load_from_disk(directory)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be loaded: {error}", where=directory) from error


# Reading


MAX_RECORD = 2**26
"""Bytes of the longest line that is read."""

_MAX_OPEN = 64
_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zX": "xz",
    b"PK\x03\x04": "zip",
}


class Record(NamedTuple):
    """One record.

    Attributes:
        source: where it is.
        data: bytes of a line or of a document, a row of a dataset, or token ids.
        ends_document: whether a document ends with the record; False for all but the last block of a long document.
    """

    source: Source
    data: Any
    ends_document: bool = True


class RecordReader(ABC):
    """Records in blocks.

    Attributes:
        num_blocks: number of blocks.
        blocks_per_pool: how many blocks are shuffled together. By default a block is a record, and all are permuted.
        identity: values that change whenever the records do, to compare with those of a saved state.
    """

    num_blocks: int
    blocks_per_pool: int = 1
    identity: dict[str, Any]

    def locate(self, block: int) -> Iterable[Any]:
        """Returns the locations of the records of a block, for `read`."""
        return (block,)

    @abstractmethod
    def read(self, location: Any) -> Record:
        """Returns the record at a location.

        Raises:
            DataError: the record cannot be read.
        """

    @abstractmethod
    def read_again(self, source: Source) -> Record:
        """Returns a record that was read before.

        Raises:
            DataError: the record cannot be read.
        """


class LineReader(RecordReader):
    """The lines of files, without blank ones; or, for text, blocks of lines.

    Args:
        block_size: bytes of a block.
        pool_size: bytes that are shuffled together.
        joined: a record is all the lines of a block, instead of one line.
    """

    def __init__(
        self, files: Sequence[Path], block_size: int = 2**18, *, pool_size: int = 2**26, joined: bool = False
    ) -> None:
        self._files, self._block_size, self._joined = list(map(str, files)), block_size, joined
        self._sizes = [file.stat().st_size for file in files]
        blocks = [-(-size // block_size) for size in self._sizes]
        self._first_block = np.cumsum([0, *blocks])
        self.num_blocks = int(self._first_block[-1])
        self.blocks_per_pool = max(1, pool_size // block_size)
        self.identity = {
            "files": [
                [Path(name).name, size, file_hash(name)] for name, size in zip(self._files, self._sizes, strict=True)
            ],
            "blocks": [block_size, self.blocks_per_pool, joined],
        }
        self._open = _OpenFiles()
        starts = [self._open.read(name, 0, 4) for name in self._files]
        self._first_byte = [len(_BOM) if start.startswith(_BOM) else 0 for start in starts]  # some editors write it
        for name, start in zip(self._files, starts, strict=True):
            for mark, kind in _COMPRESSED.items():
                if start.startswith(mark):
                    raise DataError(f"the file is compressed ({kind})", where=f"{name}:1", remedy="Decompress it.")
            if start.startswith(_UTF16):
                raise DataError("the file is UTF-16", where=f"{name}:1", expected="UTF-8", remedy="Convert it.")

    def locate(self, block: int) -> NDArray[np.int64]:
        """Returns (n, 3): file, first byte, and byte after the last one of each line, without its line end."""
        file = int(np.searchsorted(self._first_block, block, side="right")) - 1
        name, size = self._files[file], self._sizes[file]
        first = (block - int(self._first_block[file])) * self._block_size
        last = min(first + self._block_size, size)
        before = max(first - 1, 0)
        data = np.frombuffer(self._open.read(name, before, last - before), np.uint8)
        if len(data) < last - before:
            raise DataError("the file became shorter while it was read", where=name, got=f"{before + len(data)} bytes")
        newlines = np.flatnonzero(data == 10) + before
        starts = newlines[newlines < last - 1] + 1
        if first == 0:
            starts = np.concatenate([[self._first_byte[file]], starts])
        if len(starts) == 0:
            return np.empty((0, 3), np.int64)
        ends = np.append(starts[1:] - 1, self._line_end(name, int(starts[-1]), last, size))
        if self._joined:
            starts, ends = starts[:1], ends[-1:]
        lines = np.stack([np.full_like(starts, file), starts, ends], 1)
        return lines[ends > starts]

    def _line_end(self, name: str, start: int, scanned: int, size: int) -> int:
        """Returns the position of the next newline from the last byte before `scanned` on, or the end of the file."""
        position = max(start, scanned - 1)
        while position < size:
            data = self._open.read(name, position, 2**20)
            if not data:
                break
            if (found := data.find(b"\n")) >= 0:
                return position + found
            position += len(data)
        return size

    def read(self, location: Any) -> Record:
        """Returns a line, or the lines of a block with their line ends."""
        file, start, end = map(int, location)
        name, source = self._files[file], Source(self._files[file], start, "byte")
        if end - start > MAX_RECORD:
            got, remedy = f"{end - start} bytes", "Is this a file with one object per line?"
            raise DataError(
                "the line is too long", where=source, got=got, expected=f"at most {MAX_RECORD}", remedy=remedy
            )
        is_end = end + 1 >= self._sizes[file]
        data = self._open.read(name, start, end - start + (self._joined and not is_end))
        return Record(source, data, not self._joined or is_end)

    def read_again(self, source: Source) -> Record:
        """Returns a line again."""
        file = self._files.index(source.name)
        size = self._sizes[file]
        return self.read((file, source.start, self._line_end(source.name, source.start, source.start, size)))


def file_hash(file: str | os.PathLike[str]) -> str:
    """Returns a hash of the first and the last 64 KiB of a file, to notice that it was replaced."""
    try:
        with open(file, "rb") as stream:
            digest = hashlib.blake2b(stream.read(2**16), digest_size=8)
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - 2**16))
            digest.update(stream.read(2**16))
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=file) from error
    return digest.hexdigest()


class RowReader(RecordReader):
    """The rows of a sequence of dictionaries, such as a Hugging Face dataset.

    Args:
        name: name for error messages.
        identity: identifies the rows.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], name: str, identity: object) -> None:
        self._rows, self._name = rows, name
        self.num_blocks = len(rows)
        self.identity = {"rows": len(rows), "dataset": identity}
        if not self.num_blocks:
            raise DataError("the dataset is empty", where=name)

    def read(self, location: Any) -> Record:
        """Returns a row."""
        return Record(Source(self._name, location, "row"), self._rows[location])

    def read_again(self, source: Source) -> Record:
        """Returns a row again."""
        return self.read(source.start)


class _OpenFiles:
    """Reads ranges of files and keeps the last ones open."""

    def __init__(self) -> None:
        self._descriptors: OrderedDict[str, int] = OrderedDict()

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Returns up to `size` bytes; fewer at the end of the file only."""
        descriptor = self._descriptors.pop(name, None)
        if descriptor is None:
            try:
                descriptor = os.open(name, os.O_RDONLY)
            except OSError as error:
                raise DataError(f"cannot be opened: {error.strerror}", where=name) from error
        self._descriptors[name] = descriptor
        if len(self._descriptors) > _MAX_OPEN:
            os.close(self._descriptors.popitem(last=False)[1])
        parts = []
        while size and (data := os.pread(descriptor, min(size, 2**30), offset)):
            parts.append(data)
            offset, size = offset + len(data), size - len(data)
        return b"".join(parts)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        for descriptor in self._descriptors.values():
            close(descriptor)
