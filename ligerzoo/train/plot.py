"""Draws the loss and other numbers of a run as SVG files, from OUTPUT/log.jsonl. Needs no other package."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from ligerzoo.files.atomic import replace_files
from ligerzoo.train import processes
from ligerzoo.train.log import read_log
from ligerzoo.train.run_state import LOG_FILE

WIDTH, HEIGHT = 800, 450
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 30, 50
MAX_POINTS = 1000
"""A longer curve is drawn through means of neighbouring points."""

Points = Sequence[tuple[float, float]]


def plot_metric(output: Path, name: str = "loss", unit: str = "loss, nats per token") -> None:
    """Draws a number of the steps and the evaluations of a run as OUTPUT/NAME.svg. Only the main process does.

    Args:
        name: name of the number in the log.
        unit: label of its axis.
    """
    if not processes.is_main():
        return
    entries = read_log(output / LOG_FILE)
    curves = {
        label: [(entry["step"], entry[key]) for entry in entries if entry.get(key) is not None]
        for label, key in (("training", name), ("evaluation", f"eval_{name}"))
    }
    if curves["training"]:
        replace_files(output, {f"{name}.svg": plot_svg(curves, x="step", y=unit).encode()}, [])


def plot_svg(curves: Mapping[str, Points], *, x: str, y: str) -> str:
    """Returns a plot as SVG.

    Args:
        curves: points of each curve by its label, with finite coordinates; empty curves are left out.
        x: label of the x axis.
        y: label of the y axis.
    """
    curves = {label: thinned(points) for label, points in curves.items() if points}
    every = [point for points in curves.values() for point in points]
    x_ticks, y_ticks = (ticks([point[axis] for point in every]) for axis in (0, 1))

    def at(point: tuple[float, float]) -> tuple[float, float]:
        across, up = (
            (value - axis[0]) / (axis[-1] - axis[0]) for value, axis in zip(point, (x_ticks, y_ticks), strict=True)
        )
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = []
    for tick in x_ticks:
        across, low = at((tick, y_ticks[0]))
        parts.append(f'<line x1="{across:.1f}" y1="{TOP}" x2="{across:.1f}" y2="{low:.1f}" stroke="#ddd"/>')
        parts.append(text(across, low + 18, f"{tick:g}", "middle"))
    for tick in y_ticks:
        left, up = at((x_ticks[0], tick))
        parts.append(f'<line x1="{left:.1f}" y1="{up:.1f}" x2="{WIDTH - RIGHT}" y2="{up:.1f}" stroke="#ddd"/>')
        parts.append(text(left - 8, up + 4, f"{tick:g}", "end"))
    for index, (label, points) in enumerate(curves.items()):
        color = ("#1f6fb4", "#d9590b", "#2a8f3c")[index % 3]
        line = " ".join("{:.1f},{:.1f}".format(*at(point)) for point in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        if len(points) < 50:
            dots = ['<circle cx="{:.1f}" cy="{:.1f}" r="2.5"/>'.format(*at(point)) for point in points]
            parts += [f'<g fill="{color}">', *dots, "</g>"]
        parts.append(text(WIDTH - RIGHT, TOP + 16 * (index + 1), label, "end", color))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x, "middle"))
    parts.append(text(LEFT, TOP - 12, y, "middle"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>' + "\n".join(parts) + "</svg>\n"
    )


def text(x: float, y: float, content: str, anchor: str, color: str = "#333") -> str:
    """Returns an SVG text that starts, ends or has its middle at a point."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(content)}</text>'


def ticks(values: Sequence[float]) -> list[float]:
    """Returns about five round numbers that enclose the values."""
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, 12) for number in range(first, last + 1)]


def thinned(points: Points) -> Points:
    """Returns at most `MAX_POINTS` points: means of neighbouring ones."""
    size = math.ceil(len(points) / MAX_POINTS)
    groups = (points[start : start + size] for start in range(0, len(points), size))
    return [(sum(p[0] for p in group) / len(group), sum(p[1] for p in group) / len(group)) for group in groups]
