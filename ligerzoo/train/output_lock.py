"""The lock of a run's output directory: one run at a time.

A run locks the file OUTPUT/.lock. The system releases the lock when the process ends, however it ends. The file names
the process, and is deleted at the end of the run; one that a killed process has left is locked again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from ligerzoo.errors import CheckpointError
from ligerzoo.files.untrusted import is_at

LOCK_FILE = ".lock"

_held: set[int] = set()
"""Descriptors of the locks of this process. A forked process closes its copies, which would outlive the run."""


def _close_in_child() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_in_child)


class OutputLock:
    """The lock of a directory that this process holds; see `locked_output`."""

    def __init__(self, output: Path, descriptor: int) -> None:
        self._output, self._descriptor = output, descriptor

    def check(self) -> None:
        """Raises CheckpointError if the directory is no longer the one that was locked."""
        if not is_at(self._descriptor, self._output / LOCK_FILE):
            what = f"the output directory, or the file {LOCK_FILE} in it, was deleted, moved or replaced during the run"
            raise CheckpointError(what, where=self._output, remedy="Start the run again.")


@contextlib.contextmanager
def locked_output(output: Path) -> Iterator[OutputLock]:
    """Locks a directory, which is created if it does not exist; deleted at the end if it is still empty.

    A file system without locks gives a warning instead.

    Raises:
        CheckpointError: Another run holds the lock, or the directory cannot be written.
    """
    output = output.resolve()
    created = [path for path in (output, *output.parents) if not path.exists()]
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
    try:
        descriptor = _lock(output)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner).encode(), 0)
    except OSError as error:
        raise CheckpointError(
            "cannot be written", where=output, got=error, remedy="Choose another directory."
        ) from None
    _held.add(descriptor)
    try:
        yield OutputLock(output, descriptor)
    finally:
        if descriptor in _held:
            if _read_owner(output) == owner:  # also a copy, where saving the model could not link the file
                with contextlib.suppress(OSError):
                    (output / LOCK_FILE).unlink()
            _held.discard(descriptor)
            os.close(descriptor)
            for path in created:
                with contextlib.suppress(OSError):
                    path.rmdir()


def _lock(output: Path) -> int:
    """Returns the descriptor of the locked file."""
    while True:
        output.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(output / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:  # the run that has just ended deleted the directory
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise _in_use(output) from None
        except OSError as error:
            warnings.warn(
                f"{output}: the file system has no locks, so a second run in it is not refused; got {error}",
                stacklevel=4,
            )
        if is_at(descriptor, output / LOCK_FILE):
            return descriptor
        os.close(descriptor)  # of a run that has just ended


def _in_use(output: Path) -> CheckpointError:
    owner = _read_owner(output)
    names = ("pid", "host", "started")
    pid, host, started = (owner.get(name, "unknown") for name in names)
    got = f"process {pid} on {host}, started {started}"
    remedy = "Wait until it ends, or stop it; or choose another directory."
    return CheckpointError("another run uses the output directory", where=output, got=got, remedy=remedy)


def _read_owner(output: Path) -> dict[str, object]:
    """Reads which process a lock file names; nothing if the file is missing or was just created."""
    try:
        owner = json.loads((output / LOCK_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}
