"""Preferences in packed rows: their sequences, mismatched completions, and the results of a reference model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ligerzoo.train.data.batches import Batch, collate
from ligerzoo.train.data.packing import pack_best_fit, row_length
from ligerzoo.train.data.samples import UNTRAINED, LabelledSample, Sample, Source, TrainedSample


def samples_of(batches: Iterable[Batch]) -> list[TrainedSample]:
    """Returns the samples of batches, in order."""
    return [sample for batch in batches for row in batch.rows for sample in row]


def sequences_of(batch: Batch) -> Tensor:
    """Returns the sequences of packed rows, as `ligerzoo.losses` takes them.

    Returns:
        (N, L) int64: for each sequence the indices b T + t of the tokens that predict its trained tokens, then -1. The
        chosen sequences of all pairs come first, then the rejected ones; completions without pairs are in order.
    """
    length = batch.inputs["labels"].shape[1]
    parts: tuple[list[Tensor], list[Tensor]] = [], []
    for index, row in enumerate(batch.rows):
        first = index * length
        for sample in row:
            for part, segment in zip(parts, sample.segments, strict=False):
                is_trained = torch.tensor(segment.labels[1:]) != UNTRAINED
                part.append(first + is_trained.nonzero()[:, 0])
                first += len(segment.input_ids)
    sequences = [sequence for part in parts for sequence in part]
    return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=-1)


def desirable_of(batch: Batch) -> Tensor:
    """Returns the labels of KTO's completions, (N,) bool, in the order of `sequences_of`."""
    return torch.tensor([sample.is_desirable for sample in samples_of([batch]) if isinstance(sample, LabelledSample)])


def chosen_tokens(batches: Iterable[Batch]) -> int:
    """Returns the number of trained tokens of the chosen completions."""
    return sum(sample.segments[0].trained_tokens for sample in samples_of(batches))


def mismatched(batches: Sequence[Batch], pad_token_id: int) -> list[Batch]:
    """Returns the prompts of batches, each with the completion of the sample before, to estimate KTO's KL divergence.

    The first prompt has the last completion, so all completions occur once, as in TRL. They are packed in rows of the
    length of the batches, or of the longest sequence if that is longer.

    Args:
        batches: batches of `LabelledSample`.
        pad_token_id: fills the end of a row.
    """
    samples = [sample.segments[0] for sample in samples_of(batches)]
    if len(samples) < 2:
        return []
    crossed = [_with_completion(one, before) for before, one in zip([samples[-1], *samples], samples, strict=False)]
    n_rows, length = batches[0].inputs["input_ids"].shape
    length = max(length, *map(row_length, crossed))
    rows = pack_best_fit(crossed, length, is_last=True).rows
    groups = [rows[first : first + n_rows] for first in range(0, len(rows), n_rows)]
    return [
        collate(group, [[segment for sample in row for segment in sample.segments] for row in group], length,
                pad_token_id)
        for group in groups
    ]  # fmt: skip


def _with_completion(prompt: Sample, other: Sample) -> Sample:
    """Returns the prompt of a sample with the completion of another one."""
    end, start = _prompt_length(prompt), _prompt_length(other)
    ids = prompt.input_ids[:end] + other.input_ids[start:]
    return Sample(ids, [UNTRAINED] * end + other.labels[start:], prompt.source)


def _prompt_length(sample: Sample) -> int:
    return next(index for index, label in enumerate(sample.labels) if label != UNTRAINED)


class ReferenceTable:
    """Log-probabilities of a data set's sequences under a reference model, computed once.

    Args:
        batches: all data, once.
        sequence_logps: returns the (N,) log-probabilities of a batch, in the order of `sequences_of`.
    """

    def __init__(self, batches: Iterable[Batch], sequence_logps: Callable[[Batch], Tensor]) -> None:
        self._logps: dict[Source, list[float]] = {}
        for batch in batches:
            if samples := samples_of([batch]):
                columns = sequence_logps(batch).view(-1, len(samples)).T.tolist()
                self._logps.update({one.source: column for one, column in zip(samples, columns, strict=True)})

    def __call__(self, batch: Batch) -> Tensor:
        """Returns the (N,) log-probabilities of a batch, in the order of `sequences_of`."""
        columns = [self._logps[sample.source] for sample in samples_of([batch])]
        return torch.tensor(columns).T.flatten()
