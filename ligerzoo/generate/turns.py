"""Reuses the KV cache in the turns of a conversation."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ligerzoo.layers import KVCache


class SupportsNewCache(Protocol):
    """A model that `TurnCache` accepts."""

    def new_cache(self) -> KVCache: ...


class TurnCache:
    """The KV cache of a conversation, so that each turn processes only the tokens that are new.

    Each turn passes the token ids of the whole conversation. A chat template may write earlier answers with other
    tokens than the model generated. So the cache keeps only the first tokens that both have in common.

        turns = TurnCache(model)
        ids = model.generate(input_ids, past_key_values=turns.cache_for(input_ids), max_new_tokens=100)
        turns.keep(ids)

    Args:
        model: the model.
    """

    def __init__(self, model: SupportsNewCache) -> None:
        self._cache = model.new_cache()
        self._cache.keep_all_tokens()
        self._tokens = torch.empty(0, dtype=torch.int64)

    def cache_for(self, input_ids: Tensor) -> KVCache:
        """Returns the cache of the first tokens of a conversation, at most of all but the last.

        Args:
            input_ids: (1, T) token ids of the whole conversation.
        """
        ids = input_ids[0].to("cpu", torch.int64)
        tokens = min(len(ids) - 1, len(self._tokens), self._cache.length)
        is_same = ids[:tokens] == self._tokens[:tokens]
        self._cache.crop(int(is_same.cumprod(0).sum()))
        return self._cache

    def keep(self, sequences: Tensor) -> None:
        """Remembers which tokens the cache holds: those that `generate` returned, (1, T), all but the last."""
        self._tokens = sequences[0].to("cpu", torch.int64)
