"""Records, and how they are read at random: each kind of storage divides its data into blocks, read in any order."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from ligerzoo.entries import is_object
from ligerzoo.errors import DataError
from ligerzoo.train.data.samples import Source

Fields = Mapping[str, Any]
"""The fields of a record, by name."""

Parse = Callable[[Any], Fields | None]
"""Returns the fields of a record's data; None if it is blank."""


class Record(NamedTuple):
    """One record.

    Attributes:
        source: where it is.
        data: bytes of text, a row of a dataset, or token ids.
        parse: returns the fields of the data; None for token ids.
        ends_document: whether a document ends with the record; False for all but the last block of a long document.
    """

    source: Source
    data: Any
    parse: Parse | None
    ends_document: bool = True

    def fields(self) -> Fields | None:
        """Returns the fields; None for a blank record.

        Raises:
            DataError: the record is malformed.
        """
        assert self.parse is not None
        return self.parse(self.data)


Holds = Literal["text", "tokens", "fields"]
"""What records are: text or tokens, if their format has no fields."""


class RecordReader(ABC):
    """Records in blocks.

    Attributes:
        num_blocks: number of blocks.
        blocks_per_pool: how many blocks are shuffled together. By default a block is a record, and all are permuted.
        identity: values that change whenever the records do, to compare with those of a saved state.
        holds: what the records are.
        names: names of the files, or of the dataset.
    """

    names: Sequence[str]
    holds: Holds = "fields"
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


def suffix_of(file: str | os.PathLike[str]) -> str:
    """Returns the suffix of a file's name in lower case: programs write .CSV and .JSONL, too."""
    return os.path.splitext(file)[1].lower()


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


def parse_row(data: object) -> Fields | None:
    """Returns a row of a dataset.

    Raises:
        DataError: the row is not a dictionary.
    """
    if is_object(data):
        return data
    raise DataError("not a dictionary", got=type(data).__name__)


@contextmanager
def needs_extra(what: str, package: str, where: object) -> Iterator[None]:
    """Names the extra to install if an import in the block lacks a package.

    Args:
        what: what needs it, such as "Parquet files need".
        where: the data.

    Raises:
        DataError: the package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        what = f"{what} the package {package}, which is not installed"
        raise DataError(what, where=where, remedy="Run `pip install 'ligerzoo[data]'`.") from error


class RowReader(RecordReader):
    """The rows of a sequence of dictionaries, such as a Hugging Face dataset.

    Args:
        name: name for error messages.
        identity: identifies the rows.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], name: str, identity: object) -> None:
        self._rows, self.names = rows, (name,)
        self.num_blocks = len(rows)
        self.identity = {"rows": len(rows), "dataset": identity}
        if not self.num_blocks:
            raise DataError("the dataset is empty", where=name)

    def read(self, location: Any) -> Record:
        """Returns a row."""
        return Record(Source(self.names[0], location, "row"), self._rows[location], parse_row)

    def read_again(self, source: Source) -> Record:
        """Returns a row again."""
        return self.read(source.start)
