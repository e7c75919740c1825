"""What `generate` returns with `return_dict_in_generate=True`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ligerzoo.kernels.sampling import SampledTokens
from ligerzoo.layers import KVCache
from ligerzoo.models.output import ModelOutput


@dataclass
class GenerateOutput(ModelOutput):
    """Output of `generate` with `return_dict_in_generate=True`; see `ModelOutput` for access by name and index.

    R is the number of prompts times `num_return_sequences`.

    Attributes:
        sequences: (R, T + new tokens) int64, what `generate` returns otherwise.
        logps: (R, new tokens) fp32, log-probabilities of the new tokens under the softmax of the model's logits,
            without temperature, filters and penalties; 0 after the end of a row.
        sampling_logps: (R, new tokens) fp32, log-probabilities under the distribution that the tokens were sampled
            from; 0 for greedy decoding, which has no choice, and after the end of a row.
        finish_reasons: why each row ended: "stop" for an end-of-sequence token, a stop string or a stopping criterion,
            "length" for the largest number of new tokens.
        past_key_values: the KV cache that was passed, which holds all tokens but the last; None if none was passed.
    """

    sequences: Tensor
    logps: Tensor
    sampling_logps: Tensor
    finish_reasons: list[str]
    past_key_values: KVCache | None = None


class LogProbs:
    """Records the log-probabilities of the chosen tokens."""

    def __init__(self) -> None:
        self._steps: list[tuple[Tensor, Tensor]] = []

    def append(self, sampled: SampledTokens) -> None:
        """Records those of one step. Copies them: a captured CUDA graph writes each step to the same memory."""
        self._steps.append((sampled.logps.clone(), sampled.sampling_logps.clone()))

    def of(self, continuations: Tensor) -> tuple[Tensor, Tensor]:
        """Returns `logps` and `sampling_logps` of the continuations, (R, new tokens), which may lack the last steps."""
        steps = self._steps[: continuations.shape[1]]
        if not steps:
            return torch.zeros_like(continuations, dtype=torch.float32), continuations.float()
        logps, sampling_logps = (torch.stack(columns, 1) for columns in zip(*steps, strict=True))
        return logps, sampling_logps
