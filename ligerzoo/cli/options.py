"""Options that several commands share, and the types that check their values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from ligerzoo.arguments import LOCATION, Parser, expanded_path
from ligerzoo.checks import TEXT, argument_type, integer

Subparsers: TypeAlias = "argparse._SubParsersAction[Parser]"
Command = Callable[[argparse.Namespace], int]

DEFAULT_BATCH_SIZE = 32
MODEL_HELP = 'checkpoint in Hugging Face format: a directory, or a hub id such as "org/name"'

GENERATED_TOKENS, ANSWER_TOKENS = 128, 1024
"""Largest number of new tokens of `generate` and `chat`, unless generation_config.json has one."""

_LARGEST = 2**31 - 1

PORT = argument_type(integer(0, 2**16 - 1))
COUNT = argument_type(integer(0, _LARGEST))
AT_LEAST_1 = argument_type(integer(1, _LARGEST))
AT_LEAST_2 = argument_type(integer(2, _LARGEST))
SEED = argument_type(integer(0, 2**63 - 1))
STOP = argument_type(TEXT)
PATH = argument_type(LOCATION)
"""The path of a file or directory, or a hub id."""


def add_parser(
    subparsers: Subparsers,
    run: Command,
    summary: str,
    epilog: str,
    check: Callable[[argparse.Namespace], None] = lambda options: None,
) -> Parser:
    """Adds the parser of a command.

    Args:
        subparsers: of all commands.
        run: the function that runs the command, after whose name it is named.
        summary: what the command does, in lower case.
        epilog: examples and notes.
        check: completes the options, and raises SystemExit if they exclude each other or one is missing.
    """
    parser = subparsers.add_parser(
        run.__name__,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=epilog,
    )
    parser.commands = subparsers._name_parser_map
    parser.set_defaults(run=run, check=check, parser=parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def add_option(
    parser: argparse._ActionsContainer,
    flag: str,
    kind: Callable[[str], object],
    description: str,
    default: object = None,
    metavar: str = "N",
    *,
    repeats: bool = False,
    dest: str | None = None,
    choices: Collection[str] | None = None,
) -> None:
    """Adds an option with a value. The help names its default.

    Args:
        parser: the parser, or a group of its options.
        flag: such as "--port".
        kind: converts and checks the text.
        description: the help.
        default: the default; None for none, or for one that the description says.
        metavar: the value in the help.
        repeats: collect the values of an option that may be repeated.
        dest: name of the parsed value, if it is not that of the option.
        choices: the only values; None for any that `kind` accepts.
    """
    shown = "" if default is None else " (default: %(default)s)"
    several = {"action": "append", "default": []} if repeats else {"default": default}
    given: dict[str, Any] = several if kind is str else {"type": kind, **several}
    parser.add_argument(flag, metavar=metavar, dest=dest, choices=choices, help=description + shown, **given)


SHARED: Mapping[str, tuple[str | None, Mapping[str, Any]]] = {
    "model": (None, {"metavar": "MODEL", "type": PATH, "help": MODEL_HELP}),
    "--revision": ("model", {"help": "branch, tag or commit on the hub"}),
    "--adapter": (
        "model",
        {
            "type": PATH,
            "metavar": "DIR",
            "help": "directory or hub id of a LoRA adapter of PEFT; given as MODEL, it runs with its base",
        },
    ),
    "--import": (
        "model",
        {
            "type": PATH,
            "action": "append",
            "default": [],
            "dest": "import_",
            "metavar": "FILE.py",
            "help": "Python file or module to import first, which may register own model classes; may be repeated",
        },
    ),
    "--dtype": (
        "model",
        {
            "choices": ("auto", "float32", "bfloat16", "float16", "float64"),
            "default": "auto",
            "help": "dtype of the weights (default: as stored)",
        },
    ),
    "--device": ("model", {"help": "cpu, cuda or cuda:1 (default: the first GPU, else cpu)"}),
    "--cache-dtype": (
        "model",
        {
            "choices": ("auto", "float8_e4m3fn"),
            "default": "auto",
            "help": "dtype of the KV cache: float8_e4m3fn has half the memory of bfloat16 (default: that of keys and "
            "values)",
        },
    ),
    "--chat-template": (
        "model",
        {
            "type": expanded_path,
            "metavar": "FILE",
            "help": "jinja file instead of the model's template",
        },
    ),
    "--map": (
        "data",
        {
            "type": PATH,
            "action": "extend",
            "nargs": "+",
            "default": [],
            "metavar": "FIELD=COLUMN",
            "help": "columns by our names of fields, such as prompt=question",
        },
    ),
    "--special-tokens": (
        "data",
        {
            "choices": ("text", "control"),
            "default": "text",
            "help": "what special tokens mean that are written in texts: their characters, or control tokens "
            "(default: %(default)s)",
        },
    ),
    "--max-shard-size": (
        "output",
        {"default": "5GB", "metavar": "SIZE", "help": "largest size of a weight file (default: %(default)s)"},
    ),
}
"""Arguments of several commands: their group, and their settings."""


def add_shared(parser: Parser, *names: str) -> None:
    """Adds arguments of `SHARED`."""
    for name in names:
        group, settings = SHARED[name]
        (parser if group is None else parser.group(group)).add_argument(name, **settings)
