"""Table of `benchmarks.sharded_training`'s results."""

from __future__ import annotations

from benchmarks.markdown import Json, bold, measured_on, number, paragraph, table
from benchmarks.sharded_training import KEPT, RECOMPUTED, VARIANTS
from benchmarks.speeds import speed

NAMES = {
    "default": "ligerzoo, `shard_model(model)`",
    "gathered": "ligerzoo, weights gathered until backward",
    "nccl": "ligerzoo, NCCL instead of copy engines",
    "liger": "transformers + liger-kernel",
    "liger-bf16": "the same, gradients summed in bf16",
    "liger-gathered": "the same, weights gathered until backward",
    "one-gpu": "ligerzoo, one GPU without FSDP2",
}


def sharded_figures(result: Json) -> list[str]:
    """The section of docs/benchmarks.md."""
    rows, shape = result["rows"], result["shape"]
    text = (
        f"Llama-3-8B shape on {shape['processes']} GPUs with FSDP2, 1 x {shape['tokens per process']} tokens per GPU, "
        "bf16 weights and AdamW states: with all blocks recomputed, and with none. Gradients are summed in fp32, "
        "unless stated. Tokens/s are those of a GPU, in the fastest of the rounds; the ratio is the speed over that of "
        f"the fastest setting of liger-kernel. {measured_on(result)}."
    )
    header = ["provider"]
    header += [f"{mode}: {what}" for mode in (RECOMPUTED, KEPT) for what in ("tokens/s", "ratio", "peak GiB")]
    return [
        "## Sharded training",
        paragraph(text),
        table(header, (_line(name, rows) for name in NAMES if name in rows)),
    ]


def _line(name: str, rows: dict[str, Json]) -> list[str]:
    line = [NAMES[name]]
    for mode in (RECOMPUTED, KEPT):
        speeds = {other: row[mode]["tokens_per_s"] for other, row in rows.items() if "tokens_per_s" in row[mode]}
        if name not in speeds:
            line += [rows[name][mode]["error"], "", ""]
            continue
        peer = max((speeds[other] for other in speeds if VARIANTS[other].is_peer), default=None)
        is_fastest = speeds[name] == max(speeds[other] for other in speeds if not VARIANTS[other].is_alone)
        line += [
            bold(speed(speeds[name]), is_fastest), "" if peer is None else f"{speeds[name] / peer:.2f}",
            number(rows[name][mode]["peak_gib"]),
        ]  # fmt: skip
    return line
