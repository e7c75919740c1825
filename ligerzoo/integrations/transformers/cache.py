"""Our KV cache with the methods that transformers' `generate` calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ligerzoo.layers import KVCache


class GenerationCache(Cache):
    """A `ligerzoo.layers.KVCache` as one of transformers' caches.

    Args:
        new: returns an empty cache of the model.

    Attributes:
        caches: the cache.
    """

    def __init__(self, new: Callable[[], KVCache]) -> None:
        super().__init__(layers=[])
        self._new, self._keeps_all = new, False
        self.caches = new()

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        """Returns the number of tokens in the cache, padding included."""
        return self.caches.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Returns -1: the cache grows."""
        return -1

    get_max_cache_shape = get_max_length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Makes row i of the cache a copy of row `beam_idx[i]`."""
        self.caches.select_rows(beam_idx)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row: rows a, b become a, a, b, b."""
        if (rows := self.caches.rows) is not None:
            self.caches.select_rows(torch.arange(rows).repeat_interleave(repeats))

    def activate_past_recording(self) -> None:
        """Keeps all tokens from now on, also in sliding-window layers, so that `crop` can remove any number."""
        self._keeps_all = True
        self.caches.keep_all_tokens()

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Removes the last `-tokens_to_remove` tokens. transformers 5.17 passes a 0-d tensor, 5.23 an int."""
        self.caches.remove_last(-int(tokens_to_remove))

    def reset(self) -> None:
        """Removes all tokens."""
        self.caches = self._new()
        if self._keeps_all:
            self.caches.keep_all_tokens()

    @property
    def batch_size(self) -> int:
        """Number of rows; -1 for an empty cache."""
        return -1 if self.caches.rows is None else self.caches.rows

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` restores the cache exactly; it cannot if layers are recurrent."""
        return not self.caches.is_recurrent

    @property
    def is_linear(self) -> list[bool]:
        """Whether each layer stores a state instead of tokens: none does for `generate`, which removes cached tokens
        from the inputs unless all do."""
        return [False] * len(self)

    def update(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises TypeError: only layers of ligerzoo fill this cache."""
        raise TypeError("GenerationCache: a module of transformers cannot append to it; expected a ligerzoo model")

    def __len__(self) -> int:
        return len(self.caches.layers)
