"""Prefill of one long prompt in chunks, between which other sequences decode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ligerzoo.generate.cache_options import CacheOptions

CHUNK_TOKENS = 64
"""Tokens of a chunk. It bounds the time for which the others wait."""


class ChunkedPrefill:
    """A prompt that is processed into a separate KV cache.

    Args:
        model: the model. Runs uncompiled after `model.compile()`.
        prompt: (T,) int64 token ids.
        options: of the KV cache.
        request: the request of the prompt, for the caller.
        row: the row that the sequence will have, for the caller.

    Attributes:
        prompt, request, row: as given.
        cache: the KV cache.
        logits: (1, V) fp32 logits after the prompt; None until all chunks are processed.
    """

    def __init__(self, model: nn.Module, prompt: Tensor, options: CacheOptions, request: int, row: int) -> None:
        self.prompt, self.request, self.row = prompt, request, row
        self.cache = options.new_cache(model)
        self.logits: Tensor | None = None
        self._model: Any = model._call_impl
        self._done = 0

    def step(self) -> None:
        """Processes the next chunk, if there is one."""
        if self.logits is not None:
            return
        start, self._done = self._done, min(self._done + CHUNK_TOKENS, len(self.prompt))
        ids = self.prompt[None, start : self._done]
        output = self._model(ids, None, None, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        if self._done == len(self.prompt):
            self.logits = output.logits[:, -1].float()

    @property
    def columns(self) -> Tensor:
        """(T,) int64 on the CPU, the sequence indices of the tokens in the cache."""
        return torch.arange(len(self.prompt))
