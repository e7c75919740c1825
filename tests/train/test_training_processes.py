"""Training in two processes: the losses of one process, resuming bit for bit, and the same files."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from ligerzoo import cli
from ligerzoo.errors import LigerzooError
from ligerzoo.models import CausalLM
from ligerzoo.train import run_model
from ligerzoo.train.log import RunLog, read_log
from ligerzoo.train.output_lock import LOCK_FILE
from ligerzoo.train.run_checkpoint import checkpoints
from tests.parallel.spawning import on_all_processes
from tests.train.test_resume import environment, train, untimed_log
from tests.train.tiny_run import arguments, options
from tests.train.tiny_vision import write_conversations, write_vision_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed warns differently in each version

VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"ema": 0.9, "accumulate": 2, "weight_decay": 0.1},
    "lora": {"lora_rank": 4, "lr": 1e-2},
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


def numbers(output: Path, name: str) -> list[float]:
    return [entry[name] for entry in read_log(output / "log.jsonl") if name in entry]


@pytest.mark.parametrize("name", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_two_processes_train_as_one(checkpoint: Path, data: Path, tmp_path: Path, name: str) -> None:
    variant = {**VARIANTS[name], "eval_data": (str(data),), "eval_every": 3}
    one, two, parts = (tmp_path / run for run in ("one", "two", "parts"))
    assert train(options(checkpoint, data, one, batch_size=2, **variant)) == 0
    given = options(checkpoint, data, two, batch_size=1, **variant)
    train_in_two(given)
    for column in ("loss", "eval_loss"):
        assert numbers(two, column) == pytest.approx(numbers(one, column), abs=1e-5)
    assert numbers(two, "grad_norm") == pytest.approx(numbers(one, "grad_norm"), rel=1e-4)
    for column in ("tokens", "trained_tokens", "padding"):
        assert numbers(two, column) == numbers(one, column)
    assert {path.name for path in two.iterdir()} == {path.name for path in one.iterdir()}
    file = "adapter_model.safetensors" if "lora_rank" in variant else "model.safetensors"
    single, shared = load_file(one / file), load_file(two / file)
    assert single.keys() == shared.keys()
    for key, weight in single.items():
        torch.testing.assert_close(shared[key], weight, atol=2e-5, rtol=2e-3)

    interrupted = {**given, "output": str(parts)}
    train_in_two(interrupted, stop_at=2)
    assert [path.name for path in checkpoints(parts)] == ["checkpoint-2"]
    train_in_two({**interrupted, "resume": True})
    assert (parts / file).read_bytes() == (two / file).read_bytes()
    assert untimed_log(parts) == untimed_log(two)


def processes_under(pid: int) -> list[int]:
    """Returns the ids of a process and of all processes that it has started."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    return [pid, *(below for child in listed for below in processes_under(int(child)))]


def is_running(pid: int) -> bool:
    """Returns whether a process has not ended, not even as a zombie."""
    status = Path(f"/proc/{pid}/stat")
    with contextlib.suppress(OSError):
        return status.read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def refused_part(rank: int, given: dict[str, Any], pid: int) -> None:
    with pytest.raises(LigerzooError, match=rf"another run uses the output directory; got process {pid} on "):
        train(given)


@pytest.mark.slow
def test_a_killed_torchrun_continues_bit_for_bit(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """The command with random weights, which no process holds as a whole, killed after its third checkpoint.

    Before that, while it is stopped, another run of two processes into its directory is refused.
    """
    text = tmp_path / "text.txt"
    text.write_text("The liger is a hybrid of a lion and a tiger. " * 60)
    given = options(
        checkpoint / "config.json", text, tmp_path / "whole", method="pretrain", max_steps=8, save_every=1,
        tokenizer=str(checkpoint), keep=9,
    )  # fmt: skip
    train_in_two(given)
    killed = tmp_path / "killed"
    again = {**given, "output": str(killed), "resume": True}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "ligerzoo", *arguments(again)]
    local = environment() | {"GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(command, env=local, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pids: list[int] = []

    def wait_for(number: int) -> None:
        deadline = time.monotonic() + 120
        while len(checkpoints(killed)) < number and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        assert len(checkpoints(killed)) >= number

    def send(number: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    try:
        wait_for(1)
        pids += processes_under(process.pid)  # takes longer than a step
        send(signal.SIGSTOP)
        owner = json.loads((killed / LOCK_FILE).read_text())["pid"]
        assert owner in pids
        on_all_processes(partial(refused_part, given=again, pid=owner))
        before = len(checkpoints(killed))
        send(signal.SIGCONT)
        wait_for(before + 1)
    finally:
        send(signal.SIGKILL)
        process.wait()
        while any(is_running(pid) for pid in pids):  # and holds the lock
            time.sleep(0.01)
    assert not (killed / "config.json").exists()
    train_in_two(again)
    for file in ("model.safetensors", "config.json"):
        assert (killed / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert untimed_log(killed) == untimed_log(tmp_path / "whole")


def dry_run_part(rank: int, line: list[str], folder: Path) -> None:
    """Runs a command in one of two processes, and writes its exit code and errors to a file."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            code = cli.main(line)
        except SystemExit as ended:
            code = cast(int, ended.code)
    (folder / f"{rank}.txt").write_text(f"{code}\n{errors.getvalue()}")


@pytest.mark.parametrize("model", ["checkpoint", "nothing"])
def test_the_main_process_prints_the_problems_of_a_dry_run(checkpoint: Path, tmp_path: Path, model: str) -> None:
    """The others end without an error, at which torchrun would end the main process."""
    data = tmp_path / "wrong.jsonl"
    data.write_text('{"prompt": 3, "completion": "c"}\n{"prompt": "a"}\n')
    given = options(checkpoint if model == "checkpoint" else tmp_path / model, data, tmp_path / "run", dry_run=True)
    on_all_processes(partial(dry_run_part, line=arguments({**given, "eval_data": "none.jsonl"}), folder=tmp_path))
    code, *lines = (tmp_path / "0.txt").read_text().splitlines()
    assert code == "1"
    assert sum(line.startswith("ligerzoo: error: ") for line in lines) == (3 if model == "checkpoint" else 2), lines
    assert (tmp_path / "1.txt").read_text() == "0\n"


def broken_part(rank: int, given: dict[str, Any], step: int) -> None:
    """Trains in one of two processes; a weight of rank 1 becomes NaN after a step. Writes the error to a file."""
    opened: list[CausalLM] = []
    open_model, log_step = run_model.open_trained_model, RunLog.step

    def open_and_keep(*args: Any, **arguments: Any) -> CausalLM:
        opened.append(open_model(*args, **arguments))
        return opened[-1]

    def logged(self: RunLog, current: int, **values: Any) -> None:
        log_step(self, current, **values)
        if rank == 1 and current == step:
            weight = [one for one in opened[-1].parameters() if one.requires_grad][-1]
            cast(DTensor, weight.detach()).to_local().view(-1)[0] = torch.nan

    run_model.open_trained_model = open_and_keep
    RunLog.step = logged  # type: ignore[method-assign]
    with pytest.raises(LigerzooError) as raised:
        train(given)
    Path(f"{given['output']}-{rank}.txt").write_text(str(raised.value))


@pytest.mark.parametrize(
    "step, what",
    [
        pytest.param(3, "gradients of the last 3 steps", marks=pytest.mark.slow),
        (6, "weights are infinite or NaN"),
    ],
)
def test_a_model_that_is_broken_in_one_process_is_never_saved(
    checkpoint: Path, data: Path, tmp_path: Path, step: int, what: str
) -> None:
    """Within a run, and by its last update. All processes end with the same error, which names the last checkpoint."""
    given = options(checkpoint, data, tmp_path / "run", max_steps=6, save_every=2, keep=1, batch_size=1)
    on_all_processes(partial(broken_part, given=given, step=step))
    first, second = (Path(f"{given['output']}-{rank}.txt").read_text() for rank in range(2))
    last = tmp_path / "run" / f"checkpoint-{(step - 1) // 2 * 2}"
    assert first[first.index(what) :] == second[second.index(what) :]  # each names its own samples
    assert f"The weights of {last} are finite" in first
    assert checkpoints(tmp_path / "run") == [last]
    assert not list((tmp_path / "run").glob("*.safetensors"))


@pytest.mark.slow
def test_two_processes_train_images_as_one(tmp_path: Path) -> None:
    """Also in steps in which only one of them has images."""
    checkpoint, data = write_vision_checkpoint(tmp_path / "tiny", "qwen2_vl"), write_conversations(tmp_path / "chats")
    variant = {"packing": "none", "eval_data": (str(data),), "seq_length": 128}
    assert train(options(checkpoint, data, tmp_path / "one", batch_size=2, **variant)) == 0
    train_in_two(options(checkpoint, data, tmp_path / "two", batch_size=1, **variant))
    for column in ("loss", "eval_loss"):
        assert numbers(tmp_path / "two", column) == pytest.approx(numbers(tmp_path / "one", column), abs=1e-5)
    for column in ("tokens", "trained_tokens", "images"):
        assert numbers(tmp_path / "two", column) == numbers(tmp_path / "one", column)
    single, shared = (load_file(tmp_path / run / "model.safetensors") for run in ("one", "two"))
    for key, weight in single.items():
        torch.testing.assert_close(shared[key], weight, atol=2e-5, rtol=2e-3)
