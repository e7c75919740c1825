"""Fixtures for Triton's interpreter: they silence NumPy's warnings, and patch the language once per launch."""

import functools
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
    third of the time."""
    if not INTERPRETING:
        yield
        return
    from triton.runtime import interpreter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", _once_per_launch(interpreter._patch_lang))
        patch.setattr(interpreter, "_get_np_dtype", _cached(interpreter._get_np_dtype))
        yield


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
