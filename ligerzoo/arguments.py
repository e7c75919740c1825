"""Command lines: a parser that names all mistakes, each in one line, and the words of errors in which options occur.

This module does not import torch.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ligerzoo.checks import TEXT
from ligerzoo.errors import LigerzooError, did_you_mean
from ligerzoo.foreign_names import our_flag

LOCATION = TEXT._replace(parse=os.path.expanduser)
"""Paths of files and directories, and hub ids. On the command line, "~" is the home directory."""


def expanded_path(text: str) -> Path:
    """Returns a path of the command line, in which "~" is the home directory."""
    return Path(text).expanduser()


class Parser(argparse.ArgumentParser):
    """A parser of a command line. It names all mistakes at once, each in one line, with the nearest name.

    Attributes:
        problems: mistakes that were found before the one that ends the parsing.
        commands: the parsers of all commands, by name; none if the program has no commands.
        other_hint: returns a further remedy for an option that does not exist; None for none.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self.problems: list[str] = []
        self.commands: Mapping[str, Parser] = {}
        self.other_hint: Callable[[str], str | None] = lambda flag: None
        self._own_groups: dict[str, argparse._ArgumentGroup] = {}
        self._several: dict[str, list[str]] = {}  # the values of options that have more than one

    def group(self, title: str, description: str | None = None) -> argparse._ArgumentGroup:
        """Returns the group of options with this title, which is added if it does not exist."""
        if title not in self._own_groups:
            self._own_groups[title] = self.add_argument_group(title, description)
        return self._own_groups[title]

    @property
    def flags(self) -> dict[str, str]:
        """The options by the names of their values."""
        long = {one.dest: [flag for flag in one.option_strings if flag.startswith("--")] for one in self._actions}
        return {name: flags[0] for name, flags in long.items() if flags}

    def hint(self, flag: str) -> str:
        """Returns what to do about an option that does not exist."""
        accepted = [flag for flag in self._option_string_actions if flag.startswith("--") and flag != "--help"]
        positional = [str(one.metavar) for one in self._actions if not one.option_strings]
        if (name := flag.lstrip("-").upper()) in positional:
            return f"Give {name} without a flag."
        ours = our_flag(flag, [*accepted, *positional])
        meant = f"Did you mean {ours!r}?" if ours else self.other_hint(flag) or did_you_mean(flag, accepted)
        commands = [f"`{other.prog}`" for other in self.commands.values() if flag in other._option_string_actions]
        elsewhere = f"{flag} is an option of {', '.join(commands)}." if commands else None
        return " ".join(filter(None, (meant, elsewhere))) or f"`{self.prog} --help` lists the options."

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        arguments = sys.argv[1:] if args is None else [*args]
        required = [one for one in self._actions if one.required and one.nargs != argparse.PARSER]
        groups = [group for group in self._mutually_exclusive_groups if group.required]
        is_help = not {"-h", "--help"}.isdisjoint(arguments)
        for one in required:  # those that are missing are named below, together with what is unknown
            one.required = is_help
        for group in groups:
            group.required = is_help
        found, unknown = super().parse_known_args(arguments, namespace)
        words: list[str] = []
        for word in [*unknown, "--"]:
            if word.startswith("--") and words:
                text = " ".join(words)
                self.problems.append(f"unrecognized arguments: {text}. {self.hint(words[0].partition('=')[0])}")
                words = []
            words.append(word)
        absent = [one for one in required if getattr(found, one.dest, None) is None]
        refused = {line.split()[1].rstrip(":") for line in self.problems if line.startswith("argument ")}
        names = [one.option_strings[0] if one.option_strings else str(one.metavar) for one in absent]
        if missing := [name for name in names if name not in refused]:
            self.problems.append(self.missing(missing))
        for group in groups:
            options = {
                action.option_strings[0] if action.option_strings else str(action.metavar): action
                for action in group._group_actions
            }
            is_given = any(getattr(found, one.dest, None) != one.default for one in options.values())
            if not is_given and refused.isdisjoint(options):
                self.problems.append(f"one of the arguments {' '.join(options)} is required")
        if self.problems:
            self.error(self.problems.pop())
        return found, []

    def missing(self, names: Sequence[str]) -> str:
        """Returns the message about missing arguments, with the options that may have taken one among their values."""
        message = f"the following arguments are required: {', '.join(names)}"
        positional = [name for name in names if not name.startswith("-")]
        if not positional or not self._several:
            return message
        taken = " and ".join(f"{flag} took {', '.join(map(repr, values))}" for flag, values in self._several.items())
        return f"{message}. {taken}: give {' '.join(positional)} first"

    def error(self, message: str) -> NoReturn:
        """Prints all mistakes, and exits with code 2."""
        for line in (*self.problems, message):
            print(f"{self.prog}: error: {' '.join(line.split())}", file=sys.stderr)
        self.exit(2)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action.option_strings and len(arg_strings) > 1:
            self._several.setdefault(action.option_strings[0], []).extend(arg_strings)
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            if action.nargs == argparse.PARSER:  # without a command there is nothing else to check
                raise
            self.problems.append(str(error))
            return [] if action.nargs == argparse.ONE_OR_MORE else None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(one) for one in action.choices]
            near = did_you_mean(value, names)
            expected = f"got {value!r}; expected one of {', '.join(names)}"
            raise argparse.ArgumentError(action, f"{expected}. {near}" if near else expected)


def in_flags(error: LigerzooError, flags: Mapping[str, str]) -> LigerzooError:
    """Returns an error about options in the words of the command line: `option max_steps` becomes --max-steps.

    Args:
        error: the error.
        flags: options by the names that the error may use.
    """
    if str(error.replaced()) != str(error):  # its message has other parts
        return error
    one = "|".join(sorted(map(re.escape, flags), key=len, reverse=True)) or "(?!)"
    option = re.compile(rf"\b(?:options?|argument) ((?:{one})(?:(?:, | and )(?:{one}))*)(?![\w.(])")
    value = re.compile(rf"(?<!--map )(?<![\w.'\"-])({one})=(['\"]?)([\w.+-]+)\2")
    name = re.compile(rf"(?<!--map )(?<![\w.'\"-])({one})=|(?<![\w./'\"-])([a-z]+(?:_[a-z]+)+)(?![\w/'\":]|\.\w)")

    def words(part: object) -> object:
        if part is None:
            return None
        text = option.sub(lambda found: re.sub(one, lambda inner: flags[inner[0]], found[1]), str(part))
        text = value.sub(lambda found: f"{flags[found[1]]} {found[3]}", text)
        return name.sub(lambda found: flags.get(found[1] or found[2], found[0]), text)

    where, got = str(error.where), error.got
    if (last := where.rpartition(": ")[2]) in flags and not re.search(r"[/\\]|\.\w|:\d", where):
        where = flags[last]
    if where != error.where or option.search(where):
        where, got = str(words(where)), words(got)  # of other errors, these are parts of files
    changed = {"what": words(error.what), "expected": words(error.expected), "remedy": words(error.remedy)}
    return error.replaced(where=None if error.where is None else where, got=got, **changed)
