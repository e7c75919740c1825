"""One row of a benchmark: an operation at one shape, and the providers that compute it.

`measure_row` measures for each `Provider` of a `Row`:

- error: the relative error (of norms) of each output and gradient against the row's formula in fp64;
- time: medians of forward (gradients not recorded) and of forward + backward. Providers alternate within one loop; each
  call is timed with CUDA events after the L2 cache is flushed;
- memory: the peak of one forward + backward above inputs, upstream gradients and the gradients it returns;
- host syncs: whether our forward + backward waits for the GPU (`torch.cuda.set_sync_debug_mode("error")`).

If a provider is not installed, fails or takes too long to compile, its entry has an "error".
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.measure import medians_within, synchronize

Function = Callable[..., Any]
Direction = Literal["forward", "forward_backward"]

OURS = "ligerzoo"
DIRECTIONS: tuple[Direction, ...] = ("forward", "forward_backward")
IGNORED = -100


@dataclass(frozen=True)
class Provider:
    """An implementation of a row's operation. `load` imports it and returns a function of the row's inputs."""

    load: Callable[[], Function]
    note: str = ""
    needs_gpu: bool = False
    overwrites: bool = False
    """Whether it writes into its inputs or upstream gradients. If so, it gets copies."""


@dataclass(frozen=True)
class Floor:
    """The fewest bytes or FLOPs that the two directions need."""

    forward: float
    forward_backward: float
    unit: Literal["bytes", "FLOPs"] = "bytes"


@dataclass(frozen=True)
class Machine:
    """The rates used for floors, and the rate of a GEMM measured in the same run."""

    bytes_per_second: float
    flops_per_second: float
    measured_flops_per_second: float

    def milliseconds(self, floor: Floor) -> dict[Direction, float]:
        rate = self.bytes_per_second if floor.unit == "bytes" else self.flops_per_second
        return {"forward": floor.forward / rate * 1e3, "forward_backward": floor.forward_backward / rate * 1e3}


@dataclass(frozen=True)
class Goal:
    """Upper bounds on our time and memory. Bounds relative to peers or the floor apply to `directions`."""

    of_peer: float | None = 1.0
    of_floor: float | None = None
    ms: float | None = None
    extra_mib: float | None = None
    of_row: tuple[str, float] | None = None
    """(name of an earlier row, largest ratio of our time to our time there)."""
    directions: tuple[Direction, ...] = DIRECTIONS


@dataclass(frozen=True)
class Row:
    """One operation at one shape. Inputs with `requires_grad` are differentiated."""

    op: str
    shape: tuple[int, ...]
    inputs: Callable[[], dict[str, Tensor]]
    formula: Function
    """The operation in plain torch, for any dtype. Its fp64 result is the truth."""
    providers: Mapping[str, Provider]
    floor: Floor
    goal: Goal = field(default_factory=Goal)
    variant: str = ""
    outputs: tuple[str, ...] = ("y",)
    shared: frozenset[str] = frozenset()
    """Names of inputs without a token dimension, such as weights. Other inputs have tokens or rows first."""
    tokens_at_once: int = 4096
    """The fp64 truth is computed for this many tokens at a time."""

    @property
    def name(self) -> str:
        return f"{self.op} {' x '.join(map(str, self.shape))}{self.variant and ', '}{self.variant}"


def as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


@dataclass(frozen=True)
class Truth:
    """Outputs and gradients in fp64, and the upstream gradients used (1 for a loss)."""

    outputs: list[Tensor]
    gradients: list[Tensor]
    upstream: list[Tensor]


def find_truth(row: Row, inputs: Mapping[str, Tensor]) -> Truth:
    """Computes the formula in fp64, chunk by chunk. Means over chunks are weighted by their number of valid tokens."""
    exact = {
        name: t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for name, t in inputs.items()
    }
    per_token = [name for name in inputs if name not in row.shared]
    tokens = len(inputs[per_token[0]])
    counts = inputs["target"] != IGNORED if "target" in inputs else torch.ones(tokens, dtype=torch.bool)
    outputs: list[tuple[Tensor, ...]] = []
    upstream: list[list[Tensor]] = []
    for start in range(0, tokens, row.tokens_at_once):
        chunk = slice(start, start + row.tokens_at_once)
        share = counts[chunk].sum() / counts.sum()
        results = as_tuple(row.formula(*(t[chunk] if name in per_token else t for name, t in exact.items())))
        # In bf16 first, for the providers get them in the dtypes of their outputs.
        upstream.append(
            [torch.ones_like(y) if y.dim() == 0 else torch.randn_like(y).bfloat16().double() for y in results]
        )
        weights = [share.to(y) if y.dim() == 0 else y.new_ones(()) for y in results]
        pairs = zip(upstream[-1], weights, strict=True)
        torch.autograd.backward(results, [dy * weight for dy, weight in pairs])
        outputs.append(tuple(y.detach() * weight for y, weight in zip(results, weights, strict=True)))

    def whole(parts: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(parts)).sum(0) if parts[0].dim() == 0 else torch.cat(list(parts))

    gradients = [t.grad for t in exact.values() if t.requires_grad]
    assert all(g is not None for g in gradients)
    return Truth(
        [whole(column) for column in zip(*outputs, strict=True)],
        [g for g in gradients if g is not None],
        [column[0] if column[0].dim() == 0 else torch.cat(column) for column in zip(*upstream, strict=True)],
    )


def _relative_error(actual: Tensor, truth: Tensor) -> float:
    return float(torch.linalg.vector_norm(actual.detach().double() - truth) / torch.linalg.vector_norm(truth))


class Step:
    """A provider's function and inputs: runs forward, and forward + backward."""

    def __init__(self, function: Function, inputs: Sequence[Tensor], upstream: Sequence[Tensor]) -> None:
        self.function, self.inputs, self.upstream = function, inputs, upstream
        self._constants = [t.detach() for t in inputs]
        self._differentiated = [t for t in inputs if t.requires_grad]

    def forward(self) -> Any:
        with torch.no_grad():
            return self.function(*self._constants)

    def forward_backward(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        outputs = as_tuple(self.function(*self.inputs))
        return outputs, torch.autograd.grad(outputs, self._differentiated, self.upstream)


def _extra_mib(step: Step) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _, gradients = step.forward_backward()
    given = {t.data_ptr() for t in (*step.inputs, *step.upstream)}  # a gradient may alias one of them
    new = {g.data_ptr(): g.nbytes for g in gradients if g.data_ptr() not in given}
    return (torch.cuda.max_memory_allocated() - before - sum(new.values())) / 2**20


def _waits_for_gpu(step: Step) -> bool:
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.forward_backward()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def give_up(*_: object) -> None:
        raise TimeoutError(f"not ready within {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _prepare(
    row: Row, provider: Provider, inputs: Mapping[str, Tensor], truth: Truth, device: str, patience: float
) -> tuple[dict[str, Any], Step]:
    """Loads, compiles and runs a provider in both directions. Returns its errors and memory, and the step to time."""
    function = provider.load()

    def without_aliases(tensors: Iterable[Tensor]) -> list[Tensor]:
        if not provider.overwrites:
            return list(tensors)
        return [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]

    with _time_limit(patience):
        outputs = as_tuple(Step(function, without_aliases(inputs.values()), []).forward())
        upstream = [dy.to(y.dtype) for dy, y in zip(truth.upstream, outputs, strict=True)]
        step = Step(function, without_aliases(inputs.values()), without_aliases(upstream))
        outputs, gradients = step.forward_backward()
        synchronize(device)
    names = [*row.outputs, *(f"d{name}" for name, t in inputs.items() if t.requires_grad)]
    pairs = zip(names, (*outputs, *gradients), (*truth.outputs, *truth.gradients), strict=True)
    entry: dict[str, Any] = {"errors": {name: _relative_error(actual, exact) for name, actual, exact in pairs}}
    del outputs, gradients, pairs
    if device == "cuda":
        entry["extra_mib"] = _extra_mib(step)
    if provider.note:
        entry["note"] = provider.note
    return entry, step


def reason(error: Exception) -> str:
    """Returns the error in one line."""
    if isinstance(error, ModuleNotFoundError):
        return f"not installed: {error.name}"
    return f"{type(error).__name__}: {error}".strip().split("\n", 1)[0]


def measure_row(row: Row, *, device: str, machine: Machine, seconds: float, patience: float = 45.0) -> dict[str, Any]:
    """Measures one row and returns its JSON.

    Args:
        seconds: approximate time spent on timing each direction.
        patience: seconds a provider may take to load, compile, tune and run for the first time.
    """
    torch.manual_seed(0)
    if device == "cuda":
        torch.compiler.reset()  # otherwise a function compiled for many shapes falls back to eager
        torch.cuda.empty_cache()
    with torch.device(device):
        inputs = row.inputs()
        truth = find_truth(row, inputs)
    entries: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    for name, provider in row.providers.items():
        if provider.needs_gpu and device != "cuda":
            entries[name] = {"error": "needs a GPU"}
            continue
        try:
            entries[name], steps[name] = _prepare(row, provider, inputs, truth, device, patience)
        except Exception as error:
            entries[name] = {"error": reason(error)}
    del truth
    for direction in DIRECTIONS:
        times = medians_within(seconds, {n: getattr(step, direction) for n, step in steps.items()}, device=device)
        for name, ms in times.items():
            entries[name][f"{direction}_ms"] = ms
    waits = _waits_for_gpu(steps[OURS]) if device == "cuda" and OURS in steps else None
    floor = machine.milliseconds(row.floor)
    return {
        "name": row.name,
        "op": row.op,
        "shape": row.shape,
        "variant": row.variant,
        "providers": entries,
        "floor": {"unit": row.floor.unit, **{f"{direction}_ms": ms for direction, ms in floor.items()}},
        "comparison": {direction: compare(entries, direction, floor[direction]) for direction in DIRECTIONS},
        "waits_for_gpu": waits,
    }


# Comparing and judging


def compare(entries: Mapping[str, Mapping[str, Any]], direction: Direction, floor: float) -> dict[str, Any]:
    """The fastest peer, our time over its time, and our time over the floor. None if a time is missing."""
    times = {name: entry[f"{direction}_ms"] for name, entry in entries.items() if f"{direction}_ms" in entry}
    ours = times.get(OURS)
    times = {name: time for name, time in times.items() if not name.startswith(OURS)}  # without our variants
    fastest = min(times, key=lambda name: times[name], default=None)
    return {
        "fastest peer": fastest,
        "ours / fastest peer": ours / times[fastest] if ours is not None and fastest is not None else None,
        "ours / floor": ours / floor if ours is not None else None,
    }


def verdicts(goal: Goal, result: Mapping[str, Any], before: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each goal of a row with the measured value and whether it is met. A goal without a value is not met."""
    found: list[dict[str, Any]] = []

    def judge(what: str, value: float | None, most: float) -> None:
        found.append({"goal": what, "value": value, "met": value is not None and value <= most})

    ours = result["providers"][OURS]
    for direction in goal.directions:
        comparison = result["comparison"][direction]
        if goal.of_peer is not None:
            what = f"{direction} <= {goal.of_peer:.2f} x the fastest peer"
            judge(what, comparison["ours / fastest peer"], goal.of_peer)
        if goal.of_floor is not None:
            judge(f"{direction} <= {goal.of_floor:.2f} x the floor", comparison["ours / floor"], goal.of_floor)
    both = ours.get("forward_backward_ms")
    if goal.ms is not None:
        judge(f"forward_backward <= {goal.ms} ms", both, goal.ms)
    if goal.extra_mib is not None:
        judge(f"extra memory <= {goal.extra_mib:.0f} MiB", ours.get("extra_mib"), goal.extra_mib)
    if goal.of_row is not None:
        other, most = goal.of_row
        reference = before.get(other, {}).get("providers", {}).get(OURS, {}).get("forward_backward_ms")
        share = both / reference if both is not None and reference is not None else None
        judge(f"forward_backward <= {most:.2f} x that of {other}", share, most)
    if result["waits_for_gpu"] is not None:
        judge("never waits for the GPU", float(result["waits_for_gpu"]), 0.0)
    return found
