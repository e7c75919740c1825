"""The benchmarks of exactness and of packed rows: tiny runs on a CPU, and their tables and plot."""

import json
from itertools import accumulate
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import exact_report, exact_updates, packed_attention, report, starts
from benchmarks.row import OURS
from ligerzoo.cli import main

ENVIRONMENT = {"gpu": "some GPU", "torch": "2.11.0"}


# GRPO, exact and not


def test_the_command_logs_what_the_benchmark_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exact_updates.write_inputs(tmp_path, "tiny", "cpu")
    assert main(exact_updates.arguments_of(tmp_path, "off", 2, "cpu")) == 0
    assert "Log-probabilities of sampling are not exact: --exact off" in capsys.readouterr().out
    found = exact_updates.summary(exact_updates.step_entries(tmp_path / "off" / "log.jsonl"), "not exact")
    assert len(found["sampler_difference"]) == len(found["reward"]) == 2
    assert all(value is not None for value in found["sampler_difference"])
    assert 0 < found["sampling_ms"] + found["update_ms"] <= 1.1 * found["step_ms"]


@pytest.mark.slow
def test_both_runs_start_in_new_processes(tmp_path: Path) -> None:
    out = tmp_path / "exact_updates.json"
    exact_updates.main(["--model", "tiny", "--steps", "2", "--device", "cpu", "--out", str(out)])
    result = json.loads(out.read_text())
    assert list(result["runs"]) == ["auto", "off"]
    assert result["runs"]["auto"]["reward"] == result["runs"]["off"]["reward"]  # neither is exact on a CPU
    assert "Hopper" in result["runs"]["auto"]["says"]
    assert "2 steps of `ligerzoo train --method grpo`" in "\n".join(exact_report.update_figures(result))


@pytest.mark.slow
def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    exact_updates.write_inputs(tmp_path, "tiny", "cpu")
    (tmp_path / "reward.py").write_text("def reward(**fields):\n    raise ValueError('no reward')\n")
    with pytest.raises(RuntimeError, match="no reward"):
        exact_updates.train(tmp_path, "off", 1, "cpu")


def updates() -> dict[str, Any]:
    times = {"step_ms": 300.0, "sampling_ms": 40.0, "update_ms": 250.0, "first_step_ms": 5000.0, "says": ""}
    runs = {
        "auto": {**times, "sampler_difference": [0.0, 0.0, 0.0], "reward": [0.25, 0.5, 0.75]},
        "off": {**times, "step_ms": 200.0, "sampler_difference": [0.012, 0.006, None], "reward": [0.0, 0.5, 1.0]},
    }
    return {"environment": ENVIRONMENT, "model": "llama_1b", "shape": exact_updates.SHAPE, "runs": runs}


def test_the_table_of_updates() -> None:
    docs = report.all_figures({"exact_updates": updates()})
    assert "| `--exact auto` | 0 | 0 | 3 of 3 | 300 | 40.0 | 250 | 0.50, 0.50 |" in docs
    assert "| `--exact off` | 0.012 | 0.009 | 0 of 2 | 200 | 40.0 | 250 | 0.50, 0.50 |" in docs
    assert "takes 1.50 times as long" in docs
    assert "exact_updates.svg" in docs


def test_the_plot_of_updates_has_the_steps_with_an_update() -> None:
    chart = ElementTree.fromstring(exact_report.update_chart(updates()))
    svg = "{http://www.w3.org/2000/svg}"
    lines = [line.attrib["points"].split() for line in chart.iter(f"{svg}polyline")]
    assert [len(points) for points in lines] == [3, 2]
    assert len({point.split(",")[1] for point in lines[0]}) == 1
    texts = {text.text for text in chart.iter(f"{svg}text")}
    assert {"--exact auto, at most 0", "--exact off, at most 0.012"} <= texts
    assert exact_report.update_chart({"workloads": {}}) == ""


# Packed rows


def test_documents_fill_each_row() -> None:
    found = list(packed_attention.rows(quick=False))
    assert len({row.name for row in found}) == len(found) == 30
    for row in found:
        assert sum(row.lengths()) == row.tokens
        assert max(row.lengths()) <= (row.length if row.kind == "each" else 2 * row.length)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_both_ways_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    lengths = [5, 1, 20, 6]
    spans = list(zip([0, *accumulate(lengths)], lengths, strict=False))
    q, k, v = (torch.randn(1, 32, heads, 16) for heads in (4, 2, 2))
    ours, batches = packed_attention.batches_of(spans, 32, "cpu")
    assert batches >= 1
    with torch.no_grad():
        torch.testing.assert_close(ours(q, k, v), packed_attention.Flex().of(lengths, "cpu")(q, k, v))


def test_bits_are_compared_with_documents_alone() -> None:
    x = [torch.randn(1, 9, heads, 16) for heads in (4, 2, 2)]
    spans = [(0, 5), (5, 4)]
    alone = torch.cat([packed_attention.attend(*(t[:, a : a + n] for t in x)) for a, n in spans], 1)
    assert packed_attention.differing_bits(alone, x, spans) == [0, 9 * 4 * 16]
    alone[0, 6, 1, 3] += 1
    assert packed_attention.differing_bits(alone, x, spans) == [1, 9 * 4 * 16]


def test_a_quick_run_writes_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention, "DOCUMENTS", (("each", 2048), ("mean", 2048)))
    monkeypatch.setattr(packed_attention, "HEAD_DIMS", (16,))
    out = tmp_path / "packed_attention.json"
    packed_attention.main(["--quick", "--device", "cpu", "--out", str(out)])
    found = json.loads(out.read_text())
    assert [row["variant"] for row in found["rows"]] == ["32 tokens each", "32 tokens on average"]
    for row in found["rows"]:
        assert row["providers"][OURS]["forward_backward_ms"] > 0
        assert isinstance(row["packing pays"], bool)
    assert exact_report.packed_figures(found) == []  # FlexAttention needs a GPU


def test_the_table_of_packed_rows() -> None:
    row = {
        "shape": [8192, 32, 8, 128], "variant": "2048 tokens each", "documents": 4, "batches": 1, "packing pays": True,
        "providers": {
            OURS: {"forward_ms": 0.5, "forward_backward_ms": 1.5},
            "FlexAttention": {"forward_ms": 0.25, "forward_backward_ms": 3.0},
        },
        "bits": [0, 100],
    }  # fmt: skip
    slower = {**row, "variant": "100 tokens on average", "documents": 80, "batches": 3}
    slower["providers"] = {**row["providers"], OURS: {"forward_ms": 1.0, "forward_backward_ms": 6.0}}  # type: ignore[dict-item]
    failed = {"shape": [8192, 32, 8, 64], "variant": "512 tokens on average", "error": "OutOfMemoryError"}
    docs = report.all_figures({"packed_attention": {"environment": ENVIRONMENT, "rows": [row, slower, failed]}})
    where = "| 8,192 x 32 x 8 x 128 |"
    assert f"{where} 4 of 2048 tokens each | 1 | 0.500 / 1.50 | 0.250 / 3.00 | 0.50 | **2.00** | batches |" in docs
    assert f"{where} 80 of 100 tokens on average | 3 | 1.00 / 6.00 | 0.250 / 3.00 | 0.25 | 0.50 | batches |" in docs
    assert "the faster way, forward and backward, in 1 of 2 rows" in docs.replace("\n", " ")
    assert "0 of 200 numbers differ" in docs.replace("\n", " ")


# Mixtures and first tokens


def test_the_table_of_mixtures() -> None:
    counts = {"placements": 10, "tokens": 1000, "differing": 0}
    result = {
        "environment": ENVIRONMENT,
        "decoding": {"8": {"default_ms": 8.0, "exact_ms": 10.0}},
        "training": {"8192": {"forward": {"default_ms": 20.0, "exact_ms": 16.0}}},
        "placements": {"Mixtral": counts, "gpt-oss": {**counts, "differing": 2}},
    }
    docs = report.all_figures({"exact_mixtures": result})
    assert "| decode step, batch 8 | 8.00 | 10.00 | 0.80 |" in docs
    assert "| forward, 8,192 tokens | 20.00 | 16.00 | 1.25 |" in docs
    assert "In 20 texts" in docs
    assert "2 of 2,000 log-probabilities differ" in docs.replace("\n", " ")


def test_first_tokens_keep_the_times_from_before(tmp_path: Path) -> None:
    out = tmp_path / "starts.json"
    before = [{"model": "tiny", "prompt": 16, "new_tokens": 1, "first_ms": 9.0, "ms": 7.0}]
    out.write_text(json.dumps({"before": before}))
    shape = ["--models", "tiny", "--prompts", "16", "--new-tokens", "1", "2", "--shapes", "2", "--longest", "20"]
    starts.main([*shape, "--out", str(out)])
    found = json.loads(out.read_text())
    assert found["before"] == before
    assert [(row["prompt"], row["new_tokens"]) for row in found["rows"]] == [(16, 1), (16, 2)]
    assert found["random_shapes"]["tiny"]["later_ms"] > 0
    assert "| tiny | 16 | 7.00 \N{RIGHTWARDS ARROW} " in report.all_figures({"starts": found})


def test_the_table_of_first_tokens() -> None:
    def row(new_tokens: int, first_ms: float, ms: float) -> dict[str, Any]:
        return {"model": "llama_8b", "prompt": 512, "new_tokens": new_tokens, "first_ms": first_ms, "ms": ms}

    rows = [row(1, 60.0, 15.0), row(64, 300.0, 290.0)]
    shapes = {"llama_8b": {"shapes": 50, "first_ms": 700.0, "later_ms": 170.0, "used_gib": [22.19, 22.19, 23.0]}}
    result = {"environment": ENVIRONMENT, "rows": rows, "before": [row(1, 70.0, 25.0)], "random_shapes": shapes}
    docs = report.all_figures({"starts": result}).replace("\n", " ")
    assert "| Llama-3-8B | 512 | 25.0 \N{RIGHTWARDS ARROW} 15.0 | 290 | 60.0 |" in docs
    assert "takes 700 ms while shapes are new, and 170 ms later" in docs
    assert "22.2 to 23.0 GiB" in docs
    assert report.all_figures({"starts": {"environment": ENVIRONMENT, "rows": rows}})
