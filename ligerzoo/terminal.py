"""Colours and styles of text in a terminal."""

import os
import sys

BOLD, DIM, RED, GREEN = 1, 2, 31, 32
"""Codes of styles in ANSI escape sequences."""


def uses_color() -> bool:
    """Returns whether stdout is a terminal, and NO_COLOR is empty (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def styled(text: str, style: int) -> str:
    """Returns the text in a style."""
    return f"\033[{style}m{text}\033[0m"
