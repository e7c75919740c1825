"""The benchmark of training steps: tiny workloads with every provider on a CPU."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import report, trainer, training
from benchmarks.row import OURS
from benchmarks.workloads import read_workloads
from ligerzoo.kernels.recompute import Recompute

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # PEFT calls them


def method(workload: training.Workload) -> str:
    return "lora" if workload.adapted else "full"


@pytest.mark.parametrize("provider", training.PROVIDERS)
@pytest.mark.parametrize("name", [name for name in training.WORKLOADS if "_2x16" in name])
def test_every_provider_trains(provider: str, name: str) -> None:
    workload = training.WORKLOADS[name]
    if method(workload) not in training.PROVIDERS[provider].methods:
        pytest.skip("does not train this")
    if provider != OURS:
        pytest.importorskip("transformers")
        pytest.importorskip("peft")
        if workload.adapted == training.HYBRID_LINEARS:
            pytest.skip("PEFT refuses the output projections of Mamba-2")
    result = training.Start(provider, name, ("auto",))()(name)
    assert len(result["all_ms"]) == training.STEPS
    assert min(result["all_ms"]) <= result["ms"] <= max(result["all_ms"])
    assert result["tokens_per_s"] == pytest.approx(32 / result["ms"] * 1e3)
    assert "nothing" in result["setting"]
    assert ("predicted_gib" in result) == (provider == OURS)


@pytest.mark.parametrize("name", ["tiny_lora_2x16", "tiny_moe_lora_2x16"])
def test_all_train_the_same_parameters(name: str) -> None:
    pytest.importorskip("peft")
    workload = training.WORKLOADS[name]
    counts = {
        sum(p.numel() for p in build(workload).parameters() if p.requires_grad)
        for build in (training.build_ours, training.build_peft)
    }
    assert len(counts) == 1
    assert counts != {0}


def test_steps_after_the_warm_up_are_measured() -> None:
    ends = [0.0, 5.0, 5.1, 5.3, 5.7]
    found = training.figures(ends, training.WORKLOADS["tiny_2x16"], {"predicted_gib": 1.0})
    assert found["all_ms"] == pytest.approx([100, 200, 400])
    assert found["ms"] == pytest.approx(200)
    assert found["tokens_per_s"] == pytest.approx(160)


class Fails:
    """Trains only from the n-th call on."""

    def __init__(self, fitting: int) -> None:
        self.fitting, self.calls = fitting, 0
        self.levels: list[Any] = []

    def __call__(self, model: nn.Module, workload: trainer.Workload, steps: int) -> list[float]:
        assert all(p.grad is None for p in model.parameters())
        self.levels.append(model.model.activation_plan)  # type: ignore[union-attr]
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        self.calls += 1
        if self.calls < self.fitting:
            raise torch.OutOfMemoryError("CUDA out of memory.\nmore")
        return [0.1 * i for i in range(steps)]


def test_a_smaller_budget_is_used_if_a_step_runs_out_of_memory() -> None:
    workload = dataclasses.replace(training.WORKLOADS["tiny_2x16"], length=512)
    model = training.build_ours(workload)
    whole, *_ = training.our_settings(model, workload, ["auto"])
    train = Fails(2)
    provider = dataclasses.replace(training.PROVIDERS[OURS], train=train)
    smaller = whole["predicted_gib"] - 1e-5
    result = training.measure(provider, model, workload, ["auto", smaller, smaller / 2])
    assert train.calls == 2
    assert Recompute.ELEMENTWISE in train.levels[1]
    assert set(train.levels[0]) == {Recompute.NOTHING}
    assert result["setting"].startswith(f"budget {smaller}")
    assert result["predicted_gib"] < whole["predicted_gib"]


def test_nothing_fits() -> None:
    def settings(model: Any, workload: training.Workload, budgets: Any) -> Iterator[dict[str, Any]]:
        yield {"setting": "the only one"}

    workload = training.WORKLOADS["tiny_2x16"]
    provider = dataclasses.replace(training.PROVIDERS[OURS], settings=settings, train=Fails(2))
    result = training.measure(provider, training.build_ours(workload), workload, [])
    assert result == {"error": "OutOfMemoryError: CUDA out of memory."}


@pytest.mark.slow
def test_a_run_writes_each_result_and_keeps_earlier_ones(tmp_path: Path) -> None:
    out = tmp_path / "training.json"
    training.Results(out).add("llama_1b_8x2048", OURS, {"error": "kept"})
    training.main(["--workloads", "tiny_2x16", "tiny_1x8", "--providers", OURS, "--out", str(out), "--limit", "300"])
    found = read_workloads(out)
    assert list(found) == ["llama_1b_8x2048", "tiny_2x16", "tiny_1x8"]
    assert found["llama_1b_8x2048"]["providers"] == {OURS: {"error": "kept"}}
    assert {"model": "tiny", "batch": 1, "length": 8, "adapted": []}.items() <= found["tiny_1x8"].items()
    assert found["tiny_1x8"]["providers"][OURS]["tokens_per_s"] > 0
    merged = tmp_path / "merged.json"
    training.main(["--merge", str(out), "--out", str(merged)])
    assert json.loads(merged.read_text()) == json.loads(out.read_text())


def test_the_table_of_training() -> None:
    ours = {"tokens_per_s": 16000.0, "peak_gib": 43.0, "predicted_gib": 43.5, "error_percent": 1.16, "setting": "kept"}
    peer = {"tokens_per_s": 12500.0, "peak_gib": 55.0, "setting": "nothing recomputed"}
    providers = {
        OURS: ours,
        "Trainer + PEFT + liger-kernel": peer,
        "transformers + PEFT + liger-kernel": {"error": "x"},
    }
    shape = {"environment": {"gpu": "some GPU"}, "model": "llama_8b", "batch": 1, "length": 8192, "adapted": ["q_proj"]}
    docs = report.all_figures({"training": {"workloads": {"llama_8b_lora_1x8192": {**shape, "providers": providers}}}})
    where = "| Llama-3-8B, LoRA, 1 x 8192 |"
    assert f"{where} ligerzoo | **16,000** |  | 43.0 | 43.5 (+1.2 %) | kept |" in docs
    assert f"{where} Trainer + PEFT + liger-kernel | 12,500 | 1.28 | 55.0 |  | nothing recomputed |" in docs
    assert f"{where} transformers + PEFT + liger-kernel | x |  |  |  |  |" in docs
    assert report.all_figures({"training": {"workloads": {}}}) == report.all_figures({})


def test_a_budget_is_auto_or_a_number() -> None:
    assert [training.budget(text) for text in ("auto", "130")] == ["auto", 130.0]
    with pytest.raises(ValueError, match="could not convert"):
        training.budget("all")
