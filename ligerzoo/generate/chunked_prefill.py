"""Prefill of a long prompt in chunks, between the steps of other requests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ligerzoo.device import to_device, upload
from ligerzoo.generate.options import CacheOptions
from ligerzoo.generate.packed_logps import score, with_top_logps
from ligerzoo.generate.prompts import Request

CHUNK_TOKENS = 64
"""Tokens of a chunk on a CPU. It bounds the time for which the others wait."""

GPU_CHUNK_TOKENS = 256
"""Tokens of a chunk on a GPU. It bounds the memory of the logits of a prompt."""


class ChunkedPrefill:
    """A prompt that is processed into a separate KV cache, before it moves to its row.

    Attributes:
        cache: the KV cache.
        logits: (1, V) fp32 logits after the prompt; None until all chunks are processed.
    """

    def __init__(self, model: nn.Module, options: CacheOptions, request: Request, row: int) -> None:
        self.request, self.row, self._prompt = request, row, request.context
        self._scores, self._request_options = request.needs_prompt_logps, request.options
        self.cache = options.new_cache(model)
        self.logits: Tensor | None = None
        self._model: Any = model._call_impl
        self._device: torch.device = next(model.parameters()).device
        self._done = 0

    def step(self) -> Tensor | None:
        """Processes the next chunk.

        Returns:
            If the prompt is scored, the packed log-probabilities of its tokens that follow those of the chunk, see
            `with_top_logps`. The first token of the prompt has no log-probability.
        """
        start, self._done = self._done, min(self._done + self._chunk_tokens, len(self._prompt))
        ids = to_device(self._prompt[start : self._done + 1], self._device)  # with the token that follows
        count = self._done - start
        keep = {"past_key_values": self.cache, "use_cache": True, "logits_to_keep": count if self._scores else 1}
        output = self._model(ids[None, :count], None, None, **keep)
        if self._done == len(self._prompt):
            self.logits = output.logits[:, -1].float()
        if not self._scores:
            return None
        logits, following, given = output.logits[0, : len(ids) - 1], ids[1:], self._request_options.logp_token_ids
        scored = score(logits, following)
        if given:
            return with_top_logps(
                scored, logits, upload([given], self._device).expand(len(logits), -1), finds_top=False
            )
        return with_top_logps(scored, logits) if self._request_options.top_logps else scored

    @property
    def columns(self) -> Tensor:
        """(T,) int64 on the CPU, the sequence indices of the tokens in the cache."""
        return torch.arange(len(self._prompt))

    @property
    def _chunk_tokens(self) -> int:
        return CHUNK_TOKENS if self._device.type == "cpu" else GPU_CHUNK_TOKENS
