"""Ctrl-C during training: the first one asks the loop to save and stop, the second one stops at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)  # SIGTERM: what job schedulers and `kill` send


class StopRequest:
    """A context manager in which the first Ctrl-C or SIGTERM sets `requested`. The second one has its usual effect.

    Outside the main thread, where Python allows no signal handlers, it does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._request) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested = True
            return
        handler = self._handlers[number]
        if callable(handler):
            handler(number, frame)
        elif handler is not signal.SIG_IGN:
            raise KeyboardInterrupt
