"""A stand-in for captured CUDA graphs on a CPU: what is captured runs eagerly at each replay, on the same memory.

It overwrites what a graph may overwrite: the results of graphs of its pool that were captured later.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ligerzoo.generate import graphs
from ligerzoo.generate.graphs import CapturedCall, GraphPool


class EagerGraph:
    """A captured function. Its result keeps its memory, and each replay must run the same operations."""

    of_pools: ClassVar[weakref.WeakKeyDictionary[GraphPool, list[weakref.ref["EagerGraph"]]]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, call: CapturedCall[Any], function: Callable[[], Any]) -> None:
        self.call, self.function = call, function
        self.operations: list[tuple[str, list[torch.Size]]] = []
        self.pool = self.of_pools.setdefault(call.pool, [])
        self.pool.append(weakref.ref(self))

    def replay(self) -> None:
        later = self.pool[self.pool.index(weakref.ref(self)) + 1 :]
        for graph in (reference() for reference in later):
            for x in tree_leaves(graph.call._result) if graph is not None and graph.operations else ():
                x.fill_(torch.nan if x.is_floating_point() else 0)
        with Operations() as operations:
            result = self.function()
        if not self.operations:
            self.operations, self.call._result = operations.seen, result
        assert operations.seen == self.operations
        for target, source in zip(tree_leaves(self.call._result), tree_leaves(result), strict=True):
            target.copy_(source)


class Operations(TorchDispatchMode):
    """Records operations, and the shapes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[torch.Size]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = [leaf.shape for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.seen.append((str(func), shapes))
        return func(*args, **(kwargs or {}))


def capture(call: CapturedCall[Any], function: Callable[[Tensor], Any]) -> None:
    if call._graph is None:
        call._graph = cast(Any, EagerGraph(call, partial(function, call.x)))


def replace_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces captured graphs by the stand-in, without a change of `can_capture`."""
    monkeypatch.setattr(CapturedCall, "capture", capture)
    monkeypatch.setattr(graphs, "_memory_for_idle_caches", lambda device: 2**25)
