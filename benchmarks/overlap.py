"""Analyses a profile of a GPU: how communication and computation overlap, and what each costs the other.

Times are in microseconds. A kernel belongs to the first kind whose pattern its name contains.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

KINDS = {
    "all-gather": r"ncclDevKernel_AllGather|ncclSymk\w*AllGather",
    "reduce-scatter": r"ncclDevKernel_ReduceScatter|ncclSymk\w*ReduceScatter",
    "other NCCL": r"nccl",
    "attention": r"fmha|flash|sdpa|attention",
    "GEMM": r"gemm|nvjet|cutlass|xmma|cublas",
    "copies": r"split_with_sizes|chunk_cat|CatArray|Memcpy|Memset|copy",
    "optimizer": r"adam|multi_tensor_apply",
    "other": r"",
}
COMMUNICATION = ("all-gather", "reduce-scatter", "other NCCL")

Spans = list[tuple[float, float]]
"""Disjoint intervals in ascending order."""


class Kernel(NamedTuple):
    """A kernel or copy that ran on the GPU."""

    name: str
    start: float
    end: float

    @property
    def kind(self) -> str:
        """What it does: a key of `KINDS`."""
        return next(kind for kind, pattern in KINDS.items() if re.search(pattern, self.name, re.IGNORECASE))


def kernels_of(profiler: torch.profiler.profile) -> list[Kernel]:
    """Returns what ran on the GPU during a profile."""
    events: Iterable[Any] = profiler.events() or ()
    on_gpu = (event for event in events if event.device_type == torch.autograd.DeviceType.CUDA)
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in on_gpu
        if event.time_range.end > event.time_range.start and not event.is_user_annotation
    ]


def merged(kernels: Iterable[Kernel]) -> Spans:
    """Returns when at least one of the kernels runs."""
    spans: Spans = []
    for start, end in sorted((kernel.start, kernel.end) for kernel in kernels):
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    return spans


def length(spans: Spans) -> float:
    """Returns the total length of disjoint intervals."""
    return sum(end - start for start, end in spans)


def overlap(spans: Spans, others: Spans) -> float:
    """Returns how long two lists of disjoint intervals overlap."""
    return length(spans) + length(others) - length(_union(spans, others))


def _union(spans: Spans, others: Spans) -> Spans:
    return merged(Kernel("", start, end) for start, end in (*spans, *others))


def summary(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """Returns milliseconds of a step.

    Returns:
        "by kind": milliseconds and number of kernels of each kind; kernels that run at once count each.
        "step": from the first start to the last end.
        "exposed communication": only communication runs.
        "idle": nothing runs.
        "longest": milliseconds and number of the kernels that take longest in all, by name.
        "GEMM during communication": part of the time of GEMMs. Compare the time of all GEMMs with that of "one-gpu" for
            what communication costs them.
    """
    if not kernels:
        return {}
    by_kind: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        by_kind[kernel.kind].append(kernel)
    communication = merged(kernel for kind in COMMUNICATION for kernel in by_kind[kind])
    computation = merged(kernel for kind, group in by_kind.items() if kind not in COMMUNICATION for kernel in group)
    everything = merged(kernels)
    step = everything[-1][1] - everything[0][0]
    return {
        "by kind": {
            kind: {"ms": sum(kernel.end - kernel.start for kernel in by_kind[kind]) / 1e3, "count": len(by_kind[kind])}
            for kind in KINDS
            if by_kind[kind]
        },
        "step": step / 1e3,
        "exposed communication": (length(everything) - length(computation)) / 1e3,
        "idle": (step - length(everything)) / 1e3,
        "GEMM during communication": overlap(merged(by_kind["GEMM"]), communication) / 1e3,
        "longest": _longest(kernels),
    }


def _longest(kernels: Iterable[Kernel], count: int = 40) -> dict[str, tuple[float, int]]:
    times: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        times[kernel.name[:150]].append((kernel.end - kernel.start) / 1e3)
    found = {name: (sum(group), len(group)) for name, group in times.items()}
    return dict(sorted(found.items(), key=lambda entry: -entry[1][0])[:count])
