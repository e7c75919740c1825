"""Options of recipes: a dataclass alone defines their names, types, defaults and descriptions.

The dataclass is called `Options`, and a string below each field describes it:

    @dataclass(frozen=True, kw_only=True)
    class Options(RunOptions):
        beta: Positive = 0.1
        \"\"\"strength of the regularization\"\"\"
        lr: Positive = 1e-6

It inherits the options that all recipes have from a class in run_options.py. A field that exists there has another
default here, and the description of the other one unless it has its own.

The command line derives its arguments from the source, without importing the recipe, since torch takes seconds to
import. The annotations are the names of `VALUE_TYPES`, `Literal[...]`, or `tuple[str, ...]` for one or more values; a
field with `| None` may be None.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from ligerzoo.checks import (
    AT_LEAST_1,
    FLAG,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    TEXT,
    Values,
    argument_type,
    integer,
    one_of,
)
from ligerzoo.errors import ConfigError, line_for_user

Count: TypeAlias = int
Number: TypeAlias = int
Positive: TypeAlias = float
NotNegative: TypeAlias = float
Fraction: TypeAlias = float
Budget: TypeAlias = str

T = TypeVar("T")

CLASS = "Options"
"""The name of the dataclass in the source of a recipe."""

COMMON = Path(__file__).with_name("run_options.py")
"""The source of the classes that it may inherit from."""


def _is_budget(value: str) -> bool:
    try:
        return value in ("auto", "none") or 0 < float(value) < math.inf
    except ValueError:
        return False


VALUE_TYPES = {
    "str": TEXT,
    "bool": FLAG,
    "Count": AT_LEAST_1,
    "Number": integer(0, 2**63 - 1),
    "Positive": POSITIVE,
    "NotNegative": NOT_NEGATIVE._replace(expected="a number, 0 or more"),
    "Budget": TEXT._replace(expected='a positive number of GiB, "auto" or "none"', contains=_is_budget),
    "Fraction": FRACTION,
}
"""The type of a value by the annotation of the field."""


@dataclasses.dataclass(frozen=True)
class Option:
    """One option, as the source of a recipe defines it.

    Attributes:
        name: name of the field.
        annotation: annotation of the field.
        default: default value; MISSING if the option is required.
        description: the string below the field.
    """

    name: str
    annotation: str
    default: Any
    description: str

    @property
    def value_type(self) -> Values:
        """The type of the value, or of each value if the option has several."""
        return value_type(self.annotation)

    @property
    def metavar(self) -> str:
        """A letter or word for the value in the help."""
        kind = self.value_type
        return (
            "FILE" if self.name.endswith("data") else "TEXT" if kind.parse is str else "N" if kind.parse is int else "X"
        )

    @property
    def is_required(self) -> bool:
        """Whether the option has no default."""
        return self.default is dataclasses.MISSING

    @property
    def has_several_values(self) -> bool:
        """Whether the value is a tuple."""
        return self.annotation.startswith("tuple")


def value_type(annotation: str) -> Values:
    """Returns the type of the values that an annotation describes."""
    name = annotation.removesuffix(" | None")
    if name.startswith("Literal["):
        choices = ast.literal_eval(name.removeprefix("Literal"))
        return one_of(choices)
    return VALUE_TYPES["str" if name == "tuple[str, ...]" else name]


def read_options(source: str) -> list[Option]:
    """Reads the options of a recipe from its source, inherited ones first."""
    options: dict[str, Option] = {}
    for definition in _lineage(_class(source, CLASS)):
        for field, following in zip(definition.body, [*definition.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                name = _name(field)
                options[name] = Option(
                    name,
                    ast.unparse(field.annotation),
                    ast.literal_eval(field.value) if field.value else dataclasses.MISSING,
                    _text(following) or options[name].description,
                )
    return list(options.values())


def add_arguments(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Adds an argument for each option: `--seq-length` for the field `seq_length`.

    The parsed namespace has an attribute for each option that was given, and none for the others.
    """
    for option in options:
        default = "" if option.default in (dataclasses.MISSING, None, False) else f" (default: {option.default})"
        help_text = f"{option.description}{default}".replace("%", "%%")
        flag = f"--{option.name.replace('_', '-')}"
        if option.annotation == "bool":
            parser.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=help_text)
            continue
        kind = option.value_type
        values: dict[str, Any] = {"type": argument_type(kind), "metavar": option.metavar}
        parser.add_argument(
            flag, action=_Several if option.has_several_values else "store", required=option.is_required,
            default=argparse.SUPPRESS, help=help_text, **({"choices": kind.choices} if kind.choices else values),
        )  # fmt: skip


class _Several(argparse.Action):
    """Collects the values of an argument that may be repeated in a tuple."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, flag: object = None) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), values))


def run_script(main: Callable[[T], int], options_class: Callable[..., T], file: str) -> int:
    """Runs a recipe as a script, with its defaults and the arguments of the command line.

    Args:
        main: the recipe. An error of the user that it raises is printed as one line.
        options_class: the dataclass `Options` of the script.
        file: path of the script.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description="Runs this recipe; each option replaces its default in the file.")
    add_arguments(parser, read_options(Path(file).read_text(encoding="utf-8")))
    given = vars(parser.parse_args())
    try:
        return main(options_class(**given))
    except Exception as error:
        if (line := line_for_user(error)) is None:
            raise
        print(f"{parser.prog}: error: {line}", file=sys.stderr)
        return 1


def fill_in(source: str, values: Mapping[str, Any]) -> str:
    """Returns the source of a recipe with other defaults of the given options."""
    lines, body = source.splitlines(keepends=True), _class(source, CLASS).body
    own = {_name(field): field for field in body if isinstance(field, ast.AnnAssign)}
    last = max(statement.end_lineno or 0 for statement in body if not isinstance(statement, ast.FunctionDef))
    inherited = []
    for option in read_options(source):
        if option.name in values:
            line = f"    {option.name}: {option.annotation.replace(chr(39), chr(34))} = {values[option.name]!r}\n"
            if option.name in own:
                assert own[option.name].end_lineno == own[option.name].lineno  # a field is one line
                lines[own[option.name].lineno - 1] = line
            else:
                inherited.append(line)
    lines[last:last] = inherited
    return "".join(lines)


def check_options(options: Any) -> None:
    """Checks the values of a dataclass of options.

    Raises:
        ConfigError: A value does not have the type of its annotation.
    """
    for field in dataclasses.fields(options):
        annotation, value = str(field.type), getattr(options, field.name)
        if value is None and annotation.endswith("| None"):
            continue
        kind = value_type(annotation)
        is_valid, expected = kind.accepts(value), kind.expected
        if annotation.startswith("tuple"):
            is_valid = isinstance(value, tuple) and value != () and all(map(kind.accepts, value))
            expected = 'a tuple of texts, such as ("train.jsonl",)'
        if not is_valid:
            raise ConfigError("invalid value", where=f"option {field.name}", got=repr(value), expected=expected)


def _class(source: str, name: str) -> ast.ClassDef:
    return next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)


def _lineage(definition: ast.ClassDef) -> list[ast.ClassDef]:
    """Returns a class after those that it inherits from."""
    bases = [_class(COMMON.read_text(encoding="utf-8"), ast.unparse(base)) for base in definition.bases]
    return [*(one for base in bases for one in _lineage(base)), definition]


def _name(field: ast.AnnAssign) -> str:
    assert isinstance(field.target, ast.Name)
    return field.target.id


def _text(statement: ast.stmt | None) -> str:
    """Returns the string that a statement consists of, on one line; an empty one for other statements."""
    if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
        return ""
    return " ".join(str(statement.value.value).split())
