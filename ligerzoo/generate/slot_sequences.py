"""Sequences of `generate` whose KV cache has a fixed size, so that decode steps run as captured graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ligerzoo.generate.sequences import Sequences
from ligerzoo.generate.slots import Slots


class SlotSequences(Sequences):
    """`Sequences` in `Slots`, without padding. Sequences that are too long for these run as `Sequences` do.

    A cache of the caller, and prompts that are embeddings, are processed as by `Sequences` and then copied.
    """

    def __init__(self, model: Any, *arguments: Any) -> None:
        super().__init__(model, *arguments)
        self._on_device = torch.cuda.device(self.device if self.device.type == "cuda" else -1)
        slots = Slots(model, self.rows, self._cache_dtype)
        self._slots = slots if slots.max_length is None or self._limit <= slots.max_length else None

    def __enter__(self) -> SlotSequences:
        self._on_device.__enter__()  # type: ignore[no-untyped-call]  # graphs run on the current device
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if self._slots is not None:
            cache = self._given_cache
            if error is None and cache is not None and (new := self._end - 1 - cache.length) > 0:
                self._slots.export(range(self.rows), cache, new)
            self._slots.close()
        self._on_device.__exit__(error, *_)
        super().__exit__(error, *_)

    def prefill(self) -> Tensor:
        if self._slots is None:
            return super().prefill()
        new_tokens = self._limit - self._prompts.length
        columns = self._columns()
        if self._given_cache is None and self.prompts.shape[1] > 0:
            self._reserve()
            prompts = [ids[index] for ids, index in zip(self.prompts.cpu(), columns, strict=True)]
            return self._slots.admit(range(self.rows), prompts, new_tokens)
        logits = super().prefill()
        self._slots.adopt(range(self.rows), self._cache, columns, new_tokens)
        return logits

    def decode(self) -> Tensor:
        if self._slots is None:
            return super().decode()
        self._reserve()
        return self._slots.decode(self._newest)

    def release(self, rows: list[int]) -> None:
        if self._slots is not None and not self.keeps_cache:
            self._slots.release(rows)

    @property
    def pool(self) -> Any:
        """See `Slots.pool`."""
        return None if self._slots is None else self._slots.pool

    def _columns(self) -> list[Tensor]:
        """Returns the columns of the tokens of each prompt, (T_i,) int64 on the CPU each."""
        if self._padding_mask is None:
            return [torch.arange(self._prompts.length)] * self.rows
        return [mask.nonzero()[:, 0] for mask in self._padding_mask[:, : self._prompts.length].cpu()]
