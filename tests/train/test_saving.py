"""The training goes on while a thread writes a checkpoint, and whatever ends it leaves the last whole one."""

import errno
import os
import signal
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ligerzoo import dtensors
from ligerzoo.dtensors import full, local
from ligerzoo.errors import LigerzooError
from ligerzoo.parallel import host_copies, liveness
from ligerzoo.parallel.host_copies import HostCopies
from ligerzoo.train import processes, run_checkpoint
from ligerzoo.train.log import RunLog, read_log
from ligerzoo.train.run_checkpoint import checkpoints
from ligerzoo.train.saving_thread import SavingThread
from tests.parallel.spawning import on_all_processes
from tests.train.test_hosts import start
from tests.train.test_resume import assert_same_run, files_of
from tests.train.tiny_run import options, train

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.distributed warns differently in each version

Given = dict[str, Any]


@pytest.fixture
def given(checkpoint: Path, data: Path, tmp_path: Path) -> Given:
    return options(checkpoint, data, tmp_path / "run", save_every=2, keep=9, ema=0.5)


def names(output: object) -> list[str]:
    return [path.name for path in checkpoints(Path(str(output)))]


def whole(given: Given) -> Path:
    """Trains without an interruption, and returns the directory."""
    output = Path(f"{given['output']}-whole")
    assert train({**given, "output": str(output), "resume": False}) == 0
    return output


def test_steps_run_while_a_checkpoint_is_written(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is written after the weights have changed, with those of its step, and without reading the model."""
    expected, is_later, save, log_step = whole(given), threading.Event(), torch.save, RunLog.step

    def late(*arguments: Any) -> None:
        assert is_later.wait(30)
        save(*arguments)

    def logged(self: RunLog, step: int, **values: Any) -> None:
        log_step(self, step, **values)
        if step == 4:
            is_later.set()

    def reading(self: torch.nn.Module, name: str) -> Any:
        is_saving = threading.current_thread().name == "ligerzoo-saving"
        assert not is_saving or name not in self.__dict__.get("_parameters", ()), name
        return get_attribute(self, name)

    get_attribute = torch.nn.Module.__getattr__
    monkeypatch.setattr(torch.nn.Module, "__getattr__", reading)
    monkeypatch.setattr(run_checkpoint.torch, "save", late)
    monkeypatch.setattr(RunLog, "step", logged)
    assert train(given) == 0
    assert_same_run(Path(given["output"]), expected)
    for name in ("checkpoint-2", "checkpoint-4"):
        ours, theirs = (files_of(output / name) for output in (Path(given["output"]), expected))
        assert {key: value for key, value in ours.items() if key != run_checkpoint.STATE_FILE} == {
            key: value for key, value in theirs.items() if key != run_checkpoint.STATE_FILE
        }


def test_a_second_ctrl_c_interrupts_the_writing(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: Any) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        while True:
            time.sleep(0.01)

    log_step = RunLog.step

    def logged(self: RunLog, step: int, **values: Any) -> None:
        log_step(self, step, **values)
        if step == 2:
            signal.raise_signal(signal.SIGINT)  # saves

    monkeypatch.setattr(run_checkpoint.torch, "save", endless)
    monkeypatch.setattr(RunLog, "step", logged)
    with pytest.raises(KeyboardInterrupt):
        train(given)
    assert names(given["output"]) == []
    assert not [name for name in os.listdir(given["output"]) if name.startswith(".")]
    assert "ligerzoo-saving" not in {thread.name for thread in threading.enumerate()}


def test_without_memory_for_copies_the_run_waits(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = whole(given)
    monkeypatch.setattr(host_copies, "available_memory", lambda: 0)
    monkeypatch.setattr(SavingThread, "start", None)
    assert train(given) == 0
    assert_same_run(Path(given["output"]), expected)


def test_copies_share_memory_as_the_tensors_do() -> None:
    source = {"a": torch.randn(3, 5), "b": torch.tensor(2.0), "c": torch.randn(7).bfloat16(), "e": torch.zeros(0, 4)}
    tensors = {**source, "d": source["a"].view(3, 5)}
    copy = HostCopies()
    for _ in range(2):
        copies = copy(tensors)
        assert all(torch.equal(copies[name], tensor) for name, tensor in tensors.items())
        assert copies["a"].data_ptr() == copies["d"].data_ptr()
        addresses = {name: one.data_ptr() for name, one in copies.items()}
        source["a"] += 1
        assert not torch.equal(copies["a"], source["a"])
        assert addresses == {name: one.data_ptr() for name, one in copy(tensors).items()}
    assert copy({"a": torch.ones(2)})["a"].tolist() == [1, 1]


# Two processes


def full_disk(rank: int, given: Given) -> None:
    save = torch.save

    def failing(content: Any, path: Path) -> None:
        if (Path(given["output"]) / "checkpoint-2").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        save(content, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_checkpoint.torch, "save", failing)
        with pytest.raises(LigerzooError, match=r"No space left on device|rank 0 failed"):
            train({**given, "max_steps": 50})
    gathered(rank)


def gathered(rank: int) -> None:
    """The main process has all of a tensor from its shards, replicas or not, as a thread that saves gathers it."""
    mesh = init_device_mesh("cpu", (2,))
    dtensors.background_group.set(processes.parallel.processes.control_group())
    for size in ((3, 5), (1, 4), (8,)):
        tensor = torch.randn(size, generator=torch.Generator().manual_seed(0)).bfloat16()
        for placement in (Shard(0), Shard(len(size) - 1), Replicate()):
            shared = distribute_tensor(tensor, mesh, [placement])
            (copied,) = HostCopies()({"a": shared}).values()
            assert isinstance(copied, DTensor)
            assert local(copied).data_ptr() != local(shared).data_ptr() or not local(shared).numel()
            found = full(copied)
            assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
            assert torch.equal(found, tensor) if rank == 0 else found.is_meta


def test_an_error_of_the_thread_ends_all_processes(given: Given) -> None:
    on_all_processes(partial(full_disk, given=given))
    assert names(given["output"]) == ["checkpoint-2"]
    assert len(read_log(Path(given["output"]) / "log.jsonl")) < 50


def dying_in_thread(rank: int, given: Given) -> None:
    liveness.GRACE = 0.5
    gather = dtensors._full_in_main_process

    def gathering(tensor: Any, group: Any) -> torch.Tensor:
        if rank == 1 and (Path(given["output"]) / "checkpoint-2").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(tensor, group)

    dtensors._full_in_main_process = gathering
    with open(os.devnull, "w") as file:
        os.dup2(file.fileno(), 2)
        train(given)


def test_a_death_in_the_thread_leaves_the_last_checkpoint(given: Given, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        started = start(partial(dying_in_thread, given={**given, "batch_size": 1, "max_steps": 50}), 2, directory)
        for process in started:
            process.join(60)
        assert [process.exitcode for process in started] == [1, -signal.SIGKILL]
    assert names(given["output"]) == ["checkpoint-2"]
    assert train({**given, "resume": True}) == 0
    assert names(given["output"]) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert not [name for name in os.listdir(given["output"]) if name.startswith(".")]
