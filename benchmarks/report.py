"""Writes the tables and plots of README.md and docs/benchmarks.md from the results in benchmarks/results.

    python -m benchmarks.report            # rewrites the pages between their markers, and the plots
    python -m benchmarks.report --check    # exits with 1 if a page or plot differs from the results

A benchmark without results is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.chart import Bar, Group, bar_chart
from benchmarks.contrastive_report import contrastive_figures
from benchmarks.encoders_report import encoder_figures
from benchmarks.exact_report import mixture_figures, packed_figures, start_figures, update_chart, update_figures
from benchmarks.generation_report import generation_chart, generation_figures
from benchmarks.markdown import Json, bold, measured_on, number, paragraph, table
from benchmarks.mesh_scaling_report import mesh_scaling_chart, mesh_scaling_figures
from benchmarks.meshes_report import mesh_figures
from benchmarks.readme_report import peer_table
from benchmarks.row import OURS, compare
from benchmarks.sharded_report import sharded_figures
from benchmarks.training_report import training_chart, training_figures

ROOT = Path(__file__).parent.parent
RESULTS = Path("benchmarks/results")
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
STEPS = {"training_step": "Llama-3.2-1B shape", "training_step_qwen2_vl_2b": "Qwen2-VL-2B shape, 4 images"}
TRAINERS = {
    "trainer_llama_1b": "Llama-3.2-1B shape",
    "trainer_qwen3_30b_a3b_4_layers": "Qwen3-30B-A3B shape, 4 layers",
}
LOADS = {"loading": "Llama-3-8B shape", "loading_gpt_oss_20b": "gpt-oss-20b shape in MXFP4"}
ATTENTION = ("attention_sinks", "latent_attention", "large_heads")
RECURRENCES = ("state_space", "delta_channels")
SUITES = (
    "operations", "losses", "launching", "scaling", "training", "training_80gb", "sharded_training", "meshes",
    "mesh_scaling", "memory", "generation", *STEPS, *TRAINERS, *LOADS, *ATTENTION, *RECURRENCES, "delta_rule",
    "exact_updates", "packed_attention", "exact_mixtures", "starts", "contrastive", "encoders",
)  # fmt: skip
MODEL_PROVIDERS = (OURS, "transformers + liger-kernel", "transformers")
PEERS = (
    "torch", "torch linear_cross_entropy", "torch.compile", "liger-kernel", "cut-cross-entropy",
    "flash-linear-attention", "mamba-ssm",
)  # fmt: skip
HIGHLIGHTS = (
    "rms norm 16384 x 4096",
    "rms norm 2048 x 4096",
    "swiglu 16384 x 14336",
    "cross entropy 8192 x 128256",
    "linear cross entropy 8192 x 4096 x 128256",
    "linear cross entropy 8192 x 4096 x 128256, 75% ignored",
    "linear cross entropy 8192 x 2304 x 256000",
    "experts mlp 8192 x 128 x 2048 x 768 x 8, Qwen3-30B-A3B",
    "attention 16384 x 32 x 8 x 128, Mistral, window 4096",
    "dpo 8 x 1024 x 4096 x 128256",
    "grpo 8 x 1024 x 4096 x 128256",
)
"""The rows of the README's plot: some where we lead, and some where we trail."""


def read_results(directory: Path) -> dict[str, Json]:
    return {
        name: json.loads(path.read_text(encoding="utf-8"))
        for name in SUITES
        if (path := directory / f"{name}.json").exists()
    }


# Whole models


def step_lines(step: Json, what: str) -> list[list[str]]:
    """The time and the memory of a training step."""
    found, shape = step["providers"], step["shape"]

    def compared(what: str, key: str, show: Callable[[Json], str]) -> list[str]:
        best = min(provider[key] for provider in found.values())
        return [what, *(bold(show(found[n]), found[n][key] == best) if n in found else "" for n in MODEL_PROVIDERS)]

    def speed(figures: Json) -> str:
        return f"{figures['ms']:.0f} ms, {round(figures['tokens_per_s'], -2):,.0f} tokens/s"

    title = f"training step, {what}, {shape['batch']} x {shape['length']} text tokens"
    memory = compared("its peak memory", "peak_gib", lambda figures: f"{figures['peak_gib']:.1f} GiB")
    return [compared(title, "ms", speed), memory]


def loading_seconds(loading: Json) -> dict[str, float]:
    return {name: sum(parts) for name, parts in loading["median_import_and_load_s"].items()}


def loading_line(loading: Json, what: str) -> list[str]:
    seconds = loading_seconds(loading)
    best = min(seconds[name] for name in MODEL_PROVIDERS if name in seconds)
    cells = [bold(f"{seconds[n]:.1f} s", seconds[n] == best) if n in seconds else "" for n in MODEL_PROVIDERS]
    return [f"import and load to the GPU, {what}, {loading['gib']:.0f} GiB", *cells]


def model_table(results: Mapping[str, Json]) -> str:
    """Training steps and loading; empty without results."""
    lines = [line for name, what in STEPS.items() if name in results for line in step_lines(results[name], what)]
    lines += [loading_line(results[name], what) for name, what in LOADS.items() if name in results]
    return table(["", *MODEL_PROVIDERS], lines) if lines else ""


def model_figures(results: Mapping[str, Json]) -> list[str]:
    used = [results[name] for name in (*STEPS, *LOADS) if name in results]
    if not used:
        return []
    parts = ["## Whole models", paragraph(f"bf16 weights, fused AdamW. {measured_on(*used)}."), model_table(results)]
    raw = [f"{loading_seconds(results[name])['raw safetensors']:.1f} s" for name in LOADS if name in results]
    if raw:
        parts.append(f"The files are in the page cache. Reading them with safetensors alone takes {' and '.join(raw)}.")
    return parts


def trainer_figures(results: Mapping[str, Json]) -> list[str]:
    """Steps of transformers' Trainer."""
    used = {name: results[name] for name in TRAINERS if name in results}
    if not used:
        return []
    lines = []
    for name, result in used.items():
        shape, found = result["shape"], result["providers"]
        liger = found.get("transformers + liger-kernel", {})
        for provider, figures in found.items():
            if "ms" not in figures:
                continue
            ratio = figures["tokens_per_s"] / liger["tokens_per_s"] if "ms" in liger else None
            what = f"{TRAINERS[name]}, {shape['batch']} x {shape['length']}"
            speed, memory = f"{round(figures['tokens_per_s'], -2):,.0f}", f"{figures['peak_gib']:.1f}"
            lines.append([what, provider, number(figures["ms"]), speed, memory, number(ratio)])
    text = (
        f"bf16 weights, fused AdamW, no gradient clipping. {measured_on(*used.values())}. `apply` puts our kernels "
        "into transformers' model; `wrap` is our model for the Trainer. `wrap, plain loop` and `bare`, our own model, "
        "train without the Trainer."
    )
    header = ["model and batch", "provider", "ms", "tokens/s", "peak GiB", "tokens/s over liger-kernel's"]
    return ["## transformers' Trainer", paragraph(text), table(header, lines)]


# Operations and losses


def label(row: Json) -> str:
    variant = row["variant"] and f", {row['variant']}"
    return f"{row['op'].replace('_', ' ')} {' x '.join(map(str, row['shape']))}{variant}"


def measured(rows: Iterable[Json]) -> list[Json]:
    """The rows in which ligerzoo was measured."""
    return [row for row in rows if "forward_backward_ms" in row.get("providers", {}).get(OURS, {})]


def compared(row: Json) -> Json:
    """Our forward and backward against the fastest provider and the floor."""
    return compare(row["providers"], "forward_backward", row["floor"]["forward_backward_ms"])


def last_columns(row: Json) -> list[str]:
    comparison, extra = compared(row), row["providers"][OURS].get("extra_mib")
    ratio = comparison["ours / fastest peer"]
    return [
        "" if ratio is None else bold(f"{ratio:.2f}", ratio <= 1),
        f"{comparison['ours / floor']:.2f}",
        "" if extra is None else f"{extra:.0f}",
    ]


def operation_line(row: Json, peers: Sequence[str]) -> list[str]:
    def times(provider: str) -> str:
        entry = row["providers"].get(provider, {})
        return f"{number(entry['forward_ms'])} / {number(entry['forward_backward_ms'])}" if entry else ""

    return [label(row), *map(times, (OURS, *peers)), *last_columns(row)]


def operation_table(what: str, rows: Sequence[Json]) -> str:
    peers = [name for name in PEERS if any(name in row["providers"] for row in rows)]
    header = [what, OURS, *peers, "/ fastest", "/ floor", "extra MiB"]
    return table(header, [operation_line(row, peers) for row in rows])


def operation_figures(result: Json) -> list[str]:
    rows, rates = measured(result["rows"]), result["rates"]
    about = (
        f"bf16. {measured_on(result)}. The floor takes the {rates['copy_tb_s']:.2f} TB/s of a copy and "
        f"{rates['floor_tflop_s']:.0f} TFLOP/s; a large GEMM of random matrices reached "
        f"{rates['bf16_tflop_s']:.0f} TFLOP/s in this run."
    )
    return [
        "## Operations",
        paragraph(about),
        operation_table("operation", rows),
        exactness(rows),
        f"![Time over the floor, by operation](../{RESULTS}/operations.svg)",
    ]


def exactness(rows: Iterable[Json]) -> str:
    """Our largest relative error compared with eager torch's; empty if no row has one."""
    ratios = {
        f"{name} of {label(row)}": ratio
        for row in rows
        for name, ratio in row.get("largest error, ligerzoo / eager", {}).items()
    }
    if not ratios:
        return ""
    worst = max(ratios, key=lambda name: ratios[name])
    most = f"at most {ratios[worst]:.2f} times eager torch's ({worst})"
    return paragraph(f"Against fp64, the error of our outputs and gradients is {most}.")


def attention_figures(results: Mapping[str, Json]) -> list[str]:
    """Attention with sinks, latent attention and attention of large heads."""
    used = [results[name] for name in ATTENTION if name in results]
    rows = [row for result in used for row in measured(result["rows"])]
    if not rows:
        return []
    gemms = " and ".join(f"{result['rates']['bf16_tflop_s']:.0f}" for result in used)
    about = (
        f"Tokens x heads x key heads x head size, or tokens x heads x sizes of keys and values, bf16. "
        f"{measured_on(*used)}. Attention without sinks and of equal heads runs cuDNN alone, with equal FLOPs. A large "
        f"GEMM of random matrices reached {gemms} TFLOP/s in these runs."
    )
    return ["## Attention of gpt-oss, DeepSeek-V3 and Gemma 4", paragraph(about), operation_table("attention", rows)]


def delta_rule_figures(result: Json) -> list[str]:
    """The layers of Qwen3.5's linear attention."""
    about = (
        f"Tokens x key heads x value heads x head size, bf16. {measured_on(result)}. Each call is timed with its "
        "launches by the host, after the L2 cache is flushed."
    )
    return ["## Linear attention", paragraph(about), operation_table("layer", measured(result["rows"]))]


def recurrence_figures(results: Mapping[str, Json]) -> list[str]:
    """The layers of Mamba-2 and of Kimi Linear."""
    used = [results[name] for name in RECURRENCES if name in results]
    rows = [row for result in used for row in measured(result["rows"])]
    if not rows:
        return []
    about = (
        f"bf16, with the gates. ssd: texts x tokens x heads x head size x groups x state size. Norm: tokens x features "
        f"x groups. Delta rule: texts x tokens x heads x head size. {measured_on(*used)}."
    )
    return ["## Mamba-2 and Kimi Linear", paragraph(about), operation_table("layer", rows)]


def memory_figures(result: Json) -> list[str]:
    """Predicted and measured peaks."""
    about = (
        f"Peak of a training step in GiB, bf16 weights, fused AdamW. {measured_on(result)}. The largest error of "
        f"{result['measured']} configurations is {result['largest_error_percent']:.2f} %."
    )
    lines = [
        [name, f"{case['predicted_gib']:.2f}", f"{case['measured_gib']:.2f}", f"{case['error_percent']:+.2f} %"]
        for name, case in result["cases"].items()
        if "measured_gib" in case
    ]
    return ["## Predicted memory", paragraph(about), table(["configuration", "predicted", "measured", "error"], lines)]


def loss_figures(result: Json) -> list[str]:
    about = (
        f"Rows x tokens x hidden size x vocabulary, bf16. {measured_on(result)}. DPO, KTO and JSD include the head of "
        "the reference model or teacher."
    )
    return ["## Post-training losses", paragraph(about), operation_table("loss", measured(result["rows"]))]


def scaling_figures(result: Json) -> list[str]:
    """The loss head by tokens and vocabulary: milliseconds, forward and backward, and extra MiB."""
    rows = measured(result["rows"])
    providers = [name for name in (OURS, *PEERS) if any(name in row["providers"] for row in rows)]

    def cell(entry: Json) -> str:
        return f"{number(entry['forward_backward_ms'])} / {number(entry.get('extra_mib'))}" if entry else ""

    return [
        "## Scaling of the loss head",
        paragraph(f"Forward and backward in ms / extra MiB, peaked logits, bf16. {measured_on(result)}."),
        table(
            ["tokens x hidden size x vocabulary", *providers],
            ([label(row), *(cell(row["providers"].get(name, {})) for name in providers)] for row in rows),
        ),
    ]


def launch_figures(result: Json) -> list[str]:
    providers = list(dict.fromkeys(name for operation in result["operations"].values() for name in operation))

    def line(name: str, times: Mapping[str, Json]) -> list[str]:
        forward, both = (
            {provider: entry[key] for provider, entry in times.items() if key in entry}
            for key in ("forward_us", "forward_backward_us")
        )
        cells = (
            f"{forward[p]:.0f} / {bold(f'{both[p]:.0f}', both[p] == min(both.values()))}" if p in both else ""
            for p in providers
        )
        return [name.replace("_", " "), *cells]

    return [
        "## Host time per call",
        paragraph(f"Tiny tensors, forward / forward and backward, in microseconds. {measured_on(result)}."),
        table(["operation", *providers], (line(*operation) for operation in result["operations"].items())),
    ]


# Pages


def all_figures(results: Mapping[str, Json]) -> str:
    """The figures of docs/benchmarks.md."""
    parts = model_figures(results) + trainer_figures(results)
    for name, figures in (
        ("training", training_figures),
        ("training_80gb", partial(training_figures, title="Training on GPUs of 80 GB", chart="training_80gb")),
        ("sharded_training", sharded_figures),
        ("meshes", mesh_figures),
        ("mesh_scaling", mesh_scaling_figures),
        ("memory", memory_figures),
        ("generation", generation_figures),
        ("starts", start_figures),
        ("exact_updates", update_figures),
        ("exact_mixtures", mixture_figures),
        ("packed_attention", packed_figures),
        ("operations", operation_figures),
        ("losses", loss_figures),
        ("contrastive", contrastive_figures),
        ("encoders", encoder_figures),
        ("scaling", scaling_figures),
        ("launching", launch_figures),
        ("delta_rule", delta_rule_figures),
    ):
        if name in results:
            parts += figures(results[name])
    parts += attention_figures(results) + recurrence_figures(results)
    return "\n\n".join(part for part in parts if part)


def highlights(results: Mapping[str, Json]) -> list[Json]:
    rows = [row for suite in ("operations", "losses") for row in measured(results.get(suite, {}).get("rows", ()))]
    return [row for name in HIGHLIGHTS for row in rows if label(row) == name]


def readme_figures(results: Mapping[str, Json]) -> str:
    """The figures of the README: a table and a plot."""
    peers, where = peer_table(results)
    plot = f"![Time over the floor, by operation]({RESULTS}/highlights.svg)" if highlights(results) else ""
    measured = f"bf16, one GPU; each provider has the fastest setting that fits. {where}." if peers else ""
    return "\n\n".join(part for part in (paragraph(measured), peers, plot) if part)


PAGES: dict[str, Callable[[Mapping[str, Json]], str]] = {
    "README.md": readme_figures,
    "docs/benchmarks.md": all_figures,
}


def with_figures(page: str, figures: str) -> str:
    """The page with its figures replaced."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}"


# Plots


def floor_chart(rows: Sequence[Json]) -> str:
    """An SVG with two bars for each row: our time and the fastest provider's, forward and backward, over the floor."""

    def group(row: Json) -> Group:
        found = compared(row)
        bars = [Bar(OURS, found["ours / floor"], f"{found['ours / floor']:.2f}")]
        if found["fastest peer"]:
            theirs = found["ours / floor"] / found["ours / fastest peer"]
            bars.append(Bar(found["fastest peer"], theirs, f"{theirs:.2f}"))
        return Group(label(row), bars)

    title = "time of forward and backward over the floor, lower is better"
    return bar_chart(title, "the floor: the least time that memory or FLOPs need", list(map(group, rows)), longest=4)


def outputs(root: Path) -> dict[Path, str]:
    """The content of every file that this program writes."""
    results = read_results(root / RESULTS)
    contents = {
        root / name: with_figures((root / name).read_text(encoding="utf-8"), figures(results))
        for name, figures in PAGES.items()
    }
    plots = {"highlights": highlights(results), "operations": measured(results.get("operations", {}).get("rows", ()))}
    drawn = {name: floor_chart(rows) for name, rows in plots.items() if rows}
    for name, chart in (
        ("generation", generation_chart),
        ("training", training_chart),
        ("training_80gb", training_chart),
        ("exact_updates", update_chart),
        ("mesh_scaling", mesh_scaling_chart),
    ):
        if drawing := chart(results.get(name, {"workloads": {}})):
            drawn[name] = drawing
    return contents | {root / RESULTS / f"{name}.svg": drawing for name, drawing in drawn.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is out of date")
    parser.add_argument("--root", type=Path, default=ROOT, help="directory of README.md, docs and benchmarks/results")
    arguments = parser.parse_args(argv)

    for path, content in outputs(arguments.root).items():
        if not arguments.check:
            path.write_text(content, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != content:
            sys.exit(f"{path} is out of date. Run python -m benchmarks.report")


if __name__ == "__main__":
    main()
