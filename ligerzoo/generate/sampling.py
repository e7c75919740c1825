"""Chooses the next token of each row from the logits, by options of each row."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor

from ligerzoo.device import upload
from ligerzoo.errors import LigerzooError
from ligerzoo.generate.options import require
from ligerzoo.generate.processors import (
    BiasedSequences,
    Constraints,
    ForcedTokens,
    History,
    RepeatedNgrams,
    RepetitionPenalty,
    RowSpec,
    RowState,
    ScoreProcessor,
    UserProcessors,
)
from ligerzoo.kernels.cross_entropy import cross_entropy
from ligerzoo.kernels.logit_filter import filter_bounds
from ligerzoo.kernels.sampling import SampledTokens, sample_tokens
from ligerzoo.sampling_options import SamplingOptions

_FREE = SamplingOptions()


class _Features(NamedTuple):
    """What the rows need together, padded to the host: it says which kernels a step launches."""

    samples: bool
    filters: bool
    keeps_history: bool
    has_functions: bool
    ngram_size: int
    processors: tuple[bool, ...]
    temperature: float | None


class _Parameters(RowState):
    """Numbers of each row, (R,). Free rows choose the most likely token."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.temperature = torch.zeros(rows, device=device)  # 0 for the most likely token
        self.top_k = torch.full((rows,), vocab_size, device=device)
        self.top_p = torch.ones(rows, device=device)
        self.min_p = torch.zeros(rows, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self.counts = torch.zeros(rows, dtype=torch.int64, device=device)  # new tokens
        self.broken = torch.zeros(rows, dtype=torch.bool, device=device)

    def assign(self, rows: Tensor, spec: RowSpec) -> bool:
        options, vocab_size = spec.options, spec.vocab_size
        samples = options.do_sample  # `index_fill_`, since assigning a number to an index is a host sync
        self.temperature.index_fill_(0, rows, float(options.temperature) if samples else 0.0)
        self.top_k.index_fill_(0, rows, min(options.top_k or vocab_size, vocab_size) if samples else vocab_size)
        self.top_p.index_fill_(0, rows, 1.0 if options.top_p is None or not samples else float(options.top_p))
        self.min_p.index_fill_(0, rows, 0.0 if options.min_p is None or not samples else float(options.min_p))
        if spec.seeds is not None:
            self.seeds[rows] = spec.seeds
        self.counts.index_fill_(0, rows, spec.new_tokens)
        self.broken.index_fill_(0, rows, False)
        return False


class Sampler:
    """Chooses the next token of each row. Each row has its options, and can be replaced at any step.

    What a row draws depends on its logits, options and seed, and not on the other rows or its index.

        sampler = Sampler(rows, vocab_size, device)
        sampler.assign(range(rows), prompts, SamplingOptions(do_sample=True, top_p=0.9))
        tokens, logps, sampling_logps = sampler.choose(logits)

    `choose` is `prepare`, which runs on the host alone, and `draw`, which can be captured in a CUDA graph. A captured
    one may be replayed, after `prepare`, as long as `graph_key` is the same.

    Args:
        rows: R.
        vocab_size: V.
        device: device of the logits.
        exact: compute the log-probability of a token by the kernel of the loss, as training does, so that it has the
            same bits; with a temperature, if all rows have the same one, and nothing else changes the scores. The
            logits are in bf16, converted to fp32.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device, *, exact: bool = False) -> None:
        self._vocab_size, self._device, self._exact = vocab_size, device, exact
        self._parameters = _Parameters(rows, vocab_size, device)
        self._history = History(rows, device)
        self._penalty = RepetitionPenalty(rows, device)
        self._biased = BiasedSequences(
            rows, device, lambda options: bool(options.sequence_bias), lambda spec: spec.biased
        )
        self._banned = BiasedSequences(rows, device, lambda options: options.is_banning, lambda spec: spec.banned)
        self._forced = ForcedTokens(rows, device)
        self._ngrams = RepeatedNgrams(rows, device)
        self._constraints = Constraints(rows, vocab_size, device)
        self._functions: list[UserProcessors] = []
        self._options = [_FREE] * rows
        self._lengths: list[int | None] = [None] * rows  # tokens of each row; None if no option depends on them
        self._allocations = 0
        self._update()

    @property
    def rows(self) -> int:
        """R."""
        return len(self._options)

    @property
    def broken(self) -> Tensor:
        """(R,) bool, whether a logit of the row has been NaN or inf, or all -inf, since it was assigned."""
        return self._parameters.broken

    @property
    def is_broken(self) -> Tensor:
        """0-d bool, whether a row is `broken`."""
        return self._parameters.broken.any()

    @property
    def has_functions(self) -> bool:
        """Whether a row has a `logits_processor`."""
        return self._features.has_functions

    @property
    def has_constraints(self) -> bool:
        """Whether a row has a `constraint`. Its tokens must be known, see `observe`, before the next `prepare`."""
        return bool(self._constraints.states)

    @property
    def graph_key(self) -> tuple[object, ...] | None:
        """Equal keys have equal kernels and memory. None if a `logits_processor` prevents the capture of `draw`."""
        return None if self.has_functions else (*self._features, self._allocations)

    def check(self, options: SamplingOptions, eos_token_ids: Collection[int] = ()) -> None:
        """Raises LigerzooError if an option does not fit the vocabulary, or the tokens that end a row."""
        can_end = options.constraint is None or bool(eos_token_ids)
        require(can_end, "eos_token_id", "none", "a token that ends a row, with a constraint")
        for name, sequences in {
            "bad_words_ids": options.bad_words_ids or (),
            "sequence_bias": [tokens for tokens, _ in options.biases],
            "forced_bos_token_id": [[options.forced_bos_token_id or 0]],
            "forced_eos_token_id": [options.forced_eos_token_ids],
        }.items():
            largest = max((token for tokens in sequences for token in tokens), default=0)
            require(largest < self._vocab_size, name, largest, f"token ids below {self._vocab_size}")

    def assign(
        self,
        rows: Sequence[int],
        prompts: Tensor | Sequence[Tensor],
        options: SamplingOptions,
        *,
        attention_mask: Tensor | None = None,
        eos_token_ids: Sequence[int] = (),
        generator: torch.Generator | None = None,
        seeds: Tensor | None = None,
        new_tokens: int = 0,
        prompt_length: int = 0,
        max_new_tokens: int | None = None,
    ) -> None:
        """Starts new sequences in some rows. All of them are passed to each `logits_processor` together.

        Args:
            rows: n indices.
            prompts: (n, T) token ids, or n tensors of shape (T_i,).
            options: the options of these rows.
            attention_mask: (n, T), 0 for padding, which may be anywhere; None for no padding.
            eos_token_ids: for `min_new_tokens`; a bad word of one of them alone has no effect.
            generator: random number generator on the device, for seeds. None uses torch's default.
            seeds: (n,) int64, see `draw_seeds`. None draws them.
            new_tokens: number of tokens at the end of each prompt that were chosen earlier, with the same seeds: the
                next ones are those that would have followed.
            prompt_length: number of tokens of the prompts, padding included, for `min_length` and
                `forced_bos_token_id`.
            max_new_tokens: largest number of new tokens, for `forced_eos_token_id`.

        Raises:
            LigerzooError: an option does not fit the vocabulary, or the generator is on another device.
        """
        self.check(options, eos_token_ids)
        index = upload(list(rows), self._device)
        if generator is not None:
            check_generator(generator, self._device)
        if options.do_sample and seeds is None:
            seeds = draw_seeds(len(rows), self._device, generator)
        self._leave_functions(rows)
        spec = RowSpec(
            rows=rows,
            prompts=prompts,
            options=options,
            attention_mask=attention_mask,
            eos_token_ids=eos_token_ids,
            seeds=seeds,
            new_tokens=new_tokens,
            prompt_length=prompt_length,
            max_new_tokens=max_new_tokens,
            vocab_size=self._vocab_size,
            device=self._device,
        )
        for state in self._states:
            self._allocations += state.assign(index, spec)
        for row, length in zip(rows, spec.lengths, strict=True):
            self._options[row], self._lengths[row] = options, length
        if options.logits_processor:
            self._functions.append(UserProcessors(options.logits_processor, rows))
        self._update()

    def release(self, rows: Sequence[int]) -> None:
        """Marks rows as free: their options no longer cost time. What they draw is undefined."""
        self.assign(rows, torch.empty(len(rows), 0, dtype=torch.int64), _FREE)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keeps these rows, in this order. A row that occurs several times draws the same tokens in all of them."""
        index = upload(list(rows), self._device)
        for state in self._states:
            state.select_rows(index)
        self._options = [self._options[row] for row in rows]
        self._lengths = [self._lengths[row] for row in rows]
        for group in self._functions:
            group.rows = [new for old in group.rows for new, row in enumerate(rows) if row == old]
        self._allocations += 1
        self._leave_functions(())
        self._update()

    def clone(self) -> Sampler:
        """Returns an independent copy, which draws the same tokens from the same logits, without what the host does."""
        clone = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, RowState):
                setattr(clone, name, copy.copy(value))
        clone._functions, clone._constraints.states = [], {}
        clone.select_rows(range(self.rows))  # copies the tensors
        return clone

    def branch(self, tokens: Tensor) -> None:
        """Replaces the only row by n + 1 rows: row i continues after the first i of these tokens, (n,) int64.

        Row i draws what the row would draw if it had drawn these i tokens. `keep_branch` returns to one row.
        """
        self.select_rows([0] * (len(tokens) + 1))
        self._parameters.counts += torch.arange(self.rows, device=self._device)
        self._lengths = [None if length is None else length + i for i, length in enumerate(self._lengths)]
        if self._features.keeps_history:
            self._history.reserve(max(length or 0 for length in self._lengths))
            self._history.branch(tokens)
        for processor in self._active:
            processor.branch(tokens)

    def keep_branch(self, row: int) -> None:
        """Keeps one of the rows of `branch`. It is `broken` if it or an earlier one is."""
        is_broken = self._parameters.broken[: row + 1].any()
        self.select_rows([row])
        self._parameters.broken |= is_broken

    def observe(self, tokens: Mapping[int, int]) -> None:
        """Hands the newest tokens of rows, which the host has read, to their constraints."""
        for row, token in tokens.items():
            if row in self._constraints.states:
                self._constraints.states[row].append(token)

    def prepare(self) -> None:
        """Counts the step, makes room for its tokens, and asks the constraints which are allowed.

        Call it before each `draw` or replay of a captured one.
        """
        self._lengths = [None if length is None else length + 1 for length in self._lengths]
        longest = max((length for length in self._lengths if length is not None), default=0)
        self._allocations += self._history.reserve(longest)
        if self.has_constraints:
            self._constraints.update()

    def draw(self, logits: Tensor) -> SampledTokens:
        """Chooses a token of each row from the logits (R, V), and updates the rows in place.

        Log-probabilities are NaN in rows that are `broken`.
        """
        parameters, features = self._parameters, self._features
        scores = self._process(logits.float()) if self._active or self._functions else None
        drawing: tuple[Tensor | None, ...] = (None, None, None)
        bounds: tuple[Tensor | None, ...] = (None, None)
        if features.samples:
            drawing = parameters.seeds, parameters.counts, parameters.temperature
        if features.filters:
            filters = parameters.temperature, parameters.top_k, parameters.top_p, parameters.min_p
            bounds = filter_bounds(logits if scores is None else scores, *filters)
        sampled = sample_tokens(logits, scores, *drawing, *bounds)
        if self._exact:
            sampled = self._exact_logps(logits.to(torch.bfloat16), sampled)
        parameters.broken |= sampled.logps.isnan() | sampled.sampling_logps.isnan()
        parameters.counts += 1
        if features.keeps_history:
            self._history.append(sampled.tokens)
        for processor in self._active:
            processor.append(sampled.tokens)
        return sampled

    def choose(self, logits: Tensor) -> SampledTokens:
        """Chooses a token of each row from the logits (R, V): `prepare` and `draw`."""
        self.prepare()
        return self.draw(logits)

    @property
    def _states(self) -> list[RowState]:
        return [value for value in vars(self).values() if isinstance(value, RowState)]

    def _exact_logps(self, logits: Tensor, sampled: SampledTokens) -> SampledTokens:
        """Returns the tokens with the log-probabilities that the loss computes, where they are known to be the same."""
        temperature = self._features.temperature
        logps = own = -cross_entropy(logits, sampled.tokens, reduction="none")
        if temperature is None:
            return sampled._replace(logps=logps)
        if temperature != 1:
            own = -cross_entropy(logits, sampled.tokens, reduction="none", temperature=temperature)
        is_sampled = self._parameters.temperature > 0
        return sampled._replace(logps=logps, sampling_logps=own.where(is_sampled, sampled.sampling_logps))

    def _process(self, scores: Tensor) -> Tensor:
        """Applies the penalties, bans, constraints and functions of the rows to scores (R, V), which stay unchanged."""
        for processor in self._active:
            scores = processor(scores, self._history, self._parameters.counts)
        if self._functions:
            scores = scores.clone()
            for group in self._functions:
                # `prepare` has counted the token that is being drawn.
                group.apply(scores, self._history, [(self._lengths[row] or 1) - 1 for row in group.rows])
        return scores

    def _leave_functions(self, rows: Sequence[int]) -> None:
        """Removes rows from the groups of `logits_processor`."""
        for group in self._functions:
            group.rows = [row for row in group.rows if row not in rows]
        self._functions = [group for group in self._functions if group.rows]

    def _update(self) -> None:
        """Updates what the rows need together."""
        options = self._options
        penalties = self._biased, self._penalty, self._ngrams, self._banned
        processors: tuple[ScoreProcessor, ...] = *penalties, self._constraints, self._forced
        is_active = tuple(processor.is_used(options) for processor in processors)
        temperatures = {float(row.temperature) for row in options if row.do_sample}
        filters = any(row.is_filtering for row in options)
        is_shared = self._exact and len(temperatures) == 1 and not (filters or any(is_active) or self._functions)
        self._active: list[ScoreProcessor] = [*compress(processors, is_active)]
        self._ngrams.largest = max((row.no_repeat_ngram_size or 0 for row in options), default=0)
        self._features = _Features(
            samples=any(row.do_sample for row in options),
            filters=filters,
            keeps_history=any(length is not None for length in self._lengths),
            has_functions=bool(self._functions),
            ngram_size=self._ngrams.largest,
            processors=is_active,
            temperature=temperatures.pop() if is_shared else None,
        )


def filter_logits(
    logits: Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None
) -> Tensor:
    """Applies the temperature, then each filter that is not None, to logits (..., V)."""
    logits = apply_temperature(logits, temperature)
    if top_k is not None:
        logits = keep_top_k(logits, top_k)
    if top_p is not None:
        logits = keep_top_p(logits, top_p)
    if min_p is not None:
        logits = keep_min_p(logits, min_p)
    return logits


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Divides logits by a positive temperature: below 1 sharpens the distribution, above 1 flattens it."""
    return logits / temperature


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Sets all logits to -inf but the `top_k` largest and those equal to the smallest of these (Fan et al. 2018)."""
    smallest = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
    return logits.masked_fill(logits < smallest, -math.inf)


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Keeps the fewest most likely tokens whose total probability reaches `top_p`; sets the other logits to -inf.

    Ties are broken in favour of the lower token id. `top_p` is in (0, 1]; 1 keeps all tokens (Holtzman et al. 2019).
    """
    if top_p == 1:
        return logits  # rounded probabilities may sum to 1 before the last token
    descending, order = logits.sort(descending=True, stable=True)
    probabilities = descending.softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    dropped_in_order = mass_before >= top_p
    dropped_in_order[..., 0] = False  # a tiny top_p may round to 0
    dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, dropped_in_order)
    return logits.masked_fill(dropped, -math.inf)


def keep_min_p(logits: Tensor, min_p: float) -> Tensor:
    """Sets the logits of tokens to -inf whose probability is below `min_p` times the largest (Nguyen et al. 2024).

    `min_p` is in [0, 1].
    """
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), -math.inf)


def draw_seeds(count: int, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Returns (count,) random int64 seeds of rows, from the generator, or from torch's default one."""
    return torch.randint(2**62, (count,), generator=generator, device=device)


class BrokenLogitsError(LigerzooError):
    """No token can be chosen: a logit of a row was NaN or inf, or all were -inf. Single logits may be -inf.

    Args:
        requests: indices of the requests of a `Scheduler`.
        where: names them.
        steps: number of new tokens within which this happened, if it is known.

    Attributes:
        requests: as given.
    """

    def __init__(self, requests: Sequence[int] = (), where: str | None = None, steps: int | None = None) -> None:
        self.requests = requests
        super().__init__(
            "no token can be chosen",
            where=where or f"logits of request {', '.join(map(str, requests))}",
            got="NaN, inf or only -inf" + ("" if steps is None else f" within {steps} new tokens"),
            expected="finite logits; -inf for some tokens only",
            remedy="Check the weights for NaN, use bfloat16 or float32 instead of float16, a higher temperature, or "
            "options that allow more tokens, such as a constraint with finite texts.",
        )


def check_generator(generator: torch.Generator, device: torch.device) -> None:
    """Raises LigerzooError unless the generator is on the device."""
    is_generator = isinstance(generator, torch.Generator)
    remedy = "Use torch.Generator(model.device).manual_seed(0)."
    require(is_generator, "generator", repr(generator), "a torch.Generator", remedy)
    is_same = generator.device.type == device.type
    require(is_same, "generator", f"one on {generator.device}", f"one on {device}, like input_ids", remedy)
