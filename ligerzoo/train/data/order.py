"""The order in which records are read, shuffled with bounded memory, from any position.

A pool is a number of blocks that are chosen at random; the records of a pool are permuted at random. So:

- Data that fits in one pool (64 MiB of a text file), rows of datasets and records of token files are permuted
  uniformly.
- In larger text files, records that are neighbours in the file (within 256 KiB) are read in the same pool. The records
  of a batch come from 256 random parts of the data.

All random numbers come from the seed, the epoch and the pool. So a position is three numbers, and nothing is read to
continue from it but the records of its pool.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from ligerzoo.errors import DataError
from ligerzoo.train.data.records import Record, RecordReader


class Position(NamedTuple):
    """A position in the order: a record of a pool of an epoch."""

    epoch: int = 0
    pool: int = 0
    record: int = 0


class Order:
    """The records of a reader in a reproducible order.

    Args:
        reader: reads the records.
        seed: selects the order.
        shuffle: whether the order is random. Otherwise it is that of the files.
        epochs: how often all records are read, each time in another order; None for no end.
    """

    def __init__(self, reader: RecordReader, *, seed: int, shuffle: bool, epochs: int | None) -> None:
        self._reader, self._seed, self._shuffle, self._epochs = reader, seed, shuffle, epochs
        self._pools = -(-reader.num_blocks // reader.blocks_per_pool)

    def records(self, start: Position) -> Iterator[tuple[Position, Record | DataError]]:
        """Yields the records from a position on, each with its position; or the error of one that cannot be read."""
        for epoch in itertools.count(start.epoch) if self._epochs is None else range(start.epoch, self._epochs):
            is_empty = True
            for pool in range(start.pool if epoch == start.epoch else 0, self._pools):
                locations = self._locations(epoch, pool)
                is_empty = is_empty and not locations
                order = Permutation(len(locations), self._seed, epoch, pool) if self._shuffle else range(len(locations))
                first = start.record if (epoch, pool) == start[:2] else 0
                for index in range(first, len(locations)):
                    record: Record | DataError
                    try:
                        record = self._reader.read(locations[order[index]])
                    except DataError as error:
                        record = error
                    yield Position(epoch, pool, index), record
            if is_empty and start[1:] == (0, 0):
                files = self._reader.identity.get("files", ())
                raise DataError("the data has no records", where=", ".join(name for name, *_ in files) or None)

    def _locations(self, epoch: int, pool: int) -> list[object]:
        blocks = range(
            pool * self._reader.blocks_per_pool,
            min((pool + 1) * self._reader.blocks_per_pool, self._reader.num_blocks),
        )
        if self._shuffle:
            order = Permutation(self._reader.num_blocks, self._seed, epoch)
            blocks_read: Iterator[int] = (order[block] for block in blocks)
        else:
            blocks_read = iter(blocks)
        return list(itertools.chain.from_iterable(map(self._reader.locate, blocks_read)))


_ROUNDS = 6
_MASK = 2**64 - 1


class Permutation:
    """A permutation of 0, ..., n - 1; `permutation[i]` takes about 3 us.

    Args:
        n: how many numbers.
        key: selects the permutation; any values, distinguished by their `repr`.
    """

    def __init__(self, n: int, *key: object) -> None:
        self.n = n
        self._half = max(4, ((n - 1).bit_length() + 1) // 2)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]

    def __getitem__(self, i: int) -> int:
        if not 0 <= i < self.n:
            raise IndexError(f"permutation index: got {i}; expected 0 to {self.n - 1}")
        half, low = self._half, 2**self._half - 1
        while True:
            left, right = i >> half, i & low
            for key in self._keys:
                x = (right + key) * 0x9E3779B97F4A7C15 & _MASK
                x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93 & _MASK
                left, right = right, left ^ ((x >> 40) & low)
            i = left << half | right
            if i < self.n:
                return i

    def __len__(self) -> int:
        return self.n
