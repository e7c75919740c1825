"""The process that renders chat templates. `ligerzoo.text.chat_template` starts it and explains why it exists.

It reads requests from standard input and writes replies to standard output. Each begins with its length (8 bytes,
little endian). A request is (seconds, source, name, variables, marks) in `marshal` format, and only the parent process
sends any; without variables it asks which ones the template reads. A reply is JSON: a hostile template may have
produced it, and JSON is plain data.

This module imports only jinja2 and the standard library, so that the process starts in 60 ms and stays small.
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
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_SOURCE = 2**18  # characters of a template; the longest in use have about 30,000
MAX_TEXT = 2**23  # characters of a prompt: about two million tokens
KILL_AFTER = 0.3  # seconds of CPU time between the Python exception and the kill


class TimeLimitError(BaseException):
    """The CPU time limit is exceeded. Not an `Exception`, so that no handler inside jinja2 catches it."""


def main(memory: int) -> None:
    """Serves requests until standard input is closed.

    Args:
        memory: limit in bytes, in addition to the process's memory after start-up.
    """
    limit_memory(memory)
    signal.signal(signal.SIGVTALRM, _raise_time_limit)
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    while header := requests.read(8):
        reply = json.dumps(_answer(requests, int.from_bytes(header, "little"))).encode()
        replies.write(len(reply).to_bytes(8, "little") + reply)
        replies.flush()


def limit_memory(memory: int) -> None:
    """Limits the address space to the current size plus `memory` bytes. Linux only: other systems report no size."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sizes = Path("/proc/self/statm")
    if sizes.exists():
        used = int(sizes.read_text().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = used + memory if hard == resource.RLIM_INFINITY else min(used + memory, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeLimitError in the block after this CPU time; kills the process `KILL_AFTER` seconds later."""
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)  # counts user time
    signal.setitimer(signal.ITIMER_PROF, seconds + KILL_AFTER)  # counts user and kernel time; SIGPROF kills
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _raise_time_limit(number: int, frame: FrameType | None) -> None:
    raise TimeLimitError


def _answer(requests: BinaryIO, size: int) -> dict[str, Any]:
    """Returns the reply: a "text" or "variables", or an "error" with its "line", or the exceeded "limit"."""
    name = None
    try:
        seconds, source, name, variables, marks = marshal.loads(requests.read(size))
        _GenerationBlock.marks = marks
        with time_limit(seconds):
            if variables is None:
                return {"variables": _variables(source)}
            text = _compiled(source, name).render(variables)
            if len(text) > MAX_TEXT:
                raise TemplateError(f"the output has {len(text)} characters, more than the limit of {MAX_TEXT}")
            return {"text": text}
    except TemplateSyntaxError as error:
        return {"error": f"is malformed: {_quoted(error)}", "line": error.lineno, "malformed": True}
    except MemoryError as error:
        return {"limit": "memory", "line": _line(error, name)}
    except TimeLimitError as error:
        return {"limit": "time", "line": _line(error, name)}
    except Exception as error:
        return {"error": f"fails: {_quoted(error)}", "line": _line(error, name)}


def _variables(source: str) -> list[str]:
    """Returns the names that a template reads and does not set itself."""
    _check_source(source)
    return sorted(find_undeclared_variables(_sandbox().parse(source)))


def _check_source(source: str) -> None:
    if len(source) > MAX_SOURCE:
        raise TemplateError(f"the source has {len(source)} characters, more than the limit of {MAX_SOURCE}")


@lru_cache(maxsize=4)
def _compiled(source: str, name: str) -> Template:
    _check_source(source)
    code = _sandbox().compile(source, filename=name)
    return Template.from_code(_sandbox(), code, _sandbox().make_globals(None))


def _line(error: BaseException, name: str | None) -> int | None:
    """Returns the line of the template that raised. The compiled code uses the template's name as its file name."""
    template_line = None
    for frame, line in walk_tb(error.__traceback__):
        if frame.f_code.co_filename == name and line is not None:
            template = frame.f_globals.get("__jinja_template__")  # absent if jinja2 has rewritten the traceback
            template_line = line if template is None else template.get_corresponding_lineno(line)
    return template_line


def _quoted(error: Exception) -> str:
    """Returns an error message, short and printable: a template may choose the text."""
    text = str(error.message) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
    return repr(text[:500])


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox, with the functions that chat templates use."""

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
    """Renders `{% generation %}...{% endgeneration %}`, the assistant's text, as its body between two marks.

    Attributes:
        marks: texts to insert before and after the body; both empty unless the request asks for the spans.
    """

    tags = {"generation"}  # noqa: RUF012
    marks: tuple[str, str] = ("", "")

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)
        start, end = (
            nodes.Output([self.call_method("_mark", [nodes.Const(index)])], lineno=line) for index in range(2)
        )
        return [start, body, end]

    def _mark(self, index: int) -> str:
        return self.marks[index]


class _Namespace(Namespace):
    """A namespace that refuses names with a leading underscore, such as `__call__`."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        values: Mapping[str, object] = dict(*args, **kwargs)
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace may not have the name {name!r}: it begins with an underscore")
        super().__setitem__(name, value)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))  # within the limits, unlike the reply that quotes it


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
