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
LEFT, RIGHT, TOP, BOTTOM = 70, 40, 40, 50
MAX_POINTS = 1000
"""A longer curve is drawn through means of neighbouring points."""

SPIKE = 3
"""A value is a spike if it is further from the others than this many times their range."""

MAX_LABELS = 8
"""A curve with more spikes has no labels of their values."""

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
    shown = without_spikes([[y for _, y in points] for points in curves.values()])
    x_ticks, y_ticks = ticks([x for x, _ in every], least_step=1), ticks(shown)

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
        inside = [(step, min(max(value, y_ticks[0]), y_ticks[-1])) for step, value in points]
        line = " ".join("{:.1f},{:.1f}".format(*at(point)) for point in inside)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        if len(points) < 50:
            dots = ['<circle cx="{:.1f}" cy="{:.1f}" r="2.5"/>'.format(*at(point)) for point in inside]
            parts += [f'<g fill="{color}">', *dots, "</g>"]
        cut = [(point, value) for point, (_, value) in zip(inside, points, strict=True) if point[1] != value]
        for point, value in cut if len(cut) <= MAX_LABELS else ():
            across, up = at(point)
            arrow, down = ("\N{UPWARDS ARROW}", 14) if value > point[1] else ("\N{DOWNWARDS ARROW}", -6)
            shift, anchor = (6, "start") if across < WIDTH / 2 else (-6, "end")
            parts.append(text(across + shift, up + down, f"{arrow} {value:.6g}", anchor, color))
        later = sum(7 * len(other) + 20 for other in [*curves][index + 1 :])
        parts.append(text(WIDTH - RIGHT - later, TOP - 20, label, "end", color))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x, "middle"))
    parts.append(text(10, TOP - 20, y, "start"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>' + "\n".join(parts) + "</svg>\n"
    )


def text(x: float, y: float, content: str, anchor: str, color: str = "#333") -> str:
    """Returns an SVG text that starts, ends or has its middle at a point."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(content)}</text>'


def without_spikes(curves: Sequence[Sequence[float]]) -> list[float]:
    """Returns the values that an axis should enclose: without those of single points far above or below the others.

    A point's spike does not change the median of the five points around it.
    """
    smooth = [sorted(values[max(0, i - 2) : i + 3]) for values in curves for i in range(len(values))]
    medians = [window[len(window) // 2] for window in smooth]
    margin = SPIKE * (max(medians) - min(medians))
    every = [value for values in curves for value in values]
    inside = [value for value in every if min(medians) - margin <= value <= max(medians) + margin]
    return inside if margin > 0 and len(inside) > len(every) / 2 else every


def ticks(values: Sequence[float], least_step: float = 0.0) -> list[float]:
    """Returns about five round numbers that enclose the values, at least `least_step` apart."""
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    rough = max((high - low) / 5, least_step)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, 12) for number in range(first, last + 1)]


def thinned(points: Points) -> Points:
    """Returns at most `MAX_POINTS` points: means of neighbouring ones."""
    size = math.ceil(len(points) / MAX_POINTS)
    groups = (points[start : start + size] for start in range(0, len(points), size))
    return [(sum(p[0] for p in group) / len(group), sum(p[1] for p in group) / len(group)) for group in groups]
