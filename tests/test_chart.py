"""Bar charts of the benchmarks: colours, the line, long bars and the room for texts."""

from xml.etree import ElementTree

import pytest

from benchmarks.chart import NARROW, WIDE, Bar, Group, bar_chart

SVG = "{http://www.w3.org/2000/svg}"
BARS = [Bar("ligerzoo", 0.9, "9"), Bar("ligerzoo exact", 0.5, "5"), Bar("torch.compile", 13.5, "135")]


def drawn(bars: list[Bar], longest: float | None = None, name: str = "a workload") -> ElementTree.Element:
    return ElementTree.fromstring(bar_chart("a title", "a limit", [Group(name, bars)], longest))


def numbers(element: ElementTree.Element, *names: str) -> list[float]:
    return [float(element.attrib[name]) for name in names]


def test_our_providers_have_our_colour() -> None:
    kinds = [bar.kind for bar in (*BARS, Bar("ligerzoo, torch.compile", 1.0, ""), Bar("ligerzoot", 1.0, ""))]
    assert kinds == ["ours", "ours", "peer", "ours", "peer"]


@pytest.mark.parametrize("longest", [None, 1.0, 4.0])
def test_the_line_crosses_no_text_and_no_text_is_cut_off(longest: float | None) -> None:
    name = "a workload with a long name, 16 x 4096 x 128256"
    chart = drawn(BARS, longest, name)
    width, _ = numbers(chart, "width", "height")
    *_, line = chart.iterfind(f"{SVG}line[@class='line']")
    for text in chart.iterfind(f"{SVG}text"):
        [x, y], content = numbers(text, "x", "y"), text.text or ""
        length = len(content) * (NARROW if text.get("class") == "small" else WIDE)
        first, last = (x - length, x) if text.get("class") == "label" else (x, x + length)
        assert first >= 0
        assert last <= width
        if y > float(line.attrib["y1"]):
            assert not first < float(line.attrib["x1"]) < last, content


def test_a_bar_beyond_the_chart_has_a_break_and_its_value() -> None:
    assert len(list(drawn(BARS).iterfind(f"{SVG}line[@class='break']"))) == 0
    chart = drawn(BARS, 4.0)
    breaks = list(chart.iterfind(f"{SVG}line[@class='break']"))
    bars = [numbers(bar, "x", "width") for bar in chart.iterfind(f"{SVG}rect") if float(bar.get("y", 0)) > 40]
    assert len(breaks) == 2
    assert max(width for _, width in bars) == bars[2][1] == 360
    assert bars[2][0] < float(breaks[0].attrib["x1"]) < sum(bars[2])
    assert "135 torch.compile" in {text.text for text in chart.iterfind(f"{SVG}text")}


def test_a_chart_without_groups_is_empty() -> None:
    assert bar_chart("a title", "a limit", []) == ""
