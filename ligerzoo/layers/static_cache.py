"""Caches of fixed size, for steps that are captured in a CUDA graph: what all have, and those of keys and values.

Shapes: B batch, T new tokens, S tokens passed to attention, K key-value heads, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ligerzoo.kernels import write_to_cache
from ligerzoo.kernels.fp8 import as_bytes
from ligerzoo.layers.cache import LayerCache, TokenCache, between

DECODE_TOKENS = 32
"""Most tokens of a decode step, for which static caches return tensors of constant shape: one token and drafts."""


class StaticPosition:
    """The write positions of caches of fixed size, counted on the device, where a captured CUDA graph advances them.

    Each row has its own position. All layers of a forward write at the same ones: the first layer advances them.

    Attributes:
        length: upper bound of the number of tokens in each row, known on the host. A replayed graph does not count on
            the host; see `KVCache.set_length`.
        lengths: (B,) int64, number of tokens in each row; None before the first write, when all have `length`.
    """

    def __init__(self) -> None:
        self.length = 0
        self.lengths: Tensor | None = None
        self._newest: Tensor | None = None  # sequence indices of the tokens that are being written

    def next(self, tokens: int, device: torch.device) -> Tensor:
        """Returns the sequence indices of the next T = `tokens` tokens, (B or 1, T) int64."""
        new = torch.arange(tokens, device=device)
        return (self.length + new)[None] if self.lengths is None else self.lengths[:, None] + new

    def write(self, length: int, rows: int, tokens: int, device: torch.device) -> Tensor:
        """Returns where a layer that holds `length` tokens writes the next T = `tokens` of B = `rows`, (B, T) int64."""
        if length == self.length:  # the first layer of a forward
            if self.lengths is None:
                self.lengths = torch.full((rows,), length, dtype=torch.int64, device=device)
            self._newest = self.next(tokens, device)
            self.lengths += tokens
            self.length += tokens
        assert self._newest is not None
        return self._newest

    def remove_last(self, length: int, tokens: int) -> None:
        """Moves back by `tokens`, for a layer that holds `length` tokens."""
        if length == self.length:  # the first layer
            self.length -= tokens
            if self.lengths is not None:
                self.lengths -= tokens

    def set(self, lengths: Tensor | int, longest: int) -> None:
        """Continues each row after its first tokens.

        Args:
            lengths: (B,) int64, or the same for all rows.
            longest: the largest of them, or an upper bound.
        """
        self.length = longest
        if isinstance(lengths, int):
            if self.lengths is not None:
                self.lengths.fill_(lengths)
        elif self.lengths is None:
            self.lengths = lengths.clone()
        else:
            self.lengths.copy_(lengths)

    def clone(self) -> StaticPosition:
        """Returns a copy that is counted separately."""
        clone = StaticPosition()
        clone.length, clone.lengths = self.length, None if self.lengths is None else self.lengths.clone()
        return clone


class StaticCache(LayerCache, ABC):
    """What caches of fixed size have.

    Their buffers are allocated once, decode steps have constant shapes, and the write positions are a tensor on the
    device. Rows may hold different numbers of tokens; `length` is an upper bound then.

    Args:
        capacity: maximum number of tokens.

    Attributes:
        position: where to write in each row; the static layers of a `KVCache` share it.

    Raises:
        ValueError: `capacity` is less than 1.
    """

    is_static = True
    capacity: int

    def __init__(self, capacity: int) -> None:
        super().__init__()
        if capacity < 1:
            raise ValueError(f"{type(self).__name__}: capacity={capacity}; expected at least 1")
        self.capacity = capacity
        self.position = StaticPosition()

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """See `LayerCache.positions`."""
        return self.position.next(tokens, device)

    def remove_last(self, tokens: int) -> None:
        """See `LayerCache.remove_last`."""
        length = self.length
        super().remove_last(tokens)
        self.position.remove_last(length, tokens)

    def reset(self) -> None:
        """Empties the cache; its memory stays allocated. `KVCache.reset` restarts the shared position."""
        self.length = 0

    def free(self) -> None:
        """Frees the memory."""
        self._keys = self._values = None

    def copy_rows_from(
        self, other: StaticCache, sources: Tensor | slice, targets: Tensor, rows: int, tokens: int
    ) -> None:
        """See `KVCache.copy_rows_from`."""
        if other._keys is not None and other._values is not None:  # else a layer without attention
            buffers = self._buffers_like(other._keys, other._values, rows)
            for buffer, source in zip(buffers, (other._keys, other._values), strict=True):
                self._part(buffer, tokens)[targets] = self._part(source, tokens)[sources]

    @abstractmethod
    def prefill_rows(self, index: Tensor, rows: int) -> LayerCache:
        """Returns a cache that writes prompts to rows `index`, (n,) int64, of B = `rows`; see `PrefillRows`."""

    @abstractmethod
    def copy_tokens_from(self, other: LayerCache, source: int, columns: Tensor, target: int, rows: int) -> None:
        """See `KVCache.copy_tokens_from`."""

    @abstractmethod
    def append_tokens_to(self, other: LayerCache, rows: Tensor, positions: Tensor) -> None:
        """See `KVCache.append_tokens_to`."""

    @abstractmethod
    def _buffers_like(self, keys: Tensor, values: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Returns the buffers of B = `rows` rows. Allocates them first, like those of another cache, if needed."""

    @abstractmethod
    def _part(self, buffer: Tensor, tokens: int) -> Tensor:
        """Returns what a buffer holds of the first tokens of all rows, as a view."""


class StaticLayerCache(StaticCache, TokenCache):
    """Keys and values in buffers of fixed size.

    Args:
        capacity: maximum number of tokens.

    Raises:
        ValueError: `capacity` is less than 1.
    """

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `TokenCache.append`. Returns the whole buffers for up to DECODE_TOKENS tokens, else the slots written."""
        self._check_batch(keys)
        rows, tokens = keys.shape[:2]
        self.check_room(tokens)
        buffers = self.allocate(rows, keys, values)
        positions = self.position.write(self.length, rows, tokens, keys.device)
        write_to_cache(*buffers, keys, values, positions)
        self.length += tokens
        self.has_unwritten = tokens <= DECODE_TOKENS
        end = self.capacity if self.has_unwritten else self.length
        return between(buffers[0], 0, end), between(buffers[1], 0, end)

    def allocate(self, rows: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the buffers, (B, K, capacity, D) each. Allocates them first, unless it has done so before.

        Args:
            rows: B.
            keys: (..., K, D), the first keys.
            values: (..., K, D), the first values.
        """
        if self._keys is None or self._values is None:  # zeros: attention multiplies masked values by 0
            self._keys, self._values = (
                x.new_zeros(rows, x.shape[-2], self.capacity, x.shape[-1], dtype=self.dtype) for x in (keys, values)
            )
        return self._keys, self._values

    def prefill_rows(self, index: Tensor, rows: int) -> PrefillTokens:
        """See `StaticCache.prefill_rows`."""
        return PrefillTokens(self, index, rows)

    def copy_tokens_from(self, other: LayerCache, source: int, columns: Tensor, target: int, rows: int) -> None:
        """See `KVCache.copy_tokens_from`."""
        if other.length == 0:  # a layer without attention
            return
        kept = columns[columns >= other.first] - other.first
        new = other.read()
        for buffer, x in zip(self.allocate(rows, *new), new, strict=True):
            tokens = as_bytes(x[source]).index_select(0, kept.to(x.device)).view(x.dtype)
            buffer[target, :, len(columns) - len(kept) : len(columns)] = tokens.transpose(0, 1)

    def append_tokens_to(self, other: LayerCache, rows: Tensor, positions: Tensor) -> None:
        """See `KVCache.append_tokens_to`."""
        if self.length > 0 and self._keys is not None and self._values is not None:
            keys, values = (
                as_bytes(x).transpose(1, 2)[rows[:, None], positions].view(x.dtype) for x in (self._keys, self._values)
            )
            other.append(keys, values)

    def _buffers_like(self, keys: Tensor, values: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        return self.allocate(rows, keys.transpose(1, 2), values.transpose(1, 2))

    def _part(self, buffer: Tensor, tokens: int) -> Tensor:
        return as_bytes(buffer)[:, :, :tokens]


class PrefillRows(LayerCache):
    """Some rows of a static cache, to which prompts are written from position 0, while other rows keep their tokens.

    Does not change the lengths of the static cache; see `KVCache.set_lengths`.

    Args:
        cache: the static cache.
        index: (B,) int64, the rows.
        rows: number of rows of the static cache.
    """

    def __init__(self, cache: StaticCache, index: Tensor, rows: int) -> None:
        super().__init__()
        self.capacity, self._index, self._rows = cache.capacity, index, rows

    @property
    def rows(self) -> int | None:
        """See `LayerCache.rows`."""
        return len(self._index)

    def select_rows(self, index: Tensor) -> None:
        """Continues with rows `index`, (rows,) int64, of the current ones."""
        self._index = self._index[index]


class PrefillTokens(PrefillRows, TokenCache):
    """`PrefillRows` of keys and values."""

    def __init__(self, cache: StaticLayerCache, index: Tensor, rows: int) -> None:
        super().__init__(cache, index, rows)
        self._cache = cache

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `TokenCache.append`."""
        buffers = self._cache.allocate(self._rows, keys, values)
        start, self.length = self.length, self.length + keys.shape[1]
        keys, values = self._stored(keys), self._stored(values)
        for buffer, new in zip(buffers, (keys, values), strict=True):
            as_bytes(buffer)[self._index, :, start : self.length] = as_bytes(new).transpose(1, 2)
        if start == 0:
            return keys, values
        keys, values = (
            as_bytes(buffer)[self._index, :, : self.length].transpose(1, 2).view(buffer.dtype) for buffer in buffers
        )
        return keys, values
