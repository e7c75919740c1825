"""`@kernel` and `@jit`: Triton kernels that import triton when one is first launched, and then launch quickly.

A kernel file holds the plain-torch reference beside the kernels, and machines without a GPU (or without triton) need
only the reference. So both decorators keep the bare function. The first launch of a kernel hands the `@jit` functions
of its file, which kernels call, to `triton.jit` and puts the results, and the true `tl`, into the file's namespace.

Triton binds the arguments of every launch to the kernel's signature anew; of small launches that is most of the time.
A `Kernel` remembers instead which compiled kernel served which kinds of arguments, and launches that one directly.
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


class _DeviceFunction:
    """A function that kernels call, until triton is imported."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


class Kernel:
    """A kernel to be launched as `kernel[programs](*arguments, num_warps=...)`, its arguments by position."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        code = function.__code__
        names = code.co_varnames[: code.co_argcount]
        self._is_constant = tuple("constexpr" in str(function.__annotations__.get(name)) for name in names)
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __getitem__(self, programs: int) -> Callable[..., None]:
        return functools.partial(self._launch, (programs, 1, 1))

    def _launch(self, grid: tuple[int, int, int], *arguments: Any, **options: int) -> None:
        if INTERPRETING:
            self._jitted[grid](*arguments, **options)
            return
        # Whatever Triton specializes a kernel on must be part of the key.
        key = (
            torch.cuda.current_device(),
            *options.values(),
            *[a if c else _kind(a) for a, c in zip(arguments, self._is_constant, strict=True)],
        )
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self._jitted[grid](*arguments, **options)
        else:
            compiled[grid](*arguments)

    @functools.cached_property
    def _jitted(self) -> Any:
        import triton

        _bind_namespace(self.function.__globals__)
        return triton.jit(self.function)


def _kind(argument: Any) -> Any:
    """What Triton specializes a kernel on: dtypes, 16-byte alignment, integers that are 1, multiples of 16 or wide."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    if argument is None or isinstance(argument, float):
        return type(argument)
    return argument.base.dtype, *argument.block_shape  # a tensor descriptor


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
