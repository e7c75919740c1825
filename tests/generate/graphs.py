"""A stand-in for captured CUDA graphs on a CPU: what is captured runs eagerly at each replay, on the same memory."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ligerzoo.generate import graphs
from ligerzoo.generate.graphs import DecodeBatch, DecodeGraph


class EagerGraph:
    """A captured function. Its result keeps its memory, and each replay must run the same operations."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function, self.operations = function, Operations()
        with self.operations:
            self.result = function()
        self.is_new = True  # what capturing has run counts as the first replay

    def replay(self) -> None:
        if not self.is_new:
            with Operations() as operations:
                result = self.function()
            assert operations.seen == self.operations.seen
            for target, source in zip(tree_leaves(self.result), tree_leaves(result), strict=True):
                target.copy_(source)
        self.is_new = False


class Operations(TorchDispatchMode):
    """Records operations, and the shapes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[torch.Size]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = [leaf.shape for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.seen.append((str(func), shapes))
        return func(*args, **(kwargs or {}))


def capture(function: Callable[[], Any], pool: Any) -> tuple[EagerGraph, Any]:
    assert pool is not None
    graph = EagerGraph(function)
    return graph, graph.result


def step(graph: DecodeGraph, model: Any, tokens: Tensor) -> Tensor:
    """Runs a decode step eagerly. From the second on, its logits have the same memory, as those of a graph."""
    count, logits = tokens.shape[1], DecodeBatch.step(graph, model, tokens)
    if count not in graph._inputs:
        graph._inputs[count] = tokens
        return logits
    if count not in graph._graphs:
        graph._graphs[count] = cast(Any, None), logits
    kept = graph._graphs[count][1]
    kept.copy_(logits)
    return kept


def replace_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces captured graphs by the stand-in, without a change of `can_capture`."""
    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "_memory_for_idle_caches", lambda device: 2**20)
    monkeypatch.setattr(DecodeGraph, "step", step)
    monkeypatch.setattr(DecodeGraph, "pool", property(lambda graph: (0, id(graph)) if graph._graphs else None))
