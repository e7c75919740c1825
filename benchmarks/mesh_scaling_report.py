"""Tables and plot of `benchmarks.mesh_scaling`'s results."""

from __future__ import annotations

from benchmarks.chart import Bar, Group, bar_chart
from benchmarks.markdown import Json, measured_on, number, paragraph, table
from benchmarks.meshes import OURS, PEER
from benchmarks.speeds import speed

CASES = {
    "dense": "Llama-3-8B, all weights, 1 x 8,192 tokens a GPU",
    "long": "Llama-3-8B, all weights, one text",
    "experts": "Qwen3-30B-A3B, 1 x 8,192 tokens a GPU",
    "large": "Llama-3-70B shape, LoRA, 1 x 4,096",
}
METHODS = {"full": "all weights", "lora": "LoRA"}
LEVELS = {
    "NOTHING": "nothing",
    "ELEMENTWISE": "norm outputs",
    "MLP": "norm outputs, gate and up",
    "BLOCK": "everything",
}


def mesh_scaling_figures(result: Json) -> list[str]:
    """The section of docs/benchmarks.md."""
    rows = [row for row in result["rows"] if row["case"] in CASES]
    text = (
        "Whole models with random bf16 weights on the GPUs of one host, AdamW with bf16 states. Tokens/s are those of "
        'one GPU; "share" compares them with one GPU alone, "over" with transformers + liger-kernel, which has FSDP2 '
        "in its fastest setting that fits and sums gradients in bf16. Predicted is what `ligerzoo info --train` says, "
        "and how far it is from the measurement. Cases that do not need all GPUs of the host ran side by side. "
        f"{measured_on(result)}."
    )
    header = [
        "case", "provider", "GPUs", "mesh", "tokens/s", "share", "over", "ms", "predicted", "peak GiB", "predicted",
        "recomputed",
    ]  # fmt: skip
    killed = [_killed(row) for row in result["rows"] if row["case"] == "killed"]
    plot = "![Tokens per second of a GPU, by number of GPUs](../benchmarks/results/mesh_scaling.svg)"
    return [
        "## Scaling on the GPUs of a host",
        paragraph(text),
        table(header, map(_line, rows)),
        *([plot] if mesh_scaling_chart(result) else []),
        *killed,
    ]


def _line(row: Json) -> list[str]:
    what = CASES[row["case"]]
    what += f" of {row['length']:,} tokens" if row["case"] == "long" else ""
    what += f", {METHODS[row['method']]}" if row["case"] == "experts" else ""
    mesh = "FSDP2" if row["provider"] == PEER and row["mesh"] else f"`{row['mesh']}`" if row["mesh"] else ""
    provider = {OURS: OURS, PEER: "transformers + liger-kernel"}[row["provider"]]
    gpus = f"{row['gpus']} {row.get('gpu', '')}".strip()  # the name if it is not that of the file
    line = [what, provider, gpus, mesh]
    if "error" in row:
        return [*line, row["error"], *[""] * 7]
    return [
        *line, speed(row["tokens_per_s"]), number(row.get("share")), number(row.get("over_peer")), f"{row['ms']:,.0f}",
        _predicted(row, "ms", 0), f"{row['peak_gib']:.1f}", _predicted(row, "gib", 1), _recomputed(row),
    ]  # fmt: skip


def _predicted(row: Json, unit: str, digits: int) -> str:
    if f"predicted_{unit}" not in row:
        return ""
    predicted = row[f"predicted_{unit}"]
    measured = row["ms" if unit == "ms" else "peak_gib"]
    return f"{predicted:,.{digits}f} ({predicted / measured - 1:+.1%})"


def _recomputed(row: Json) -> str:
    if "levels" not in row:
        return str(row.get("recomputed", ""))
    levels = row["levels"]
    parts = [LEVELS[name] + (f" in {count} blocks" if len(levels) > 1 else "") for name, count in levels]
    return ", ".join(parts) + ("; weights gathered until backward" if row["keeps_gathered"] else "")


def _killed(row: Json) -> str:
    if "error" in row:
        return paragraph(f"Killing one of {row['gpus']} processes of `ligerzoo train`: {row['error']}.")
    text = (
        f"One of {row['gpus']} processes of `ligerzoo train` was killed (SIGKILL) after step {row['killed_after']}; "
        f"all others had ended {row['ended_s']:.1f} s later. {row['resumed_on']} processes continued from step "
        f"{row['saved']} to step {row['steps']}. Of {row['samples'] + row['lost']:,} samples, {row['lost']} were lost "
        f"and {row['repeated']} trained twice."
    )
    return paragraph(text)


def mesh_scaling_chart(result: Json) -> str:
    """An SVG: for each number of GPUs our tokens/s of a GPU, the prediction and the peer's. Empty without any."""
    rows = [row for row in result.get("rows", ()) if row["case"] == "dense" and "tokens_per_s" in row]
    alone = next((row["tokens_per_s"] for row in rows if row["provider"] == OURS and row["gpus"] == 1), None)
    if alone is None:
        return ""
    groups = []
    for gpus in sorted({row["gpus"] for row in rows}):
        bars = []
        for row in (row for row in rows if row["gpus"] == gpus):
            name = OURS if row["provider"] == OURS else "transformers + liger-kernel"
            bars.append(Bar(name, row["tokens_per_s"] / alone, speed(row["tokens_per_s"])))
            if "predicted_ms" in row:
                predicted = row["tokens_per_s"] * row["ms"] / row["predicted_ms"]
                bars.append(Bar(f"{OURS}, predicted", predicted / alone, speed(predicted)))
        groups.append(Group(f"{gpus} GPU{'s' * (gpus > 1)}", bars))
    return bar_chart("tokens per second of a GPU, Llama-3-8B", "ligerzoo on one GPU", groups)
