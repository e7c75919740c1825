"""Weights that become infinite or NaN: a run ends with an error, and the last good checkpoints stay."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ligerzoo import AutoModel, cli
from ligerzoo.errors import LigerzooError
from ligerzoo.models import CausalLM
from ligerzoo.train import run_model
from ligerzoo.train.log import RunLog
from ligerzoo.train.optimizers import SkipNonFinite
from ligerzoo.train.run_checkpoint import checkpoints
from tests.train import tiny_run
from tests.train.test_resume import stop_after
from tests.train.test_shared_options import Given, given  # noqa: F401
from tests.train.tiny_run import options, train

SKIPS = "ignore:.*the update is skipped:UserWarning"


def break_weights_after(monkeypatch: pytest.MonkeyPatch, step: int, value: float = torch.nan) -> None:
    """Writes a value into a trained weight after the update of a step."""
    opened: list[CausalLM] = []
    open_model, log_step = run_model.open_trained_model, RunLog.step

    def open_and_keep(*args: Any, **arguments: Any) -> CausalLM:
        opened.append(open_model(*args, **arguments))
        return opened[-1]

    def logged(self: RunLog, current: int, **values: Any) -> None:
        log_step(self, current, **values)
        if current == step:
            weight = [one for one in opened[-1].parameters() if one.requires_grad][-1]
            weight.data.view(-1)[0] = value

    monkeypatch.setattr(run_model, "open_trained_model", open_and_keep)
    monkeypatch.setattr(RunLog, "step", logged)


def skip(monkeypatch: pytest.MonkeyPatch, updates: range) -> None:
    """Makes the gradients of some updates, counted from 1, NaN."""
    call, calls = SkipNonFinite.__call__, [0]

    def skip_some(self: SkipNonFinite, norm: torch.Tensor) -> None:
        calls[0] += 1
        call(self, torch.full_like(norm, torch.nan) if calls[0] in updates else norm)

    monkeypatch.setattr(SkipNonFinite, "__call__", skip_some)


def names(output: Path) -> list[str]:
    return [path.name for path in checkpoints(output)]


@pytest.mark.long
@pytest.mark.filterwarnings(SKIPS)
@pytest.mark.parametrize("method, more", [
    ("sft", {}), ("sft", {"ema": 0.5}), ("sft", {"lora_rank": 2}), ("dpo", {"accumulate": 2}), ("kto", {}),
    ("distill", {"optimizer_in_backward": True, "max_grad_norm": 0.0}), ("grpo", {"dtype": "bfloat16"}),
])  # fmt: skip
@pytest.mark.parametrize("step", [3, 6])
def test_a_broken_model_is_never_saved(
    method: str, more: dict[str, Any], step: int, given: Given, tmp_path: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Within a run, and by its last update."""
    run = given(method, tmp_path / "run", max_steps=6, save_every=2, keep=1, eval_data=None, **more)
    break_weights_after(monkeypatch, step, torch.inf if more else torch.nan)
    with pytest.raises((LigerzooError, RuntimeError)) as raised:  # policies cannot sample with such weights
        train(run)
    last = f"checkpoint-{(step - 1) // 2 * 2}"
    assert names(tmp_path / "run") == [last]
    assert not list((tmp_path / "run").glob("*.safetensors"))
    if method != "grpo" or step == 6:
        assert isinstance(raised.value, LigerzooError)
        assert f"The weights of {tmp_path}/run/{last} are finite: start a new run from it." in str(raised.value)


@pytest.mark.filterwarnings(SKIPS)
def test_saving_and_stopping_wait_for_an_update(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = options(checkpoint, data, tmp_path / "run", save_every=2, keep=9, max_steps=8)
    with monkeypatch.context() as patch:
        skip(patch, range(2, 4))
        stop_after(patch, 6)
        assert train(run) == 130
    assert names(tmp_path / "run") == ["checkpoint-4", "checkpoint-6"]
    with monkeypatch.context() as patch:
        skip(patch, range(1, 2))
        stop_after(patch, 7)
        assert train({**run, "resume": True, "max_steps": 12}) == 130
    assert names(tmp_path / "run")[2:] == ["checkpoint-8"]


@pytest.mark.filterwarnings(SKIPS)
@pytest.mark.parametrize("steps, skipped, code", [(6, 3, 1), (6, 2, 0), (2, 2, 1), (1, 1, 1), (2, 1, 0)])
def test_a_run_may_not_end_with_many_skipped_updates(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, skipped: int, code: int,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """At most two, and not all."""
    skip(monkeypatch, range(steps - skipped + 1, steps + 1))
    run = options(checkpoint, data, tmp_path / "run", save_every=1, keep=1, max_steps=steps)
    assert cli.main(tiny_run.arguments(run)) == code
    printed = capsys.readouterr()
    assert ("holds the model" in printed.out) is (code == 0)
    assert (f"the gradients of the last {skipped} steps are not finite" in printed.err) is (code == 1)
    assert names(tmp_path / "run") == [f"checkpoint-{steps - skipped}"] * (steps > skipped)


def test_weights_that_are_not_finite_are_refused_before_training(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    model = AutoModel.from_pretrained(checkpoint)
    model.get_parameter("model.norm.weight").data[3] = torch.nan
    model.save_pretrained(tmp_path / "broken")
    for file in checkpoint.glob("token*"):
        (tmp_path / "broken" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(LigerzooError, match=r"'model.norm.weight': weights are infinite or NaN before the first step"):
        train(options(tmp_path / "broken", data, tmp_path / "run"))
    assert not (tmp_path / "run").exists()
