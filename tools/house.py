"""Draws the packages and their imports as docs/house.svg.

python -m tools.house           # writes the drawing
python -m tools.house --check   # exits with 1 if the imports have changed since it was drawn

An arrow points from a package to one that it imports. Left out are lazy imports, imports that follow from other arrows,
and the modules directly under ligerzoo, such as `errors` and `checks`, which any package may import.
"""

import argparse
import ast
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from statistics import mean
from textwrap import wrap
from xml.sax.saxutils import escape

from tools.structure import ROOT, Module, imports, modules

DRAWING = ROOT / "docs" / "house.svg"
WIDTH, HEIGHT, GAP, BEND, RISE = 180, 60, 30, 40, 110
"""Of a box, between boxes of a floor, of an arrow between boxes, and from floor to floor."""

Graph = Mapping[str, set[str]]


def packages(package: Mapping[str, Module]) -> dict[str, str]:
    """The packages, with the first words of their docstrings."""
    described = {}
    for name, module in package.items():
        parts = name.split(".")
        if len(parts) == 2 and module.path.name == "__init__.py":
            first = (ast.get_docstring(module.tree) or "").split("\n")[0]
            described[parts[1]] = re.split(r"[:.,(]", first.replace("`", ""))[0].strip()
    return described


def imported_packages(package: Mapping[str, Module], names: Mapping[str, str]) -> dict[str, set[str]]:
    """Which packages each package imports."""
    graph: dict[str, set[str]] = {name: set() for name in names}
    for name, module in package.items():
        importer = name.split(".")[1] if "." in name else ""
        if importer in graph:
            eager = [one.name for one in imports(module.tree) if not one.lazy]
            found = {name.split(".")[1] for name in eager if name.startswith("ligerzoo.")}
            graph[importer] |= (found & graph.keys()) - {importer}
    return graph


def floors(graph: Graph) -> dict[str, int]:
    """The floor of each package: one above the highest that it imports."""

    @cache
    def floor(name: str) -> int:
        return max((floor(other) + 1 for other in graph[name]), default=0)

    return {name: floor(name) for name in graph}


def direct(graph: Graph) -> dict[str, set[str]]:
    """The imports that do not follow from others."""

    @cache
    def reached(name: str) -> frozenset[str]:
        return frozenset(graph[name]).union(*map(reached, graph[name]))

    return {name: {one for one in graph[name] if not any(one in reached(o) for o in graph[name])} for name in graph}


def routes(arrows: Graph, level: Mapping[str, int]) -> list[list[str]]:
    """The stops of each arrow, one on each floor between its ends: names of packages, and of bends between boxes."""
    return [
        [name, *(f"{name} -> {other} {floor}" for floor in range(level[name] - 1, level[other], -1)), other]
        for name, others in sorted(arrows.items())
        for other in sorted(others)
    ]


def positions(stops: Sequence[Sequence[str]], level: Mapping[str, int]) -> dict[str, tuple[float, float]]:
    """The center of each box and bend, ordered on each floor so that few arrows cross."""
    neighbors: dict[str, list[str]] = {name: [] for name in level}
    rows: list[list[str]] = [[] for _ in range(max(level.values()) + 1)]
    for name, floor in sorted(level.items()):
        rows[floor].append(name)
    for route in stops:
        for one, other in pairwise(route):
            neighbors.setdefault(one, []).append(other)
            neighbors.setdefault(other, []).append(one)
        for i, bend in enumerate(route[1:-1], 1):
            rows[level[route[0]] - i].append(bend)
    x = {name: float(i) for row in rows for i, name in enumerate(row)}
    for step in range(60):
        for row in rows[:: 1 if step % 2 else -1]:
            row.sort(key=lambda name: (mean(x[one] for one in neighbors[name]) if neighbors[name] else 0.0, name))
            widths = [WIDTH + GAP if name in level else BEND for name in row]
            ends = list(accumulate(widths))
            for name, width, end in zip(row, widths, ends, strict=True):
                x[name] = end - (width + ends[-1]) / 2
    left = min(x[name] for name in x) - WIDTH / 2 - GAP
    return {
        name: (x[name] - left, (len(rows) - 1 - floor) * RISE + HEIGHT)
        for floor, row in enumerate(rows)
        for name in row
    }


def curve(points: Sequence[tuple[float, float]]) -> str:
    """The path from one box down to another, through the bends between them."""
    (x, y), (to_x, to_y) = points[0], points[-1]
    points = [(x, y + HEIGHT / 2), *points[1:-1], (to_x, to_y - HEIGHT / 2)]
    path = f"M{points[0][0]:.0f},{points[0][1]:.0f}"
    for (x, y), (to_x, to_y) in pairwise(points):
        middle = (y + to_y) / 2
        path += f" C{x:.0f},{middle:.0f} {to_x:.0f},{middle:.0f} {to_x:.0f},{to_y:.0f}"
    return path


def drawing() -> str:
    """The SVG."""
    package = modules()
    names = packages(package)
    graph = imported_packages(package, names)
    level = floors(graph)
    stops = routes(direct(graph), level)
    at = positions(stops, level)
    width, height = (max(values) for values in zip(*at.values(), strict=True))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + WIDTH / 2 + GAP:.0f} {height + HEIGHT:.0f}" '
        'font-family="sans-serif" text-anchor="middle">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#777"/></marker></defs>',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for route in stops:
        path = curve([at[stop] for stop in route])
        lines.append(f'<path d="{path}" fill="none" stroke="#777" marker-end="url(#head)"/>')
    for name in sorted(level):
        x, y = at[name]
        lines += [
            f'<rect x="{x - WIDTH / 2:.0f}" y="{y - HEIGHT / 2:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="6" '
            'fill="#eef3fb" stroke="#3b6fb6"/>',
            f'<text x="{x:.0f}" y="{y - 8:.0f}" font-size="15" font-weight="bold">{name}</text>',
        ]
        for i, line in enumerate(wrap(names[name], 32)[:2]):
            lines.append(f'<text x="{x:.0f}" y="{y + 9 + 12 * i:.0f}" font-size="10">{escape(line)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    if not parser.parse_args().check:
        DRAWING.write_text(drawing())
    elif DRAWING.read_text() != drawing():
        print(f"{DRAWING.relative_to(ROOT)} is not the drawing of the imports; run python -m tools.house")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
