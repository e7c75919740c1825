"""Tables and plot of `benchmarks.generation`'s results, which may lack workloads and providers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import count

from benchmarks.markdown import Json, bold, measured_on, number, paragraph, table
from benchmarks.row import OURS

MODELS = {
    "llama_8b": "Llama-3-8B",
    "llama_1b": "Llama-3.2-1B",
    "qwen3_30b_a3b": "Qwen3-30B-A3B",
    "gpt_oss_20b": "gpt-oss-20b",
    "qwen3_5_4b": "Qwen3.5-4B",
}
THEIRS = ("transformers", "transformers, torch.compile")
PROVIDERS = (OURS, f"{OURS} exact", f"{OURS}, torch.compile", *THEIRS)
LIMIT = "limit_tokens_per_s"
CHART = "benchmarks/results/generation.svg"


def workloads_with(result: Json, figure: str) -> list[Json]:
    """The workloads that measure a figure, which at least one provider has."""
    workloads = result["workloads"].values()
    return [workload for workload in workloads if any(figure in found for found in workload["providers"].values())]


def model_name(workload: Json) -> str:
    return MODELS.get(workload["model"], workload["model"])


def label(workload: Json) -> str:
    return f"{model_name(workload)}, {workload['rows']} x {workload['prompt']} + {workload['new_tokens']}"


def figures_of(workload: Json, figure: str) -> dict[str, float]:
    """The figure of each provider that has it."""
    return {name: found[figure] for name, found in workload["providers"].items() if figure in found}


def speed(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}"


def share(workload: Json, tokens_per_s: float) -> str:
    """The share of what the bandwidth allows; empty if that is unknown."""
    return f"{tokens_per_s / workload[LIMIT]:.0%}" if LIMIT in workload else ""


def ratio(speeds: Mapping[str, float], peers: Iterable[str]) -> str:
    """Our speed over that of the fastest of these peers; empty if one of the two is unknown."""
    fastest = max((speeds[peer] for peer in peers if peer in speeds), default=None)
    return "" if fastest is None or OURS not in speeds else f"{speeds[OURS] / fastest:.2f}"


def provider_name(workload: Json, provider: str) -> str:
    """The name of a provider, with the number of new tokens if it generates fewer."""
    new_tokens = workload["providers"][provider].get("new_tokens", workload["new_tokens"])
    return provider if new_tokens == workload["new_tokens"] else f"{provider}, {new_tokens} new tokens"


def speed_lines(workload: Json) -> list[list[str]]:
    """A line for each provider, with its error if it has no figures."""
    speeds = figures_of(workload, "decode_tokens_per_s")
    lines = []
    for provider, found in workload["providers"].items():
        start = [label(workload), provider_name(workload, provider)]
        if provider not in speeds:
            lines.append([*start, found["error"], "", "", "", "", ""])
            continue
        decoding = speeds[provider]
        lines.append(
            [
                *start, bold(speed(decoding), decoding == max(speeds.values())), share(workload, decoding),
                "" if provider == OURS else ratio(speeds, [provider]), speed(found["tokens_per_s"]),
                number(found.get("first_call_extra_s")), f"{found['peak_gib']:.1f}",
            ]
        )  # fmt: skip
    return lines


def first_token_parts(result: Json) -> list[str]:
    """Times to the first token, and our stages."""
    parts = []
    for workload in workloads_with(result, "first_token_s"):
        seconds = figures_of(workload, "first_token_s")
        times = [f"{name} {seconds[name]:.1f} s" for name in PROVIDERS if name in seconds]
        ours = workload["providers"].get(OURS, {})
        text = (
            f"Time to the first token, from the start of a process with the {model_name(workload)} checkpoint in the "
            f"page cache and a prompt of {workload['prompt']} tokens: {', '.join(times)}."
        )
        if "stages_s" in ours:
            text += f" Our stages: {stages(ours)}."
        if "cold" in ours:
            cold = ours["cold"]
            text += f" With an empty Triton cache: ligerzoo {cold['first_token_s']:.1f} s; stages: {stages(cold)}."
        parts.append(paragraph(text))
    return parts


def stages(figures: Json) -> str:
    """The seconds of each stage."""
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in figures["stages_s"].items())


def grpo_parts(result: Json) -> list[str]:
    """Sampling and update of a GRPO step."""
    return [
        paragraph(
            f"A GRPO step of {model_name(workload)}, {workload['prompts']} prompts x {workload['samples']} samples x "
            f"{workload['new_tokens']} tokens: sampling {ours['sampling_s']:.1f} s, update {ours['update_s']:.1f} s, "
            f"peak {ours['peak_gib']:.1f} GiB ({ours['optimizer']})."
        )
        for workload in workloads_with(result, "sampling_s")
        for ours in [workload["providers"][OURS]]
    ]


def generation_figures(result: Json) -> list[str]:
    """The section of docs/benchmarks.md."""
    if not result["workloads"]:
        return []
    text = (
        "Greedy decoding, bf16. Rows x tokens of the prompt + new tokens. The limit is the bytes of weights, keys and "
        f"values that a step reads, at the bandwidth of a copy. {measured_on(*result['workloads'].values())}."
    )
    header = ["model and batch", "provider", "tokens/s of decoding", "of the limit", "ligerzoo / it"]
    header += ["tokens/s with prefill", "first call, extra s", "peak GiB"]
    lines = [line for w in workloads_with(result, "decode_tokens_per_s") for line in speed_lines(w)]
    parts = ["## Generation", paragraph(text), table(header, lines) if lines else ""]
    if charted(result):
        parts.append(f"![Tokens per second over the limit, by model and batch](../{CHART})")
    return parts + first_token_parts(result) + grpo_parts(result)


def generation_highlights(result: Json) -> list[str]:
    """The README's table and plot."""
    workloads = workloads_with(result, "decode_tokens_per_s")
    if not workloads:
        return []
    providers = [name for name in PROVIDERS if any(name in w["providers"] for w in workloads)]

    def line(workload: Json) -> list[str]:
        speeds = figures_of(workload, "decode_tokens_per_s")
        best = max(speeds.values())
        cells = [bold(speed(speeds[name]), speeds[name] == best) if name in speeds else "" for name in providers]
        of_limit = share(workload, speeds[OURS]) if OURS in speeds else ""
        return [label(workload), *cells, ratio(speeds, THEIRS), of_limit]

    parts = [
        paragraph(f"Generation, greedy: {measured_on(*workloads)}."),
        table(
            ["tokens/s, rows x prompt + new tokens", *providers, "ligerzoo / transformers", "of the limit"],
            map(line, workloads),
        ),
    ]
    if charted(result):
        parts.append(f"![Tokens per second over the limit, by model and batch]({CHART})")
    return parts


# Plot

STYLE = """\
text { font: 12px sans-serif; fill: #222 } .label { text-anchor: end } .small { font-size: 10px }
.ours { fill: #d1495b } .peer { fill: #b8b8b8 } .limit { stroke: #222 }"""
LABELS, BARS, NOTES, HEAD = 240, 360, 260, 28  # widths of the columns, height of the title
BAR, GAP = 13, 10  # distance of bars, and of workloads


def charted(result: Json) -> list[Json]:
    """The workloads of the plot: those with a limit."""
    return [workload for workload in workloads_with(result, "decode_tokens_per_s") if LIMIT in workload]


def generation_chart(result: Json) -> str:
    """An SVG with a bar for each provider of each workload: tokens per second over the limit. Empty without any."""
    rows = [
        (label(workload), figures_of(workload, "decode_tokens_per_s"), workload[LIMIT]) for workload in charted(result)
    ]
    return bar_chart("tokens per second of decoding; the line is what the bandwidth allows", rows)


def bar_chart(title: str, rows: Sequence[tuple[str, Mapping[str, float], float]]) -> str:
    """An SVG with groups of bars. Empty without any.

    Args:
        title: what the bars show.
        rows: a label, the tokens per second of each provider, and the speed at the vertical line.
    """
    if not rows:
        return ""
    top, groups = HEAD, []
    for name, speeds, full in rows:
        groups.append(bars(name, speeds, full, top))
        top += BAR * len(speeds) + GAP
    width = LABELS + BARS + NOTES
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" width="{width}" height="{top}">',
        f'<style>{STYLE}</style><rect width="{width}" height="{top}" fill="white"/>',
        f'<text x="{LABELS}" y="14">{title}</text>',
        *groups,
        f'<line class="limit" x1="{LABELS + BARS}" x2="{LABELS + BARS}" y1="{HEAD}" y2="{top - GAP}"/>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def bars(name: str, speeds: Mapping[str, float], full: float, top: int) -> str:
    """The label and the bars of one group."""
    drawn = [f'<text class="label" x="{LABELS - 8}" y="{BAR * len(speeds) // 2 + 4}">{escape(name)}</text>']
    for y, (provider, tokens_per_s) in zip(count(0, BAR), speeds.items()):
        width = BARS * tokens_per_s / full
        note = f"{speed(tokens_per_s)} {escape(provider)}"
        drawn.append(
            f'<rect class="{"ours" if provider == OURS else "peer"}" x="{LABELS}" y="{y}" width="{width:.0f}" '
            f'height="10"/><text class="small" x="{LABELS + width + 4:.0f}" y="{y + 9}">{note}</text>'
        )
    return f'<g transform="translate(0 {top})">{"".join(drawn)}</g>'
