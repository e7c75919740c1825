"""The loop of generation: an engine decodes one token of each row in a step, for a batch or for a queue of requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ligerzoo.device import DelayedReads, upload
from ligerzoo.generate.graphs import CapturedCall, GraphPool
from ligerzoo.generate.options import SupportsGenerate, invalid, require, token_ids
from ligerzoo.generate.rows import BatchRows
from ligerzoo.generate.sampling import BrokenLogitsError, Sampler
from ligerzoo.generate.streaming import StopStrings, SupportsDecode
from ligerzoo.kernels.sampling import SampledTokens

LAG = 4
"""Steps that the GPU may be ahead of the host. Its queue never runs empty."""

C = TypeVar("C")
L = TypeVar("L")
U = TypeVar("U")


class Engine(ABC, Generic[C, L, U]):
    """Continues sequences together: each `step` decodes one token of each running row.

        logits of the running rows, and of those that start
            -> a token of each row, chosen in a captured graph where the model runs as one
            -> the host reads what earlier steps have chosen

    On a GPU the host reads `LAG` steps late, so that the GPU always has work. One thread drives an engine.

    Args:
        sampler: chooses the tokens.
        device: device of the model.
        lag: steps that the host reads late.
    """

    def __init__(self, sampler: Sampler, device: torch.device, lag: int = LAG) -> None:
        self.device, self._sampler = device, sampler
        self._call: CapturedCall[tuple[C, Tensor]] | None = None
        self._key: tuple[object, ...] | None = None
        self._reads: DelayedReads[L] = DelayedReads(device, lag)
        self._updates: list[U] = []

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether nothing waits or runs, and `step` has returned all updates."""

    def step(self) -> list[U]:
        """Decodes one token of each running row. Returns what the host has read since the last step."""
        self._decode()
        self._read(waits=self._is_last)
        updates, self._updates = self._updates, []
        return updates

    def _decode(self) -> None:
        """Launches the work of a step."""
        if (logits := self._logits()) is not None:
            if self._sampler.has_constraints:  # which need the tokens of the last step; meanwhile the model runs
                self._read(waits=True)
            self._sampler.prepare()
            self._append(logits, *self._chosen(logits))

    def _chosen(self, logits: Tensor) -> tuple[C, Tensor]:
        """Calls `_choose`; in a captured graph from the second time on for the same memory of logits and sampler.

        The graph is small. Each engine captures it, since it depends on the options of sampling.
        """
        call, pool, key = self._call, self._pool, self._sampler.graph_key
        if pool is None or key is None:
            self._call = None
            return self._choose(logits)
        if call is None or call.x is not logits or call.pool is not pool or key != self._key:
            self._call = call = CapturedCall(logits, pool)
            self._key = key
        else:
            call.capture(self._choose)
        return call(self._choose, logits)

    def _read(self, *, waits: bool) -> None:
        """Reads the results of earlier steps, or of all; see `DelayedReads.pop`."""
        for label, values in self._reads.pop(waits=waits):
            self._handle(label, values)

    @property
    @abstractmethod
    def _pool(self) -> GraphPool | None:
        """Memory of the captured graphs that compute the logits; None for eager ones."""

    @property
    @abstractmethod
    def _is_last(self) -> bool:
        """Whether the next step depends on the results, so that the host waits for them."""

    @abstractmethod
    def _logits(self) -> Tensor | None:
        """Runs the model, (R, V) fp32 logits of the next tokens; None if no row runs."""

    @abstractmethod
    def _choose(self, logits: Tensor) -> tuple[C, Tensor]:
        """Chooses a token of each row, by kernels only. The sampler is prepared."""

    @abstractmethod
    def _append(self, logits: Tensor, chosen: C, result: Tensor) -> None:
        """Appends what `_choose` returned to the rows, and pushes to `_reads` what the host reads later."""

    @abstractmethod
    def _handle(self, label: L, values: Any) -> None:
        """Handles the results of a step, which the host has read."""


StoppingCriterion = Callable[[Tensor, None], Any]
"""Decides which rows are finished, as those of transformers.

Called after each step as `criterion(input_ids, scores)` with the (B, T + new tokens) prompts and continuations, padded
like the result, and None for the scores. Returns a bool for all rows, or a (B,) bool tensor.
"""


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


class BatchEngine(Engine[SampledTokens, int, Tensor]):
    """Continues a batch whose rows start together, until all have finished. Each step returns (B,) tokens as shown.

    The device finishes rows, and the host learns about it late. Tokens of steps after the last row has finished are
    dropped. The host reads at once for a streamer, stop strings, criteria and constraints, and if the KV cache outlives
    the call, since a cache may be unable to drop tokens.

    Args:
        rows: the tokens and the KV cache.
        sampler: chooses the tokens.
        stopping: finishes rows.
        limit: largest number of new tokens.
        streams: whether the host needs the tokens of each step.
        keeps_logps: whether to record log-probabilities.
    """

    _lag = LAG

    def __init__(
        self, rows: BatchRows, sampler: Sampler, stopping: Stopping, limit: int, *, streams: bool, keeps_logps: bool
    ) -> None:
        reads_at_once = streams or stopping.is_on_host or rows.keeps_cache or sampler.has_constraints
        super().__init__(sampler, rows.device, 0 if reads_at_once else self._lag)
        self._rows, self._stopping, self._limit, self._keeps_logps = rows, stopping, limit, keeps_logps
        self._reads_all = stopping.is_possible or streams
        self._count, self._has_finished = 0, False
        self._logps: list[tuple[Tensor, Tensor]] = []

    @property
    def is_idle(self) -> bool:
        return self._has_finished or self._count == self._limit

    @property
    def _is_last(self) -> bool:
        return self._count == self._limit

    @property
    def _pool(self) -> GraphPool | None:
        return self._rows.pool

    def _logits(self) -> Tensor:
        return self._rows.decode() if self._count else self._rows.prefill()

    def _choose(self, logits: Tensor) -> tuple[SampledTokens, Tensor]:
        """Returns the tokens, and the same with padding in rows that had finished before, (B,)."""
        sampled = self._sampler.draw(logits)
        return sampled, self._stopping.update(sampled.tokens[:, None])

    def _append(self, logits: Tensor | None, chosen: SampledTokens, result: Tensor) -> None:
        self._rows.append(chosen.tokens[:, None])
        self._count += 1
        self._updates.append(result)
        if self._keeps_logps:  # copies: a captured graph writes each step to the same memory
            self._logps.append((chosen.logps.clone(), chosen.sampling_logps.clone()))
        if self._reads_all or self._is_last:
            if self._stopping.is_on_host:
                self._stopping.update_on_host(self._rows.continuations)
            flags = self._stopping.running, self._sampler.is_broken[None]
            tokens = [chosen.tokens] if self._sampler.has_constraints else []
            self._reads.push(self._count, torch.cat([*flags, *tokens]))

    def _handle(self, label: int, values: list[float]) -> None:
        if self._has_finished:
            return
        is_running, is_broken, tokens = (
            values[: self._rows.count],
            values[self._rows.count],
            values[self._rows.count + 1 :],
        )
        self._sampler.observe(dict(enumerate(map(int, tokens))))
        if is_broken:
            raise BrokenLogitsError(where="logits", steps=label)
        if any(is_running):
            self._rows.release([row for row, runs in enumerate(is_running) if not runs])
        else:
            self._rows.truncate(label)
            self._has_finished = True

    def logps(self) -> tuple[Tensor, Tensor]:
        """Returns `logps` and `sampling_logps` of the continuations, (R, new tokens)."""
        continuations = self._rows.continuations
        steps = self._logps[: continuations.shape[1]]  # the last ones may be dropped
        if not steps:
            return torch.zeros_like(continuations, dtype=torch.float32), continuations.float()
        logps, sampling_logps = (torch.stack(columns, 1) for columns in zip(*steps, strict=True))
        return logps, sampling_logps
