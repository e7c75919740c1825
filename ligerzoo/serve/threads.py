"""Runs functions in threads, so that the event loop serves other clients meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Returns the result of a function that runs in a new thread.

    Unlike threads of an executor, it neither waits for the calls of other clients nor delays the end of the process.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def resolve(outcome: Callable[[], None]) -> None:
        if not future.done():  # cancelled
            outcome()

    def run() -> None:
        try:
            outcome = partial(future.set_result, function(*arguments))
        except Exception as error:
            outcome = partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(resolve, outcome)

    threading.Thread(target=run, daemon=True).start()
    return await future
