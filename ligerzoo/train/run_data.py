"""The data of a run: samples of files, packed batches or prompts, and the number of steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any, Literal, cast

from ligerzoo import Tokenizer
from ligerzoo.errors import ConfigError, DataError
from ligerzoo.models import CausalLM
from ligerzoo.models.embedding import EmbeddingModel
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.train import processes
from ligerzoo.train.data import (
    DataReport,
    Kind,
    PackedBatches,
    PaddedBatches,
    PairSample,
    PromptSample,
    SampleStream,
    format_sample,
)
from ligerzoo.train.data.batches import BatchArguments
from ligerzoo.train.data.layouts import parse_columns
from ligerzoo.train.data.open import open_samples
from ligerzoo.train.data.read_all import check_samples
from ligerzoo.train.data.samples import AnySample
from ligerzoo.train.data.stream import no_samples
from ligerzoo.train.data_options import ONCE, Packing, ReadOrder
from ligerzoo.train.evaluation import Prompt, continued_length, prompt_of
from ligerzoo.train.methods import ContrastiveRunOptions, RolloutRunOptions, methods_for
from ligerzoo.train.run_options import BatchOptions, RunOptions
from ligerzoo.vision.processor import Processor, tokenizer_of


class RunSamples:
    """The samples of a run.

    Args:
        processor: the tokenizer; or the processor, for data with images.
        model: the model, which may be on the meta device: tokens without a row in its embedding are errors.
        kind: kind of the records; "auto" for that of the first one: texts, completions or conversations.
    """

    def __init__(
        self, options: RunOptions, processor: Processor | Tokenizer, model: LanguageModel, kind: Kind | Literal["auto"]
    ) -> None:
        self._paths, self._kind, self._processor = options.data, kind, processor
        self._tokenizer = tokenizer_of(processor)
        self._columns, self._said = parse_columns(options.map or ()), set[str]()
        self._encoding, self._max_steps = options.encoding(model.input_vocab_size), options.max_steps
        self._first_epoch = ReadOrder(seed=options.seed, epochs=1)
        self._order = replace(self._first_epoch, epochs=None if options.max_steps else options.epochs or 1)

    def samples(self, paths: tuple[str, ...], order: ReadOrder) -> SampleStream:
        """Returns the samples of files.

        Raises:
            DataError: A file is missing, or its records are of a kind that the method does not train.
        """
        stream = open_samples(paths, self._kind, self._processor, self._encoding, order, columns=self._columns)
        for note in stream.notes:
            if note not in self._said:
                self._said.add(note)
                processes.say(note)
        methods = methods_for(stream.kind)
        if self._kind == "auto" and methods:  # all completions would be trained, the rejected ones too
            what = f"records of kind {stream.kind!r} are for another method"
            names = " or ".join(filter(None, (", ".join(methods[:-1]), methods[-1])))
            expected, remedy = "text, prompt and completion, or messages", f"Use --method {names}."
            raise DataError(what, where=", ".join(paths), expected=expected, remedy=remedy)
        return stream

    @cached_property
    def shown(self) -> list[AnySample]:
        """The first three samples of the training.

        Raises:
            DataError: The data has no samples.
        """
        samples = list(islice(self.samples(self._paths, self._first_epoch), 3))
        if not samples:
            raise no_samples("option data")
        return samples

    @property
    def has_images(self) -> bool:
        """Whether there are images in the first three samples."""
        return any(segment.images for sample in self.shown for segment in sample.segments)

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
        """Reads all data of files, see `check_samples`.

        Raises:
            DataError: See `check` and `samples`.
        """
        report = check_samples(self.samples(paths, ONCE))
        report.raise_if_bad()
        return report

    def _count_steps(self, items: Iterable[object], per_step: int) -> int:
        """Returns the number of steps; reads all items if it depends on that.

        Raises:
            DataError: no items were read.
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
        processor: see `RunSamples`, and so `model` and `kind`.
        pin_memory: whether batches are in pinned memory, to copy them to a GPU.
        packing: how samples share rows.

    Attributes:
        per_step: micro-batches of a step.

    Raises:
        DataError: The evaluation data is missing or of another kind, a record of it is malformed or too long, or none
            gives a sample.
    """

    def __init__(
        self,
        options: BatchOptions,
        processor: Processor | Tokenizer,
        model: LanguageModel,
        kind: Kind | Literal["auto"],
        *,
        pin_memory: bool,
        packing: Packing = "auto",
    ) -> None:
        super().__init__(options, processor, model, kind)
        self.per_step, self._packing = options.accumulate, packing
        self._eval_paths, self._seq_length = options.eval_data, options.seq_length
        self._shared: BatchArguments = {
            "batch_size": options.batch_size,
            "pad_token_id": padding_token(self._tokenizer, model.input_vocab_size),
            "rank": processes.data_rank(),
            "world_size": processes.data_ranks(),
            "pin_memory": pin_memory,
        }
        if options.eval_data:
            self._check(options.eval_data)

    @property
    def accumulates(self) -> bool:
        return self.per_step > 1

    def batches(
        self, paths: tuple[str, ...], order: ReadOrder, *, read_images: bool = True
    ) -> PackedBatches | PaddedBatches:
        """Returns the batches of this process."""
        stream, shared = self.samples(paths, order), self._shared | {"read_images": read_images}
        if self._packing == "none":
            return PaddedBatches(stream, **shared)
        length, end = self._seq_length, self._tokenizer.eos_token_id
        return PackedBatches(stream, seq_length=length, documents=self._packing, eos_token_id=end, **shared)

    def training(self) -> PackedBatches | PaddedBatches:
        """Returns the batches that are trained."""
        return self.batches(self._paths, self._order)

    def count_steps(self) -> int:
        """Returns the number of steps of the run; reads all data if it depends on that."""
        return self._count_steps(self.batches(self._paths, self._order, read_images=False), self.per_step)

    def describe_steps(self, steps: int) -> str:
        """Returns the numbers of steps and of their positions."""
        sizes = self.per_step, self._shared["batch_size"], self._seq_length
        world = processes.data_ranks()
        positions = world * math.prod(sizes)
        shape = " x ".join([*map(str, sizes), *([f"{world} processes"] if world > 1 else [])])
        return f"{steps:,} steps of {shape} = {positions:,} tokens with padding; {steps * positions:,} in all"

    def once(self, paths: tuple[str, ...]) -> PackedBatches | PaddedBatches:
        """Returns all batches of files in their order, such as evaluation data."""
        return self.batches(paths, ONCE)

    def evaluation(self) -> tuple[PackedBatches | PaddedBatches, Iterator[Prompt]]:
        """Returns the batches of the evaluation data, and the prompts of its first two samples, with their images."""
        assert self._eval_paths is not None
        stream = self.samples(self._eval_paths, ONCE)
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

    def __init__(self, options: RolloutRunOptions, tokenizer: Tokenizer, model: CausalLM) -> None:
        super().__init__(options, tokenizer, model, "prompt")
        self.per_step, self.accumulates, self._num_samples = options.prompts, True, options.num_samples
        held_out: Any = self.samples(options.eval_data, ONCE) if options.eval_data else ()
        self.held_out: list[PromptSample] = list(held_out)

    def first(self, count: int) -> list[PromptSample]:
        """Returns the first prompts of the training."""
        return list(islice(cast("Iterator[PromptSample]", self.samples(self._paths, self._first_epoch)), count))

    def training(self) -> SampleStream:
        """Returns the prompts that are trained."""
        return self.samples(self._paths, self._order)

    def count_steps(self) -> int:
        """Returns the number of steps of the run; reads all data if it depends on that."""
        return self._count_steps(self.training(), self.per_step)

    def describe_steps(self, steps: int) -> str:
        """Returns the numbers of steps and of their completions."""
        return f"{steps:,} steps of {self.per_step} prompts x {self._num_samples} completions"


class RunPairs(RunSamples):
    """The pairs of a run that trains embeddings.

    Args:
        options: `query_prompt` and `document_prompt` take precedence over prompts of the model.
        model: the model, which may be on the meta device.

    Attributes:
        per_step: pairs of a step, of all processes.
        accumulates: True, since the number of rows depends on the texts.
        held_out: the evaluation data.
    """

    def __init__(self, options: ContrastiveRunOptions, tokenizer: Tokenizer, model: EmbeddingModel) -> None:
        tokenizer = tokenizer.lowercasing() if model.settings.lowercase else tokenizer
        super().__init__(options, tokenizer, cast(CausalLM, model), "pair")
        self.per_step, self.accumulates = options.pairs, True
        query, document = options.prompts_of(model.settings)
        length = min(options.seq_length, model.max_length)
        self._encoding = replace(self._encoding, seq_length=length, query_prompt=query, document_prompt=document)
        found = sum(1 for _ in islice(self.samples(self._paths, ONCE), self.per_step))
        if found < self.per_step:
            what, remedy = "the data has fewer pairs than a step", f"For example --pairs {found}."
            raise ConfigError(what, where="option pairs", got=self.per_step, expected=f"at most {found}", remedy=remedy)
        if options.dims is not None and max(options.dims) > (size := model.embedding_size):
            what, expected = "more features than embeddings have", f"at most {size}"
            raise ConfigError(what, where="option dims", got=options.dims, expected=expected)
        held_out = self.samples(options.eval_data, ONCE) if options.eval_data else ()
        self.held_out = [cast(PairSample, sample) for sample in held_out]

    def training(self) -> SampleStream:
        """Returns the pairs that are trained."""
        return self.samples(self._paths, self._order)

    def count_steps(self) -> int:
        """Returns the number of steps of the run; reads all data if it depends on that."""
        return self._count_steps(self.training(), self.per_step)

    def describe_steps(self, steps: int) -> str:
        """Returns the numbers of steps and of their pairs."""
        return f"{steps:,} steps of {self.per_step} pairs"


def _prompt(sample: AnySample, stream: SampleStream) -> Prompt:
    """Returns the prompt of a sample; of a pair, that of its chosen sequence."""
    assert not isinstance(sample, PromptSample | PairSample)
    segment = sample.segments[0]
    if segment.images and stream.images is not None:
        return stream.images.prompt(segment.cut(continued_length(segment)))
    return prompt_of(segment)


def padding_token(tokenizer: Tokenizer, embedding_rows: int) -> int:
    """Returns the token that fills rows and is not trained: for padding, or else the end of a sequence, or 0."""
    tokens = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((token for token in tokens if token is not None and token < embedding_rows), 0)
