"""Drafts: guesses of the next tokens, which cost less than a forward of the model, for speculative decoding."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ligerzoo.generate.decode_batch import independent_length
from ligerzoo.generate.model import SupportsGenerate
from ligerzoo.generate.prompts import Prompts
from ligerzoo.generate.sampling import Sampler
from ligerzoo.generate.slot_sequences import make_sequences
from ligerzoo.generate.transfer import upload


class Drafter(AbstractContextManager["Drafter"]):
    """Guesses the next tokens of one sequence. A context, which frees what the drafts needed.

    Args:
        count: number of tokens to guess at a time.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    @abstractmethod
    def propose(self, tokens: Sequence[int], count: int, sampler: Sampler) -> Tensor:
        """Returns the next tokens, (n,) int64 on the device with n <= `count`, possibly none.

        Args:
            tokens: the tokens so far, prompt included. Those of the last call, then the first of the tokens that it
                returned, maybe none or all, then one more.
            count: largest number of tokens.
            sampler: chooses the token that follows `tokens`. It must not change.
        """


class PromptLookup(Drafter):
    """Guesses that text repeats: looks up where the last tokens have occurred first (Saxena 2023).

    If the tokens that followed then end before the draft does, they are repeated.

    Args:
        count: see `Drafter`.
        largest: largest number of last tokens to look up; smaller ones follow if these have not occurred.
        device: device of the drafts.
    """

    def __init__(self, count: int, largest: int, device: torch.device) -> None:
        super().__init__(count)
        self._largest, self._device = largest, device
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after its first occurrence
        self._indexed = 0

    def propose(self, tokens: Sequence[int], count: int, sampler: Sampler) -> Tensor:
        sizes = range(1, self._largest + 1)
        for end in range(self._indexed, len(tokens)):
            for size in sizes[:end]:
                self._next.setdefault(tuple(tokens[end - size : end]), end)
        self._indexed = len(tokens)
        starts = (self._next.get(tuple(tokens[-size:])) for size in reversed(sizes[: len(tokens)]))
        start = next((start for start in starts if start is not None), None)
        if start is None:
            return torch.empty(0, dtype=torch.int64, device=self._device)
        period = len(tokens) - start
        return upload([tokens[start + i % period] for i in range(count)], self._device)

    def __exit__(self, *_: object) -> None:
        pass


class DraftModel(Drafter):
    """A smaller model of the same vocabulary that generates the drafts.

    It draws with the random numbers of the sampler, so that it draws what the large model draws where their
    distributions agree; see `ligerzoo.generate.speculative`.

    Args:
        model: the smaller model.
        count: see `Drafter`.
        prompt: (1, L) token ids of the prompt, without padding.
        max_new_tokens: largest number of new tokens.
    """

    def __init__(self, model: SupportsGenerate, count: int, prompt: Tensor, max_new_tokens: int) -> None:
        super().__init__(count)
        prompts = Prompts(model, prompt, None, None, None, {})
        self._sequences = make_sequences(model, prompts, max_new_tokens=max_new_tokens, is_rewindable=True)
        self._longest = independent_length(model)  # type: ignore[arg-type]
        self._has_started = False

    def propose(self, tokens: Sequence[int], count: int, sampler: Sampler) -> Tensor:
        sequences, sampler = self._sequences, sampler.clone()
        newest = upload([tokens[-1:]], sequences.device)
        if self._longest is not None and len(tokens) + count > self._longest:
            return newest[0, :0]
        if self._has_started:
            # Two tokens in each call, so that they have the same shape: whether the large model accepted all drafts,
            # of which the last is not in the cache, or not.
            sequences.rewind(sequences.length - (len(tokens) - 1))
            logits = sequences.score(newest)[:, -1]
        else:
            sequences.prefill()
            sequences.append(newest)
            logits = sequences.decode()
            self._has_started = True
        drafts = [sampler.choose(logits).tokens]
        sequences.append(drafts[0][:, None])
        while len(drafts) < count:
            drafts.append(sampler.choose(sequences.decode()).tokens)
            sequences.append(drafts[-1][:, None])
        return torch.cat(drafts)

    def __enter__(self) -> DraftModel:
        self._sequences.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._sequences.__exit__(*error)
