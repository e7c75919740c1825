"""Prefill of one prompt in chunks, between which other sequences decode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ligerzoo.generate.cache_options import CacheOptions
from ligerzoo.generate.logps import score, with_top_logps
from ligerzoo.generate.transfer import to_device

CHUNK_TOKENS = 64
"""Tokens of a chunk on a CPU. It bounds the time for which the others wait."""

GPU_CHUNK_TOKENS = 256
"""Tokens of a chunk on a GPU. It bounds the memory of the logits of a prompt."""


class ChunkedPrefill:
    """A prompt that is processed into a separate KV cache.

    Args:
        model: the model. Runs uncompiled after `model.compile()`.
        prompt: (T,) int64 token ids on the CPU.
        options: of the KV cache.
        request: the request of the prompt, for the caller.
        row: the row that the sequence will have, for the caller.
        scores: whether to compute the log-probabilities of the prompt's tokens.
        has_top: whether to find the most likely tokens, too.

    Attributes:
        prompt, request, row, scores: as given.
        cache: the KV cache.
        logits: (1, V) fp32 logits after the prompt; None until all chunks are processed.
    """

    def __init__(
        self,
        model: nn.Module,
        prompt: Tensor,
        options: CacheOptions,
        request: int,
        row: int,
        *,
        scores: bool = False,
        has_top: bool = False,
    ) -> None:
        self.prompt, self.request, self.row, self.scores = prompt, request, row, scores
        self.cache = options.new_cache(model)
        self.logits: Tensor | None = None
        self._has_top = has_top
        self._model: Any = model._call_impl
        self._device: torch.device = next(model.parameters()).device
        self._done = 0

    def step(self) -> Tensor | None:
        """Processes the next chunk.

        Returns:
            If the prompt is scored, the packed log-probabilities of its tokens that follow those of the chunk, see
            `with_top_logps`. The first token of the prompt has no log-probability.
        """
        start, self._done = self._done, min(self._done + self._chunk_tokens, len(self.prompt))
        ids = to_device(self.prompt[start : self._done + 1], self._device)  # with the token that follows
        count = self._done - start
        output = self._model(
            ids[None, :count], None, None, past_key_values=self.cache, use_cache=True,
            logits_to_keep=count if self.scores else 1,
        )  # fmt: skip
        if self._done == len(self.prompt):
            self.logits = output.logits[:, -1].float()
        if not self.scores:
            return None
        logits, following = output.logits[0, : len(ids) - 1], ids[1:]
        scored = score(logits, following)
        return with_top_logps(scored, logits) if self._has_top else scored

    @property
    def columns(self) -> Tensor:
        """(T,) int64 on the CPU, the sequence indices of the tokens in the cache."""
        return torch.arange(len(self.prompt))

    @property
    def _chunk_tokens(self) -> int:
        return CHUNK_TOKENS if self._device.type == "cpu" else GPU_CHUNK_TOKENS
