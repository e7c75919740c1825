"""Continuous batching: rows of a batch take the next prompts as soon as others have finished (Yu et al. 2022, Orca)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.checks import AT_LEAST_1, integer, or_none
from ligerzoo.device import upload
from ligerzoo.generate.chunked_prefill import CHUNK_TOKENS, ChunkedPrefill
from ligerzoo.generate.engine import Engine
from ligerzoo.generate.graphs import GraphPool
from ligerzoo.generate.options import CacheOptions, check_devices, check_option, invalid
from ligerzoo.generate.packed_logps import packed_logps, unpack, with_top_logps
from ligerzoo.generate.prompts import Request, RequestOptions, as_prompt
from ligerzoo.generate.sampling import BrokenLogitsError, Sampler, draw_seeds
from ligerzoo.generate.slots import PREFILL_TOKENS, Slots, default_cache_tokens

_MIN_NEW_TOKENS = 256  # a request starts when there is room for these or its `max_new_tokens`, whichever is less


@dataclass(frozen=True)
class Update:
    """New tokens of one request, or a part of its prompt.

    Attributes:
        index: what `Scheduler.add` returned for the request.
        tokens: the new tokens, with the end-of-sequence token.
        logps: their log-probabilities under the softmax of the logits, without temperature and filters.
        finish_reason: "stop" after an end-of-sequence token or stop string, "length" after `max_new_tokens` tokens,
            None while the request runs.
        top_logps: for each token, the `top_logps` most likely token ids at its position and their log-probabilities,
            the most likely first, or those of `logp_token_ids`; empty if the request asks for none.
        is_prompt: whether these are tokens of the prompt, in order, without the first one, which nothing predicts.
            The updates of a request with `prompt_logps` begin with them.
    """

    index: int
    tokens: list[int]
    logps: list[float]
    finish_reason: str | None
    top_logps: list[dict[int, float]] = field(default_factory=list)
    is_prompt: bool = False


class _Step(NamedTuple):
    """Results of a step: the columns of each request, see `unpack`, and whether the tokens are those of a prompt."""

    columns: dict[int, Sequence[int]]
    is_prompt: bool = False


class Scheduler(Engine[Tensor, _Step, Update]):
    """Continues many prompts together. Each of them gets the tokens that it gets alone.

        scheduler = Scheduler(model, batch_size=32, max_new_tokens=100)
        scheduler.add(prompt)
        while not scheduler.is_idle:
            for update in scheduler.step(): ...

    Each step decodes one token of each running request. On a CPU, prompts of more than CHUNK_TOKENS tokens are
    prefilled one after the other, a chunk in each step; shorter ones may start before a long one that waits for
    another. So are prompts with `prompt_logps`, on any device. On a GPU the host reads the tokens some steps late, so
    that the GPU always has work. Not thread-safe: one thread drives it. While requests run, weights may change
    in place, but not be replaced by other tensors.

    Args:
        model: a causal language model with self-attention only. Text inputs only.
        batch_size: largest number of requests that run at the same time. Others wait.
        max_cache_tokens: largest number of tokens for which KV caches take up memory. All rows of a cache have the size
            of the longest one. Requests wait until they fit. If running ones grow too long, the longest of them wait
            until others have finished, and are prefilled again. None: on a GPU, what fits into three quarters of the
            memory that is free now; on a CPU, no limit.
        cache_dtype: dtype of the KV cache, see `generate`.
        exact: see `generate`.
        defaults: options of requests: `max_new_tokens`, `eos_token_id`, `stop_strings`, `tokenizer`, `generator`, and
            `use_model_defaults`, and those of `SamplingOptions`. As in `generate`, generation_config.json has the
            defaults of those that are None. Further, `top_logps` is the number of the most likely tokens to return with
            each token, up to 20; `logp_token_ids` are up to 128 tokens to return instead of these, whose
            log-probabilities are those of the whole vocabulary; and `prompt_logps` says whether to return the
            log-probabilities of the prompt; then `max_new_tokens` may be 0.

    Attributes:
        device: device of the model.
        max_cache_tokens: as given, or the default.
        max_length: largest number of tokens of a prompt and its continuation; None for no limit.

    Raises:
        LigerzooError: an option is unknown or invalid, or the model cannot decode in a `StaticBatch`.
    """

    @torch.inference_mode(False)  # even within inference_mode: what a model caches must remain usable for training
    def __init__(
        self,
        model: nn.Module,
        *,
        batch_size: int,
        max_cache_tokens: int | None = None,
        cache_dtype: torch.dtype | None = None,
        exact: bool = False,
        **defaults: Any,
    ) -> None:
        check_option("batch_size", batch_size, AT_LEAST_1)
        check_option("max_cache_tokens", max_cache_tokens, or_none(AT_LEAST_1))
        check_devices(model)
        self._model = cast(Any, model)
        cache_options = CacheOptions(cache_dtype, exact)
        cache_options.check(model)
        if max_cache_tokens is None:
            max_cache_tokens = default_cache_tokens(model, batch_size, cache_dtype)
        self.max_cache_tokens = max_cache_tokens
        self._cache_options = cache_options
        self._slots = Slots(model, batch_size, max_cache_tokens, cache_options)
        limits = (self._slots.max_length, self.max_cache_tokens)
        self.max_length = min((limit for limit in limits if limit is not None), default=None)
        self._given, self.defaults = defaults, RequestOptions(self._model, **defaults)
        device: torch.device = next(model.parameters()).device
        super().__init__(Sampler(batch_size, self._model.config.vocab_size, device, exact=exact), device)
        self._newest = torch.zeros(batch_size, 1, dtype=torch.int64, device=self.device)
        self._requests: dict[int, Request] = {}  # that are not finished
        self._waiting: deque[int] = deque()
        self._running: dict[int, Request] = {}  # by row
        self._prefill: ChunkedPrefill | None = None
        self._in_chunks = self.device.type == "cpu"
        self._logp_tokens = torch.zeros(batch_size, 0, dtype=torch.int64, device=self.device)  # (R, K), or -1
        self._broken: list[int] = []  # requests whose end `step` has to report
        self._added = 0

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs, and `step` has returned all updates."""
        return not (self._requests or self._updates)

    @property
    def free_rows(self) -> int:
        """Number of further requests that the next step would start, if there is memory for them."""
        taken = len(self._running) + len(self._waiting) + (self._prefill is not None)
        return max(0, self._slots.rows - taken)

    def add(self, prompt: Request | Tensor | Sequence[int], **options: Any) -> int:
        """Adds a request, which waits for a free row.

        Args:
            prompt: (T,) token ids, without padding; a sequence of integers, or a 1-D tensor or NumPy array. Or what
                `request` returned.
            options: replace the defaults.

        Returns:
            The index of the request: 0, 1, ...

        Raises:
            LigerzooError: an option is unknown or invalid, the prompt is empty or has an unknown token id, or the
                sequence may become too long for the model's rotary embedding or for `max_cache_tokens`.
        """
        request = prompt if isinstance(prompt, Request) else self.request(prompt, **options)
        request.index, self._added = self._added, self._added + 1
        if request.options.sampling.do_sample:  # now, so that the tokens do not depend on when the request starts
            request.seed = draw_seeds(1, self.device, request.options.generator)
        self._requests[request.index] = request
        self._waiting.append(request.index)
        return request.index

    def request(self, prompt: object, name: str = "prompt", **options: Any) -> Request:
        """Returns a request for `add`, which takes it once. Any thread may call it.

        Args:
            prompt, options: see `add`.
            name: of the prompt, for messages.
        """
        parsed = RequestOptions(self._model, **{**self._given, **options}) if options else self.defaults
        tokens = as_prompt(prompt, self._model, name)
        with parsed.naming_file():
            self._sampler.check(parsed.sampling, parsed.eos_token_ids)
            request = Request(tokens, parsed)
        if self.max_length is not None and request.max_length > self.max_length:
            got = f"{len(request.prompt)} tokens and max_new_tokens={request.max_new_tokens}"
            if self.max_length == self._slots.max_length:
                remedy = "Use generate: longer sequences change the rotary frequencies of all rows."
            else:
                remedy = "Use a larger max_cache_tokens, which is limited by the memory, or fewer new tokens."
            raise invalid(name, got, f"at most {self.max_length} in all", remedy)
        return request

    def cancel(self, index: int) -> None:
        """Removes a request; there are no more updates of it. One that has finished is ignored.

        Raises:
            LigerzooError: there was never such a request.
        """
        expected = f"an index that add returned, below {self._added}"
        check_option("index", index, integer(0, self._added - 1)._replace(expected=expected))
        self._updates = [update for update in self._updates if update.index != index]
        if index in self._waiting:
            self._waiting.remove(index)
        self._finish(index)

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self) -> list[Update]:
        """Decodes one token of each running request, and starts waiting requests in free rows.

        Returns:
            New tokens, in order. On a GPU, they are those of earlier steps.

        Any other exception, such as KeyboardInterrupt or that of a `logits_processor`, removes all requests.

        Raises:
            BrokenLogitsError: the logits of requests were NaN or infinite. These are removed; others may go on.
        """
        try:
            with torch.cuda.device(self.device if self.device.type == "cuda" else -1):
                updates = super().step()
        except BaseException:  # the host and the KV cache may hold different tokens
            self.close()
            raise
        if self._broken:
            self._updates, broken, self._broken = updates, self._broken, []
            raise BrokenLogitsError(broken)
        return updates

    def close(self) -> None:
        """Removes all requests, and keeps the captured graph for later calls."""
        self._slots.close()
        self._reads.clear()
        for state in (self._requests, self._waiting, self._running, self._updates, self._broken):
            state.clear()
        self._prefill = None
        self._sampler.release(range(self._sampler.rows))

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _pool(self) -> GraphPool | None:
        return self._slots.pool

    @property
    def _is_last(self) -> bool:
        return not self._running

    def _logits(self) -> Tensor | None:
        self._evict()
        logits = self._slots.decode(self._newest) if self._running else None
        for rows, first in self._started():
            for row, request in rows.items():
                options = request.options
                self._sampler.assign(
                    [row],
                    [request.context],
                    options.sampling,
                    eos_token_ids=sorted(options.eos_token_ids),
                    seeds=request.seed,
                    new_tokens=request.started,
                    prompt_length=len(request.prompt),
                    max_new_tokens=request.max_new_tokens,
                )
                self._set_logp_tokens(row, options.logp_token_ids)
            if logits is None:
                logits = first.new_zeros(self._slots.rows, first.shape[1])
            logits[upload(list(rows), self.device)] = first
            self._running |= rows
        return logits

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the tokens, (R, 1), and their `packed_logps`, NaN if the logits were broken."""
        tokens, logps, _ = self._sampler.draw(logits)
        logps = logps.masked_fill(self._sampler.broken, math.nan)
        return tokens[:, None], packed_logps(tokens, logps)

    def _append(self, logits: Tensor, chosen: Tensor, result: Tensor) -> None:
        self._newest = chosen
        options = [request.options for request in self._running.values()]
        finds_top, given = any(one.top_logps for one in options), any(one.logp_token_ids for one in options)
        if finds_top or given:
            result = with_top_logps(result, logits, self._logp_tokens if given else None, finds_top=finds_top)
        self._reads.push(_Step({request.index: [row] for row, request in self._running.items()}), result)
        for row, request in list(self._running.items()):
            request.started += 1
            if request.started == request.max_new_tokens:
                self._leave(row)

    def _set_logp_tokens(self, row: int, ids: Sequence[int]) -> None:
        """Sets the tokens whose log-probabilities a row returns."""
        more = max(0, len(ids) - self._logp_tokens.shape[1])
        self._logp_tokens = F.pad(self._logp_tokens, (0, more), value=-1)
        if width := self._logp_tokens.shape[1]:
            self._logp_tokens[row] = upload([*ids, *[-1] * (width - len(ids))], self.device)

    def _started(self) -> Iterator[tuple[dict[int, Request], Tensor]]:
        """Starts requests: yields them by row, and the logits of their first new tokens, (n, V) fp32."""
        if not self._running and self._waiting and self._prefill is None:
            self._slots.look_for_graphs()
        if admitted := self._admitted():
            longest = max(request.max_length - request.length for request in admitted.values())
            contexts = [request.context for request in admitted.values()]
            yield admitted, self._slots.admit(list(admitted), contexts, longest)
        if (prefill := self._prefill) is None:
            return
        request = prefill.request
        if prefill.logits is None and (scored := prefill.step()) is not None:
            self._reads.push(_Step({request.index: range(scored.shape[1])}, is_prompt=True), scored)
        if request.max_new_tokens == 0 and prefill.logits is not None:
            self._prefill = None
            return
        longest = max(one.length + 1 for one in (request, *self._running.values()))
        if prefill.logits is not None and self._slots.fit(len(self._running) + 1, longest):
            self._prefill = None
            new_tokens = request.max_length - request.length
            self._slots.adopt([prefill.row], prefill.cache, [prefill.columns], new_tokens)
            yield {prefill.row: request}, prefill.logits

    def _admitted(self) -> dict[int, Request]:
        """Takes waiting requests for free rows, as far as they fit; by row.

        While others run, which wait for it, one step prefills about PREFILL_TOKENS tokens at most; on a CPU always
        about CHUNK_TOKENS. A prompt that is prefilled in chunks becomes `_prefill` instead.
        """
        admitted: dict[int, Request] = {}
        limit = CHUNK_TOKENS if self._in_chunks else PREFILL_TOKENS if self._running else math.inf
        tokens, longest = 0, max((request.length + 1 for request in self._running.values()), default=0)
        for row in range(self._slots.rows):
            if tokens >= limit or (request := self._next()) is None:
                break
            if row in self._running or (self._prefill is not None and row == self._prefill.row):
                continue
            longest = max(longest, min(request.length + _MIN_NEW_TOKENS, request.max_length))
            if not self._slots.fit(len(self._running) + len(admitted) + 1 + (self._prefill is not None), longest):
                break
            self._waiting.remove(request.index)
            if self._is_chunked(request):
                self._prefill = ChunkedPrefill(self._model, self._cache_options, request, row)
            else:
                admitted[row] = request
                tokens += request.length
        return admitted

    def _next(self) -> Request | None:
        """Returns the request that starts next: the first one, but one in chunks only after another has started."""
        waiting = (self._requests[index] for index in self._waiting)
        return next((request for request in waiting if self._prefill is None or not self._is_chunked(request)), None)

    def _is_chunked(self, request: Request) -> bool:
        """Whether a prompt is prefilled in chunks."""
        return request.needs_prompt_logps or (self._in_chunks and request.length > CHUNK_TOKENS)

    def _evict(self) -> None:
        """Lets the longest requests wait again until the next step of the others fits."""

        def fit() -> bool:
            longest = max((request.length for request in self._running.values()), default=0)
            return self._slots.fit(len(self._running), longest)

        if not fit():
            self._read(waits=True)  # their tokens are prefilled later; some requests may have finished
        while not fit():
            row, request = max(self._running.items(), key=lambda item: (item[1].length, item[1].index))
            self._waiting = deque(sorted([*self._waiting, request.index]))
            self._leave(row)

    def _handle(self, label: _Step, values: Sequence[Sequence[float]]) -> None:
        for index, columns in label.columns.items():
            if (request := self._requests.get(index)) is None:  # finished or cancelled
                continue
            tokens, logps, top = unpack(
                values, columns, len(request.options.logp_token_ids) or request.options.top_logps
            )
            if any(map(math.isnan, logps)):
                self._broken.append(index)
                self._finish(index)
                continue
            if not label.is_prompt and self._running.get(columns[0]) is request:
                self._sampler.observe({columns[0]: tokens[0]})
            reason = request.count_scored(len(tokens)) if label.is_prompt else request.append(*tokens)
            self._updates.append(Update(index, tokens, logps, reason, top, label.is_prompt))
            if reason is not None:
                self._finish(index)

    def _finish(self, index: int) -> None:
        self._requests.pop(index, None)
        if self._prefill is not None and self._prefill.request.index == index:
            self._prefill = None
        for row in [row for row, request in self._running.items() if request.index == index]:
            self._leave(row)

    def _leave(self, row: int) -> None:
        """Frees a row."""
        del self._running[row]
        self._slots.release([row])
        self._sampler.release([row])
