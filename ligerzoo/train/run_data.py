"""The data of a run: samples of files, packed batches or prompts, and the number of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from itertools import islice
from typing import Any, Literal, cast

from ligerzoo import Tokenizer
from ligerzoo.errors import DataError
from ligerzoo.models import CausalLM
from ligerzoo.train import processes
from ligerzoo.train.data import (
    DataReport,
    Kind,
    PackedBatches,
    PaddedBatches,
    PromptSample,
    Sample,
    SampleStream,
    check_data,
    format_sample,
    open_data,
)
from ligerzoo.train.data.samples import AnySample
from ligerzoo.train.data.stream import no_samples
from ligerzoo.train.evaluation import Prompt, prompt_length, prompt_of
from ligerzoo.train.methods import GRPORunOptions
from ligerzoo.train.run_model import tokenizer_of
from ligerzoo.train.run_options import BatchOptions, RunOptions
from ligerzoo.vision.processor import Processor

_METHODS = {"preference": "dpo, orpo, simpo or cpo", "labelled": "kto", "prompt": "grpo"}
"""The methods that train the kinds of records whose completions are not all examples to imitate."""


class RunSamples:
    """The samples of a run.

    Args:
        processor: the tokenizer; or the processor, for data with images.
        kind: kind of the records; "auto" for that of the first one: texts, completions or conversations.
        encoding: further options of `open_data`.
    """

    def __init__(
        self, options: RunOptions, processor: Processor | Tokenizer, kind: Kind | Literal["auto"], **encoding: Any
    ) -> None:
        self._paths, self._seed, self._kind, self._processor = options.data, options.seed, kind, processor
        self._tokenizer = tokenizer_of(processor)
        self._encoding: dict[str, Any] = {"special_tokens": options.special_tokens, **encoding}
        self._max_steps, self._epochs = options.max_steps, None if options.max_steps else options.epochs or 1

    def samples(self, paths: tuple[str, ...], **given: Any) -> SampleStream:
        """Returns the samples of files, in the order of the seed.

        Raises:
            DataError: A file is missing, or its records are of a kind that the method does not train.
        """
        stream = open_data(paths, self._kind, self._processor, seed=self._seed, **self._encoding, **given)
        if self._kind == "auto" and stream.kind in _METHODS:  # all completions would be trained, the rejected ones too
            what = f"records of kind {stream.kind!r} are for another method"
            expected, remedy = "text, prompt and completion, or messages", f"Use --method {_METHODS[stream.kind]}."
            raise DataError(what, where=", ".join(paths), expected=expected, remedy=remedy)
        return stream

    @cached_property
    def shown(self) -> list[AnySample]:
        """The first three samples of the training.

        Raises:
            DataError: The data has no samples.
        """
        samples = list(islice(self.samples(self._paths, epochs=1), 3))
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
        report = self._check(self._paths)
        processes.say(report)
        return report

    def _check(self, paths: tuple[str, ...]) -> DataReport:
        """Reads all data of files, see `check_data`.

        Raises:
            DataError: See `check` and `samples`.
        """
        report = check_data(paths, self.samples(paths, epochs=1).kind, self._processor, **self._encoding)
        report.raise_if_bad()
        return report

    def _count_steps(self, items: Iterable[object], per_step: int) -> int:
        """Returns the number of steps; reads all items if it depends on that.

        Raises:
            DataError: There are no items.
        """
        if self._max_steps:
            return self._max_steps
        count = sum(1 for _ in items)
        if not count:
            raise no_samples("option data")
        return -(-count // per_step)


class RunData(RunSamples):
    """The data of a run that trains batches. All evaluation data is checked at once, not at the first evaluation.

    Args:
        processor: the tokenizer; or the processor, for data with images.
        model: the model, which may be on the meta device: tokens without a row in its embedding are errors.
        kind: see `RunSamples`.
        pin_memory: whether batches are in pinned memory, to copy them to a GPU.
        packing: "none" for a sample in each row; "separate" or "whole" see `PackedBatches`; "auto" for its default.
        encoding: further options of `open_data`.

    Attributes:
        per_step: micro-batches of a step.
        accumulates: whether gradients accumulate over several micro-batches.

    Raises:
        DataError: The evaluation data is missing or of another kind, a record of it is malformed or too long, or none
            gives a sample.
    """

    def __init__(
        self,
        options: BatchOptions,
        processor: Processor | Tokenizer,
        model: CausalLM,
        kind: Kind | Literal["auto"],
        *,
        pin_memory: bool,
        packing: str = "auto",
        **encoding: Any,
    ) -> None:
        rows = model.input_vocab_size
        encoding |= {"seq_length": options.seq_length, "too_long": options.too_long, "embedding_rows": rows}
        super().__init__(options, processor, kind, **encoding)
        self.per_step, self.accumulates = options.accumulate, options.accumulate > 1
        self._eval_paths = options.eval_data
        self._batch_size, self._seq_length = options.batch_size, options.seq_length
        shared = partial(
            PaddedBatches if packing == "none" else PackedBatches,
            batch_size=options.batch_size,
            pad_token_id=padding_token(self._tokenizer, rows),
            rank=processes.rank(),
            world_size=processes.world_size(),
            pin_memory=pin_memory,
        )
        self._batches: Callable[..., PackedBatches | PaddedBatches] = shared
        if packing != "none":
            documents = "concatenate" if packing == "auto" else packing
            end = self._tokenizer.eos_token_id if packing == "separate" else None
            self._batches = partial(shared, seq_length=options.seq_length, documents=documents, eos_token_id=end)
        if options.eval_data:
            self._check(options.eval_data)

    def batches(
        self, paths: tuple[str, ...], *, read_images: bool = True, **given: Any
    ) -> PackedBatches | PaddedBatches:
        """Returns the batches of this process."""
        return self._batches(self.samples(paths, **given), read_images=read_images)

    def training(self) -> PackedBatches | PaddedBatches:
        """Returns the batches that are trained."""
        return self.batches(self._paths, epochs=self._epochs)

    def count_steps(self) -> int:
        """Returns the number of steps of the run; reads all data if it depends on that."""
        return self._count_steps(self.batches(self._paths, epochs=self._epochs, read_images=False), self.per_step)

    def describe_steps(self, steps: int) -> str:
        """Returns the numbers of steps and of their positions."""
        sizes, world = (self.per_step, self._batch_size, self._seq_length), processes.world_size()
        positions = world * math.prod(sizes)
        shape = " x ".join([*map(str, sizes), *([f"{world} processes"] if world > 1 else [])])
        return f"{steps:,} steps of {shape} = {positions:,} tokens with padding; {steps * positions:,} in all"

    def once(self, paths: tuple[str, ...]) -> PackedBatches | PaddedBatches:
        """Returns all batches of files in their order, such as evaluation data."""
        return self.batches(paths, epochs=1, shuffle=False)

    def evaluation(self) -> tuple[PackedBatches | PaddedBatches, Iterator[Prompt]]:
        """Returns the batches of the evaluation data, and the prompts of its first two samples, with their images."""
        assert self._eval_paths is not None
        stream = self.samples(self._eval_paths, epochs=1, shuffle=False)
        return self.once(self._eval_paths), (_prompt(sample, stream) for sample in islice(stream, 2))

    def _check(self, paths: tuple[str, ...]) -> DataReport:
        report = super()._check(paths)
        if not report.trained_tokens:
            raise no_samples(", ".join(paths))
        return report


class RunPrompts(RunSamples):
    """The prompts of a run that samples completions.

    Args:
        model: the model, which may be on the meta device.

    Attributes:
        per_step: prompts of a step.
        accumulates: True, since the number of micro-batches depends on the completions.
        held_out: the evaluation data.
    """

    def __init__(self, options: GRPORunOptions, tokenizer: Tokenizer, model: CausalLM) -> None:
        length = options.seq_length - options.max_new_tokens
        super().__init__(options, tokenizer, "prompt", seq_length=length, embedding_rows=model.input_vocab_size)
        self.per_step, self.accumulates, self._num_samples = options.prompts, True, options.num_samples
        held_out: Any = self.samples(options.eval_data, epochs=1, shuffle=False) if options.eval_data else ()
        self.held_out: list[PromptSample] = list(held_out)

    def first(self, count: int) -> list[PromptSample]:
        """Returns the first prompts of the training."""
        return list(islice(cast("Iterator[PromptSample]", self.samples(self._paths, epochs=1)), count))

    def training(self) -> SampleStream:
        """Returns the prompts that are trained."""
        return self.samples(self._paths, epochs=self._epochs)

    def count_steps(self) -> int:
        """Returns the number of steps of the run; reads all data if it depends on that."""
        return self._count_steps(self.training(), self.per_step)

    def describe_steps(self, steps: int) -> str:
        """Returns the numbers of steps and of their completions."""
        return f"{steps:,} steps of {self.per_step} prompts x {self._num_samples} completions"


def _prompt(sample: AnySample, stream: SampleStream) -> Prompt:
    """Returns the prompt of a sample; of a pair, that of its chosen sequence."""
    assert not isinstance(sample, PromptSample)
    segment = sample.segments[0]
    if segment.images and stream.images is not None:
        return stream.images.prompt(segment.cut(prompt_length(segment)))
    return prompt_of(segment)


def padding_token(tokenizer: Tokenizer, embedding_rows: int) -> int:
    """Returns the token that fills rows and is not trained: for padding, or else the end of a sequence, or 0."""
    tokens = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((token for token in tokens if token is not None and token < embedding_rows), 0)
