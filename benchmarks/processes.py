"""Measurements in new processes, with a time limit."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
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


def module_command(arguments: Sequence[str], processes: int) -> list[str]:
    """Returns the command of a module with its arguments; torchrun starts it if there are several processes."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *(torchrun if processes > 1 else []), "-m", *arguments]


def run_module(
    arguments: Sequence[str], processes: int, limit: float, environment: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """Runs a module in new processes, and returns what they print, and why they failed; "" if they did not.

    Args:
        arguments: the module, and its arguments.
        processes: their number; torchrun starts several.
        limit: seconds. All that still run then are killed.
        environment: of the processes; None for that of this one.
    """
    command = module_command(arguments, processes)
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        output, errors = run.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        kill_all(run.pid)
        output, _ = run.communicate()
        return output, f"not finished within {limit:.0f} s"
    return output, error_in(errors) if run.returncode else ""


def error_in(text: str) -> str:
    """Returns the first error in what processes print; torchrun's own follow. Without one, the end of the text."""
    found = re.search(r"(?m)^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|error|Exception): .*)$", text)
    return found[1][:300] if found else text.strip()[-300:]


def below(pid: int) -> list[int]:
    """Returns the ids of a process and of all processes that it has started."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            children.setdefault(int(file.read_text().rpartition(")")[2].split()[1]), []).append(int(file.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def kill_all(pid: int) -> None:
    """Kills a process and all that it has started."""
    for one in below(pid):
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
