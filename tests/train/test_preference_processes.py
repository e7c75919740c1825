"""Preference optimization and distillation in two processes: the losses of one process, and resuming bit for bit."""

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ligerzoo.train.log import RunLog, read_log
from ligerzoo.train.run_checkpoint import checkpoints
from tests.parallel.spawning import on_all_processes
from tests.train.preference_data import labelled, options, pairs, write
from tests.train.test_resume import untimed_log
from tests.train.tiny_run import train, write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed warns differently in each version

CASES: dict[str, dict[str, Any]] = {
    "dpo": {"method": "dpo", "accumulate": 2},
    "dpo, precomputed": {"method": "dpo", "precompute_reference": True},
    "dpo, adapters": {"method": "dpo", "lora_rank": 4, "lr": 1e-2},
    "kto": {"method": "kto", "lr": 3e-3},
    "orpo": {"method": "orpo"},
    "distill": {"method": "distill"},
}
UNEQUAL = ("seconds", "tokens_per_second", "memory_gib", "mfu", "samples", "nll_loss", "eval_nll_loss")
"""Times, and means over tokens, which micro-batches weight by their pairs."""


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


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one(name: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "tiny", initializer_range=0.1)
    case = CASES[name]
    # An odd number of rows: at the end, the second process has an empty batch.
    records = labelled(25) if case["method"] == "kto" else pairs(27)
    data = write(tmp_path / "data.jsonl", records)
    if case["method"] == "distill":
        case = {**case, "teacher": str(write_checkpoint(tmp_path / "teacher", hidden_size=64, initializer_range=0.2))}
        data = write(tmp_path / "data.jsonl", [{"prompt": r["prompt"], "completion": r["chosen"]} for r in records])
    case = {**case, "max_steps": None, "epochs": 1, "eval_data": (str(data),)}
    one, two, parts = (tmp_path / run for run in ("one", "two", "parts"))
    assert train(options(checkpoint, data, one, batch_size=2, **case)) == 0
    given = options(checkpoint, data, two, batch_size=1, **case)
    train_in_two(given)
    logs = [read_log(output / "log.jsonl") for output in (one, two)]
    assert [list(entry) for entry in logs[0]] == [list(entry) for entry in logs[1]]
    for entries in zip(*logs, strict=True):
        for column, value in entries[0].items():
            # KTO pairs the prompts and completions of several batches in an order that depends on the processes.
            is_unequal = column.startswith("eval_") and case["method"] == "kto"
            if column not in UNEQUAL and "logits/" not in column and not is_unequal:
                assert entries[1][column] == pytest.approx(value, rel=1e-3, abs=1e-4), column

    interrupted = {**given, "output": str(parts)}
    train_in_two(interrupted, stop_at=1)
    assert [path.name for path in checkpoints(parts)] == ["checkpoint-1"]
    train_in_two({**interrupted, "resume": True})
    file = "adapter_model.safetensors" if "lora_rank" in case else "model.safetensors"
    assert (parts / file).read_bytes() == (two / file).read_bytes()
    assert untimed_log(parts) == untimed_log(two)
