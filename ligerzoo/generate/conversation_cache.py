"""Reuses the KV cache in a conversation."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ligerzoo.layers import KVCache


class SupportsNewCache(Protocol):
    """A model that `ConversationCache` accepts."""

    def new_cache(self) -> KVCache: ...


class ConversationCache:
    """The KV cache of a conversation, so that each call of `generate` processes only the tokens that are new.

    Each call receives the token ids of the whole conversation. A chat template may write earlier answers with other
    tokens than the model generated. So the cache keeps only the first tokens that both have in common. A cache of
    recurrent layers cannot drop tokens: it is emptied unless the text extends the cached one.

        cache = ConversationCache(model)
        ids = model.generate(input_ids, past_key_values=cache.shared_with(input_ids), max_new_tokens=100)
        cache.keep(ids)

    Args:
        model: the model.
    """

    def __init__(self, model: SupportsNewCache) -> None:
        self._cache = model.new_cache()
        if not self._cache.is_recurrent:
            self._cache.keep_all_tokens()
        self._tokens = torch.empty(0, dtype=torch.int64)

    def shared_with(self, input_ids: Tensor) -> KVCache:
        """Returns the KV cache of the first tokens that this text shares with it, at most of all but the last.

        Args:
            input_ids: (1, T) token ids of the whole conversation.
        """
        ids = input_ids[0].to("cpu", torch.int64)
        tokens = min(len(ids) - 1, len(self._tokens), self._cache.length)
        is_same = ids[:tokens] == self._tokens[:tokens]
        shared = int(is_same.cumprod(0).sum())
        is_extended = shared == self._cache.length
        self._cache.crop(shared if is_extended or not self._cache.is_recurrent else 0)
        return self._cache

    def keep(self, sequences: Tensor) -> None:
        """Remembers which tokens the cache holds: those that `generate` returned, (1, T), all but the last."""
        self._tokens = sequences[0].to("cpu", torch.int64)
