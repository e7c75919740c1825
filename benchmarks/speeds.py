"""Tokens per second of the providers of workloads, for tables and plots. Workloads and providers may lack figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.chart import Bar, Group
from benchmarks.markdown import Json, bold, table
from benchmarks.row import OURS


def workloads_with(result: Json, figure: str) -> list[Json]:
    """The workloads that measure a figure, which at least one provider has."""
    workloads = result["workloads"].values()
    return [workload for workload in workloads if any(figure in found for found in workload["providers"].values())]


def figures_of(workload: Json, figure: str) -> dict[str, float]:
    """The figure of each provider that has it."""
    return {name: found[figure] for name, found in workload["providers"].items() if figure in found}


def speed(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}"


def ratio(speeds: Mapping[str, float], peers: Iterable[str]) -> str:
    """Our speed over that of the fastest of these peers; empty if one of the two is unknown."""
    fastest = max((speeds[peer] for peer in peers if peer in speeds), default=None)
    return "" if fastest is None or OURS not in speeds else f"{speeds[OURS] / fastest:.2f}"


def speed_bars(name: str, speeds: Mapping[str, float], full: float) -> Group:
    """The bars of each provider's tokens per second, over the speed at the line."""
    return Group(name, [Bar(provider, value / full, speed(value)) for provider, value in speeds.items()])


def speed_table(
    what: str,
    workloads: Sequence[Json],
    label: Callable[[Json], str],
    further: Mapping[str, Callable[[Json], str]],
) -> str:
    """A table with a line for each provider of each workload: its speed, ours over it, and further columns.

    Args:
        what: the title of the first column.
        workloads: the workloads.
        label: the name of a workload.
        further: the further columns: their titles, and their texts, given the figures of a provider. The line of a
            provider without figures has its error instead.
    """
    lines = []
    for workload in workloads:
        speeds = figures_of(workload, "tokens_per_s")
        for provider, found in workload["providers"].items():
            start = [label(workload), provider]
            if provider not in speeds:
                lines.append([*start, found["error"], "", *[""] * len(further)])
                continue
            shown = bold(speed(speeds[provider]), speeds[provider] == max(speeds.values()))
            ours_over_it = "" if provider == OURS else ratio(speeds, [provider])
            lines.append([*start, shown, ours_over_it, *(text(found) for text in further.values())])
    return table([what, "provider", "tokens/s", "ligerzoo / it", *further], lines)
