"""Chat templates: the small jinja programs in a checkpoint that turn a conversation into a prompt.

A template comes from the internet, and jinja is a programming language. jinja2's immutable sandbox keeps a template
from running other code, but it does not bound what one filter, method or operator takes: `'%1000000000d' % 1`,
`x.replace('', y)`, `10 ** 10 ** 10` or the text of a list that holds another many times over. A list of such operations
has no end, and a budget that trusts the list proves nothing.

So templates are rendered in another process (`ligerzoo.text.template_worker`) and the kernel enforces the limits:

- memory: `RLIMIT_AS`, 192 MiB beyond what the process has after start-up. Every allocation counts, whichever operation
  makes it. Linux only: elsewhere the kernel has no such limit, and the time bounds how much can be allocated.
- CPU time for each conversation: a timer raises a Python exception at 1.5 s, and a second one kills the process 0.3 s
  later, even inside an operation that never returns to Python.
- what comes back: JSON of at most 2**23 characters of text, read up to a fixed size.

A crash of the process (a stack overflow in C, for example) is an error like the others. A conversation of a million
characters takes 0.01 s, or 0.25 s where the template copies all that it has at each message. The process takes some
60 ms to start and 20 MiB of memory, and 0.05 ms for a short conversation. It starts with the first conversation, serves
all threads, and ends with the program. After a limit was reached, and in a forked program, a new one starts.
"""

import atexit
import contextlib
import json
import marshal
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ligerzoo.errors import TokenizerError

_MAX_SECONDS = 1.5  # of CPU time for one conversation
_MAX_MEMORY = 192 * 2**20
_MAX_REPLY = 2**27  # bytes: the longest text as JSON, where a character takes 12 at most
_START = (
    "import sys; sys.path[:] = sys.argv[2:]; from ligerzoo.text.template_worker import main; main(int(sys.argv[1]))"
)


class ChatTemplate:
    """One chat template.

    Args:
        source: the jinja text.
        where: the name that errors give it: a file, or a file and the field in it.
    """

    def __init__(self, source: str, where: str) -> None:
        self.source, self.where = source, where

    def render(self, variables: Mapping[str, Any]) -> str:
        """The prompt.

        Args:
            variables: what the template may read, `messages` among it. Mappings, lists, strings, numbers, booleans and
                None reach it as they are; anything else (an image, a tensor) as its type's name, `<Image>`.

        Raises:
            TokenizerError: the template is malformed, fails, refuses the messages, or takes more time or memory than
                allowed. The error names the template and, if known, the line.
        """
        try:
            request = marshal.dumps((_MAX_SECONDS, self.source, self.where, _plain(variables)))
        except (ValueError, RecursionError) as error:
            raise TokenizerError("the variables cannot be sent to the template", where=self.where, got=error) from error
        reply = _worker.exchange(request)
        if isinstance(text := reply.get("text"), str):
            return text
        line = f", line {reply['line']}" if reply.get("line") else ""
        raise TokenizerError(f"the template {_problem(reply)}", where=f"{self.where}{line}")


def _problem(reply: Mapping[str, Any]) -> str:
    match reply:
        case {"limit": "memory"}:
            return f"takes more than the {_MAX_MEMORY // 2**20} MiB of memory allowed"
        case {"limit": "time"}:
            return f"takes more than the {_MAX_SECONDS} s of CPU time allowed"
        case _:
            return str(reply.get("error"))


def _plain(value: Any) -> Any:
    """Rebuild from JSON's types alone: what the methods of other objects do, the sandbox does not know."""
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case Mapping():
            return {_plain(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return f"<{type(value).__name__}>"


class _Worker:
    """The process that renders, one conversation at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def exchange(self, request: bytes) -> dict[str, Any]:
        """The worker's reply, or what ended the worker before it replied.

        Raises:
            TokenizerError: no process can be started.
        """
        with self._lock:
            process = self._process = self._process or _started()
            reply: dict[str, Any] | None = None
            try:
                _send(process, request)
                reply = json.loads(_receive(process))
            except (OSError, EOFError, ValueError):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1)
                if process.returncode == -signal.SIGPROF:
                    return {"limit": "time"}
                return {"error": f"ends the process that renders it (exit status {process.returncode})"}
            finally:  # after a limit, a crash or Ctrl-C, the next conversation starts a new process
                if reply is None or "limit" in reply:
                    self._end()
            return reply

    def end(self) -> None:
        """Ends the process."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def forget(self) -> None:
        """Leaves the process to the program that this one was forked from."""
        if self._process is not None:
            self._process.returncode = 0  # so that the destructor does not wait for it
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
        self._process, self._lock = None, threading.Lock()


def _started() -> subprocess.Popen[bytes]:
    remedy = "Render the conversation elsewhere, and encode its text."
    if not sys.executable or getattr(sys, "frozen", False):
        what = "a chat template needs a Python interpreter, and this program has none of its own"
        raise TokenizerError(what, where="sys.executable", got=repr(sys.executable), remedy=remedy)
    paths = [str(Path(__file__).parent.parent), *filter(None, sys.path)]
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _START, str(_MAX_MEMORY), *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for this program
        )
    except OSError as error:
        raise TokenizerError(
            "the process that renders chat templates cannot be started",
            where=sys.executable,
            got=error,
            remedy=remedy,
        ) from error


def _send(process: subprocess.Popen[bytes], request: bytes) -> None:
    assert process.stdin is not None
    rest = memoryview(len(request).to_bytes(8, "little") + request)
    while rest:
        rest = rest[process.stdin.write(rest) :]


def _receive(process: subprocess.Popen[bytes]) -> bytes:
    size = int.from_bytes(_read(process, 8), "little")
    if size > _MAX_REPLY:
        raise EOFError
    return _read(process, size)


def _read(process: subprocess.Popen[bytes], size: int) -> bytes:
    assert process.stdout is not None
    data = bytearray()
    while len(data) < size:
        piece = process.stdout.read(min(size - len(data), 2**20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


_worker = _Worker()
atexit.register(_worker.end)
os.register_at_fork(after_in_child=_worker.forget)
