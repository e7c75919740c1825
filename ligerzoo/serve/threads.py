"""Runs functions in threads, so that the event loop serves other clients meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class Threads:
    """Runs functions of one kind, each in a new thread, which does not delay the end of the process.

    Args:
        limit: largest number of threads at a time; others wait. A thread that runs Python keeps the interpreter lock
            for 5 ms, so that with a hundred of them the event loop would get it every half a second.
    """

    def __init__(self, limit: int) -> None:
        self._free = asyncio.Semaphore(limit)

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Returns the result of a function."""
        async with self._free:
            return await _in_thread(partial(function, *arguments))


async def _in_thread(function: Callable[[], T]) -> T:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def resolve(outcome: Callable[[], None]) -> None:
        if not future.done():  # cancelled
            outcome()

    def run() -> None:
        try:
            outcome = partial(future.set_result, function())
        except Exception as error:
            outcome = partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(resolve, outcome)

    threading.Thread(target=run, daemon=True).start()
    return await future
