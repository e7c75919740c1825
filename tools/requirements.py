"""The bounds of pyproject.toml: requirements at the ends of what was tested.

    python tools/requirements.py newest integrations,serve   # without upper bounds
    python tools/requirements.py oldest integrations,serve   # at the lower bounds

A package with an upper bound is one whose new versions break us. These are tested at their lowest and highest minor
version; pip chooses the versions of all others. Runs without ligerzoo being installed.
"""

import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"

BOUNDED = re.compile(r"(?P<name>[\w.-]+)>=(?P<lower>[\d.]+),<(?P<upper>[\d.]+)")


class Bounds(NamedTuple):
    """The tested versions of a package: from `lower` to before `upper`."""

    name: str
    lower: str
    upper: str

    def __str__(self) -> str:
        major, minor = map(int, self.upper.split("."))
        newest = f"{major}.{minor - 1}"
        is_one = self.lower.split(".")[:2] == newest.split(".")
        return f"{self.name} {self.lower}" if is_one else f"{self.name} {self.lower} to {newest}"


def bounds_of(pyproject: str) -> dict[str, Bounds]:
    """Returns the bounds of each package that has both, by name.

    Raises:
        ValueError: extras have different bounds of a package.
    """
    found: dict[str, Bounds] = {}
    for match in BOUNDED.finditer(pyproject):
        bounds = Bounds(**match.groupdict())
        first = found.setdefault(bounds.name, bounds)
        if first != bounds:
            ranges = f">={first.lower},<{first.upper} and >={bounds.lower},<{bounds.upper}"
            raise ValueError(f"pyproject.toml: {bounds.name}: {ranges}; expected one range")
    return found


def with_newest(pyproject: str, versions: dict[str, str]) -> str:
    """Returns the text with upper bounds raised to the minor version after each of `versions`."""

    def raised(match: re.Match[str]) -> str:
        major, minor = map(int, versions[match["name"]].split(".")[:2])
        upper = max((major, minor + 1), tuple(map(int, match["upper"].split("."))))
        return f"{match['name']}>={match['lower']},<{upper[0]}.{upper[1]}"

    return BOUNDED.sub(raised, pyproject)


def readme_line(pyproject: str) -> str:
    """Returns the line of README.md."""
    ranges = [str(bounds) for bounds in bounds_of(pyproject).values()]
    return f"Tested with {', '.join(ranges[:-1])} and {ranges[-1]}."


def requirements(pyproject: str, extras: list[str], end: str) -> Iterator[str]:
    """Yields the requirements of the package and of extras, for "newest" or "oldest"."""
    project = tomllib.loads(pyproject)["project"]
    replace: dict[str, Callable[[re.Match[str]], str]] = {
        "newest": lambda match: f"{match['name']}>={match['lower']}",
        "oldest": lambda match: f"{match['name']}=={match['lower']}.*",
    }
    groups = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    for requirement in chain(*groups):
        yield BOUNDED.sub(replace[end], requirement)


if __name__ == "__main__":
    print("\n".join(requirements(PYPROJECT.read_text(encoding="utf-8"), sys.argv[2].split(","), sys.argv[1])))
