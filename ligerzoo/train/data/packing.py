"""Packs samples into rows of T tokens. Each function takes a window of samples and returns its rows."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

from ligerzoo.errors import DataError
from ligerzoo.train.data.order import Permutation
from ligerzoo.train.data.samples import Sample, TrainedSample

Row = list[TrainedSample]
"""Samples that share a row, one after the other."""


class Packed(NamedTuple):
    """The rows of a window, and the samples that belong to the next one."""

    rows: list[Row]
    rest: Row


def row_length(sample: TrainedSample) -> int:
    """Returns the tokens of all segments of a sample."""
    return sum(len(segment.input_ids) for segment in sample.segments)


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
            raise DataError(
                "the sample is too long for a row", where=samples[index].source, got=f"{lengths[index]} tokens",
                expected=f"at most {seq_length} (seq_length), all sequences of the sample together",
            )  # fmt: skip
        position = bisect_left(rooms, (lengths[index], -1))
        if position == len(rooms):
            rooms.append((seq_length, len(rows)))
            rows.append([])
        room, row = rooms.pop(position)
        rows[row].append(index)
        insort(rooms, (room - lengths[index], row))
    order = Permutation(len(rows), "rows") if rows else range(0)
    emptiest = rooms[-1][1] if rooms and not is_last else None
    packed = [[samples[index] for index in sorted(rows[row])] for row in map(order.__getitem__, range(len(rows)))
              if row != emptiest]  # fmt: skip
    return Packed(packed, [] if emptiest is None else [samples[index] for index in sorted(rows[emptiest])])


def one_per_row(samples: Sequence[TrainedSample], is_last: bool) -> Packed:
    """Returns each sample as a row."""
    return Packed([[sample] for sample in samples], [])


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
