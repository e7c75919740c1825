"""The data of a run: samples of files, packed batches or prompts, and the number of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Literal, cast

from ligerzoo import Tokenizer
from ligerzoo.errors import ConfigError, DataError, raise_all
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
from ligerzoo.train.data.fields import no_completion
from ligerzoo.train.data.images import SampleImages
from ligerzoo.train.data.layouts import parse_columns
from ligerzoo.train.data.open import OpenedData
from ligerzoo.train.data.read_all import check_samples
from ligerzoo.train.data.samples import AnySample, Source
from ligerzoo.train.data.stream import no_samples
from ligerzoo.train.data_options import ONCE, Packing, ReadOrder
from ligerzoo.train.encoder_options import ContrastiveRunOptions
from ligerzoo.train.evaluation import Prompt, continued_length, prompt_of
from ligerzoo.train.methods import methods_for
from ligerzoo.train.rollout_options import RolloutRunOptions
from ligerzoo.train.run_options import BatchOptions, RunOptions
from ligerzoo.vision.processor import Processor, tokenizer_of

FEW_STEPS = 10
"""A run of fewer steps than this, as the data gives them, is probably not what the user wants."""


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
        self._images_of: dict[str, Callable[[Source], list[object]]] = {}
        self._opened: dict[tuple[str, ...], OpenedData] = {}
        self._encoding, self._max_steps = options.encoding(model.input_vocab_size), options.max_steps
        self._first_epoch = ReadOrder(seed=options.seed, epochs=1)
        self._order = replace(self._first_epoch, epochs=None if options.max_steps else options.epochs or 1)

    def samples(self, paths: tuple[str, ...], order: ReadOrder) -> SampleStream:
        """Returns the samples of files.

        Raises:
            DataError: A file is missing, or its records are of a kind that the method does not train.
        """
        if paths not in self._opened:
            self._opened[paths] = OpenedData(paths, self._kind, self._processor, self._encoding, columns=self._columns)
        stream = self._opened[paths].samples(order)
        for note in stream.notes:
            if note not in self._said:
                self._said.add(note)
                processes.say(note)
        if stream.images is not None:
            self._images_of.update(dict.fromkeys(stream.names, stream.images.images_of_record))
        methods = methods_for(stream.kind)
        if self._kind == "auto" and methods:  # all completions would be trained, the rejected ones too
            what = f"records of kind {stream.kind!r} are for another method"
            names = " or ".join(filter(None, (", ".join(methods[:-1]), methods[-1])))
            expected, remedy = "text, prompt and completion, or messages", f"Use --method {names}."
            if stream.kind == "prompt" and stream.unread:
                raise no_completion(stream.unread, names).moved_to(", ".join(paths))
            raise DataError(what, where=", ".join(paths), expected=expected, remedy=remedy)
        return stream

    @property
    def images(self) -> SampleImages | None:
        """Reads the images of all samples; None for text only."""
        if not isinstance(self._processor, Processor):
            return None
        return SampleImages(self._processor, lambda source: self._images_of[source.name](source))

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

    def check_evaluation(self) -> None:
        """Checks the evaluation data, and the options that depend on the data.

        Raises:
            LigerzooError: A record is malformed or too long, or an option does not fit.
        """

    def read_all(self) -> DataReport:
        """Reads all data that is trained, and reports what is wrong with it.

        Raises:
            DataError: See `samples`.
        """
        return check_samples(self.samples(self._paths, ONCE))

    def few_steps(self, steps: int) -> str | None:
        """Returns a warning if the data gives fewer steps than `FEW_STEPS`; None if it gives more, or for max_steps."""
        if self._max_steps or steps >= FEW_STEPS:
            return None
        records, epochs = sum(1 for _ in self.samples(self._paths, ONCE)), self._order.epochs or 1
        read = f"{_count(epochs, 'epoch')} {'is' if epochs == 1 else 'are'} {_count(steps, 'step')}"
        *others, last = [*self._for_more_steps, "a larger --epochs"]
        remedies = " or ".join(filter(None, (", ".join(others), last)))
        return f"warning: {_count(records, 'record')}{self._describe_rows()}: {read}; use {remedies}"

    def _describe_rows(self) -> str:
        """Returns how records become steps, for a warning."""
        return ""

    @property
    def _for_more_steps(self) -> list[str]:
        """Options that give more steps."""
        return []

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
        self._can_pack_none = hasattr(options, "packing")
        self._eval_paths, self._seq_length = options.eval_data, options.seq_length
        self._shared: BatchArguments = {
            "batch_size": options.batch_size,
            "pad_token_id": padding_token(self._tokenizer, model.input_vocab_size),
            "rank": processes.data_rank(),
            "world_size": processes.data_ranks(),
            "pin_memory": pin_memory,
        }

    def check_evaluation(self) -> None:
        if self._eval_paths:
            report = check_samples(self.samples(self._eval_paths, ONCE))
            raise_all(report.problems.errors)
            if not report.trained_tokens:
                raise no_samples(", ".join(self._eval_paths))

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
        return f"{_count(steps, 'step')} of {shape} = {positions:,} tokens with padding; {steps * positions:,} in all"

    def once(self, paths: tuple[str, ...]) -> PackedBatches | PaddedBatches:
        """Returns all batches of files in their order, such as evaluation data."""
        return self.batches(paths, ONCE)

    def evaluation(self) -> tuple[PackedBatches | PaddedBatches, Iterator[Prompt]]:
        """Returns the batches of the evaluation data, and the prompts of its first two samples, with their images."""
        assert self._eval_paths is not None
        stream = self.samples(self._eval_paths, ONCE)
        return self.once(self._eval_paths), (_prompt(sample, stream) for sample in islice(stream, 2))

    def _describe_rows(self) -> str:
        batches = self.batches(self._paths, self._order, read_images=False)
        rows = processes.data_ranks() * sum(len(batch.rows) for batch in batches)
        return "" if self._packing == "none" else f" pack into {_count(rows, 'row')} of {self._seq_length:,} tokens"

    @property
    def _for_more_steps(self) -> list[str]:
        packs, many = self._can_pack_none and self._packing != "none", self._shared["batch_size"] > 1
        return [
            *(["--packing none"] if packs else []),
            *(["a smaller --batch-size"] if many else []),
            *(["a smaller --accumulate"] if self.per_step > 1 else []),
        ]


class RunPrompts(RunSamples):
    """The prompts of a run that samples completions.

    Args:
        processor: see `RunSamples`.
        model: the model, which may be on the meta device.

    Attributes:
        per_step: prompts of a step.
        accumulates: True, since the number of micro-batches depends on the completions.
    """

    def __init__(self, options: RolloutRunOptions, processor: Processor | Tokenizer, model: CausalLM) -> None:
        super().__init__(options, processor, model, "prompt")
        self.per_step, self.accumulates, self._num_samples = options.prompts, True, options.num_samples
        self._eval_paths = options.eval_data

    @cached_property
    def held_out(self) -> list[PromptSample]:
        """The evaluation data."""
        held_out = self.samples(self._eval_paths, ONCE) if self._eval_paths else ()
        return [cast(PromptSample, sample) for sample in held_out]

    def check_evaluation(self) -> None:
        _ = self.held_out

    @property
    def _for_more_steps(self) -> list[str]:
        return ["a smaller --prompts"]

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
        return f"{_count(steps, 'step')} of {self.per_step} prompts x {self._num_samples} completions"


class RunPairs(RunSamples):
    """The pairs of a run that trains embeddings.

    Args:
        options: `query_prompt` and `document_prompt` take precedence over prompts of the model.
        model: the model, which may be on the meta device.

    Attributes:
        per_step: pairs of a step, of all processes.
        accumulates: True, since the number of rows depends on the texts.
    """

    def __init__(self, options: ContrastiveRunOptions, tokenizer: Tokenizer, model: EmbeddingModel) -> None:
        tokenizer = tokenizer.lowercasing() if model.settings.lowercase else tokenizer
        super().__init__(options, tokenizer, cast(CausalLM, model), "pair")
        self.per_step, self.accumulates = options.pairs, True
        query, document = options.prompts_of(model.settings)
        length = min(options.seq_length, model.max_length)
        self._encoding = replace(self._encoding, seq_length=length, query_prompt=query, document_prompt=document)
        self._eval_paths, self._dims, self._size = options.eval_data, options.dims, model.embedding_size

    @cached_property
    def held_out(self) -> list[PairSample]:
        """The evaluation data."""
        held_out = self.samples(self._eval_paths, ONCE) if self._eval_paths else ()
        return [cast(PairSample, sample) for sample in held_out]

    def check_evaluation(self) -> None:
        if self._dims is not None and max(self._dims) > self._size:
            what, expected = "more features than embeddings have", f"at most {self._size}"
            raise ConfigError(what, where="option dims", got=self._dims, expected=expected)
        found = sum(1 for _ in islice(self.samples(self._paths, ONCE), self.per_step))
        if found < self.per_step:
            what, remedy = "the data has fewer pairs than a step", f"For example --pairs {found}."
            raise ConfigError(what, where="option pairs", got=self.per_step, expected=f"at most {found}", remedy=remedy)
        _ = self.held_out

    @property
    def _for_more_steps(self) -> list[str]:
        return ["a smaller --pairs"]

    def training(self) -> SampleStream:
        """Returns the pairs that are trained."""
        return self.samples(self._paths, self._order)

    def count_steps(self) -> int:
        """Returns the number of steps of the run; reads all data if it depends on that."""
        return self._count_steps(self.training(), self.per_step)

    def describe_steps(self, steps: int) -> str:
        """Returns the numbers of steps and of their pairs."""
        return f"{_count(steps, 'step')} of {self.per_step} pairs"


def _prompt(sample: AnySample, stream: SampleStream) -> Prompt:
    """Returns the prompt of a sample; of a pair, that of its chosen sequence."""
    assert not isinstance(sample, PromptSample | PairSample)
    segment = sample.segments[0]
    if segment.images and stream.images is not None:
        return stream.images.prompt(segment.cut(continued_length(segment)))
    return prompt_of(segment)


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}{'s' * (number != 1)}"


def padding_token(tokenizer: Tokenizer, embedding_rows: int) -> int:
    """Returns the token that fills rows and is not trained: for padding, or else the end of a sequence, or 0."""
    tokens = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((token for token in tokens if token is not None and token < embedding_rows), 0)
