"""Tables and plot of what exactness does and costs, and of answers that start at once."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.generation_report import MODELS
from benchmarks.markdown import Json, bold, measured_on, number, paragraph, table
from benchmarks.row import OURS

CHART = "benchmarks/results/exact_updates.svg"
EDGE = 10
"""Steps at the begin and the end of a run, whose mean reward the table has."""


CAPTURING = 2
"""New tokens of a call that captures a prefill and a decode step."""


# GRPO, exact and not


def differences(run: Json) -> list[tuple[int, float]]:
    """(step, `sampler_difference`) of the steps that have an update."""
    return [(step, value) for step, value in enumerate(run["sampler_difference"], 1) if value is not None]


def update_line(exact: str, run: Json) -> list[str]:
    values = [value for _, value in differences(run)]
    first, last = (statistics.fmean(part) for part in (run["reward"][:EDGE], run["reward"][-EDGE:]))
    return [
        f"`--exact {exact}`",
        f"{max(values):.4g}",
        f"{statistics.fmean(values):.4g}",
        f"{sum(value == 0 for value in values)} of {len(values)}",
        number(run["step_ms"]),
        number(run["sampling_ms"]),
        number(run["update_ms"]),
        f"{first:.2f}, {last:.2f}",
    ]


def update_figures(result: Json) -> list[str]:
    """The section of docs/benchmarks.md."""
    shape, runs = result["shape"], result["runs"]
    about = (
        f"{len(runs['auto']['reward'])} steps of `ligerzoo train --method grpo` with the shape of "
        f"{MODELS.get(result['model'], result['model'])} and a vocabulary of 32,000, all weights trained, "
        f"{shape['prompts']} prompts x {shape['num-samples']} completions x {shape['max-new-tokens']} tokens, in rows "
        f"of up to {shape['seq-length']}. `sampler_difference` is the mean absolute difference of log-probabilities "
        "between sampling and the first update of a step. Steps without an update, whose rewards are all equal, have "
        f"none. Times are medians in ms. {measured_on(result)}."
    )
    header = ["", "largest `sampler_difference`", "mean", "steps in which it is 0", "step", "sampling", "update"]
    ratio = runs["auto"]["step_ms"] / runs["off"]["step_ms"]
    after = (
        f"In steps this small, exactness takes {ratio:.2f} times as long. The rewards, means of the first and the last "
        f"{EDGE} steps, are those of one run each, whose completions differ: they do not say which learns better."
    )
    return [
        "## Exact updates",
        paragraph(about),
        table([*header, "rewards"], (update_line(exact, run) for exact, run in runs.items())),
        f"![Difference of log-probabilities between sampling and the update, by step](../{CHART})",
        paragraph(after),
    ]


def update_chart(result: Json) -> str:
    """An SVG with a curve for each run: `sampler_difference` by step. Empty without any."""
    from ligerzoo.train.plot import plot_svg

    found = {exact: values for exact, run in result.get("runs", {}).items() if (values := differences(run))}
    curves = {f"--exact {exact}, at most {largest(values):.4g}": values for exact, values in found.items()}
    return plot_svg(curves, x="step", y="sampler_difference, nats per token") if curves else ""


def largest(values: Sequence[tuple[int, float]]) -> float:
    return max(value for _, value in values)


# Packed rows


def packed_line(row: Json) -> list[str]:
    tokens, heads, kv_heads, head_dim = row["shape"]
    ours, flex = row["providers"][OURS], row["providers"]["FlexAttention"]
    ratios = [flex[key] / ours[key] for key in ("forward_ms", "forward_backward_ms")]
    cells = [f"{number(entry['forward_ms'])} / {number(entry['forward_backward_ms'])}" for entry in (ours, flex)]
    return [
        f"{tokens:,} x {heads} x {kv_heads} x {head_dim}",
        f"{row['documents']:,} of {row['variant']}",
        str(row["batches"]),
        *cells,
        f"{ratios[0]:.2f}",
        bold(f"{ratios[1]:.2f}", ratios[1] >= 1),
        "batches" if row["packing pays"] else "FlexAttention",
    ]


def packed_figures(result: Json) -> list[str]:
    """The section of docs/benchmarks.md."""
    rows = [row for row in result["rows"] if len(row.get("providers", ())) == 2]
    if not rows:
        return []
    differing, compared = (sum(counts) for counts in zip(*(row.get("bits", (0, 0)) for row in rows), strict=True))
    wrong = 0
    for row in rows:
        ours, flex = (row["providers"][name]["forward_backward_ms"] for name in (OURS, "FlexAttention"))
        wrong += (ours <= flex) != row["packing pays"]
    about = (
        "Causal attention within the documents of one row, forward / forward and backward in ms: batches of documents "
        "on cuDNN (`ligerzoo.kernels.packed_attention`) against FlexAttention, compiled for the shape. Tokens x heads "
        "x key heads x head size, bf16. Plans and block masks, which all layers of a batch share, are made before. "
        f"Calls are timed one by one with their launches by the host. {measured_on(result)}."
    )
    header = ["row", "documents", "batches", "batches, ms", "FlexAttention, ms", "times as fast: forward"]
    after = (
        "The last column is what `attend` chooses where exactness is not asked for: the faster way, forward and "
        f"backward, in {len(rows) - wrong} of {len(rows)} rows."
    )
    if compared:
        after += f" Of documents in batches, {differing:,} of {compared:,} numbers differ from attention of each alone."
    return [
        "## Packed attention",
        paragraph(about),
        table([*header, "forward and backward", "chosen"], map(packed_line, rows)),
        paragraph(after),
    ]


# Mixtures


def mixture_figures(result: Json) -> list[str]:
    """The section of docs/benchmarks.md."""
    counts = result["placements"]
    texts, tokens, differing = (
        sum(found[key] for found in counts.values()) for key in ("placements", "tokens", "differing")
    )
    about = (
        "Qwen3-30B-A3B shape, bf16: decode steps of 48 layers after prompts of 512 tokens, with `exact=True` and "
        f"without; and training of 4 layers, before and after their routers became exact. {measured_on(result)}."
    )
    decoding = [
        [f"decode step, batch {rows}", *(f"{found[key]:.2f}" for key in ("default_ms", "exact_ms")), speed(found)]
        for rows, found in result["decoding"].items()
    ]
    training = [
        [f"{what}, {int(length):,} tokens", *(f"{found[key]:.2f}" for key in ("default_ms", "exact_ms")), speed(found)]
        for length, parts in result["training"].items()
        for what, found in parts.items()
    ]
    models = ", ".join(f"{name} {found['placements']}" for name, found in counts.items())
    after = (
        f"In {texts} texts that `generate(exact=True)` sampled ({models}; 2 to 4 layers, ragged batches of 1 to 33 "
        f"rows, prompts of up to 900 tokens), {differing} of {tokens:,} log-probabilities differ from those of one "
        "forward of the text alone."
    )
    return [
        "## Exact mixtures",
        paragraph(about),
        table(["", "default or before, ms", "exact, ms", "speed of exact"], [*decoding, *training]),
        paragraph(after),
    ]


def speed(found: Json) -> str:
    return f"{found['default_ms'] / found['exact_ms']:.2f}"


# First tokens


def start_figures(result: Json) -> list[str]:
    """The section of docs/benchmarks.md."""
    now, before = by_prompt(result["rows"]), by_prompt(result.get("before", ()))
    new = list(dict.fromkeys(row["new_tokens"] for row in result["rows"]))
    lines = []
    for (model, prompt), times in now.items():
        earlier = before.get((model, prompt), {})
        cells = [" \N{RIGHTWARDS ARROW} ".join(number(t[n]["ms"]) for t in (earlier, times) if n in t) for n in new]
        first = max(row["first_ms"] for n, row in times.items() if n <= CAPTURING)
        lines.append([MODELS.get(model, model), f"{prompt:,}", *cells, number(first)])
    about = (
        "`generate` of one prompt, greedy, bf16, in ms of wall-clock, medians of repeated calls: before and after "
        "prefills and first decode steps ran as captured graphs. The last column is the slowest first call of 1 or "
        f"{CAPTURING} new tokens, which captures; kernels were compiled before. {measured_on(result)}."
    )
    header = ["model", "prompt", *(f"{n} new token{'s' if n > 1 else ''}" for n in new), "first call"]
    parts = ["## Starts at once", paragraph(about), table(header, lines)]
    parts += [paragraph(shapes_text(model, found)) for model, found in result.get("random_shapes", {}).items()]
    return parts


def shapes_text(model: str, found: Json) -> str:
    """What repeated calls of random shapes take."""
    used = [f"{gib:.1f}" for gib in sorted(found["used_gib"])]
    memory = " to ".join(dict.fromkeys((used[0], used[-1])))
    return (
        f"{MODELS.get(model, model)}, {found['shapes']} random shapes of 1 to 8 rows, up to 700 tokens and 12 new "
        f"ones: the slowest call takes {found['first_ms']:.0f} ms while shapes are new, and {found['later_ms']:.0f} ms "
        f"later. The GPU's memory in use after each of {len(used)} passes: {memory} GiB."
    )


def by_prompt(rows: Sequence[Json]) -> dict[tuple[str, int], dict[int, Json]]:
    """The rows by model and tokens of the prompt, then by number of new tokens."""
    found: dict[tuple[str, int], dict[int, Json]] = {}
    for row in rows:
        found.setdefault((row["model"], row["prompt"]), {})[row["new_tokens"]] = row
    return found
