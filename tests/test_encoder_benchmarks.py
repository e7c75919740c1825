"""The benchmarks of contrastive losses and encoders: tiny runs with every provider on a CPU, and their tables."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import contrastive, encoders, report, session
from benchmarks.row import OURS, Machine, measure_row
from benchmarks.suite import compact_row
from benchmarks.workloads import read_workloads

MACHINE = Machine(bytes_per_second=1e9, flops_per_second=1e9, measured_flops_per_second=1e9)
ENVIRONMENT = {"gpu": "some GPU", "torch": "2.11.0"}
FLEX = "transformers, flex_attention, packed"

pytestmark = pytest.mark.filterwarnings("ignore")


# Contrastive losses


@pytest.mark.parametrize("workload", [*contrastive.workloads(lambda n: n // 512)], ids=str)
def test_every_provider_computes_the_loss(workload: contrastive.Workload) -> None:
    result = measure_row(contrastive.row(workload), device="cpu", machine=MACHINE, seconds=0.001)
    found = {name: entry for name, entry in result["providers"].items() if name != "torch.compile"}
    assert len(found) == (3 if workload.dtype == torch.float32 else 4)
    bound = 1e-4 if workload.dtype == torch.float32 else 0.1
    assert max(error for entry in found.values() for error in entry["errors"].values()) < bound


def test_the_table_of_contrastive_losses() -> None:
    workload = contrastive.Workload(64, 8, negatives=64)
    result = compact_row(measure_row(contrastive.row(workload), device="cpu", machine=MACHINE, seconds=0.001))
    figures = {
        OURS: {"forward_ms": 1.0, "forward_backward_ms": 3.0, "extra_mib": 100.0},
        "eager": {"forward_ms": 2.0, "forward_backward_ms": 6.0, "extra_mib": 9000.0},
        "torch.compile": {"forward_ms": 2.0, "forward_backward_ms": 4.0, "extra_mib": 5000.0},
    }
    failed = {"name": "contrastive 1", "error": "OutOfMemoryError: no"}
    rows = [{**result, "providers": figures}, failed]
    docs = report.all_figures({"contrastive": {"environment": ENVIRONMENT, "rows": rows}})
    cells = "3.00 / 100 | 6.00 / 9000 |  | 4.00 / 5000 |  | **0.75** |"
    assert f"| 64 x 8, bf16, 64 negatives | {cells}" in docs


# Encoders


@pytest.mark.parametrize("name", [name for name in encoders.WORKLOADS if "tiny" in name])
def test_providers_compute_the_same(name: str, tmp_path: Path) -> None:
    workload = encoders.WORKLOADS[name]
    if workload.task == "encoding":
        pytest.importorskip("sentence_transformers")
        checkpoint, texts = encoders.checkpoint_for(workload, tmp_path), ["w1 w2 w3", "w4", "w5 w60 w2 " * 4]
        ours, theirs = (load(checkpoint)(texts, 2).float() for load in encoders.ENCODERS.values())
        assert ours.abs().mean() > 0.2
        torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0)
        return
    pytest.importorskip("transformers")
    checkpoint, losses = encoders.checkpoint_for(workload, tmp_path), {}
    torch.compiler.set_stance("force_eager")  # FlexAttention compiles for long on a CPU, and computes no gradients
    try:
        for provider, load in encoders.TRAINERS.items():
            model, loss_of = load(checkpoint, workload)
            with torch.no_grad():
                model.train()
                losses[provider] = float(loss_of())
    finally:
        torch.compiler.set_stance("default")
    assert max(losses.values()) == pytest.approx(min(losses.values()), rel=0.02)
    assert min(losses.values()) > 1


@pytest.mark.parametrize("provider", [OURS, "transformers, sdpa"])
def test_steps_are_measured(provider: str, tmp_path: Path) -> None:
    workload = encoders.WORKLOADS["tiny_bert_mlm"]
    found = encoders.measure_steps(encoders.TRAINERS[provider], encoders.checkpoint_for(workload, tmp_path), workload)
    assert found["tokens_per_s"] == pytest.approx(sum(workload.lengths()) / found["ms"] * 1e3)
    assert found["first_loss"] > 1


def test_encoding_is_measured(tmp_path: Path) -> None:
    name = "tiny_modernbert_encoding"
    found = encoders.Start(tmp_path).measure((name, OURS))
    tokens = sum(encoders.WORKLOADS[name].lengths()) + 40
    assert found["tokens_per_s"] == pytest.approx(found["texts_per_s"] * tokens / 20)


@pytest.mark.slow
def test_a_provider_that_fails_has_its_error_as_a_result(tmp_path: Path) -> None:
    out = tmp_path / "encoders.json"
    encoders.main(["--workloads", "tiny_bert_mlm", "--providers", OURS, FLEX, "--out", str(out)])
    providers = read_workloads(out)["tiny_bert_mlm"]["providers"]
    assert providers[OURS]["tokens_per_s"] > 0
    assert "does not support backward on CPU" in providers[FLEX]["error"]


def test_nothing_starts_after_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "measured_apart", lambda start, items, limit: ((item, {}) for item in items))
    names = ["tiny_bert_mlm", "tiny_modernbert_mlm"]
    for seconds, expected in (0, names[:1]), (60, names):
        assert [name for name, *_ in encoders.measured(names, [OURS], seconds, limit=60)] == expected


def workload_of(name: str, **providers: Any) -> dict[str, Any]:
    return {"environment": ENVIRONMENT, **encoders.facts(name), "providers": providers}


def test_the_table_of_encoders() -> None:
    ours = {"ms": 100.0, "tokens_per_s": 200000.0, "peak_gib": 12.5, "first_loss": 10.9}
    theirs = {"sdpa": {**ours, "ms": 160.0, "tokens_per_s": 125000.0}, "eager": {"error": "OutOfMemoryError: no"}}
    named = {f"transformers, {attention}": found for attention, found in theirs.items()}
    encoding = {"tokens_per_s": 1e6, "texts_per_s": 3e4, "batch_size": 256, "peak_gib": 1.25}
    workloads = {
        "modernbert_large_mlm": workload_of("modernbert_large_mlm", **{OURS: ours}, **named),
        "bert_base_encoding": workload_of("bert_base_encoding", **{OURS: encoding}),
    }
    docs = report.all_figures({"encoders": {"workloads": workloads}})
    start = "| ModernBERT-large, masked tokens, 64 x 64 to 512 |"
    assert f"{start} {OURS} | **200,000** |  | 100 | 12.5 |" in docs
    assert f"{start} transformers, sdpa | 125,000 | 1.60 | 160 | 12.5 |" in docs
    assert f"{start} transformers, eager | OutOfMemoryError: no |" in docs
    assert f"| BERT-base, embeddings of texts, 4096 x 4 to 60 | {OURS} | **1,000,000** |  |  | 1.25 |" in docs


def test_jobs_fill_one_file(tmp_path: Path) -> None:
    names = "bert_base_mlm", "modernbert_large_mlm"
    jobs = {
        name: {"result": {"encoders.json": {"workloads": {name: workload_of(name, ligerzoo={"ms": 1.0})}}}}
        for name in names
    }
    path = tmp_path / "session.json"
    path.write_text(json.dumps(jobs))
    session.unpack(path, tmp_path)
    assert set(read_workloads(tmp_path / "encoders.json")) == set(names)
