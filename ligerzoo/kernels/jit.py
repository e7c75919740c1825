"""`@jit`: a Triton kernel that imports triton when it is first launched, not when its file is imported.

A kernel file holds the plain-torch reference beside the kernels, and machines without a GPU (or without triton) need
only the reference. So `jit` keeps the bare function; the first launch of any kernel of a file hands all kernels of that
file to `triton.jit` and puts the results, and the true `tl`, into the file's namespace. From then on a launch costs
what Triton's costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import triton.language as tl
else:
    tl = None  # stands in until the first launch, see `_compile_file`

__all__ = ["jit", "tl"]


class _LazyKernel:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        namespace = self.function.__globals__
        _compile_file(namespace)
        return namespace[self.function.__name__][grid]


def jit(function: Callable[..., Any]) -> Any:
    """Marks `function` as a Triton kernel: `kernel[grid](...)` compiles and launches it."""
    return _LazyKernel(function)


def _compile_file(namespace: dict[str, Any]) -> None:
    import triton

    namespace["tl"] = triton.language
    for name, value in list(namespace.items()):
        if isinstance(value, _LazyKernel):
            namespace[name] = triton.jit(value.function)
            if value.function.__globals__ is not namespace:
                _compile_file(value.function.__globals__)  # an imported kernel calls others of its own file
