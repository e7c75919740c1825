"""Reads the state of generation from the device, without making the device wait."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from ligerzoo.generate.sampling import check_logits
from ligerzoo.generate.step import DecodeStep


class States:
    """Reads from the device whether rows are running, and whether the logits were valid.

    Args:
        step: the step.
        lag: number of steps after which the host reads the state of a step. Always 0 on a CPU.
    """

    def __init__(self, step: DecodeStep, lag: int) -> None:
        self._step = step
        self._on_gpu = step.stopping.running.is_cuda
        self._lag = lag if self._on_gpu else 0
        self._pending: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()
        rows = len(step.stopping.running)
        self._buffers = torch.empty(self._lag + 1, rows + 1, dtype=torch.bool, pin_memory=self._on_gpu)

    def is_finished(self, count: int, *, wait: bool) -> bool:
        """Returns whether all rows have finished, as far as is known, and then drops the tokens after that.

        Releases the rows that have finished.

        Args:
            count: number of steps so far.
            wait: wait for all of them.

        Raises:
            LigerzooError: the logits of a step were NaN or infinite.
        """
        buffer = self._buffers[count % len(self._buffers)]
        state = torch.cat([self._step.stopping.running, self._step.sampler.is_broken[None]])
        buffer.copy_(state, non_blocking=True)
        event = None
        if self._on_gpu:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._pending.append((count, buffer, event))
        while self._pending and (wait or len(self._pending) > self._lag):
            counted, buffer, event = self._pending.popleft()
            if event is not None:
                event.synchronize()
            *is_running, is_broken = buffer.tolist()
            check_logits(is_broken, counted)
            if not any(is_running):
                self._step.sequences.truncate(counted)
                return True
            self._step.sequences.release([row for row, runs in enumerate(is_running) if not runs])
        return False
