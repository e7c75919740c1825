"""Table of `benchmarks.meshes`' results."""

from __future__ import annotations

from benchmarks.markdown import Json, measured_on, number, paragraph, table
from benchmarks.meshes import OURS, PEER, REVERSED
from benchmarks.speeds import speed

CASES = {
    "dense": "Llama-3-8B shape, all weights, 8 x 4096",
    "experts": "Qwen3-30B-A3B shape, LoRA, 8 x 4096",
    "long": "one text of 32,768 tokens",
}
ENGINES = {
    "": "",
    REVERSED: REVERSED,
    "fsdp": "FSDP2 and liger-kernel",
    "tensor plan": "its tensor plan",
    "expert plan": "its expert plan",
    "context_parallel": "torch's `context_parallel` and liger-kernel",
}


def mesh_figures(result: Json) -> list[str]:
    """The section of docs/benchmarks.md."""
    text = (
        "4 layers, bf16 weights and AdamW states. One GPU and two train on the same tokens in each of 20 steps, so the "
        "speedup is that of the same work, and the losses can be compared: the largest difference is that of any step. "
        "Rows in reverse order show how much rounding alone changes the losses of one GPU. In the case of experts, "
        f"ligerzoo updates experts and attention, transformers attention alone. {measured_on(result)}."
    )
    header = [
        "case", "provider", "GPUs", "mesh or engine", "tokens/s", "over one GPU", "peak GiB", "loss difference",
        "tokens/s over the peer's fastest",
    ]  # fmt: skip
    lines = [_line(row) for case in CASES for row in result["rows"] if row["case"] == case]
    return ["## Meshes of two GPUs", paragraph(text), table(header, lines), *_longest(result["rows"])]


def _line(row: Json) -> list[str]:
    engine = ENGINES.get(row["mesh"], f"`{row['mesh']}`")
    line = [CASES[row["case"]], {OURS: OURS, PEER: "transformers"}[row["provider"]], str(row["gpus"]), engine]
    if "error" in row:
        return [*line, row["error"], "", "", "", ""]
    difference = f"{row['largest_loss_difference']:.4f}" if row["mesh"] and "speedup" in row else ""
    return [
        *line, speed(row["tokens_per_s"]), number(row.get("speedup")), number(row["peak_gib"]), difference,
        number(row.get("over_peer")),
    ]  # fmt: skip


def _longest(rows: list[Json]) -> list[str]:
    found = {row["gpus"]: row for row in rows if row["case"] == "longest" and "tokens" in row}
    if set(found) != {1, 2}:
        return []
    one, two = found[1], found[2]
    text = (
        f"The longest text, in steps of 16,384 tokens, that one GPU trains on has {one['tokens']:,} tokens "
        f"({one['ms'] / 1e3:.1f} s, {one['peak_gib']:.1f} GiB). With `context=2`, two GPUs train on one of "
        f"{two['tokens']:,} tokens ({two['ms'] / 1e3:.1f} s, {two['peak_gib']:.1f} GiB)."
    )
    return [paragraph(text)]
