"""Caches of one layer: keys and values of earlier tokens, which attention reads again, or states of a recurrent layer.

                         grows                     keeps a window      fixed size
    keys and values      TokenCache                RollingLayerCache   StaticLayerCache
    of images            CrossAttentionLayerCache
    states               RecurrentLayerCache                           StaticRecurrentLayerCache

They are siblings: `LayerCache` says what all have. A kind says what differs: `is_recurrent`, `counts_tokens`,
`is_static`. Caches are updated in place, so autograd cannot differentiate through them: a cache is for inference.
`state_cache` has those of states, `static_cache` those of fixed size, and `kv_cache` the caches of all layers.

Shapes: B batch, T new tokens, S tokens passed to attention, K key-value heads, D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from ligerzoo.kernels.fp8 import as_bytes, to_storage


class LayerCache:
    """What the caches of all layers have: two tensors, of keys and values or of states, and the number of tokens.

    Attributes:
        length: number of tokens appended so far, padding included.
        offset: sequence index of the first key that `append` last returned.
        capacity: maximum number of tokens; None for no limit.
        has_unwritten: whether `append` also returned slots of future tokens, which attention must mask.
        dtype: dtype in which keys and values are stored and returned; None for the one they have. `KVCache` sets it.
        is_recurrent: whether it keeps a state, from which no token can be removed.
        counts_tokens: whether its length is that of the sequence.
        is_static: whether it has a fixed size, see `StaticLayerCache`.
        drops_tokens: whether it drops tokens that a window does not reach.
    """

    is_recurrent: ClassVar[bool] = False
    counts_tokens: ClassVar[bool] = True
    is_static: ClassVar[bool] = False
    drops_tokens: ClassVar[bool] = False
    capacity: int | None = None
    dtype: torch.dtype | None = None
    has_unwritten = False

    def __init__(self) -> None:
        self.length = 0
        self.offset = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def parts(self) -> tuple[LayerCache, ...]:
        """This cache; see `CachePair`."""
        return (self,)

    def map(self, function: Callable[[LayerCache], LayerCache]) -> LayerCache:
        """Returns `function` of this cache; see `CachePair`."""
        return function(self)

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Returns the sequence indices of the next T = `tokens` tokens, (B or 1, T) int64."""
        return torch.arange(self.length, self.length + tokens, device=device)[None]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `TokenCache.append`. Raises TypeError for a cache without keys and values."""
        raise self._error_without_tokens()

    def read(self, start: int = 0) -> tuple[Tensor, Tensor]:
        """See `TokenCache.read`. Raises TypeError for a cache without keys and values."""
        raise self._error_without_tokens()

    def _error_without_tokens(self) -> TypeError:
        return TypeError(
            f"{type(self).__name__}: holds no keys and values; expected a cache of attention, a TokenCache"
        )

    @property
    def first(self) -> int:
        """Sequence index of the first token in the cache; more than 0 where a window has dropped earlier tokens."""
        return 0

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

    def check_room(self, tokens: int) -> None:
        """Raises ValueError if `tokens` more tokens exceed the capacity."""
        if self.capacity is not None and self.length + tokens > self.capacity:
            raise ValueError(
                f"{type(self).__name__}: cannot append {tokens} tokens to the {self.length} in the cache; "
                f"expected at most {self.capacity} in all, the capacity"
            )

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

    def make_writable(self) -> None:
        """See `KVCache.make_writable`."""
        self._keys, self._values = writable(self._keys), writable(self._values)


class CachePair(NamedTuple):
    """The caches of a block in which attention and a recurrent layer have the same input.

    Attributes:
        tokens: of the attention.
        states: of the recurrent layer.
    """

    tokens: LayerCache
    states: LayerCache

    @property
    def parts(self) -> tuple[LayerCache, ...]:
        """Both."""
        return self

    def map(self, function: Callable[[LayerCache], LayerCache]) -> CachePair:
        """Returns a pair of the results of `function` for both."""
        return CachePair(*map(function, self))


BlockCache = LayerCache | CachePair
"""What a block gets as its cache."""


class KeysAndValues(NamedTuple):
    """What the queries of a layer attend to.

    Attributes:
        keys: (B, S, K, D).
        values: (B, S, K, D).
        cache: the cache to which the new ones were appended; None without one.
    """

    keys: Tensor
    values: Tensor
    cache: LayerCache | None


class TokenCache(LayerCache):
    """Growing cache of keys and values. Its buffers double when they are full: appending is O(1) per token."""

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
        return between(self._keys, 0, self.length), between(self._values, 0, self.length)

    def read(self, start: int = 0) -> tuple[Tensor, Tensor]:
        """Returns keys and values of the cached tokens from sequence index `start` on, (B, S, K, D) each.

        The cache must not be empty.
        """
        assert self._keys is not None
        assert self._values is not None
        start, end = max(start - self.first, 0), self.length - self.first
        return between(self._keys, start, end), between(self._values, start, end)

    def _stored(self, x: Tensor) -> Tensor:
        """Returns keys or values in the dtype of this cache."""
        return x if self.dtype is None else to_storage(x, self.dtype)

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


class RollingLayerCache(TokenCache):
    """Cache of a sliding-window layer. Holds at most 2 * `window` tokens.

    Args:
        window: tokens that a token attends to, including itself.
    """

    drops_tokens = True

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self._held = 0  # tokens in the buffers

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `TokenCache.append`. Returns the new tokens and up to `window - 1` tokens before them."""
        self._check_batch(keys)
        keys, values = self._stored(keys), self._stored(values)
        kept = min(self._held, self.window - 1)
        start, end = self._held - kept, self._held + keys.shape[1]
        self.offset, self.length = self.length - kept, self.length + keys.shape[1]
        if self._keys is None or self._values is None or end > self._keys.shape[2]:
            if self._keys is not None and self._values is not None:
                keys = _cat(between(self._keys, start, self._held), keys)
                values = _cat(between(self._values, start, self._held), values)
            self._held = min(keys.shape[1], self.window - 1)
            self._keys, self._values = (_new_buffer(x, self._held, 2 * self.window) for x in (keys, values))
            return keys, values
        self._keys, self._values = _append(self._keys, keys, self._held), _append(self._values, values, self._held)
        self._held = end
        return between(self._keys, start, end), between(self._values, start, end)

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


class CrossAttentionLayerCache(TokenCache):
    """Cache of a cross-attention layer: projected keys and values of states that are not tokens, such as images.

    The length of the sequence does not include these states.
    """

    counts_tokens = False


def writable(x: Tensor | None) -> Tensor | None:
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


def between(buffer: Tensor, start: int, end: int) -> Tensor:
    """(B, K, capacity, D) -> (B, end - start, K, D)."""
    return buffer[:, :, start:end].transpose(1, 2)
