"""The standard streams of the command line."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import TextIO

from ligerzoo.arguments import in_flags
from ligerzoo.errors import LigerzooError


def prepare_streams() -> None:
    """Sets the error handlers of the standard streams, for text that is invalid in the terminal's encoding.

    Raises:
        LigerzooError: standard output is closed.
    """
    if sys.stdout is None:
        raise LigerzooError("standard output is closed", remedy="Redirect it to /dev/null to discard it.")
    if isinstance(sys.stdout, io.TextIOWrapper):  # replaces what the terminal cannot encode
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):  # the tokenizer refuses invalid text
        sys.stdin.reconfigure(errors="surrogateescape")


def standard_input() -> TextIO:
    """Returns standard input; raises LigerzooError if it is closed."""
    if sys.stdin is None:
        remedy = "Pass the text with --prompt, or redirect a file or pipe."
        raise LigerzooError("standard input is closed", remedy=remedy)
    return sys.stdin


def input_lines(hint: str) -> Iterator[str]:
    """Yields the lines of standard input that are not blank. On a terminal, prints a hint first and prompts."""
    prompt = ""
    if standard_input().isatty():
        import readline  # noqa: F401  # gives input() editing and a history

        prompt = "you> "
        print(hint, file=sys.stderr)
    with contextlib.suppress(EOFError):
        while True:
            if line := input(prompt).strip():
                yield line


@contextlib.contextmanager
def warnings_as_lines(flags: Mapping[str, str]) -> Iterator[None]:
    """Prints each warning in the block as a line on standard error, with options as on the command line.

    Args:
        flags: see `in_flags`.
    """
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(
            "warning:", in_flags(LigerzooError(str(message)), flags), file=sys.stderr
        )
        yield
