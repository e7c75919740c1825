"""`@kernel` and `@jit`: Triton kernels that import triton at their first launch, and launch with little overhead.

A kernel file contains kernels and their plain-torch reference. Machines without a GPU or without triton use only the
reference. So both decorators store the plain function. The first launch of a kernel passes the `@jit` functions of its
file to `triton.jit`, and puts the results and `triton.language` as `tl` into the file's namespace.

Triton binds the arguments of each launch to the kernel's signature, which takes most of the time of a small launch. A
`Kernel` caches the compiled kernel for each combination of arguments instead, and launches it directly.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

if TYPE_CHECKING:
    import triton.language as tl
else:
    tl = None  # until the first launch, see `_bind_namespace`

__all__ = ["INTERPRETING", "jit", "kernel", "tl"]

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernels on CPU tensors. For tests: it is thousands of times slower."""


_BINDING = threading.RLock()
_NUMBERS = frozenset({float, bool})
_MAX_KEYS = 4096  # bounds the cache if each batch has another length


class _DeviceFunction:
    """A device function before triton is imported."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


class Kernel:
    """A kernel. Launch it as `kernel[programs](*arguments, num_warps=...)`, with arguments by position.

    An argument is a tensor, a tensor descriptor, a number, None, or a NamedTuple of these, such as a tensor with its
    strides. Kernels and their device functions read the fields of a NamedTuple by name. `tl.constexpr` parameters come
    last.

    Args:
        unspecialized: parameters whose values have no effect on the code. Triton compiles a kernel again for numbers
            divisible by 16, and may then add in another order.
    """

    def __init__(self, function: Callable[..., Any], unspecialized: tuple[str, ...] = ()) -> None:
        self.function, self._unspecialized = function, unspecialized
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        constants = [name for name in names if "constexpr" in str(function.__annotations__.get(name))]
        self._n_variable = len(names) - len(constants)
        assert list(names[self._n_variable :]) == constants, f"{function.__name__}: constexpr parameters must come last"
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __getitem__(self, programs: int) -> Callable[..., None]:
        return functools.partial(self._launch, programs)

    def _launch(self, programs: int, *arguments: Any, **options: int) -> None:
        if INTERPRETING:
            self._jitted[programs, 1, 1](*arguments, **options)
            return
        device = torch._C._cuda_getDevice()
        # The key contains all that Triton specializes a kernel on. Numbers enter by value, which is more than needed.
        key = [device, *options.values(), *arguments[self._n_variable :]]
        _add_specialization(key, arguments[: self._n_variable])
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
        return triton.jit(self.function, do_not_specialize=self._unspecialized)


def _add_specialization(key: list[object], arguments: tuple[Any, ...]) -> None:
    """Appends to `key` what Triton specializes a kernel on: types, divisibility of addresses, values of numbers.

    The most frequent types come first. An integer needs no type: no other argument is a single number in the key.
    """
    for argument in arguments:
        kind = type(argument)
        if kind is int or argument is None:
            key.append(argument)
        elif isinstance(argument, Tensor):
            key.append(argument.dtype)
            key.append(argument.data_ptr() % 16)
        elif isinstance(argument, tuple):
            _add_specialization(key, argument)
        elif kind in _NUMBERS:
            key.append(kind)
            key.append(argument)
        else:  # a tensor descriptor
            key += argument.base.dtype, *argument.block_shape


@overload
def kernel(function: Callable[..., Any]) -> Any: ...


@overload
def kernel(*, unspecialized: tuple[str, ...]) -> Callable[[Callable[..., Any]], Any]: ...


def kernel(function: Callable[..., Any] | None = None, *, unspecialized: tuple[str, ...] = ()) -> Any:
    """Decorator for a Triton kernel, see `Kernel`."""
    if function is None:
        return functools.partial(Kernel, unspecialized=unspecialized)
    return Kernel(function, unspecialized)


def jit(function: Callable[..., Any]) -> Any:
    """Decorator for a device function, which Triton kernels call."""
    return _DeviceFunction(function)


def _bind_namespace(namespace: dict[str, Any]) -> None:
    """Replaces `tl` and the `@jit` functions of a kernel file by Triton's."""
    import triton

    with _BINDING:
        if namespace["tl"] is triton.language:
            return
        for name, value in list(namespace.items()):
            if isinstance(value, _DeviceFunction):
                owner = value.function.__globals__
                if owner is namespace:
                    namespace[name] = triton.jit(value.function)
                else:  # imported from another kernel file, which owns the compiled function
                    _bind_namespace(owner)
                    namespace[name] = owner[value.function.__name__]
        namespace["tl"] = triton.language  # last: it says that the namespace is complete
