"""Code shared by the benchmarks: the environment, timing, and writing results."""

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
    """The GPU and the package versions that a result was measured with."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": gpu, "cuda": str(torch.version.cuda), **versions}


def save_result(path: Path, raw: Mapping[str, Any], compact: Mapping[str, Any]) -> None:
    """Writes two JSON files: `compact`, which `benchmarks.report` reads and git tracks, and everything measured.

    Args:
        path: of the compact file. `raw` goes next to it, with the suffix `.raw.json`, which git ignores.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    where = {"environment": environment()}
    path.with_suffix(".raw.json").write_text(json.dumps({**where, **raw}, indent=2) + "\n", encoding="utf-8")
    path.write_text(compact_json({**where, **compact}) + "\n", encoding="utf-8")


def write_result(path: Path, raw: Mapping[str, Any], compact: Mapping[str, Any]) -> None:
    """`save_result`, and prints the compact file."""
    save_result(path, raw, compact)
    print(path.read_text(encoding="utf-8"))


def compact_json(value: Any, depth: int = 2, indent: str = "") -> str:
    """JSON with a line for each entry down to `depth`, and numbers of at most six significant digits."""
    if isinstance(value, float):
        return json.dumps(float(f"{value:.6g}"))
    if isinstance(value, list | tuple):
        entries, brackets = [compact_json(item, depth - 1, indent + "  ") for item in value], "[]"
    elif isinstance(value, Mapping):
        entries = [f"{json.dumps(key)}: {compact_json(item, depth - 1, indent + '  ')}" for key, item in value.items()]
        brackets = "{}"
    else:
        return json.dumps(value)
    if depth > 0 and entries:
        return f"{brackets[0]}\n{indent}  " + f",\n{indent}  ".join(entries) + f"\n{indent}{brackets[1]}"
    return brackets[0] + ", ".join(entries) + brackets[1]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _timed(function: Callable[[], object], device: str) -> Callable[[], float]:
    """Calls the function. The returned callable gives the milliseconds, once the device has finished."""
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
    """Returns the median milliseconds of each function. Calls alternate, so that a slower GPU slows all."""
    readings: dict[str, list[Callable[[], float]]] = {name: [] for name in functions}
    cache = torch.empty(L2_FLUSH if flush and device == "cuda" else 0, dtype=torch.int8, device=device)
    for _ in range(rounds):
        for name, function in functions.items():
            cache.zero_()  # flushes the L2 cache
            readings[name].append(_timed(function, device))
    synchronize(device)
    return {name: statistics.median(read() for read in column) for name, column in readings.items()}


def milliseconds(function: Callable[[], object], *, warmup: int, repeats: int) -> float:
    """Returns the median time of a call on the GPU, measured with CUDA events."""
    for _ in range(warmup):
        function()
    return interleaved({"": function}, device="cuda", rounds=repeats, flush=False)[""]


def medians_within(seconds: float, functions: Mapping[str, Callable[[], object]], *, device: str) -> dict[str, float]:
    """Runs `interleaved` for as many rounds as fit into `seconds`, 3 to 200."""
    synchronize(device)
    begin = time.perf_counter()
    interleaved(functions, device=device, rounds=1)
    rounds = int(seconds / (time.perf_counter() - begin))
    return interleaved(functions, device=device, rounds=min(200, max(3, rounds)))


def seconds_per_call(function: Callable[[], object], *, device: str, warmup: int, rounds: int, calls: int) -> float:
    """Returns the median over rounds of the wall-clock time of a call, on the host or the device: the slower one."""
    for _ in range(warmup):
        function()
    times = []
    for _ in range(rounds):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize(device)
        times.append((time.perf_counter() - begin) / calls)
    return statistics.median(times)


def sustained(seconds: float, function: Callable[[], object], *, device: str) -> float:
    """Returns the milliseconds of a call in back-to-back calls for `seconds`, after a warm-up of the same length."""
    for _ in range(2):  # the first call loads and tunes
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
