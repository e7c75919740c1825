"""Text files as records: a block of a file is a range of bytes, which owns the records that begin in it.

So files need no index of their records: the first block of a file of any size is read at once. Of formats whose records
do not end at every line end, the file is scanned once for the state at the beginning of each block.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ligerzoo.errors import DataError
from ligerzoo.train.data.records import Holds, Record, RecordReader, file_hash, suffix_of
from ligerzoo.train.data.samples import Source
from ligerzoo.train.data.separators import Bytes, Positions
from ligerzoo.train.data.text_formats import MAX_RECORD, OpenFormat, TextFormat

_MAX_OPEN = 64
_SEARCHED = 2**16  # bytes that are read at once to find the end of a record


class _File(NamedTuple):
    """A text file.

    Attributes:
        name: its path.
        size: bytes.
        format: its format.
        last: the byte after its last record.
        states: the state at the beginning of each block; nothing if the format has none.
        begins: the blocks at whose beginning a record begins, likewise.
    """

    name: str
    size: int
    format: TextFormat
    last: int
    states: Sequence[int] = ()
    begins: Collection[int] = ()

    def state(self, block: int) -> int:
        """Returns the state at the beginning of a block."""
        return self.states[block] if self.states else 0


class TextReader(RecordReader):
    """The records of text files, without blank lines; or, for text, blocks of lines.

    Args:
        formats: returns the format of a file, by its suffix.
        block_size: bytes of a block.
        pool_size: bytes that are shuffled together.
        joined: a record is all the lines of a block, instead of one line.
        holds: see `RecordReader`.

    Raises:
        DataError: a file cannot be read, or is not of its format.
    """

    def __init__(
        self,
        files: Sequence[Path],
        formats: Mapping[str, OpenFormat],
        block_size: int = 2**18,
        *,
        pool_size: int = 2**26,
        joined: bool = False,
        holds: Holds = "fields",
    ) -> None:
        self._block_size, self._joined, self.holds = block_size, joined, holds
        self._open = _OpenFiles()
        self._files = [self._opened(file, formats[suffix_of(file)]) for file in files]
        self.names = [file.name for file in self._files]
        blocks = [-(-file.size // block_size) for file in self._files]
        self._first_block = np.cumsum([0, *blocks])
        self.num_blocks = int(self._first_block[-1])
        self.blocks_per_pool = max(1, pool_size // block_size)
        self.identity = {
            "files": [[Path(file.name).name, file.size, file_hash(file.name)] for file in self._files],
            "blocks": [block_size, self.blocks_per_pool, joined],
        }

    def _opened(self, path: Path, open_format: OpenFormat) -> _File:
        name, size = str(path), path.stat().st_size
        found = open_format(partial(self._open.read, name), size, name)
        last = size if found.last is None else found.last
        file = _File(name, size, found, last)
        if not found.separators.has_states:
            return file
        states, begins = [0], set[int]()
        for block, start in enumerate(range(0, size, self._block_size)):
            data = self._bytes(file, start, start + self._block_size)
            states.append(found.separators.state_after(data, states[block]))
            is_whole = start + self._block_size <= last
            if is_whole and states[-1] == 0 and len(data) and data[-1] == found.separators.byte:
                begins.add(block + 1)
        return file._replace(states=states, begins=begins)

    def _scan(self, file: _File, first: int, last: int, state: int) -> tuple[Positions, int]:
        """Returns the separators in a range of a file, between its first and last record, and the state after it."""
        data = self._bytes(file, first, last)
        if not len(data):
            return np.empty(0, np.int64), state
        ends, state = file.format.separators.scan(data, state)
        return ends + max(first, file.format.first), state

    def _bytes(self, file: _File, first: int, last: int) -> Bytes:
        """Returns a range of a file, between its first and last record."""
        first, last = max(first, file.format.first), min(last, file.last)
        data = np.frombuffer(self._open.read(file.name, first, max(0, last - first)), np.uint8)
        if len(data) < last - first:
            got = f"{first + len(data)} bytes"
            raise DataError("the file became shorter while it was read", where=file.name, got=got)
        return data

    def locate(self, block: int) -> NDArray[np.int64]:
        """Returns (n, 3): file, first byte, and byte after the last one of each record, without its separator."""
        index = int(np.searchsorted(self._first_block, block, side="right")) - 1
        file = self._files[index]
        number = block - int(self._first_block[index])
        first = number * self._block_size
        last = max(first, min(first + self._block_size, file.last))
        if file.format.separators.has_states:
            ends, _ = self._scan(file, first, last, file.state(number))
            ends = np.concatenate([[first - 1], ends]) if number in file.begins else ends
        else:
            ends, _ = self._scan(file, first - 1, last, 0)
        starts = ends[ends < last - 1] + 1
        if first <= file.format.first < last:
            starts = np.concatenate([[file.format.first], starts])
        if len(starts) == 0:
            return np.empty((0, 3), np.int64)
        is_complete = len(ends) > 0 and ends[-1] >= starts[-1]
        final = ends[-1] if is_complete else self._end(file, last, file.state(number + 1))
        ends = np.append(starts[1:] - 1, final)
        if self._joined:
            starts, ends = starts[:1], ends[-1:]
        records = np.stack([np.full_like(starts, index), starts, ends], 1)
        return records[ends > starts]

    def _end(self, file: _File, position: int, state: int) -> int:
        """Returns the position of the next separator from a position on, or the end of the last record."""
        while position < file.last:
            ends, state = self._scan(file, position, position + _SEARCHED, state)
            if len(ends):
                return int(ends[0])
            position += _SEARCHED
        return file.last

    def read(self, location: Any) -> Record:
        """Returns a record, or the lines of a block with their line ends."""
        index, start, end = map(int, location)
        file = self._files[index]
        if end - start > MAX_RECORD:
            got, remedy = f"{end - start} bytes", f"Is this {file.format.expected}?"
            where, expected = Source(file.name, start, "byte"), f"at most {MAX_RECORD}"
            raise DataError("the record is too long", where=where, got=got, expected=expected, remedy=remedy)
        is_end = end + 1 >= file.size
        data = self._open.read(file.name, start, end - start + (self._joined and not is_end))
        text = data.lstrip(file.format.blank)
        source = Source(file.name, start + len(data) - len(text), "byte")
        return Record(source, text, file.format.parse, not self._joined or is_end)

    def read_again(self, source: Source) -> Record:
        """Returns a record again."""
        index = self.names.index(source.name)
        return self.read((index, source.start, self._end(self._files[index], source.start, 0)))


class _OpenFiles:
    """Reads ranges of files and keeps the last ones open, for several threads."""

    def __init__(self) -> None:
        self._descriptors: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Returns up to `size` bytes; fewer at the end of the file only."""
        with self._lock:
            return self._read(name, offset, size)

    def _read(self, name: str, offset: int, size: int) -> bytes:
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
