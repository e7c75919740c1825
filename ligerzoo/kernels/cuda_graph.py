"""Capturing CUDA graphs: the host launches one graph instead of the kernels that were captured in it.

Kernels of a stream run one after the other, and a small one leaves multiprocessors idle. In a graph, those that
`side_by_side` captures run at the same time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_BRANCHES = 4
"""Branches of a graph, at most."""


def capture(function: Callable[[], T], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """Captures the kernels of a function in a graph, without running them.

    Unlike `torch.cuda.graph`, it neither waits for the GPU nor returns cached memory to it. Garbage collection, which
    could free memory of another graph, waits until the end.

    Args:
        function: launches kernels. What it raises is raised.
        pool: memory pool of another graph that runs before; None for a new one.

    Returns:
        The graph, and what the function returns: tensors that each replay overwrites.
    """
    graph = torch.cuda.CUDAGraph()
    stream, collects_garbage = _capture_stream(torch.cuda.current_device()), gc.isenabled()
    stream.wait_stream(torch.cuda.current_stream())
    gc.disable()
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = function()
            except BaseException:
                with suppress(RuntimeError):  # that the capture is invalid, which hides why
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        if collects_garbage:
            gc.enable()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, result


def side_by_side(functions: Sequence[Callable[[], T]]) -> list[T]:
    """Calls functions none of which uses a result of another, and returns their results.

    In a capture, their kernels become branches of the graph, which a GPU runs at the same time.

    Args:
        functions: each holds the tensors that it reads. Memory that one frees may be used by another that follows in
            its branch, while those of other branches still run.
    """
    if torch.compiler.is_compiling() or not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        return [function() for function in functions]
    main = torch.cuda.current_stream()
    branches = _branch_streams(main.device_index)[: max(0, len(functions) - 1)]
    for branch in branches:
        branch.wait_stream(main)
    results = []
    try:
        for index, function in enumerate(functions):
            with torch.cuda.stream((main, *branches)[index % (1 + len(branches))]):
                results.append(function())
    except BaseException:  # a capture cannot end before its branches are joined
        with suppress(RuntimeError):  # that the capture is invalid, which hides why
            _join(main, branches)
        raise
    _join(main, branches)
    return results


def _join(stream: torch.cuda.Stream, branches: Sequence[torch.cuda.Stream]) -> None:
    for branch in branches:
        stream.wait_stream(branch)


@cache
def _branch_streams(device: int) -> tuple[torch.cuda.Stream, ...]:
    return tuple(torch.cuda.Stream(device) for _ in range(_BRANCHES - 1))


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """The stream of all captures on a device: cuBLAS keeps a workspace for each stream."""
    return torch.cuda.Stream(device)
