"""Caches of recurrent layers: states instead of keys and values, growing or of fixed size.

Shapes: B batch, T tokens; C channels of a convolution, k its kernel size, V value heads, D_k and D_v key and value head
sizes.
"""

from __future__ import annotations

from torch import Tensor

from ligerzoo.layers.cache import LayerCache
from ligerzoo.layers.static_cache import PrefillRows, StaticCache


class RecurrentLayerCache(LayerCache):
    """States of one recurrent layer: the last inputs of its convolution, (B, k - 1, C), and the state of its
    recurrence, (B, V, D_k, D_v) in fp32, whatever the dtype of the cache.

    They are the two buffers of this cache, in place of keys and values. A state is a sum over all tokens, so that none
    can be removed: neither speculative decoding nor a shorter common prefix can go back to an earlier state.
    """

    is_recurrent = True

    @property
    def is_updatable(self) -> bool:
        """Whether there are states, and a step may update the tensors of `read_states` in place."""
        return self._keys is not None

    def read_states(self, rows: int, tokens: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Returns the inputs of the convolution and the state of the recurrence; None twice before the first token.

        Args:
            rows: B.
            tokens: number of tokens that follow. They must fit before a step updates the states in place.

        Raises:
            ValueError: the states have another batch size, or the capacity is exceeded.
        """
        self.check_room(tokens)
        if self._keys is None or self._values is None:
            return None, None
        if len(self._keys) != rows:
            raise ValueError(f"{type(self).__name__}: got tokens of batch size {rows}; expected {len(self._keys)}")
        return self._keys, self._values

    def write_states(self, conv_state: Tensor, state: Tensor, tokens: int) -> None:
        """Replaces the states, in place from the second time on, and counts tokens.

        Args:
            conv_state: (B, k - 1, C).
            state: (B, V, D_k, D_v).
            tokens: number of tokens since the last states.
        """
        for buffer, new in zip(self.allocate(len(state), conv_state, state), (conv_state, state), strict=True):
            buffer.copy_(new)
        self.count(tokens)

    def count(self, tokens: int) -> None:
        """Counts tokens, for which the states were updated in place."""
        self.length += tokens

    def allocate(self, rows: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the buffers of B = `rows` rows; of zeros, unless they exist.

        Args:
            rows: B.
            keys: (..., k - 1, C), inputs of a convolution.
            values: (..., V, D_k, D_v), states.
        """
        if self._keys is None or self._values is None:
            self._keys = keys.new_zeros(rows, *keys.shape[1:])
            self._values = values.new_zeros(rows, *values.shape[1:])
        return self._keys, self._values

    def check_removal(self, tokens: int) -> None:
        """Raises ValueError unless `tokens` is 0: a state cannot go back to an earlier token."""
        super().check_removal(tokens)
        if tokens > 0:
            raise ValueError(
                f"{type(self).__name__}: cannot remove the last {tokens} of {self.length} tokens, which are part of "
                "the state of a recurrent layer. Use clone() before the tokens to remove, or reset() and process the "
                "text again"
            )


class StaticRecurrentLayerCache(StaticCache, RecurrentLayerCache):
    """States in buffers that stay where they are, for decode steps that are captured in a CUDA graph.

    Args:
        capacity: maximum number of tokens, as for the caches of attention layers.

    Raises:
        ValueError: `capacity` is less than 1.
    """

    def count(self, tokens: int) -> None:
        """See `RecurrentLayerCache.count`. Advances the position that all static layers share."""
        assert self._values is not None
        self.position.write(self.length, len(self._values), tokens, self._values.device)
        super().count(tokens)

    def reset(self) -> None:
        """Empties the cache; its memory stays allocated."""
        super().reset()
        for buffer in (self._keys, self._values):
            if buffer is not None:
                buffer.zero_()

    def prefill_rows(self, index: Tensor, rows: int) -> PrefillStates:
        """See `StaticCache.prefill_rows`."""
        return PrefillStates(self, index, rows)

    def copy_tokens_from(self, other: LayerCache, source: int, columns: Tensor, target: int, rows: int) -> None:
        """See `KVCache.copy_tokens_from`. The states include all tokens of the other cache."""
        if other._keys is not None and other._values is not None:
            states = other._keys, other._values
            for buffer, state in zip(self.allocate(rows, *states), states, strict=True):
                buffer[target] = state[source]

    def append_tokens_to(self, other: LayerCache, rows: Tensor, positions: Tensor) -> None:
        """See `KVCache.append_tokens_to`. The states include all tokens of the rows."""
        assert isinstance(other, RecurrentLayerCache)
        if self._keys is not None and self._values is not None:
            other.write_states(self._keys[rows], self._values[rows], positions.shape[1])

    def _buffers_like(self, keys: Tensor, values: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        return self.allocate(rows, keys, values)

    def _part(self, buffer: Tensor, tokens: int) -> Tensor:
        return buffer


class PrefillStates(PrefillRows, RecurrentLayerCache):
    """`PrefillRows` of states."""

    is_updatable = False  # `read_states` returns copies

    def __init__(self, cache: StaticRecurrentLayerCache, index: Tensor, rows: int) -> None:
        super().__init__(cache, index, rows)
        self._cache = cache

    def read_states(self, rows: int, tokens: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """See `RecurrentLayerCache.read_states`. The first tokens do not continue what the rows held before."""
        conv_state, state = self._cache._keys, self._cache._values
        if self.length == 0 or conv_state is None or state is None:
            return None, None
        return conv_state[self._index], state[self._index]

    def write_states(self, conv_state: Tensor, state: Tensor, tokens: int) -> None:
        """See `RecurrentLayerCache.write_states`."""
        buffers = self._cache.allocate(self._rows, conv_state, state)
        for buffer, new in zip(buffers, (conv_state, state), strict=True):
            buffer[self._index] = new
        self.count(tokens)
