"""The data of a run that trains masked tokens: packed texts, each with the tokens that begin and end one, and masks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ligerzoo import Tokenizer
from ligerzoo.errors import ConfigError
from ligerzoo.models.language_model import LanguageModel
from ligerzoo.parallel import reshard
from ligerzoo.train import processes
from ligerzoo.train.data import Batch, PackedBatches, PaddedBatches, Sample, format_sample
from ligerzoo.train.data.masking import MaskedBatch, Masking, row_seeds
from ligerzoo.train.data.samples import UNTRAINED, AnySample
from ligerzoo.train.data_options import ONCE, Frame, ReadOrder
from ligerzoo.train.encoder_options import MLMRunOptions
from ligerzoo.train.evaluation import evaluating
from ligerzoo.train.run_data import RunData, padding_token

_SHOWN = 2
"""Texts of the evaluation data whose predictions the log has."""


class MaskedData(RunData):
    """The texts of a run, in batches without padding whose tokens are masked.

    Args:
        options: the options.
        tokenizer: the tokenizer.
        model: the model, which may be on the meta device.
        pin_memory: see `RunData`.

    Raises:
        ConfigError: the tokenizer has no mask token, or `seq_length` exceeds the positions of the model.
        DataError: see `RunData`.
    """

    def __init__(self, options: MLMRunOptions, tokenizer: Tokenizer, model: LanguageModel, *, pin_memory: bool) -> None:
        most = model.model.max_tokens
        if most is not None and options.seq_length > most:
            what, got = "texts would be longer than the model's table of positions", options.seq_length
            raise ConfigError(what, where="option seq_length", got=got, expected=f"at most {most}")
        self._seed, self._rows = options.seed, options.batch_size
        self._pad = padding_token(tokenizer, model.input_vocab_size)
        shares = {name: getattr(options, name) for name in ("mask_share", "random_share")}
        self._masking = Masking.of(tokenizer, model.input_vocab_size, fraction=options.mask_fraction, **shares)
        self._frame = frame_of(tokenizer)
        super().__init__(options, tokenizer, model, "text", pin_memory=pin_memory, packing="whole")

    def batches(
        self, paths: tuple[str, ...], order: ReadOrder, *, read_images: bool = True
    ) -> PackedBatches | PaddedBatches:
        length, stream = self._seq_length, self.samples(paths, order)
        end = self._frame.last[-1] if self._frame.last else self._tokenizer.eos_token_id
        return PackedBatches(
            stream, seq_length=length, documents="whole", eos_token_id=end, frame=self._frame, **self._shared
        )

    def show(self) -> None:
        """Prints the first three texts with masks, the tokens that are predicted in colour."""
        for index, sample in enumerate(self.shown):
            processes.say(format_sample(self._example(sample, index), self._tokenizer, max_tokens=500))

    def _example(self, sample: AnySample, index: int) -> Sample:
        """Returns a text alone with the masks of a row of the evaluation data."""
        (text,) = sample.segments
        ids = torch.tensor(text.input_ids[: self._seq_length])
        seen, labels = self._masking.mask(ids, next(row_seeds(self._seed, 0, index, 1)))
        return Sample(seen.tolist(), labels.tolist(), text.source)

    def describe_steps(self, steps: int) -> str:
        """Returns the numbers of steps and of their rows."""
        rows = processes.data_ranks() * self.per_step * self._rows
        count = f"{steps:,} step{'s' * (steps != 1)}"
        return f"{count} of {rows} rows of up to {self._seq_length} tokens; padding is not computed"

    def masked(self, batches: Sequence[Batch], step: int) -> list[MaskedBatch]:
        """Returns the micro-batches of a step of this process with masks; step 0 is the evaluation data."""
        return [self._masked(batch, step, index) for index, batch in enumerate(batches)]

    def held_out(self) -> list[MaskedBatch]:
        """Returns the evaluation data of this process, with the same masks each time."""
        assert self._eval_paths is not None
        return self.masked(list(self.once(self._eval_paths)), 0)

    def _masked(self, batch: Batch, step: int, index: int) -> MaskedBatch:
        first = (index * processes.data_ranks() + processes.data_rank()) * self._rows
        seeds = list(row_seeds(self._seed, step, first, len(batch.rows)))
        return self._masking.batch(batch, seeds, self._pad)

    def predictions(self, model: LanguageModel) -> list[dict[str, str]]:
        """Returns the first texts of the evaluation data with masks, and the tokens that the model predicts for them.

        All processes must call it.
        """
        assert self._eval_paths is not None
        shown = []
        for index, sample in zip(range(_SHOWN), self.samples(self._eval_paths, ONCE), strict=False):
            example = self._example(sample, index)
            with evaluating(model):
                logits = model(torch.tensor([example.input_ids], device=model.device)).logits
            predicted = logits[0].argmax(-1).cpu()[torch.tensor(example.labels) != UNTRAINED]
            seen = self._tokenizer.decode(example.input_ids)
            shown.append({"prompt": seen, "continuation": self._tokenizer.decode(predicted)})
        if processes.world_size() > 1:
            reshard(model)
        return shown


def frame_of(tokenizer: Tokenizer) -> Frame:
    """Returns the tokens that a tokenizer puts before and after a text, such as [CLS] and [SEP]."""
    marked, plain = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    starts = (i for i in range(len(marked)) if marked[i : i + len(plain)] == plain)
    first = next(starts, 0)
    return Frame(tuple(marked[:first]), tuple(marked[first + len(plain) :]))
