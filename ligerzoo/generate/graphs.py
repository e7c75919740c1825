"""Steps over a KV cache of fixed size, which run as captured CUDA graphs: prefills of prompts, and decode steps.

The host launches one graph instead of hundreds of kernels. A graph serves one number of rows and tokens over one cache.
The first step of a shape runs eagerly and is captured then. Graphs stay with the model, and serve later calls of
`generate` and of schedulers from their first token on. They read the weights where they are, so training between calls
is seen; if a weight was replaced by another tensor, all graphs of the model are captured again.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ligerzoo.generate.options import DEFAULT_CACHE, CacheOptions
from ligerzoo.kernels.cuda_graph import capture
from ligerzoo.layers import RotaryEmbedding
from ligerzoo.layers.plain import all_modules, is_plain_tensor
from ligerzoo.layers.quantized import stored_tensors

T = TypeVar("T")

Forward = Callable[..., Any]
"""A model, or what runs instead of its `__call__`."""


class GraphPool:
    """Memory of graphs that run one after the other, which they share.

    A graph that runs may overwrite the results of graphs that were captured later: these must have been read by then.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def id(self) -> object:
        """What torch calls the pool."""
        self._first, _ = capture(partial(torch.zeros, 1, device=self._device))  # without a graph, torch would free it
        return self._first.pool()


class CapturedCall(Generic[T]):
    """Calls of a function that launches kernels only: the same ones on the same memory. Once captured, a graph runs.

    Args:
        x: the tensor that the function reads. Each call copies its argument to it.
        pool: memory of the graph.
    """

    _graph: torch.cuda.CUDAGraph | None = None
    _result: T

    def __init__(self, x: Tensor, pool: GraphPool) -> None:
        self.x, self.pool = x, pool

    def __call__(self, function: Callable[[Tensor], T], x: Tensor) -> T:
        """Returns what the function returns for x, valid until the next call."""
        if x is not self.x:
            self.x.copy_(x)
        if self._graph is None:
            return function(self.x)
        self._graph.replay()
        return self._result

    def capture(self, function: Callable[[Tensor], T]) -> None:
        """Captures the function for all later calls, unless that was done.

        An earlier call has compiled its kernels and created the handles of libraries, which cannot be captured. Without
        memory for the graph, the next calls run the function, too.
        """
        if self._graph is None:
            try:
                self._graph, self._result = capture(partial(function, self.x), self.pool.id)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()  # a pool cannot use what the allocator keeps for others


class BatchSize(NamedTuple):
    """What says whether a batch can serve another call.

    Attributes:
        rows: P.
        capacity: maximum number of tokens in each row.
        options: of the KV cache.
        prefills: whether prompts are prefilled in it and copied; else it decodes.
    """

    rows: int
    capacity: int
    options: CacheOptions = DEFAULT_CACHE
    prefills: bool = False


class StaticBatch:
    """Rows of a KV cache of fixed size, each with its own positions, and the steps of a model over them.

    A step is a forward of n rows and T tokens without padding masks: `decode` appends T tokens to all rows, and
    `prefill` starts the first n rows with prompts.

    Args:
        model: the model.
        size: rows and options of the KV cache.
        pool: memory of captured steps; None for eager ones.

    Attributes:
        size, pool: as given.
        rows, capacity: those of the size.
        cache: the KV cache.
        device: device of the weights.
        nbytes: bytes of the cache when the batch became idle; adding them up costs the host time.
    """

    nbytes = 0

    def __init__(self, model: nn.Module, size: BatchSize, pool: GraphPool | None = None) -> None:
        self.size, self.pool = size, pool
        self.rows, self.capacity = size.rows, size.capacity
        self.cache = size.options.new_cache(model, size.capacity)
        self.device: torch.device = next(model.parameters()).device
        self._calls: dict[tuple[object, ...], CapturedCall[Tensor]] = {}

    @property
    def cache_tokens(self) -> int:
        """Number of tokens that the cache has memory for."""
        return self.rows * self.capacity

    def decode(self, model: Forward, tokens: Tensor) -> Tensor:
        """Appends the newest tokens, (P, T) int64.

        Returns:
            (P * T, V) fp32 logits after each token, row by row, valid until the next step.
        """
        length = self.cache.length
        logits = self._step(self._decode, model, tokens)
        self.cache.set_length(length + tokens.shape[1])
        return logits

    def prefill(self, model: Forward, prompts: Tensor) -> Tensor:
        """Writes n prompts to the first rows of the cache, from position 0 on.

        Args:
            model: the model.
            prompts: (n, T + 1) int64, token ids with padding on the right, then the length of each prompt.

        Returns:
            (n, V) fp32 logits of the next tokens, valid until the next step.
        """
        return self._step(self._prefill, model, prompts)

    def _step(self, function: Callable[[Forward, Tensor], Tensor], model: Forward, x: Tensor) -> Tensor:
        step = partial(function, model)
        if self.pool is None:
            return step(x)
        key = (function.__name__, *x.shape)
        if key not in self._calls:
            self._calls[key] = CapturedCall(torch.empty_like(x), self.pool)
        logits = self._calls[key](step, x)
        self._calls[key].capture(step)
        return logits

    def _decode(self, model: Forward, tokens: Tensor) -> Tensor:
        length, keep = self.cache.length, {"use_cache": True, "logits_to_keep": tokens.shape[1]}
        try:
            logits: Tensor = model(tokens, None, None, past_key_values=self.cache, **keep).logits.flatten(0, 1).float()
        finally:
            self.cache.set_length(length)  # which may run again, for a graph
        return logits

    def _prefill(self, model: Forward, prompts: Tensor) -> Tensor:
        ids, lengths = prompts[:, :-1], prompts[:, -1]
        cache = self.cache.prefill_rows(torch.arange(len(prompts), device=self.device), self.rows, lengths)
        last = lengths[:, None] - 1
        output = model(ids, None, None, past_key_values=cache, use_cache=True, logits_to_keep=last)
        logits: Tensor = output.logits[:, -1].float()
        return logits


_MAX_BATCHES = 24
_MEMORY_SHARE = 1 / 8  # of the GPU, see `_memory_for_idle_caches`


class ModelGraphs:
    """Batches of a model with captured steps that no call is using, least recently used first.

    All prefills share memory, since their logits are copied at once. A batch that decodes has its own: prefills run
    before its logits are read.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._device: torch.device = next(model.parameters()).device
        self._idle: OrderedDict[BatchSize, StaticBatch] = OrderedDict()
        self._weights = _addresses(model)
        self._prefill_pool = GraphPool(self._device)

    def reads(self, model: nn.Module) -> bool:
        """Whether the graphs read the weights of the model, none of which was replaced by another tensor."""
        return self._weights == _addresses(model)

    def take(self, model: nn.Module, size: BatchSize) -> StaticBatch:
        """Returns a batch with an empty cache, an idle one if there is any. `give_back` makes it idle again."""
        batch = self._idle.pop(size, None)
        if batch is None:
            return StaticBatch(model, size, self._prefill_pool if size.prefills else GraphPool(self._device))
        batch.cache.reset()
        return batch

    def give_back(self, batch: StaticBatch) -> None:
        """Keeps a batch for later calls, one of each size, and drops the least recently used ones beyond the limits."""
        self._idle[batch.size] = batch
        self._idle.move_to_end(batch.size)
        batch.nbytes = batch.cache.nbytes
        limit = _memory_for_idle_caches(self._device)
        while len(self._idle) > _MAX_BATCHES or self.nbytes > limit:
            self._idle.popitem(last=False)

    def keep_idle(self, tokens: float) -> None:
        """Drops the least recently used batches until the caches of all have memory for at most `tokens` tokens."""
        while sum(batch.cache_tokens for batch in self._idle.values()) > tokens:
            self._idle.popitem(last=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the KV caches."""
        return sum(batch.nbytes for batch in self._idle.values())


def _addresses(model: nn.Module) -> list[tuple[object, ...]]:
    """Returns where the weights and buffers of a model are."""
    parts = (part for module in all_modules(model) for part in (module._parameters, module._buffers))
    weights = (weight for part in parts for weight in part.values() if weight is not None)
    tensors = (tensor for x in weights for tensor in ([x] if is_plain_tensor(x) else stored_tensors(x)))
    return [(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in tensors]


def _memory_for_idle_caches(device: torch.device) -> float:
    """Bytes that the KV caches of graphs may take up while no call uses them."""
    return torch.cuda.get_device_properties(device).total_memory * _MEMORY_SHARE


_GRAPHS: weakref.WeakKeyDictionary[nn.Module, ModelGraphs] = weakref.WeakKeyDictionary()


def model_graphs(model: nn.Module) -> ModelGraphs:
    """Returns the graphs of a model that read its weights."""
    graphs = _GRAPHS.get(model)
    if graphs is None or not graphs.reads(model):
        graphs = _GRAPHS[model] = ModelGraphs(model)
    return graphs


def release_decode_graphs(model: nn.Module) -> None:
    """Frees what `generate` keeps for later calls of a model: captured CUDA graphs and their KV caches."""
    _GRAPHS.pop(model, None)


def independent_length(model: nn.Module) -> int | None:
    """Returns the length of a sequence up to which no token depends on later ones; None for no limit.

    Beyond it, the rotary frequencies depend on the longest row (rope types dynamic and longrope).
    """
    lengths = [module.max_independent_length for module in all_modules(model) if isinstance(module, RotaryEmbedding)]
    lengths.append(model.new_cache().max_valid_length)  # type: ignore[operator]
    return min((length for length in lengths if length is not None), default=None)
