"""What the benchmarks share: where they ran, how they time, and how a result is written down."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "transformers", "liger-kernel", "cut-cross-entropy", "safetensors")
L2_FLUSH = 256 * 2**20  # bytes, more than any GPU's L2 cache holds


def environment() -> dict[str, str]:
    """The machine and the versions that a result holds for."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": gpu, "cuda": str(torch.version.cuda), **versions}


def save_result(path: Path, result: Mapping[str, Any]) -> str:
    """Writes the result, with the environment, as JSON, and returns that."""
    content = json.dumps({"environment": environment(), **result}, indent=2) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return content


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Writes the result, with the environment, as JSON and prints it."""
    print(save_result(path, result))


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _timed(function: Callable[[], object], device: str) -> Callable[[], float]:
    """Calls the function; the result tells, once the device is done, how many milliseconds that took."""
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        function()
        end.record()
        return lambda: start.elapsed_time(end)
    begin = time.perf_counter()
    function()
    elapsed = (time.perf_counter() - begin) * 1e3
    return lambda: elapsed


def interleaved(
    functions: Mapping[str, Callable[[], object]], *, device: str, rounds: int, flush: bool = True
) -> dict[str, float]:
    """The median milliseconds of each function; they take turns, so that a GPU that slows down slows all of them."""
    readings: dict[str, list[Callable[[], float]]] = {name: [] for name in functions}
    cache = torch.empty(L2_FLUSH if flush and device == "cuda" else 0, dtype=torch.int8, device=device)
    for _ in range(rounds):
        for name, function in functions.items():
            cache.zero_()  # what the last call left in the L2 cache
            readings[name].append(_timed(function, device))
    synchronize(device)
    return {name: statistics.median(read() for read in column) for name, column in readings.items()}


def milliseconds(function: Callable[[], object], *, warmup: int, repeats: int) -> float:
    """The median time of a call on the GPU, by events around each."""
    for _ in range(warmup):
        function()
    return interleaved({"": function}, device="cuda", rounds=repeats, flush=False)[""]


def medians_within(seconds: float, functions: Mapping[str, Callable[[], object]], *, device: str) -> dict[str, float]:
    """`interleaved` for as many rounds as the time allows, 3 to 200."""
    synchronize(device)
    begin = time.perf_counter()
    interleaved(functions, device=device, rounds=1)
    rounds = int(seconds / (time.perf_counter() - begin))
    return interleaved(functions, device=device, rounds=min(200, max(3, rounds)))


def sustained(seconds: float, function: Callable[[], object], *, device: str) -> float:
    """The milliseconds of a call among calls without a pause, for that long after as long a time to warm up."""
    for _ in range(2):  # the first loads and tunes
        synchronize(device)
        begin = time.perf_counter()
        function()
        synchronize(device)
    calls = max(1, int(seconds / (time.perf_counter() - begin)))

    def many() -> None:
        for _ in range(calls):
            function()

    _, elapsed = (_timed(many, device) for _ in range(2))
    synchronize(device)
    return elapsed() / calls
