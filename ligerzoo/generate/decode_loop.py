"""The decode loop of `generate`: prefill, then one step per token until all rows have finished."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from ligerzoo.device import DelayedReads
from ligerzoo.generate.drafts import Drafter
from ligerzoo.generate.graphs import CapturedCall
from ligerzoo.generate.sampling import Sampler, check_logits
from ligerzoo.generate.sequences import Sequences
from ligerzoo.generate.stopping import Stopping
from ligerzoo.generate.streaming import Streamer
from ligerzoo.kernels.sampling import SampledTokens

LAG = 4
"""Steps that the GPU may be ahead of the host. Its queue never runs empty."""


def decode_loop(step: DecodeStep, max_new_tokens: int, streamer: Streamer | None, log_probs: LogProbs | None) -> None:
    """Repeats the step until all rows have finished, or `max_new_tokens` times.

    On a GPU the host looks at the state of the rows `LAG` steps late, so that the GPU always has work. Tokens of steps
    after the last row has finished are dropped. The host looks at once for a streamer, stop strings and criteria, if
    the KV cache outlives the call, since a cache may be unable to drop tokens, and if the step waits anyway.
    """
    sequences, sampler, stopping = step.sequences, step.sampler, step.stopping
    is_immediate = streamer is not None or stopping.is_on_host or sequences.keeps_cache or step.is_synchronous
    states: DelayedReads[int] = DelayedReads(sequences.device, 0 if is_immediate else LAG)
    for count in range(1, max_new_tokens + 1):
        tokens = step.prefill() if count == 1 else step.decode()
        if log_probs is not None:
            log_probs.append(step.sampled)
        is_last = count == max_new_tokens
        if stopping.is_possible or is_last or streamer is not None:
            if stopping.is_on_host:
                stopping.update_on_host(sequences.continuations)
            states.push(count, torch.cat([stopping.running, sampler.is_broken[None]]))
            for counted, (*is_running, is_broken) in states.pop(waits=is_last):
                check_logits(is_broken, counted)
                if not any(is_running):
                    sequences.truncate(counted)
                    is_last = True
                    break
                sequences.release([row for row, runs in enumerate(is_running) if not runs])
        if streamer is not None:
            streamer.put(tokens.cpu())
        if is_last:
            break


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
        self._call = CapturedCall[tuple[SampledTokens, Tensor]](sampler)

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
        """Chooses a token of each row, as a captured graph where the model runs as one, and appends it."""
        self.sampler.prepare()
        return self._append(*self._call(self._choose, logits, self.sequences.pool))

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


class SpeculativeStep(DecodeStep):
    """A step of one row that appends tokens which were verified together, and verifies more when none is left.

    One forward of the model computes the logits after several draft tokens (Leviathan et al. 2023). From them, the
    sampler chooses a token for each position, as it would without drafts. Draft tokens are accepted while they equal
    the chosen ones, and the first chosen token that differs is accepted in place of the draft. So each token is the one
    that plain decoding chooses, with its options and seed: not only the distribution, but the samples are the same.

    The number of accepted tokens is that of rejection sampling if the draft is certain, as greedy ones and those of a
    lookup are: a draft token is accepted with its probability. A draft that is sampled from q, with the random numbers
    that sample from p, is accepted with probability (1 - d) / (1 + d) or more, where d is the total variation distance
    of p and q, and rejection sampling reaches 1 - d. In return, the result does not depend on the drafts (Daliri et al.
    2024).

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
