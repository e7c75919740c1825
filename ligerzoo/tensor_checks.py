"""Tensors that arguments accept: kinds of dtypes, shapes and devices; and the error about unknown options.

No check reads a tensor's values, so none is a host sync. In all checks, `name` is the function or module that messages
name. A value of another type is a `TypeError`, any other invalid value a `ValueError`.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from ligerzoo.checks import POSITIVE, check
from ligerzoo.errors import LigerzooError, WrongTypeError, did_you_mean
from ligerzoo.foreign_names import our_name, our_option

P = ParamSpec("P")
R = TypeVar("R")

Kind = Literal["floating-point", "integer", "bool"]
"""Kind of a tensor's dtype."""


def kind_of(tensor: Tensor) -> str:
    """Returns the `Kind` of the tensor's dtype, or "complex"."""
    if tensor.dtype.is_floating_point:
        return "floating-point"
    if tensor.dtype == torch.bool:
        return "bool"
    return "complex" if tensor.dtype.is_complex else "integer"


def describe_value(value: object) -> str:
    """Returns a short description of an argument: numbers and strings themselves, other values by their type."""
    if value is None or isinstance(value, bool | numbers.Number | str):
        return repr(value)
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    article = "an" if type(value).__name__[0] in "AEIOUaeiou" else "a"
    return f"{article} {type(value).__name__}"


def require_tensor(name: str, argument: str, value: object, expected: str = "a tensor") -> None:
    """Raises TypeError unless the value is a tensor."""
    if not isinstance(value, Tensor):
        remedies = {"list": "torch.tensor", "tuple": "torch.tensor", "ndarray": "torch.from_numpy"}
        function = remedies.get(type(value).__name__)
        remedy = f"Convert it with {function}" if function else None
        raise WrongTypeError(f"{argument} is {describe_value(value)}", where=name, expected=expected, remedy=remedy)


def check_floats(name: str, **tensors: object) -> None:
    """Raises unless each argument is a floating-point tensor."""
    for argument, value in tensors.items():
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            check_tensor(name, argument, value)


def check_optional_floats(name: str, **tensors: object) -> None:
    """Raises unless each argument is None or a floating-point tensor."""
    for argument, value in tensors.items():
        if value is not None:
            check_floats(name, **{argument: value})


def check_tensor(
    name: str,
    argument: str,
    value: object,
    kind: Kind = "floating-point",
    shapes: Sequence[tuple[int, ...]] = (),
    device: torch.device | None = None,
    *,
    remedy: str | None = None,
) -> None:
    """Raises unless the value is a tensor of this kind, of one of the shapes (if any are given), on the device.

    Messages about another shape end with the remedy.
    """
    article = "an" if kind == "integer" else "a"
    if not isinstance(value, Tensor):
        shape = f" of shape {_alternatives(shapes)}" if shapes else ""
        require_tensor(name, argument, value, f"{article} {kind} tensor{shape}")
    assert isinstance(value, Tensor)
    if shapes and not any(value.shape == shape for shape in shapes):
        what = f"{argument} has shape {tuple(value.shape)}"
        raise LigerzooError(what, where=name, expected=_alternatives(shapes), remedy=remedy)
    if kind_of(value) != kind:
        expected = "torch.bool" if kind == "bool" else f"{article} {kind} dtype"
        raise LigerzooError(f"{argument} has dtype {value.dtype}", where=name, expected=expected)
    if device is not None and value.device != device and value.dim() > 0:
        expected = f"{device}, the device of the other tensors"
        raise LigerzooError(f"{argument} is on {value.device}", where=name, expected=expected)


def _alternatives(shapes: Sequence[tuple[int, ...]]) -> str:
    return " or ".join(map(str, shapes))


def shape_error(name: str, expected: str, /, **tensors: Tensor | None) -> LigerzooError:
    """Returns the error about two or more tensors whose shapes do not match."""
    return _mismatch(name, expected, {key: None if x is None else tuple(x.shape) for key, x in tensors.items()})


def shape_or_dtype_error(name: str, expected: str, /, **tensors: Tensor | None) -> LigerzooError:
    """Returns the error about two or more tensors whose shapes or dtypes do not match."""
    shown = {key: None if x is None else f"{tuple(x.shape)} {x.dtype}" for key, x in tensors.items()}
    return _mismatch(name, expected, shown)


def _mismatch(name: str, expected: str, shown: Mapping[str, object]) -> LigerzooError:
    *parts, last = [f"{argument} {got}" for argument, got in shown.items()]
    what = f"{', '.join(parts)} and {last}".replace(" ", " is ", 1)
    return LigerzooError(what, where=name, expected=expected)


def check_num_items(name: str, **counts: Any) -> None:
    """Raises unless each argument is None, a positive number, or a 0-d tensor of numbers, whose value is not read."""
    for argument, count in counts.items():
        if isinstance(count, Tensor):
            if count.dim() > 0 or kind_of(count) not in ("floating-point", "integer"):
                raise LigerzooError(f"{argument} is {describe_value(count)}", where=name, expected=_ITEMS.expected)
        elif count is not None:
            check(name, _ITEMS, **{argument: count})


_ITEMS = POSITIVE._replace(expected="a positive number or a 0-d tensor")


def unknown_options(
    name: str, given: Mapping[str, object], accepted: Collection[str], remedy: str = "", similar: Collection[str] = ()
) -> WrongTypeError | None:
    """Returns the error about options that are not accepted, with our names for them; None if all are accepted.

    Args:
        name: the function or module that the message names.
        given: the options.
        accepted: names of the accepted ones.
        remedy: what to do, if no option has a name that is ours or similar to one.
        similar: other names that one may have meant.
    """
    unknown = {option: value for option, value in given.items() if option not in accepted}
    if not unknown:
        return None
    answers = ((our_option(option, accepted), our_name(value)) for option, value in unknown.items())
    ours = [hint for pair in answers for hint in pair if hint]
    hints = ours or [hint for option in unknown if (hint := did_you_mean(option, [*accepted, *similar]))]
    values = ", ".join(f"{option}={describe_value(value)}" for option, value in unknown.items())
    what = f"unknown option{'s' if len(unknown) > 1 else ''} {values}"
    return WrongTypeError(what, where=name, expected=f"an option of {name}", remedy=". ".join(hints) or remedy or None)


def explains_options(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function, or a method of a layer, raise `unknown_options` for options that it does not have.

    A constructor that fails for a config says that layers take numbers.
    """
    name = function.__qualname__.removesuffix(".__init__").removesuffix(".forward")

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        try:
            return function(*args, **options)
        except (TypeError, ValueError):
            parameters = [one for one in inspect.signature(function).parameters if one != "self"]
            is_layer = function.__name__ == "__init__"
            error = _config_error(name, parameters, args[1:2]) if is_layer else None
            if error := error or unknown_options(name, options, parameters):
                raise error from None
            raise

    return call


def _config_error(name: str, parameters: Sequence[str], first: Sequence[object]) -> WrongTypeError | None:
    """Returns the error about a config as the first argument of a layer; None if it is none."""
    kind = type(first[0]).__name__ if first else ""
    if not kind.endswith(("Config", "Args")):
        return None
    expected, remedy = ", ".join(parameters[:4]), f"Layers take numbers, such as config.{parameters[0]}, and modules"
    return WrongTypeError(f"got a {kind}", where=name, expected=expected, remedy=remedy)
