"""The options of the KV caches of a call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ligerzoo.errors import LigerzooError
from ligerzoo.generate.options import require, require_bool
from ligerzoo.kernels.fp8 import FP8
from ligerzoo.layers import KVCache
from ligerzoo.layers.exactness import exact_length


class CacheOptions(NamedTuple):
    """The options of the KV caches of a call.

    Attributes:
        dtype: see `ligerzoo.layers.KVCache`.
        exact: see `ligerzoo.layers.KVCache`.
    """

    dtype: torch.dtype | None = None
    exact: bool = False

    @property
    def is_default(self) -> bool:
        """Whether a model's default cache has these options."""
        return self == DEFAULT_CACHE

    def new_cache(self, model: Any, capacity: int | None = None) -> KVCache:
        """Returns a cache of the model. One without the options is made without naming them."""
        options = {name: value for name, value in self._asdict().items() if value}
        cache: KVCache = model.new_cache(**options) if capacity is None else model.new_cache(capacity, **options)
        return cache

    def longest(self, model: Any) -> int | None:
        """Returns the largest number of tokens of a cache with these options; None for no limit."""
        return exact_length(model) if self.exact else None

    def check(self, model: Any) -> None:
        """Raises LigerzooError unless the model can have such caches."""
        expected = f"{FP8}, or None for the dtype of the keys and values"
        require(self.dtype in (None, FP8), "cache_dtype", repr(self.dtype), expected)
        require_bool("exact", self.exact)
        if not self.is_default:
            name = "cache_dtype" if self.dtype is not None else "exact"
            got = f"a {type(model).__name__} without new_cache"
            has_caches = hasattr(model, "new_cache")
            require(has_caches, name, got, "a model with the method new_cache, like ligerzoo.models.CausalLM")
            try:
                self.new_cache(model)
            except ValueError as error:
                raise LigerzooError(str(error), where=name) from None


DEFAULT_CACHE = CacheOptions()
"""Keys and values in their own dtype, in caches that need not be exact."""
