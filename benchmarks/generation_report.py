"""Tables and plot of `benchmarks.generation`'s results, which may lack workloads and providers."""

from __future__ import annotations

from benchmarks.chart import bar_chart
from benchmarks.markdown import Json, bold, measured_on, number, paragraph, table
from benchmarks.row import OURS
from benchmarks.speeds import figures_of, ratio, speed, speed_bars, workloads_with

MODELS = {
    "llama_8b": "Llama-3-8B",
    "llama_1b": "Llama-3.2-1B",
    "qwen3_30b_a3b": "Qwen3-30B-A3B",
    "gpt_oss_20b": "gpt-oss-20b",
    "qwen3_5_4b": "Qwen3.5-4B",
    "gemma4_e4b": "Gemma 4 E4B",
    "nemotron_nano_30b": "Nemotron Nano 30B-A3B",
}
THEIRS = ("transformers", "transformers, torch.compile")
PROVIDERS = (OURS, f"{OURS} exact", f"{OURS}, torch.compile", *THEIRS)
LIMIT = "limit_tokens_per_s"
CHART = "benchmarks/results/generation.svg"


def model_name(workload: Json) -> str:
    return MODELS.get(workload["model"], workload["model"])


def label(workload: Json) -> str:
    return f"{model_name(workload)}, {workload['rows']} x {workload['prompt']} + {workload['new_tokens']}"


def share(workload: Json, tokens_per_s: float) -> str:
    """The share of what the bandwidth allows; empty if that is unknown."""
    return f"{tokens_per_s / workload[LIMIT]:.0%}" if LIMIT in workload else ""


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


# Plot


def charted(result: Json) -> list[Json]:
    """The workloads of the plot: those with a limit."""
    return [workload for workload in workloads_with(result, "decode_tokens_per_s") if LIMIT in workload]


def generation_chart(result: Json) -> str:
    """An SVG with a bar for each provider of each workload: tokens per second over the limit. Empty without any."""
    groups = [
        speed_bars(label(workload), figures_of(workload, "decode_tokens_per_s"), workload[LIMIT])
        for workload in charted(result)
    ]
    return bar_chart("tokens per second of decoding", "what the bandwidth allows", groups)
