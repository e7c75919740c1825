"""What the benchmarks share: where they ran, how they time, and how a result is written down."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def environment() -> dict[str, str]:
    """The machine and the versions that a result holds for."""
    packages = ("torch", "triton", "transformers", "liger-kernel", "safetensors")
    versions = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": gpu, "cuda": str(torch.version.cuda), **versions}


def milliseconds(function: Callable[[], object], *, warmup: int, repeats: int) -> float:
    """The median time of a call on the GPU, by events around each."""
    for _ in range(warmup):
        function()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Writes the result, with the environment, as JSON and prints it."""
    content = json.dumps({"environment": environment(), **result}, indent=2) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    print(content)
