"""Output of the demos: sources of steps, results of checks and commands to try next."""

from __future__ import annotations

import inspect
import os
import textwrap
from collections.abc import Callable

from ligerzoo.terminal import BOLD, DIM, GREEN, RED, styled, uses_color


def print_step(title: str, step: Callable[..., object]) -> None:
    """Prints the title and the source of a step."""
    print(f"\n{_styled(title, BOLD)}\n")
    print(_styled(textwrap.indent(inspect.getsource(step), "    "), DIM), flush=True)


class Checks:
    """Prints and counts the results of checks.

    Attributes:
        total: number of checks.
        passed: number of checks that passed.
    """

    def __init__(self) -> None:
        self.total = self.passed = 0

    def add(self, claim: str, is_true: bool) -> None:
        """Prints whether a claim is true."""
        self.total += 1
        self.passed += is_true
        print(f"{_styled('✓', GREEN)} {claim}" if is_true else f"{_styled('✗', RED)} NOT TRUE: {claim}", flush=True)

    def finish(self, commands: list[tuple[str, str]]) -> int:
        """Prints the result, and commands to try next with their purpose. Returns the exit code: 1 if one failed."""
        print(f"\n{self.passed} of {self.total} checks passed.\n\n{_styled('Try next', BOLD)}")
        for purpose, command in commands:
            print(f"\n{_styled('# ' + purpose, DIM)}\n{command}")
        return 0 if self.passed == self.total else 1


def relative_path(path: str) -> str:
    """Returns a path inside the current directory relative to it, other paths unchanged."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative


def _styled(text: str, style: int) -> str:
    return styled(text, style) if uses_color() else text
