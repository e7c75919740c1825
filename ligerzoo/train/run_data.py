"""The data of a run whose batches come from files: samples, packed batches, and the number of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Literal

from ligerzoo import Tokenizer
from ligerzoo.train import processes
from ligerzoo.train.data import (
    Kind,
    PackedBatches,
    PaddedBatches,
    SampleStream,
    check_data,
    format_sample,
    open_data,
)
from ligerzoo.train.run_options import BatchOptions
from ligerzoo.train.starting import count_steps, make_batches


class RunData:
    """The data of a run.

    Args:
        options: options of the run.
        tokenizer: the tokenizer.
        kind: kind of the records; "auto" for that of the first one.
        pin_memory: whether batches are in pinned memory, to copy them to a GPU.
        packing: see `make_batches`.
        encoding: further options of `open_data`.
    """

    def __init__(
        self, options: BatchOptions, tokenizer: Tokenizer, kind: Kind | Literal["auto"], *, pin_memory: bool,
        packing: str = "auto", **encoding: Any,
    ) -> None:  # fmt: skip
        self._options, self._tokenizer, self._kind = options, tokenizer, kind
        self._rows: dict[str, Any] = {
            "packing": packing, "pin_memory": pin_memory, "batch_size": options.batch_size,
            "seq_length": options.seq_length,
        }  # fmt: skip
        self._encoding = {"seq_length": options.seq_length, "too_long": options.too_long, **encoding}

    def samples(self, paths: tuple[str, ...], **given: Any) -> SampleStream:
        """Returns the samples of files, in the order of the seed."""
        return open_data(paths, self._kind, self._tokenizer, seed=self._options.seed, **self._encoding, **given)

    def batches(self, paths: tuple[str, ...], **given: Any) -> PackedBatches | PaddedBatches:
        """Returns the batches of this process."""
        return make_batches(self.samples(paths, **given), self._tokenizer, **self._rows)

    def training(self) -> PackedBatches | PaddedBatches:
        """Returns the batches that are trained."""
        return self.batches(self._options.data, epochs=self._epochs)

    def count_steps(self) -> int:
        """Returns the number of steps of the run; reads all data if it depends on that."""
        return self._options.max_steps or count_steps(self.training(), self._options.accumulate)

    def once(self, paths: tuple[str, ...]) -> PackedBatches | PaddedBatches:
        """Returns all batches of files in their order, such as evaluation data."""
        return self.batches(paths, epochs=1, shuffle=False)

    def first_samples(self, paths: tuple[str, ...], count: int) -> Iterator[Any]:
        """Returns the first samples of files."""
        return islice(self.samples(paths, epochs=1, shuffle=False), count)

    def show(self) -> None:
        """Prints the first three samples, with the trained tokens in colour."""
        for sample in islice(self.samples(self._options.data, epochs=1), 3):
            processes.say(format_sample(sample, self._tokenizer, max_tokens=500))

    def check(self) -> None:
        """Reads all data and prints a summary.

        Raises:
            DataError: A record is malformed or too long; names the first ones by file and line.
        """
        check: Callable[..., Any] = check_data
        report = check(self._options.data, self._kind, self._tokenizer, **self._encoding)
        report.raise_if_bad()
        processes.say(report)

    @property
    def _epochs(self) -> int | None:
        return None if self._options.max_steps else self._options.epochs or 1
