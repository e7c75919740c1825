"""Decides when rows are finished: end-of-sequence tokens, stop strings and criteria of the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ligerzoo.checks import TEXT
from ligerzoo.device import upload
from ligerzoo.errors import LigerzooError
from ligerzoo.generate.options import SupportsGenerate, invalid, require, type_name

StoppingCriterion = Callable[[Tensor, None], Any]
"""Decides which rows are finished, as those of transformers.

Called after each step as `criterion(input_ids, scores)` with the (B, T + new tokens) prompts and continuations, padded
like the result, and None for the scores. Returns a bool for all rows, or a (B,) bool tensor.
"""


class SupportsDecode(Protocol):
    """A tokenizer that `StopStrings` accepts."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str: ...


class Stopping:
    """Decides when rows are finished, and pads them from then on.

    Args:
        model: the model, whose configs give the default token ids.
        prompts: (B, T) token ids of the prompts, as the caller passed them.
        eos_token_id, pad_token_id, stop_strings, tokenizer, stopping_criteria: see `generate`.

    Attributes:
        eos_token_ids: the tokens that finish a row.
        is_possible: whether a row can finish before `max_new_tokens`.
        is_on_host: whether the host looks at the tokens of each step, for stop strings and criteria.
        running: (B,) bool, False for finished rows.

    Raises:
        LigerzooError: an option is invalid, or several rows can finish and there is no padding token.
    """

    def __init__(
        self,
        model: SupportsGenerate,
        prompts: Tensor,
        *,
        eos_token_id: int | Sequence[int] | None,
        pad_token_id: int | None,
        stop_strings: str | Sequence[str] | None,
        tokenizer: SupportsDecode | None,
        stopping_criteria: Sequence[StoppingCriterion] | None,
    ) -> None:
        self._stop_strings = StopStrings(stop_strings, tokenizer) if stop_strings is not None else None
        self.eos_token_ids = eos_ids = token_ids(model, "eos_token_id", eos_token_id)
        pad_ids = token_ids(model, "pad_token_id", pad_token_id) or eos_ids
        self._prompts = prompts
        rows, device = len(prompts), prompts.device
        self._criteria = _checked_criteria(stopping_criteria)
        self.is_on_host = bool(self._stop_strings or self._criteria)
        self.is_possible = bool(eos_ids) or self.is_on_host
        needs_padding = self.is_possible and rows != 1
        remedy = "Pass pad_token_id=0, for example: only finished rows contain it."
        expected = "a token id that fills finished rows"
        require(bool(pad_ids) or not needs_padding, "pad_token_id", "none", expected, remedy)
        self._pad_id = pad_ids[0] if pad_ids else 0
        self._eos = upload(eos_ids, device)
        self.running = torch.ones(rows, dtype=torch.bool, device=device)
        self._lengths = torch.zeros(rows, 1, dtype=torch.long, device=device)  # tokens until a row finished

    def update(self, tokens: Tensor) -> Tensor:
        """Updates `running` after a step, except for what the host looks at.

        Args:
            tokens: (B, 1) new tokens.

        Returns:
            (B,): the new tokens, with padding in rows that had finished before.
        """
        self._lengths += self.running[:, None]
        shown = tokens[:, 0].where(self.running, self._pad_id)
        self.running &= (tokens != self._eos).all(1)
        return shown

    def update_on_host(self, continuations: Tensor) -> None:
        """Updates `running` for stop strings and criteria.

        Args:
            continuations: (B, new tokens).

        Raises:
            LigerzooError: a criterion returns another type or shape.
        """
        if self._stop_strings is not None:
            tails = continuations[:, -self._stop_strings.window :].tolist()
            is_running = [not self._stop_strings.found_in(tail) for tail in tails]
            self.running &= upload(is_running, continuations.device).bool()
        if self._criteria:
            sequences = torch.cat([self._prompts, self.pad(continuations)], 1)
            for index, criterion in enumerate(self._criteria):
                self.running &= ~_checked_verdict(criterion(sequences, None), index, self.running)

    def pad(self, values: Tensor, fill: float | None = None) -> Tensor:
        """Replaces what follows the end of each row.

        Args:
            values: (B, new tokens), such as the continuations.
            fill: replaces them; default: the padding token.
        """
        columns = torch.arange(values.shape[1], device=values.device)
        return values.where(columns < self._lengths, self._pad_id if fill is None else fill)

    def finish_reasons(self) -> list[str]:
        """Returns why each row ended: "stop", or "length" for `max_new_tokens`."""
        return ["length" if is_running else "stop" for is_running in self.running.tolist()]


class StopStrings:
    """Finds strings at the end of a sequence of tokens.

    Args:
        strings: one string or several, none of them empty.
        tokenizer: decodes the tokens, special tokens included.

    Attributes:
        window: number of last tokens to search.

    Raises:
        LigerzooError: a string is empty, or there is no tokenizer.
    """

    # Tokens cut inside a character may decode to other text. A character has at most four bytes, so one of four
    # consecutive cuts is between characters. One more token is needed because a cut may remove a leading space.
    _CUTS = 4

    def __init__(self, strings: str | Sequence[str], tokenizer: SupportsDecode | None) -> None:
        several = strings if isinstance(strings, Iterable) else ()
        self.strings = [strings] if isinstance(strings, str) else list(several)
        is_valid = self.strings != [] and all(map(TEXT.accepts, self.strings))
        require(is_valid, "stop_strings", repr(strings), "one or more strings that are not empty")
        if tokenizer is None or not hasattr(tokenizer, "decode"):
            what, got, expected = "stop_strings need a tokenizer", type_name(tokenizer), "a ligerzoo.Tokenizer"
            remedy = "Pass tokenizer=... to generate."
            raise LigerzooError(what, where="tokenizer", got=got, expected=expected, remedy=remedy)
        self.tokenizer = tokenizer
        self.window = max(len(string.encode()) for string in self.strings) + self._CUTS

    def found_in(self, tail: list[int]) -> bool:
        """Returns whether the last `window` tokens of a continuation contain one of the strings."""
        texts = (self.tokenizer.decode(tail[cut:], skip_special_tokens=False) for cut in range(self._CUTS))
        return any(string in text for text in texts for string in self.strings)


def token_ids(model: SupportsGenerate, name: str, argument: int | Sequence[int] | None) -> list[int]:
    """Returns the token ids from the argument, else generation_config, else config. Negative ids mean none."""
    sources = (argument, model.generation_config.get(name), getattr(model.config, name, None))
    value: Any = next((source for source in sources if source is not None), [])
    ids = value if isinstance(value, list | tuple) else [value]
    valid = all(type(i) is int and abs(i) < 2**31 for i in ids)
    remedy = "tokenizer.token_to_id(text) returns the id of a token." if isinstance(value, str) else None
    require(valid, name, repr(value), "a token id below 2^31, or a list of them", remedy)
    return [i for i in ids if i >= 0]


def _checked_criteria(criteria: object) -> list[StoppingCriterion]:
    """Returns the criteria; raises LigerzooError unless they are callables."""
    match criteria:
        case None:
            return []
        case Sequence() if all(map(callable, criteria)):
            return list(criteria)
    remedy = "Put it in a list." if callable(criteria) else None
    expected = "a list of callables (input_ids, scores) -> bool or (B,) bool tensor"
    raise invalid("stopping_criteria", repr(criteria), expected, remedy)


def _checked_verdict(verdict: object, index: int, running: Tensor) -> Tensor:
    """Returns what a criterion returned as a bool tensor.

    Raises:
        LigerzooError: it is neither a bool nor a bool tensor with the shape of `running`.
    """
    shape = tuple(running.shape)
    match verdict:
        case bool():
            return torch.full_like(running, verdict)
        case Tensor() if verdict.dtype == torch.bool and verdict.shape in ((), shape):
            return verdict.to(running.device)
        case Tensor():
            got = f"{verdict.dtype} {tuple(verdict.shape)}"
        case _:
            got = repr(verdict)
    raise invalid(f"stopping_criteria[{index}]", got, f"it to return a bool, or a bool tensor of shape {shape}")
