"""Table of `benchmarks.training`'s results, which may lack workloads and providers."""

from __future__ import annotations

from benchmarks.generation_report import figures_of, model_name, ratio, speed, workloads_with
from benchmarks.markdown import Json, bold, measured_on, number, paragraph, table
from benchmarks.row import OURS


def label(workload: Json) -> str:
    method = "LoRA, " if workload["adapted"] else ""
    return f"{model_name(workload)}, {method}{workload['batch']} x {workload['length']}"


def training_lines(workload: Json) -> list[list[str]]:
    """A line for each provider, with its error if it has no figures."""
    speeds = figures_of(workload, "tokens_per_s")
    lines = []
    for provider, found in workload["providers"].items():
        start = [label(workload), provider]
        if provider not in speeds:
            lines.append([*start, found["error"], "", "", "", ""])
            continue
        predicted = (
            f"{found['predicted_gib']:.1f} ({found['error_percent']:+.1f} %)" if "error_percent" in found else ""
        )
        lines.append(
            [
                *start, bold(speed(speeds[provider]), speeds[provider] == max(speeds.values())),
                "" if provider == OURS else ratio(speeds, [provider]), number(found["peak_gib"]), predicted,
                found["setting"],
            ]
        )  # fmt: skip
    return lines


def training_figures(result: Json) -> list[str]:
    """The section of docs/benchmarks.md."""
    workloads = workloads_with(result, "tokens_per_s")
    if not workloads:
        return []
    text = (
        "Whole steps with fused AdamW, bf16 weights, random tokens. Each provider has the fastest setting that fits. "
        f"LoRA has rank 16 on all linear layers, of Qwen3-30B-A3B on those of attention. {measured_on(*workloads)}."
    )
    header = ["model and batch", "provider", "tokens/s", "ligerzoo / it", "peak GiB", "predicted", "setting"]
    lines = [line for workload in workloads for line in training_lines(workload)]
    return ["## Training", paragraph(text), table(header, lines)]
