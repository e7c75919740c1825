"""The recipe with adapters, chosen parts, averaged weights, optimizers, plans and ways to pack data."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ligerzoo import AutoModel, adapters, cli
from ligerzoo.errors import ConfigError, DataError, LigerzooError, SeveralErrors
from ligerzoo.train import processes
from ligerzoo.train.log import read_log
from ligerzoo.train.optimizers import clipped_step
from ligerzoo.train.recipes import sft
from ligerzoo.train.run_checkpoint import checkpoints
from ligerzoo.train.run_model import check_model
from tests.covering import representatives
from tests.train.test_resume import assert_equal, stop_after, train, untimed_log
from tests.train.tiny_run import arguments, options, write_data


def run(given: dict[str, Any]) -> Path:
    assert train(given) == 0
    return Path(given["output"])


def losses(output: Path) -> list[float]:
    return [entry["loss"] for entry in read_log(output / "log.jsonl") if "loss" in entry]


def weights(output: Path) -> dict[str, torch.Tensor]:
    return AutoModel.from_pretrained(output).state_dict()


VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {"lora_rank": 4, "lora_dropout": 0.2},
    "dora": {"lora_rank": 4, "lr": 1e-2, "dora": True, "lora_targets": ("q_proj", "mlp"), "lora_alpha": 2.0},
    "train-only": {"train_only": ("layers.1", "norm")},
    "ema": {"ema": 0.9},
    "lora-ema": {"lora_rank": 2, "ema": 0.5, "lr": 1e-2},
    "bfloat16": {"dtype": "bfloat16"},
    "muon": {"optimizer": "muon", "dtype": "bfloat16", "weight_decay": 0.1, "schedule": "wsd"},
    "in-backward": {"optimizer_in_backward": True, "max_grad_norm": 0.0, "dtype": "bfloat16"},
    "padded": {"packing": "none", "schedule": "linear"},
}


@pytest.mark.parametrize("name", representatives(VARIANTS, "lora", "ema", "muon", "in-backward"))
def test_a_stopped_run_continues_bit_for_bit(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    given = options(checkpoint, data, tmp_path / "whole", **VARIANTS[name])
    whole = run(given)
    parts = {**given, "output": str(tmp_path / "parts")}
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert train(parts) == 130
    torch.manual_seed(1234)
    assert train({**parts, "resume": True}) == 0
    file = "adapter_model.safetensors" if "lora_rank" in given else "model.safetensors"
    assert (tmp_path / "parts" / file).read_bytes() == (whole / file).read_bytes()
    assert untimed_log(tmp_path / "parts") == untimed_log(whole)
    states = [
        torch.load(checkpoints(output)[-1] / "state.pt", weights_only=True) for output in (whole, tmp_path / "parts")
    ]
    assert_equal(*states)
    assert min(losses(whole)) < losses(whole)[0]
    assert (whole / file).read_bytes() != (checkpoints(whole)[0] / file).read_bytes() or "ema" not in given


def test_a_lora_run_writes_an_adapter_that_can_be_fused(
    checkpoint: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = options(checkpoint, data, tmp_path / "run", lora_rank=4, lr=1e-2)
    assert cli.main(arguments(given)) == 0
    output = tmp_path / "run"
    assert not (output / "model.safetensors").exists()
    config = json.loads((output / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, str(checkpoint))
    assert (checkpoints(output)[-1] / "adapter_model.safetensors").exists()
    merged = tmp_path / "merged"
    assert cli.main(["fuse", str(checkpoint), str(output), str(merged)]) == 0
    adapted = AutoModel.from_pretrained(checkpoint)
    adapters.load_adapter(adapted, output)
    ids = torch.arange(2, 40)[None]
    expected = adapted(ids).logits
    assert not torch.equal(expected, AutoModel.from_pretrained(checkpoint)(ids).logits)
    torch.testing.assert_close(AutoModel.from_pretrained(merged)(ids).logits, expected, atol=1e-5, rtol=1e-5)
    capsys.readouterr()
    command = ["generate", str(merged), "--prompt", "liger", "--max-new-tokens", "3", "--device", "cpu"]
    assert cli.main(command) == 0
    assert capsys.readouterr().out.strip()


def test_only_the_chosen_parameters_change(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    before, after = weights(checkpoint), weights(run(options(checkpoint, data, tmp_path / "run", train_only=("norm",))))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"model.norm.weight"}
    with pytest.raises(LigerzooError, match="matches nothing"):
        train(options(checkpoint, data, tmp_path / "other", train_only=("norms",)))


def test_averaged_weights_are_evaluated_and_saved(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    held_out = write_data(tmp_path / "held-out.jsonl", 20, seed=1)
    given = options(checkpoint, data, tmp_path / "run", ema=0.5, eval_data=(str(held_out),), eval_every=3, max_steps=4)
    output = run({**given, "lr": 1e-2})
    plain = run({**given, "lr": 1e-2, "ema": None, "output": str(tmp_path / "plain")})
    own, average = weights(checkpoints(output)[-1]), weights(output)
    for name, weight in weights(plain).items():
        assert torch.equal(own[name], weight)
    assert not torch.equal(average["model.norm.weight"], own["model.norm.weight"])
    evaluated = [entry["eval_loss"] for entry in read_log(output / "log.jsonl") if "eval_loss" in entry]
    trained = [entry["eval_loss"] for entry in read_log(plain / "log.jsonl") if "eval_loss" in entry]
    assert len(evaluated) == len(trained) == 2
    assert trained[1] < evaluated[1]  # an average is behind


@pytest.mark.parametrize("choice, changes", [("auto", True), ("on", True), ("off", False)])
def test_small_updates_of_bfloat16_weights_are_not_lost(
    checkpoint: Path, data: Path, tmp_path: Path, choice: str, changes: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    given = options(
        checkpoint, data, tmp_path / "run", dtype="bfloat16", lr=1e-5, max_steps=2, stochastic_rounding=choice,
        schedule="constant", warmup=0.0,
    )  # fmt: skip
    if changes:
        output = run(given)
    else:
        with pytest.warns(UserWarning, match="is below the resolution of bfloat16"):
            output = run(given)
    assert ("adamw with stochastic rounding" in capsys.readouterr().out) is changes
    before = AutoModel.from_pretrained(checkpoint, dtype="bfloat16").state_dict()
    name = "model.layers.0.mlp.down_proj.weight"
    large = before[name].abs() > 0.01
    assert (bool((weights(output)[name] != before[name])[large].any())) is changes


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_skipped_steps_are_logged_and_change_nothing(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    clip, calls = clipped_step.clip_grad_norm, []

    def clip_and_break(parameters: Any, max_norm: float) -> torch.Tensor:
        calls.append(1)
        parameters = list(parameters)
        if len(calls) == 3:
            parameters[0].grad.fill_(value)
        return clip(parameters, max_norm)

    monkeypatch.setattr(clipped_step, "clip_grad_norm", clip_and_break)
    with pytest.warns(UserWarning, match=rf"step 3, {data}:\d+.*: gradients are not finite, so the update is skipped"):
        output = run(options(checkpoint, data, tmp_path / "run", save_every=1, max_steps=3))
    entries = read_log(output / "log.jsonl")
    assert [entry["step"] for entry in entries if entry.get("skipped")] == [3]
    assert entries[2]["grad_norm"] is None
    one, two, last = (weights(output / name) for name in ("checkpoint-1", "checkpoint-2", "."))
    assert all(torch.equal(weight, last[name]) for name, weight in two.items())
    assert not torch.equal(one["model.norm.weight"], last["model.norm.weight"])


def test_many_skipped_steps_stop_the_run(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clipped_step, "clip_grad_norm", lambda parameters, max_norm: torch.tensor(torch.inf))
    with (
        pytest.warns(UserWarning, match="the update is skipped"),
        pytest.raises(LigerzooError, match=r"step 10, .*the gradients of 10 steps in a row are not finite"),
    ):
        train(options(checkpoint, data, tmp_path / "run", max_steps=20))


def test_the_plan_is_printed_and_applied(
    checkpoint: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = options(checkpoint, data, tmp_path / "auto", activation_budget="auto", lora_rank=4, max_steps=2)
    plain = run({**given, "activation_budget": "none", "output": str(tmp_path / "plain")})
    assert "activation plan" not in capsys.readouterr().out
    assert losses(run(given)) == losses(plain)
    shown = capsys.readouterr().out
    assert "activation plan for 2 x 64 tokens per GPU\n  blocks 0 to 1    nothing recomputed" in shown
    assert "peak" in shown
    limited = {**given, "activation_budget": "0.07", "output": str(tmp_path / "limited")}
    assert losses(run(limited)) == losses(plain)
    assert "within 0.07 GiB" in capsys.readouterr().out
    with pytest.raises(LigerzooError, match="a training step of 2 x 64 tokens does not fit"):
        train({**given, "activation_budget": "0.01", "output": str(tmp_path / "small")})


def test_long_samples(checkpoint: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = options(checkpoint, data, tmp_path / "run", seq_length=30, max_steps=2)
    with pytest.raises(SeveralErrors, match=r"train.jsonl:\d+: the sample is too long"):
        train({**given, "dry_run": True})
    capsys.readouterr()
    for choice in ("truncate", "drop"):
        output = run({**given, "too_long": choice, "output": str(tmp_path / choice)})
        assert len(losses(output)) == 2


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("part", ["data", "eval_data"])
def test_data_without_a_sample_is_refused(
    checkpoint: Path, data: Path, tmp_path: Path, part: str, dry_run: bool
) -> None:
    record = {"prompt": "a" * 100, "completion": "b"}
    (tmp_path / "long.jsonl").write_text(json.dumps(record) + "\n")
    given = options(checkpoint, data, tmp_path / "run", too_long="truncate", dry_run=dry_run)
    with pytest.raises(DataError, match="the data has no samples"):
        train({**given, part: (str(tmp_path / "long.jsonl"),)})
    assert not list((tmp_path / "run").glob("*"))


def test_the_packing_changes_the_rows(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    tokens = {}
    for packing in ("auto", "none"):
        output = run(options(checkpoint, data, tmp_path / packing, packing=packing, max_steps=2))
        tokens[packing] = sum(entry["tokens"] for entry in read_log(output / "log.jsonl"))
    assert tokens["auto"] > 1.3 * tokens["none"]
    text = tmp_path / "text.txt"
    text.write_text("The liger is a hybrid of a lion and a tiger. " * 60)
    for packing in ("auto", "separate", "whole"):
        run(options(checkpoint, text, tmp_path / f"text-{packing}", packing=packing, max_steps=2, method="pretrain"))


@pytest.mark.parametrize(
    "wrong, expected",
    [
        ({"lora_alpha": 4.0}, "option lora_rank: is needed by the other options of adapters"),
        ({"dora": True}, "option lora_rank: is needed"),
        ({"lora_rank": 2, "train_only": ("norm",)}, "options lora_rank and train_only: only one"),
        ({"optimizer_in_backward": True}, "option optimizer_in_backward: needs max_grad_norm=0.*got max_grad_norm=1.0"),
        ({"optimizer_in_backward": True, "max_grad_norm": 0.0, "accumulate": 2}, ".*needs accumulate=1"),
        ({"activation_budget": "many"}, "option activation_budget: .*expected a positive number of GiB"),
        ({"activation_budget": "-1"}, "option activation_budget: invalid value"),
        ({"activation_budget": "4", "activation_checkpointing": True}, "option activation_budget: excludes"),
        ({"ema": 1.5}, "option ema: invalid value"),
        ({"schedule": "wsd", "warmup": 1.0}, "option warmup: leaves no steps for the decay of schedule wsd.*got 1.0"),
    ],
)
def test_options_that_exclude_each_other(
    checkpoint: Path, data: Path, tmp_path: Path, wrong: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        sft.SFTRunOptions(**options(checkpoint, data, tmp_path, **wrong))


def test_low_bit_optimizers_of_several_processes_are_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModel.from_pretrained(checkpoint)
    check_model(model, "adamw-8bit")
    monkeypatch.setattr(processes, "world_size", lambda: 2)
    check_model(model, "muon")
    with pytest.raises(LigerzooError, match="optimizer: cannot update sharded weights; got adamw-8bit"):
        check_model(model, "adamw-8bit")
