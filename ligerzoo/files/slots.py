"""Slots: the hidden directories in which saves work.

The slot of a save is `.<name>.<12 hex digits>.ligerzoo` in the parent of what it replaces. The process locks the file
`lock` in the slot, so a later save can distinguish a killed save from a running one.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from ligerzoo.files.untrusted import is_at

_LOCK, NEW, OLD = "lock", "new", "old"
"""The entries of a slot."""


def delete_leftovers(directory: Path, name: str | None = None) -> None:
    """Deletes the slots that killed saves to entries of `directory` left, of one name or of all, if possible."""
    with contextlib.suppress(OSError):
        for slot in os.listdir(directory):
            if is_slot(slot, of=".+" if name is None else re.escape(name)):
                with contextlib.suppress(OSError):
                    _delete_leftover(directory / slot, directory / slot[1:].rsplit(".", 2)[0])


@contextlib.contextmanager
def locked_slot(target: Path) -> Iterator[Path]:
    """Yields a new locked slot for a save to `target`, and deletes it on exit."""
    with contextlib.ExitStack() as cleanup:
        slot = None
        while slot is None:
            slot = _claim_slot(target, cleanup)
        yield slot


def _claim_slot(target: Path, cleanup: contextlib.ExitStack) -> Path | None:
    """Creates and locks a slot. Returns None if another process deleted it as a leftover before it was locked."""
    slot = target.with_name(f".{target.name}.{secrets.token_hex(6)}.ligerzoo")
    _delete_on_interrupt(slot, target, cleanup)
    cleanup.callback(_delete_slot, slot, target)  # registered first, because an exception may follow at once
    slot.mkdir()
    try:
        descriptor = os.open(slot / _LOCK, os.O_RDWR | os.O_CREAT)
    except FileNotFoundError:
        return None
    cleanup.callback(_unlock, descriptor)
    try:
        _lock(descriptor)
    except BlockingIOError:
        return None
    except OSError:  # a file system without locks, on which leftovers are never deleted
        pass
    return slot if is_at(descriptor, slot / _LOCK) else None


def _delete_on_interrupt(slot: Path, target: Path, cleanup: contextlib.ExitStack) -> None:
    """Makes the handler of Ctrl-C delete the slot before it raises KeyboardInterrupt, until `cleanup` is closed.

    An interrupt may come between any two instructions, so also where no `with` or `finally` is in effect yet or any
    more. An interrupt of the deletion calls the handler again, which deletes the rest. Only the main thread is
    interrupted.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        return

    def delete_and_raise(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)  # a user's handler may raise nothing: then the save goes on
        except BaseException:
            _delete_slot(slot, target)
            restore()
            raise

    def restore() -> None:
        if signal.getsignal(signal.SIGINT) is delete_and_raise:
            signal.signal(signal.SIGINT, handler)

    cleanup.callback(restore)
    signal.signal(signal.SIGINT, delete_and_raise)


def _delete_leftover(slot: Path, target: Path) -> None:
    try:
        slot.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    else:
        return
    descriptor = os.open(
        slot / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    )  # every slot that is not empty has had a lock
    try:
        _lock(descriptor)  # raises if the save is running
        _delete_slot(slot, target)
    finally:
        _unlock(descriptor)


def is_slot(name: str, of: str = ".+") -> bool:
    """Returns whether a name is that of a slot, for a target whose name matches the pattern."""
    return re.fullmatch(rf"\.{of}\.[0-9a-f]{{12}}\.ligerzoo", name, re.DOTALL) is not None


def _delete_slot(slot: Path, target: Path) -> None:
    """Deletes a slot. Restores the old directory first if the second of two renames is missing.

    Raises no OSError, because the success of the save does not depend on this.
    """
    try:
        _try_to_delete_slot(slot, target)
    except BaseException:  # an interrupt is raised again after the deletion
        _try_to_delete_slot(slot, target)
        raise


def _try_to_delete_slot(slot: Path, target: Path) -> None:
    if os.path.lexists(slot / OLD) and not os.path.lexists(target):
        try:
            (slot / OLD).rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another process has just made a new one
                warnings.warn(
                    f"{slot}: not deleted, because it may hold the only copy of {target}; got {error}", stacklevel=2
                )
                return
    for _ in range(2):  # a save that deletes the slot as a leftover creates its lock again
        with contextlib.suppress(OSError):  # rmtree does not ignore errors of closing a directory
            shutil.rmtree(slot, ignore_errors=True)
    if os.path.lexists(slot):
        warnings.warn(f"{slot}: cannot be deleted; the next save to {target} tries again", stacklevel=2)


def _lock(descriptor: int) -> None:
    """Locks a file until it is closed. Raises BlockingIOError if another process holds the lock."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _unlock(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.close(descriptor)
