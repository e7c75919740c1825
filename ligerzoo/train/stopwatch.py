"""Times the parts of a step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class Stopwatch:
    """Adds up the time of named parts, each of which waits for the device at its end.

    Args:
        device: device of the work.

    Attributes:
        seconds: by "NAME_seconds".
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Times the block."""
        start = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        key = f"{name}_seconds"
        self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - start
