"""The data of a run whose batches come from files: samples, packed batches, and the number of steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from typing import Any, Literal

from ligerzoo import Tokenizer
from ligerzoo.errors import DataError
from ligerzoo.models import CausalLM
from ligerzoo.train import processes
from ligerzoo.train.data import (
    DataReport,
    Kind,
    PackedBatches,
    PaddedBatches,
    Sample,
    SampleStream,
    check_data,
    format_sample,
    open_data,
)
from ligerzoo.train.data.samples import AnySample
from ligerzoo.train.data.stream import no_samples
from ligerzoo.train.evaluation import Prompt, prompt_length, prompt_of
from ligerzoo.train.run_options import BatchOptions
from ligerzoo.train.starting import count_steps, make_batches, tokenizer_of
from ligerzoo.vision.processor import Processor

_METHODS: dict[str, str] = {
    "preference": "dpo, orpo, simpo or cpo", "labelled": "kto", "prompt": "grpo",
}  # fmt: skip
"""The methods that train the kinds of records whose completions are not all examples to imitate."""


class RunData:
    """The data of a run. All evaluation data is checked at once, so that the first evaluation does not end the run.

    Args:
        options: options of the run.
        processor: the tokenizer; or the processor, for data with images.
        model: the model, which may be on the meta device: tokens without a row in its embedding are errors.
        kind: kind of the records; "auto" for that of the first one: texts, completions or conversations.
        pin_memory: whether batches are in pinned memory, to copy them to a GPU.
        packing: see `make_batches`.
        encoding: further options of `open_data`.

    Raises:
        DataError: The evaluation data is missing or of another kind, a record of it is malformed or too long, or none
            gives a sample.
    """

    def __init__(
        self, options: BatchOptions, processor: Processor | Tokenizer, model: CausalLM, kind: Kind | Literal["auto"], *,
        pin_memory: bool, packing: str = "auto", **encoding: Any,
    ) -> None:  # fmt: skip
        self._options, self._processor, self._kind = options, processor, kind
        self._tokenizer = tokenizer_of(processor)
        self._rows: dict[str, Any] = {
            "packing": packing, "pin_memory": pin_memory, "batch_size": options.batch_size,
            "seq_length": options.seq_length, "embedding_rows": model.input_vocab_size,
        }  # fmt: skip
        self._encoding: dict[str, Any] = {
            "seq_length": options.seq_length, "too_long": options.too_long, "special_tokens": options.special_tokens,
            "embedding_rows": model.input_vocab_size,
            **encoding,
        }  # fmt: skip
        if options.eval_data:
            self._check(options.eval_data)

    def samples(self, paths: tuple[str, ...], **given: Any) -> SampleStream:
        """Returns the samples of files, in the order of the seed.

        Raises:
            DataError: A file is missing, or its records are of a kind that the method does not train.
        """
        stream = open_data(paths, self._kind, self._processor, seed=self._options.seed, **self._encoding, **given)
        if self._kind == "auto":
            _refuse_kind(stream.kind, paths)
        return stream

    def batches(
        self, paths: tuple[str, ...], *, read_images: bool = True, **given: Any
    ) -> PackedBatches | PaddedBatches:
        """Returns the batches of this process."""
        return make_batches(self.samples(paths, **given), self._tokenizer, read_images=read_images, **self._rows)

    def training(self) -> PackedBatches | PaddedBatches:
        """Returns the batches that are trained."""
        return self.batches(self._options.data, epochs=self._epochs)

    def count_steps(self) -> int:
        """Returns the number of steps of the run; reads all data if it depends on that."""
        if self._options.max_steps:
            return self._options.max_steps
        batches = self.batches(self._options.data, epochs=self._epochs, read_images=False)
        return count_steps(batches, self._options.accumulate)

    def once(self, paths: tuple[str, ...]) -> PackedBatches | PaddedBatches:
        """Returns all batches of files in their order, such as evaluation data."""
        return self.batches(paths, epochs=1, shuffle=False)

    def first_samples(self, paths: tuple[str, ...], count: int) -> Iterator[Any]:
        """Returns the first samples of files."""
        return islice(self.samples(paths, epochs=1, shuffle=False), count)

    def prompts(self, paths: tuple[str, ...], count: int) -> Iterator[Prompt]:
        """Returns the prompts of the first samples of files, with their images."""
        stream = self.samples(paths, epochs=1, shuffle=False)
        for sample in islice(stream, count):
            assert isinstance(sample, Sample)
            if sample.images and stream.images is not None:
                yield stream.images.prompt(sample.cut(prompt_length(sample)))
            else:
                yield prompt_of(sample)

    @cached_property
    def shown(self) -> list[AnySample]:
        """The first three samples of the training.

        Raises:
            DataError: The data has no samples.
        """
        samples = list(islice(self.samples(self._options.data, epochs=1), 3))
        if not samples:
            raise no_samples("option data")
        return samples

    @property
    def has_images(self) -> bool:
        """Whether there are images in the first three samples."""
        return any(isinstance(sample, Sample) and sample.images for sample in self.shown)

    def show(self) -> None:
        """Prints the first three samples, with the trained tokens in colour."""
        if self.has_images:
            processes.say("the memory and the FLOPs of the vision tower are not predicted")
        for sample in self.shown:
            processes.say(format_sample(sample, self._tokenizer, max_tokens=500))

    def check(self) -> DataReport:
        """Reads all data, and prints and returns a summary.

        Raises:
            DataError: A record is malformed or too long; names the first ones by file and line.
        """
        report = self._check(self._options.data)
        processes.say(report)
        return report

    def _check(self, paths: tuple[str, ...]) -> DataReport:
        """Reads all data of files, see `check_data`.

        Raises:
            DataError: See `check` and `samples`.
        """
        kind = self.samples(paths, epochs=1).kind
        report = check_data(paths, kind, self._processor, **self._encoding)
        report.raise_if_bad()
        if not report.trained_tokens:
            raise no_samples(", ".join(paths))
        return report

    @property
    def _epochs(self) -> int | None:
        return None if self._options.max_steps else self._options.epochs or 1


def _refuse_kind(kind: Kind, paths: tuple[str, ...]) -> None:
    """Refuses records whose completions would all be trained, the rejected ones included, and prompts alone.

    Raises:
        DataError: The records are preferences, labelled completions or prompts.
    """
    if kind in _METHODS:
        raise DataError(
            f"records of kind {kind!r} are for another method", where=", ".join(paths),
            expected="text, prompt and completion, or messages", remedy=f"Use --method {_METHODS[kind]}.",
        )  # fmt: skip
