"""Chooses the next tokens of rows with different options, by one `Sampler` for each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.generate.sampling import Sampler


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next tokens of a row are chosen; see `generate` for the options.

    Raises:
        LigerzooError: an option is invalid.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        Sampler(0, torch.empty(0, 0), **asdict(self), generator=None)


class SampledTokens(NamedTuple):
    """Chosen tokens.

    Attributes:
        tokens: (R,) int64.
        logps: (R,) fp32, their log-probabilities under the softmax of the logits.
    """

    tokens: Tensor
    logps: Tensor


class RowSampler:
    """Chooses the next token of each row.

    Args:
        rows: R.
        vocab_size: V.
        device: device of the logits.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._samplers: list[Sampler | None] = [None] * rows

    def assign(
        self,
        rows: Sequence[int],
        prompts: Sequence[Tensor],
        options: SamplingOptions,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        """Starts new sequences in some rows.

        Args:
            rows: n indices.
            prompts: n tensors of token ids, (T_i,).
            options: the options of these rows.
            generator: random number generator on the device; None uses torch's default.
        """
        for row, prompt in zip(rows, prompts, strict=True):
            ids = prompt.to(self._device)[None]
            self._samplers[row] = Sampler(self._vocab_size, ids, **asdict(options), generator=generator)

    def release(self, rows: Sequence[int]) -> None:
        """Marks rows as free. What they draw is undefined."""
        for row in rows:
            self._samplers[row] = None

    def choose(self, logits: Tensor) -> SampledTokens:
        """Chooses a token of each row from the logits (R, V). The log-probability is NaN if no token can be chosen."""
        tokens = logits.argmax(-1, keepdim=True)
        for row, sampler in enumerate(self._samplers):
            if sampler is not None:
                tokens[row] = sampler.choose(logits[row : row + 1])[0]
        return SampledTokens(tokens[:, 0], logits.log_softmax(-1).gather(1, tokens)[:, 0])
