"""Chat templates: the small jinja programs in a checkpoint that turn a conversation into a prompt.

A template comes from the internet, so it runs in jinja's immutable sandbox, sees nothing but plain data, and has a
budget: loop rounds, calls, filters and the text it makes are counted, and huge repetitions, powers and paddings are
refused before they are made. What one call or filter does inside itself is not bounded: a `replace` or `join` that
multiplies long texts, printing a list that holds another many times over, a format string that asks for a huge width.
"""

import json
import types
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import cache, cached_property, wraps
from traceback import walk_tb
from typing import Any, TypeVar

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from ligerzoo.errors import TokenizerError

T = TypeVar("T")

_MAX_SOURCE = 2**20  # characters of a template; the longest in use have some 30,000
_MAX_WORK = 2_000_000  # steps of one rendering: some ten seconds
_MAX_SIZE = 2**25  # characters of one text that a template makes: several million tokens
_ITEM_SIZE = 8  # in a list, an item counts like so many characters
_BIT_SIZE = 2**13  # of an integer, as arithmetic on long ones is slow
_SIZE_PER_STEP = 2000  # making text costs a step for so many characters


class ChatTemplate:
    """One chat template, compiled when it is first rendered.

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
            TokenizerError: the template is malformed, fails, refuses the messages or exceeds its budget. The error
                names the template and the line.
        """
        _work_left.set(_MAX_WORK)
        try:
            return self._template.render(_plain(variables))
        except TemplateSyntaxError as error:
            where = f"{self.where}, line {error.lineno}"
            raise TokenizerError(f"the template is malformed: {_quoted(error)}", where=where) from error
        except Exception as error:
            raise TokenizerError(f"the template fails: {_quoted(error)}", where=self._locate(error)) from error

    @cached_property
    def _template(self) -> Template:
        if len(self.source) > _MAX_SOURCE:
            raise TemplateError(f"it has {len(self.source)} characters, more than the {_MAX_SOURCE} allowed")
        sandbox = _sandbox()
        tree = _Metering(sandbox).visit(sandbox.parse(self.source))
        code = sandbox.compile(tree, filename=self.where)
        return Template.from_code(sandbox, code, sandbox.make_globals(None))

    def _locate(self, error: BaseException) -> str:
        lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == self.where]
        return f"{self.where}, line {lines[-1]}" if lines else self.where


def _quoted(error: Exception) -> str:
    """What an error says, made short and harmless: a template may word its own errors."""
    text = str(error.message) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
    return repr(text[:500])


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


class _Sandbox(ImmutableSandboxedEnvironment):
    """The immutable sandbox with the helpers that chat templates expect; all they do is charged to the budget."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        extensions = [_GenerationBlock, "jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.filters["tojson"] = _to_json
        self.filters = {name: _metered(function) for name, function in self.filters.items()}
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace)
        del self.globals["lipsum"]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_size(_predicted_size(operator, left, right))
        return _charged(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(function, types.BuiltinMethodType):
            _check_numbers(*args, *kwargs.values())
        return _charged(super().call(context, function, *args, **kwargs))

    def concat(self, pieces: Iterable[str]) -> str:
        """Join what a template, macro or block wrote, stopping as soon as it is too long."""
        kept: list[str] = []
        size = 0
        for piece in pieces:
            size += len(piece)
            _check_size(size)
            kept.append(piece)
        return _charged("".join(kept))

    def joined(self, *values: Any) -> str:
        """The `~` operator."""
        return "".join(map(str, values))

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """`value[start:stop:step]`."""
        return value[start:stop:step]

    def loop_round(self) -> None:
        """What every loop round calls, because calls are counted."""


class _Metering(NodeTransformer):
    """Let loop rounds, slices and `~` go through the sandbox, where jinja would write plain Python for them."""

    def __init__(self, sandbox: _Sandbox) -> None:
        self.sandbox = sandbox

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        call = self._call("loop_round", [], node.lineno)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno, environment=self.sandbox))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("joined", node.nodes, node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = [
            part or nodes.Const(None, lineno=node.lineno) for part in (node.arg.start, node.arg.stop, node.arg.step)
        ]
        return self._call("sliced", [node.node, *bounds], node.lineno)

    def _call(self, method: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
        bound = nodes.EnvironmentAttribute(method, lineno=line, environment=self.sandbox)
        return nodes.Call(bound, arguments, [], None, None, lineno=line, environment=self.sandbox)


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant says. It renders as its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """A namespace that refuses the underscored names, which Python reads for its own ends: `__call__`, `__html__`."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
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


@cache
def _sandbox() -> _Sandbox:
    return _Sandbox()


_work_left: ContextVar[int] = ContextVar("_work_left")  # of the rendering that is under way, one for each thread


def _charged(value: T) -> T:
    """Pay for the step that made `value`."""
    size = _size(value)
    _check_size(size)
    left = _work_left.get() - 1 - size // _SIZE_PER_STEP
    _work_left.set(left)
    if left < 0:
        raise TemplateError(f"it takes more than the {_MAX_WORK} steps allowed")
    return value


def _size(value: object) -> int:
    match value:
        case str() | bytes():
            return len(value)
        case list() | tuple() | dict():
            return len(value) * _ITEM_SIZE
        case _:
            return 0


def _check_size(size: int) -> None:
    if size > _MAX_SIZE:
        raise TemplateError(f"it makes a value of size {size}, more than the {_MAX_SIZE} allowed")


def _check_numbers(*arguments: Any) -> None:
    """Refuse the numbers that pad or indent to absurd lengths."""
    for argument in arguments:
        if isinstance(argument, int):
            _check_size(argument)


def _predicted_size(operator: str, left: Any, right: Any) -> int:
    """The size that a product or power is going to have."""
    match operator, left, right:
        case "**", int(), int():
            return left.bit_length() * right * _BIT_SIZE
        case "*", int(), int():
            return (left.bit_length() + right.bit_length()) * _BIT_SIZE
        case "*", _, int():
            return _size(left) * right
        case "*", int(), _:
            return left * _size(right)
        case _:
            return 0


def _metered(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def filter_(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(*args[1:], *kwargs.values())
        return _charged(function(*args, **kwargs))

    return filter_
