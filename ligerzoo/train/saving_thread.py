"""The thread that writes a checkpoint while the training goes on."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ligerzoo.dtensors import background_group


class SavingThread:
    """Runs one function at a time in a thread, in which the processes communicate by a process group for it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._group: Any = None

    @property
    def has_failed(self) -> bool:
        """Whether the function has raised an error, which `wait` raises."""
        return self._error is not None

    def start(self, work: Callable[[], None]) -> None:
        """Starts a function after the end of the one before. All processes must call it."""
        self.wait()
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")
        self._done.clear()
        # Not a daemon: the interpreter would kill it within C++ code, which aborts the program.
        self._thread = threading.Thread(target=self._run, args=(work,), name="ligerzoo-saving")
        self._thread.start()

    def wait(self) -> None:
        """Waits for the function, and raises its error."""
        self.close()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self, *, interrupt: bool = False) -> None:
        """Waits for the function, or interrupts it."""
        if self._thread is not None:
            if interrupt and self._thread.ident is not None:
                identity = ctypes.c_ulong(self._thread.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(KeyboardInterrupt))
            self._done.wait()
            self._thread.join()  # an interrupt of `join` would make Python believe that the thread has ended
            self._thread = None

    def _run(self, work: Callable[[], None]) -> None:
        background_group.set(self._group)
        try:
            work()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()
