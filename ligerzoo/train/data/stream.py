"""A stream of samples: records are read in a reproducible order, and encoded in the background.

The order is shuffled with bounded memory, from any position. A pool is a number of blocks that are chosen at random;
the records of a pool are permuted at random. So:

- Data that fits in one pool (64 MiB of a text or Parquet file), rows of datasets and records of token files are
  permuted uniformly.
- In larger text files, records that are neighbours in the file (within 256 KiB) are read in the same pool. The records
  of a batch come from 256 random parts of the data.

All random numbers come from the seed, the epoch and the pool. So a position is three numbers for each source, and
nothing is read to continue from it but the records of its pool.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Self

from ligerzoo.errors import DataError
from ligerzoo.train.data.images import SampleImages
from ligerzoo.train.data.records import Record
from ligerzoo.train.data.sample_encoder import Result
from ligerzoo.train.data.samples import AnySample
from ligerzoo.train.data.sources import DataSource
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


class Progress(NamedTuple):
    """How far a source is read: the position that follows, and the number of records."""

    position: Position = Position()
    records: int = 0


SourceProgress = tuple[Progress, ...]
"""How far each source is read."""


def first_epoch(progress: SourceProgress) -> int:
    """Returns the epoch of the source that was read least often."""
    return min((one.position.epoch for one in progress), default=0)


class Order:
    """The records of sources in a reproducible order.

    Records of several sources alternate such that after any number of them each source has its share, up to about one
    record. A source that is shorter than others is repeated, until all have been read as often as
    asked. In the order of the files, sources follow each other, and are read equally often.

    Args:
        sources: sources of one kind.
        options: the order, and how often all records are read.

    Attributes:
        sources: as given.
        kind: the kind of the records.
        identity: what determines the records and their order, without the number of epochs.
        name: the names of the files, or "data".
    """

    def __init__(self, sources: Sequence[DataSource], options: ReadOrder) -> None:
        self.sources, self._seed, self._shuffle, self._epochs = sources, options.seed, options.shuffle, options.epochs
        self.kind, self.name = sources[0].kind, ", ".join(source.name for source in sources)
        identities = [source.identity for source in sources]
        weights = [source.weight for source in sources]
        self._weights = [(weight or 1) / sum(one or 1 for one in weights) for weight in weights]
        own = identities[0] if weights == [None] else {"sources": identities, "weights": weights}
        self.identity = {**own, "kind": self.kind, "seed": options.seed, "shuffle": options.shuffle}

    def records(self, start: SourceProgress = ()) -> Iterator[tuple[SourceProgress, Record | DataError]]:
        """Yields the records from `start` on, or errors of unreadable ones, each with the progress after it."""
        progress = [*(start or [Progress()] * len(self.sources))]
        is_mixed = self._shuffle and len(self.sources) > 1
        for index, position, record in self._mixed(progress) if is_mixed else self._chained(progress):
            progress[index] = Progress(position._replace(record=position.record + 1), progress[index].records + 1)
            yield tuple(progress), record

    def _chained(self, progress: list[Progress]) -> Iterator[tuple[int, Position, Record | DataError]]:
        """Yields the records of one source after the other, in each epoch; see `records`."""
        first = min(one.position.epoch for one in progress)
        for epoch in itertools.count(first) if self._epochs is None else range(first, self._epochs):
            for index, source in enumerate(self.sources):
                start = max(progress[index].position, Position(epoch))
                for position, record in self._of_epoch(source, start) if start.epoch == epoch else ():
                    yield index, position, record
                progress[index] = progress[index]._replace(position=max(start, Position(epoch + 1)))

    def _mixed(self, progress: list[Progress]) -> Iterator[tuple[int, Position, Record | DataError]]:
        """Yields the records of the sources alternately, see `records`."""

        def endless(source: DataSource, start: Position) -> Iterator[tuple[Position, Record | DataError]]:
            for epoch in itertools.count(start.epoch):
                yield from self._of_epoch(source, max(start, Position(epoch)))

        streams = [endless(source, one.position) for source, one in zip(self.sources, progress, strict=True)]
        upcoming = list(map(next, streams))
        while self._epochs is None or any(position.epoch < self._epochs for position, _ in upcoming):
            total = 1 + sum(one.records for one in progress)
            missing = [weight * total - one.records for weight, one in zip(self._weights, progress, strict=True)]
            index = missing.index(max(missing))
            yield index, *upcoming[index]
            upcoming[index] = next(streams[index])

    def _of_epoch(self, source: DataSource, start: Position) -> Iterator[tuple[Position, Record | DataError]]:
        """Yields the records of a source from a position to the end of its epoch, each with its position."""
        is_empty = start == Position(start.epoch)
        for pool in range(start.pool, -(-source.num_blocks // source.blocks_per_pool)):
            locations = self._locations(source, start.epoch, pool)
            is_empty = is_empty and not locations
            keys = self._seed, start.epoch, pool
            order = Permutation(len(locations), *keys) if self._shuffle else range(len(locations))
            for index in range(start.record if pool == start.pool else 0, len(locations)):
                record: Record | DataError
                try:
                    record = source.read(locations[order[index]])
                except DataError as error:
                    record = error
                yield Position(start.epoch, pool, index), record
        if is_empty:
            raise DataError("the data has no records", where=source.name)

    def _locations(self, source: DataSource, epoch: int, pool: int) -> list[object]:
        size, count = source.blocks_per_pool, source.num_blocks
        blocks: Iterable[int] = range(pool * size, min((pool + 1) * size, count))
        if self._shuffle:
            order = Permutation(count, self._seed, epoch)
            blocks = map(order.__getitem__, blocks)
        return list(itertools.chain.from_iterable(map(source.locate, blocks)))


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
        encode: returns the samples of records.
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
        self._progress, self._counts = SourceProgress(), Counter[str]()
        self._samples: Iterator[AnySample] | None = None

    @property
    def dropped(self) -> int:
        """Number of records without a sample, blank lines included, before the next sample since the training began."""
        return self._counts["dropped"]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> AnySample:
        if self._samples is None:
            self._samples = self._generate()
        return next(self._samples)

    @property
    def names(self) -> list[str]:
        """The names of the files and datasets."""
        return [name for source in self._order.sources for name in source.names]

    @property
    def notes(self) -> list[str]:
        """Lines to print about the data, such as whose fields it has."""
        return [note for source in self._order.sources for note in source.notes]

    @property
    def unread(self) -> list[str]:
        """The fields of the first records that are not read, such as ids."""
        return [*dict.fromkeys(name for source in self._order.sources for name in source.unread)]

    def results(self) -> Iterator[tuple[SourceProgress, Result]]:
        """Yields what each record gives, its samples or its error, from the current position on."""
        records = self._order.records(self._progress)
        chunks = iter(lambda: list(itertools.islice(records, _CHUNK)), [])
        pending: deque[tuple[list[SourceProgress], Future[list[Result]]]] = deque()
        # Never shut down here: the garbage collector may close this generator in a thread that would wait for itself.
        # The threads end when the executor is garbage-collected.
        executor = ThreadPoolExecutor(self._workers, thread_name_prefix="ligerzoo-data")
        for chunk in itertools.chain(chunks, itertools.repeat(None)):
            if chunk is not None:
                progress, read = zip(*chunk, strict=True)
                pending.append((list(progress), executor.submit(self._encode_read, list(read))))
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
        last, samples = first_epoch(self._progress), list[AnySample]()  # of the last record with a sample
        for progress, result in self.results():
            epoch = first_epoch(progress)
            if result:
                yield from samples  # after the records without a sample that follow: the count has all of them
                if isinstance(result, DataError):
                    raise result
                last, samples = epoch, result
            elif epoch > last + 1:  # without an end, the search would not end either
                raise no_samples(self._order.name)
            self._progress = progress
            self._counts["dropped"] += not result
        yield from samples

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last sample that was yielded, as JSON values."""
        progress = self._progress or (Progress(),) * len(self._order.sources)
        position = [*progress[0].position] if len(progress) == 1 else [[*one.position, one.records] for one in progress]
        return {"position": position, "counts": dict(self._counts), "data": self._identity}

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
        position = state["position"]
        several = [[*position, 0]] if len(self._order.sources) == 1 else position
        self._progress = tuple(Progress(Position(*one[:3]), one[3]) for one in several)
        self._counts = Counter(state["counts"])

    def close(self) -> None:
        """Ends the threads. The stream continues from its position when it is used again."""
        self._samples = None
