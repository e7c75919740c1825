"""Times of the kernels of linear recurrences by launch: values per program, warps, stages and registers.

    python -m benchmarks.recurrence_launches --out delta_launches.json
    python -m benchmarks.recurrence_launches --shape 27B --kernels scan reverse_scan --out scans.json
    python -m benchmarks.recurrence_launches --shape Nemotron-H-8B --out ssd_launches.json

8192 tokens in bf16, at a shape of `benchmarks.delta_rule` or `benchmarks.state_space`. All launches are compiled first,
in parallel. Then each is the median over passes of the kernel's own time, in forward and backward passes whose other
kernels have their usual launches. A launch that fails, or ends its process, has an error. The fastest ones belong into
`delta_chunks`, `delta_chunk_gradients`, `ssd_chunks`, `ssd_chunk_gradients` and `ssd_group_gradients`, if the benchmark
of the shape confirms them. The results also have the time of each kernel in a pass of ours and of each peer.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from tqdm import tqdm

from benchmarks import delta_rule, state_space
from benchmarks.measure import save_result
from benchmarks.processes import Json, measured_apart
from benchmarks.row import OURS, Row, reason
from ligerzoo.kernels import (
    delta_chunk_gradients,
    delta_chunks,
    ssd_chunk_gradients,
    ssd_chunks,
    ssd_group_gradients,
)
from ligerzoo.kernels.chunk_tiles import Launch
from ligerzoo.kernels.dispatch import padded_size

TOKENS, PASSES = 8192, 5
PROCESSES = 16
"""That compile at most; each has inputs on the GPU."""
SIZE = 2
"""Bytes of an element."""
REGISTERS = 0, 168
"""Of a thread, at most; 0 for those that the compiler takes. With 168, 12 warps run at a time."""

Launches = dict[str, dict[int, Launch]]
"""The launches of each kernel, by the size of an element."""


def launches_of(*modules: ModuleType) -> Launches:
    """Of the modules' kernels; the function of the kernel of the constant NAME is `_name_kernel`."""
    return {
        name.lower(): launches
        for module in modules
        for name, launches in vars(module).items()
        if name.isupper() and hasattr(module, f"_{name.lower()}_kernel")
    }


class Shape(NamedTuple):
    """An operation at the shape of a model.

    Attributes:
        row: its row in a benchmark.
        value_dim: features of a head.
        launches: of its kernels.
        rows: of the products of kernels other than scans; 64 if a kernel is missing.
    """

    row: Callable[[], Row]
    value_dim: int
    launches: Launches
    rows: dict[str, int]


DELTA_RULE = launches_of(delta_chunks, delta_chunk_gradients)
SSD = launches_of(ssd_chunks, ssd_chunk_gradients, ssd_group_gradients)
SHAPES = {
    name: Shape(
        functools.partial(delta_rule.rule_row, name, TOKENS, delta_rule.KEY_HEADS, heads, packed=False),
        delta_rule.HEAD_DIM,
        DELTA_RULE,
        dict.fromkeys(("query_gradients", "key_gradients"), delta_chunk_gradients.ROWS),
    )
    for name, heads in delta_rule.VALUE_HEADS.items()
} | {
    name: Shape(
        functools.partial(state_space.ssd_row, name, 1, TOKENS, shape),
        shape.head_dim,
        SSD,
        {
            **dict.fromkeys(("prepare", "group_gradients"), ssd_chunks.ROWS),
            "pair_weights": ssd_chunk_gradients.PAIR_ROWS[SIZE],
        },
    )
    for name, shape in state_space.MODELS.items()
}


class Item(NamedTuple):
    """A launch of a kernel, at a shape; or all kernels of a provider of the row, if `kernel` is its name."""

    kernel: str
    launch: Launch | None
    shape: str


def candidates(kernel: str, shape: str) -> Iterator[Item]:
    """Yields the launches to try, without those that use `wgmma`, see `delta_chunks`."""
    _, value_dim, launches, rows = SHAPES[shape]
    present, is_scan = launches[kernel][SIZE], "scan" in kernel
    values = (16, 32) if is_scan else (16, 32, 64, 128) if present.values else (0,)
    largest = 128 if kernel == "prepare" else padded_size(value_dim)  # `prepare` has blocks of the keys
    warps = sorted({max(1, present.warps // 2), present.warps, min(8, 2 * present.warps)})
    for launch in product(values, warps, (1, 2, 3), sorted({*REGISTERS, present.registers})):
        has_few_rows = is_scan or rows.get(kernel, 64) < 64
        if launch[0] <= largest and (has_few_rows or launch[1] <= 2):
            yield Item(kernel, Launch(*launch), shape)


@functools.cache
def both_passes(shape: str, provider: str = OURS) -> Callable[[], object]:
    """Returns a forward and backward pass on the GPU, with inputs that the process creates once."""
    torch.manual_seed(0)
    row = SHAPES[shape].row()
    function = row.providers[provider].load()
    with torch.device("cuda"):
        inputs = row.inputs()
        leaves = [x for x in inputs.values() if x.requires_grad]
        upstream = torch.randn_like(function(*inputs.values()))
    return lambda: torch.autograd.grad(function(*inputs.values()), leaves, upstream)


@contextmanager
def launched(item: Item) -> Iterator[None]:
    """Within this context, the kernel has the item's launch."""
    assert item.launch is not None
    launches = SHAPES[item.shape].launches[item.kernel]
    usual = launches[SIZE]
    launches[SIZE] = item.launch
    try:
        yield
    finally:
        launches[SIZE] = usual


def compile_launch(item: Item) -> None:
    """Compiles a launch into Triton's cache. What fails here fails again when it is measured."""
    with suppress(Exception), launched(item):
        both_passes(item.shape)()


def kernel_times(run: Callable[[], object]) -> dict[str, list[float]]:
    """The milliseconds of each launch of each kernel in `PASSES` calls, after one that compiles and tunes."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PASSES):
            run()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        times[event.name].append(event.device_time / 1e3)
    return times


def measure(item: Item) -> Json:
    """Returns the milliseconds of a kernel with a launch; or of each kernel of a provider, in a pass."""
    if item.launch is None:
        times = kernel_times(both_passes(item.shape, item.kernel))
        sums = {name: sum(ms) / PASSES for name, ms in times.items()}
        return {name[:80]: sums[name] for name in sorted(sums, key=sums.__getitem__, reverse=True) if sums[name] > 0}
    from triton.runtime.errors import OutOfResources

    with launched(item):
        try:
            times = kernel_times(both_passes(item.shape))
        except OutOfResources as error:  # which leaves the process usable
            return {"too large": reason(error)}
    return {"ms": statistics.median(times[f"_{item.kernel}_kernel"])}


def start() -> Callable[[Item], Json]:
    """See `benchmarks.processes.measured_apart`."""
    return measure


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="4B")
    parser.add_argument("--kernels", nargs="*", metavar="KERNEL", help="default: all; without names: none")
    parser.add_argument("--providers", nargs="*", default=None, help="whose kernels to list; default: all but eager")
    parser.add_argument("--out", type=Path, default=Path("recurrence_launches.json"))
    arguments = parser.parse_args(argv)
    shape = SHAPES[arguments.shape]
    kernels = list(shape.launches) if arguments.kernels is None else arguments.kernels
    if unknown := set(kernels) - set(shape.launches):
        parser.error(f"--kernels: got {', '.join(sorted(unknown))}; expected some of {', '.join(shape.launches)}")
    peers = [name for name in shape.row().providers if name != "eager"]
    providers = [Item(name, None, arguments.shape) for name in arguments.providers or peers]
    items = [item for kernel in kernels for item in candidates(kernel, arguments.shape)]
    pool = ProcessPoolExecutor(min(PROCESSES, os.cpu_count() or 1), mp_context=get_context("spawn"))
    with suppress(BrokenProcessPool), pool:  # by a launch that ends its process
        list(tqdm(pool.map(compile_launch, items), total=len(items), desc="compile", unit="launch"))

    found: dict[str, Json] = {"present": {kernel: shape.launches[kernel][SIZE] for kernel in kernels}}
    found |= {"fastest": {}, "providers": {}, "times": {}}
    progress = tqdm(measured_apart(start, [*providers, *items], 120), total=len(providers) + len(items), unit="launch")
    for item, result in progress:
        if item.launch is None:
            found["providers"][item.kernel] = result
        else:
            values, warps, stages, registers = item.launch
            times = found["times"].setdefault(item.kernel, {})
            times[f"{values} values, {warps} warps, {stages} stages, {registers or 'any'} registers"] = result
            found["fastest"][item.kernel] = min(times, key=lambda name: times[name].get("ms", 1e9))
        save_result(arguments.out, {"what": __doc__, **found}, {"shape": arguments.shape, **found})
    print(arguments.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
