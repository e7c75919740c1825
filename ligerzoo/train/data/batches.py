"""Batches: rows of samples as the tensors that a model takes.

The rows are a function of the samples, `seq_length` and the packing. A step of W processes takes the next W * B rows,
and process r the rows r * B to (r + 1) * B - 1 of them. So the rows of a step depend on W * B only. Each process reads
and encodes all samples, which takes little of its time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Required, Self, TypedDict, Unpack, get_args

import torch
from torch import Tensor

from ligerzoo.checks import is_integer
from ligerzoo.errors import DataError, first_names
from ligerzoo.train.data.background import Background
from ligerzoo.train.data.images import SampleImages
from ligerzoo.train.data.packing import PaddedRows, Row, SharedRows, segments_of
from ligerzoo.train.data.samples import (
    UNTRAINED,
    PairSample,
    PromptSample,
    Sample,
    as_state,
    from_state,
    row_length,
)
from ligerzoo.train.data.stream import SampleStream
from ligerzoo.train.data_options import Frame, Packing

_PREFETCH = 4  # batches


@dataclass(frozen=True)
class Batch:
    """A batch of B rows of T tokens.

    Attributes:
        inputs: int64 tensors (B, T) on the CPU: `input_ids`, `labels` (unshifted, -100 for tokens that are not trained)
            and `position_ids`, which begin at 0 in each segment. Padding follows the last segment. Each padding token
            is a segment, has position 0 and is not trained. With images also the inputs of the model's processor, such
            as `pixel_values`, for the images in the order of their tokens.
        rows: the samples of each row, in order.
        tokens: number of tokens without padding.
        trained_tokens: number of tokens that the loss counts.
        image_reader: reads the images of the samples; None for text only.
    """

    inputs: dict[str, Tensor]
    rows: list[Row]
    tokens: int
    trained_tokens: int
    image_reader: SampleImages | None = None

    @property
    def padding(self) -> int:
        """Number of padding tokens."""
        return self.inputs["input_ids"].numel() - self.tokens

    @property
    def images(self) -> int:
        """Number of images."""
        return sum(len(segment.images) for row in self.rows for segment in segments_of(row))

    @property
    def sources(self) -> list[str]:
        """The records of the batch, as `file:line`."""
        return [str(sample.source) for row in self.rows for sample in row]

    def segments(self) -> Iterator[tuple[int, Sample]]:
        """Yields each segment of packed rows, after the index of its first token in the flattened rows."""
        length = self.inputs["input_ids"].shape[1]
        for index, row in enumerate(self.rows):
            first = index * length
            for segment in segments_of(row):
                yield first, segment
                first += len(segment.input_ids)


class BatchArguments(TypedDict, total=False):
    """The arguments that `PackedBatches` and `PaddedBatches` share."""

    batch_size: Required[int]
    pad_token_id: Required[int]
    rank: int
    world_size: int
    pin_memory: bool
    read_images: bool


@dataclass(frozen=True, kw_only=True)
class _Producer:
    """Makes batches, in the thread of `_Batches`; does not refer to it. See the arguments of `PackedBatches`."""

    stream: SampleStream
    rule: SharedRows | PaddedRows
    batch_size: int
    pad_token_id: int
    rank: int = 0
    world_size: int = 1
    pin_memory: bool = False
    read_images: bool = True

    def __post_init__(self) -> None:
        if self.stream.kind in ("prompt", "pair"):
            what, where = f"{self.stream.kind}s have no labels", ", ".join(self.stream.names)
            expected = "text, prompt and completion, messages, or chosen and rejected"
            remedy = "Say which columns they are, such as --map completion=answer."
            raise DataError(what, where=where, expected=expected, remedy=remedy)
        if self.batch_size < 1 or not 0 <= self.rank < self.world_size:
            got = f"batch_size={self.batch_size}, rank={self.rank}, world_size={self.world_size}"
            raise DataError("invalid batches", where="batch_size, rank and world_size", got=got)

    @property
    def images(self) -> SampleImages | None:
        """Reads the images."""
        return self.stream.images if self.read_images else None

    def batches(self, state: dict[str, Any]) -> Iterator[tuple[Batch, dict[str, Any]]]:
        """Yields batches, each with the position after it."""
        rows = self._rows(state)
        while step := list(itertools.islice(rows, self.batch_size * self.world_size)):
            own = [row for row, _ in step[self.rank * self.batch_size :][: self.batch_size]]
            own += [[] for _ in range(self.batch_size - len(own))]  # after the last sample
            yield self._batch(own, [row for row, _ in step]), step[-1][1]

    def _rows(self, state: dict[str, Any]) -> Iterator[tuple[Row, dict[str, Any]]]:
        """Yields rows, each with the position after it: that of its window, and the number of rows taken from it."""
        taken, rest = state["rows"], [from_state(sample) for sample in state["rest"]]
        is_last = False
        while not is_last:
            start = {"stream": self.stream.state_dict(), "rest": [as_state(sample) for sample in rest]}
            samples, tokens = list(rest), sum(map(row_length, rest))
            while tokens < self.rule.window and not is_last:
                if (sample := next(self.stream, None)) is None:
                    is_last = True
                    break
                assert not isinstance(sample, PromptSample | PairSample)
                samples.append(sample)
                tokens += row_length(sample)
            packed, dropped = self.rule.pack(samples, is_last), self.stream.dropped
            for index in range(taken, len(packed.rows)):
                yield packed.rows[index], {**start, "rows": index + 1, "dropped": dropped}
            taken, rest = 0, packed.rest

    def _batch(self, rows: list[Row], rows_of_step: list[Row]) -> Batch:
        """Returns the batch of these rows, some of which may be empty.

        If only other processes have images, a row without trained tokens follows, with an image of theirs: all
        processes take part in the collective operations of a sharded vision tower.

        Raises:
            DataError: nothing is trained, although there are samples.
        """
        layout, length = self.rule.layout(rows)
        batch = collate(rows, layout, length, self.pad_token_id, self.images)
        if self.images is not None and not batch.images and (other := first_with_image(rows_of_step)) is not None:
            layout, length = [*layout, [other]], max(length, len(other.input_ids))
            inputs = collate(rows, layout, length, self.pad_token_id, self.images).inputs
            batch = replace(batch, inputs=inputs)
        if batch.tokens and not batch.trained_tokens:
            raise DataError("nothing in the batch would be trained", where=first_names(batch.sources))
        if self.pin_memory:
            batch.inputs.update({name: tensor.pin_memory() for name, tensor in batch.inputs.items()})
        return batch


def collate(
    rows: list[Row], layout: list[list[Sample]], length: int, pad_token_id: int, images: SampleImages | None = None
) -> Batch:
    """Returns the batch of samples.

    Args:
        rows: the samples of each row.
        layout: the segments of each row of the tensors.
        length: T.
        pad_token_id: fills the end of a row.
        images: reads the images of the samples; None to leave them out.

    Raises:
        DataError: an image cannot be read.
    """
    has_images = {any(segment.images for segment in row) for row in layout}
    if len(has_images) == 2 and all(len(row) == 1 and len(row[0].input_ids) == length for row in layout):
        length += 1  # Llama 3.2 Vision ignores images of other rows in packed rows only: the padding is a segment
    shape = len(layout), length
    ids = torch.full(shape, pad_token_id)
    labels = torch.full(shape, UNTRAINED)
    positions = torch.zeros(shape, dtype=torch.int64)
    tokens = trained = 0
    for index, segments in enumerate(layout):
        first = 0
        for segment in segments:
            piece = slice(first, first := first + len(segment.input_ids))
            ids[index, piece] = torch.tensor(segment.input_ids)
            labels[index, piece] = torch.tensor(segment.labels)
            positions[index, piece] = torch.arange(len(segment.input_ids))
            trained += segment.trained_tokens
        tokens += first
    inputs = {"input_ids": ids, "labels": labels, "position_ids": positions}
    if images is not None:
        inputs |= images.inputs(layout, {"input_ids": ids, "position_ids": positions})
    return Batch(inputs, rows, tokens, trained, images)


class _Batches:
    """Iterates over batches, which another thread prepares, and keeps the position."""

    def __init__(self, producer: _Producer) -> None:
        self._producer = producer
        self._state: dict[str, Any] = {"stream": producer.stream.state_dict(), "rest": [], "rows": 0, "dropped": 0}
        self._batches: Background[tuple[Batch, dict[str, Any]]] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._producer.stream.load_state_dict(self._state["stream"])
            self._batches = Background(self._producer.batches(self._state), _PREFETCH)
        batch, self._state = next(self._batches)
        return batch

    @property
    def dropped(self) -> int:
        """Number of records without a sample that were read for the batches so far, blank lines included."""
        return int(self._state.get("dropped", 0))  # which earlier versions have not saved

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the last batch that was yielded, as JSON values."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the last batch that was yielded before `state_dict`.

        The numbers of rows and processes may differ from those of the saved state, unlike `seq_length` and packing.

        Raises:
            DataError: the data, or an option that determines the samples, has changed.
        """
        self.close()
        self._producer.stream.load_state_dict(state["stream"])
        self._state = dict(state)

    def close(self) -> None:
        """Ends the thread. Iteration may continue later."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None


class PackedBatches(_Batches):
    """Batches of rows that several samples share; a sample attends to itself only.

    Args:
        stream: the samples, from `open_data`.
        batch_size: B, rows of this process.
        seq_length: T, tokens of a row, at least 2.
        pad_token_id: fills the end of a row; any token.
        documents: how kind "text" is packed. "concatenate" or "auto": documents follow each other, and rows are cut
            from them; tokens attend to earlier documents of their row. "separate": the same rows, but tokens attend to
            their own document only. "whole": packed like other kinds; documents longer than a row are cut.
        eos_token_id: for "separate" with token files: the token after which the next document begins.
        window_rows: number of rows that are packed together. More rows need less padding, but the first batch comes
            later. None for 2**19 tokens, and 8 to 256 rows.
        frame: tokens with which texts begin and end, for encoders: longer documents are cut into several such texts.
        rank: index of this process.
        world_size: number of processes; their batches of a step are world_size * B successive rows.
        pin_memory: whether the tensors are in pinned memory.
        read_images: whether batches have the pixels of images; False to count batches.

    Raises:
        DataError: an option has an unsupported value. While the batches are used: see `open_data`; or nothing in a
            batch would be trained.
    """

    def __init__(
        self,
        stream: SampleStream,
        *,
        seq_length: int,
        documents: Packing = "auto",
        eos_token_id: int | None = None,
        window_rows: int | None = None,
        frame: Frame | None = None,
        **shared: Unpack[BatchArguments],
    ) -> None:
        if documents not in (accepted := [name for name in get_args(Packing) if name != "none"]):
            raise DataError("unsupported value", where="documents", got=repr(documents), expected=", ".join(accepted))
        if not is_integer(seq_length) or seq_length < 2:
            raise DataError("unsupported value", where="seq_length", got=seq_length, expected="an integer, 2 or more")
        window = seq_length * (window_rows or max(8, min(256, 2**19 // seq_length)))
        rule = SharedRows(seq_length, window, documents if stream.kind == "text" else None, eos_token_id, frame)
        super().__init__(_Producer(stream=stream, rule=rule, **shared))


class PaddedBatches(_Batches):
    """Batches of one sample a row, padded to the longest one of the batch.

    The rows of preference pairs are the chosen sequences of all samples, then the rejected ones: (2 B, T).

    Args:
        stream: the samples, from `open_data`.
        batch_size: B, samples of this process.
        pad_token_id: fills the end of a row; any token.
        pad_to_multiple_of: rounds T up to a multiple.
        rank: index of this process.
        world_size: number of processes; their batches of a step are world_size * B successive samples.
        pin_memory: whether the tensors are in pinned memory.
        read_images: whether batches have the pixels of images; False to count batches.

    Raises:
        DataError: as `PackedBatches`.
    """

    def __init__(self, stream: SampleStream, *, pad_to_multiple_of: int = 1, **shared: Unpack[BatchArguments]) -> None:
        super().__init__(_Producer(stream=stream, rule=PaddedRows(pad_to_multiple_of), **shared))


def first_with_image(rows: Sequence[Row]) -> Sample | None:
    """Returns the beginning of the first sample with images, up to the end of one image and without labels."""
    for segment in itertools.chain.from_iterable(map(segments_of, rows)):
        if segment.images:
            short = segment.cut(segment.images[0].last)
            return replace(short, labels=[UNTRAINED] * len(short.labels))
    return None
