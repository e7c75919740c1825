"""The README's table: figures of `docs/benchmarks.md` next to those of the best other provider."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from benchmarks import generation_report, training_report
from benchmarks.markdown import Json, bold, measured_on, number, table
from benchmarks.row import OURS
from benchmarks.speeds import figures_of


class Figure(NamedTuple):
    """A figure of a workload of a suite.

    Attributes:
        suite: name of the results.
        workload: key of the workload.
        what: what is measured.
        key: name of the figure.
        unit: its unit.
        label: the name of a workload.
    """

    suite: str
    workload: str
    what: str
    key: str
    unit: str
    label: Callable[[Json], str]

    @property
    def is_speed(self) -> bool:
        """Whether more is better."""
        return self.unit == "tokens/s"


def _training(suite: str, workload: str, what: str = "training", key: str = "tokens_per_s") -> Figure:
    return Figure(suite, workload, what, key, "GiB" if key == "peak_gib" else "tokens/s", training_report.label)


def _decoding(workload: str) -> Figure:
    return Figure("generation", workload, "decoding", "decode_tokens_per_s", "tokens/s", generation_report.label)


FIGURES = (
    _training("training", "llama_1b_8x2048"),
    _training("training", "llama_1b_8x2048", "its peak memory", "peak_gib"),
    _training("training_80gb", "llama_8b_1x8192", "training on 80 GB"),
    _training("training", "llama_8b_4x8192"),
    _training("training", "llama_8b_lora_1x8192"),
    _training("training", "qwen3_5_4b_1x8192"),
    _decoding("llama_8b_1"),
    _decoding("llama_8b_32"),
)


def peer_table(results: Mapping[str, Json]) -> tuple[str, str]:
    """The table, and what it was measured on; both empty without results."""
    lines, used = [], []
    for figure in FIGURES:
        workload = results.get(figure.suite, {"workloads": {}})["workloads"].get(figure.workload)
        if workload is not None and (line := peer_line(figure, workload)):
            lines.append(line)
            used.append(workload)
    if "loading" in results:
        lines.append(loading_line(results["loading"]))
        used.append(results["loading"])
    header = ["", OURS, "fastest other", "times better"]
    return (table(header, lines), measured_on(*used)) if lines else ("", "")


def peer_line(figure: Figure, workload: Json) -> list[str]:
    """Our figure and the best one of another library; empty without one of the two."""
    found = figures_of(workload, figure.key)
    others = {name: value for name, value in found.items() if not name.startswith(OURS)}
    if OURS not in found or not others:
        return []
    name = "" if figure.what.startswith("its ") else f", {figure.label(workload)}"
    best = (max if figure.is_speed else min)(others, key=others.__getitem__)
    return _line(f"{figure.what}{name}, {figure.unit}", found[OURS], others[best], best, is_speed=figure.is_speed)


def loading_line(loading: Json) -> list[str]:
    """The time to import and load a model."""
    seconds = {name: sum(parts) for name, parts in loading["median_import_and_load_s"].items()}
    title = f"import and load {loading['gib']:.0f} GiB to the GPU, s"
    return _line(title, seconds[OURS], seconds["transformers"], "transformers", is_speed=False)


def _line(title: str, ours: float, theirs: float, provider: str, *, is_speed: bool) -> list[str]:
    def shown(value: float) -> str:
        return f"{value:,.0f}" if value >= 1000 else number(value)

    ratio = ours / theirs if is_speed else theirs / ours
    return [title, bold(shown(ours), ratio >= 1), f"{shown(theirs)} {provider}", f"{ratio:.2f}"]
