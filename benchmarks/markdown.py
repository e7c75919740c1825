"""Markdown of the reports: paragraphs, tables and numbers."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.measure import PACKAGES

Json = dict[str, Any]


def paragraph(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *lines])


def bold(text: str, condition: bool) -> str:
    return f"**{text}**" if condition else text


def number(value: float | None) -> str:
    """Three digits; empty for None."""
    if value is None:
        return ""
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits + (value < 1)}f}"


def measured_on(*results: Json) -> str:
    """The GPUs and package versions of these results."""

    def values(key: str) -> str:
        found = dict.fromkeys(result["environment"].get(key, "not installed") for result in results)
        return " and ".join(value for value in found if value != "not installed")

    versions = ", ".join(f"{package} {values(package)}" for package in PACKAGES if values(package))
    return f"{values('gpu')}; {versions}"
