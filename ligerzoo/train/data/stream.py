"""A stream of samples: records are read in a reproducible order and encoded in the background."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from ligerzoo.errors import DataError
from ligerzoo.train.data.fields import Kind
from ligerzoo.train.data.images import SampleImages
from ligerzoo.train.data.order import Order, Position
from ligerzoo.train.data.records import Record, RecordReader
from ligerzoo.train.data.sample_encoder import Result
from ligerzoo.train.data.samples import AnySample

_CHUNK = 16  # records that a thread encodes at once

Encode = Callable[[Sequence[Record]], list[Result]]


def no_samples(where: str) -> DataError:
    """Returns the error of data that is read to its end without a sample."""
    return DataError(
        "the data has no samples", where=where,
        remedy="Samples that are dropped, or truncated before their first trained token, need a larger seq_length.",
    )  # fmt: skip


class SampleStream:
    """Samples in a reproducible order, which depends on the data and the seed only; see `open_data`.

    Args:
        reader: reads the records.
        encode: encodes records.
        kind: the kind of the records.
        identity: options that determine the samples, compared when a state is loaded.
        seed: selects the order.
        shuffle: whether the order is random.
        epochs: how often the data is read; None for no end.
        workers: threads that encode records.
        images: reads the images of samples; None for text only.

    Attributes:
        kind: the kind of the records.
        images: as given.
    """

    def __init__(
        self,
        reader: RecordReader,
        encode: Encode,
        *,
        kind: Kind,
        identity: Mapping[str, Any],
        seed: int,
        shuffle: bool,
        epochs: int | None,
        workers: int,
        images: SampleImages | None = None,
    ) -> None:
        self.kind, self.images = kind, images
        self._order = Order(reader, seed=seed, shuffle=shuffle, epochs=epochs)
        self._encode, self._workers = encode, workers
        self._identity = {**reader.identity, "kind": kind, "seed": seed, "shuffle": shuffle, **identity}
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
                raise no_samples(", ".join(name for name, *_ in self._identity.get("files", ())) or "data")
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
                raise DataError(
                    "the data has changed, so the training cannot be continued", where=name,
                    got=self._identity.get(name), expected=saved.get(name),
                )  # fmt: skip
        self.close()
        self._position, self._counts = Position(*state["position"]), Counter(state["counts"])

    def close(self) -> None:
        """Ends the threads. The stream continues from its position when it is used again."""
        self._samples = None
