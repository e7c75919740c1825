"""Rows of a KV cache of fixed size, each of which holds one sequence at its own positions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ligerzoo.device import to_device, upload
from ligerzoo.errors import LigerzooError
from ligerzoo.generate.graphs import (
    BatchSize,
    Forward,
    GraphPool,
    ModelGraphs,
    StaticBatch,
    independent_length,
    model_graphs,
)
from ligerzoo.generate.options import DEFAULT_CACHE, CacheOptions, require
from ligerzoo.kernels.dispatch import next_power_of_2
from ligerzoo.layers import KVCache
from ligerzoo.layers.capture import can_capture, decoder_of, has_static_decoding
from ligerzoo.layers.kv_cache import cache_size

PREFILL_TOKENS = 16384
"""Tokens of one prefill, padding included. It bounds the memory of the hidden states."""

CAPTURED_TOKENS = 2048
"""Tokens of one captured prefill, padding included: more of them keep a GPU busy while the host launches kernels."""

_CAPTURED_ROWS = 16  # of one captured prefill
_FREE_TOKENS = 256  # of a prefill that takes as long as one of fewer: the time of reading the weights

_MERGED_TOKENS = 1024  # tokens of a prefill that cost less than a second one, whatever part of them is padding
_MIN_CAPACITY = 256
_SPARSE_STEPS = 32  # decode steps with half of the rows empty that cost as much as a change to fewer rows


class Slots:
    """R rows, each empty or holding one sequence. All decode together; each may be replaced at any step.

    Prompts are prefilled without padding on the left: each row starts at position 0. The KV cache has room for some
    P <= R rows, a power of two or R, and a power of two of tokens, or as many as `max_cache_tokens` allows. It grows
    when rows or tokens do not fit, and loses rows after some steps with half of them empty. On a GPU, decode steps and
    prefills of up to CAPTURED_TOKENS tokens run as captured graphs where `can_capture` allows; then the current device
    must be the model's.

    Args:
        model: the model. Runs uncompiled after `model.compile()`.
        rows: R.
        max_cache_tokens: largest number of tokens for which there is memory, P times the tokens of each row. Caches
            that are kept for later calls count, and so does a second cache while sequences move to it. The caller must
            add and continue sequences only if they `fit`. None for no limit.
        options: of the KV cache.
        graphs: those of the model, if it can be captured; see `look_for_graphs`.

    Attributes:
        rows, max_cache_tokens: as given.
        max_length: largest number of tokens in a row; None for no limit. See `max_length`.

    Raises:
        LigerzooError: see `has_static_decoding`.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: int,
        max_cache_tokens: int | None = None,
        options: CacheOptions = DEFAULT_CACHE,
        graphs: ModelGraphs | None = None,
    ) -> None:
        self.rows, self.max_length, self.max_cache_tokens = rows, max_length(model), max_cache_tokens
        self._module, self._options = model, options
        # Without what `model.compile()` sets: each kind of step would be compiled, beyond torch's limit for a function.
        self._model: Forward = model._call_impl
        self._graphs = graphs
        self._batch: StaticBatch | None = None
        self._index: dict[int, int] = {}  # rows that are not empty, and their rows in the cache
        self._lengths: list[int] = []  # tokens of each row of the cache; an empty one counts on, from 0
        self._is_changed = False  # whether the lengths and indices on the device are older than these
        self._sparse_steps = 0
        self._logits: Tensor | None = None
        self._from_rows = self._to_rows = self._used = torch.empty(0, dtype=torch.int64)

    @property
    def pool(self) -> GraphPool | None:
        """Memory of the captured graphs; None for eager steps."""
        return None if self._batch is None else self._batch.pool

    def look_for_graphs(self) -> None:
        """Looks for graphs of the model, whose layers and weights may change while all rows are empty."""
        graphs = model_graphs(self._module) if can_capture(self._module) else None
        if graphs is not self._graphs:
            self.close()
            self._graphs = graphs

    def fit(self, sequences: int, tokens: int) -> bool:
        """Whether a number of sequences with up to `tokens` tokens each fit into `max_cache_tokens`."""
        return self._is_allowed(self._rows_for(sequences), tokens)

    def admit(self, rows: Sequence[int], prompts: Sequence[Tensor], new_tokens: int = 1) -> Tensor:
        """Prefills prompts into empty rows. Equal prompts are prefilled once.

        Args:
            rows: n indices of empty rows.
            prompts: n tensors of token ids on the CPU, (T_i,) int64.
            new_tokens: number of tokens that are expected to follow each prompt; more are possible.

        Returns:
            (n, V) fp32 logits of the next tokens.
        """
        self._assign(rows, list(map(len, prompts)), new_tokens)
        batch = self._current
        first: dict[bytes, int] = {}  # the first of equal prompts
        same = [first.setdefault(prompt.numpy().tobytes(), i) for i, prompt in enumerate(prompts)]
        order: list[int] = []
        parts: list[Tensor] = []
        for group in prefill_groups({i: len(prompts[i]) for i in first.values()}):
            order += group
            parts.append(self._prefill([self._index[rows[i]] for i in group], [prompts[i] for i in group]))
        logits = torch.cat(parts)
        copies = [(self._index[rows[i]], self._index[row]) for row, i in zip(rows, same, strict=True) if rows[i] != row]
        if copies:
            sources, targets = (upload(list(x), batch.device) for x in zip(*copies, strict=True))
            batch.cache.copy_rows_from(batch.cache, sources, targets, batch.rows, max(map(len, prompts)))
        return logits[upload([order.index(i) for i in same], batch.device)]

    def adopt(self, rows: Sequence[int], cache: KVCache, columns: Sequence[Tensor], new_tokens: int = 1) -> None:
        """Copies sequences from another cache into empty rows.

        Args:
            rows: n indices of empty rows.
            cache: a cache of any kind with n rows.
            columns: (T_i,) int64 on the CPU each, sequence indices of the tokens of each row, without padding.
            new_tokens: see `admit`.
        """
        self._assign(rows, list(map(len, columns)), new_tokens)
        for source, row in enumerate(rows):
            target = self._index[row]
            self._current.cache.copy_tokens_from(cache, source, columns[source], target, self._current.rows)

    def export(self, rows: Sequence[int], cache: KVCache, tokens: int) -> None:
        """Appends the last tokens of n rows to another cache, of any kind, of n rows."""
        indices = [self._index[row] for row in rows]
        positions = [list(range(self._lengths[index] - tokens, self._lengths[index])) for index in indices]
        device = self._current.device
        self._current.cache.append_tokens_to(cache, upload(indices, device), upload(positions, device))

    def decode(self, tokens: Tensor) -> Tensor:
        """Appends T tokens to each row, and computes the logits after each of them.

        Args:
            tokens: (R, T) int64; any token id of the vocabulary in empty rows.

        Returns:
            (R * T, V) fp32 logits, row by row, valid until the next call; undefined, but finite, in empty rows.
        """
        count = tokens.shape[1]
        self._shrink()
        self._reserve(len(self._index), count + self._longest)
        batch = self._current
        for index, length in enumerate(self._lengths):
            if length + count > batch.capacity:  # of an empty row
                self._lengths[index], self._is_changed = 0, True
        if self._is_changed:
            self._update()
        is_direct = batch.rows == self.rows and all(row == index for row, index in self._index.items())
        logits = batch.decode(self._model, tokens if is_direct else tokens[self._from_rows])
        self._lengths = [length + count for length in self._lengths]
        if is_direct:
            return logits
        if self._logits is None or len(self._logits) != self.rows * count:
            self._logits = logits.new_zeros(self.rows * count, logits.shape[1])
        self._logits.view(self.rows, -1)[self._to_rows] = logits.view(batch.rows, -1)[self._used]
        return self._logits

    def remove_last(self, row: int, tokens: int) -> None:
        """Removes the last tokens of a row. Raises ValueError if the model has recurrent layers."""
        self._current.cache.require_tokens("remove_last")
        self._lengths[self._index[row]] -= tokens
        self._is_changed = True

    def release(self, rows: Sequence[int]) -> None:
        """Empties rows. Rows that are empty are ignored."""
        for row in rows:
            if row in self._index:
                self._lengths[self._index.pop(row)] = 0
                self._is_changed = True

    def close(self) -> None:
        """Empties all rows, and keeps the captured graphs for later calls."""
        self._give_back(self._batch)
        self._batch, self._lengths = None, []
        self._index.clear()

    @property
    def _current(self) -> StaticBatch:
        assert self._batch is not None
        return self._batch

    def _prefill(self, indices: list[int], prompts: list[Tensor]) -> Tensor:
        """Prefills prompts, longest first, into rows of the cache. Returns (n, V) fp32 logits after each."""
        if (batch := self._prefill_batch(len(prompts), len(prompts[0]))) is None:
            return self._prefill_in_chunks(indices, prompts)
        device, count = batch.device, len(prompts)
        tokens = min(_padded_length(len(prompts[0])), batch.capacity)
        rows = batch.rows if batch.rows * tokens <= _FREE_TOKENS else count
        inputs = torch.zeros(rows, tokens + 1, dtype=torch.int64)
        inputs[:, -1] = 1  # a row of padding has one token
        for row, prompt in zip(inputs, prompts, strict=False):
            row[: len(prompt)], row[-1] = prompt, len(prompt)
        logits = batch.prefill(self._model, to_device(inputs, device))[:count].clone()  # other groups use the graph
        target = self._current
        target.cache.copy_rows_from(batch.cache, slice(count), upload(indices, device), target.rows, len(prompts[0]))
        self._give_back(batch)
        return logits

    def _prefill_batch(self, count: int, tokens: int) -> StaticBatch | None:
        """Returns a batch that prefills `count` prompts of up to `tokens` tokens in a graph; None for an eager prefill.

        The rows of a graph's cache are copied to those of `admit`, so that a prefill needs no graph for each of them.
        """
        rows = next_power_of_2(count)
        capacity = min(CAPTURED_TOKENS // rows, self.max_length or CAPTURED_TOKENS)
        fits = rows <= _CAPTURED_ROWS and tokens <= min(capacity, PREFILL_TOKENS // count)
        room = math.inf if self.max_cache_tokens is None else self.max_cache_tokens
        room -= self._current.cache_tokens + rows * capacity
        if self._graphs is None or not fits or room < 0:
            return None
        batch = self._graphs.take(self._module, BatchSize(rows, capacity, self._options, prefills=True))
        self._graphs.keep_idle(room)
        return batch

    def _prefill_in_chunks(self, indices: list[int], prompts: list[Tensor]) -> Tensor:
        """Prefills prompts eagerly, by chunks."""
        device = self._current.device
        ids, lengths = to_device(pad_sequence(prompts, batch_first=True), device), [len(prompt) for prompt in prompts]
        ragged = upload(lengths, device) if lengths[-1] < lengths[0] else None
        cache = self._current.cache.prefill_rows(upload(indices, device), self._current.rows, ragged)
        chunk = max(1, PREFILL_TOKENS // len(prompts))
        parts, start, count = [], 0, len(prompts)
        while count > 0:
            end = min(start + chunk, lengths[0])
            last = [[min(length, end) - start - 1] for length in lengths[:count]]
            keep = {"past_key_values": cache, "use_cache": True, "logits_to_keep": upload(last, device)}
            output = self._model(ids[:count, start:end], None, None, **keep)
            remaining = sum(length > end for length in lengths)
            if remaining < count:
                parts.append(output.logits[remaining:, -1].float())
                cache.select_rows(torch.arange(remaining, device=device))
            start, count = end, remaining
        return torch.cat(parts[::-1])

    def _assign(self, rows: Sequence[int], lengths: Sequence[int], new_tokens: int) -> None:
        """Chooses rows of the cache for sequences of these lengths."""
        desired = max(lengths) + max(1, min(new_tokens, _MIN_CAPACITY))
        self._reserve(len(self._index) + len(rows), max(self._longest, *lengths), desired)
        free = [index for index in range(self._current.rows) if index not in self._index.values()]
        for row, length in zip(rows, lengths, strict=True):
            index = row if row in free else free[-1]  # in the order of the rows where possible
            free.remove(index)
            self._index[row], self._lengths[index] = index, length
        self._is_changed = True

    def _update(self) -> None:
        """Copies the lengths and indices to the device."""
        batch, rows = self._current, {index: row for row, index in self._index.items()}
        batch.cache.set_lengths(upload(self._lengths, batch.device), max(self._lengths))
        self._from_rows = upload([rows.get(index, 0) for index in range(batch.rows)], batch.device)
        self._to_rows = upload(list(self._index), batch.device)
        self._used = upload(list(self._index.values()), batch.device)
        self._is_changed = False

    def _shrink(self) -> None:
        """Continues with fewer rows after some steps with half of them empty."""
        rows = self._rows_for(len(self._index))
        self._sparse_steps = self._sparse_steps + 1 if 2 * rows <= self._current.rows else 0
        if self._sparse_steps > _SPARSE_STEPS:
            self._move(rows, self._current.capacity)

    @property
    def _longest(self) -> int:
        """Number of tokens of the longest sequence; 0 if all rows are empty."""
        return max((self._lengths[index] for index in self._index.values()), default=0)

    def _reserve(self, rows: int, tokens: int, desired: int = 0) -> None:
        """Continues with another cache if it lacks room for `tokens` of each row; for `desired` ones if they fit."""
        old_rows, old_capacity = (0, 0) if self._batch is None else (self._batch.rows, self._batch.capacity)
        has_room = rows <= old_rows and tokens <= old_capacity
        if has_room and min(desired, self.max_length or desired) <= old_capacity:
            return
        new_rows = max(old_rows, self._rows_for(rows))
        new_capacity = max(old_capacity, self._capacity_for(max(tokens, desired)))
        if self._is_allowed(new_rows, new_capacity):
            self._move(new_rows, new_capacity)
        elif not has_room:  # not more than needed
            assert self.max_cache_tokens is not None
            new_rows = self._rows_for(rows)
            self._move(new_rows, min(self._capacity_for(tokens), self.max_cache_tokens // new_rows))

    def _is_allowed(self, rows: int, capacity: int) -> bool:
        return self.max_cache_tokens is None or rows * capacity <= self.max_cache_tokens

    def _rows_for(self, rows: int) -> int:
        return min(self.rows, next_power_of_2(rows))

    def _capacity_for(self, tokens: int) -> int:
        capacity = next_power_of_2(max(tokens, _MIN_CAPACITY))
        return capacity if self.max_length is None else min(capacity, self.max_length)

    def _move(self, rows: int, capacity: int) -> None:
        """Continues with a cache of another size."""
        if not self._index:  # nothing to copy, so that memory is free before more is allocated
            self._give_back(self._batch)
            self._batch = None
        old, lengths = self._batch, self._lengths
        size, graphs = BatchSize(rows, capacity, self._options), self._graphs
        self._batch = new = StaticBatch(self._module, size) if graphs is None else graphs.take(self._module, size)
        is_freed = self._make_room(new, old)
        kept = sorted(self._index.values())
        if old is not None:
            sources, targets = (upload([*x], old.device) for x in (kept, range(len(kept))))
            tokens = min(old.capacity, capacity)
            new.cache.copy_rows_from(old.cache, sources, targets, rows, tokens, frees=is_freed)
        self._index = {row: kept.index(index) for row, index in self._index.items()}
        self._lengths = [lengths[index] for index in kept] + [0] * (rows - len(kept))
        self._is_changed, self._sparse_steps = True, 0
        if not is_freed:
            self._give_back(old)

    def _make_room(self, new: StaticBatch, old: StaticBatch | None) -> bool:
        """Frees idle caches for a new one. Returns whether the old one must be freed by layers: both do not fit."""
        if self.max_cache_tokens is None:
            return False
        room = self.max_cache_tokens - new.cache_tokens
        is_freed = old is not None and old.cache_tokens > room
        if self._graphs is not None:
            self._graphs.keep_idle(room if old is None or is_freed else room - old.cache_tokens)
        return is_freed

    def _give_back(self, batch: StaticBatch | None) -> None:
        if self._graphs is not None and batch is not None:
            self._graphs.give_back(batch)


def _padded_length(tokens: int) -> int:
    """Returns the length to which captured prefills are padded: 16, 32, ..., 128, 160, ..., 256, 320, ..."""
    step = max(16, next_power_of_2(tokens) // 8)
    return -(-tokens // step) * step


def max_length(model: nn.Module) -> int | None:
    """Returns the largest length of a sequence in `Slots`; None for no limit.

    Beyond it, the rotary frequencies of each row depend on the longest one (rope types dynamic and longrope).

    Raises:
        LigerzooError: see `has_static_decoding`.
    """
    if not has_static_decoding(model):
        what = "the model cannot decode with a KV cache of fixed size"
        expected = "a ligerzoo.models.CausalLM with causal self-attention only"
        raise LigerzooError(what, where=type(model).__name__, expected=expected, remedy="Use generate.")
    return independent_length(model)


def prefill_groups(lengths: dict[int, int]) -> list[list[int]]:
    """Groups prompts that are prefilled together, padded on the right: each group has similar lengths, longest first.

    A group has at most PREFILL_TOKENS tokens with padding, unless it is a single prompt.

    Args:
        lengths: length of each prompt.
    """
    groups: list[list[int]] = []
    for prompt in sorted(lengths, key=lambda prompt: -lengths[prompt]):
        if groups:
            longest, tokens = lengths[groups[-1][0]], (len(groups[-1]) + 1) * lengths[groups[-1][0]]
            is_similar = 4 * lengths[prompt] >= 3 * longest
            if tokens <= (PREFILL_TOKENS if is_similar else _MERGED_TOKENS):
                groups[-1].append(prompt)
                continue
        groups.append([prompt])
    return groups


_MEMORY_SHARE = 3 / 4  # of the free memory; the rest is for the hidden states of a prefill


def default_cache_tokens(model: nn.Module, rows: int, cache_dtype: torch.dtype | None = None) -> int | None:
    """Returns the number of tokens for which the model's GPU has memory now, after the states of recurrent layers.

    None on a CPU, and for a model whose caches have an unknown size, see `layers.kv_cache.cache_size`.

    Args:
        model: the model.
        rows: largest number of sequences, each of which has states.
        cache_dtype: see `KVCache`.

    Raises:
        LigerzooError: there is no memory for the states.
    """
    device, (per_token, states) = next(model.parameters()).device, cache_size(decoder_of(model), cache_dtype)
    bytes_per_token = per_token.total()
    if device.type != "cuda" or bytes_per_token == 0:
        return None
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free += model_graphs(model).nbytes  # which make room for others
    room = int(_MEMORY_SHARE * free) - rows * states
    most = max(rows + room // max(states, 1), 0)
    require(room >= bytes_per_token, "batch_size", rows, f"at most {most}: the rest has no memory for its states")
    return room // bytes_per_token
