"""Sequences of `generate` whose KV cache has a fixed size, so that decode steps run as captured graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ligerzoo.generate.cache_options import DEFAULT_CACHE, CacheOptions
from ligerzoo.generate.captured import can_capture
from ligerzoo.generate.options import invalid
from ligerzoo.generate.prompts import Prompts
from ligerzoo.generate.sequences import Sequences
from ligerzoo.generate.slots import Slots, max_length
from ligerzoo.layers import KVCache
from ligerzoo.layers.static_cache import DECODE_TOKENS


class SlotSequences(Sequences):
    """`Sequences` in `Slots`, without padding.

    A cache of the caller, and prompts that are embeddings, are processed as by `Sequences` and then copied.
    """

    def __init__(self, model: Any, *arguments: Any) -> None:
        super().__init__(model, *arguments)
        self._on_device = torch.cuda.device(self.device if self.device.type == "cuda" else -1)
        self._slots = Slots(model, self.rows, options=self._options)

    def __enter__(self) -> SlotSequences:
        self._on_device.__enter__()  # type: ignore[no-untyped-call]  # graphs run on the current device
        return self

    def __exit__(self, error: object, *_: object) -> None:
        super().__exit__(error, *_)
        cache = self._given_cache
        if error is None and cache is not None and (new := self._end - 1 - cache.length) > 0:
            self._slots.export(range(self.rows), cache, new)
        self._slots.close()
        self._on_device.__exit__(error, *_)

    def prefill(self) -> Tensor:
        new_tokens = self._limit - self._prompts.length
        columns = self._columns()
        if self._given_cache is None and self.prompts.shape[1] > 0:
            self._reserve()
            self._cached = self._end
            prompts = [ids[index] for ids, index in zip(self.prompts.cpu(), columns, strict=True)]
            return self._slots.admit(range(self.rows), prompts, new_tokens)
        logits = super().prefill()
        self._slots.adopt(range(self.rows), self._cache, columns, new_tokens)
        return logits

    def decode(self) -> Tensor:
        self._reserve()
        self._cached = self._end
        return self._slots.decode(self._newest)

    def room_for_drafts(self, tokens: int) -> int:
        tokens, longest = min(tokens, DECODE_TOKENS - 1), self._slots.max_length
        # Not limited by `max_new_tokens`: each number of tokens would have its own graph.
        return tokens if longest is None else max(0, min(tokens, longest - self._end))

    def release(self, rows: list[int]) -> None:
        if not self.keeps_cache:
            self._slots.release(rows)

    @property
    def pool(self) -> Any:
        """See `Slots.pool`."""
        return self._slots.pool

    def _decode_all(self, tokens: Tensor) -> Tensor:
        self._cached = self._end
        return self._slots.decode(tokens).view(*tokens.shape, -1)

    def _remove_cached(self, tokens: int) -> None:
        for row in range(self.rows):
            self._slots.remove_last(row, tokens)
        self._cached -= tokens

    def _columns(self) -> list[Tensor]:
        """Returns the columns of the tokens of each prompt, (T_i,) int64 on the CPU each."""
        if self._padding_mask is None:
            return [torch.arange(self._prompts.length)] * self.rows
        return [mask.nonzero()[:, 0] for mask in self._padding_mask[:, : self._prompts.length].cpu()]


def make_sequences(
    model: Any,
    prompts: Prompts,
    copies: int = 1,
    max_new_tokens: int = 0,
    use_cache: bool = True,
    cache: KVCache | None = None,
    options: CacheOptions = DEFAULT_CACHE,
    *,
    is_rewindable: bool = False,
) -> Sequences:
    """Returns `SlotSequences` where decode steps can be captured, else `Sequences`.

    Args:
        model, prompts, copies, max_new_tokens, use_cache, cache, options: see `Sequences`.
        is_rewindable: whether any number of tokens can be removed later; a cache of the caller must allow it.
    """
    arguments = model, prompts, copies, max_new_tokens, use_cache
    options.check(model)
    if use_cache and max_new_tokens > 2 and isinstance(model, nn.Module) and can_capture(model):
        longest = max_length(model, options)
        if longest is None or prompts.length + max_new_tokens <= longest:
            return SlotSequences(*arguments, cache, options)
    if options.exact and prompts.padding_mask is not None:  # only slots are free of padding
        got = "prompts of several lengths, by a model whose decode steps are not captured"
        raise invalid("exact", got, "prompts of one length", "Call generate for each prompt.")
    if is_rewindable and cache is None:
        cache, options = options.new_cache(model), DEFAULT_CACHE
        cache.keep_all_tokens()
    return Sequences(*arguments, cache, options)
