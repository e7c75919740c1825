"""Times of the gated delta rule's kernels by launch: values per program, warps and stages.

    python -m benchmarks.delta_launches --out delta_launches.json
    python -m benchmarks.delta_launches --shape 27B --kernels scan reverse_scan --out scans.json

8192 tokens in bf16, at a shape of `benchmarks.delta_rule`. All launches are compiled first, in parallel. Then each is
the median over passes of the kernel's own time, in forward and backward passes whose other kernels have their usual
launches. A launch that fails, or ends its process, has an error. The fastest ones belong into `delta_chunks` and
`delta_chunk_gradients`, if `benchmarks.delta_rule` confirms them.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from benchmarks.delta_rule import KEY_HEADS, VALUE_HEADS, rule_row
from benchmarks.measure import write_result
from benchmarks.processes import Json, measured_apart
from ligerzoo.kernels import delta_chunk_gradients, delta_chunks, gated_delta_rule
from ligerzoo.kernels.chunk_tiles import Launch

TOKENS, PASSES = 8192, 5
SIZE = 2
"""Bytes of an element."""

LAUNCHES = {
    name.lower(): launches
    for module in (delta_chunks, delta_chunk_gradients)
    for name, launches in vars(module).items()
    if name.isupper() and hasattr(module, f"_{name.lower()}_kernel")
}
"""The launches of each kernel, by the size of an element; the function is `_NAME_kernel`."""


class Item(NamedTuple):
    """A launch of a kernel, at the shape of a model."""

    kernel: str
    launch: Launch
    shape: str


def candidates(kernel: str, shape: str) -> Iterator[Item]:
    """Yields the launches to try, without those that use `wgmma`, see `delta_chunks`."""
    present = LAUNCHES[kernel][SIZE]
    values = (16, 32) if "scan" in kernel else (16, 32, 64, 128) if present.values else (0,)
    for launch in product(values, (present.warps // 2, present.warps), (1, 2, 3)):
        yield Item(kernel, Launch(*launch), shape)


@functools.cache
def both_passes(shape: str) -> Callable[[], object]:
    """Returns a forward and backward pass on the GPU, with inputs that the process creates once."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        inputs = rule_row(shape, TOKENS, KEY_HEADS, VALUE_HEADS[shape], packed=False).inputs()
        upstream = torch.randn_like(inputs["v"])
    return lambda: torch.autograd.grad(gated_delta_rule(**inputs), tuple(inputs.values()), upstream)


@contextmanager
def launched(item: Item) -> Iterator[None]:
    """Within this context, the kernel has the item's launch."""
    usual = LAUNCHES[item.kernel][SIZE]
    LAUNCHES[item.kernel][SIZE] = item.launch
    try:
        yield
    finally:
        LAUNCHES[item.kernel][SIZE] = usual


def compile_launch(item: Item) -> None:
    """Compiles a launch into Triton's cache. What fails here fails again when it is measured."""
    with suppress(Exception), launched(item):
        both_passes(item.shape)()


def measure(item: Item) -> Json:
    """Returns the milliseconds of a kernel with a launch."""
    run = both_passes(item.shape)
    with launched(item):
        run()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(PASSES):
                run()
            torch.cuda.synchronize()
    times = [event.device_time for event in profile.events() if event.name == f"_{item.kernel}_kernel"]
    return {"ms": statistics.median(times) / 1e3}


def start() -> Callable[[Item], Json]:
    """See `benchmarks.processes.measured_apart`."""
    return measure


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=VALUE_HEADS, default="4B")
    parser.add_argument("--kernels", nargs="+", choices=LAUNCHES, default=list(LAUNCHES), help="default: all")
    parser.add_argument("--out", type=Path, default=Path("delta_launches.json"))
    arguments = parser.parse_args(argv)
    items = [item for kernel in arguments.kernels for item in candidates(kernel, arguments.shape)]
    pool = ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn"))
    with suppress(BrokenProcessPool), pool:  # by a launch that ends its process
        list(tqdm(pool.map(compile_launch, items), total=len(items), desc="compile", unit="launch"))
    found: dict[str, dict[str, Json]] = {}
    for item, result in tqdm(measured_apart(start, items, 60), total=len(items), unit="launch"):
        values, warps, stages = item.launch
        found.setdefault(item.kernel, {})[f"{values} values, {warps} warps, {stages} stages"] = result
    fastest = {kernel: min(times, key=lambda name: times[name].get("ms", 1e9)) for kernel, times in found.items()}
    kernels = {"present": {kernel: LAUNCHES[kernel][SIZE] for kernel in found}, "fastest": fastest, "times": found}
    write_result(arguments.out, {"what": __doc__, **kernels}, {"shape": arguments.shape, **kernels})


if __name__ == "__main__":
    main()
