"""GRPO in two processes: the rewards, losses and weights of one process, resuming bit for bit, and shared errors."""

import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ligerzoo.errors import LigerzooError
from ligerzoo.train.log import RunLog
from ligerzoo.train.run_checkpoint import checkpoints
from tests.parallel.spawning import on_all_processes
from tests.train.grpo_run import grpo_options, write_prompts, write_reward
from tests.train.test_grpo import LOW_TOKENS, steps, train, weights

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed warns differently in each version

CASES: dict[str, dict[str, Any]] = {
    "full": {"prompts": 3, "batch_size": 1, "seq_length": 128, "weight_decay": 0.1, "ema": 0.5},  # about 3 rows
    "adapters": {"prompts": 4, "lora_rank": 4, "lr": 1e-2, "beta": 0.05, "iterations": 2, "scale_rewards": "batch"},
    "recomputed": {"prompts": 5, "old_logps": "recomputed", "beta": 0.05, "loss_type": "gspo", "temperature": 0.8},
    "few rows": {"prompts": 1, "batch_size": 1, "seq_length": 256, "loss_type": "dr_grpo", "mask_truncated": True},
}


def train_part(rank: int, given: dict[str, Any], stop_at: int | None) -> None:
    """Trains in one of two processes; rank 1 gets Ctrl-C in a step."""
    if stop_at is not None and rank == 1:
        log_step = RunLog.step

        def logged(self: Any, current: int, **values: Any) -> None:
            log_step(self, current, **values)
            if current == stop_at:
                signal.raise_signal(signal.SIGINT)

        RunLog.step = logged  # type: ignore[method-assign]
    assert train(given) == (0 if stop_at is None else 130)


def train_in_two(given: dict[str, Any], stop_at: int | None = None) -> None:
    on_all_processes(partial(train_part, given=given, stop_at=stop_at))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl")


@pytest.fixture
def reward(tmp_path: Path) -> Path:
    return write_reward(tmp_path / "reward.py", LOW_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one(name: str, checkpoint: Path, prompts: Path, reward: Path, tmp_path: Path) -> None:
    """The same completions, since each has its seed; the same losses and weights, up to the order of sums."""
    case = {"eval_data": (str(prompts),), "eval_every": 2, "sample_every": 1, **CASES[name]}
    one, two, parts = (tmp_path / run for run in ("one", "two", "parts"))
    given = grpo_options(checkpoint, prompts, reward, one, **case)
    assert train(given) == 0
    given = {**given, "output": str(two)}
    train_in_two(given)
    samples = [[json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()] for run in (one, two)]
    for alone, shared in zip(*samples, strict=True):
        assert shared == {**alone, "advantage": pytest.approx(alone["advantage"], rel=1e-6)}
    logs = steps(one), steps(two)
    assert len(logs[0]) == 4 + 2
    unequal = ("padding", "mfu", "samples")  # shorter rows have less padding
    for alone, shared in zip(*logs, strict=True):
        assert list(alone) == list(shared)
        for column, value in alone.items():
            if column not in unequal:
                assert shared[column] == pytest.approx(value, rel=1e-4, abs=2e-6), column
    file = "adapter_model.safetensors" if "lora_rank" in case else "model.safetensors"
    single, sharded = load_file(one / file), load_file(two / file)
    assert single.keys() == sharded.keys()
    for key, weight in single.items():
        torch.testing.assert_close(sharded[key], weight, atol=5e-5, rtol=2e-3)

    interrupted = {**given, "output": str(parts)}
    train_in_two(interrupted, stop_at=2)
    assert [path.name for path in checkpoints(parts)] == ["checkpoint-2"]
    train_in_two({**interrupted, "resume": True})
    assert weights(parts, case.get("lora_rank")) == weights(two, case.get("lora_rank"))
    assert steps(parts) == steps(two)
    assert (parts / "samples.jsonl").read_text() == (two / "samples.jsonl").read_text()


def fail_in_one(rank: int, given: dict[str, Any]) -> None:
    with pytest.raises(LigerzooError, match="no reward"):
        train(given)


def test_an_error_of_the_reward_function_in_one_process_ends_all(
    checkpoint: Path, prompts: Path, tmp_path: Path
) -> None:
    """No process waits for the others."""
    source = "def reward(completions, id):\n    if 7 in id: raise ValueError('no reward')\n    return [*range(len(id))]"
    failing = write_reward(tmp_path / "reward.py", source)
    given = grpo_options(checkpoint, prompts, failing, tmp_path / "run", max_steps=20)
    on_all_processes(partial(fail_in_one, given=given))
