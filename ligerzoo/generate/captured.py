"""Decode steps that run as captured CUDA graphs: the host launches one graph per token instead of hundreds of kernels.

A graph serves one batch size and one capacity of the KV cache. It is captured when a batch decodes its third token,
stays with the model, and serves all later calls of the same shape. It reads the weights where they are, so training
between calls is seen; if a weight was replaced by another tensor, all graphs of the model are captured again.
"""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligerzoo.generate.sequences import Sequences
from ligerzoo.generate.step import DecodeStep
from ligerzoo.kernels.dispatch import DEBUG
from ligerzoo.layers.plain import is_plain

_MIN_CAPACITY = 256
_MAX_GRAPHS = 16
_PACKAGES = ("ligerzoo", "torch")  # of layers whose forward never depends on values
_MEMORY_SHARE = 1 / 8  # of the GPU, see `_memory_for_idle_caches`


class DecodeGraph:
    """A decode step of a model for one shape: newest tokens in, logits out. It runs eagerly once, then as a graph.

    Args:
        model: the model.
        rows: B.
        capacity: maximum number of tokens of the KV cache.
        is_padded: whether rows may have padding on the left.

    Attributes:
        cache: the KV cache, of fixed size.
        device: device of the weights.
    """

    def __init__(self, model: nn.Module, rows: int, capacity: int, is_padded: bool) -> None:
        self.key = rows, capacity, is_padded
        self.capacity = capacity
        self.cache = model.new_cache(capacity)  # type: ignore[operator]
        self.device = device = next(model.parameters()).device
        self._tokens = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self._padding_mask, self._padding = None, None
        if is_padded:
            self._padding_mask = torch.ones(rows, capacity, dtype=torch.bool, device=device)
            self._padding = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self._is_warm = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor | None = None

    def start(self, padding_mask: Tensor | None) -> None:
        """Empties the cache for prompts with this padding mask, (B, T) or None."""
        self.cache.reset()
        if padding_mask is not None and self._padding_mask is not None and self._padding is not None:
            self._padding_mask.copy_(F.pad(padding_mask, (0, self.capacity - padding_mask.shape[1]), value=True))
            self._padding.copy_((~padding_mask).sum(1, keepdim=True))

    def step(self, model: Callable[..., Any], tokens: Tensor) -> Tensor:
        """Runs the model on the newest tokens, (B, 1).

        Returns:
            (B, V) fp32 logits, valid until the next step.
        """
        self._tokens.copy_(tokens)
        if not self._is_warm:  # compiles kernels and creates the handles of libraries, which cannot be captured
            self._is_warm = True
            return self._forward(model)
        if self._graph is None:
            self._capture(model)
        else:
            self.cache.advance(1)
        assert self._graph is not None
        assert self._logits is not None
        self._graph.replay()
        return self._logits

    def _forward(self, model: Callable[..., Any]) -> Tensor:
        position_ids = None
        if self._padding is not None:
            position_ids = self.cache.positions(1, self.device) - self._padding
        output = model(
            self._tokens, self._padding_mask, position_ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        logits: Tensor = output.logits[:, -1].float()
        return logits

    def _capture(self, model: Callable[..., Any]) -> None:
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            self._logits = self._forward(model)
        self._graph = graph

    @property
    def pool(self) -> Any:
        """Memory pool of the captured graph, which other graphs of the step may share; None before the capture."""
        return None if self._graph is None else self._graph.pool()


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """A context whose kernels are captured in the graph and not run.

    Unlike `torch.cuda.graph`, it neither waits for the GPU nor returns cached memory to it. Garbage collection, which
    could free memory of another graph, waits until the end.
    """
    stream, collects_garbage = torch.cuda.Stream(), gc.isenabled()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    gc.disable()
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()
    finally:
        if collects_garbage:
            gc.enable()
    torch.cuda.current_stream().wait_stream(stream)


class DecodeGraphs:
    """The graphs of one model that no call is using, least recently used first."""

    def __init__(self) -> None:
        self._idle: OrderedDict[tuple[int, int, bool], DecodeGraph] = OrderedDict()
        self._weights: tuple[tuple[Any, ...], ...] = ()

    def take(self, model: nn.Module, rows: int, capacity: int, is_padded: bool) -> DecodeGraph:
        """Returns a graph for this shape, an idle one if there is any. `give_back` makes it idle again."""
        weights = tuple((weight.data_ptr(), weight.shape, weight.dtype) for weight in model.parameters())
        if weights != self._weights:
            self._idle.clear()
            self._weights = weights
        graph = self._idle.pop((rows, capacity, is_padded), None)
        return graph or DecodeGraph(model, rows, capacity, is_padded)

    def give_back(self, graph: DecodeGraph) -> None:
        """Keeps a graph for later calls, and drops the least recently used ones beyond the limits."""
        self._idle[graph.key] = graph
        limit = _memory_for_idle_caches(graph.device)
        while len(self._idle) > _MAX_GRAPHS or sum(graph.cache.nbytes for graph in self._idle.values()) > limit:
            self._idle.popitem(last=False)


def _memory_for_idle_caches(device: torch.device) -> float:
    """Bytes that the KV caches of graphs may take up while no call uses them."""
    return torch.cuda.get_device_properties(device).total_memory * _MEMORY_SHARE


_GRAPHS: weakref.WeakKeyDictionary[nn.Module, DecodeGraphs] = weakref.WeakKeyDictionary()


def release_decode_graphs(model: nn.Module) -> None:
    """Frees what `generate` keeps for later calls of a model: captured CUDA graphs and their KV caches."""
    _GRAPHS.pop(model, None)


class CapturedStep(DecodeStep):
    """A decode step whose choice of tokens is a second captured graph.

    This graph is small. It is captured for each call, since it depends on the options of sampling.
    """

    sequences: CapturedSequences
    _graph: torch.cuda.CUDAGraph | None = None
    _logits: Tensor | None = None
    _shown: Tensor

    def decode(self) -> Tensor:
        logits = self.sequences.decode()
        if logits is not self._logits:  # the first steps, and another graph of the model for more tokens
            self._logits, self._graph = logits, None
            return self._append(logits)
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            if self.sampler.generator is not None:
                self._graph.register_generator_state(self.sampler.generator)
            with capturing(self._graph, self.sequences.pool):
                self.sampled = self.sampler.choose(logits)
                self._shown = self.stopping.update(self.sampled.tokens[:, None])
        self._graph.replay()
        self.sequences.append(self.sampled.tokens[:, None])
        return self._shown


class CapturedSequences(Sequences):
    """`Sequences` that decode with captured graphs."""

    def __init__(self, model: Any, *arguments: Any) -> None:
        super().__init__(model, *arguments)
        self._module: nn.Module = model
        self._on_device = torch.cuda.device(self.device if self.device.type == "cuda" else -1)
        self._graphs = _GRAPHS.setdefault(model, DecodeGraphs())
        self._graph: DecodeGraph | None = None

    def __enter__(self) -> CapturedSequences:
        self._on_device.__enter__()  # type: ignore[no-untyped-call]  # graphs run on the current device
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None and self._graph is not None and self._given_cache is not None:
            self._cache.crop(self._end - 1)
            self._given_cache.extend(self._cache)
        self._give_back()
        super().__exit__(error)
        self._on_device.__exit__(error, *_)

    def prefill(self) -> Tensor:
        graph = self._take(max(_MIN_CAPACITY, self._end + min(self._limit - self._end, _MIN_CAPACITY)))
        mask = self._padding_mask
        if self._given_cache is None and self._copies == 1:
            graph.start(mask)
            self._cache = graph.cache
            logits = super().prefill()
        else:  # the graph's cache takes over the rows of another one
            logits = super().prefill()
            graph.start(mask)
            graph.cache.copy_from(self._cache)
            self._cache = graph.cache
        self._graph = graph
        return logits

    def decode(self) -> Tensor:
        if self._graph is None or not self._cache.is_valid_for(1):
            self._give_back()
            return super().decode()
        if self._end > self._graph.capacity:
            self._grow()
        self._reserve()
        return self._graph.step(self._model, self._newest)

    @property
    def pool(self) -> Any:
        """See `DecodeGraph.pool`."""
        return None if self._graph is None else self._graph.pool

    def _give_back(self) -> None:
        """Keeps the graph for later calls."""
        if self._graph is not None:
            self._graphs.give_back(self._graph)
        self._graph = None

    def _take(self, tokens: int) -> DecodeGraph:
        capacity = 1 << (tokens - 1).bit_length()
        return self._graphs.take(self._module, self.rows, capacity, self._padding_mask is not None)

    def _grow(self) -> None:
        smaller, larger = self._graph, self._take(self._end)
        assert smaller is not None
        mask = None if self._padding_mask is None else self._padding_mask[:, : self._end]
        larger.start(mask)
        larger.cache.copy_from(smaller.cache)
        self._graph, self._cache = larger, larger.cache
        self._graphs.give_back(smaller)


def can_capture(model: nn.Module) -> bool:
    """Whether a decode step of the model can run as a captured graph.

    It can if the model and its weights are on one GPU, all its layers are those of ligerzoo and torch, without hooks,
    wrappers and tensor subclasses, it has text inputs only, and neither autocast nor a compiler is active.
    """
    device = getattr(model, "device", None)
    return (
        device is not None
        and device.type == "cuda"
        and hasattr(model, "new_cache")
        and not getattr(model, "modalities", ())
        and not DEBUG  # its checks are host syncs
        and not torch.is_autocast_enabled("cuda")
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch.compiler.is_compiling()
        and all(map(_is_known, model.modules()))
        and all(type(weight) is nn.Parameter and weight.device == device for weight in model.parameters())
        and model.new_cache(1).is_static  # type: ignore[operator]
    )


def _is_known(module: nn.Module) -> bool:
    is_random = module.training and getattr(module, "jitter_noise", None)
    return is_plain(module, type(module)) and type(module).__module__.split(".")[0] in _PACKAGES and not is_random
