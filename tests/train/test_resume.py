"""A run that was killed or stopped at any moment continues bit for bit; a failed save leaves the last checkpoint."""

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import ligerzoo
from ligerzoo import AutoModel, Tokenizer, cli
from ligerzoo.errors import CheckpointError, ConfigError
from ligerzoo.train import run_checkpoint
from ligerzoo.train.log import RunLog, read_log
from ligerzoo.train.recipes import sft
from ligerzoo.train.run_checkpoint import checkpoints, newest_checkpoint
from ligerzoo.train.run_state import RunState
from tests.train.tiny_run import arguments, options

TIMED = ("seconds", "tokens_per_second", "memory_gib")
"""Entries of the log that differ between equal runs."""


def train(given: dict[str, Any]) -> int:
    return sft.main(sft.SFTRunOptions(**given))


def untimed_log(output: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in entry.items() if k not in TIMED} for entry in read_log(output / "log.jsonl")]


def assert_equal(a: Any, b: Any) -> None:
    """Compares nested containers with tensors, bit for bit."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_equal(one, other)
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def assert_same_run(output: Path, expected: Path) -> None:
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (output / name).read_bytes() == (expected / name).read_bytes(), name
    assert untimed_log(output) == untimed_log(expected)
    last, same = (newest_checkpoint(directory) for directory in (output, expected))
    assert last is not None
    assert same is not None
    assert last.name == same.name
    states = [torch.load(directory / "state.pt", weights_only=True) for directory in (last, same)]
    assert_equal(*states)
    assert files_of(last / "optimizer") == files_of(same / "optimizer")


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int, number: int = signal.SIGINT) -> None:
    """Sends a signal to this process when a step is logged."""
    log_step = RunLog.step

    def logged(self: Any, current: int, **values: Any) -> None:
        log_step(self, current, **values)
        if current == step:
            signal.raise_signal(number)

    monkeypatch.setattr(RunLog, "step", logged)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.thorough), signal.SIGTERM])
def test_a_stopped_run_continues_bit_for_bit(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Weights, optimizer, data position, dropped records, random numbers and log, with accumulation and evaluation."""
    held_out = {"eval_data": (str(data),), "eval_every": 4, "accumulate": 2, "schedule": "linear", "warmup": 0.5}
    held_out |= {"seq_length": 40, "too_long": "drop"}
    whole = options(checkpoint, data, tmp_path / "whole", **held_out)
    assert train(whole) == 0
    parts = options(checkpoint, data, tmp_path / "parts", **held_out)
    with monkeypatch.context() as patch:
        stop_after(patch, 2, number)
        assert train(parts) == 130
    assert "Stopped after step 2. --resume continues from" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [path.name for path in checkpoints(tmp_path / "parts")] == ["checkpoint-2"]
    assert not (tmp_path / "parts" / "config.json").exists()
    torch.manual_seed(1234)
    assert train({**parts, "resume": True}) == 0
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    dropped = untimed_log(tmp_path / "parts")[-2]["dropped"]
    assert f"{dropped} records were not trained: too long, or blank" in capsys.readouterr().err


def test_a_second_ctrl_c_stops_at_once(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(monkeypatch, 2)
    monkeypatch.setattr(RunState, "save", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        train(options(checkpoint, data, tmp_path / "run"))
    assert checkpoints(tmp_path / "run") == []


def test_resuming_without_checkpoints_starts_from_the_beginning(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    given = options(checkpoint, data, tmp_path / "run", max_steps=2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").write_text('{"step": 1, "loss": 3}\n{"step": 2, "lo')
    assert train({**given, "resume": True}) == 0
    assert [entry["step"] for entry in read_log(tmp_path / "run" / "log.jsonl")] == [1, 2]


def test_a_finished_run_can_be_extended(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    steps = {"schedule": "constant", "warmup": 0.0, "save_every": 2}
    assert train(options(checkpoint, data, tmp_path / "whole", **steps)) == 0
    assert [path.name for path in checkpoints(tmp_path / "whole")] == ["checkpoint-4", "checkpoint-6"]
    short = options(checkpoint, data, tmp_path / "parts", **{**steps, "max_steps": 3})
    assert train(short) == 0
    before = (tmp_path / "parts" / "model.safetensors").read_bytes()
    assert train({**short, "resume": True}) == 0  # is complete, and stays the same
    assert (tmp_path / "parts" / "model.safetensors").read_bytes() == before
    assert train({**short, "max_steps": 6, "resume": True}) == 0
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_a_checkpoint_is_a_model(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    train(options(checkpoint, data, tmp_path / "run", max_steps=2))
    saved = tmp_path / "run" / "checkpoint-2"
    final, model = AutoModel.from_pretrained(tmp_path / "run"), AutoModel.from_pretrained(saved)
    for name, weight in final.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])
    assert Tokenizer.from_pretrained(saved).encode("a") == Tokenizer.from_pretrained(checkpoint).encode("a")
    state = json.loads((saved / "state.json").read_text())
    assert state["step"] == 2
    assert state["options"]["lr"] == 1e-3
    for size in (1000, 50, 0):
        os.truncate(saved / "state.pt", size)
        with pytest.raises(CheckpointError, match=r"state\.pt: cannot be read; got .*Remove .*/checkpoint-2 to"):
            train(options(checkpoint, data, tmp_path / "run", max_steps=2, resume=True))
    (saved / "state.json").write_text('{"step": 2}')
    with pytest.raises(CheckpointError, match=r"state\.json: is not the state of a run; got no options"):
        train(options(checkpoint, data, tmp_path / "run", max_steps=2, resume=True))


def test_a_run_without_a_step_may_start_again(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    given = options(checkpoint, data, tmp_path / "run", max_steps=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").touch()
    assert train(given) == 0


def test_an_earlier_run_is_not_overwritten(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    given = options(checkpoint, data, tmp_path / "run", max_steps=1)
    train(given)
    with pytest.raises(CheckpointError, match=r"holds a run or a model; got .*Continue the run with --resume"):
        train(given)
    with pytest.raises(CheckpointError, match="holds a run or a model"):
        train({**given, "output": str(checkpoint)})
    with pytest.raises(ConfigError, match=r"got --accumulate 2 instead of --accumulate 1, --lr 0.01 inst.*--max-steps"):
        train({**given, "resume": True, "lr": 0.01, "accumulate": 2, "max_steps": 9, "save_every": 3})
    for change, words in [
        ({"train_on_prompt": True}, "got --train-on-prompt instead of --no-train-on-prompt."),
        ({"lora_rank": 2}, "got --lora-rank 2 instead of no --lora-rank."),
        ({"data": (str(data), "b c")}, f"got --data {data} 'b c' instead of --data {data}."),
    ]:
        with pytest.raises(ConfigError, match=re.escape(words)):
            train({**given, "resume": True, **change})
    train({**given, "resume": True, "max_steps": 3})
    with pytest.raises(ConfigError, match=r"option max_steps: the run has done more steps; got 2; expected 3 or more"):
        train({**given, "resume": True, "max_steps": 2})


def test_an_output_that_cannot_be_replaced_is_refused_before_training(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "run"):  # before the model is loaded, which does not exist
        expected = re.escape(f"option output: {tmp_path}/file is a file; got {output}")
        with pytest.raises(CheckpointError, match=expected):
            train(options(tmp_path / "no model", data, output))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for directory in (Path(), tmp_path):
        with pytest.raises(ConfigError, match="option output: is the working directory or contains it"):
            train(options(checkpoint, data, directory))


# Failed saves


def test_a_full_disk_leaves_the_last_checkpoint(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = options(checkpoint, data, tmp_path / "whole", save_every=2)
    train(whole)
    parts = options(checkpoint, data, tmp_path / "parts", save_every=2)
    save = torch.save

    def save_once(*given: Any) -> None:
        if (tmp_path / "parts" / "checkpoint-2").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        save(*given)

    with monkeypatch.context() as patch:
        patch.setattr(run_checkpoint.torch, "save", save_once)
        expected = r"checkpoint-4: cannot be saved, so the run stops; got .*No space left on device\. Make room"
        with pytest.raises(CheckpointError, match=expected) as raised:
            train(parts)
    assert "checkpoint-2 is whole: continue from it with --resume." in str(raised.value)
    assert sorted(os.listdir(tmp_path / "parts")) == ["checkpoint-2", "log.jsonl", "loss.svg", "run.yaml"]
    assert train({**parts, "resume": True}) == 0
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize("limit", [60_000, 150_000])
def test_files_that_cannot_grow_leave_the_last_checkpoint(
    checkpoint: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: int
) -> None:
    """The operating system fails writes at different files: the weights, and state.pt."""
    output = tmp_path / "run"
    train(options(checkpoint, data, output, max_steps=2))
    kept = files_of(output / "checkpoint-2")
    given = options(checkpoint, data, output, max_steps=4, resume=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        assert cli.main(arguments(given)) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    printed = capsys.readouterr().err
    errors = [line for line in printed.splitlines() if line.startswith("ligerzoo: error:")]
    assert len(errors) == 1
    assert re.search("checkpoint-4: cannot be saved, so the run stops; got .*", errors[0]), errors
    assert "Traceback" not in printed
    assert [path.name for path in checkpoints(output)] == ["checkpoint-2"]
    assert files_of(output / "checkpoint-2") == kept
    assert not [name for name in os.listdir(output) if name.startswith(".")]


# Kills


KILLS = """
import json, os, random, signal, sys, time
from ligerzoo.train.recipes import sft

given, kills = json.loads(sys.argv[1])
given["data"] = tuple(given["data"])
source = random.Random(0)

def run(output, seconds=None):
    child = os.fork()
    if child == 0:
        sys.stdout = sys.stderr = open(os.devnull, "w")
        os._exit(sft.main(sft.SFTRunOptions(**given, output=output, resume=True)))
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]

start = time.perf_counter()
assert run("whole") == 0
whole = time.perf_counter() - start
killed = number = 0
while killed < kills:
    number += 1
    for attempt in range(min(kills, 5)):  # kills in one run; a process that ends before is not killed
        killed += run(f"killed-{number}", source.uniform(0, whole)) == signal.SIGKILL
    assert run(f"killed-{number}") == 0
print(number)
"""


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(ligerzoo.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_gives_the_same_weights(
    checkpoint: Path, data: Path, tmp_path: Path, kills: int
) -> None:
    """In memory, if the system has a directory for it: most of the time of a run would be writing to the disk."""
    given = options(checkpoint, data, tmp_path, save_every=1, max_steps=6)
    del given["output"]
    command = [sys.executable, "-c", KILLS, json.dumps([given, kills])]
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else tmp_path) as directory:
        done = subprocess.run(command, cwd=directory, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        for number in range(1, int(done.stdout) + 1):
            assert_same_run(Path(directory, f"killed-{number}"), Path(directory, "whole"))
            assert not [name for name in os.listdir(Path(directory, f"killed-{number}")) if name.startswith(".")]


def test_interrupt_of_the_command(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(monkeypatch, 1)
    given = options(checkpoint, data, tmp_path / "run")
    assert cli.main(arguments(given)) == 130
    assert cli.main([*arguments(given), "--resume"]) == 0
    assert [entry["step"] for entry in read_log(tmp_path / "run" / "log.jsonl")] == [1, 2, 3, 4, 5, 6]
