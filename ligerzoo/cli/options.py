"""Options that several commands share, and the types that check their values."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
from typing import Any, TypeAlias

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Command = Callable[[argparse.Namespace], int]

DEFAULT_BATCH_SIZE = 32
MODEL_HELP = 'checkpoint in Hugging Face format: a directory, or a hub id such as "org/name"'


def number_in_range(
    number_type: Callable[[str], Any], expected: str, is_valid: Callable[[Any], bool]
) -> Callable[[str], Any]:
    """Returns an argparse type that checks a number before anything is loaded."""

    def parse_number(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if is_valid(number := number_type(text)):
                return number
        raise argparse.ArgumentTypeError(f"got {text[:50]!r}; expected {expected}")

    return parse_number


def stop_text(text: str) -> str:
    """An argparse type: a text that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("got ''; expected a text that is not empty")
    return text


PORT = number_in_range(int, "an integer from 0 to 65535", lambda number: 0 <= number < 2**16)
COUNT = number_in_range(int, "an integer from 0 to 2**31 - 1", lambda number: 0 <= number < 2**31)
AT_LEAST_1 = number_in_range(int, "an integer from 1 to 2**31 - 1", lambda number: 0 < number < 2**31)
AT_LEAST_2 = number_in_range(int, "an integer from 2 to 2**31 - 1", lambda number: 1 < number < 2**31)
SEED = number_in_range(int, "an integer from 0 to 2**63 - 1", lambda number: 0 <= number < 2**63)
POSITIVE = number_in_range(float, "a positive number", lambda number: 0 < number < math.inf)
NOT_NEGATIVE = number_in_range(float, "a number, 0 or more", lambda number: 0 <= number < math.inf)
TOP_P = number_in_range(float, "a number greater than 0 and at most 1", lambda number: 0 < number <= 1)
MIN_P = number_in_range(float, "a number from 0 to 1", lambda number: 0 <= number <= 1)


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


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_revision_option(parser)


def add_revision_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--revision", help="branch, tag or commit on the hub")


def add_image_option(parser: argparse.ArgumentParser, description: str) -> None:
    parser.add_argument("--image", action="append", default=[], metavar="FILE", help=description)


def add_dtype_option(parser: argparse.ArgumentParser) -> None:
    names = ("auto", "float32", "bfloat16", "float16", "float64")
    parser.add_argument("--dtype", choices=names, default="auto", help="dtype of the weights (default: as stored)")


def add_device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda or cuda:1 (default: the first GPU, else cpu)")
