"""Predicts steps on meshes of H100s, and writes the two tables of docs/parallelism.md.

python -m tools.mesh_tables             # predicts all, which takes minutes, and rewrites both tables
python -m tools.mesh_tables --compare   # predicts only those that were measured
python -m tools.mesh_tables --write     # rewrites both tables from the file of the predictions

The predictions are in benchmarks/results/mesh_predictions.json. Measured were benchmarks/results/meshes.json and
sharded_training.json, on two H100s, and mesh_scaling.json, on all of a host.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.markdown import table
from benchmarks.memory import LLAMA_8B
from benchmarks.mesh_models import MODELS, build
from benchmarks.mesh_scaling import RANK, levels_of
from benchmarks.meshes import SHAPES, TOKENS
from ligerzoo.adapters import add_lora
from ligerzoo.memory import GPURates, Recompute, TrainingSetting
from ligerzoo.memory.divided import divided
from ligerzoo.memory.mesh_plan import MeshPlan, Rejected, SimulatedSteps, named, propose_meshes
from ligerzoo.memory.plan import WORDS
from ligerzoo.memory.prediction import H100_GIB
from ligerzoo.models import CausalLM

ROOT = Path(__file__).parent.parent
PAGE, RESULTS = ROOT / "docs/parallelism.md", ROOT / "benchmarks/results"
FILE = RESULTS / "mesh_predictions.json"
BEGIN, END = "<!-- {}: begin -->", "<!-- {}: end -->"

WAITS_FOR_HOST = {("30B-A3B, LoRA, 1 x 8,192", "shard=4")}
"""Measured steps whose GPUs were idle, this one for 14 % of the time by its profile: the prediction is of GPUs."""

GPUS = (8, 64, 512, 1024)
SEQ_LENGTH = 8192
Row = dict[str, Any]


def fastest(name: str, gpus: tuple[int, ...] = GPUS) -> list[Row]:
    """Returns the fastest mesh of a model on some numbers of GPUs, and why others are not."""
    settings = [TrainingSetting(gpus=count, seq_length=SEQ_LENGTH) for count in gpus]
    found = propose_meshes(build(MODELS[name]), settings, int(H100_GIB * 2**30), GPURates())
    return [row(name, count, *result) for count, result in zip(gpus, found, strict=True)]


def row(name: str, gpus: int, plan: MeshPlan | None, rejected: list[Rejected]) -> Row:
    reasons = {named(one.sizes): one.reason for one in rejected}
    if plan is None:
        return {"model": name, "gpus": gpus, "mesh": None, "others": reasons}
    return {
        "model": name,
        "gpus": gpus,
        "mesh": named(plan.setting.sizes),
        "recomputed": WORDS[plan.activations.levels[0]],
        "gib": round(plan.activations.step.peak / 2**30, 1),
        "tokens_per_s_per_gpu": round(plan.tokens_per_second),
        "mfu": round(plan.utilization, 3),
        "exposed": round((plan.time.divided + plan.time.sharded) / plan.time.seconds, 3),
        "others": reasons,
    }


class Measured(NamedTuple):
    """A step that was measured.

    Attributes:
        what: its name.
        model: on meta.
        setting: how it was trained.
        levels: what backward recomputed of each block; one level for all.
        ms, gib: its time and memory.
        keeps_gathered: whether the weights of blocks stayed gathered until backward.
    """

    what: str
    model: CausalLM
    setting: TrainingSetting
    levels: tuple[Recompute, ...]
    ms: float
    gib: float
    keeps_gathered: bool = False


def measured() -> Iterator[Measured]:
    """Yields what was measured."""
    yield from _measured_on_two()
    rows = json.loads((RESULTS / "sharded_training.json").read_text())["rows"]
    for kind, gpus in (("one-gpu", 1), ("default", 2)):
        for key, level in (("kept", Recompute.NOTHING), ("recomputed", Recompute.BLOCK)):
            setting = TrainingSetting(gpus=gpus, mesh="shard=2" if gpus > 1 else None, seq_length=8192)
            name, one = f"Llama-3-8B, 1 x 8,192, {WORDS[level]}", rows[kind][key]
            yield Measured(name, build(LLAMA_8B), setting, (level,), one["ms"], one["peak_gib"])
    yield from _measured_on_a_host()


def _measured_on_two() -> Iterator[Measured]:
    for one in json.loads((RESULTS / "meshes.json").read_text())["rows"]:
        if one["provider"] != "ligerzoo" or "reverse" in one["mesh"] or "tensor" in one["mesh"]:
            continue  # `tensor` was measured before it divided tokens between layers
        case, mesh, gpus = one["case"], one["mesh"], one["gpus"]
        rows, tokens = (1, one["tokens"]) if case == "longest" else TOKENS[case]
        rows //= 2 if mesh.startswith("shard=2") else 1
        model = build(SHAPES[case])
        if case == "experts":
            add_lora(model, RANK)
        setting = TrainingSetting(gpus=gpus, mesh=mesh or None, batch_size=rows, seq_length=tokens)
        yield Measured(f"{case}, {rows} x {tokens:,}", model, setting, (Recompute.NOTHING,), one["ms"], one["peak_gib"])


def _measured_on_a_host() -> Iterator[Measured]:
    file = RESULTS / "mesh_scaling.json"
    for one in json.loads(file.read_text())["rows"] if file.exists() else ():
        if "levels" not in one or "ms" not in one:
            continue
        model, lora = build(MODELS[one["model"]]), one["method"] == "lora"
        if lora:
            add_lora(model, RANK)
        setting = TrainingSetting(gpus=one["gpus"], mesh=one["mesh"] or None, seq_length=one["length"])
        name = f"{one['model']}{', LoRA' * lora}, 1 x {one['length']:,}"
        yield Measured(name, model, setting, levels_of(one), one["ms"], one["peak_gib"], one["keeps_gathered"])


def compared(*meshes: str) -> list[Row]:
    """Returns the prediction of each measured step; of those on some meshes."""
    found = []
    for one in measured():
        setting = one.setting
        if meshes and setting.mesh not in meshes:
            continue
        with divided(one.model, setting.sizes) as model:
            steps = SimulatedSteps(model, setting, GPURates())
            levels = one.levels * (steps.blocks // len(one.levels))
            memory = steps.memory(setting, levels, keeps_gathered=one.keeps_gathered)
            activations = replace(
                steps.uniform(setting, levels[0]), levels=levels, step=memory, keeps_gathered=one.keeps_gathered
            )
            plan = steps.plan(setting, activations)
        step = {
            "what": one.what,
            "mesh": setting.mesh or "one GPU",
            "measured_ms": one.ms,
            "predicted_ms": round(1e3 * plan.time.seconds, 1),
            "measured_gib": one.gib,
            "predicted_gib": round(memory.peak / 2**30, 3),
        }
        found.append(step)
    return found


def with_tables(page: str, results: dict[str, list[Row]]) -> str:
    """Returns the page with the tables of results."""
    tables = {
        "meshes on paper": _fastest_table(results["fastest"]),
        "meshes compared": _compared_table(results["compared"]),
    }
    for name, text in tables.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, rest = page.split(begin)
        page = f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}"
    return page


def _fastest_table(rows: list[Row]) -> str:
    header = ["model", "H100s", "fastest mesh", "backward", "GiB", "tokens/s per GPU", "MFU", "exposed", "others"]
    return table(header, [_fastest_line(one) for one in rows])


def _fastest_line(one: Row) -> list[str]:
    start = [one["model"], f"{one['gpus']:,}"]
    if one["mesh"] is None:
        return [*start, "none fits", "", "", "", "", "", _others(one)]
    return [
        *start,
        f"`{one['mesh']}`",
        one["recomputed"],
        f"{one['gib']:.1f}",
        f"{one['tokens_per_s_per_gpu']:,}",
        f"{one['mfu']:.0%}",
        f"{one['exposed']:.0%}",
        _others(one),
    ]


def _others(one: Row) -> str:
    """Returns the best mesh with other axes than the fastest one, for each set of axes, and what does not fit."""
    others: dict[str, str] = one["others"]
    speeds = {mesh: float(why.split()[0].replace(",", "")) for mesh, why in others.items() if "tokens/s" in why}
    best: dict[tuple[str, ...], str] = {}
    for mesh in sorted(speeds, key=lambda mesh: -speeds[mesh]):
        best.setdefault(_divided_axes(mesh), mesh)
    fit = [f"`{mesh}` {speeds[mesh]:,.0f}" for mesh in best.values()]
    needs = {mesh: float(why.split()[3]) for mesh, why in others.items() if why.startswith("does not fit")}
    least = sorted(needs, key=lambda mesh: needs[mesh])[: 1 if fit else 3]
    return "; ".join([*fit, *(f"`{mesh}` needs {needs[mesh]:,.0f} GiB" for mesh in least)])


def _divided_axes(mesh: str) -> tuple[str, ...]:
    axes = (axis.partition("=")[0] for axis in mesh.split())
    return tuple(axis for axis in axes if axis in ("context", "tensor", "expert"))


def _compared_table(rows: list[Row]) -> str:
    header = ["step", "mesh", "ms", "predicted", "GiB", "predicted"]
    lines = []
    for one in rows:
        time, memory = (one[f"predicted_{unit}"] / one[f"measured_{unit}"] - 1 for unit in ("ms", "gib"))
        note = ", waits for the host" if (one["what"], one["mesh"]) in WAITS_FOR_HOST else ""
        times = [f"{one['measured_ms']:,.0f}", f"{one['predicted_ms']:,.0f} ({time:+.1%}{note})"]
        lines.append(
            [
                one["what"],
                one["mesh"],
                *times,
                f"{one['measured_gib']:.2f}",
                f"{one['predicted_gib']:.2f} ({memory:+.1%})",
            ]
        )
    return table(header, lines)


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    results = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {"fastest": [], "compared": []}
    if "--write" not in sys.argv:
        results["compared"] = compared()
    if "--write" not in sys.argv and "--compare" not in sys.argv:
        results["fastest"] = [one for name in MODELS for one in fastest(name)]
    lines = {key: ",\n".join(map(json.dumps, rows)) for key, rows in results.items()}
    lists = ",\n".join(f"{json.dumps(key)}: [\n{text}\n]" for key, text in lines.items())
    FILE.write_text(f"{{\n{lists}\n}}\n", encoding="utf-8")
    PAGE.write_text(with_tables(page, results), encoding="utf-8")


if __name__ == "__main__":
    main()
