"""Chat templates: the jinja programs in a checkpoint that render a conversation as a prompt.

A template is untrusted code. jinja2's immutable sandbox keeps it from running other code, but does not limit the time
and memory of a filter, method or operator: `'%1000000000d' % 1`, `x.replace('', y)`, `10 ** 10 ** 10`, the text of a
deeply nested list. No list of such operations is complete.

So another process (`ligerzoo.text.template_worker`) renders templates, and the operating system enforces the limits:

- Memory: `RLIMIT_AS`, 192 MiB more than the process has after start-up. It covers every allocation, on Linux only. On
  other systems the time limit bounds the allocations.
- CPU time for each conversation: a timer raises a Python exception after 1.5 s. A second timer kills the process 0.3 s
  later, even inside an operation that does not return to Python.
- Output: JSON with at most 2**23 characters of text, read up to a fixed size.

A crash of the process (for example a stack overflow in C) raises TokenizerError too. A conversation of a million
characters takes 0.01 s, or 0.25 s if the template copies all text at each message. The process starts in 60 ms, uses
20 MiB, and takes 0.05 ms for a short conversation. It starts with the first conversation, serves all threads, and ends
with the program. A new one starts after a limit was exceeded and in a forked program.
"""

import atexit
import contextlib
import json
import marshal
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ligerzoo.errors import ConfigError, TemplateError, TokenizerError

_MAX_SECONDS = 1.5  # CPU time for one conversation
_MAX_MEMORY = 192 * 2**20
_MAX_REPLY = 2**27  # bytes: the longest text as JSON, with at most 12 bytes per character
_START = (
    "import sys; sys.path[:] = sys.argv[2:]; from ligerzoo.text.template_worker import main; main(int(sys.argv[1]))"
)


def read_template(path: str | Path) -> str:
    """Returns the source of a chat template in a file that the option `chat_template` names.

    Raises:
        ConfigError: The file cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        where, got, expected = "option chat_template", f"{path}: {error}", "a jinja file in UTF-8"
        raise ConfigError("cannot be read", where=where, got=got, expected=expected) from error


class ChatTemplate:
    """One chat template.

    Args:
        source: the jinja source.
        where: the file, or the file and field, of the template, for error messages.
    """

    def __init__(self, source: str, where: str) -> None:
        self.source, self.where = source, where

    def render(self, variables: Mapping[str, object]) -> str:
        """Renders the template and returns the prompt.

        Args:
            variables: the template's variables, including `messages`. Mappings, lists, strings, numbers, booleans and
                None are passed unchanged; other objects (an image, a tensor) as the name of their type, `<Image>`.

        Raises:
            TokenizerError: the template is malformed, fails, refuses the messages, or exceeds the time or memory limit.
                The error names the template and, if available, the line.
        """
        return self._render(variables, ("", ""))

    @property
    def has_generation_blocks(self) -> bool:
        """Whether the template marks the assistant's text with `{% generation %}` blocks."""
        return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", self.source) is not None

    def render_spans(self, variables: Mapping[str, object]) -> tuple[str, list[tuple[int, int]]]:
        """Renders the template and returns the prompt and its `{% generation %}` blocks.

        Args:
            variables: see `render`.

        Returns:
            The prompt, and the (first, last + 1) characters of each block that is not empty, in order.

        Raises:
            TokenizerError: see `render`; or the template nests blocks, or repeats or cuts the text of a block.
        """
        number = secrets.token_hex(8)  # unpredictable: no message can contain it
        marks = f"\ufdd2{number}\ufdd2", f"\ufdd3{number}\ufdd3"
        spans: list[tuple[int, int]] = []
        start, length = None, 0
        parts = re.split(f"({marks[0]}|{marks[1]})", self._render(variables, marks))
        for part in parts:
            if part not in marks:
                length += len(part)
            elif (part == marks[0]) != (start is None):
                raise TokenizerError("the generation blocks are nested or incomplete", where=self.where)
            elif start is None:
                start = length
            else:
                spans += [(start, length)] if start < length else []
                start = None
        text = "".join(part for part in parts if part not in marks)
        if start is not None or number in text:
            raise TokenizerError("the template changes the text of a generation block", where=self.where)
        return text, spans

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that the template reads and does not set itself, such as "messages" and "enable_thinking".

        Raises:
            TemplateError: the template is malformed.
        """
        return frozenset(self._request(None, ("", ""), "variables"))

    def _render(self, variables: Mapping[str, object], marks: tuple[str, str]) -> str:
        try:
            plain = _plain(variables)
        except RecursionError as error:
            raise self._unsendable(error) from error
        text: str = self._request(plain, marks, "text")
        return text

    def _request(self, variables: Any, marks: tuple[str, str], field: str) -> Any:
        """Returns a field of the reply, or raises TokenizerError if the reply lacks it."""
        try:
            request = marshal.dumps((_MAX_SECONDS, self.source, self.where, variables, marks))
        except ValueError as error:
            raise self._unsendable(error) from error
        reply = _worker.exchange(request)
        if field in reply:
            return reply[field]
        line = f", line {reply['line']}" if reply.get("line") else ""
        kind = TemplateError if reply.get("malformed") else TokenizerError
        raise kind(f"the template {_problem(reply)}", where=f"{self.where}{line}")

    def _unsendable(self, error: Exception) -> TokenizerError:
        return TokenizerError("cannot send the variables to the template", where=self.where, got=error)


def _problem(reply: Mapping[str, object]) -> str:
    match reply:
        case {"limit": "memory"}:
            return f"exceeds the memory limit of {_MAX_MEMORY // 2**20} MiB"
        case {"limit": "time"}:
            return f"exceeds the limit of {_MAX_SECONDS} s of CPU time"
        case _:
            return str(reply.get("error"))


def _plain(value: object) -> Any:
    """Returns a copy of JSON types only: the sandbox cannot check the methods of other objects."""
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
            return {_plain_key(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return f"<{type(value).__name__}>"


def _plain_key(key: object) -> Any:
    if not isinstance(key, str | int | float | None):
        got = f"a key of type {type(key).__name__}"
        raise TokenizerError("not a JSON key", where="messages", got=got, expected="a string")
    return _plain(key)


class _Worker:
    """The rendering process; it renders one conversation at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def exchange(self, request: bytes) -> dict[str, Any]:
        """Returns the worker's reply or, if the worker ended without one, the reason.

        Raises:
            TokenizerError: the process cannot be started.
        """
        with self._lock:
            process = self._process = self._process or _start_process()
            reply: dict[str, Any] | None = None
            try:
                _send(process, request)
                reply = json.loads(_receive(process))
            except (OSError, EOFError, ValueError):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1)
                if process.returncode == -signal.SIGPROF:
                    return {"limit": "time"}
                return {"error": f"crashes the rendering process (exit status {process.returncode})"}
            finally:  # the next conversation starts a new process
                if reply is None or "limit" in reply:
                    self._end()
            return reply

    def end(self) -> None:
        """Kills the process."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def detach(self) -> None:
        """Drops the process in a forked program: it belongs to the parent."""
        if self._process is not None:
            self._process.returncode = 0  # keeps the destructor from waiting for it
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
        self._process, self._lock = None, threading.Lock()


def _start_process() -> subprocess.Popen[bytes]:
    remedy = "Render the conversation in another program, and pass its text to Tokenizer.encode."
    if not sys.executable or getattr(sys, "frozen", False):
        what = "rendering a chat template needs a Python interpreter, and this program has none"
        raise TokenizerError(what, where="sys.executable", got=repr(sys.executable), remedy=remedy)
    paths = [str(Path(__file__).parent.parent), *filter(None, sys.path)]
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _START, str(_MAX_MEMORY), *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C interrupts this program only
        )
    except OSError as error:
        what = "cannot start the process that renders chat templates"
        raise TokenizerError(what, where=sys.executable, got=error, remedy=remedy) from error


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
os.register_at_fork(after_in_child=_worker.detach)
