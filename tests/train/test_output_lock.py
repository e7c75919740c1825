"""One run at a time writes to an output directory, and a run whose directory disappears fails."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ligerzoo import cli
from ligerzoo.errors import CheckpointError, LigerzooError
from ligerzoo.train.log import RunLog
from ligerzoo.train.methods import METHODS
from ligerzoo.train.output_lock import LOCK_FILE, locked_output
from ligerzoo.train.run_state import RunState
from tests.train.tiny_run import arguments, options, train

IN_USE = rf"another run uses the output directory; got process {os.getpid()} on .*, started 20.*Wait until it ends"


@pytest.mark.parametrize("resume", [[], ["--resume"]], ids=["new", "resumed"])
@pytest.mark.parametrize("method", METHODS)
def test_a_second_run_is_refused(
    method: str, resume: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the model is opened, which does not exist."""
    teacher = ["--teacher", "none"]
    more = {"grpo": ["--reward", "reward.py"], "distill": teacher, "opd": teacher}.get(method, [])
    command = ["train", "none", "--method", method, "--data", "none", "--output", str(tmp_path / "run"), *more]
    with locked_output(tmp_path / "run"):
        assert cli.main([*command, *resume]) == 1
    assert f"another run uses the output directory; got process {os.getpid()} on" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_locks_its_directory_until_it_ends(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run writes nothing, so it may share the directory."""
    given, refused = options(checkpoint, data, tmp_path / "run", max_steps=2), []
    step = RunLog.step

    def second_run(self: RunLog, *args: Any, **values: Any) -> None:
        step(self, *args, **values)
        with pytest.raises(CheckpointError, match=IN_USE):
            train({**given, "resume": True, "lr": 1e-2})
        assert train({**given, "resume": True, "dry_run": True}) == 0
        refused.append(1)

    monkeypatch.setattr(RunLog, "step", second_run)
    assert train(given) == 0
    assert len(refused) == 2
    assert not (tmp_path / "run" / LOCK_FILE).exists()
    with pytest.raises(LigerzooError):
        train({**given, "output": str(tmp_path / "new" / "run"), "data": ("none",)})
    assert not (tmp_path / "new").exists()


def test_the_lock_of_a_killed_run_is_free(tmp_path: Path) -> None:
    """Also while a process that the run has forked lives on."""
    reader, writer = os.pipe()
    if (run := os.fork()) == 0:
        with locked_output(tmp_path / "run"):
            if (child := os.fork()) == 0:
                time.sleep(60)
                os._exit(0)
            os.write(writer, str(child).encode())
            os.kill(os.getpid(), signal.SIGKILL)
    child = int(os.read(reader, 99))
    assert os.waitpid(run, 0)[1] == signal.SIGKILL
    assert json.loads((tmp_path / "run" / LOCK_FILE).read_text())["pid"] == run
    try:
        deadline = time.monotonic() + 10
        while True:  # the child closes its copy when it starts
            try:
                with locked_output(tmp_path / "run"):
                    assert json.loads((tmp_path / "run" / LOCK_FILE).read_text())["pid"] == os.getpid()
                break
            except CheckpointError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        os.kill(child, 0)  # lives
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(reader)
        os.close(writer)


def test_a_file_system_without_locks_gives_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with contextlib.ExitStack() as stack:
        with pytest.warns(UserWarning, match=r"the file system has no locks.*No locks available"):
            lock = stack.enter_context(locked_output(tmp_path))
        lock.check()
        (tmp_path / LOCK_FILE).unlink()
        with pytest.raises(CheckpointError, match="was deleted, moved or replaced during the run"):
            lock.check()


def calling_first(action: Callable[[], object], method: Any) -> Any:
    def called(*args: Any, **given: Any) -> Any:
        action()
        return method(*args, **given)

    return called


@pytest.mark.parametrize("moment", ["step", "save", "finish"])
@pytest.mark.parametrize("recreated", [False, True])
def test_a_directory_that_disappears_ends_the_run(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, recreated: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def delete() -> None:
        if (tmp_path / "run" / "log.jsonl").exists():
            gone = (tmp_path / "run").rename(tmp_path / "gone")  # at once: a checkpoint may be written meanwhile
            shutil.rmtree(gone, ignore_errors=True)
            if recreated:
                (tmp_path / "run").mkdir(exist_ok=True)

    owner = RunLog if moment == "step" else RunState
    monkeypatch.setattr(owner, moment, calling_first(delete, getattr(owner, moment)))
    assert cli.main(arguments(options(checkpoint, data, tmp_path / "run", max_steps=3))) == 1
    printed = capsys.readouterr()
    assert "deleted, moved or replaced during the run" in printed.err
    assert "holds the model" not in printed.out
    assert not (tmp_path / "run" / "config.json").exists()


def test_files_that_disappear_during_a_run_are_not_claimed(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    for name, code in (("loss.svg", 0), ("log.jsonl", 1)):
        given = options(checkpoint, data, tmp_path / "run", max_steps=2, resume=True)
        with monkeypatch.context() as patch:
            patch.setattr(RunState, "finish", calling_first((tmp_path / "run" / name).unlink, RunState.finish))
            assert cli.main(arguments(given)) == code
        assert "loss.svg" not in capsys.readouterr().out
