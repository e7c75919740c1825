"""Options of recipes on the command line, and in YAML files: `--config` reads one, and each run writes its own.

    model: HuggingFaceTB/SmolLM2-135M
    data: [chats.jsonl, more.jsonl]
    output: run
    lr: 1e-4
    lora-rank: 8

The names are those of the command line, whose checks the values pass. YAML never constructs an object here: only the
texts of names and values are read, so that `1e-4` is a number and `on` is a word.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from ligerzoo.arguments import Parser, in_flags
from ligerzoo.checks import FLAG, argument_type
from ligerzoo.errors import did_you_mean, line_for_user, lines_for_user
from ligerzoo.train.options import Option, add_arguments, options_of

T = TypeVar("T")

CONFIG_FILE = "run.yaml"
"""The file that a run writes."""

_NOT_STORED = ("resume", "dry_run")
"""Options that say what to do with a run, rather than what it is."""

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NULL = ("", "null", "~")


class _Entry(NamedTuple):
    """The values of an option: texts, or None for null; and its line in the file."""

    name: str
    line: int
    values: list[str | None]
    is_list: bool


@dataclass(frozen=True)
class ConfigFile:
    """The options of a file; none without a path.

    Attributes:
        path: the file.
        entries: the options, by their names with hyphens.
        problems: what is wrong with the file, in lines.
    """

    path: str | None
    entries: dict[str, _Entry] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path is not None:
            self._read(Path(self.path).expanduser())

    def value(self, name: str) -> str | None:
        """Returns an option's text; None if the file does not have it."""
        return self.entries[name].values[0] if name in self.entries else None

    def options(self, options: Sequence[Option]) -> dict[str, Any]:
        """Returns those of these options that the file sets, by their fields. Adds what is wrong to `problems`."""
        found = {}
        for one in options:
            if (entry := self.entries.get(one.flag[2:])) is not None:
                try:
                    found[one.name] = _parsed(one, entry)
                except argparse.ArgumentTypeError as error:
                    self.problems.append(f"{self.path}:{entry.line}: {entry.name}: {error}")
        return found

    def refuse_others(self, options: Sequence[Option], hint: Callable[[str], str]) -> None:
        """Adds other names than those of the options to `problems`, with what `hint` says about "--name"."""
        accepted = {one.flag[2:] for one in options}
        for name, entry in self.entries.items():
            if name not in accepted:
                self.problems.append(f"{self.path}:{entry.line}: {entry.name}: unknown option. {hint(f'--{name}')}")

    def _read(self, path: Path) -> None:
        import yaml

        try:
            root = yaml.compose(path.read_text(encoding="utf-8-sig"), Loader=yaml.BaseLoader)
        except yaml.MarkedYAMLError as error:
            line = 1 if error.problem_mark is None else error.problem_mark.line + 1
            self.problems.append(f"{self.path}:{line}: not valid YAML: {error.problem}")
        except OSError as error:
            self.problems.append(f"option --config: {line_for_user(error)}")
        except (UnicodeError, RecursionError, yaml.YAMLError) as error:
            self.problems.append(f"option --config: {self.path}: not valid YAML: {error}")
        else:
            match root:
                case yaml.MappingNode(value=pairs):
                    for key, node in pairs:
                        self._add(key, node)
                case yaml.Node():
                    self.problems.append(f"{self.path}:1: not options; expected lines such as lr: 1e-4")

    def _add(self, key: Any, node: Any) -> None:
        line, is_list = key.start_mark.line + 1, node.id == "sequence"
        items = node.value if is_list else [node]
        where = f"{self.path}:{line}: {str(key.value)[:100]}"
        if any(one.id != "scalar" for one in (key, *items)):
            self.problems.append(f"{where}: not an option; expected a value or a list of values")
            return
        name = key.value.lstrip("-").replace("_", "-")
        if name in self.entries:
            self.problems.append(f"{where}: set twice; also in line {self.entries[name].line}")
        values = [None if one.style is None and one.value.lower() in _NULL else one.value for one in items]
        self.entries[name] = _Entry(key.value, line, values, is_list)


def add_options(
    parser: Parser,
    options: Sequence[Option],
    file: ConfigFile,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    *,
    without: Collection[str] = (),
) -> dict[str, Any]:
    """Adds an argument for each option, and `--config`. Returns the options that the file sets.

    Args:
        parser: reports what is wrong with the file.
        options: the options.
        file: the file of `--config`.
        defaults: other defaults than those of the options.
        without: options that get no argument.
    """
    found = file.options(options)
    values = {**({one.name: None for one in options} if file.problems else {}), **defaults, **found}
    shown = [one for one in options if one.name not in without]
    add_arguments(parser, (one._replace(default=values.get(one.name, one.default)) for one in shown))
    file.refuse_others(options, parser.hint)
    parser.problems += file.problems
    parser.group("Steps, checkpoints and the log").add_argument(
        "--config",
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="YAML file of options with these names; arguments replace them. Each run writes its own, OUTPUT/run.yaml",
    )
    return found


def run_script(main: Callable[[T], int], options_class: type[T], defaults: Mapping[str, Any]) -> int:
    """Runs a recipe as a script, with the arguments of the command line. Returns the exit code.

    Args:
        main: the recipe. Errors of the user that it raises are printed as one line each.
        options_class: the class of its options.
        defaults: options of the script, which those of a file --config replace. Arguments replace both.
    """
    parser = Parser(description="Runs this recipe; each option replaces its default in the file.")
    of_file = add_options(parser, options_of(options_class), ConfigFile(early_value("--config")), defaults)
    parsed = vars(parser.parse_args())
    parsed.pop("config", None)
    try:
        return main(options_class(**{**defaults, **of_file, **parsed}))
    except Exception as error:
        lines = lines_for_user(error, lambda one: in_flags(one, parser.flags))
        if not lines:
            raise
        print(*(f"{parser.prog}: error: {line}" for line in lines), sep="\n", file=sys.stderr)
        return 1


def early_value(flag: str, arguments: Sequence[str] | None = None) -> str | None:
    """Returns the value of an option on which the others depend; None if it is not given."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(flag, nargs="?", dest="value")
    value: str | None = parser.parse_known_args(arguments)[0].value
    return value


def write_options(directory: Path, options: object) -> None:
    """Writes the options of a run, a dataclass, to a file with which `--config` repeats it."""
    import yaml

    from ligerzoo.files.atomic import replace_files  # imports torch

    listed = [one for one in options_of(type(options)) if one.name not in _NOT_STORED]
    lines = ["# The options of this run. `ligerzoo train --config FILE --output OTHER` repeats it.\n"]
    for group, members in groupby(listed, key=lambda one: one.group):
        present = [one for one in members if getattr(options, one.name) is not None]
        values = ((one, getattr(options, one.name)) for one in present)
        given = {one.flag[2:]: [*value] if one.is_tuple else value for one, value in values}
        if given:
            lines += [f"\n# {group}\n", yaml.safe_dump(given, sort_keys=False, allow_unicode=True)]
    replace_files(directory, {CONFIG_FILE: "".join(lines).encode()}, ())


def _parsed(one: Option, entry: _Entry) -> Any:
    """Returns the value of an option. Raises ArgumentTypeError if it is not one."""
    if entry.values == [None] and not entry.is_list and (one.is_optional or one.default is not dataclasses.MISSING):
        return None if one.is_optional else one.default
    if (entry.is_list and not one.is_tuple) or not entry.values or None in entry.values:
        got = "a list" if entry.is_list and entry.values else "nothing"
        raise argparse.ArgumentTypeError(f"got {got}; expected {one.values.expected}")
    texts = [text for text in entry.values if text is not None]
    if one.values is FLAG:
        if (word := texts[0].lower()) not in _WORDS:
            raise argparse.ArgumentTypeError(f"got {texts[0]!r}; expected true or false")
        return _WORDS[word]
    try:
        values = tuple(map(argument_type(one.values), texts))
    except argparse.ArgumentTypeError as error:
        near = did_you_mean(texts[0], one.values.choices)
        raise argparse.ArgumentTypeError(f"{error}. {near}" if near else str(error)) from None
    return values if one.is_tuple else values[0]
