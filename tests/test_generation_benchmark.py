"""The benchmark of generation: tiny workloads with every provider on a CPU, its processes, and its report."""

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import decoding, first_token, generation, generation_report, grpo, report
from benchmarks.compiled_decoding import CompiledDecoding
from benchmarks.processes import measured_apart
from benchmarks.row import OURS
from benchmarks.workloads import read_workloads
from ligerzoo.errors import LigerzooError
from tests.covering import long_cases

MODELS = ["tiny", "tiny_moe"]


@pytest.mark.parametrize("case", long_cases({"model": MODELS, "provider": list(decoding.PROVIDERS)}), ids=str)
def test_every_provider_generates(case: dict[str, str]) -> None:
    provider, model = case["provider"], case["model"]
    if "transformers" in provider:
        pytest.importorskip("transformers")
    try:
        result = decoding.Start(provider, model, calls=2)()(model)
    except LigerzooError as error:  # models and devices that lack exact decoding
        if provider != decoding.EXACT or "exact" not in str(error):
            raise
        return
    assert len(result["all_s"]) == 2
    assert result["decode_tokens_per_s"] > 0
    assert result["tokens_per_s"] > 0
    assert result["prefill_s"] > 0
    assert result["build_s"] > 0
    assert result["new_tokens"] == 32


def test_a_provider_may_generate_fewer_tokens() -> None:
    generator = decoding.with_ligerzoo(decoding.CONFIGS["tiny"])
    fewer = dataclasses.replace(generator, max_new_tokens=5)
    result = decoding.measure(fewer, decoding.WORKLOADS["tiny"], 1)
    assert result["new_tokens"] == 5
    step = (result["all_s"][0] - result["prefill_s"]) / 4
    assert result["decode_tokens_per_s"] == pytest.approx(2 / step)
    assert result["tokens_per_s"] == pytest.approx(2 * 32 / (result["prefill_s"] + 31 * step))


def test_a_provider_that_stops_early_is_refused() -> None:
    def stops(prompts: torch.Tensor, new_tokens: int) -> torch.Tensor:
        return prompts

    generator = decoding.Generator(stops, lambda: None)
    with pytest.raises(RuntimeError, match=r"generated \(2, 16\) tokens; expected 32"):
        decoding.measure(generator, decoding.WORKLOADS["tiny"], 1)


@pytest.mark.slow
@pytest.mark.parametrize("model", [pytest.param("tiny", marks=pytest.mark.thorough), "tiny_moe"])
def test_compiled_layers_generate_the_same_with_one_graph_for_each_shape(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(decoding, "DTYPE", torch.float32)
    ours = decoding.build(decoding.CONFIGS[model])
    graphs = []

    def counted(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = CompiledDecoding(ours, counted)
    for rows in (1, 3):
        for _ in range(2):
            prompts = torch.randint(64, (rows, 7))
            expected = ours.generate(prompts, max_new_tokens=9, eos_token_id=[])
            assert torch.equal(compiled.generate(prompts, 9), expected)
    assert len(graphs) == 2


def test_the_bytes_of_a_step() -> None:
    workload = decoding.WORKLOADS["llama_8b_1"]
    weights = 2 * (8_030_261_248 - 128256 * 4096)
    cache = (512 + 128) * 32 * 2 * 8 * 128 * 2
    assert decoding.limit(workload)["gb_per_step"] == pytest.approx((weights + cache) / 1e9)


def test_a_step_of_a_mixture_reads_the_selected_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "BANDWIDTH", {"none": 1e9})
    monkeypatch.setattr(decoding, "DEVICE", "cpu")
    few, many = (decoding.Workload("tiny_moe", rows, 16, 32) for rows in (1, 1000))
    config = decoding.CONFIGS["tiny_moe"]
    experts = 2 * 8 * 3 * 32 * 16 * 2  # layers, experts, matrices, bf16
    token = 2 * config.num_hidden_layers * config.kv_heads * config.head_size * 2 * (16 + 16)
    least, most = (decoding.limit(workload) for workload in (few, many))
    read = (most["gb_per_step"] - least["gb_per_step"]) * 1e9
    assert read == pytest.approx(999 * token + experts * (1 - config.num_experts_per_tok / 8))
    assert least["limit_tokens_per_s"] == pytest.approx(1 / least["gb_per_step"])


def test_a_step_of_grpo_has_times_and_changes_the_weights() -> None:
    model = decoding.build(decoding.CONFIGS["tiny"])
    before = [weight.detach().clone() for weight in model.parameters()]
    result = grpo.measure(model, grpo.WORKLOADS["grpo_tiny"], calls=1)
    assert result["sampling_s"] > 0
    assert result["update_s"] > 0
    assert not all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_microbatches_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "DTYPE", torch.float32)
    model = decoding.build(decoding.CONFIGS["tiny"])
    out = grpo.sample(model, torch.randint(64, (2, 8)), grpo.WORKLOADS["grpo_tiny"])
    assert out.sequences.shape == (8, 16)
    gradients = []
    for microbatch in (8, 2):
        torch.manual_seed(0)
        workload = grpo.Workload("tiny", 2, 4, 8, 8, microbatch)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.step = lambda: gradients.append([w.grad.clone() for w in model.parameters()])  # type: ignore[assignment, method-assign, misc, union-attr]
        grpo.update(model, optimizer, out, workload)
    assert any(gradient.abs().max() > 0 for gradient in gradients[0])
    for whole, parts in zip(*gradients, strict=True):
        torch.testing.assert_close(whole, parts)


# Processes


def measure_item(item: str) -> dict[str, Any]:
    if item == "fails":
        raise RuntimeError("first line\nsecond line")
    if item == "hangs":
        time.sleep(600)
    if item == "dies":
        os._exit(3)
    return {"process": os.getpid()}


def prepare() -> Callable[[str], dict[str, Any]]:
    return measure_item


def refuse() -> Callable[[str], dict[str, Any]]:
    raise ImportError("no such package")


@pytest.mark.slow
def test_an_item_that_fails_or_dies_ends_its_process_only() -> None:
    found = dict(measured_apart(prepare, ["first", "second", "fails", "dies", "last"], limit=120))
    assert found["first"] == found["second"]
    assert found["fails"] == {"error": "RuntimeError: first line"}
    assert found["dies"] == {"error": "the process ended without a result"}
    assert found["last"]["process"] not in (os.getpid(), found["first"]["process"])


def test_an_item_that_takes_too_long_has_an_error() -> None:
    assert dict(measured_apart(prepare, ["hangs"], limit=1)) == {"hangs": {"error": "not finished within 1 s"}}


@pytest.mark.slow
def test_a_provider_that_cannot_start_has_an_error() -> None:
    assert dict(measured_apart(refuse, ["item"], limit=120)) == {"item": {"error": "ImportError: no such package"}}


# Results


def test_workloads_are_selected_by_pattern() -> None:
    assert generation.matching(["llama_1b_*", "grpo_8b"]) == ["llama_1b_1", "llama_1b_32", "grpo_8b"]
    assert not any("tiny" in name for name in generation.matching([]))
    with pytest.raises(SystemExit, match="got llama_9b; expected names or patterns of llama_8b_1"):
        generation.matching(["llama_9b"])


@pytest.mark.thorough  # starts four processes; tests/test_training_benchmark.py runs a benchmark too
def test_a_run_replaces_its_measurements_and_keeps_the_others(tmp_path: Path) -> None:
    out = tmp_path / "results" / "generation.json"
    before = generation.Results(out)
    before.add("tiny", "transformers", {"error": "kept"})
    before.add("tiny", OURS, {"error": "of an earlier run"})
    before.add("llama_1b_1", OURS, {"error": "kept"})
    names = ["--workloads", "tiny", "first_token_tiny", "grpo_tiny", "--providers", OURS, decoding.EXACT]
    generation.main([*names, "--out", str(out), "--calls", "1"])
    workloads = json.loads(out.read_text())["workloads"]
    assert list(workloads) == ["llama_1b_1", "tiny", "first_token_tiny", "grpo_tiny"]
    assert workloads["llama_1b_1"]["providers"] == {OURS: {"error": "kept"}}
    assert list(workloads["tiny"]["providers"]) == [OURS, decoding.EXACT, "transformers"]
    assert workloads["tiny"]["providers"]["transformers"] == {"error": "kept"}
    assert workloads["tiny"]["providers"][OURS]["tokens_per_s"] > 0
    first = workloads["first_token_tiny"]["providers"][OURS]
    assert sum(first["stages_s"].values()) == pytest.approx(first["captured_s"], rel=1e-4)
    assert list(first["stages_s"]) == list(first["cold"]["stages_s"])
    assert first["cold"]["compiled"] == {}
    step = workloads["grpo_tiny"]["providers"][OURS]
    assert step.keys() == {"sampling_s", "update_s", "peak_gib", "optimizer"}
    assert step["optimizer"] == "AdamW, torch.bfloat16"
    assert "torch" in workloads["tiny"]["environment"]
    text = "\n".join(generation_report.generation_figures(json.loads(out.read_text())))
    assert "| tiny, 2 x 16 + 32 | ligerzoo | **" in text


def test_files_of_several_runs_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / f"{i}.json" for i in range(4)]
    first, second, other = map(generation.Results, paths[:3])
    first.add("llama_1b_1", OURS, {"error": "first"})
    first.add("tiny", OURS, {"error": "first"})
    second.add("tiny", "transformers", {"error": "second"})
    second.add("tiny", OURS, {"error": "second"})
    generation.main(["--merge", *map(str, paths[:2]), "--out", str(paths[3])])
    merged = read_workloads(paths[3])
    assert merged["llama_1b_1"]["providers"] == {OURS: {"error": "first"}}
    assert merged["tiny"]["providers"] == {OURS: {"error": "second"}, "transformers": {"error": "second"}}
    monkeypatch.setattr("benchmarks.workloads.environment", lambda: {"gpu": "another"})
    other.add("tiny", "transformers", {"error": "third"})
    generation.main(["--merge", str(paths[2]), "--out", str(paths[3])])
    merged = read_workloads(paths[3])
    assert merged["llama_1b_1"]["providers"] == {OURS: {"error": "first"}}
    assert merged["tiny"]["providers"] == {"transformers": {"error": "third"}}
    assert merged["tiny"]["environment"] == {"gpu": "another"}


@pytest.mark.thorough  # starts two processes; the test above measures ours in the same way
def test_transformers_loads_the_checkpoint_of_a_fresh_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    checkpoint = tmp_path / "tiny"
    first_token.write_checkpoint(checkpoint, "tiny")
    result = first_token.measure("transformers", checkpoint, 16, rounds=1, limit=120)
    assert 0 < result["first_token_s"] < result["captured_s"]
    assert result["stages_s"]["import transformers"] > 0


def test_a_fresh_process_that_takes_too_long_has_an_error(tmp_path: Path) -> None:
    assert first_token.measure(OURS, tmp_path, 16, rounds=1, limit=0.01) == {"error": "not finished within 0 s"}


# Report


def speeds(**tokens_per_s: float) -> dict[str, Any]:
    return {
        name.replace("_", ", "): {"decode_tokens_per_s": speed, "tokens_per_s": speed / 2, "peak_gib": 16.04}
        for name, speed in tokens_per_s.items()
    }


def result() -> dict[str, Any]:
    environment = {"gpu": "some GPU", "torch": "2.11.0"}
    shape = {"environment": environment, "model": "llama_8b", "rows": 32, "prompt": 512, "new_tokens": 256}
    providers = speeds(ligerzoo=5000.0, transformers=575.0)
    providers["ligerzoo"]["first_call_extra_s"] = 1.25
    providers["transformers"]["new_tokens"] = 32
    providers["transformers, torch.compile"] = {"error": "not finished within 240 s"}
    return {
        "workloads": {
            "llama_8b_32": {**shape, "limit_tokens_per_s": 8000.0, "providers": providers},
            "llama_8b_8": {**shape, "rows": 8, "providers": {"transformers": {"error": "OutOfMemoryError"}}},
            "first_token_8b": {
                "environment": environment,
                "model": "llama_8b",
                "prompt": 512,
                "providers": {
                    OURS: {
                        "first_token_s": 4.0,
                        "captured_s": 5.0,
                        "stages_s": {"import torch": 1.5, "load": 2.0},
                        "cold": {"first_token_s": 9.0, "captured_s": 10.0, "stages_s": {"load": 6.5}},
                    },
                    "transformers": {"first_token_s": 12.0, "captured_s": 13.0},
                },
            },
            "grpo_8b": {
                **shape,
                "prompts": 16,
                "samples": 8,
                "new_tokens": 512,
                "providers": {OURS: {"sampling_s": 8.0, "update_s": 9.5, "peak_gib": 110.0, "optimizer": "AdamW"}},
            },
        }
    }


def test_the_tables_of_generation() -> None:
    docs = "\n".join(generation_report.generation_figures(result()))
    where = "Llama-3-8B, 32 x 512 + 256"
    assert f"| {where} | ligerzoo | **5,000** | 62% |  | 2,500 | 1.25 | 16.0 |" in docs
    assert f"| {where} | transformers, 32 new tokens | 575 | 7% | 8.70 | 288 |  | 16.0 |" in docs
    assert f"| {where} | transformers, torch.compile | not finished within 240 s |  |  |  |  |  |" in docs
    assert "8 x 512 + 256 | transformers | OutOfMemoryError" not in docs  # no provider has figures
    text = docs.replace("\n", " ")
    assert (
        "prompt of 512 tokens: ligerzoo 4.0 s, transformers 12.0 s. Our stages: import torch 1.50 s, load 2.00 s."
        in text
    )
    assert "With an empty Triton cache: ligerzoo 9.0 s; stages: load 6.50 s." in text
    assert "16 prompts x 8 samples x 512 tokens: sampling 8.0 s, update 9.5 s, peak 110.0 GiB (AdamW)." in text
    readme = report.readme_figures({"generation": result()})
    assert f"| decoding, {where}, tokens/s | **5,000** | 575 transformers | 8.70 |" in readme
    assert "some GPU; torch 2.11.0." in readme


def test_the_plot_of_generation() -> None:
    chart = ElementTree.fromstring(generation_report.generation_chart(result()))
    svg = "{http://www.w3.org/2000/svg}"
    bars = [(bar.attrib["class"], float(bar.attrib["width"])) for bar in chart.iterfind(f"{svg}rect[@y='48']")]
    bars += [(bar.attrib["class"], float(bar.attrib["width"])) for bar in chart.iterfind(f"{svg}rect[@y='61']")]
    assert bars == [("ours", 225), ("peer", 26)]  # of 360
    texts = {note.text for note in chart.iterfind(f"{svg}text")}
    assert {"Llama-3-8B, 32 x 512 + 256", "5,000 ligerzoo", "575 transformers", "what the bandwidth allows"} <= texts


def test_partial_results_of_generation() -> None:
    empty: dict[str, Any] = {"workloads": {}}
    assert generation_report.generation_figures(empty) == []
    assert generation_report.generation_chart(empty) == ""
    partial = result()
    del partial["workloads"]["llama_8b_32"]["limit_tokens_per_s"]
    del partial["workloads"]["llama_8b_32"]["providers"][OURS]
    assert generation_report.generation_chart(partial) == ""
    assert "**575** |  |  |" in "\n".join(generation_report.generation_figures(partial))
    assert report.readme_figures({"generation": partial}) == ""
    del partial["workloads"]["llama_8b_32"]
    docs = report.all_figures({"generation": partial})
    assert "## Generation" in docs
    assert "|" not in docs
    assert report.readme_figures({"generation": partial}) == ""


def test_the_report_draws_generation(tmp_path: Path) -> None:
    for page in (tmp_path / name for name in report.PAGES):
        page.parent.mkdir(exist_ok=True)
        page.write_text(f"{report.BEGIN}\n{report.END}\n")
    results = tmp_path / report.RESULTS
    results.mkdir(parents=True)
    (results / "generation.json").write_text(json.dumps(result()))
    report.main(["--root", str(tmp_path)])
    report.main(["--root", str(tmp_path), "--check"])
    assert (results / "generation.svg").exists()
    assert "5,000" in (tmp_path / "README.md").read_text()
    assert "(../benchmarks/results/generation.svg)" in (tmp_path / "docs/benchmarks.md").read_text()
