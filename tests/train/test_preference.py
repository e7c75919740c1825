"""The recipe of preference optimization: losses, references, metrics, stopping and resuming, and what it refuses."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ligerzoo import AutoModel, cli
from ligerzoo.adapters import load_adapter
from ligerzoo.errors import ConfigError, DataError
from ligerzoo.train import processes
from ligerzoo.train.data import Batch, LabelledSample, Sample, Source
from ligerzoo.train.data.batches import collate
from ligerzoo.train.log import read_log
from ligerzoo.train.preferences import mismatched
from ligerzoo.train.recipes import preference
from tests.covering import representatives
from tests.train.preference_data import labelled, options, pairs, write
from tests.train.test_resume import assert_equal, stop_after, untimed_log
from tests.train.tiny_run import arguments, run_script, write_checkpoint

METHODS = ("dpo", "kto", "orpo", "simpo", "cpo")
TRL_METRICS = {"rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "llama", initializer_range=0.1)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("data")
    paired, alone = write(directory / "pairs.jsonl", pairs()), write(directory / "labelled.jsonl", labelled())
    return {method: alone if method == "kto" else paired for method in METHODS}


def train(given: dict[str, Any]) -> list[dict[str, Any]]:
    assert preference.main(preference.PreferenceRunOptions(**given)) == 0
    return read_log(Path(given["output"]) / "log.jsonl")


def steps(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in log if "loss" in entry]


@pytest.mark.parametrize("method", representatives(METHODS, "dpo", "kto"))
def test_every_method_learns(method: str, model: Path, files: dict[str, Path], tmp_path: Path) -> None:
    data = files[method]
    given = options(model, data, tmp_path / "run", method=method, max_steps=15, lr=3e-3, eval_data=(str(data),))
    if method == "cpo":  # the cross entropy is not part of the preference
        given["nll_weight"] = 0.0
    log = train(given)
    first, *_, last = steps(log)
    assert first.keys() >= TRL_METRICS
    assert last["loss"] < first["loss"]
    assert last["rewards/margins"] > first["rewards/margins"]
    if method in ("dpo", "kto"):
        assert first["loss"] == pytest.approx(math.log(2) if method == "dpo" else 0.5, abs=1e-6)
        assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)
    (evaluation,) = (entry for entry in log if "eval_loss" in entry)
    assert evaluation["eval_rewards/margins"] > first["rewards/margins"]
    if method != "kto":
        assert evaluation["eval_rewards/accuracies"] > 0.7
    assert len(evaluation["samples"]) == 2
    assert (tmp_path / "run" / "loss.svg").read_text().count(f"{method} loss") == 1


@pytest.mark.parametrize("method", representatives(METHODS, "dpo", "kto"))
def test_micro_batches_train_as_one_batch(method: str, model: Path, files: dict[str, Path], tmp_path: Path) -> None:
    given = {"method": method, "max_steps": 3}
    one = train(options(model, files[method], tmp_path / "one", batch_size=4, **given))
    many = train(options(model, files[method], tmp_path / "many", batch_size=1, accumulate=4, **given))
    for a, b in zip(one, many, strict=True):
        assert a.keys() == b.keys()
        for name in ("loss", "grad_norm", "rewards/margins", "rewards/chosen", "logps/rejected", "trained_tokens"):
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"method": "dpo"}, marks=pytest.mark.thorough),
        pytest.param({"method": "kto"}, marks=pytest.mark.thorough),
        {"method": "dpo", "precompute_reference": True, "lora_rank": 4},
    ],
    ids=str,
)
def test_a_stopped_run_continues_bit_for_bit(
    changes: dict[str, Any], model: Path, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(name: str, **more: Any) -> dict[str, Any]:
        return options(model, files[changes["method"]], tmp_path / name, max_steps=5, **changes, **more)

    train(given("whole"))
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        assert preference.main(preference.PreferenceRunOptions(**given("stopped"))) == 130
    train(given("stopped", resume=True))
    name = "adapter_model.safetensors" if "lora_rank" in changes else "model.safetensors"
    outputs = [tmp_path / output for output in ("stopped", "whole")]
    weights, logs = [(output / name).read_bytes() for output in outputs], list(map(untimed_log, outputs))
    assert weights[0] == weights[1]
    assert logs[0] == logs[1]
    assert_equal(*(torch.load(output / "checkpoint-5" / "state.pt", weights_only=True) for output in outputs))


# References


@pytest.mark.parametrize("lora_rank", representatives([None, 4], 4))
def test_a_precomputed_reference_changes_nothing(
    lora_rank: int | None, model: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    data, given = files["dpo"], {"max_steps": 4, "lora_rank": lora_rank, "lr": 1e-2}
    logs = [
        train(options(
            model, data, tmp_path / str(computed), precompute_reference=computed, eval_data=(str(data),), **given
        ))
        for computed in (False, True)
    ]  # fmt: skip
    for a, b in zip(*logs, strict=True):
        for name in a.keys() & {"loss", "grad_norm", "rewards/chosen", "rewards/rejected", "eval_loss"}:
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-5), name


def test_the_reference_of_adapters_is_the_model_without_them(
    model: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    """Rewards are relative to the base model, which is not loaded twice."""
    log = train(options(model, files["dpo"], tmp_path / "run", lora_rank=4, max_steps=10, lr=1e-2))
    assert log[0]["rewards/margins"] == 0
    assert log[-1]["rewards/margins"] > 0.1
    trained = AutoModel.from_pretrained(model)
    load_adapter(trained, tmp_path / "run")


def test_the_reference_of_a_resumed_run_is_the_model_of_its_beginning(
    model: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    given = options(model, files["dpo"], tmp_path / "run", lr=3e-3)
    train({**given, "max_steps": 8})
    *_, last = train({**given, "max_steps": 9, "resume": True})
    assert last["step"] == 9
    assert last["rewards/margins"] > 0.2


# KTO's mismatched completions


def labelled_batch(rows: list[list[tuple[list[int], list[int]]]], length: int) -> Batch:
    samples = [
        [LabelledSample(Sample(p + c, [-100] * len(p) + c, Source("data", len(p), "row")), True) for p, c in row]
        for row in rows
    ]
    return collate(samples, [[sample.sample for sample in row] for row in samples], length, 0)


def test_each_prompt_gets_the_completion_before() -> None:
    rows = [[([1], [2, 3]), ([4, 5], [6])], [([7, 8, 9], [10, 11, 12])]]
    crossed = mismatched([labelled_batch(rows, 8)])
    found = sorted(tuple(one.input_ids) for batch in crossed for row in batch.rows for s in row for one in s.segments)
    assert found == [(1, 10, 11, 12), (4, 5, 2, 3), (7, 8, 9, 6)]
    labels = [one.labels for batch in crossed for row in batch.rows for s in row for one in s.segments]
    assert sorted(map(tuple, labels)) == [(-100, -100, -100, 6), (-100, -100, 2, 3), (-100, 10, 11, 12)]
    assert all(batch.inputs["input_ids"].shape[1] == 8 for batch in crossed)


def test_mismatched_sequences_may_be_longer_than_a_row() -> None:
    crossed = mismatched([labelled_batch([[([1] * 6, [2])], [([3], [4] * 6)]], 7)])
    assert {batch.inputs["input_ids"].shape[1] for batch in crossed} == {12}


def test_a_process_without_samples_gets_an_empty_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [Sample([1, 2], [-100, 2], Source("data", 0, "row"))]
    monkeypatch.setattr(processes, "data_ranks", lambda: 2)
    monkeypatch.setattr(processes, "gather_data", lambda own: [own, [(2, others)]])
    monkeypatch.setattr(processes, "gather", lambda own: [own, 1])
    (batch,) = mismatched([labelled_batch([[]], 4)])
    assert batch.rows == [[]]
    assert batch.inputs["input_ids"].shape == (1, 4)


def test_a_single_sample_has_no_mismatched_one() -> None:
    assert mismatched([labelled_batch([[([1], [2])]], 4)]) == []


# The command


def test_the_printed_recipe_gives_the_same_weights(
    model: Path, files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = options(model, files["dpo"], tmp_path / "command", method="simpo", max_steps=2, gamma=0.5)
    assert cli.main([*arguments(given), "--print-recipe"]) == 0
    recipe = tmp_path / "recipe.py"
    recipe.write_text(capsys.readouterr().out)
    assert cli.main(arguments(given)) == 0
    run_script(recipe, "--output", str(tmp_path / "script"))
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("command", "script")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"method": "simpo", "variant": "ipo"}, "options of method simpo: SimPO: unknown option variant='ipo'"),
        ({"gamma": 1.0}, "options of method dpo: DPO: unknown option gamma=1.0"),
        ({"variant": "aot"}, "options of method dpo: DPO: variant='aot'; expected one of 'sigmoid'"),
        ({"method": "kto", "beta": 0.0}, "options of method kto: KTO: beta=0.0; expected a positive number"),
        ({"method": "orpo", "precompute_reference": True}, "option precompute_reference: method orpo has no reference"),
        ({"method": "kto", "precompute_reference": True}, "option precompute_reference: method kto pairs"),
        ({"lora_alpha": 8.0}, "option lora_rank: is needed by the other options"),
        ({"epochs": 1}, "options max_steps and epochs: only one of them"),
    ],
)
def test_invalid_options(changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        preference.PreferenceRunOptions(**options(tmp_path, tmp_path, tmp_path, **changes))
    assert str(raised.value).startswith(expected)


def test_a_dry_run_names_a_pair_that_is_too_long_together(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each sequence would fit a row, but not both."""
    data = write(tmp_path / "data.jsonl", [*pairs(3), {"prompt": "a", "chosen": " b" * 30, "rejected": " c" * 30}])
    given = options(model, data, tmp_path / "run", seq_length=100, dry_run=True)
    with pytest.raises(DataError, match=r"data\.jsonl:4: the sample is too long; got 126 tokens.*together"):
        preference.main(preference.PreferenceRunOptions(**given))
    given["too_long"] = "drop"
    assert preference.main(preference.PreferenceRunOptions(**given)) == 0
    assert "3 samples of kind 'preference'" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_truncated_pairs_share_a_row(model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", [{"prompt": "a", "chosen": " b" * 30, "rejected": " c" * 60}])
    log = train(options(model, data, tmp_path / "run", seq_length=64, too_long="truncate", max_steps=1, batch_size=1))
    assert log[0]["tokens"] == 64


@pytest.mark.parametrize(
    "method, variant", [("dpo", "ipo"), ("dpo", "exo_pair"), ("cpo", "hinge"), ("kto", "apo_zero_unpaired")]
)
def test_variants(method: str, variant: str, model: Path, files: dict[str, Path], tmp_path: Path) -> None:
    more = {"label_smoothing": 0.01} if variant == "exo_pair" else {}
    log = train(options(model, files[method], tmp_path / "run", method=method, variant=variant, max_steps=1, **more))
    state = json.loads((tmp_path / "run" / "checkpoint-1" / "state.json").read_text())
    assert state["options"]["variant"] == variant
    assert math.isfinite(log[0]["loss"])


def test_bfloat16(model: Path, files: dict[str, Path], tmp_path: Path) -> None:
    log = train(options(model, files["dpo"], tmp_path / "run", dtype="bfloat16", max_steps=10, lr=3e-3))
    assert log[-1]["loss"] < log[0]["loss"]
    assert AutoModel.from_pretrained(tmp_path / "run").dtype == torch.bfloat16
