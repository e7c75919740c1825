"""Figures from the benchmarks' results: the README's tables, and plots.

    python -m benchmarks.report            # rewrites the README between its markers, and draws
    python -m benchmarks.report --check    # exits with 1 if the README says something else than the results

What has no results is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measure import PACKAGES
from benchmarks.row import OURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Json = dict[str, Any]

ROOT = Path(__file__).parent.parent
README, RESULTS = ROOT / "README.md", ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
COMMANDS = (
    "operations", "losses", "launching", "scaling", "training_step", "training_step --model qwen2_vl_2b", "loading"
)  # fmt: skip
STEPS = {"training_step": "of Llama-3.2-1B's shape", "training_step_qwen2_vl_2b": "of Qwen2-VL-2B's, with pictures"}
SUITES = ("operations", "losses", "launching", "scaling", *STEPS, "loading")
PEERS = ("torch", "torch linear_cross_entropy", "torch.compile", "liger-kernel", "cut-cross-entropy")
COLORS = {OURS: "#d1495b", "torch.compile": "#00798c", "liger-kernel": "#edae49", "cut-cross-entropy": "#66666e"}


def read_results(directory: Path) -> dict[str, Json]:
    return {
        name: json.loads(path.read_text(encoding="utf-8"))
        for name in SUITES
        if (path := directory / f"{name}.json").exists()
    }


# Tables


def paragraph(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *lines])


def bold(text: str, condition: bool) -> str:
    return f"**{text}**" if condition else text


def number(value: float | None) -> str:
    """Three digits; nothing for no figure."""
    if value is None:
        return ""
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits + (value < 1)}f}"


def measured_on(*results: Json) -> str:
    """The GPU and the versions of all these results, which may differ."""

    def values(key: str) -> str:
        found = dict.fromkeys(result["environment"].get(key, "not installed") for result in results)
        return " and ".join(value for value in found if value != "not installed")

    versions = ", ".join(f"{package} {values(package)}" for package in PACKAGES if values(package))
    return f"{values('gpu')}; {versions}"


def step_figures(step: Json, what: str, providers: Sequence[str]) -> list[list[str]]:
    """The time and the memory of a whole training step."""
    found, shape = step["providers"], step["shape"]

    def compared(what: str, key: str, show: Callable[[Json], str]) -> list[str]:
        best = min(provider[key] for provider in found.values())
        return [what, *(bold(show(found[n]), found[n][key] == best) if n in found else "" for n in providers)]

    def speed(figures: Json) -> str:
        return f"{figures['ms']:.0f} ms, {round(figures['tokens_per_s'], -2):,.0f} tokens/s"

    title = f"training step {what}, {shape['batch']} x {shape['length']} tokens of text, bf16, fused AdamW"
    memory = compared("its peak memory", "peak_gib", lambda figures: f"{figures['peak_gib']:.1f} GiB")
    return [compared(title, "ms", speed), memory]


def model_figures(results: Mapping[str, Json]) -> list[str]:
    """Whole training steps, and loading."""
    loading = results.get("loading")
    if loading is None and not STEPS.keys() & results.keys():
        return []
    providers = (OURS, "transformers + liger-kernel", "transformers")
    lines = []
    for name, what in STEPS.items():
        if name in results:
            lines += step_figures(results[name], what, providers)
    if loading is not None:
        seconds = {name: sum(parts) for name, parts in loading["median_import_and_load_s"].items()}
        what = f"import and load to the GPU, Llama-3-8B shape, {loading['gib']:.0f} GiB, warm page cache"
        best = min(seconds[name] for name in providers if name in seconds)
        cells = [bold(f"{seconds[n]:.1f} s", seconds[n] == best) if n in seconds else "" for n in providers]
        lines.append([what, *cells])
    links = {name: f"the step {what}" for name, what in STEPS.items()} | {"loading": "loading"}
    present = [f"[{text}](benchmarks/results/{name}.json)" for name, text in links.items() if name in results]
    where = measured_on(*(results[name] for name in links if name in results))
    parts = [
        paragraph(f"Whole models, each row measured in one run ({', '.join(present)}; {where}):"),
        table(["", *providers], lines),
    ]
    if loading is not None:
        parts.append(f"Reading the same safetensors files raw takes {seconds['raw safetensors']:.1f} s.")
    return parts


def label(row: Json) -> str:
    variant = row["variant"] and f", {row['variant']}"
    return f"{row['op'].replace('_', ' ')} {' x '.join(map(str, row['shape']))}{variant}"


def measured(rows: Iterable[Json]) -> list[Json]:
    """The rows in which we have figures."""
    return [row for row in rows if "forward_backward_ms" in row.get("providers", {}).get(OURS, {})]


def shown(rows: Iterable[Json]) -> list[Json]:
    """Those, less the peaked twins of rows of random logits."""
    kept: list[Json] = []
    for row in measured(rows):
        twins = [other for other in kept if (other["op"], other["shape"]) == (row["op"], row["shape"])]
        if row["variant"] != "peaked" or not twins:
            kept.append(row)
    return kept


def operation_line(row: Json, peers: Sequence[str]) -> list[str]:
    comparison, ours = row["comparison"]["forward_backward"], row["providers"][OURS]
    ratio, extra = comparison["ours / fastest peer"], ours.get("extra_mib")
    return [
        label(row),
        *(number(row["providers"].get(name, {}).get("forward_backward_ms")) for name in (OURS, *peers)),
        "" if ratio is None else bold(f"{ratio:.2f}", ratio <= 1),
        f"{comparison['ours / floor']:.2f}",
        "" if extra is None else f"{extra:.0f}",
    ]


def operation_figures(result: Json) -> list[str]:
    rows, rates = measured(result["rows"]), result["rates"]
    peers = [name for name in PEERS if any("errors" in row["providers"].get(name, {}) for row in rows)]
    about = (
        "Operations, bf16, forward and backward in ms ([all figures](benchmarks/results/operations.json), forward alone"
        f" and peaked logits among them; {measured_on(result)}). The last columns: our time over the fastest peer's, "
        f"eager torch included, and over the floor, the fewest bytes at the {rates['copy_tb_s']:.2f} TB/s of a copy "
        f"or the fewest operations at {rates['floor_tflop_s']:.0f} TFLOP/s (in this run the GPU kept up "
        f"{rates['bf16_tflop_s']:.0f} in a large product of random matrices); and our memory above inputs and "
        "gradients. The fastest is emphasized. Forward and backward of the smaller norms take less time on the GPU "
        "than to launch from Python, so that those rows tell of the host and differ from run to run."
    )
    return [
        paragraph(about),
        operation_table("operation", rows, peers),
        exactness(rows),
        "![Time over the floor, by operation](benchmarks/results/operations.svg)",
    ]


def operation_table(what: str, rows: Sequence[Json], peers: Sequence[str]) -> str:
    header = [what, OURS, *peers, "/ fastest", "/ floor", "extra MiB"]
    return table(header, [operation_line(row, peers) for row in shown(rows)])


def loss_figures(result: Json) -> list[str]:
    about = (
        "Post-training losses, rows x tokens x hidden size x vocabulary, bf16, forward and backward in ms, with the "
        "head of the reference model or teacher that DPO, KTO and JSD have "
        f"([figures](benchmarks/results/losses.json); {measured_on(result)}); the last columns as above:"
    )
    return [paragraph(about), operation_table("loss", measured(result["rows"]), ["liger-kernel"])]


def exactness(rows: Iterable[Json]) -> str:
    """How our worst relative error compares with eager torch's; not of a loss, where one number errs by luck."""
    ratios = {}
    for row in rows:
        eager = row["providers"].get("eager", {}).get("errors", {})
        for name, error in row["providers"][OURS]["errors"].items():
            if name != "loss" and eager.get(name):
                ratios[f"{name} of {label(row)}"] = error / eager[name]
    if not ratios:
        return ""
    worst = max(ratios, key=lambda name: ratios[name])
    most = f"at most {ratios[worst]:.2f} times eager torch's ({worst})"
    return paragraph(f"Against fp64, the error of our outputs and gradients is {most}.")


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

    about = f"([figures](benchmarks/results/launching.json); {measured_on(result)})"
    return [
        paragraph(
            f"What a call on small tensors costs the host, forward / forward and backward, in microseconds {about}:"
        ),
        table(["operation", *providers], (line(*operation) for operation in result["operations"].items())),
    ]


def scaling_figures(result: Json) -> list[str]:
    about = f"([figures](benchmarks/results/scaling.json); {measured_on(result)})"
    return [
        paragraph(f"The loss head as texts and vocabularies grow {about}:"),
        "![Time and memory of the loss head by tokens and vocabulary](benchmarks/results/scaling.svg)",
    ]


def figures(results: Mapping[str, Json]) -> str:
    """What stands between the README's markers."""
    parts = model_figures(results)
    if "operations" in results:
        parts += operation_figures(results["operations"])
    if "losses" in results:
        parts += loss_figures(results["losses"])
    if "launching" in results:
        parts += launch_figures(results["launching"])
    if "scaling" in results:
        parts += scaling_figures(results["scaling"])
    *commands, last = (f"`python -m benchmarks.{command}`" for command in COMMANDS)
    parts.append(
        paragraph(
            f"{', '.join(commands)} and {last} measure again, on a machine with a GPU and the packages compared with; "
            "`python -m benchmarks.report` then writes this section and its plots."
        )
    )
    return "\n\n".join(part for part in parts if part)


def with_figures(readme: str, results: Mapping[str, Json]) -> str:
    """The README with its figures renewed."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{figures(results)}\n\n{END}{after}"


# Plots


def save_plot(path: Path, size: tuple[float, float], grid: tuple[int, int], draw: Callable[[Any], None]) -> None:
    """Draws into an SVG that is the same for the same figures."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.hashsalt": "ligerzoo", "svg.fonttype": "none", "font.size": 9}):
        figure, axes = pyplot.subplots(*grid, figsize=size, layout="constrained", squeeze=False)
        draw(axes)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def draw_operations(result: Json, path: Path) -> None:
    """Of each operation our time and the fastest peer's, over the floor."""
    rows = shown(result["rows"])[::-1]  # the first on top

    def draw(axes: Any) -> None:
        axis: Axes = axes[0, 0]
        ours = [row["comparison"]["forward_backward"]["ours / floor"] for row in rows]
        ratios = [row["comparison"]["forward_backward"]["ours / fastest peer"] for row in rows]
        peers = [mine / ratio if ratio else 0 for mine, ratio in zip(ours, ratios, strict=True)]
        places = range(len(rows))
        axis.barh([place + 0.2 for place in places], ours, 0.4, color=COLORS[OURS], label=OURS)
        axis.barh([place - 0.2 for place in places], peers, 0.4, color="#b8b8b8", label="fastest peer")
        axis.axvline(1, color="black", linewidth=1, label="floor")
        axis.set_yticks(list(places), [label(row) for row in rows])
        axis.set_xlabel("time of forward and backward, over the floor")
        axis.margins(y=0.01)
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)

    save_plot(path, (8, 1 + 0.3 * len(rows)), (1, 1), draw)


def draw_scaling(result: Json, path: Path) -> None:
    """Time and memory by tokens (at the vocabulary with most rows), and by vocabulary (likewise)."""
    rows = measured(result["rows"])
    quantities = {"forward_backward_ms": "ms, forward and backward", "extra_mib": "MiB above inputs and gradients"}

    def draw(axes: Any) -> None:
        for column, (varies, what) in enumerate({0: "tokens", 2: "vocabulary"}.items()):
            fixed = [row["shape"][2 - varies] for row in rows]
            line = [row for row in rows if row["shape"][2 - varies] == max(fixed, key=fixed.count)]
            line.sort(key=lambda row: row["shape"][varies])
            for axis, (key, unit) in zip(axes[:, column], quantities.items(), strict=True):
                for name, color in COLORS.items():
                    points = [
                        (row["shape"][varies], max(1.0, row["providers"][name][key]))
                        for row in line
                        if key in row["providers"].get(name, {})
                    ]
                    if points:
                        axis.plot(*zip(*points, strict=True), color=color, marker="o", label=name)
                axis.set(xscale="log", yscale="log", xlabel=what, ylabel=unit)
                sizes = [row["shape"][varies] for row in line]
                axis.set_xticks(sizes, [str(size) for size in sizes])
                axis.minorticks_off()
        axes[0, 0].legend()

    save_plot(path, (8, 6), (2, 2), draw)


PLOTS: dict[str, Callable[[Json, Path], None]] = {"operations": draw_operations, "scaling": draw_scaling}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if the README is out of date")
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)

    results = read_results(arguments.results)
    readme = arguments.readme.read_text(encoding="utf-8")
    renewed = with_figures(readme, results)
    if arguments.check:
        if renewed != readme:
            sys.exit(f"{arguments.readme} is out of date: python -m benchmarks.report")
        return
    arguments.readme.write_text(renewed, encoding="utf-8")
    for name, draw in PLOTS.items():
        if name in results:
            draw(results[name], arguments.results / f"{name}.svg")


if __name__ == "__main__":
    main()
