"""Tool calls: the functions of a client, how a model writes calls of them, and its text -> names and arguments."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Self
from weakref import WeakKeyDictionary

from ligerzoo.checks import instances
from ligerzoo.errors import LigerzooError, TokenizerError
from ligerzoo.generate import Grammar
from ligerzoo.generate.endless_schemas import refuse_endless
from ligerzoo.generate.grammar import JSON_OPTIONS
from ligerzoo.serve.fields import FLAG, OBJECT, STRING, Fields, Json, check_field, check_names, checked, read, show
from ligerzoo.serve.prompts import TOOLS
from ligerzoo.serve.schemas import SCHEMA
from ligerzoo.text.chat_template import ChatTemplate
from ligerzoo.text.messages import Messages, trying_text_arguments
from ligerzoo.text.tokenizer import Tokenizer

_NAME = "[a-zA-Z0-9_-]{1,64}"
_FUNCTION_NAME = instances(
    "1 to 64 letters, digits, underscores and dashes",
    lambda value: STRING.accepts(value) and re.fullmatch(_NAME, value) is not None,
)


class Function(NamedTuple):
    """A function that the model may call.

    Attributes:
        name: its name.
        parameters: the JSON schema of its arguments.
        where: name of the schema for messages.
    """

    name: str
    parameters: Json
    where: str = "tools"


class ToolFormat(NamedTuple):
    """How a model writes tool calls: `open`, a call, `separator`, another call, ..., `close`.

    A call is `head`, whose NAME is that of the function, the arguments as JSON, and `tail`. `label` is what chat
    templates write before the tail of an earlier call, and models do not: its id.
    """

    open: str
    head: str
    tail: str
    separator: str
    close: str
    label: str = ""

    @property
    def trigger(self) -> str:
        """What ends the text before the calls; "" if a text without calls must not begin as a call does."""
        end = re.search(r"[>\]]", self.open)
        return self.open[: end.end()] if end else ""

    def text(self, names: Sequence[str], arguments: str) -> str:
        """Returns the text of calls as chat templates write them."""
        calls = (self.head.replace("NAME", name) + arguments + self.label + self.tail for name in names)
        return self.open + self.separator.join(calls) + self.close


_HEAD = '{"name": "NAME", "arguments": '
_PROBE_ID = "abcdefghi"  # Mistral's templates refuse others
_LABEL = f', "id": "{_PROBE_ID}"'

FORMATS = (
    ToolFormat("<tool_call>\n", _HEAD, "}", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),  # Hermes, Qwen, Granite
    ToolFormat("[TOOL_CALLS] [", _HEAD, "}", ", ", "]", _LABEL),  # Mistral, with SentencePiece
    ToolFormat("[TOOL_CALLS][", _HEAD, "}", ", ", "]", _LABEL),  # Mistral Nemo
    ToolFormat("[TOOL_CALLS]", "NAME[ARGS]", "", "[TOOL_CALLS]", ""),  # Ministral 3, Devstral
    ToolFormat("<tool_calls>[", _HEAD, "}", ", ", "]</tool_calls>"),  # Apriel
    ToolFormat("<TOOLCALL>[", _HEAD, "}", ", ", "]</TOOLCALL>"),  # Nemotron Nano 2
    ToolFormat("", '{"name": "NAME", "parameters": ', "}", "", ""),  # Llama 3.1 to 3.3
)
"""The formats whose arguments are JSON. A chat template that writes earlier calls in one has it."""


def find_format(tokenizer: Tokenizer) -> tuple[ToolFormat, bool] | None:
    """Returns the format in which a chat template writes calls, and whether it writes several of one message.

    None if the template has another format, or does not know calls.
    """
    templates = tokenizer.chat_templates
    template = templates.get("tool_use") or templates.get("default")
    if template is None:
        return None
    if template not in _FOUND:
        _FOUND[template] = _find_format(tokenizer)
    return _FOUND[template]


_FOUND: WeakKeyDictionary[ChatTemplate, tuple[ToolFormat, bool] | None] = WeakKeyDictionary()


def _find_format(tokenizer: Tokenizer) -> tuple[ToolFormat, bool] | None:
    def rendered(*names: str) -> str:
        functions = [{"name": name, "arguments": {"key": 1}} for name in names]
        calls = [{"id": _PROBE_ID, "type": "function", "function": function} for function in functions]
        tools = [_tool(Function(name, {"type": "object", "properties": {}, "required": []})) for name in names]
        messages: Messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ]
        try:
            return trying_text_arguments(lambda some: tokenizer.render_chat(some, tools=tools), messages).text
        except TokenizerError:
            return ""

    for names in (("first", "second"), ("first",)):
        text = rendered(*names)
        for form in FORMATS:
            if (form.separator or len(names) == 1) and form.text(names, '{"key": 1}') in text:
                return form, len(names) > 1
    return None


def _tool(function: Function) -> Json:
    content = {"name": function.name, "description": "", "parameters": function.parameters}
    return {"type": "function", "function": content}


@dataclass(frozen=True)
class Tools:
    """The functions that the model may call in its answer.

    Attributes:
        functions: the functions.
        form: how the model writes calls.
        is_required: whether the answer consists of calls.
        is_parallel: whether it may have several.
        special: ids of the tokenizer's special tokens.
    """

    functions: list[Function]
    form: ToolFormat
    is_required: bool
    is_parallel: bool
    special: Mapping[str, int]

    @classmethod
    def read(cls, fields: Fields, tokenizer: Tokenizer) -> Self | None:
        """Reads `tools`, `tool_choice` and `parallel_tool_calls`; None if the model must not call a tool.

        Raises:
            LigerzooError: a field is invalid, or the chat template has no format of `FORMATS`.
        """
        functions = _functions(fields)
        choice = fields.get("tool_choice")
        is_parallel = read(fields, "parallel_tool_calls", FLAG, True)
        if OBJECT.accepts(choice):
            functions, is_parallel, choice = (
                [_chosen(checked(choice, "tool_choice", OBJECT), functions)],
                False,
                "required",
            )
        expected = '"none", "auto", "required" or {"type": "function", "function": {"name": "..."}}'
        check_field(choice in (None, "none", "auto", "required"), "tool_choice", choice, expected)
        check_field(bool(functions) or choice != "required", "tool_choice", choice, "tools with it")
        if not functions or choice == "none":
            return None
        if (found := find_format(tokenizer)) is None:
            expected = "a chat template that writes tool calls as Hermes, Qwen, Llama 3 or Mistral do"
            remedy = "Describe the functions in a message, and parse the answer."
            raise LigerzooError(
                "the model has no known format of calls", where="tools", expected=expected, remedy=remedy
            )
        form, allows_several = found
        special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        return cls(functions, form, choice == "required", is_parallel and allows_several, special)

    @property
    def shown(self) -> dict[int, str]:
        """The special tokens of the format, which are part of the text."""
        literals = "".join(self.form)
        return {token: name for name, token in self.special.items() if name in literals}

    def grammar(self, content: Json | None) -> str:
        """Returns the source of the `Grammar` of answers.

        Args:
            content: the JSON schema of an answer without calls; None for any text.

        Raises:
            LigerzooError: calls are JSON, and so are answers without.
        """
        form, literal = self.form, self._literal
        if content is not None and not (form.trigger or self.is_required):
            expected = "tools, or response_format: the model writes calls as JSON, too"
            raise LigerzooError("given together with tools", where="response_format", expected=expected)
        trigger, rest = form.trigger, literal(form.open[len(form.trigger) :])
        names = [f"call_{i}" for i in range(len(self.functions))]
        rules = [
            f"{rule}: {literal(form.head.replace('NAME', name))} {_json(schema)} {literal(form.tail)}"
            for rule, (name, schema, _) in zip(names, self.functions, strict=True)
        ]
        more = f"({literal(form.separator)} call)*" if self.is_parallel else ""
        rules += [f"call: {' | '.join(names)}", f"calls: {rest} call {more} {literal(form.close)}"]
        if self.is_required or content is not None:
            answer = "" if self.is_required or content is None else f"| {_json(content)}"
            return "\n".join([f"start: {literal(trigger)} calls {answer}", *rules])
        special = self._text_tokens
        rules.append(r"TEXT: /(.|\n)*/")
        if not trigger:
            start = f"start: calls | | NO_CALL ({special} TEXT)*" if special else "start: calls | | NO_CALL"
            rules.append(r"NO_CALL: /[^{](.|\n)*/")
        elif trigger in self.special:
            start = f"start: text | text {literal(trigger)} calls"
            rules.append(f"text: (TEXT {special})* TEXT" if special else "text: TEXT")
        else:
            start = f"start: {f'(TEXT {special})*' if special else ''} (TEXT | before calls)"
            rules.append(f"before[lazy]: TEXT {literal(trigger)}")
        return "\n".join([start, *rules])

    def constraint(self, content: Json | None, tokenizer: Tokenizer) -> Grammar:
        """Returns the constraint of answers; see `grammar`.

        Raises:
            LigerzooError: names the schema that cannot be enforced.
        """
        schemas = [(schema, where) for _, schema, where in self.functions]
        schemas += [] if content is None else [(content, SCHEMA)]
        for schema, where in schemas:
            refuse_endless(schema, where)
        try:
            return Grammar(self.grammar(content), tokenizer, where="tools")
        except LigerzooError:
            for schema, where in schemas:
                Grammar.json_schema(schema, tokenizer, where=where)
            raise

    def _literal(self, text: str) -> str:
        """Returns a text in Lark's syntax, with its special tokens as such."""
        names = [name for name in self.special if name in text]
        parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]
        return " ".join(
            f"<[{self.special[part]}]>" if part in self.special else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    @property
    def _text_tokens(self) -> str:
        """The special tokens that a text may have, in Lark's syntax: all but those of calls; "" for none."""
        ids = sorted({*self.special.values()} - self.shown.keys())
        runs = [[token for _, token in run] for _, run in groupby(enumerate(ids), lambda pair: pair[1] - pair[0])]
        return "<[" + ",".join(f"{run[0]}-{run[-1]}" for run in runs) + "]>" if runs else ""


def _json(schema: Json) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS})


def _functions(fields: Fields) -> list[Function]:
    given: Sequence[Fields] = read(fields, "tools", TOOLS, ())
    functions = [_function(tool, f"tools[{i}]") for i, tool in enumerate(given)]
    names = [function.name for function in functions]
    for i, name in enumerate(names):
        check_field(name not in names[:i], f"tools[{i}].function.name", name, "another name than those before it")
    return functions


def _function(tool: Fields, where: str) -> Function:
    check_field(tool.get("type") == "function", f"{where}.type", tool.get("type"), '"function"')
    function: Fields = checked(tool.get("function"), where := f"{where}.function", OBJECT)
    check_names(function, ("name", "description", "parameters", "strict"), {})
    read(function, "description", STRING, "", f"{where}.description")
    read(function, "strict", FLAG, False, f"{where}.strict")
    parameters: Fields = read(function, "parameters", OBJECT, {}, where := f"{where}.parameters")
    check_field(parameters.get("type", "object") == "object", f"{where}.type", parameters.get("type"), '"object"')
    name: str = checked(function.get("name"), f"{where.removesuffix('.parameters')}.name", _FUNCTION_NAME)
    return Function(name, {"type": "object", **({} if parameters else {"properties": {}}), **parameters}, where)


def _chosen(choice: Fields, functions: Sequence[Function]) -> Function:
    check_field(choice.get("type") == "function", "tool_choice.type", choice.get("type"), '"function"')
    named: Fields = checked(choice.get("function"), "tool_choice.function", OBJECT)
    name = named.get("name")
    found = next((function for function in functions if function.name == name), None)
    if found is None:
        expected = "one of tools"
        raise LigerzooError("no such tool", where="tool_choice.function.name", got=show(name), expected=expected)
    return found


class ToolCallParser:
    """Finds the tool calls in a text that arrives in parts.

    Args:
        form: how the model writes calls.

    Attributes:
        count: number of calls so far.
    """

    def __init__(self, form: ToolFormat) -> None:
        self._form, self.count = form, 0
        self._head = re.compile(re.escape(form.head).replace("NAME", f"(?P<name>{_NAME})"))
        self._rest, self._read = "", ""  # not yet read, and read of what precedes the first call
        self._state = self._text
        self._depth, self._in_string, self._escapes = 0, False, False

    def push(self, text: str, *, is_last: bool = False) -> tuple[str, list[Json]]:
        """Returns what the next part of the text adds.

        Returns:
            Text before the calls, and deltas of calls: the first of a call has its id and name, each a part of the
            arguments.
        """
        self._rest += text
        content, deltas = "", list[Json]()
        while True:
            state = self._state
            more, delta = state()
            content += more
            deltas += [] if delta is None else [delta]
            if self._state == state:
                break
        if is_last and self.count == 0:
            content += self._read + self._rest
        return content, deltas

    def _text(self) -> tuple[str, Json | None]:
        trigger, rest = self._form.trigger, self._rest
        if not trigger:
            start = self._form.head.partition("NAME")[0]
            if rest.startswith(start):
                self._state = self._begin
            elif not start.startswith(rest):
                self._state = self._content
            return "", None
        if (index := rest.find(trigger)) >= 0:
            self._take(index + len(trigger))
            self._read, self._state = trigger, self._opening
            return rest[:index], None
        held = next((n for n in range(min(len(rest), len(trigger) - 1), 0, -1) if rest.endswith(trigger[:n])), 0)
        return self._take(len(rest) - held), None

    def _content(self) -> tuple[str, Json | None]:
        return self._take(len(self._rest)), None

    def _opening(self) -> tuple[str, Json | None]:
        rest = self._form.open[len(self._form.trigger) :]
        if self._rest.startswith(rest):
            self._read += self._take(len(rest))
            self._state = self._begin
        return "", None

    def _begin(self) -> tuple[str, Json | None]:
        if (found := self._head.match(self._rest)) is None:
            return "", None
        self._take(found.end())
        self._state, self._depth = self._arguments, 0
        function = {"name": found["name"], "arguments": ""}
        self.count += 1
        return "", {"index": self.count - 1, "id": new_id(self._form), "type": "function", "function": function}

    def _arguments(self) -> tuple[str, Json | None]:
        for index, character in enumerate(self._rest):
            if self._in_string:
                self._in_string = self._escapes or character != '"'
                self._escapes = character == "\\" and not self._escapes
            elif character == '"':
                self._in_string = True
            else:
                self._depth += (character in "{[") - (character in "}]")
                if self._depth == 0 and character in "}]":
                    self._state = self._between
                    return "", self._delta(self._take(index + 1))
        return "", self._delta(self._take(len(self._rest)))

    def _between(self) -> tuple[str, Json | None]:
        after = self._form.tail + self._form.separator
        if self._form.separator and self._rest.startswith(after):
            self._take(len(after))
            self._state = self._begin
        return "", None

    def _delta(self, arguments: str) -> Json | None:
        return {"index": self.count - 1, "function": {"arguments": arguments}} if arguments else None

    def _take(self, length: int) -> str:
        text, self._rest = self._rest[:length], self._rest[length:]
        return text


def new_id(form: ToolFormat) -> str:
    """Returns an id of a call. Mistral's templates accept those of 9 letters and digits only."""
    if form.open.startswith("[TOOL_CALLS]"):
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


def whole_calls(deltas: Sequence[Json]) -> list[Json]:
    """Returns the calls that deltas add up to."""
    calls: list[Json] = []
    for delta in deltas:
        function = dict(delta["function"])  # type: ignore[call-overload]
        if "id" in delta:
            calls.append({"id": delta["id"], "type": "function", "function": function})
        else:
            whole: dict[str, str] = calls[-1]["function"]  # type: ignore[assignment]
            whole["arguments"] += function["arguments"]
    return calls
