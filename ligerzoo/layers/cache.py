"""Key-value caches: what attention keeps of the tokens it has already seen."""

from torch import Tensor


class LayerCache:
    """The keys and values of one attention layer, growing: room is doubled when it runs out, so appending costs O(1) a
    token.

    They are written in place, so nothing can be differentiated through what was cached: a cache is for inference.
    """

    def __init__(self) -> None:
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the keys and values of new tokens, each (B, T, K, D), and returns those of all tokens, (B, length, K, D)
        each.

        Raises:
            ValueError: the cache holds another batch than B rows.
        """
        if self._keys is not None and len(self._keys) != len(keys):
            raise ValueError(f"the cache holds {len(self._keys)} rows, and {len(keys)} are to be added")
        start, self.length = self.length, self.length + keys.shape[1]
        self._keys = _written(self._keys, keys, start)
        self._values = _written(self._values, values, start)
        return self._keys[:, :, : self.length].transpose(1, 2), self._values[:, :, : self.length].transpose(1, 2)


def _written(buffer: Tensor | None, new: Tensor, start: int) -> Tensor:
    """`new` at position `start` of the buffer (B, K, capacity, D), which is made, or made anew twice as large, when it
    is too small."""
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


class KVCache:
    """One `LayerCache` for each layer of a decoder.

    Args:
        num_layers: the number of attention layers.
    """

    def __init__(self, num_layers: int) -> None:
        self.layers = [LayerCache() for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """The number of tokens the cache holds (those of padding included)."""
        return self.layers[0].length if self.layers else 0

    def get_seq_length(self) -> int:
        """`length`, under the name that Hugging Face's caches have for it."""
        return self.length
