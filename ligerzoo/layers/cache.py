"""Key-value caches: keys and values of earlier tokens, which attention reads again.

Caches are updated in place, so autograd cannot differentiate through them: a cache is for inference.

Shapes: B batch, T new tokens, S tokens passed to attention, K key-value heads, D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.kernels import write_to_cache
from ligerzoo.kernels.fp8 import FP8, as_bytes, to_storage

DECODE_TOKENS = 32
"""Most tokens of a decode step, for which static caches return tensors of constant shape: one token and drafts."""


class LayerCache:
    """Growing cache of one attention layer. Its buffers double when they are full: appending is O(1) per token.

    Attributes:
        length: number of tokens appended so far, padding included.
        offset: sequence index of the first key that `append` last returned.
        capacity: maximum number of tokens; None for no limit.
        has_unwritten: whether `append` also returned slots of future tokens, which attention must mask.
        dtype: dtype in which keys and values are stored and returned; None for the one they have. `KVCache` sets it.
    """

    capacity: int | None = None
    dtype: torch.dtype | None = None
    has_unwritten = False

    def __init__(self) -> None:
        self.length = 0
        self.offset = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Returns the sequence indices of the next T = `tokens` tokens, (B or 1, T) int64."""
        return torch.arange(self.length, self.length + tokens, device=device)[None]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys and values of new tokens, and returns those to attend to.

        Args:
            keys: (B, T, K, D).
            values: (B, T, K, D).

        Returns:
            Keys and values, (B, S, K, D) each, in `dtype`.

        Raises:
            ValueError: the batch size or the heads differ from the cache's, or the capacity is exceeded.
        """
        self._check_batch(keys)
        keys, values = self._stored(keys), self._stored(values)
        start, self.length = self.length, self.length + keys.shape[1]
        self._keys, self._values = _append(self._keys, keys, start), _append(self._values, values, start)
        return _slice(self._keys, 0, self.length), _slice(self._values, 0, self.length)

    @property
    def rows(self) -> int | None:
        """Batch size of the cached tokens; None for an empty cache."""
        return None if self._keys is None else len(self._keys)

    def select_rows(self, index: Tensor) -> None:
        """Makes row i of the cache a copy of row `index[i]`, as beam search does; the number of rows may change.

        Args:
            index: (rows,) int64.
        """
        if self._keys is not None and self._values is not None:
            self._keys, self._values = (
                as_bytes(x).index_select(0, index.to(x.device)).view(x.dtype) for x in (self._keys, self._values)
            )

    def remove_last(self, tokens: int) -> None:
        """Removes the last tokens, as speculative decoding does with rejected ones.

        Raises:
            ValueError: see `check_removal`.
        """
        self.check_removal(tokens)
        self.length -= tokens

    def check_removal(self, tokens: int) -> None:
        """Raises ValueError if the cache holds fewer than `tokens` tokens, or the number is negative."""
        if not 0 <= tokens <= self.length:
            raise ValueError(f"{type(self).__name__}: cannot remove {tokens} tokens; expected 0 to {self.length}")

    @property
    def first(self) -> int:
        """Sequence index of the first token in the cache; more than 0 where a window has dropped earlier tokens."""
        return 0

    def read(self, start: int = 0) -> tuple[Tensor, Tensor]:
        """Returns keys and values of the cached tokens from sequence index `start` on, (B, S, K, D) each.

        The cache must not be empty.
        """
        assert self._keys is not None
        assert self._values is not None
        start, end = max(start - self.first, 0), self.length - self.first
        return _slice(self._keys, start, end), _slice(self._values, start, end)

    def reset(self) -> None:
        """Empties the cache."""
        self.length = self.offset = 0
        self._keys = self._values = None

    def clone(self) -> Self:
        """Returns a copy that shares no memory."""
        clone = copy.copy(self)
        if self._keys is not None and self._values is not None:
            clone._keys, clone._values = self._keys.clone(), self._values.clone()
        return clone

    def _stored(self, x: Tensor) -> Tensor:
        """Returns keys or values in the dtype of this cache."""
        return x if self.dtype is None else to_storage(x, self.dtype)

    def make_writable(self) -> None:
        """See `KVCache.make_writable`."""
        self._keys, self._values = _writable(self._keys), _writable(self._values)

    def _check_batch(self, keys: Tensor) -> None:
        if self._keys is None:
            return
        if len(self._keys) != len(keys):
            raise ValueError(f"{type(self).__name__}: got keys of batch size {len(keys)}; expected {len(self._keys)}")
        if keys.shape[2:] != self._keys.shape[1::2]:
            got, expected = ("{} heads of size {}".format(*shape) for shape in (keys.shape[2:], self._keys.shape[1::2]))
            raise ValueError(
                f"{type(self).__name__}: got keys of {got}; expected {expected}, like the cached ones, which are of "
                "another model"
            )


class RollingLayerCache(LayerCache):
    """Cache of a sliding-window layer. Holds at most 2 * `window` tokens.

    Args:
        window: tokens that a token attends to, including itself.
    """

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self._held = 0  # tokens in the buffers

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `LayerCache.append`. Returns the new tokens and up to `window - 1` tokens before them."""
        self._check_batch(keys)
        keys, values = self._stored(keys), self._stored(values)
        kept = min(self._held, self.window - 1)
        start, end = self._held - kept, self._held + keys.shape[1]
        self.offset, self.length = self.length - kept, self.length + keys.shape[1]
        if self._keys is None or self._values is None or end > self._keys.shape[2]:
            if self._keys is not None and self._values is not None:
                keys = _cat(_slice(self._keys, start, self._held), keys)
                values = _cat(_slice(self._values, start, self._held), values)
            self._held = min(keys.shape[1], self.window - 1)
            self._keys, self._values = (_new_buffer(x, self._held, 2 * self.window) for x in (keys, values))
            return keys, values
        self._keys, self._values = _append(self._keys, keys, self._held), _append(self._values, values, self._held)
        self._held = end
        return _slice(self._keys, start, end), _slice(self._values, start, end)

    def remove_last(self, tokens: int) -> None:
        """See `LayerCache.remove_last`."""
        super().remove_last(tokens)
        self._held = max(self._held - tokens, 0)

    def check_removal(self, tokens: int) -> None:
        """See `LayerCache.check_removal`. Also raises if the window would reach tokens that it has dropped."""
        super().check_removal(tokens)
        length, held = self.length - tokens, max(self._held - tokens, 0)
        needed = min(length, self.window - 1)
        if held < needed:
            raise ValueError(
                f"RollingLayerCache: without the last {tokens} tokens, {held} of {length} are left; the window of "
                f"{self.window} needs {needed}. Call KVCache.keep_all_tokens() before the first token."
            )

    @property
    def first(self) -> int:
        """See `LayerCache.first`."""
        return self.length - self._held

    def reset(self) -> None:
        """See `LayerCache.reset`."""
        super().reset()
        self._held = 0


class CrossAttentionLayerCache(LayerCache):
    """Cache of a cross-attention layer: projected keys and values of states that are not tokens, such as images.

    These states do not count towards the length of the sequence.
    """


class StaticPosition:
    """The write positions of caches of fixed size, counted on the device, where a captured CUDA graph advances them.

    Each row has its own position. All layers of a forward write at the same ones: the first layer advances them.

    Attributes:
        length: upper bound of the number of tokens in each row, known on the host. A replayed graph does not count on
            the host; see `KVCache.advance`.
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


class StaticLayerCache(LayerCache):
    """Cache of fixed size, for decode steps that are captured in a CUDA graph.

    Its buffers are allocated once, decode steps have constant shapes, and the write positions are a tensor on the
    device. Rows may hold different numbers of tokens; `length` is an upper bound then.

    Args:
        capacity: maximum number of tokens.

    Attributes:
        position: where to write in each row; the static layers of a `KVCache` share it.

    Raises:
        ValueError: `capacity` is less than 1.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        if capacity < 1:
            raise ValueError(f"StaticLayerCache: capacity={capacity}; expected at least 1")
        self.capacity: int = capacity
        self.position = StaticPosition()

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """See `LayerCache.positions`."""
        return self.position.next(tokens, device)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `LayerCache.append`. Returns the whole buffers for up to DECODE_TOKENS tokens, else the slots written."""
        self._check_batch(keys)
        tokens = keys.shape[1]
        if self.length + tokens > self.capacity:
            raise ValueError(
                f"StaticLayerCache: cannot append {tokens} tokens to the {self.length} in the cache; "
                f"expected at most {self.capacity} in all, the capacity"
            )
        rows = len(keys)
        buffers = self.allocate(rows, keys, values)
        positions = self.position.write(self.length, rows, tokens, keys.device)
        write_to_cache(*buffers, keys, values, positions)
        self.length += tokens
        self.has_unwritten = tokens <= DECODE_TOKENS
        end = self.capacity if self.has_unwritten else self.length
        return _slice(buffers[0], 0, end), _slice(buffers[1], 0, end)

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

    def copy_rows_from(self, other: StaticLayerCache, index: Tensor, rows: int) -> None:
        """Copies rows `index`, (n,) int64, of another cache to the first n of B = `rows` rows.

        Copies as many tokens as both caches have room for.
        """
        self.length = other.length
        if other._keys is not None and other._values is not None:  # else a layer without attention
            tokens = min(self.capacity, other.capacity)
            sources = other._keys, other._values
            buffers = self.allocate(rows, *(source.transpose(1, 2) for source in sources))
            for buffer, source in zip(buffers, sources, strict=True):
                as_bytes(buffer)[: len(index), :, :tokens] = as_bytes(source)[index, :, :tokens]

    def copy_rows(self, sources: Tensor, targets: Tensor, tokens: int) -> None:
        """Copies the first `tokens` tokens of rows `sources` to rows `targets`, (n,) int64 each."""
        for buffer in (self._keys, self._values):
            if buffer is not None:
                buffer = as_bytes(buffer)
                buffer[targets, :, :tokens] = buffer[sources, :, :tokens]


class PrefillLayerCache(LayerCache):
    """Some rows of a static cache, to which prompts are written from position 0, while other rows keep their tokens.

    Does not change the lengths of the static cache; see `KVCache.set_lengths`.

    Args:
        cache: the static cache.
        index: (B,) int64, the rows.
        rows: number of rows of the static cache.
    """

    def __init__(self, cache: StaticLayerCache, index: Tensor, rows: int) -> None:
        super().__init__()
        self.capacity = cache.capacity
        self._cache, self._index, self._rows = cache, index, rows

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `LayerCache.append`."""
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

    @property
    def rows(self) -> int | None:
        """See `LayerCache.rows`."""
        return len(self._index)

    def select_rows(self, index: Tensor) -> None:
        """Continues with rows `index`, (rows,) int64, of the current ones."""
        self._index = self._index[index]


def new_layer_cache(layer: nn.Module, capacity: int | None = None) -> LayerCache:
    """Returns `layer.new_cache(capacity)`, or a cache of all tokens if the layer has no such method.

    A cache of all tokens is correct for every kind of self-attention, and unused by a layer without attention.

    Args:
        layer: a block or attention.
        capacity: maximum number of tokens, for a cache of fixed size; None for a growing or rolling cache.
    """
    if hasattr(layer, "new_cache"):
        return layer.new_cache(capacity)  # type: ignore[operator, no-any-return]
    return LayerCache() if capacity is None else StaticLayerCache(capacity)


def _writable(x: Tensor | None) -> Tensor | None:
    """Returns a copy of an inference tensor outside of `torch.inference_mode`; else the tensor itself."""
    if x is None or not x.is_inference() or torch.is_inference_mode_enabled():
        return x
    return x.clone()


def _append(buffer: Tensor | None, new: Tensor, start: int) -> Tensor:
    """Writes `new`, (B, T, K, D), to the buffer (B, K, capacity, D) at index `start`. Returns it, or a larger copy."""
    new = new.transpose(1, 2)
    batch, heads, tokens, dim = new.shape
    end = start + tokens
    if buffer is None or end > buffer.shape[2]:
        larger = new.new_empty(batch, heads, max(end, 2 * start, 64), dim)
        if buffer is not None:
            larger[:, :, :start] = buffer[:, :, :start]
        buffer = larger
    buffer[:, :, start:end] = new
    return buffer


def _new_buffer(x: Tensor, count: int, capacity: int) -> Tensor:
    """Returns a buffer (B, K, capacity, D) that starts with the last `count` tokens of x, (B, T, K, D)."""
    buffer = x.new_empty(x.shape[0], x.shape[2], capacity, x.shape[3])
    buffer[:, :, :count] = x[:, x.shape[1] - count :].transpose(1, 2)
    return buffer


def _cat(old: Tensor, new: Tensor) -> Tensor:
    """Concatenates tokens, (B, T, K, D) each, of one dtype."""
    return torch.cat([as_bytes(old), as_bytes(new)], 1).view(new.dtype)


def _slice(buffer: Tensor, start: int, end: int) -> Tensor:
    """(B, K, capacity, D) -> (B, end - start, K, D)."""
    return buffer[:, :, start:end].transpose(1, 2)


def check_cache_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """Returns the dtype of a KV cache; raises ValueError unless it is None or float8_e4m3fn."""
    if dtype not in (None, FP8):
        raise ValueError(f"KV cache: dtype={dtype!r}; expected {FP8}, or None for the dtype of the keys and values")
    return dtype


class KVCache:
    """The caches of all layers of a decoder.

    Args:
        layers: one per layer, of any classes. `Decoder.new_cache` chooses them by layer.
        dtype: float8_e4m3fn stores keys and values in half the memory of bf16. They are rounded to it, without scales,
            as they are written; beyond +-448 they become +-448. Each token attends to the rounded ones, its own
            included, so results do not depend on how a prompt is divided into calls. None stores them unchanged.

    Attributes:
        dtype: as given.
        max_valid_length: sequence length up to which cached keys stay valid, since longer sequences use other rotary
            frequencies (LongRoPE); None for no limit.
        position_offset: (B or 1, 1) int64, position ids of future tokens minus their sequence indices (M-RoPE, where
            images span fewer positions than tokens); None for 0.
        last_image_mask: (B, 1, images, tiles) bool, the cross-attention mask of the last token; None for all images.

    Raises:
        ValueError: another dtype.
    """

    def __init__(self, layers: Iterable[LayerCache], dtype: torch.dtype | None = None) -> None:
        self.dtype = check_cache_dtype(dtype)
        self.max_valid_length: int | None = None
        self.position_offset: Tensor | None = None
        self.last_image_mask: Tensor | None = None
        self._set_layers(layers)

    def _set_layers(self, layers: Iterable[LayerCache]) -> None:
        self.layers = list(layers)
        self._self_attention = [layer for layer in self.layers if not isinstance(layer, CrossAttentionLayerCache)]
        self._cross_attention = [layer for layer in self.layers if isinstance(layer, CrossAttentionLayerCache)]
        self._static = [layer for layer in self.layers if isinstance(layer, StaticLayerCache)]
        for layer in self.layers:
            layer.dtype = self.dtype
        for layer in self._static:
            layer.position = self._static[0].position

    @property
    def is_static(self) -> bool:
        """Whether the caches of all layers have a fixed size, so that a decode step can be captured in a CUDA graph."""
        return len(self._static) == len(self.layers) > 0

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of static caches."""
        buffers = [buffer for layer in self._static for buffer in (layer._keys, layer._values)]
        return sum(buffer.nbytes for buffer in buffers if buffer is not None)

    def advance(self, tokens: int) -> None:
        """Counts tokens that a replayed CUDA graph has written to static caches."""
        for layer in self._static:
            layer.length += tokens
        if self._static:
            self._static[0].position.length += tokens

    def reset(self) -> None:
        """Empties all caches; the memory of static ones stays allocated."""
        for layer in self.layers:
            layer.reset()
        if self._static:
            self._static[0].position.set(0, 0)
        self.position_offset = self.last_image_mask = None

    def set_lengths(self, lengths: Tensor, longest: int) -> None:
        """Sets the number of tokens in each row of static caches; the next ones are written after them.

        Args:
            lengths: (B,) int64.
            longest: the largest of them, or an upper bound.
        """
        for layer in self._static:
            layer.length = longest
        self._static[0].position.set(lengths, longest)

    def prefill_rows(self, index: Tensor, rows: int) -> KVCache:
        """Returns a cache that writes prompts to some rows of these static caches; see `PrefillLayerCache`.

        Args:
            index: (n,) int64, the rows.
            rows: B.
        """
        return KVCache((PrefillLayerCache(layer, index, rows) for layer in self._static), self.dtype)

    def copy_rows_from(self, other: KVCache, index: Tensor, rows: int, *, frees: bool = False) -> None:
        """Copies the tokens of rows `index`, (n,) int64, of other static caches to the first n of B = `rows` rows.

        The remaining rows are empty. The tokens must fit into these caches.

        Args:
            other: the other caches.
            index: their rows.
            rows: B.
            frees: free the memory of each layer of `other` when it is copied. `other` cannot be used afterwards.
        """
        for layer, source in zip(self._static, other._static, strict=True):
            layer.copy_rows_from(source, index, rows)
            if frees:
                source.free()
        lengths = other._static[0].position.lengths
        if lengths is not None:
            self._static[0].position.set(F.pad(lengths[index], (0, rows - len(index))), other.length)

    def copy_tokens_from(self, other: KVCache, source: int, columns: Tensor, target: int, rows: int) -> None:
        """Copies tokens of a row of another cache, of any kind, to the first positions of a row of static caches.

        Tokens that a sliding window has dropped are left out: no later token attends to them.

        Args:
            other: the other cache.
            source: its row.
            columns: (n,) int64 on the CPU, ascending sequence indices of the tokens.
            target: row of these caches.
            rows: B of these caches.
        """
        for layer, other_layer in zip(self._static, other.layers, strict=True):
            if other_layer.length == 0:  # a layer without attention
                continue
            kept = columns[columns >= other_layer.first] - other_layer.first
            new = other_layer.read()
            for buffer, x in zip(layer.allocate(rows, *new), new, strict=True):
                tokens = as_bytes(x[source]).index_select(0, kept.to(x.device)).view(x.dtype)
                buffer[target, :, len(columns) - len(kept) : len(columns)] = tokens.transpose(0, 1)

    def append_tokens_to(self, other: KVCache, rows: Tensor, positions: Tensor) -> None:
        """Appends tokens of static caches to another cache of any kind.

        Args:
            other: the other cache, of B rows.
            rows: (B,) int64, rows of these caches.
            positions: (B, n) int64, positions of the tokens in each row.
        """
        for layer, other_layer in zip(self._static, other.layers, strict=True):
            if layer.length > 0 and layer._keys is not None and layer._values is not None:
                keys, values = (
                    as_bytes(x).transpose(1, 2)[rows[:, None], positions].view(x.dtype)
                    for x in (layer._keys, layer._values)
                )
                other_layer.append(keys, values)

    def copy_rows(self, sources: Tensor, targets: Tensor, tokens: int) -> None:
        """Copies the first `tokens` tokens of rows of static caches to other rows; see `StaticLayerCache.copy_rows`."""
        for layer in self._static:
            layer.copy_rows(sources, targets, tokens)

    def is_valid_for(self, tokens: int) -> bool:
        """Whether `tokens` more tokens can reuse the cached keys; if not, process all tokens with a new cache."""
        limit = self.max_valid_length
        return limit is None or not 0 < self.length <= limit < self.length + tokens

    @property
    def _counter(self) -> LayerCache | None:
        """The layer that counts tokens: the first with any, since a layer without attention appends none."""
        for layer in self._self_attention:
            if layer.length > 0:
                return layer
        return self._self_attention[0] if self._self_attention else None

    @property
    def length(self) -> int:
        """Number of tokens in the cache, padding included; an upper bound for static caches, see `StaticPosition`."""
        return counter.length if (counter := self._counter) else 0

    @property
    def cross_attention_length(self) -> int:
        """Number of states in the cache of each cross-attention layer."""
        return self._cross_attention[0].length if self._cross_attention else 0

    @property
    def capacity(self) -> int | None:
        """Maximum number of tokens; None for no limit."""
        return counter.capacity if (counter := self._counter) else None

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Returns the sequence indices of the next T = `tokens` tokens, (B or 1, T) int64."""
        counter = self._counter
        return torch.arange(tokens, device=device)[None] if counter is None else counter.positions(tokens, device)

    @property
    def rows(self) -> int | None:
        """Batch size of the cached tokens; None for an empty cache."""
        return next((layer.rows for layer in self.layers if layer.rows is not None), None)

    def select_rows(self, index: Tensor) -> None:
        """Makes row i of all caches a copy of row `index[i]`; see `LayerCache.select_rows`."""
        rows = self.rows
        for layer in self.layers:
            layer.select_rows(index)
        if self._static and (lengths := self._static[0].position.lengths) is not None:
            self._static[0].position.lengths = lengths.index_select(0, index.to(lengths.device))
        for name in ("position_offset", "last_image_mask"):
            value = getattr(self, name)
            if value is not None and len(value) == rows:  # else 1 row, the same for all
                setattr(self, name, value.index_select(0, index.to(value.device)))

    def remove_last(self, tokens: int | Tensor) -> None:
        """Removes the last tokens; cross-attention caches keep their states. See `LayerCache.remove_last`.

        Args:
            tokens: number of tokens; of each row, (B,) int64 on the device, if all caches are static and not empty.
                Then `length`, which the host knows, does not change; see `set_lengths`.

        Raises:
            ValueError: there are fewer tokens, or a number for each row but caches that are empty or not static.
        """
        if isinstance(tokens, Tensor):
            lengths = self._static[0].position.lengths if self.is_static else None
            if lengths is None:
                raise ValueError("remove_last: got a tensor; expected an int, since the caches are empty or not static")
            lengths -= tokens
            return
        layers = [layer for layer in self._self_attention if layer.length > 0]  # one without attention appends nothing
        for layer in layers:
            layer.check_removal(tokens)
        for layer in layers:
            layer.remove_last(tokens)

    def reorder(self, indices: Tensor) -> None:
        """Another name of `select_rows`."""
        self.select_rows(indices)

    def crop(self, length: int) -> None:
        """Keeps the first tokens only. To keep none empties the cache, as `reset` does.

        Positions and masks of images stay those after the last image, so only remove text that follows it.

        Args:
            length: number of tokens to keep, padding included.

        Raises:
            ValueError: the cache holds fewer tokens, the number is negative, or a layer with a sliding window has
                dropped tokens that the window would reach again; see `keep_all_tokens`. The cache is unchanged then.
        """
        if not 0 <= length <= self.length:
            remedy = ". remove_last(n) removes the last n tokens" if length < 0 else ""
            raise ValueError(f"KVCache.crop: got length={length}; expected 0 to {self.length}{remedy}")
        if length == 0:
            self.reset()
        else:
            self.remove_last(self.length - length)

    def clone(self) -> KVCache:
        """Returns an independent copy, for example to continue one prompt in several ways."""
        clone = copy.copy(self)
        clone._set_layers(layer.clone() for layer in self.layers)
        if clone._static:
            position = clone._static[0].position.clone()
            for layer in clone._static:
                layer.position = position
        return clone

    def make_writable(self) -> None:
        """Copies tensors that were created within `torch.inference_mode`, which cannot be updated outside of it."""
        for layer in self.layers:
            layer.make_writable()
        if self._static:
            position = self._static[0].position
            position.lengths = _writable(position.lengths)

    def keep_all_tokens(self) -> None:
        """Makes an empty cache keep all tokens, also in sliding-window layers, so that any number can be removed.

        Raises:
            ValueError: the cache holds tokens already.
        """
        if any(isinstance(layer, RollingLayerCache) for layer in self.layers):
            if self.length > 0:
                raise ValueError(f"keep_all_tokens: the cache holds {self.length} tokens; expected an empty cache")
            self._set_layers(LayerCache() if isinstance(layer, RollingLayerCache) else layer for layer in self.layers)

    def get_seq_length(self) -> int:
        """Returns `length`; the name that Hugging Face's caches use."""
        return self.length
