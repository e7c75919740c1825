"""Greedy decoding in the style of gpt-fast: one decode step over a static KV cache, compiled by torch.compile.

A yardstick for `generate`: the same layers and kernels, with inductor's fusion and CUDA graphs instead of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ligerzoo.layers import KVCache
from ligerzoo.models import CausalLM


class CompiledDecoding:
    """Generates with a decode step that is compiled for each batch size and capacity of the cache.

    CUDA graphs need constant shapes and inputs at constant addresses. So each step starts with the same counters on
    the host, and only tensors on the device advance. Caches stay allocated
    until `release`.

    Args:
        model: the model.
        backend: of torch.compile. Any other than "inductor" runs without CUDA graphs.
    """

    def __init__(self, model: CausalLM, backend: str | Callable[..., Any] = "inductor") -> None:
        options: dict[str, Any] = {"mode": "reduce-overhead"} if backend == "inductor" else {"backend": backend}
        self._step = torch.compile(self._eager_step, fullgraph=True, dynamic=False, **options)
        self._model = model
        self._caches: dict[int, KVCache] = {}  # by rows

    def _eager_step(self, tokens: Tensor, cache: KVCache) -> Tensor:
        return self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)

    @torch.no_grad()
    def generate(self, prompts: Tensor, max_new_tokens: int) -> Tensor:
        """Continues the prompts, (B, T) without padding, greedily.

        Returns:
            (B, T + `max_new_tokens`).
        """
        rows, length = prompts.shape
        cache = self._empty_cache(rows, length + max_new_tokens)
        tokens = [prompts, self._eager_step(prompts, cache)]
        counters = HostCounters(cache)
        for tensor in tensors(cache):
            torch._dynamo.mark_static_address(tensor)
        for _ in range(max_new_tokens - 1):
            torch.compiler.cudagraph_mark_step_begin()
            tokens.append(self._step(tokens[-1], cache).clone())  # the next step overwrites its output
            counters.restore()
        return torch.cat(tokens, 1)

    def release(self) -> None:
        """Frees the caches."""
        self._caches.clear()

    def _empty_cache(self, rows: int, capacity: int) -> KVCache:
        """A cache with at least this capacity."""
        cache = self._caches.get(rows)
        if cache is None or cache.capacity is None or cache.capacity < capacity:
            cache = self._caches[rows] = self._model.new_cache(capacity)
        cache.reset()
        return cache


class HostCounters:
    """The current values of those counters of a cache that are Python integers."""

    def __init__(self, cache: KVCache) -> None:
        self._values = [
            (holder, {name: value for name, value in vars(holder).items() if type(value) is int})
            for holder in holders(cache)
        ]

    def restore(self) -> None:
        """Sets them back."""
        for holder, values in self._values:
            vars(holder).update(values)


def holders(cache: KVCache) -> Iterator[Any]:
    """The objects that hold the state of a static cache: its layers, and their position."""
    for layer in cache.layers:
        yield layer
        yield layer.position


def tensors(cache: KVCache) -> Iterator[Tensor]:
    """The buffers of a static cache."""
    for holder in holders(cache):
        yield from (value for value in vars(holder).values() if isinstance(value, Tensor))
