"""Masked tokens (Devlin et al. 2019, section 3.1): which tokens a model predicts, and which tokens replace them.

What is masked in a row depends on the seed, the step and the index of the row in the step: not on how many processes
divide the rows, and not on where a run was interrupted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ligerzoo.errors import ConfigError
from ligerzoo.text.tokenizer import Tokenizer
from ligerzoo.train.data.batches import Batch
from ligerzoo.train.data.packing import Row, segments_of
from ligerzoo.train.data.samples import UNTRAINED


@dataclass(frozen=True)
class MaskedBatch:
    """The tokens of n texts in one row, without padding.

    Attributes:
        inputs: int64 tensors (1, T) on the CPU: `input_ids` with masks, `labels` (the original tokens of those to
            predict, -100 for others) and `position_ids`, which begin at 0 in each text.
        cu_seqlens: (n + 1,) int64 on the CPU, boundaries of the texts.
        rows: the samples of each row before they were joined.
        tokens: number of tokens; 0 if there are no samples, and T is then 1.
        trained_tokens: number of tokens to predict.
    """

    inputs: Mapping[str, Tensor]
    cu_seqlens: Tensor
    rows: list[Row]
    tokens: int
    trained_tokens: int

    @property
    def padding(self) -> int:
        """Number of padding tokens."""
        return 0

    @property
    def sources(self) -> list[str]:
        """The records of the batch, as `file:line`."""
        return [str(sample.source) for row in self.rows for sample in row]


@dataclass(frozen=True, kw_only=True)
class Masking:
    """How tokens are masked.

    Attributes:
        fraction: probability that a token is predicted. Of a row with texts, at least one token is.
        mask_share: share of the predicted tokens that the model sees as the mask token.
        random_share: share of them that it sees as a random token. The others stay unchanged.
        mask_token_id: the mask token.
        ordinary: (V,) bool, the tokens that may be predicted, and the random tokens: all but special ones.
    """

    fraction: float
    mask_share: float
    random_share: float
    mask_token_id: int
    ordinary: Tensor

    @classmethod
    def of(cls, tokenizer: Tokenizer, embedding_rows: int, **shares: float) -> Masking:
        """Returns the masking for a tokenizer.

        Args:
            embedding_rows: number of tokens of the model.
            shares: `fraction`, `mask_share` and `random_share`.

        Raises:
            ConfigError: the tokenizer has no mask token.
        """
        if tokenizer.mask_token_id is None:
            remedy = "Choose a tokenizer that has one, or call tokenizer.add_special_tokens and save it."
            raise ConfigError("the tokenizer has no mask token", where="mask_token", remedy=remedy)
        ordinary = torch.zeros(embedding_rows, dtype=torch.bool)
        ordinary[: len(tokenizer)] = True
        special = {*tokenizer.all_special_ids, tokenizer.mask_token_id} - {tokenizer.unk_token_id}
        ordinary[[token for token in special if token < embedding_rows]] = False
        return cls(**shares, mask_token_id=tokenizer.mask_token_id, ordinary=ordinary)

    def mask(self, ids: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Returns what the model sees of a row of token ids, (T,), and the labels, (T,).

        Args:
            ids: the tokens.
            seed: of the random numbers.
        """
        generator = torch.Generator().manual_seed(seed)
        chance, kind = torch.rand(2, len(ids), generator=generator)
        (choices,) = self.ordinary.nonzero(as_tuple=True)
        others = choices[torch.randint(len(choices), (len(ids),), generator=generator)]
        chance = chance.masked_fill(~self.ordinary[ids], 2.0)
        is_predicted = (chance < self.fraction) | ((chance == chance.min()) & (chance <= 1))
        is_masked = is_predicted & (kind < self.mask_share)
        is_random = is_predicted & ~is_masked & (kind < self.mask_share + self.random_share)
        seen = torch.where(is_random, others, ids.masked_fill(is_masked, self.mask_token_id))
        return seen, ids.masked_fill(~is_predicted, UNTRAINED)

    def batch(self, batch: Batch, seeds: Sequence[int], pad_token_id: int) -> MaskedBatch:
        """Returns a batch without padding, with masks.

        Args:
            batch: packed rows of texts.
            seeds: one for each row.
            pad_token_id: the only token of a batch without samples.
        """
        rows = [segments_of(row) for row in batch.rows]
        masked = [
            self.mask(torch.tensor([token for segment in row for token in segment.input_ids]), seed)
            for row, seed in zip(rows, seeds, strict=True)
            if row
        ]
        lengths = [len(segment.input_ids) for row in rows for segment in row]
        if not masked:  # other processes have rows
            masked, lengths = [(torch.tensor([pad_token_id]), torch.tensor([UNTRAINED]))], [1]
        ids, labels = (torch.cat(parts)[None] for parts in zip(*masked, strict=True))
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        inputs = {"input_ids": ids, "labels": labels, "position_ids": positions}
        bounds = torch.tensor([0, *accumulate(lengths)])
        return MaskedBatch(inputs, bounds, batch.rows, batch.tokens, int((labels != UNTRAINED).sum()))


def row_seeds(seed: int, step: int, first: int, count: int) -> Iterator[int]:
    """Yields the seeds of successive rows of a step.

    Args:
        seed: of the run.
        step: from 1; 0 for evaluation data.
        first: index of the first row among those of the step, or of the evaluation data, in all processes.
        count: number of rows.
    """
    for row in range(first, first + count):
        digest = hashlib.blake2b(f"mask, {seed}, {step}, {row}".encode(), digest_size=7).digest()
        yield int.from_bytes(digest, "little")
