"""Options that several commands share, and the types that check their values."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeAlias

from ligerzoo import checks
from ligerzoo.checks import argument_type, integer

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Command = Callable[[argparse.Namespace], int]

DEFAULT_BATCH_SIZE = 32
MODEL_HELP = 'checkpoint in Hugging Face format: a directory, or a hub id such as "org/name"'


_LARGEST = 2**31 - 1

PORT = argument_type(integer(0, 2**16 - 1))
COUNT = argument_type(integer(0, _LARGEST))
AT_LEAST_1 = argument_type(integer(1, _LARGEST))
AT_LEAST_2 = argument_type(integer(2, _LARGEST))
SEED = argument_type(integer(0, 2**63 - 1))
POSITIVE = argument_type(checks.POSITIVE)
STOP = argument_type(checks.TEXT)


def add_parser(
    subparsers: Subparsers,
    run: Command,
    summary: str,
    epilog: str,
    check: Callable[[argparse.Namespace], None] = lambda options: None,
) -> argparse.ArgumentParser:
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
    """
    shown = "" if default is None else " (default: %(default)s)"
    several = {"action": "append", "default": []} if repeats else {"default": default}
    given: dict[str, Any] = several if kind is str else {"type": kind, **several}
    parser.add_argument(flag, metavar=metavar, dest=dest, help=description + shown, **given)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_revision_option(parser)


def add_revision_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--revision", help="branch, tag or commit on the hub")


def add_image_option(parser: argparse.ArgumentParser, description: str) -> None:
    add_option(parser, "--image", str, f"{description}; may be repeated", metavar="FILE", repeats=True)


def add_dtype_option(parser: argparse.ArgumentParser) -> None:
    names = ("auto", "float32", "bfloat16", "float16", "float64")
    parser.add_argument("--dtype", choices=names, default="auto", help="dtype of the weights (default: as stored)")


def add_device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda or cuda:1 (default: the first GPU, else cpu)")
