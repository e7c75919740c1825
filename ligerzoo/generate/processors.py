"""What changes the scores of the next tokens: penalties, banned sequences, n-grams, constraints, functions of the user.

Each class keeps its state per row, as tensors whose first dimension is R, the number of rows. It updates them in place
and has no host sync, so that a step can run as a captured CUDA graph; only functions of the user cannot.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ligerzoo.device import to_device, upload
from ligerzoo.generate.options import invalid, require, type_name
from ligerzoo.sampling_options import ConstraintState, LogitsProcessor, SamplingOptions


def penalize_repetition(logits: Tensor, occurred: Tensor, penalty: float | Tensor) -> Tensor:
    """Makes tokens that have occurred less likely: divides positive logits by `penalty` and multiplies negative ones.

    Args:
        logits: (B, V).
        occurred: (B, V) bool, whether the token has occurred.
        penalty: a positive number, or (B, 1) of them. 1 has no effect; less than 1 makes these tokens more likely
            (Keskar et al. 2019).
    """
    return torch.where(occurred, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


_ANY = -2  # matches each token
_NONE = -1  # what precedes the first token
ALWAYS = 2**62  # number of new tokens that no row reaches


class PaddedPrompts(NamedTuple):
    """Prompts of rows of different lengths.

    Attributes:
        tokens: (n, T) int64, padded on the right.
        lengths: (n,) int64.
    """

    tokens: Tensor
    lengths: Tensor

    @staticmethod
    def of(prompts: Tensor | Sequence[Tensor], attention_mask: Tensor | None, device: torch.device) -> PaddedPrompts:
        """Moves padding to the right.

        Args:
            prompts: (n, T), or n tensors of shape (T_i,).
            attention_mask: (n, T), 0 for padding, for prompts of one tensor; None for no padding.
            device: device of the result.
        """
        if not isinstance(prompts, Tensor):
            tokens = pad_sequence(list(prompts), batch_first=True).long()
            return PaddedPrompts(to_device(tokens, device), upload([len(prompt) for prompt in prompts], device))
        tokens = prompts.long().to(device)
        if attention_mask is None:
            return PaddedPrompts(tokens, torch.full((len(tokens),), tokens.shape[1], device=device))
        is_token = attention_mask.to(device=device, dtype=torch.bool)
        order = (~is_token).int().argsort(dim=1, stable=True)
        return PaddedPrompts(tokens.gather(1, order), is_token.sum(1))

    @property
    def is_token(self) -> Tensor:
        """(n, T) bool, False for padding."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]


class BiasedSequence(NamedTuple):
    """Token ids, the bias of the last of them, and the number of new tokens from which it is 0."""

    tokens: Sequence[int]
    bias: float = -math.inf
    until: int = ALWAYS


@dataclass(frozen=True, kw_only=True)
class RowSpec:
    """Sequences that start in some rows, all with the same options.

    Attributes:
        rows, prompts, options, attention_mask, eos_token_ids, seeds, new_tokens, prompt_length, max_new_tokens: see
            `Sampler.assign`.
        vocab_size: V.
        device: device of the rows.
    """

    rows: Sequence[int]
    prompts: Tensor | Sequence[Tensor]
    options: SamplingOptions
    attention_mask: Tensor | None
    eos_token_ids: Sequence[int]
    seeds: Tensor | None
    new_tokens: int
    prompt_length: int
    max_new_tokens: int | None
    vocab_size: int
    device: torch.device

    @cached_property
    def padded(self) -> PaddedPrompts:
        """The prompts on the device."""
        return PaddedPrompts.of(self.prompts, self.attention_mask, self.device)

    @cached_property
    def biased(self) -> list[BiasedSequence]:
        """The sequences whose last token has a bias."""
        return [BiasedSequence(tokens, float(bias)) for tokens, bias in self.options.biases]

    @cached_property
    def banned(self) -> list[BiasedSequence]:
        """The sequences whose last token is banned."""
        options, eos_token_ids = self.options, self.eos_token_ids
        words = [word for word in options.bad_words_ids or () if not (len(word) == 1 and word[0] in eos_token_ids)]
        fewest = options.min_new_tokens
        if fewest is None:
            fewest = max(0, (options.min_length or 0) - self.prompt_length)
        first = 2 if self.prompt_length == 1 and options.forced_bos_token_id is not None else 1
        tokens = [(token, fewest) for token in eos_token_ids if fewest > 0]
        tokens += [(token, first) for token in options.begin_suppress_tokens or ()]
        tokens += [(token, ALWAYS) for token in options.suppress_tokens or ()]
        return [BiasedSequence(word) for word in words] + [
            BiasedSequence((token,), until=until) for token, until in tokens if token < self.vocab_size
        ]

    @property
    def forced(self) -> dict[int, Sequence[int]]:
        """The tokens that are forced, by the number of new tokens before them."""
        options, forced = self.options, dict[int, Sequence[int]]()
        if options.forced_bos_token_id is not None and self.prompt_length == 1:
            forced[0] = [options.forced_bos_token_id]
        if options.forced_eos_token_ids and self.max_new_tokens is not None:
            forced[self.max_new_tokens - 1] = options.forced_eos_token_ids
        return forced

    @cached_property
    def needs_history(self) -> bool:
        """Whether an option depends on the order of earlier tokens."""
        has_prefixes = any(len(sequence.tokens) > 1 for sequence in self.biased + self.banned)
        return bool(self.options.no_repeat_ngram_size or self.options.logits_processor or has_prefixes)

    @property
    def lengths(self) -> Sequence[int | None]:
        """Numbers of tokens of the prompts, padding not counted; None if no option depends on them."""
        if not self.needs_history:
            return [None] * len(self.prompts)
        return self.padded.lengths.tolist() if isinstance(self.prompts, Tensor) else list(map(len, self.prompts))


class RowState(ABC):
    """State of each row, in tensors (R, ...)."""

    @abstractmethod
    def assign(self, rows: Tensor, spec: RowSpec) -> bool:
        """Starts sequences in these rows, (n,) int64. Returns whether tensors were replaced."""

    def select_rows(self, rows: Tensor) -> None:
        """Keeps these rows, in this order; a row may occur several times."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value[rows])


class History(RowState):
    """The tokens of each row: its prompt and the new ones.

    Attributes:
        tokens: (R, C) int64.
        lengths: (R,) int64.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.tokens = torch.zeros(rows, 0, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)

    def reserve(self, length: int) -> bool:
        """Makes room for this number of tokens in each row. Returns whether the tensors were replaced."""
        capacity = self.tokens.shape[1]
        if length <= capacity:
            return False
        self.tokens = F.pad(self.tokens, (0, max(length, 2 * capacity) - capacity))
        return True

    def assign(self, rows: Tensor, spec: RowSpec) -> bool:
        if not spec.needs_history:
            return False
        tokens, lengths = spec.padded
        is_replaced = self.reserve(tokens.shape[1] + 1)
        self.tokens[rows, : tokens.shape[1]] = tokens
        self.lengths[rows] = lengths
        return is_replaced

    def append(self, tokens: Tensor) -> None:
        """Appends one token to each row, (R,). Rows without room lose it: only free rows have none."""
        if self.tokens.shape[1]:
            self.tokens.scatter_(1, self.lengths.clamp(max=self.tokens.shape[1] - 1)[:, None], tokens[:, None])
        self.lengths += 1

    def branch(self, tokens: Tensor) -> None:
        """Appends to row i the first i of these tokens, (R - 1,). All rows are equal, and `reserve` has made room."""
        steps = torch.arange(self.lengths.shape[0], device=tokens.device)
        self.tokens[:, self.lengths[0] + steps[:-1]] = tokens  # what follows the end of a row is ignored
        self.lengths += steps

    def last(self, count: int) -> Tensor:
        """Returns the last tokens of each row, (R, count)."""
        index = self.lengths[:, None] - torch.arange(count, 0, -1, device=self.lengths.device)
        in_bounds = index.clamp(0, self.tokens.shape[1] - 1)
        return self.tokens.gather(1, in_bounds).masked_fill(index < 0, _NONE)


class ScoreProcessor(RowState):
    """Changes the scores of the next tokens, by options of each row.

    Args:
        is_used_by: whether a row with these options needs it.
    """

    def __init__(self, is_used_by: Callable[[SamplingOptions], bool]) -> None:
        self.is_used_by = is_used_by

    def is_used(self, options: Sequence[SamplingOptions]) -> bool:
        """Whether a row needs it; `options` are those of the rows."""
        return any(map(self.is_used_by, options))

    @abstractmethod
    def __call__(self, scores: Tensor, history: History, counts: Tensor) -> Tensor:
        """Returns new scores.

        Args:
            scores: (R, V), which stay unchanged.
            history: the tokens of all rows.
            counts: (R,) number of new tokens of each row.
        """

    def append(self, tokens: Tensor) -> None:
        """Receives the next token of each row, (R,)."""

    def branch(self, tokens: Tensor) -> None:
        """Receives the first i of these tokens, (R - 1,), for row i; see `Sampler.branch`."""


class RepetitionPenalty(ScoreProcessor):
    """See `penalize_repetition`."""

    def __init__(self, rows: int, device: torch.device) -> None:
        super().__init__(lambda options: options.repetition_penalty != 1)
        self.penalty = torch.ones(rows, 1, device=device)
        self.occurred = torch.zeros(rows, 0, dtype=torch.bool, device=device)  # empty until a row has a penalty

    def assign(self, rows: Tensor, spec: RowSpec) -> bool:
        is_used = self.is_used_by(spec.options)
        is_first = is_used and self.occurred.shape[1] == 0
        if is_first:
            # The last column is for ids outside the vocabulary, such as image tokens. They are never generated.
            self.occurred = F.pad(self.occurred, (0, spec.vocab_size + 1))
        if self.occurred.shape[1] > 0:
            self.penalty[rows] = float(spec.options.repetition_penalty)
        if is_used:
            outside = self.occurred.shape[1] - 1
            ids = spec.padded.tokens.clamp(max=outside).masked_fill(~spec.padded.is_token, outside)
            self.occurred[rows] = torch.zeros_like(self.occurred[rows]).scatter_(1, ids, True)
        return is_first

    def append(self, tokens: Tensor) -> None:
        """Marks one token of each row, (R,), as occurred."""
        self.occurred.scatter_(1, tokens[:, None], True)

    def branch(self, tokens: Tensor) -> None:
        """Marks the first i of these tokens, (R - 1,), as occurred in row i."""
        rows, outside = len(self.occurred), self.occurred.shape[1] - 1
        is_later = torch.ones(rows, rows - 1, dtype=torch.bool, device=tokens.device).triu()
        self.occurred.scatter_(1, tokens.expand(rows, -1).masked_fill(is_later, outside), True)

    def __call__(self, scores: Tensor, history: History, counts: Tensor) -> Tensor:
        return penalize_repetition(scores, self.occurred[:, :-1], self.penalty)


class BiasedSequences(ScoreProcessor):
    """Adds to the score of the last token of a sequence where the others come before it; a bias of -inf bans it.

    Args:
        rows, device, is_used_by: see `ScoreProcessor`.
        select: returns the sequences of rows.

    Attributes:
        prefixes: (R, S, P) int64, the tokens of each sequence but the last, padded on the left by `_ANY`.
        tokens: (R, S) int64, the last tokens.
        biases: (R, S) fp32.
        until: (R, S) int64, see `BiasedSequence`; 0 for no sequence.
    """

    def __init__(
        self,
        rows: int,
        device: torch.device,
        is_used_by: Callable[[SamplingOptions], bool],
        select: Callable[[RowSpec], Sequence[BiasedSequence]],
    ) -> None:
        super().__init__(is_used_by)
        self._select = select
        self.prefixes = torch.full((rows, 0, 0), _ANY, device=device)
        self.tokens = torch.zeros(rows, 0, dtype=torch.int64, device=device)
        self.biases = torch.zeros(rows, 0, device=device)
        self.until = torch.zeros(rows, 0, dtype=torch.int64, device=device)

    def assign(self, rows: Tensor, spec: RowSpec) -> bool:
        sequences = self._select(spec)
        count, length = self.prefixes.shape[1:]
        more = max(0, len(sequences) - count)
        longer = max(0, max((len(sequence.tokens) - 1 for sequence in sequences), default=0) - length)
        if more or longer:
            self.prefixes = F.pad(self.prefixes, (longer, 0, 0, more), value=_ANY)
            self.tokens, self.biases, self.until = (F.pad(x, (0, more)) for x in (self.tokens, self.biases, self.until))
        self.until.index_fill_(0, rows, 0)
        if sequences:
            width, device = self.prefixes.shape[2], self.tokens.device
            prefixes = [[_ANY] * (width - len(tokens) + 1) + list(tokens[:-1]) for tokens, _, _ in sequences]
            some = rows[:, None], torch.arange(len(sequences), device=device)
            self.prefixes[some] = upload(prefixes, device)
            self.tokens[some] = upload([tokens[-1] for tokens, _, _ in sequences], device)
            self.biases[some] = to_device(torch.tensor([bias for _, bias, _ in sequences]), device)
            self.until[some] = upload([until for _, _, until in sequences], device)
        return bool(more or longer)

    def __call__(self, scores: Tensor, history: History, counts: Tensor) -> Tensor:
        matches = counts[:, None] < self.until
        if width := self.prefixes.shape[2]:
            matches &= ((self.prefixes == _ANY) | (self.prefixes == history.last(width)[:, None])).all(-1)
        return scores.scatter_add(1, self.tokens, self.biases.where(matches, 0))


class ForcedTokens(ScoreProcessor):
    """Allows only some tokens after a certain number of new tokens.

    Attributes:
        tokens: (R, S) int64.
        steps: (R, S) int64, the number of new tokens after which one of the tokens with this number is next; or
            `_NONE`.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        super().__init__(lambda options: options.forced_bos_token_id is not None or bool(options.forced_eos_token_ids))
        self.tokens = torch.zeros(rows, 0, dtype=torch.int64, device=device)
        self.steps = torch.zeros(rows, 0, dtype=torch.int64, device=device)

    def assign(self, rows: Tensor, spec: RowSpec) -> bool:
        pairs = [(step, token) for step, allowed in spec.forced.items() for token in allowed]
        more = max(0, len(pairs) - self.tokens.shape[1])
        if more:
            self.tokens, self.steps = F.pad(self.tokens, (0, more)), F.pad(self.steps, (0, more), value=_NONE)
        self.steps.index_fill_(0, rows, _NONE)
        if pairs:
            some = rows[:, None], torch.arange(len(pairs), device=rows.device)
            self.steps[some], self.tokens[some] = (upload(values, rows.device) for values in zip(*pairs, strict=True))
        return more > 0

    def __call__(self, scores: Tensor, history: History, counts: Tensor) -> Tensor:
        """Replaces the scores of rows whose number of new tokens is one of their steps: 0 for these tokens."""
        is_allowed = self.steps == counts[:, None]
        bound = torch.zeros_like(self.tokens, dtype=scores.dtype).masked_fill(~is_allowed, -torch.inf)
        forced = torch.full_like(scores, -torch.inf).scatter_reduce(1, self.tokens, bound, "amax")
        return forced.where(is_allowed.any(1, keepdim=True), scores)


class RepeatedNgrams(ScoreProcessor):
    """Bans each token that would complete n tokens which have occurred in this order.

    Attributes:
        sizes: (R,) int64, n; 0 for none.
        largest: the largest n of all rows.
    """

    largest = 0

    def __init__(self, rows: int, device: torch.device) -> None:
        super().__init__(lambda options: bool(options.no_repeat_ngram_size))
        self.sizes = torch.zeros(rows, 1, dtype=torch.int64, device=device)

    def assign(self, rows: Tensor, spec: RowSpec) -> bool:
        self.sizes[rows] = spec.options.no_repeat_ngram_size or 0
        return False

    def __call__(self, scores: Tensor, history: History, counts: Tensor) -> Tensor:
        tokens = history.tokens
        index = torch.arange(tokens.shape[1], device=tokens.device)
        is_banned = (self.sizes > 0) & (index >= self.sizes - 1) & (index < history.lengths[:, None])
        last = history.last(self.largest)
        for offset in range(1, self.largest):  # the token `offset` before the end of the n-gram
            is_same = F.pad(tokens[:, :-offset] == last[:, -offset, None], (min(offset, len(index)), 0))
            is_banned &= is_same | (self.sizes <= offset)
        is_banned &= tokens < scores.shape[1]  # ids beyond the vocabulary, such as image tokens, have no score
        bound = torch.full_like(tokens, torch.inf, dtype=scores.dtype).masked_fill(is_banned, -torch.inf)
        return scores.scatter_reduce(1, tokens.clamp(max=scores.shape[1] - 1), bound, "amin")


class Constraints(ScoreProcessor):
    """Drops the tokens that the constraints of rows do not allow. The host decides which, before each step.

    Attributes:
        states: those of the rows that have one.
        bits: (R, W) uint8, see `ConstraintState.fill`; (R, 0) until a row has a constraint.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(lambda options: options.constraint is not None)
        self.states: dict[int, ConstraintState] = {}
        self.bits = torch.zeros(rows, 0, dtype=torch.uint8, device=device)
        self._width = -(-vocab_size // 8)
        self._masks = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)

    def is_used(self, options: Sequence[SamplingOptions]) -> bool:
        return bool(self.states)

    def assign(self, rows: Tensor, spec: RowSpec) -> bool:
        constraint = spec.options.constraint
        self.states = {row: state for row, state in self.states.items() if row not in spec.rows}
        is_first = constraint is not None and self.bits.shape[1] == 0
        if is_first:
            self.bits = F.pad(self.bits, (0, self._width), value=255)
        self.bits.index_fill_(0, rows, 255)
        if constraint is not None:
            for row, prompt in zip(spec.rows, spec.prompts, strict=True):
                self.states[row] = state = constraint.start(spec.eos_token_ids)
                for token in prompt[len(prompt) - spec.new_tokens :].tolist():
                    state.append(token)
        return is_first

    def select_rows(self, rows: Tensor) -> None:
        assert not self.states, "a state belongs to one row"
        self.bits = self.bits[rows]

    def update(self) -> None:
        """Finds out which tokens may come next."""
        bits = np.empty((len(self.states), self._width), np.uint8)
        for state, row in zip(self.states.values(), bits, strict=True):
            state.fill(row)
        device = self.bits.device
        self.bits.index_copy_(0, upload(list(self.states), device), to_device(torch.from_numpy(bits), device))

    def __call__(self, scores: Tensor, history: History, counts: Tensor) -> Tensor:
        is_allowed = (self.bits[:, :, None] & self._masks).bool().flatten(1)[:, : scores.shape[1]]
        return scores.masked_fill(~is_allowed, -torch.inf)


class UserProcessors:
    """Functions of the user for rows that were assigned together.

    Attributes:
        rows: the rows, which are passed to each function together, in this order.
    """

    def __init__(self, functions: Sequence[LogitsProcessor], rows: Sequence[int]) -> None:
        self.functions, self.rows = tuple(functions), list(rows)

    def apply(self, scores: Tensor, history: History, lengths: Sequence[int]) -> None:
        """Replaces the scores of the rows in place.

        Shorter rows are padded on the left by their first token.

        Args:
            scores: (R, V).
            history: the tokens of all rows.
            lengths: number of tokens of each of `rows`.
        """
        rows = upload(self.rows, scores.device)
        longest = max(lengths)
        index = torch.arange(longest, device=scores.device) - (longest - history.lengths[rows])[:, None]
        input_ids = history.tokens[rows].gather(1, index.clamp(min=0))
        result = scores[rows]
        for function in self.functions:
            shape = tuple(result.shape)
            result = function(input_ids, result)
            expected = f"a tensor of shape {shape}, like scores"
            where = f"result of logits_processor {type_name(function)}"
            if not isinstance(result, Tensor):
                raise invalid(where, type_name(result), expected)
            require(tuple(result.shape) == shape, where, tuple(result.shape), expected)
        scores[rows] = result.to(scores.dtype)
