"""One step of generation: the model, the choice of tokens, and finished rows."""

from __future__ import annotations

from torch import Tensor

from ligerzoo.generate.sampling import Sampler
from ligerzoo.generate.sequences import Sequences
from ligerzoo.generate.stopping import Stopping
from ligerzoo.kernels.sampling import SampledTokens


class DecodeStep:
    """One step of generation: runs the model, chooses a token for each row, and finishes rows.

    A step runs on the device and, unless it is synchronous, never waits for it.

    Args:
        sequences: the tokens and the KV cache.
        sampler: chooses the tokens.
        stopping: finishes rows.

    Attributes:
        is_synchronous: whether the host waits for the device in each step.
        sampled: the tokens of the last step and their log-probabilities, valid until the next step. Those of finished
            rows have no meaning.
    """

    is_synchronous = False
    sampled: SampledTokens

    def __init__(self, sequences: Sequences, sampler: Sampler, stopping: Stopping) -> None:
        self.sequences, self.sampler, self.stopping = sequences, sampler, stopping

    def prefill(self) -> Tensor:
        """Runs the model on the prompts.

        Returns:
            (B,) the first token of each continuation.
        """
        return self._choose_and_append(self.sequences.prefill())

    def decode(self) -> Tensor:
        """Runs the model on the newest tokens.

        Returns:
            (B,) the next token of each row, or padding in finished rows.
        """
        return self._choose_and_append(self.sequences.decode())

    def _choose_and_append(self, logits: Tensor) -> Tensor:
        """Chooses a token of each row and appends it."""
        self.sampler.prepare()
        return self._append(*self._choose(logits))

    def _choose(self, logits: Tensor) -> tuple[SampledTokens, Tensor]:
        """Chooses a token of each row, and finishes rows. The sampler is prepared.

        Returns:
            The tokens, and the same with padding in rows that had finished before, (B,).
        """
        sampled = self.sampler.draw(logits)
        return sampled, self.stopping.update(sampled.tokens[:, None])

    def _append(self, sampled: SampledTokens, shown: Tensor) -> Tensor:
        """Appends a token to each row; the arguments are what `_choose` returns."""
        self.sampled = sampled
        self.sequences.append(sampled.tokens[:, None])
        return shown
