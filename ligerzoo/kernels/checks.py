"""Checks of the arguments of public functions: types, shapes, dtypes and numbers.

No check reads a tensor's values, so none is a host sync. A message names the function and the argument, says what was
given and what is expected, and what to do where that is not obvious. A value of another type is a `TypeError`, any
other invalid value a `ValueError`.

In all checks, `name` is the function or module that messages name.
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["floating-point", "integer", "bool"]
"""Kind of a tensor's dtype."""


def kind_of(tensor: Tensor) -> str:
    """Returns the `Kind` of the tensor's dtype, or "complex"."""
    if tensor.dtype.is_floating_point:
        return "floating-point"
    if tensor.dtype == torch.bool:
        return "bool"
    return "complex" if tensor.dtype.is_complex else "integer"


def describe(value: object) -> str:
    """Returns a short description of an argument: numbers and strings themselves, other values by their type."""
    if value is None or isinstance(value, bool | numbers.Number | str):
        return repr(value)
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    article = "an" if type(value).__name__[0] in "AEIOUaeiou" else "a"
    return f"{article} {type(value).__name__}"


def nearest_hint(word: object, words: Collection[str]) -> str:
    """Returns the end of a message about an unknown word: the nearest known one; empty if none is near."""
    nearest = difflib.get_close_matches(word, list(words), n=1) if isinstance(word, str) else []
    return f". Did you mean {nearest[0]!r}?" if nearest else ""


def require_tensor(name: str, argument: str, value: object, expected: str = "a tensor") -> None:
    """Raises TypeError unless the value is a tensor."""
    if not isinstance(value, Tensor):
        remedies = {"list": "torch.tensor", "tuple": "torch.tensor", "ndarray": "torch.from_numpy"}
        function = remedies.get(type(value).__name__)
        remedy = f". Convert it with {function}" if function else ""
        raise TypeError(f"{name}: {argument} is {describe(value)}; expected {expected}{remedy}")


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
    remedy: str = "",
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
        end = f". {remedy}" if remedy else ""
        raise ValueError(f"{name}: {argument} has shape {tuple(value.shape)}; expected {_alternatives(shapes)}{end}")
    if kind_of(value) != kind:
        expected = "torch.bool" if kind == "bool" else f"{article} {kind} dtype"
        raise ValueError(f"{name}: {argument} has dtype {value.dtype}; expected {expected}")
    if device is not None and value.device != device and value.dim() > 0:
        raise ValueError(f"{name}: {argument} is on {value.device}; expected {device}, the device of the other tensors")


def _alternatives(shapes: Sequence[tuple[int, ...]]) -> str:
    return " or ".join(map(str, shapes))


class Range(NamedTuple):
    """The numbers that an argument accepts.

    Attributes:
        expected: the range in words, for messages.
        contains: whether a number is in the range; NaN and infinities never are.
    """

    expected: str
    contains: Callable[[Any], bool] = lambda x: True


ANY = Range("a finite number")
POSITIVE = Range("a positive number", lambda x: x > 0)
NOT_NEGATIVE = Range("0 or a positive number", lambda x: x >= 0)
FRACTION = Range("a number from 0 to 1", lambda x: 0 <= x <= 1)


def check_numbers(name: str, valid: Range, **arguments: object) -> None:
    """Raises unless each argument is a number in the range."""
    for argument, value in arguments.items():
        _check_number(name, argument, value, valid, valid.expected)


def check_optional_numbers(name: str, valid: Range, **arguments: object) -> None:
    """Raises unless each argument is None or a number in the range."""
    for argument, value in arguments.items():
        if value is not None:
            _check_number(name, argument, value, valid, f"{valid.expected}, or None")


def _check_number(name: str, argument: str, value: Any, valid: Range, expected: str) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number:
        raise TypeError(f"{name}: {argument}={value!r}; expected {expected}")
    if not (-math.inf < value < math.inf and valid.contains(value)):  # dynamo does not trace math.isfinite
        raise ValueError(f"{name}: {argument}={value!r}; expected {expected}")


def check_integer(name: str, argument: str, value: Any, least: int | None = None, unit: str = "") -> None:
    """Raises unless the value is an integer, at least `least`."""
    expected = f"an integer{unit}" + ("" if least is None else f", {least} or more")
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: {argument}={value!r}; expected {expected}")
    if least is not None and value < least:
        raise ValueError(f"{name}: {argument}={value!r}; expected {expected}")


def check_flag(name: str, **arguments: object) -> None:
    """Raises TypeError unless each argument is True or False."""
    for argument, value in arguments.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: {argument}={value!r}; expected True or False")


def check_num_items(name: str, **counts: Any) -> None:
    """Raises unless each argument is None, a positive number, or a 0-d tensor of numbers, whose value is not read."""
    for argument, count in counts.items():
        expected = "a positive number or a 0-d tensor"
        if isinstance(count, Tensor):
            if count.dim() > 0 or kind_of(count) not in ("floating-point", "integer"):
                raise ValueError(f"{name}: {argument} is {describe(count)}; expected {expected}")
        elif count is not None:
            _check_number(name, argument, count, POSITIVE, expected)
