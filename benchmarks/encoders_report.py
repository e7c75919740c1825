"""Tables of `benchmarks.encoders`' results, which may lack workloads and providers."""

from __future__ import annotations

from benchmarks.markdown import Json, measured_on, number, paragraph
from benchmarks.speeds import speed_table, workloads_with

MODELS = {"modernbert_large": "ModernBERT-large", "bert_base": "BERT-base"}
TASKS = {"mlm": "masked tokens", "embedding": "contrastive", "encoding": "embeddings of texts"}


def label(workload: Json) -> str:
    model, task = workload["model"], TASKS[workload["task"]]
    return f"{MODELS.get(model, model)}, {task}, {workload['texts']} x {workload['shortest']} to {workload['longest']}"


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
    further = {"ms": lambda found: number(found.get("ms")), "peak GiB": lambda found: number(found["peak_gib"])}
    return ["## Encoders", paragraph(text), speed_table("model, task and texts", workloads, label, further)]
