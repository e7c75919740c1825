"""Key-value caches: what attention keeps of the tokens it has already seen.

They are written in place, so nothing can be differentiated through what was cached: a cache is for inference.

Shapes: B batch, T new tokens, S tokens handed to attention, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class LayerCache:
    """The keys and values of one attention layer, growing: room is doubled when it runs out, so that appending costs
    O(1) a token.

    Attributes:
        length: the number of tokens seen (those of padding included).
        offset: the place among them of the first key that `append` returned last.
        capacity: the most tokens it can hold; None for any number.
        has_unwritten: whether `append` may also return room for tokens to come, behind those seen.
    """

    capacity: int | None = None
    has_unwritten = False

    def __init__(self) -> None:
        self.length = 0
        self.offset = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """(T,) int64: the places that the next T tokens will have."""
        return torch.arange(self.length, self.length + tokens, device=device)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the keys and values of new tokens, each (B, T, K, D), and returns those to attend to, (B, S, K, D) each.

        Raises:
            ValueError: the cache holds another batch than B rows, or has no room for so many tokens.
        """
        self._check_batch(keys)
        start, self.length = self.length, self.length + keys.shape[1]
        self._keys, self._values = _grown(self._keys, keys, start), _grown(self._values, values, start)
        return _part(self._keys, 0, self.length), _part(self._values, 0, self.length)

    def _check_batch(self, keys: Tensor) -> None:
        if self._keys is not None and len(self._keys) != len(keys):
            raise ValueError(f"the cache holds {len(self._keys)} rows, and {len(keys)} are to be added")


class RollingLayerCache(LayerCache):
    """Of a layer with a sliding window: keeps no more than the tokens that the next one sees, in room for twice as
    many.

    Args:
        window: how many tokens a token sees, itself included.
    """

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self._held = 0  # tokens in the buffers

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `LayerCache.append`; what is returned are the new tokens, and up to `window - 1` before them."""
        self._check_batch(keys)
        kept = min(self._held, self.window - 1)
        start, end = self._held - kept, self._held + keys.shape[1]
        self.offset, self.length = self.length - kept, self.length + keys.shape[1]
        if self._keys is None or self._values is None or end > self._keys.shape[2]:
            if self._keys is not None and self._values is not None:
                keys = torch.cat([_part(self._keys, start, self._held), keys], 1)
                values = torch.cat([_part(self._values, start, self._held), values], 1)
            self._held = min(keys.shape[1], self.window - 1)
            self._keys, self._values = (_last(x, self._held, 2 * self.window) for x in (keys, values))
            return keys, values
        self._keys, self._values = _grown(self._keys, keys, self._held), _grown(self._values, values, self._held)
        self._held = end
        return _part(self._keys, start, end), _part(self._values, start, end)


class CrossAttentionLayerCache(LayerCache):
    """Of a cross-attention layer: the keys and values of a memory, such as images, projected once. They are no tokens
    of the text, and their number does not count as its length."""

    def held(self) -> tuple[Tensor, Tensor]:
        """The keys and values to attend to, (B, S, K, D) each, of which there are some."""
        assert self._keys is not None
        assert self._values is not None
        return _part(self._keys, 0, self.length), _part(self._values, 0, self.length)


class StaticLayerCache(LayerCache):
    """Of a fixed size: the same memory and the same shapes at every step that adds one token, and its place a number on
    the device, so that such steps can be captured in a CUDA graph.

    Args:
        capacity: the most tokens it holds.

    Raises:
        ValueError: the capacity is less than 1.
    """

    has_unwritten = True

    def __init__(self, capacity: int) -> None:
        super().__init__()
        if capacity < 1:
            raise ValueError(f"a cache for {capacity} tokens; expected at least 1")
        self.capacity: int = capacity
        self._end: Tensor | None = None  # 0-d: `length` as a replayed graph counts it

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """See `LayerCache.positions`."""
        if self._end is None:
            self._end = torch.zeros((), dtype=torch.int64, device=device)
        return self._end + torch.arange(tokens, device=device)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `LayerCache.append`; one token gets all the room there is, several get what has been written to."""
        self._check_batch(keys)
        tokens = keys.shape[1]
        if self.length + tokens > self.capacity:
            raise ValueError(
                f"the cache has room for {self.capacity} tokens and holds {self.length}; {tokens} more do not fit"
            )
        if self._keys is None or self._values is None:
            self._keys, self._values = (
                x.new_zeros(x.shape[0], x.shape[2], self.capacity, x.shape[3]) for x in (keys, values)
            )
        positions = self.positions(tokens, keys.device)
        self._keys.index_copy_(2, positions, keys.transpose(1, 2))
        self._values.index_copy_(2, positions, values.transpose(1, 2))
        assert self._end is not None
        self._end += tokens
        self.length += tokens
        end = self.capacity if tokens == 1 else self.length
        return _part(self._keys, 0, end), _part(self._values, 0, end)


def _grown(buffer: Tensor | None, new: Tensor, start: int) -> Tensor:
    """`new` at place `start` of the buffer (B, K, capacity, D), which is made, or made anew twice as large, when it is
    too small."""
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


def _last(x: Tensor, count: int, capacity: int) -> Tensor:
    """A buffer (B, K, capacity, D) that begins with the last `count` tokens of x (B, T, K, D)."""
    buffer = x.new_empty(x.shape[0], x.shape[2], capacity, x.shape[3])
    buffer[:, :, :count] = x[:, x.shape[1] - count :].transpose(1, 2)
    return buffer


def _part(buffer: Tensor, start: int, end: int) -> Tensor:
    """(B, K, capacity, D) -> (B, end - start, K, D)."""
    return buffer[:, :, start:end].transpose(1, 2)


class KVCache:
    """The caches of a decoder's layers.

    Args:
        layers: one for each attention layer, of any kinds. `Decoder.new_cache` makes those that fit.

    Attributes:
        useful_until: the length of a text up to which its keys are rotated as they were cached, and beyond which they
            are rotated otherwise (LongRoPE); None where keys stay as they are.
        position_offset: (B or 1, 1) int64, by how much the positions of tokens to come differ from their places in the
            text, of which images take up more than they take up positions (M-RoPE); None for not at all.
        last_image_mask: (B, 1, images, tiles) bool, what the last token sees of the images in the memory; None for all.
    """

    def __init__(self, layers: Iterable[LayerCache]) -> None:
        self.layers = list(layers)
        self.useful_until: int | None = None
        self.position_offset: Tensor | None = None
        self.last_image_mask: Tensor | None = None
        self._of_text = next((layer for layer in self.layers if not isinstance(layer, CrossAttentionLayerCache)), None)
        self._of_memory = next((layer for layer in self.layers if isinstance(layer, CrossAttentionLayerCache)), None)

    def serves(self, tokens: int) -> bool:
        """Whether what it holds is of use to so many more tokens; if not, all are to be read anew, with a new cache."""
        until = self.useful_until
        return until is None or not 0 < self.length <= until < self.length + tokens

    @property
    def length(self) -> int:
        """The number of tokens the cache has seen (those of padding included)."""
        return self._of_text.length if self._of_text else 0

    @property
    def cross_attention_length(self) -> int:
        """The number of states that each cross-attention layer holds keys and values of."""
        return self._of_memory.length if self._of_memory else 0

    @property
    def capacity(self) -> int | None:
        """The most tokens the cache can hold; None for any number."""
        return self._of_text.capacity if self._of_text else None

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """(T,) int64: the places that the next T tokens will have."""
        return self._of_text.positions(tokens, device) if self._of_text else torch.arange(tokens, device=device)

    def get_seq_length(self) -> int:
        """`length`, under the name that Hugging Face's caches have for it."""
        return self.length
