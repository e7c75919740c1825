"""Parquet files as records: a block is a row group. Needs pyarrow, which comes with `datasets`.

Row groups can be as large as their file. So one is decoded in parts, to a temporary file that is mapped into memory:
the rows of groups that are shuffled together are read at random, and the memory does not grow with them.
"""

from __future__ import annotations

import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ligerzoo.errors import DataError
from ligerzoo.train.data.records import Record, RecordReader, needs_extra, parse_row
from ligerzoo.train.data.samples import Source

_POOL = 2**26  # bytes that are shuffled together
_BATCH = 1024  # rows that are decoded at once
_BUFFER = 2**20  # bytes of a column that are read at once
_MAX_OPEN = 64


_Batches = tuple[list[Any], NDArray[np.int64]]
"""The batches of a row group, and the first row of each."""


class ParquetReader(RecordReader):
    """The rows of Parquet files.

    Args:
        files: their names.
        identify: returns what identifies a file.
        open_file: returns what pyarrow reads, given a name; None for files of this machine.

    Raises:
        DataError: a file is not Parquet, or has no rows; or pyarrow is not installed.
    """

    def __init__(
        self,
        files: Sequence[str],
        identify: Callable[[str], list[object]],
        open_file: Callable[[str], object] = lambda name: name,
    ) -> None:
        with needs_extra("Parquet files need", "pyarrow", where=files[0]):
            import pyarrow
            from pyarrow.parquet import ParquetFile
        self._arrow, self._parquet_file, self._open_file = pyarrow, ParquetFile, open_file
        self.names, self._open_files = list(files), OrderedDict[int, Any]()
        counts, sizes = [], []
        for file in range(len(files)):
            metadata = self._opened(file).metadata
            groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
            counts += [(file, number, group.num_rows) for number, group in enumerate(groups) if group.num_rows]
            sizes += [group.total_byte_size for group in groups]
        self._groups = counts
        rows = np.array([count for _, _, count in counts], np.int64)
        self._first_row = np.cumsum(rows) - rows if len(rows) else rows
        of_file = np.array([file for file, _, _ in counts], np.int64)
        self._first_of_file = [int(rows[of_file < file].sum()) for file in range(len(files))]
        self.num_blocks = len(counts)
        self.blocks_per_pool = max(1, _POOL * len(sizes) // max(1, sum(sizes)))
        self.identity = {"files": list(map(identify, files)), "blocks": [self.num_blocks, self.blocks_per_pool]}
        self._decoded: OrderedDict[int, _Batches] = OrderedDict()
        self._lock = threading.Lock()
        if not counts:
            raise DataError("the file has no rows", where=files[0])

    def _opened(self, file: int) -> Any:
        """Returns the opened file, of which the last ones are kept."""
        found = self._open_files.pop(file, None)
        if found is None:
            try:
                found = self._parquet_file(self._open_file(self.names[file]), memory_map=True, buffer_size=_BUFFER)
            except (self._arrow.ArrowException, OSError) as error:
                raise DataError(f"not a Parquet file: {error}", where=self.names[file]) from error
        self._open_files[file] = found
        if len(self._open_files) > _MAX_OPEN:
            self._open_files.popitem(last=False)[1].close()
        return found

    def locate(self, block: int) -> Iterable[tuple[int, int]]:
        """Returns (row group, row of the group)."""
        return ((block, row) for row in range(self._groups[block][2]))

    def read(self, location: Any) -> Record:
        """Returns a row."""
        block, row = location
        file = self._groups[block][0]
        source = Source(self.names[file], int(self._first_row[block]) - self._first_of_file[file] + row, "row")
        table, first = self._table(block)
        index = int(np.searchsorted(first, row, side="right")) - 1
        (found,) = table[index].slice(row - int(first[index]), 1).to_pylist()
        return Record(source, found, parse_row)

    def read_again(self, source: Source) -> Record:
        """Returns a row again."""
        row = source.start + self._first_of_file[self.names.index(source.name)]
        block = int(np.searchsorted(self._first_row, row, side="right")) - 1
        return self.read((block, row - int(self._first_row[block])))

    def _table(self, block: int) -> _Batches:
        """Returns the batches of a row group, and the first row of each. Those of a pool are kept."""
        with self._lock:  # of training and evaluation on the same data, and of threads that read images
            found = self._decoded.pop(block, None)
            if found is None:
                if len(self._decoded) > self.blocks_per_pool:
                    self._decoded.popitem(last=False)
                found = self._decode(block)
            self._decoded[block] = found
            return found

    def _decode(self, block: int) -> _Batches:
        arrow = self._arrow
        file, group, _ = self._groups[block]
        parquet = self._opened(file)
        try:
            with tempfile.NamedTemporaryFile(prefix="ligerzoo-", suffix=".arrow") as target:
                with (
                    arrow.OSFile(target.name, "wb") as sink,
                    arrow.ipc.new_stream(sink, parquet.schema_arrow) as writer,
                ):
                    for batch in parquet.iter_batches(_BATCH, row_groups=[group]):
                        writer.write_batch(batch)
                batches = list(
                    arrow.ipc.open_stream(arrow.memory_map(target.name))
                )  # stay mapped when the file is deleted
        except (self._arrow.ArrowException, OSError) as error:
            raise DataError(f"row group {group} cannot be decoded: {error}", where=self.names[file]) from error
        return batches, np.cumsum([0, *(len(batch) for batch in batches[:-1])])
