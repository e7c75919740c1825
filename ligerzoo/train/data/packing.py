"""How samples become rows: packed, so that several share a row, or padded, one in each row."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ligerzoo.errors import DataError
from ligerzoo.train.data.samples import Sample, TrainedSample, row_length
from ligerzoo.train.data.stream import Permutation
from ligerzoo.train.data_options import Frame, Packing

Row = list[TrainedSample]
"""Samples that share a row, one after the other."""


class Packed(NamedTuple):
    """The rows of a window, and the samples that belong to the next one."""

    rows: list[Row]
    rest: Row


def pack_best_fit(samples: Sequence[TrainedSample], seq_length: int, is_last: bool) -> Packed:
    """Packs whole samples into rows of `seq_length` tokens: in descending order of length, each into the
    row with the least sufficient room.

    Best-fit decreasing needs at most 11/9 of the optimal number of rows, plus 1 (Johnson et al., 1974). The emptiest
    row goes to the next window. The order of the rows is random, so that it does not depend on the lengths.

    Raises:
        DataError: a sample is longer than a row.
    """
    lengths = [row_length(sample) for sample in samples]
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # free tokens and index of each row, ascending
    for index in sorted(range(len(samples)), key=lambda index: -lengths[index]):
        if lengths[index] > seq_length:
            where, got = samples[index].source, f"{lengths[index]} tokens"
            expected = f"at most {seq_length} (seq_length), all sequences of the sample together"
            raise DataError("the sample is too long for a row", where=where, got=got, expected=expected)
        position = bisect_left(rooms, (lengths[index], -1))
        if position == len(rooms):
            rooms.append((seq_length, len(rows)))
            rows.append([])
        room, row = rooms.pop(position)
        rows[row].append(index)
        insort(rooms, (room - lengths[index], row))
    order = Permutation(len(rows), "rows") if rows else range(0)
    emptiest = rooms[-1][1] if rooms and not is_last else None
    shuffled = (order[row] for row in range(len(rows)))
    packed = [[samples[index] for index in sorted(rows[row])] for row in shuffled if row != emptiest]
    return Packed(packed, [] if emptiest is None else [samples[index] for index in sorted(rows[emptiest])])


def pack_concatenated(samples: Sequence[TrainedSample], seq_length: int, is_last: bool) -> Packed:
    """Cuts the concatenation of all samples into rows that are full, except for the last row of the last window."""
    rows: list[Row] = [[]]
    room = seq_length
    for sample in samples:
        assert isinstance(sample, Sample)
        first = 0
        while first < len(sample.input_ids):
            if room == 0:
                rows.append([])
                room = seq_length
            piece = slice(first, first + room)
            rows[-1].append(Sample(sample.input_ids[piece], sample.labels[piece], sample.source))
            first += len(rows[-1][-1].segments[0].input_ids)
            room -= len(rows[-1][-1].segments[0].input_ids)
    if is_last or room == 0:
        return Packed([row for row in rows if sum(map(row_length, row)) > 1], [])  # one token predicts nothing
    return Packed(rows[:-1], rows[-1])


def pack_pieces(samples: Sequence[TrainedSample], seq_length: int, is_last: bool) -> Packed:
    """Packs documents like `pack_best_fit`, after cutting longer ones into pieces of `seq_length` tokens.

    A piece begins with the last token of the piece before, which predicts the next token. So no token is left out.
    """
    pieces: Row = [
        Sample(one.input_ids[first : first + seq_length], one.labels[first : first + seq_length], one.source)
        for sample in samples
        for one in sample.segments
        for first in range(0, max(1, len(one.input_ids) - 1), seq_length - 1)
    ]
    return pack_best_fit(pieces, seq_length, is_last)


def pack_framed(samples: Sequence[TrainedSample], rule: SharedRows, is_last: bool) -> Packed:
    """Packs documents like `pack_best_fit`. Longer ones become several, each with the tokens of the frame."""
    assert rule.frame is not None
    first, last = map(list, rule.frame)
    room = rule.seq_length - len(first) - len(last)
    if room < 1:
        expected = f"more than {rule.seq_length - room}, the tokens that begin and end a text"
        raise DataError("too small", where="seq_length", got=rule.seq_length, expected=expected)
    pieces: Row = []
    for document in (part for one in samples for part in _cut_after(one.segments[0], rule.eos_token_id)):
        ids = document.input_ids
        ids = ids[len(first) :] if ids[: len(first)] == first else ids
        ids = ids[: -len(last)] if last and ids[-len(last) :] == last else ids
        for start in range(0, len(ids), room):
            framed = [*first, *ids[start : start + room], *last]
            pieces.append(Sample(framed, framed, document.source))
    return pack_best_fit(pieces, rule.seq_length, is_last)


Segments = tuple[list[list[Sample]], int]
"""The segments of each row of a batch, and the tokens T of a row."""


@dataclass(frozen=True)
class SharedRows:
    """Rows of `seq_length` tokens that samples share, see `PackedBatches`.

    Attributes:
        window: number of tokens that are packed together.
        texts: how texts are packed; None for samples of other kinds.
        eos_token_id: ends documents.
        frame: tokens of each text in a row, of which longer documents become several; with `texts` "whole" only.
    """

    seq_length: int
    window: int
    texts: Packing | None
    eos_token_id: int | None
    frame: Frame | None = None

    def pack(self, samples: Sequence[TrainedSample], is_last: bool) -> Packed:
        if self.frame is not None:
            return pack_framed(samples, self, is_last)
        pack_rows = {None: pack_best_fit, "whole": pack_pieces}.get(self.texts, pack_concatenated)
        return pack_rows(samples, self.seq_length, is_last)

    def layout(self, rows: list[Row]) -> Segments:
        segments = list(map(segments_of, rows))
        if self.texts in ("auto", "concatenate"):
            segments = [[_joined(row)] if row else [] for row in segments]
        elif self.texts == "separate":
            segments = [[piece for one in row for piece in _cut_after(one, self.eos_token_id)] for row in segments]
        return segments, self.seq_length


@dataclass(frozen=True)
class PaddedRows:
    """A sample in each row, or each sequence of a pair, see `PaddedBatches`."""

    pad_to_multiple_of: int
    window: int = 1

    def pack(self, samples: Sequence[TrainedSample], is_last: bool) -> Packed:
        return Packed([[sample] for sample in samples], [])

    def layout(self, rows: list[Row]) -> Segments:
        columns = itertools.zip_longest(*map(segments_of, rows))
        segments: list[list[Sample]] = [[one] if one is not None else [] for column in columns for one in column]
        length = max((len(one.input_ids) for row in segments for one in row), default=1)
        multiple = self.pad_to_multiple_of
        return segments or [[] for _ in rows], -(-length // multiple) * multiple


def segments_of(row: Sequence[TrainedSample]) -> list[Sample]:
    """Returns the segments of the samples of a row."""
    return [segment for sample in row for segment in sample.segments]


def _joined(segments: Sequence[Sample]) -> Sample:
    ids = list(itertools.chain.from_iterable(segment.input_ids for segment in segments))
    labels = list(itertools.chain.from_iterable(segment.labels for segment in segments))
    return Sample(ids, labels, segments[0].source)


def _cut_after(sample: Sample, token_id: int | None) -> list[Sample]:
    """Cuts a sample after each occurrence of a token."""
    ends = [index + 1 for index, one in enumerate(sample.input_ids) if one == token_id]
    bounds = sorted({0, *ends, len(sample.input_ids)})
    return [Sample(sample.input_ids[a:b], sample.labels[a:b], sample.source) for a, b in itertools.pairwise(bounds)]
