"""One step of generation: the model, the choice of tokens, and finished rows."""

from __future__ import annotations

from torch import Tensor

from ligerzoo.generate.result import LogProbs
from ligerzoo.generate.sampling import Choice, Sampler
from ligerzoo.generate.sequences import Sequences
from ligerzoo.generate.stopping import Stopping


class DecodeStep:
    """One step of generation: runs the model, chooses a token for each row, and finishes rows.

    A step runs on the device and never waits for it.

    Args:
        sequences: the tokens and the KV cache.
        sampler: chooses the tokens.
        stopping: finishes rows.
        log_probs: records the log-probabilities of the tokens, or None.
    """

    def __init__(
        self, sequences: Sequences, sampler: Sampler, stopping: Stopping, log_probs: LogProbs | None = None
    ) -> None:
        self.sequences, self.sampler, self.stopping, self.log_probs = sequences, sampler, stopping, log_probs

    def prefill(self) -> Tensor:
        """Runs the model on the prompts.

        Returns:
            (B,) the first token of each continuation.
        """
        return self._append(self.sequences.prefill())

    def decode(self) -> Tensor:
        """Runs the model on the newest tokens.

        Returns:
            (B,) the next token of each row, or padding in finished rows.
        """
        return self._append(self.sequences.decode())

    def _append(self, logits: Tensor) -> Tensor:
        choice = self.sampler.choose(logits)
        self._store(choice)
        return self.stopping.update(choice.tokens)

    def _store(self, choice: Choice) -> None:
        self.sequences.append(choice.tokens)
        if self.log_probs is not None:
            self.log_probs.append(choice)
