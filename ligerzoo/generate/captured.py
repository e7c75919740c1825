"""Decode steps that run as captured CUDA graphs: the host launches one graph per token instead of hundreds of kernels.

A graph serves one batch size, and one capacity and set of options of the KV cache. It is captured when a batch decodes
its third token, stays with the model, and serves all later calls of the same shape. It reads the weights where they
are, so training between calls is seen; if a weight was replaced by another tensor, all graphs of the model are captured
again.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from ligerzoo.generate.cache_options import DEFAULT_CACHE, CacheOptions
from ligerzoo.generate.decode_batch import DecodeBatch, has_static_decoding
from ligerzoo.generate.step import DecodeStep
from ligerzoo.kernels.cuda_graph import capture
from ligerzoo.kernels.dispatch import DEBUG, uses_triton
from ligerzoo.kernels.sampling import SampledTokens
from ligerzoo.layers import Experts, Linear, LMHead
from ligerzoo.layers.lora import LoRALinear
from ligerzoo.layers.lora_head import LoRAHead
from ligerzoo.layers.plain import is_plain_tensor, is_unmodified
from ligerzoo.layers.quantized import is_quantized, stored_tensors

if TYPE_CHECKING:
    from ligerzoo.generate.slot_sequences import SlotSequences

_MAX_GRAPHS = 16
_PACKAGES = ("ligerzoo", "torch")  # of layers whose forward never depends on values
_MEMORY_SHARE = 1 / 8  # of the GPU, see `_memory_for_idle_caches`

T = TypeVar("T")


class DecodeGraph(DecodeBatch):
    """A `DecodeBatch` whose step runs eagerly once, then as a captured graph, for each number of tokens."""

    def __init__(self, model: nn.Module, rows: int, capacity: int, options: CacheOptions = DEFAULT_CACHE) -> None:
        super().__init__(model, rows, capacity, options)
        self._inputs: dict[int, Tensor] = {}  # by T, what a graph reads
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # with the logits

    def step(self, model: Callable[..., Any], tokens: Tensor) -> Tensor:
        """See `DecodeBatch.step`."""
        count = tokens.shape[1]
        if count not in self._inputs:  # compiles kernels and creates the handles of libraries, which cannot be captured
            self._inputs[count] = tokens.clone()
            return super().step(model, tokens)
        self._inputs[count].copy_(tokens)
        if count not in self._graphs:
            self._graphs[count] = capture(partial(super().step, model, self._inputs[count]), self.pool)
        else:
            self.cache.advance(count)
        graph, logits = self._graphs[count]
        graph.replay()
        return logits

    @property
    def pool(self) -> Any:
        """Memory pool of the captured graphs, which other graphs of the step may share; None before the first."""
        return next((graph.pool() for graph, _ in self._graphs.values()), None)


class DecodeGraphs:
    """The graphs of one model that no call is using, least recently used first."""

    def __init__(self) -> None:
        self._idle: OrderedDict[tuple[int, int, CacheOptions], DecodeGraph] = OrderedDict()
        self._weights: tuple[tuple[Any, ...], ...] = ()

    def take(self, model: nn.Module, rows: int, capacity: int, options: CacheOptions) -> DecodeGraph:
        """Returns a graph with an empty cache, an idle one if there is any. `give_back` makes it idle again."""
        tensors = (tensor for weight in model.parameters() for tensor in stored_tensors(weight))
        weights = tuple((tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in tensors)
        if weights != self._weights:
            self._idle.clear()
            self._weights = weights
        graph = self._idle.pop((rows, capacity, options), None) or DecodeGraph(model, rows, capacity, options)
        graph.cache.reset()
        return graph

    def give_back(self, graph: DecodeGraph) -> None:
        """Keeps a graph for later calls, and drops the least recently used ones beyond the limits."""
        self._idle[graph.rows, graph.capacity, graph.options] = graph
        limit = _memory_for_idle_caches(graph.device)
        while len(self._idle) > _MAX_GRAPHS or self.nbytes > limit:
            self._idle.popitem(last=False)

    def keep_idle(self, tokens: int) -> None:
        """Drops the least recently used graphs until the caches of all have memory for at most `tokens` tokens."""
        while sum(graph.cache_tokens for graph in self._idle.values()) > tokens:
            self._idle.popitem(last=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the KV caches."""
        return sum(graph.cache.nbytes for graph in self._idle.values())


def _memory_for_idle_caches(device: torch.device) -> float:
    """Bytes that the KV caches of graphs may take up while no call uses them."""
    return torch.cuda.get_device_properties(device).total_memory * _MEMORY_SHARE


_GRAPHS: weakref.WeakKeyDictionary[nn.Module, DecodeGraphs] = weakref.WeakKeyDictionary()


def decode_graphs(model: nn.Module) -> DecodeGraphs:
    """Returns the idle graphs of a model."""
    return _GRAPHS.setdefault(model, DecodeGraphs())


def release_decode_graphs(model: nn.Module) -> None:
    """Frees what `generate` keeps for later calls of a model: captured CUDA graphs and their KV caches."""
    _GRAPHS.pop(model, None)


class CapturedCall(Generic[T]):
    """Calls of a function of logits, which run as a captured graph from the second call with the same key on.

    The graph is small. Each `CapturedCall` captures it again, since it depends on the options of sampling.
    """

    _graph: torch.cuda.CUDAGraph | None = None
    _logits: Tensor | None = None
    _key: tuple[Any, ...] | None = None
    _result: T

    def __call__(self, function: Callable[[Tensor], T], logits: Tensor, key: tuple[Any, ...] | None, pool: Any) -> T:
        """Returns what the function returns for the logits, valid until the next call.

        Args:
            function: launches kernels only. Calls with equal keys launch the same ones on the same memory.
            logits: its argument.
            key: see `Sampler.graph_key`. None runs it eagerly.
            pool: memory pool of the graph that computes the logits. None runs it eagerly.
        """
        # The first steps, another graph of the model for more tokens, or a sampler that has grown
        if key is None or pool is None or logits is not self._logits or (*key, pool) != self._key:
            self._logits, self._graph = logits, None
            self._key = None if key is None else (*key, pool)
            return function(logits)
        if self._graph is None:
            self._graph, self._result = capture(partial(function, logits), pool)
        self._graph.replay()
        return self._result


class CapturedStep(DecodeStep):
    """A decode step whose choice of tokens is a second captured graph."""

    sequences: SlotSequences

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._call = CapturedCall[tuple[SampledTokens, Tensor]]()

    def _choose(self, logits: Tensor) -> tuple[SampledTokens, Tensor]:
        return self._call(super()._choose, logits, self.sampler.graph_key, self.sequences.pool)


def can_capture(model: nn.Module) -> bool:
    """Whether a decode step of the model can run as a captured graph.

    It can if the model and its weights are on one GPU, all its layers are those of ligerzoo and torch, without hooks,
    wrappers and tensor subclasses except linear layers with weights that torchao has quantized, its experts run in
    Triton, it has text inputs only, see `has_static_decoding`, and neither autocast nor a compiler is active.
    """
    device = getattr(model, "device", None)
    return (
        device is not None
        and device.type == "cuda"
        and not getattr(model, "modalities", ())
        and not DEBUG  # its checks are host syncs
        and not torch.is_autocast_enabled("cuda")
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch.compiler.is_compiling()
        and all(map(_is_known, model.modules()))
        and all(weight.device == device for weight in model.parameters())
        and has_static_decoding(model)
    )


def _is_known(module: nn.Module) -> bool:
    if isinstance(module, Experts) and not uses_triton(module.gate_up_proj, backend=module.backend):
        return False  # plain torch needs a host sync to group the tokens by expert
    is_random = (module.training and getattr(module, "jitter_noise", None)) or getattr(module, "lora_dropout", 0.0)
    is_disabled = not getattr(module, "lora_enabled", True)  # for a while only, see `adapters_disabled`
    weights: Iterable[Tensor | None] = module._parameters.values()
    if type(module) in (nn.Linear, Linear, LMHead, LoRALinear, LoRAHead):
        weights = [weight for weight in weights if not is_quantized(weight)]
    return (
        is_unmodified(module, type(module))
        and is_plain_tensor(*weights)
        and type(module).__module__.split(".")[0] in _PACKAGES
        and not (is_random or is_disabled)
    )
