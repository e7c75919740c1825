"""Options of recipes: dataclasses, of which the command line makes its arguments. This module does not import torch.

    @dataclass(frozen=True, kw_only=True)
    class MyOptions(RunOptions):
        beta: Positive = option("strength of the regularization", 0.1)
        lr: Positive = 1e-6  # another default of an option of RunOptions

A field is `str`, `bool`, one of the types below, `Literal[...]`, or `tuple[str, ...]` for one or more values. With
`| None` it may be None. A trailing underscore, as in `import_`, is not part of the option's name.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import shlex
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from ligerzoo.arguments import LOCATION, Parser
from ligerzoo.checks import (
    AT_LEAST_1,
    FLAG,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_FRACTION,
    TEXT,
    Values,
    annotated_values,
    argument_type,
    integer,
    is_list,
)
from ligerzoo.errors import ConfigError, raise_all
from ligerzoo.exports import renamed


def _is_budget(value: str) -> bool:
    try:
        return value in ("auto", "none") or 0 < float(value) < math.inf
    except ValueError:
        return False


Count = Annotated[int, AT_LEAST_1]
Seed = Annotated[int, integer(0, 2**63 - 1)]
Positive = Annotated[float, POSITIVE]
NotNegative = Annotated[float, NOT_NEGATIVE._replace(expected="a number, 0 or more")]
Fraction = Annotated[float, FRACTION]
PositiveFraction = Annotated[float, POSITIVE_FRACTION]
Location = Annotated[str, LOCATION]
Budget = Annotated[str, TEXT._replace(expected='a positive number of GiB, "auto" or "none"', contains=_is_budget)]


def option(description: str, default: Any = dataclasses.MISSING, *, may_change: bool = False) -> Any:
    """Returns a field of a dataclass of options.

    Args:
        description: the help of the command line.
        default: its default value; without one, the option is required.
        may_change: whether it may differ when a run is resumed.
    """
    return dataclasses.field(default=default, metadata={"description": description, "may_change": may_change})


def changeable(description: str, default: Any = dataclasses.MISSING) -> Any:
    """Returns a field that may differ when a run is resumed, see `option`."""
    return option(description, default, may_change=True)


_METAVARS = {"data": "DATA", "eval_data": "DATA", "map": "FIELD=COLUMN"}


class Option(NamedTuple):
    """An option of a class.

    Attributes:
        name: name of the field.
        values: the values that it accepts; of each item, if it has several.
        default: default value; MISSING if the option is required.
        description: the help of the command line.
        group: what the option is about: the first line of the docstring of the class that introduces it.
        may_change: whether it may differ when a run is resumed.
        is_optional: whether it may be None.
        is_tuple: whether it has one or more values.
    """

    name: str
    values: Values
    default: Any
    description: str
    group: str
    may_change: bool
    is_optional: bool
    is_tuple: bool

    @property
    def flag(self) -> str:
        """The option on the command line, such as "--seq-length"."""
        return f"--{self.name.strip('_').replace('_', '-')}"

    def written(self, value: object) -> str:
        """Returns the option with a value in words of the command line: "--lr 0.001", "--no-dora", "no --epochs"."""
        if value is None:
            return f"no {self.flag}"
        if self.values is FLAG:
            return self.flag if value else f"--no-{self.flag[2:]}"
        return shlex.join([self.flag, *map(str, value if is_list(value) else [value])])

    @property
    def metavar(self) -> str:
        """A letter or word for the value in the help."""
        if self.name in _METAVARS:
            return _METAVARS[self.name]
        words: dict[object, str] = {str: "TEXT", int: "N", os.path.expanduser: "PATH"}
        return words.get(self.values.parse, "X")


def options_of(options_class: type) -> tuple[Option, ...]:
    """Returns the options of a dataclass, inherited ones first."""
    hints = get_type_hints(options_class, include_extras=True)
    found = []
    for field in dataclasses.fields(options_class):
        parts = (hints[field.name], *get_args(hints[field.name]))
        lineage = [one for one in options_class.__mro__ if field.name in getattr(one, "__dataclass_fields__", ())]
        described = [one.__dataclass_fields__[field.name].metadata for one in lineage]  # type: ignore[attr-defined]
        metadata = next(filter(None, described))
        found.append(
            Option(
                name=field.name,
                values=next(filter(None, map(annotated_values, parts)), TEXT),
                default=field.default,
                description=metadata["description"],
                group=str(lineage[-1].__doc__).partition("\n")[0].rstrip("."),
                may_change=metadata["may_change"],
                is_optional=type(None) in parts,
                is_tuple=any(get_origin(part) is tuple for part in parts),
            )
        )
    return tuple(found)


def check_options(options: Any) -> None:
    """Raises ConfigError for each value of a dataclass of options that its annotation does not describe."""
    problems = []
    for one in options_of(type(options)):
        value, accepts, expected = getattr(options, one.name), one.values.accepts, one.values.expected
        if value is None and one.is_optional:
            continue
        is_valid = accepts(value)
        if one.is_tuple:
            is_valid = isinstance(value, tuple) and value != () and all(map(accepts, value))
            expected = 'a tuple of texts, such as ("train.jsonl",)'
        if not is_valid:
            problems.append(
                ConfigError("invalid value", where=f"option {one.name}", got=repr(value), expected=expected)
            )
    raise_all(problems)


def add_arguments(parser: Parser, options: Iterable[Option]) -> None:
    """Adds an argument for each option, such as `--seq-length` for the field `seq_length`, in groups.

    The parsed namespace has an attribute for each option that was given, and none for the others.
    """
    for one in options:
        is_said = one.default in (dataclasses.MISSING, None, False) or "(default: " in one.description
        default = "" if is_said else f" (default: {one.default})"
        given: dict[str, Any] = {"default": argparse.SUPPRESS, "help": f"{one.description}{default}".replace("%", "%%")}
        given["dest"] = one.name
        if one.values is FLAG:
            given["action"] = argparse.BooleanOptionalAction
        else:
            given |= {"action": _Several, "nargs": "+"} if one.is_tuple else {}
            given["required"] = one.default is dataclasses.MISSING
            choices, parse = one.values.choices, argument_type(one.values)
            given |= {"choices": choices} if choices else {"type": parse, "metavar": one.metavar}
        parser.group(one.group).add_argument(one.flag, **given)


class _Several(argparse.Action):
    """Collects the values of an argument, which may be repeated, in a tuple."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, flag: object = None) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), *values))


__getattr__ = renamed(__name__, {"run_script": "ligerzoo.train.command_line.run_script"})
