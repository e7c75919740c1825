"""`@kernel` and `@jit`: Triton kernels that import triton when one is first launched, and then launch quickly.

A kernel file holds the plain-torch reference beside the kernels, and machines without a GPU (or without triton) need
only the reference. So both decorators keep the bare function. The first launch of a kernel hands the `@jit` functions
of its file, which kernels call, to `triton.jit` and puts the results, and the true `tl`, into the file's namespace.

Triton binds the arguments of every launch to the kernel's signature anew; of small launches that is most of the time.
A `Kernel` remembers instead which compiled kernel served which arguments, and launches that one directly.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import triton.language as tl
else:
    tl = None  # stands in until the first launch, see `_bind_namespace`

__all__ = ["INTERPRETING", "jit", "kernel", "tl"]

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter runs the real kernels on CPU tensors (for tests: it is thousands of times slower)."""


_NUMBERS = frozenset({int, float, bool, type(None)})
_MAX_KEYS = 4096  # where every batch has another length


class _DeviceFunction:
    """A function that kernels call, until triton is imported."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


class Kernel:
    """A kernel to be launched as `kernel[programs](*arguments, num_warps=...)`, its arguments by position.

    Its parameters that are `tl.constexpr` come last.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        constants = [name for name in names if "constexpr" in str(function.__annotations__.get(name))]
        self._n_variable = len(names) - len(constants)
        assert list(names[self._n_variable :]) == constants, f"{function.__name__}: constants come last"
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __getitem__(self, programs: int) -> Callable[..., None]:
        return functools.partial(self._launch, programs)

    def _launch(self, programs: int, *arguments: Any, **options: int) -> None:
        if INTERPRETING:
            self._jitted[programs, 1, 1](*arguments, **options)
            return
        device = torch.cuda.current_device()
        # Whatever Triton specializes a kernel on must be part of the key: of numbers it is less than their value.
        key = [device, *options.values(), *arguments[self._n_variable :]]
        for argument in arguments[: self._n_variable]:
            if type(argument) in _NUMBERS:
                key += type(argument), argument
            elif isinstance(argument, Tensor):
                key += argument.dtype, argument.data_ptr() % 16
            else:  # a tensor descriptor
                key += argument.base.dtype, *argument.block_shape
        compiled = self._compiled.get(tuple(key))
        if compiled is not None:
            stream = torch._C._cuda_getCurrentRawStream(device)
            compiled.run(
                programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments
            )
            return
        if len(self._compiled) >= _MAX_KEYS:
            self._compiled.clear()
        self._compiled[tuple(key)] = self._jitted[programs, 1, 1](*arguments, **options)

    @functools.cached_property
    def _jitted(self) -> Any:
        import triton

        _bind_namespace(self.function.__globals__)
        return triton.jit(self.function)


def kernel(function: Callable[..., Any]) -> Any:
    """Marks `function` as a Triton kernel, see `Kernel`."""
    return Kernel(function)


def jit(function: Callable[..., Any]) -> Any:
    """Marks `function` as one that Triton kernels call."""
    return _DeviceFunction(function)


def _bind_namespace(namespace: dict[str, Any]) -> None:
    import triton

    if namespace["tl"] is triton.language:
        return
    namespace["tl"] = triton.language
    for name, value in list(namespace.items()):
        if isinstance(value, _DeviceFunction):
            owner = value.function.__globals__
            if owner is namespace:
                namespace[name] = triton.jit(value.function)
            else:  # imported from another kernel file: one function, whoever calls it
                _bind_namespace(owner)
                namespace[name] = owner[value.function.__name__]
