"""Values that arguments and options accept: integers, numbers, flags, texts and names.

Functions, layers, losses, options of recipes and of the command line all check with these. A message has one form:

    temperature=-1; expected a positive number
    rms_norm: eps=nan; expected a positive number

Tensors are checked by `ligerzoo.tensor_checks`. This module does not import torch, so the command line starts fast.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from numbers import Real
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard, TypeVar, cast, get_args, get_origin

from ligerzoo.errors import LigerzooError, WrongTypeError, did_you_mean

T = TypeVar("T")


def _anything(value: Any) -> bool:
    return True


class Values(NamedTuple):
    """The values that an argument, an option or an entry of a file accepts.

    Attributes:
        expected: them in words, for messages.
        has_type: whether a value has an accepted type.
        contains: whether a value of an accepted type is one of them.
        parse: converts a text of the command line. Raises ValueError.
        choices: all accepted values, if they are few.
        problem: what is wrong with others, for messages that say so.
    """

    expected: str
    has_type: Callable[[Any], bool]
    contains: Callable[[Any], bool] = _anything
    parse: Callable[[str], Any] = str
    choices: Collection[str] = ()
    problem: str = "invalid value"

    def accepts(self, value: object) -> bool:
        """Returns whether a value is one of them."""
        return self.has_type(value) and self.contains(value)


def check(name: str | None, values: Values, remedy: str | None = None, /, **arguments: object) -> None:
    """Raises LigerzooError unless each argument is one of the values; for a wrong type it is a TypeError too.

    Args:
        name: the function or class that messages name; None if the arguments' names suffice.
        values: what is accepted.
        remedy: what the user can do, as a sentence.
        arguments: the values by the names of the arguments.
    """
    for argument, value in arguments.items():
        if not (values.has_type(value) and values.contains(value)):
            raise refused(name, values, argument, value, remedy)


def refused(name: str | None, values: Values, argument: str, value: object, remedy: str | None = None) -> LigerzooError:
    """Returns the error about a value that is not accepted, see `check`."""
    error = LigerzooError if values.has_type(value) else WrongTypeError
    where = argument if name is None else f"{name}: {argument}"
    hint = remedy or did_you_mean(value, values.choices)
    return error(where=where, got=repr(value), expected=values.expected, remedy=hint)


def argument_type(values: Values) -> Callable[[str], Any]:
    """Returns the type of an argument of argparse: it parses a text and checks the value."""

    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            value = values.parse(text)
            if values.accepts(value):
                return value
        raise argparse.ArgumentTypeError(f"got {text[:50]!r}; expected {values.expected}")

    return parse


def is_integer(value: object) -> TypeGuard[int]:
    """Returns whether a value is an integer, which True and False are not."""
    return isinstance(value, int) and type(value) is not bool


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether a value is a real number, which True and False are not."""
    return type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))  # of a float, at once


def is_text(value: object) -> TypeGuard[str]:
    """Returns whether a value is a string."""
    return isinstance(value, str)


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Returns whether a value is a list or a tuple."""
    return isinstance(value, list | tuple)


def as_list(value: T | Iterable[T], single: type[T]) -> list[T]:
    """Returns the items of a value, or the value alone if it has the type of a single one."""
    return [value] if isinstance(value, single) else list(cast("Iterable[T]", value))


def number(expected: str, contains: Callable[[Any], bool] = _anything) -> Values:
    """Finite numbers in a range."""
    # dynamo does not trace math.isfinite
    return Values(expected, is_number, lambda x: -math.inf < x < math.inf and contains(x), float)


def integer(least: int | None = None, most: int | None = None, *, unit: str = "") -> Values:
    """Integers from `least` to `most`; a unit is a phrase such as " of MiB"."""
    expected = f"an integer{unit}"
    if most is not None:
        expected += f" from {least} to {_power_of_2(most)}"
    elif least is not None:
        expected += f", {least} or more"
    return Values(
        expected,
        is_integer,
        lambda value: (least is None or value >= least) and (most is None or value <= most),
        int,
    )


def _power_of_2(value: int) -> str:
    exponent = (value + 1).bit_length() - 1
    return f"2**{exponent} - 1" if exponent >= 16 and value + 1 == 2**exponent else str(value)


def or_none(values: Values, expected: str | None = None) -> Values:
    """These values, and None."""
    has_type, contains = values.has_type, values.contains
    return values._replace(
        expected=expected or f"{values.expected}, or None",
        has_type=lambda value: value is None or has_type(value),
        contains=lambda value: value is None or contains(value),
    )


def instances(expected: str, accepts: Callable[[Any], bool]) -> Values:
    """Values that a function accepts, whatever their type."""
    return Values(expected, accepts)


def one_of(choices: Collection[str]) -> Values:
    """Names."""
    expected = f"one of {', '.join(map(repr, choices))}"
    return Values(expected, is_text, lambda value: value in choices, choices=choices)


FINITE = number("a finite number")
POSITIVE = number("a positive number", lambda x: x > 0)
POSITIVE_OR_NONE = or_none(POSITIVE)
NOT_NEGATIVE = number("0 or a positive number", lambda x: x >= 0)
FRACTION = number("a number from 0 to 1", lambda x: 0 <= x <= 1)
POSITIVE_FRACTION = number("a number above 0, and at most 1", lambda x: 0 < x <= 1)
PROBABILITY = number("a number from 0 to 1, not 1", lambda x: 0 <= x < 1)
SHARE = number("a number greater than 0 and at most 1", lambda x: 0 < x <= 1)
COUNT = integer(0)
AT_LEAST_1 = integer(1)
FLAG = instances("True or False", lambda value: isinstance(value, bool))
TEXT = Values("a text that is not empty", is_text, lambda value: value != "")


def annotated_values(hint: Any) -> Values | None:
    """Returns the values that an annotation describes, such as `Positive | None`, without None.

    None for an annotation that describes no values, such as that of a tensor.
    """
    for part in (hint, *get_args(hint)):
        if get_origin(part) is Annotated:
            values: Values = part.__metadata__[0]
            return values
        if get_origin(part) is Literal:
            return one_of(get_args(part))
        if part is bool:
            return FLAG
    return None


def option_values(hint: Any) -> Values | None:
    """Returns the values that the annotation of an option describes, with None where it allows that."""
    values = annotated_values(hint)
    return or_none(values) if values is not None and type(None) in get_args(hint) else values
