"""A stand-in for CUDA graphs on a CPU: it records operations with their memory, and repeats them without Python."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ligerzoo.layers import capture as layers_capture
from ligerzoo.train import captured_step


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class RecordedGraph(TorchDispatchMode):
    """The operations of a function. Capturing changes neither memory nor random numbers; a replay repeats them on the
    same memory."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, Any]] = []
        self._before: dict[int, tuple[Tensor, torch.UntypedStorage]] = {}
        try:
            with torch.random.fork_rng(), self:
                self.result = function()
        finally:
            for tensor, values in self._before.values():
                tensor.untyped_storage().copy_(values)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for tensor in tensors((args, kwargs)):
                storage = tensor.untyped_storage()
                self._before.setdefault(storage.data_ptr(), (tensor, storage.clone()))
        result = func(*args, **kwargs)
        self._operations.append((func, args, kwargs, result))
        return result

    def pool(self) -> str:
        return "pool"

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, kept in self._operations:
            inputs = {tensor.untyped_storage().data_ptr() for tensor in tensors((args, kwargs))}
            for target, source in zip(tensors(kept), tensors(func(*args, **kwargs)), strict=True):
                if target.untyped_storage().data_ptr() not in inputs:  # neither a view nor written in place
                    target.copy_(source)


def replace_graphs(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """Replaces CUDA graphs by the stand-in, on a CPU. Returns the list of all graphs to come."""
    captured: list[RecordedGraph] = []

    def capture(function: Callable[[], Any], pool: Any = None) -> tuple[RecordedGraph, Any]:
        captured.append(RecordedGraph(function))
        return captured[-1], captured[-1].result

    monkeypatch.setattr(captured_step, "capture_graph", capture)
    monkeypatch.setattr(layers_capture, "_device_obstacle", lambda parameters: None)
    return captured
