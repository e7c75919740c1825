"""Decode steps of a fixed number of rows over a KV cache of fixed size, which run as captured CUDA graphs.

The host launches one graph per token instead of hundreds of kernels. A graph serves one batch size, and one capacity
and set of options of the KV cache. It is captured when a batch decodes its third token, stays with the model, and
serves all later calls of the same shape. It reads the weights where they are, so training between calls is seen; if a
weight was replaced by another tensor, all graphs of the model are captured again.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from ligerzoo.generate.options import DEFAULT_CACHE, CacheOptions
from ligerzoo.generate.sampling import Sampler
from ligerzoo.kernels.cuda_graph import capture
from ligerzoo.kernels.dispatch import DEBUG
from ligerzoo.layers import Attention, Linear, LMHead, RotaryEmbedding
from ligerzoo.layers.capture import capture_obstacle, never_reads_values
from ligerzoo.layers.lora import LoRAHead, LoRALinear
from ligerzoo.layers.plain import is_plain_tensor
from ligerzoo.layers.quantized import is_quantized, stored_tensors


class DecodeBatch:
    """A KV cache of fixed size, and the decode step over it: newest tokens in, logits out. It runs eagerly.

    Each row has its own positions, so there is neither padding nor a padding mask.

    Args:
        model: the model.
        rows: P.
        capacity: maximum number of tokens in each row.
        options: of the KV cache.

    Attributes:
        rows, capacity, options: as given.
        cache: the KV cache.
        device: device of the weights.
    """

    def __init__(self, model: nn.Module, rows: int, capacity: int, options: CacheOptions = DEFAULT_CACHE) -> None:
        self.rows, self.capacity, self.options = rows, capacity, options
        self.cache = options.new_cache(model, capacity)
        self.device: torch.device = next(model.parameters()).device

    @property
    def cache_tokens(self) -> int:
        """Number of tokens that the cache has memory for."""
        return self.rows * self.capacity

    def step(self, model: Callable[..., Any], tokens: Tensor) -> Tensor:
        """Runs the model on the newest tokens, (P, T).

        Returns:
            (P * T, V) fp32 logits after each token, row by row, valid until the next step.
        """
        kept = tokens.shape[1]
        output = model(tokens, None, None, past_key_values=self.cache, use_cache=True, logits_to_keep=kept)
        logits: Tensor = output.logits.flatten(0, 1).float()
        return logits


def has_static_decoding(model: nn.Module) -> bool:
    """Whether a model can decode in a `DecodeBatch`: its KV caches can have a fixed size, and attention is causal."""
    attentions = (module for module in decoder_of(model).modules() if isinstance(module, Attention))
    is_causal = all(attention.is_causal for attention in attentions)
    return is_causal and hasattr(model, "new_cache") and model.new_cache(1).is_static  # type: ignore[operator]


def decoder_of(model: nn.Module) -> nn.Module:
    """Returns the part of a model whose layers have KV caches: without a vision tower, if it has one."""
    return cast(nn.Module, getattr(model, "model", model))


def independent_length(model: nn.Module) -> int | None:
    """Returns the length of a sequence up to which no token depends on later ones; None for no limit.

    Beyond it, the rotary frequencies depend on the longest row (rope types dynamic and longrope).
    """
    lengths = [module.max_independent_length for module in model.modules() if isinstance(module, RotaryEmbedding)]
    lengths.append(model.new_cache().max_valid_length)  # type: ignore[operator]
    return min((length for length in lengths if length is not None), default=None)


_MAX_GRAPHS = 16
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
    def pool(self) -> object:
        """Memory pool of the captured graphs, which other graphs of the step may share; None before the first."""
        return next((graph.pool() for graph, _ in self._graphs.values()), None)


class DecodeGraphs:
    """The graphs of one model that no call is using, least recently used first."""

    def __init__(self) -> None:
        self._idle: OrderedDict[tuple[int, int, CacheOptions], DecodeGraph] = OrderedDict()
        self._weights: tuple[tuple[object, ...], ...] = ()

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
    """Calls of a function of logits, which run as a captured graph from the second call on the same memory on.

    The graph is small. Each `CapturedCall` captures it again, since it depends on the options of sampling.

    Args:
        sampler: what the function chooses tokens with.
    """

    _graph: torch.cuda.CUDAGraph | None = None
    _logits: Tensor | None = None
    _key: tuple[object, ...] | None = None
    _result: T

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __call__(self, function: Callable[[Tensor], T], logits: Tensor, pool: object) -> T:
        """Returns what the function returns for the logits, valid until the next call.

        Args:
            function: launches kernels only; the same ones on the same memory where `Sampler.graph_key` is the same.
            logits: its argument.
            pool: memory pool of the graph that computes the logits. None runs the function eagerly.
        """
        if pool is None or (sampler_key := self._sampler.graph_key) is None:
            self._key = None
            return function(logits)
        # The first steps, another graph of the model for more tokens, or a sampler that has grown
        if logits is not self._logits or (*sampler_key, pool) != self._key:
            self._logits, self._graph, self._key = logits, None, (*sampler_key, pool)
            return function(logits)
        if self._graph is None:
            self._graph, self._result = capture(partial(function, logits), pool)
        self._graph.replay()
        return self._result


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
    is_random = (module.training and getattr(module, "jitter_noise", None)) or getattr(module, "lora_dropout", 0.0)
    is_disabled = not getattr(module, "lora_enabled", True)  # for a while only, see `adapters_disabled`
    weights: Iterable[Tensor | None] = module._parameters.values()
    if type(module) in (nn.Linear, Linear, LMHead, LoRALinear, LoRAHead):
        weights = [weight for weight in weights if not is_quantized(weight)]
    return (
        capture_obstacle(module) is None
        and is_plain_tensor(*weights)
        and never_reads_values(module)
        and not (is_random or is_disabled)
    )
