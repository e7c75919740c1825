"""Sequences of `generate` whose KV cache has a fixed size, so that decode steps run as captured graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ligerzoo.generate.sequences import Sequences
from ligerzoo.generate.slots import Slots


class SlotSequences(Sequences):
    """`Sequences` in `Slots`, without padding. Sequences that are too long for these run as `Sequences` do."""

    def __init__(self, model: Any, *arguments: Any) -> None:
        super().__init__(model, *arguments)
        self._on_device = torch.cuda.device(self.prompts.device if self.prompts.is_cuda else -1)
        slots = Slots(model, len(self.prompts))
        self._slots = slots if slots.max_length is None or self._limit <= slots.max_length else None

    def __enter__(self) -> SlotSequences:
        self._on_device.__enter__()  # type: ignore[no-untyped-call]  # graphs run on the current device
        return self

    def __exit__(self, *exception: object) -> None:
        if self._slots is not None:
            self._slots.close()
        self._on_device.__exit__(*exception)
        super().__exit__(*exception)

    def prefill(self) -> Tensor:
        if self._slots is None:
            return super().prefill()
        rows = list(self.prompts.cpu())
        if self._padding_mask is not None:
            rows = [row[is_token] for row, is_token in zip(rows, self._padding_mask.cpu(), strict=True)]
        self._reserve()
        return self._slots.admit(range(len(rows)), rows, self._limit - self.prompts.shape[1])

    def decode(self) -> Tensor:
        if self._slots is None:
            return super().decode()
        self._reserve()
        return self._slots.decode(self._newest)

    def release(self, rows: list[int]) -> None:
        if self._slots is not None:
            self._slots.release(rows)

    @property
    def pool(self) -> Any:
        """See `Slots.pool`."""
        return None if self._slots is None else self._slots.pool
