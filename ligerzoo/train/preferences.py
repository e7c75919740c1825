"""Preferences in packed rows: their sequences, mismatched completions, and the results of a reference model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from ligerzoo.adapters import adapters_disabled
from ligerzoo.losses import model_sequence_logps
from ligerzoo.models import CausalLM
from ligerzoo.train import processes
from ligerzoo.train.completion_options import PreferenceRunOptions
from ligerzoo.train.data.batches import Batch, collate, first_with_image
from ligerzoo.train.data.images import SampleImages
from ligerzoo.train.data.packing import pack_best_fit, segments_of
from ligerzoo.train.data.samples import UNTRAINED, LabelledSample, Sample, Source, TrainedSample, row_length
from ligerzoo.train.run import Run
from ligerzoo.train.run_data import RunData
from ligerzoo.train.run_model import open_reference


def samples_of(batches: Iterable[Batch]) -> list[TrainedSample]:
    """Returns the samples of batches, in order."""
    return [sample for batch in batches for row in batch.rows for sample in row]


def sequences_of(batch: Batch) -> Tensor:
    """Returns the sequences of packed rows, as `ligerzoo.losses` takes them.

    Returns:
        (N, L) int64: for each sequence the indices b T + t of the tokens that predict its trained tokens, then -1. The
        chosen sequences of all pairs come first, then the rejected ones; completions without pairs are in order.
    """
    found = [
        first + (torch.tensor(segment.labels[1:]) != UNTRAINED).nonzero()[:, 0] for first, segment in batch.segments()
    ]
    if not found:
        return torch.zeros(0, 0, dtype=torch.int64)
    per_sample = len(found) // len(samples_of([batch]))
    sequences = [sequence for part in range(per_sample) for sequence in found[part::per_sample]]
    return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=-1)


def desirable_of(batch: Batch) -> Tensor:
    """Returns the labels of KTO's completions, (N,) bool, in the order of `sequences_of`."""
    labels = [sample.is_desirable for sample in samples_of([batch]) if isinstance(sample, LabelledSample)]
    return torch.tensor(labels, dtype=torch.bool)


def chosen_tokens(batches: Iterable[Batch]) -> int:
    """Returns the number of trained tokens of the chosen completions."""
    return sum(sample.segments[0].trained_tokens for sample in samples_of(batches))


def mismatched(batches: Sequence[Batch]) -> list[Batch]:
    """Returns the prompts of batches, each with the completion of the sample before, to estimate KTO's KL divergence.

    The samples of a step form a circle, in an order that does not depend on the processes: the first prompt has the
    last completion, so all completions occur once, as in TRL. They are packed in rows of the length of the batches, or
    of the longest sequence if that is longer. Returns no batches if there is no second sample.

    All processes must call it: each gets equally many batches, some of which may be empty, so that a sharded model runs
    in all of them.

    Args:
        batches: batches of `LabelledSample`, of this process.
    """
    samples = [[sample.segments[0] for sample in samples_of([batch])] for batch in batches]
    parts = zip(*processes.gather_data([(len(these), these[-1:]) for these in samples]), strict=True)
    counts, ends = zip(*chain.from_iterable(parts), strict=True)  # of the micro-batches of all processes
    if sum(counts) < 2:
        return []
    crossed: list[Sample] = []
    for these, first in zip(samples, range(processes.data_rank(), len(ends), processes.data_ranks()), strict=True):
        before = [end for end in [*ends[first:], *ends[:first]] if end][-1]
        crossed += (_with_completion(one, other) for other, one in zip([*before, *these], these, strict=False))
    n_rows, length = batches[0].inputs["input_ids"].shape
    length = max([length, *map(row_length, crossed)])
    rows = pack_best_fit(crossed, length, is_last=True).rows
    count = max(processes.gather(-(-len(rows) // n_rows)))
    groups = [rows[first : first + n_rows] or [[]] for first in range(0, count * n_rows, n_rows)]
    return [_with_images(group, length, batches[0].image_reader) for group in groups]


def _with_images(rows: list[list[TrainedSample]], length: int, images: SampleImages | None) -> Batch:
    """Returns the batch of rows. If only other processes have images, an untrained row with one of theirs follows."""
    layout = list(map(segments_of, rows))
    own = None if images is None else first_with_image(rows)
    others = [] if images is None else processes.gather_data(own)
    if own is None and (other := next(filter(None, others), None)) is not None:
        layout, length = [*layout, [other]], max(length, len(other.input_ids))
    return collate(rows, layout, length, 0, images)


def _with_completion(prompt: Sample, other: Sample) -> Sample:
    """Returns the prompt of a sample with the completion of another one."""
    end, start = prompt.prompt_length, other.prompt_length
    ids = prompt.input_ids[:end] + other.input_ids[start:]
    return Sample(ids, [UNTRAINED] * end + other.labels[start:], prompt.source, prompt.cut(end).images)


class Reference:
    """The reference of a run: MODEL before training. With adapters it is the trained model without them.

    Args:
        options: its options. With `precompute_reference`, the log-probabilities of all data are computed now, and the
            reference is freed.
    """

    def __init__(self, run: Run, options: PreferenceRunOptions, data: RunData) -> None:
        self._run, self._table = run, None
        self._model: CausalLM | None = run.model if options.lora_rank else open_reference(options, run.device)
        if options.precompute_reference:
            every = [data.once(paths) for paths in (options.data, options.eval_data) if paths]
            self._table, self._model = ReferenceTable(chain(*every), self.logps), None

    def logps(self, batch: Batch) -> Tensor:
        """Returns the (N,) log-probabilities of a batch, in the order of `sequences_of`."""
        if self._table is not None:
            return self._table(batch)
        assert self._model is not None
        with adapters_disabled(self._model):
            return self._sequence_logps(self._model, batch)

    def kl_divergence(self, batches: Sequence[Batch]) -> Tensor:
        """Estimates KTO's KL divergence of the model from the reference over all samples of a step, 0-d; at least 0."""
        log_ratios = [torch.zeros(0, device=self._run.device)]
        for batch in mismatched(batches):
            logps = self._sequence_logps(self._run.model, batch)
            log_ratios.append(logps - self.logps(batch).to(self._run.device))
        every = torch.cat(log_ratios)
        (count,) = processes.total(len(every))
        return (processes.mean(every.sum()) * processes.world_size() / max(1, count)).clamp(min=0)

    @torch.no_grad()
    def _sequence_logps(self, model: CausalLM, batch: Batch) -> Tensor:
        with self._run.autocast():
            return model_sequence_logps(
                model, **self._run.to_device({**batch.inputs, "sequences": sequences_of(batch)})
            )


class ReferenceTable:
    """Log-probabilities of a data set's sequences under a reference model, computed once.

    All processes must create it together; each then has the results of all.

    Args:
        batches: this process's part of all data, once.
        sequence_logps: returns the (N,) log-probabilities of a batch, in the order of `sequences_of`.
    """

    def __init__(self, batches: Iterable[Batch], sequence_logps: Callable[[Batch], Tensor]) -> None:
        self._logps: dict[Source, list[float]] = {}
        for batch in batches:
            logps = sequence_logps(batch)  # of an empty batch too: a sharded model runs in all processes
            if samples := samples_of([batch]):
                columns = logps.view(-1, len(samples)).T.tolist()
                self._logps.update({one.source: column for one, column in zip(samples, columns, strict=True)})
        for table in processes.gather(self._logps):
            self._logps.update(table)

    def __call__(self, batch: Batch) -> Tensor:
        """Returns the (N,) log-probabilities of a batch, in the order of `sequences_of`."""
        columns = [self._logps[sample.source] for sample in samples_of([batch])]
        return torch.tensor(columns).T.flatten()
