"""Measurements in new processes, with a time limit."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.row import reason

Json = dict[str, Any]
Start = Callable[[], Callable[[Any], Json]]
"""Prepares a process, and returns the function that measures an item in it. Both must be picklable."""


def measured_apart(start: Start, items: Sequence[Any], limit: float) -> Iterator[tuple[Any, Json]]:
    """Measures the items one after the other in a new process, and yields each with its result.

    An item that fails or takes too long ends its process and has an "error" as its result. The next items are measured
    in another process.

    Args:
        start: see `Start`.
        items: what to measure.
        limit: seconds that an item may take. Those of the first item of a process include `start`.
    """
    remaining = list(items)
    context = multiprocessing.get_context("spawn")
    while remaining:
        results, sender = context.Pipe(duplex=False)
        process = context.Process(target=_measure_all, args=(sender, start, remaining))
        process.start()
        sender.close()
        try:
            result: Json = {}
            while remaining and "error" not in result:
                result = _received(results, limit)
                yield remaining.pop(0), result
        finally:
            process.kill()
            process.join()


def _received(results: Connection, limit: float) -> Json:
    """The next result of a process."""
    if not results.poll(limit):
        return {"error": f"not finished within {limit:.0f} s"}
    try:
        result: Json = results.recv()
    except EOFError:
        return {"error": "the process ended without a result"}
    return result


def _measure_all(results: Connection, start: Start, items: Sequence[Any]) -> None:
    try:
        measure = start()
        for item in items:
            results.send(measure(item))
    except Exception as error:
        results.send({"error": reason(error)})
        raise
