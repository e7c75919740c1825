"""Tables of `benchmarks.encoders`' results, which may lack workloads and providers."""

from __future__ import annotations

from benchmarks.generation_report import figures_of, ratio, speed, workloads_with
from benchmarks.markdown import Json, bold, measured_on, number, paragraph, table
from benchmarks.row import OURS

MODELS = {"modernbert_large": "ModernBERT-large", "bert_base": "BERT-base"}
TASKS = {"mlm": "masked tokens", "embedding": "contrastive", "encoding": "embeddings of texts"}


def label(workload: Json) -> str:
    model, task = workload["model"], TASKS[workload["task"]]
    return f"{MODELS.get(model, model)}, {task}, {workload['texts']} x {workload['shortest']} to {workload['longest']}"


def lines(workload: Json) -> list[list[str]]:
    """A line for each provider, with its error if it has no figures."""
    speeds = figures_of(workload, "tokens_per_s")
    found = []
    for provider, figures in workload["providers"].items():
        start = [label(workload), provider]
        if provider not in speeds:
            found.append([*start, figures["error"], "", "", ""])
            continue
        tokens_per_s, ours_over_it = speeds[provider], "" if provider == OURS else ratio(speeds, [provider])
        shown = bold(speed(tokens_per_s), tokens_per_s == max(speeds.values()))
        found.append([*start, shown, ours_over_it, number(figures.get("ms")), number(figures["peak_gib"])])
    return found


def encoder_figures(result: Json) -> list[str]:
    """The section of docs/benchmarks.md."""
    workloads = workloads_with(result, "tokens_per_s")
    if not workloads:
        return []
    text = (
        "Whole training steps with torch's fused AdamW, and `encode`; bf16 weights, texts of random lengths in tokens, "
        "of `encode` in words. Padding does not count as tokens. `packed` gives transformers a row without padding and "
        f"masks that were made before the step; `compiled` compiles each layer. {measured_on(*workloads)}."
    )
    header = ["model, task and texts", "provider", "tokens/s", "ligerzoo / it", "ms", "peak GiB"]
    return ["## Encoders", paragraph(text), table(header, [line for workload in workloads for line in lines(workload)])]
