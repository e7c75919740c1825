"""Table of `benchmarks.training`'s results, which may lack workloads and providers."""

from __future__ import annotations

from benchmarks.chart import bar_chart
from benchmarks.generation_report import model_name
from benchmarks.markdown import Json, measured_on, number, paragraph
from benchmarks.row import OURS
from benchmarks.speeds import figures_of, speed_bars, speed_table, workloads_with


def label(workload: Json) -> str:
    method = "LoRA, " if workload["adapted"] else ""
    return f"{model_name(workload)}, {method}{workload['batch']} x {workload['length']}"


def predicted(found: Json) -> str:
    """The predicted peak, and its error; empty if there is no prediction."""
    return f"{found['predicted_gib']:.1f} ({found['error_percent']:+.1f} %)" if "error_percent" in found else ""


def training_chart(result: Json) -> str:
    """An SVG with a bar for each provider of each workload that peers train too. Empty without any."""
    rows = [
        (label(workload), figures_of(workload, "tokens_per_s")) for workload in workloads_with(result, "tokens_per_s")
    ]
    compared = [speed_bars(name, speeds, speeds[OURS]) for name, speeds in rows if OURS in speeds and len(speeds) > 1]
    return bar_chart("tokens per second of training", "the speed of ligerzoo", compared)


def training_figures(result: Json, title: str = "Training", chart: str = "training") -> list[str]:
    """The section of docs/benchmarks.md, with the plot of this name."""
    workloads = workloads_with(result, "tokens_per_s")
    if not workloads:
        return []
    text = (
        "Whole steps with fused AdamW, bf16 weights, random tokens. Each provider has the fastest setting that fits. "
        "LoRA has rank 16 on all linear layers, of Nemotron Nano 30B-A3B on experts too, of Qwen3-30B-A3B on those of "
        f"attention. {measured_on(*workloads)}."
    )
    further = {"peak GiB": lambda found: number(found["peak_gib"]), "predicted": predicted}
    lines = speed_table("model and batch", workloads, label, {**further, "setting": lambda found: found["setting"]})
    plot = f"![Tokens per second of training, by model and batch](../benchmarks/results/{chart}.svg)"
    return [f"## {title}", paragraph(text), lines, *([plot] if training_chart(result) else [])]
