"""Fixtures for Triton's interpreter: they silence NumPy's warnings, and leave out work without an effect on results."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ligerzoo.kernels.dispatch import INTERPRETING


@pytest.fixture(autouse=True)
def _silent_numpy() -> Iterator[None]:
    """Silences NumPy's warnings about infinities and NaN, which a GPU computes silently."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
        yield


@pytest.fixture(autouse=True, scope="session")
def _patched_once() -> Iterator[None]:
    """Patches Triton's language once per launch. The interpreter does so at each device function call, which takes a
    third of the time.

    Sums and products of integers are checked for overflows with ten more operations each, whose result only kernels
    compiled for debugging read. And every tensor computes its shape as a Triton tuple with types.
    """
    if not INTERPRETING:
        yield
        return
    from triton.language import core
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug  # or checks for overflows would have an effect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        patch.setattr(core.block_type, "__init__", _init_block_type)
        patch.setattr(core.tensor, "__init__", _init_tensor)
        patch.setattr(interpreter, "_patch_lang", _once_per_launch(interpreter._patch_lang))
        patch.setattr(interpreter, "_get_np_dtype", _cached(interpreter._get_np_dtype))
        yield


@functools.cache
def _shape_of_type(shape: tuple[int, ...]) -> tuple[Any, int, str]:
    """The shape, number of elements and text of the shape of a block type; raises the errors for invalid shapes."""
    from triton.language import core

    values = core.tuple(shape)
    return values, core.validate_block_shape(values), str(values)


@functools.cache
def _shape_of_tensor(shape: tuple[int, ...]) -> tuple[Any, Any]:
    from triton.language import core

    return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))


def _init_block_type(self: Any, element_type: Any, shape: Any) -> None:
    sizes = tuple(getattr(size, "value", size) for size in shape)
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_type
    self.shape, self.numel, text = _shape_of_type(sizes)
    self.name = f"<{text}, {element_type}>"


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape_of_tensor(tuple(type.shape) if type.is_block() else ())


def _once_per_launch(patch_language: Callable[[Any], Any]) -> Callable[[Any], Any]:
    patched: set[int] = set()  # modules
    scopes: list[Any] = []

    class Launch:
        def restore(self) -> None:
            patched.clear()
            while scopes:
                scopes.pop().restore()

    def patch(function: Any) -> Launch:
        modules = _language_modules(function)
        if not modules <= patched:
            patched.update(modules)
            scopes.append(patch_language(function))
        return Launch()

    return patch


def _cached(numpy_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function builds a table of all dtypes in each call, except of a pointer type (which cannot be hashed)."""
    cached = functools.cache(numpy_dtype)
    return lambda dtype: (numpy_dtype if dtype.scalar.is_ptr() else cached)(dtype.scalar)


@functools.cache
def _language_modules(function: Any) -> frozenset[int]:
    import triton.language as tl

    return frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
