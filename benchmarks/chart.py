"""Bar charts as SVG: groups of bars, a vertical line that they are compared with, and a note next to each bar."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from benchmarks.row import OURS

STYLE = """\
text { font: 12px sans-serif; fill: #222 } .label { text-anchor: end } .small { font-size: 10px }
.ours { fill: #d1495b } .peer { fill: #b8b8b8 } .line { stroke: #222 } .break { stroke: #fff; stroke-width: 2 }"""
WIDE, NARROW = 7.0, 6.0  # pixels of a character: at least those of most in 12px and 10px sans-serif
BARS, GAP, MARGIN = 360, 10, 8  # width of the column of bars; between groups; around text
BAR, THICKNESS = 13, 10  # distance of bars, and their height
HEAD = 48  # height of title and legend


class Bar(NamedTuple):
    """A bar of one provider: its length, and the text next to it, before the provider's name."""

    provider: str
    value: float
    note: str

    @property
    def text(self) -> str:
        return f"{self.note} {self.provider}"

    @property
    def kind(self) -> str:
        return "ours" if self.provider.split(",")[0].split(" ")[0] == OURS else "peer"


class Group(NamedTuple):
    """Bars of one workload, with its label."""

    label: str
    bars: Sequence[Bar]


def bar_chart(title: str, line: str, groups: Sequence[Group], longest: float | None = None) -> str:
    """Returns an SVG of groups of bars, with a vertical line at 1. Empty without any.

    Args:
        title: what the bars show.
        line: what the line shows.
        groups: the bars, from top to bottom.
        longest: the value at which the column of bars ends; a longer bar has a break. Default: that of the longest bar.
    """
    if not groups:
        return ""
    left = MARGIN + WIDE * max(len(group.label) for group in groups) + MARGIN
    longest = longest or max(1.0, *(bar.value for group in groups for bar in group.bars))
    scale = BARS / longest
    at_one, end = left + scale, left + BARS
    drawn, top, right = [], float(HEAD), left + WIDE * len(title)
    for group in groups:
        middle = top + (BAR * len(group.bars) - (BAR - THICKNESS)) / 2 + 4
        drawn.append(f'<text class="label" x="{left - MARGIN:.0f}" y="{middle:.0f}">{escape(group.label)}</text>')
        for bar in group.bars:
            width = min(bar.value, longest) * scale
            note = max(left + width, at_one) + 4  # beyond the line, which crosses no text
            right = max(right, note + NARROW * len(bar.text))
            drawn.append(
                f'<rect class="{bar.kind}" x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{THICKNESS}"/>'
                f'<text class="small" x="{note:.0f}" y="{top + 9:.0f}">{escape(bar.text)}</text>'
            )
            if bar.value > longest:
                drawn += [break_at(end - shift, top) for shift in (18, 12)]
            top += BAR
        top += GAP
    bottom, width = top - GAP, right + MARGIN
    legend = [f'<text x="{left:.0f}" y="14">{escape(title)}</text>']
    for kind, x, name in (("ours", left, OURS), ("peer", left + 84, "others")):
        legend.append(f'<rect class="{kind}" x="{x:.0f}" y="22" width="{THICKNESS}" height="{THICKNESS}"/>')
        legend.append(f'<text x="{x + 14:.0f}" y="31">{name}</text>')
    legend.append(f'<line class="line" x1="{left + 160:.0f}" x2="{left + 160:.0f}" y1="21" y2="33"/>')
    legend.append(f'<text x="{left + 168:.0f}" y="31">{escape(line)}</text>')
    width = max(width, left + 168 + WIDE * len(line) + MARGIN)
    size = f'width="{width:.0f}" height="{top:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {top:.0f}" {size}>',
            f'<style>{STYLE}</style><rect {size} fill="white"/>',
            *legend,
            *drawn,
            f'<line class="line" x1="{at_one:.0f}" x2="{at_one:.0f}" y1="{HEAD - 4}" y2="{bottom:.0f}"/>',
            "</svg>",
            "",
        ]
    )


def break_at(x: float, top: float) -> str:
    """Returns a slanted gap in a bar that is longer than the chart."""
    return f'<line class="break" x1="{x - 2:.0f}" x2="{x + 3:.0f}" y1="{top + THICKNESS + 1:.0f}" y2="{top - 1:.0f}"/>'
