"""A stream of samples: records are read in a reproducible order, and encoded in the background.

The order is shuffled with bounded memory, from any position. A pool is a number of blocks that are chosen at random;
the records of a pool are permuted at random. So:

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
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Self

from ligerzoo.errors import DataError
from ligerzoo.train.data.fields import Kind
from ligerzoo.train.data.images import SampleImages
from ligerzoo.train.data.records import Record, RecordReader
from ligerzoo.train.data.sample_encoder import Result
from ligerzoo.train.data.samples import AnySample
from ligerzoo.train.data_options import ReadOrder

_CHUNK = 16  # records that a thread encodes at once

Encode = Callable[[Sequence[Record]], list[Result]]


def no_samples(where: str) -> DataError:
    """Returns the error of data that is read to its end without a sample."""
    remedy = "Samples that are dropped, or truncated before their first trained token, need a larger seq_length."
    return DataError("the data has no samples", where=where, remedy=remedy)


class Position(NamedTuple):
    """A position in the order: a record of a pool of an epoch."""

    epoch: int = 0
    pool: int = 0
    record: int = 0


class Order:
    """The records of a reader in a reproducible order.

    Args:
        kind: their kind.
        options: the order, and how often all records are read.

    Attributes:
        kind: as given.
        identity: what determines the records and their order, without the number of epochs.
        names: the names of the files, or "data".
    """

    def __init__(self, reader: RecordReader, kind: Kind, options: ReadOrder) -> None:
        self._reader, self._seed, self._shuffle, self._epochs = reader, options.seed, options.shuffle, options.epochs
        self.kind = kind
        self.identity = {**reader.identity, "kind": kind, "seed": options.seed, "shuffle": options.shuffle}
        self.names = ", ".join(name for name, *_ in reader.identity.get("files", ())) or "data"
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
                raise DataError("the data has no records", where=self.names)

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


class SampleStream:
    """Samples in a reproducible order, which depends on the data and the seed only; see `open_data`.

    Args:
        order: yields the records.
        identity: options that determine the samples, compared when a state is loaded.
        workers: threads that encode records.
        images: reads the images of samples; None for text only.

    Attributes:
        kind: the kind of the records.
        images: as given.
    """

    def __init__(
        self,
        order: Order,
        encode: Encode,
        *,
        identity: Mapping[str, Any],
        workers: int,
        images: SampleImages | None = None,
    ) -> None:
        self.kind, self.images = order.kind, images
        self._order, self._encode, self._workers = order, encode, workers
        self._identity = {**order.identity, **identity}
        self._position, self._counts = Position(), Counter[str]()
        self._samples: Iterator[AnySample] | None = None

    @property
    def dropped(self) -> int:
        """Number of records without a sample since the start of the training, blank lines included."""
        return self._counts["dropped"]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> AnySample:
        if self._samples is None:
            self._samples = self._generate()
        return next(self._samples)

    def results(self) -> Iterator[tuple[Position, Result]]:
        """Yields what each record gives, its samples or its error, from the current position on."""
        records = self._order.records(self._position)
        chunks = iter(lambda: list(itertools.islice(records, _CHUNK)), [])
        pending: deque[tuple[list[Position], Future[list[Result]]]] = deque()
        # Never shut down here: the garbage collector may close this generator in a thread that would wait for itself.
        # The threads end when the executor is garbage-collected.
        executor = ThreadPoolExecutor(self._workers, thread_name_prefix="ligerzoo-data")
        for chunk in itertools.chain(chunks, itertools.repeat(None)):
            if chunk is not None:
                positions, read = zip(*chunk, strict=True)
                pending.append((list(positions), executor.submit(self._encode_read, list(read))))
                if len(pending) <= 2 * self._workers:
                    continue
            elif not pending:
                return
            done, future = pending.popleft()
            yield from zip(done, future.result(), strict=True)

    def _encode_read(self, read: list[Record | DataError]) -> list[Result]:
        encoded = iter(self._encode([record for record in read if isinstance(record, Record)]))
        return [next(encoded) if isinstance(record, Record) else record for record in read]

    def _generate(self) -> Iterator[AnySample]:
        last = self._position.epoch  # the last epoch with a sample
        for position, result in self.results():
            if isinstance(result, DataError):
                raise result
            if result:
                last = position.epoch
            elif position.epoch > last + 1:  # without an end, the search would not end either
                raise no_samples(self._order.names)
            self._position = position._replace(record=position.record + 1)
            self._counts["dropped"] += not result
            yield from result

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last sample that was yielded, as JSON values."""
        return {"position": list(self._position), "counts": dict(self._counts), "data": self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the last sample that was yielded before `state_dict`.

        Raises:
            DataError: the data or an option that determines the samples has changed.
        """
        saved = state["data"]
        for name in sorted({*saved, *self._identity}):
            if saved.get(name) != self._identity.get(name):
                what, own = "the data has changed, so the training cannot be continued", self._identity.get(name)
                raise DataError(what, where=name, got=own, expected=saved.get(name))
        self.close()
        self._position, self._counts = Position(*state["position"]), Counter(state["counts"])

    def close(self) -> None:
        """Ends the threads. The stream continues from its position when it is used again."""
        self._samples = None
