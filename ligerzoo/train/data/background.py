"""An iterator that another thread advances."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")

_POLL = 0.1  # seconds between looks whether the consumer has ended


class Background(Generic[Item]):
    """Iterates over the items of an iterator that another thread advances. Exceptions are raised at their position.

    The thread ends with `close`, with the program, or when this object is garbage-collected. So the iterator must not
    refer to it. It is not a daemon: the interpreter would kill it within C++ code, which aborts the program.

    Args:
        items: the iterator.
        prefetch: the most items that are computed and not yet yielded.
    """

    def __init__(self, items: Iterator[Item], prefetch: int) -> None:
        self._ready: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(prefetch)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=_advance, args=(items, self._ready, self._stop), name="ligerzoo-batches")
        self._thread.start()

    def __iter__(self) -> Background[Item]:
        return self

    def __next__(self) -> Item:
        item, error = self._ready.get()
        if error is not None:
            self._ready.put((None, error))  # for the next call
            raise error
        return item  # type: ignore[return-value]

    def close(self) -> None:
        """Ends the thread and waits for it."""
        self._stop.set()
        self._thread.join()

    def __del__(self) -> None:
        self._stop.set()


def _advance(
    items: Iterator[Item], ready: queue.Queue[tuple[Item | None, BaseException | None]], stop: threading.Event
) -> None:
    def is_needed() -> bool:
        return not stop.is_set() and threading.main_thread().is_alive()

    while is_needed():
        result: tuple[Item | None, BaseException | None]
        try:
            result = next(items), None
        except BaseException as error:
            result = None, error
        while is_needed():
            try:
                ready.put(result, timeout=_POLL)
                break
            except queue.Full:
                pass
        if result[1] is not None:
            return
