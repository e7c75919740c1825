"""The forwards of transformers' classes, with or without decorators.

A decorated forward is a chain of functions: each decorator has the next function as `__wrapped__`, as
`functools.wraps` sets it, and in its closure, from where it calls it. transformers decorates the same forward in one
version and not in another (5.24 adds `deprecate_kwarg` to those that take a cache). A replacement keeps the decorators
that it finds.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping

DECORATED = "its forward has a decorator that cannot be copied"


def undecorated(forward: Callable[..., object]) -> types.FunctionType | None:
    """Returns the function within all decorators; None if `decorated_like` cannot copy one of them."""
    while hasattr(forward, "__wrapped__"):
        cells = getattr(forward, "__closure__", None) or ()
        if not any(_holds(cell, forward.__wrapped__) for cell in cells):
            return None
        forward = forward.__wrapped__
    return forward if isinstance(forward, types.FunctionType) else None


def decorated_like(forward: Callable[..., object], function: types.FunctionType) -> types.FunctionType:
    """Returns `function` with the decorators of `forward`, for which `undecorated` returns a function."""
    if not hasattr(forward, "__wrapped__"):
        return function
    wrapped = forward.__wrapped__
    assert isinstance(forward, types.FunctionType)
    inner, cells = decorated_like(wrapped, function), forward.__closure__ or ()
    closure = tuple(types.CellType(inner) if _holds(cell, wrapped) else cell for cell in cells)
    copied = _copy(forward, forward.__globals__, closure)
    copied.__wrapped__ = inner  # type: ignore[attr-defined]
    return copied


def with_globals(function: types.FunctionType, names: Mapping[str, object]) -> types.FunctionType:
    """Returns a function without decorators, with other values of some global names."""
    scope = {**function.__globals__, **names}
    del scope["__name__"]  # torch.compile would look names up in the module of this name
    return _copy(function, scope, function.__closure__)


def _holds(cell: types.CellType, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # an empty cell
        return False


def _copy(
    function: types.FunctionType, scope: dict[str, object], closure: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    copied = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__annotations__ = function.__annotations__
    copied.__qualname__ = function.__qualname__
    copied.__doc__ = function.__doc__
    vars(copied).update(vars(function))
    return copied
