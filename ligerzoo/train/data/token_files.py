"""Files of token ids: text that was tokenized before the training, mapped into memory.

Two formats are read:

- `NAME.npy`: a one-dimensional array of uint16, uint32, int32 or int64;
- `NAME.bin`: the ids as little-endian uint16 or uint32, without a header. `NAME.bin.json` says which:
  `{"dtype": "uint16", "tokens": 1000}`.

`write_tokens` writes the second one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ligerzoo.errors import DataError
from ligerzoo.train.data.records import Record, RecordReader, file_hash, suffix_of
from ligerzoo.train.data.samples import Source

_BIN_DTYPES, _NPY_DTYPES = ("uint16", "uint32"), ("uint16", "uint32", "int32", "int64")


class TokenReader(RecordReader):
    """Token files in records of `length` tokens; the last record of a file may be shorter.

    Args:
        length: tokens of a record.
        vocab_size: every id must be smaller.
    """

    holds = "tokens"

    def __init__(self, files: Sequence[Path], length: int, vocab_size: int) -> None:
        self.names, self._length, self._vocab_size = list(map(str, files)), length, vocab_size
        self._ids = [map_tokens(file) for file in files]
        self._first = np.cumsum([0, *(-(-len(ids) // length) for ids in self._ids)])
        self.num_blocks = int(self._first[-1])
        self.identity = {
            "files": [[file.name, len(ids), file_hash(file)] for file, ids in zip(files, self._ids, strict=True)],
            "blocks": length,
        }

    def read(self, location: Any) -> Record:
        """Returns the ids of a record."""
        file = int(np.searchsorted(self._first, location, side="right")) - 1
        start = (location - int(self._first[file])) * self._length
        ids = self._ids[file][start : start + self._length]
        source = Source(self.names[file], start, "token")
        if int(ids.max()) >= self._vocab_size or int(ids.min()) < 0:
            wrong = start + int(np.flatnonzero((ids >= self._vocab_size) | (ids < 0))[0])
            where, got, expected = source._replace(start=wrong), self._ids[file][wrong], f"0 to {self._vocab_size - 1}"
            remedy = "Was the file written with the tokenizer of this model?"
            raise DataError("the id is not in the vocabulary", where=where, got=got, expected=expected, remedy=remedy)
        return Record(source, ids.tolist(), None)

    def read_again(self, source: Source) -> Record:
        """Returns the ids of a record again."""
        file = self.names.index(source.name)
        return self.read(int(self._first[file]) + source.start // self._length)


def map_tokens(file: str | os.PathLike[str]) -> NDArray[Any]:
    """Maps a token file into memory, read-only.

    Raises:
        DataError: the file, or the description of a .bin file, is missing, malformed or empty.
    """
    path = Path(file)
    if suffix_of(path) == ".npy":
        try:
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"not a .npy file of numbers: {error}", where=path) from error
        if ids.ndim != 1 or ids.dtype.name not in _NPY_DTYPES:
            got, expected = f"{ids.dtype} of shape {ids.shape}", f"one dimension of {', '.join(_NPY_DTYPES)}"
            raise DataError("not an array of token ids", where=path, got=got, expected=expected)
    else:
        dtype, tokens = _read_description(path)
        if path.stat().st_size != tokens * dtype.itemsize:
            got, expected = f"{path.stat().st_size} bytes", f"{tokens * dtype.itemsize}"
            what = "the file does not have the size that its description says"
            raise DataError(what, where=path, got=got, expected=expected)
        ids = np.memmap(path, dtype, "r") if tokens else np.empty(0, dtype)
    if not len(ids):
        raise DataError("the file has no tokens", where=path)
    return np.asarray(ids)  # a view of the map; slicing np.memmap objects is slow


def _description_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _read_description(path: Path) -> tuple[np.dtype[Any], int]:
    where = _description_path(path)
    expected = 'such as {"dtype": "uint16", "tokens": 1000}'
    try:
        description = json.loads(where.read_bytes())
    except FileNotFoundError:
        what, remedy = "the description of the token file is missing", "Write it, or convert the file to .npy."
        raise DataError(what, where=where, expected=expected, remedy=remedy) from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read: {error}", where=where, expected=expected) from error
    match description:
        case {"dtype": "uint16" | "uint32" as dtype, "tokens": int(tokens)} if tokens >= 0:
            return np.dtype(dtype).newbyteorder("<"), tokens
    raise DataError("not the description of a token file", where=where, got=str(description), expected=expected)


class TokenWriter:
    """Writes a .bin token file and its description; both appear when the block ends without an exception.

    Args:
        file: the file, `NAME.bin`.
        vocab_size: ids are smaller. uint16 is used up to 65,536, else uint32.
    """

    def __init__(self, file: str | os.PathLike[str], vocab_size: int) -> None:
        self._path = Path(file)
        if self._path.suffix != ".bin":
            raise DataError("not a name of a token file", where=file, expected="NAME.bin")
        self._dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
        self._unfinished = self._path.with_name(f".{self._path.name}.unfinished")
        self.tokens = 0

    def __enter__(self) -> TokenWriter:
        self._stream = self._unfinished.open("wb")
        return self

    def write(self, ids: Sequence[int]) -> None:
        """Appends token ids."""
        self._stream.write(np.asarray(ids, self._dtype).tobytes())
        self.tokens += len(ids)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._stream.flush()
                os.fsync(self._stream.fileno())
        finally:
            self._stream.close()
            if kind is not None:
                self._unfinished.unlink()
        if kind is None:
            name = _BIN_DTYPES[self._dtype.itemsize == 4]
            description = json.dumps({"dtype": name, "tokens": self.tokens})
            _description_path(self._path).write_text(description + "\n")
            os.replace(self._unfinished, self._path)
