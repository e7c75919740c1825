"""The README: its length, and figures that docs/benchmarks.md has, too."""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import readme_report, report

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = report.read_results(ROOT / report.RESULTS)
LINES = readme_report.peer_table(RESULTS)[0].splitlines()[2:]


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 110
    assert README.count("![") == 1
    [code] = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert len([line for line in code.splitlines() if line]) == 8
    [_, commands] = re.findall(r"^```sh\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert [line.split()[1] for line in commands.splitlines()] == ["generate", "chat", "serve", "train"]


def test_every_figure_was_measured() -> None:
    assert len(LINES) == len(readme_report.FIGURES) + 1


@pytest.mark.parametrize("line", LINES)
def test_the_figures_are_those_of_the_benchmarks(line: str) -> None:
    """The tables of docs/benchmarks.md round some numbers to other digits."""
    docs = report.all_figures(RESULTS)
    _, _, ours, theirs, _, _ = line.split("|")
    for cell in (ours, theirs):
        figure = float(cell.split()[0].replace("*", "").replace(",", ""))
        assert any(text in docs for text in (f"{figure:,.0f}", f"{figure:.1f}", f"{figure:.2f}")), cell


def test_the_factor_is_above_1_if_ours_is_better() -> None:
    workload: dict[str, Any] = {
        "environment": {"gpu": "some GPU"}, "model": "llama_8b", "adapted": False, "batch": 2, "length": 8,
        "providers": {
            "ligerzoo": {"tokens_per_s": 3000.0, "peak_gib": 50.0},
            "ligerzoo exact": {"tokens_per_s": 9000.0, "peak_gib": 1.0},
            "a": {"tokens_per_s": 2000.0, "peak_gib": 25.0},
            "b": {"tokens_per_s": 1000.0, "peak_gib": 10.0},
        },
    }  # fmt: skip
    speed, memory = readme_report.FIGURES[:2]
    assert readme_report.peer_line(speed, workload) == [
        "training, Llama-3-8B, 2 x 8, tokens/s", "**3,000**", "2,000 a", "1.50"
    ]  # fmt: skip
    assert readme_report.peer_line(memory, workload) == ["its peak memory, GiB", "50.0", "10.0 b", "0.20"]
    del workload["providers"]["a"], workload["providers"]["b"]
    assert readme_report.peer_line(speed, workload) == []
