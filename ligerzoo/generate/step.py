"""One step of generation: the model, the choice of tokens, and finished rows."""

from __future__ import annotations

from torch import Tensor

from ligerzoo.generate.sampling import Sampler
from ligerzoo.generate.sequences import Sequences
from ligerzoo.generate.stopping import Stopping
from ligerzoo.kernels.sampling import SampledTokens


class DecodeStep:
    """One step of generation: runs the model, chooses a token for each row, and finishes rows.

    A step runs on the device and never waits for it.

    Args:
        sequences: the tokens and the KV cache.
        sampler: chooses the tokens.
        stopping: finishes rows.

    Attributes:
        sampled: the tokens of the last step and their log-probabilities, valid until the next step. Those of finished
            rows have no meaning.
    """

    sampled: SampledTokens

    def __init__(self, sequences: Sequences, sampler: Sampler, stopping: Stopping) -> None:
        self.sequences, self.sampler, self.stopping = sequences, sampler, stopping

    def prefill(self) -> Tensor:
        """Runs the model on the prompts.

        Returns:
            (B,) the first token of each continuation.
        """
        logits = self.sequences.prefill()
        self.sampler.prepare()
        return self._append(logits)

    def decode(self) -> Tensor:
        """Runs the model on the newest tokens.

        Returns:
            (B,) the next token of each row, or padding in finished rows.
        """
        logits = self.sequences.decode()
        self.sampler.prepare()
        return self._append(logits)

    def _append(self, logits: Tensor) -> Tensor:
        """Chooses a token of each row and appends it. The sampler is prepared."""
        self.sampled, shown = self._choose(logits)
        self.sequences.append(self.sampled.tokens[:, None])
        return shown

    def _choose(self, logits: Tensor) -> tuple[SampledTokens, Tensor]:
        """Chooses a token of each row, and finishes rows. Also returns the tokens with padding, (B,)."""
        sampled = self.sampler.draw(logits)
        return sampled, self.stopping.update(sampled.tokens[:, None])
