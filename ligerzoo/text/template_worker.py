"""The process that renders chat templates. `ligerzoo.text.chat_template` starts it, and says why it exists.

Reads requests from standard input and writes replies to standard output. Both have a length first (8 bytes, little
endian). A request is what `marshal` writes of (seconds, source, name, variables), and comes from the parent process
alone. A reply is JSON, because what a hostile template has touched must be plain data for the parent.

This module imports jinja2 and the standard library only, so that the process starts in 60 ms and stays small.
"""

import json
import marshal
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import cache, lru_cache
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any, BinaryIO

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_SOURCE = 2**18  # characters of a template; the longest in use have some 30,000
MAX_TEXT = 2**23  # characters of a prompt: about two million tokens
KILL_AFTER = 0.3  # seconds of CPU time that a template has left to stop after the Python exception


class TimeLimitError(BaseException):
    """The CPU time is used up. Not an `Exception`, so that no handler inside jinja2 catches it."""


def main(memory: int) -> None:
    """Serves requests until standard input is closed.

    Args:
        memory: bytes that rendering may take beyond what this process has after start-up.
    """
    limit_memory(memory)
    signal.signal(signal.SIGVTALRM, _raise_time_limit)
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    while header := requests.read(8):
        reply = json.dumps(_answer(requests, int.from_bytes(header, "little"))).encode()
        replies.write(len(reply).to_bytes(8, "little") + reply)
        replies.flush()


def limit_memory(memory: int) -> None:
    """Bounds the address space. The kernel enforces it on Linux; other systems report no size and get no bound."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sizes = Path("/proc/self/statm")
    if sizes.exists():
        used = int(sizes.read_text().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = used + memory if hard == resource.RLIM_INFINITY else min(used + memory, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeLimitError after so much CPU time; kills the process if that does not end the block."""
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)  # of user code
    signal.setitimer(signal.ITIMER_PROF, seconds + KILL_AFTER)  # of user code and the kernel; SIGPROF kills
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _raise_time_limit(number: int, frame: FrameType | None) -> None:
    raise TimeLimitError


def _answer(requests: BinaryIO, size: int) -> dict[str, Any]:
    """The reply: a "text"; or an "error" and its "line"; or the "limit" that was reached and the line."""
    name = None
    try:
        seconds, source, name, variables = marshal.loads(requests.read(size))
        with time_limit(seconds):
            text = _compiled(source, name).render(variables)
            if len(text) > MAX_TEXT:
                raise TemplateError(f"it writes {len(text)} characters, more than the {MAX_TEXT} allowed")
            return {"text": text}
    except TemplateSyntaxError as error:
        return {"error": f"is malformed: {_quoted(error)}", "line": error.lineno}
    except MemoryError as error:
        return {"limit": "memory", "line": _line(error, name)}
    except TimeLimitError as error:
        return {"limit": "time", "line": _line(error, name)}
    except Exception as error:
        return {"error": f"fails: {_quoted(error)}", "line": _line(error, name)}


@lru_cache(maxsize=4)
def _compiled(source: str, name: str) -> Template:
    if len(source) > MAX_SOURCE:
        raise TemplateError(f"it has {len(source)} characters, more than the {MAX_SOURCE} allowed")
    code = _sandbox().compile(source, filename=name)
    return Template.from_code(_sandbox(), code, _sandbox().make_globals(None))


def _line(error: BaseException, name: str | None) -> int | None:
    """The line of the template that was being rendered. Its compiled code has the template's name as the file's."""
    found = None
    for frame, line in walk_tb(error.__traceback__):
        if frame.f_code.co_filename == name and line is not None:
            template = frame.f_globals.get("__jinja_template__")  # absent where jinja2 has rewritten the traceback
            found = line if template is None else template.get_corresponding_lineno(line)
    return found


def _quoted(error: Exception) -> str:
    """An error's message, short and printable: a template may word its own errors."""
    text = str(error.message) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
    return repr(text[:500])


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox with the helpers that chat templates expect."""

    def __init__(self) -> None:
        extensions = [_GenerationBlock, "jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.filters["tojson"] = _to_json
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace)
        del self.globals["lipsum"]


@cache
def _sandbox() -> _Sandbox:
    return _Sandbox()


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant says. It renders as its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """A namespace that refuses names with an underscore first, which have a meaning in Python: `__call__`."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        values: Mapping[str, Any] = dict(*args, **kwargs)
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace may not hold {name!r}: it begins with an underscore")
        super().__setitem__(name, value)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
