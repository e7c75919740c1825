"""Speculative decoding: one forward of the model verifies several draft tokens (Leviathan et al. 2023).

The model computes the logits after each draft token at once. From them, the sampler chooses a token for each position,
as it would without drafts. Draft tokens are accepted while they equal the chosen ones, and the first chosen token that
differs is accepted in place of the draft. So each token is the one that plain decoding chooses, with its options and
seed: not only the distribution, but the samples are the same.

The number of accepted tokens is that of rejection sampling if the draft is certain, as greedy ones and those of a
lookup are: a draft token is accepted with its probability. A draft that is sampled from q, with the random numbers that
sample from p, is accepted with probability (1 - d) / (1 + d) or more, where d is the total variation distance of p and
q, and rejection sampling reaches 1 - d. In return, the result does not depend on the drafts (Daliri et al. 2024).
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from ligerzoo.generate.drafts import Drafter
from ligerzoo.generate.sampling import Sampler
from ligerzoo.generate.sequences import Sequences
from ligerzoo.generate.step import DecodeStep
from ligerzoo.generate.stopping import Stopping
from ligerzoo.kernels.sampling import SampledTokens


class SpeculativeStep(DecodeStep):
    """A step of one row that appends tokens which were verified together, and verifies more when none is left.

    The host waits for the device once per verification: the number of accepted tokens decides which are next.

    Args:
        sequences, sampler, stopping: see `DecodeStep`.
        drafter: guesses tokens.
    """

    is_synchronous = True

    def __init__(self, sequences: Sequences, sampler: Sampler, stopping: Stopping, drafter: Drafter) -> None:
        super().__init__(sequences, sampler, stopping)
        self._drafter = drafter
        prompts, mask = sequences.prompts, sequences.prompts_mask
        self._tokens: list[int] = (prompts[0] if mask is None else prompts[0, mask[0]]).tolist()
        self._verified: deque[SampledTokens] = deque()  # chosen tokens that are not appended yet

    def prefill(self) -> Tensor:
        shown = super().prefill()
        self._tokens += self.sampled.tokens.tolist()
        return shown

    def decode(self) -> Tensor:
        if not self._verified:
            self._verify()
        sampled = self._verified.popleft()
        return self._append(sampled, self.stopping.update(sampled.tokens[:, None]))

    def _verify(self) -> None:
        """Verifies a draft, if there is one."""
        sequences = self.sequences
        drafts = self._propose()
        if drafts is None or len(drafts) == 0:
            chosen = self.sampler.choose(sequences.decode())
            new = chosen.tokens.tolist()
        else:
            length = sequences.continuations.shape[1]
            logits = sequences.score(drafts[None])[0]
            chosen, new = choose_with_drafts(self.sampler, logits, drafts)
            sequences.rewind(len(drafts) + 1 - len(new))
            sequences.truncate(length)  # the tokens are appended one after the other
        self._tokens += new
        self._verified.extend(SampledTokens(*(x[i : i + 1] for x in chosen)) for i in range(len(new)))

    def _propose(self) -> Tensor | None:
        """Returns a draft that the model can process, or None."""
        count, placeholders = self.sequences.room_for_drafts(self._drafter.count), self.sequences.placeholders
        if count == 0:
            return None
        drafts = self._drafter.propose(self._tokens, count, self.sampler)
        if placeholders:
            inputs = [self._tokens[-1], *drafts.tolist()]
            allowed = next((i for i, token in enumerate(inputs) if token in placeholders), len(inputs))
            drafts = drafts[: max(0, allowed - 1)]
        return drafts


def choose_with_drafts(sampler: Sampler, logits: Tensor, drafts: Tensor) -> tuple[SampledTokens, list[int]]:
    """Chooses tokens as if the model had computed the logits of one after the other.

    Functions of the user are called for accepted tokens only, since they may count their calls.

    Args:
        sampler: of one row. Continues after the chosen tokens.
        logits: (n + 1, V), of the first draft token, of the second, ..., and of the token that follows.
        drafts: (n,) int64.

    Returns:
        The chosen tokens, from 1 to n + 1, and their token ids: those of the drafts, except for the last one.
    """
    if sampler.has_functions:
        chosen: list[SampledTokens] = []
        new: list[int] = []
        for row, draft in zip(logits, [*drafts.tolist(), None], strict=True):
            chosen.append(sampler.choose(row[None]))
            new += chosen[-1].tokens.tolist()
            if new[-1] != draft:
                break
        return SampledTokens(*map(torch.cat, zip(*chosen, strict=True))), new
    sampler.branch(drafts)
    sampled = sampler.choose(logits)
    accepted = (sampled.tokens[:-1] == drafts).cumprod(0).sum()
    *new, count = torch.cat([sampled.tokens, accepted[None]]).tolist()  # the host sync
    sampler.keep_branch(count)
    return SampledTokens(*(x[: count + 1] for x in sampled)), new[: count + 1]
