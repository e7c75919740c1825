"""Tool calls and JSON schemas of the server, with the official client."""

import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pydantic
import pytest
import torch

from ligerzoo.demo.text import CHECKPOINT, load
from ligerzoo.serve.tools import FORMATS, Function, ToolCallParser, ToolFormat, Tools, find_format, new_id, whole_calls
from ligerzoo.text.chat_template import ChatTemplate
from ligerzoo.text.tokenizer import Tokenizer
from tests.serve.serving import Served, post, serving

pytest.importorskip("llguidance")

TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool.function.name }} {{ tool.function.parameters.required | tojson }}
{% endfor %}
{%- for message in messages %}# {{ message.role }}: {{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- OPEN if loop.first else SEPARATOR }}{{ CALL }}{{ CLOSE if loop.last }}
{%- endfor %}
{% endfor %}"""
QUESTION = [{"role": "user", "content": "def read(path):"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
DIGIT = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/digit"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "?", "parameters": parameters}}
    for name, parameters in (("get_weather", CITY), ("add", DIGIT))
]
ENDLESS = {"$ref": "#/$defs/A"}
GREEDY = {"model": "demo", "temperature": 0, "max_tokens": 64}
HERMES, LLAMA = FORMATS[0], FORMATS[-1]


def template(form: ToolFormat, *, is_parallel: bool = True) -> ChatTemplate:
    """A chat template that writes calls in a format."""
    call = form.text(["{{ call.function.name }}"], "{{ call.function.arguments | tojson }}")
    call = call[len(form.open) : len(call) - len(form.close)].replace('"id": "abcdefghi"', '"id": "{{ call.id }}"')
    source = TEMPLATE.replace("{{ CALL }}", call)
    for name, text in {"OPEN": form.open, "SEPARATOR": form.separator, "CLOSE": form.close}.items():
        source = source.replace(name, json.dumps(text, ensure_ascii=False))
    if not is_parallel:
        source += "{% for one in messages if one.tool_calls and one.tool_calls | length > 1 %}{{ 1 / 0 }}{% endfor %}"
    return ChatTemplate(source, "template")


def with_template(form: ToolFormat, *, is_parallel: bool = True) -> Tokenizer:
    _, tokenizer = load(CHECKPOINT)
    tokenizer.chat_templates = {"default": template(form, is_parallel=is_parallel)}
    return tokenizer


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(load(CHECKPOINT)[0], with_template(HERMES)) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


def chat(client: Any, *, streams: bool = False, **options: Any) -> dict[str, Any]:
    """Returns the first choice; of a stream, what its deltas add up to."""
    response = client.chat.completions.create(**{"messages": QUESTION, **GREEDY, **options}, stream=streams)
    if not streams:
        (choice,) = response.choices
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
        return {"content": choice.message.content, "calls": calls, "reason": choice.finish_reason}
    content, found, reason = "", list[dict[str, str]](), None
    for chunk in response:
        (choice,) = chunk.choices
        content, reason = content + (choice.delta.content or ""), choice.finish_reason
        for call in choice.delta.tool_calls or []:
            if call.id:
                assert (call.index, call.type) == (len(found), "function")
                found.append({"name": call.function.name, "arguments": ""})
            found[call.index]["arguments"] += call.function.arguments
    calls = [(call["name"], call["arguments"]) for call in found]
    return {"content": content or (None if calls else ""), "calls": calls, "reason": reason}


def check_call(call: tuple[str, str]) -> None:
    name, arguments = call[0], json.loads(call[1])
    if name == "get_weather":
        assert arguments in ({"city": "Oslo"}, {"city": "Rome"})
    else:
        assert name == "add"
        assert list(arguments) == ["a"]
        assert 0 <= arguments["a"] <= 9


# JSON


class Animal(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=6)
    legs: int = pydantic.Field(ge=0, le=8)


def test_schemas(client: Any) -> None:
    answer = client.chat.completions.parse(model="demo", messages=QUESTION, response_format=Animal, seed=1)
    (choice,) = answer.choices
    assert (choice.finish_reason, type(choice.message.parsed)) == ("stop", Animal)
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    whole, parts = (chat(client, response_format=schema, streams=streams) for streams in (False, True))
    assert whole == parts
    assert json.loads(whole["content"])["city"] in ("Oslo", "Rome")
    cut = chat(client, response_format=schema, max_tokens=2)
    assert (cut["reason"], cut["content"]) == ("length", whole["content"][: len(cut["content"])])
    extra = {"response_format": schema}  # as in vLLM
    text = client.completions.create(prompt="x", extra_body=extra, **GREEDY).choices[0].text
    assert json.loads(text)["city"] in ("Oslo", "Rome")


def test_json_objects(client: Any) -> None:
    for choice in client.chat.completions.create(
        model="demo", messages=QUESTION, response_format={"type": "json_object"}, n=2, seed=4, max_tokens=30
    ).choices:
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)


# Tools


def test_calls(client: Any) -> None:
    required = chat(client, tools=TOOLS, tool_choice="required", max_tokens=40, streams=True)
    assert required["reason"] in ("tool_calls", "length")  # the demo's model may call on and on
    assert required["content"] is None
    for call in required["calls"][:-1]:
        check_call(call)
    single = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    one, streamed = chat(client, **single), chat(client, **single, streams=True)
    assert one == streamed
    assert (one["reason"], len(one["calls"])) == ("tool_calls", 1)
    check_call(one["calls"][0])
    assert one["calls"][0] == required["calls"][0]
    other = "add" if one["calls"][0][0] == "get_weather" else "get_weather"
    choice = {"type": "function", "function": {"name": other}}
    named = chat(client, tools=TOOLS, tool_choice=choice)
    assert (named["reason"], [call[0] for call in named["calls"]]) == ("tool_calls", [other])
    check_call(named["calls"][0])


def test_the_model_may_answer_without_a_call(client: Any, served: Served) -> None:
    """Then its tokens are those without a grammar. The template gets the tools, unless the choice is "none"."""
    for choice, tools in ((None, TOOLS), ("auto", TOOLS), ("none", None)):
        ids = served.tokenizer.apply_chat_template(QUESTION, tools=tools, add_generation_prompt=True)
        new = served.model.generate(torch.tensor([ids]), max_new_tokens=9)[0, len(ids) :].tolist()
        text = served.tokenizer.decode(new, skip_special_tokens=True)
        options = {} if choice is None else {"tool_choice": choice}
        answer = chat(client, tools=TOOLS, max_tokens=9, streams=choice == "auto", **options)
        assert answer == {"content": text, "calls": [], "reason": "length"}
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    answer = chat(client, tools=TOOLS, response_format=schema)
    assert answer["calls"] or json.loads(answer["content"])["city"] in ("Oslo", "Rome")


def test_results_of_calls(client: Any, served: Served) -> None:
    """A conversation goes on with the answer of the client's function; arguments are JSON text, as the API has it."""
    answer = client.chat.completions.create(
        messages=QUESTION, tools=TOOLS[:1], tool_choice="required", parallel_tool_calls=False, **GREEDY
    )
    message = answer.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny"}
    conversation = [*QUESTION, message.to_dict(), result]
    options = {**GREEDY, "max_tokens": 1}
    usage = client.chat.completions.create(messages=conversation, tools=TOOLS, **options).usage
    _, tokenized = post(served, json.dumps({"messages": conversation, "tools": TOOLS}), "/tokenize")
    assert tokenized["count"] == usage.prompt_tokens
    call = {"name": "get_weather", "arguments": json.loads(message.tool_calls[0].function.arguments)}
    expected = [
        *QUESTION,
        {"role": "assistant", "tool_calls": [{"function": call}]},
        {"role": "tool", "content": "Sunny"},
    ]
    assert usage.prompt_tokens == len(served.tokenizer.apply_chat_template(expected, tools=TOOLS))


def test_requests_with_and_without_a_grammar_run_together(served: Served) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    required = {"tools": TOOLS, "tool_choice": "required"}
    kinds: list[dict[str, Any]] = [{}, {"response_format": schema}, required, {"tools": TOOLS}, {}, {"tools": TOOLS}]

    async def one(client: Any, options: dict[str, Any]) -> str:
        given = {**GREEDY, "max_tokens": 12, "messages": QUESTION, **options}
        choice = (await client.chat.completions.create(**given)).choices[0]
        calls = [call.function.to_dict() for call in choice.message.tool_calls or []]
        return f"{choice.message.content} {calls} {choice.finish_reason}"

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
            alone = [await one(client, options) for options in kinds[:4]]
            together = await asyncio.gather(*(one(client, options) for options in kinds))
        assert together == [*alone, alone[0], alone[3]]

    asyncio.run(run())


def _tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


def _schema(schema: Any, **options: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **options}}}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tools": {}}, "tools: invalid value; got {}; expected a list of up to 128 objects"),
        ({"tools": TOOLS * 65}, "tools: invalid value"),
        ({"tools": [5]}, "tools: invalid value; got [5]; expected a list of up to 128"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type: invalid value"),
        ({"tools": [{"type": "function"}]}, "tools[0].function: invalid value"),
        (_tool(name=None), "tools[0].function.name: invalid value"),
        (_tool(name="a b"), "tools[0].function.name: invalid value; got \"a b\"; expected 1 to 64 letters"),
        (_tool(description=5), "tools[0].function.description: invalid value"),
        (_tool(strict="yes"), "tools[0].function.strict: invalid value"),
        (_tool(parameters=[]), "tools[0].function.parameters: invalid value"),
        (_tool(parameters={"type": "array"}), "tools[0].function.parameters.type: invalid value"),
        (_tool(parameters={"not": {}}), "tools[0].function.parameters: not a supported grammar; got Unimplemented"),
        (_tool(arguments={}), "arguments: unknown field"),
        ({"tools": TOOLS * 2}, "tools[2].function.name: invalid value; got \"get_weather\"; expected another name"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice: invalid value; got \"any\"; expected \"none\", "),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type: invalid value"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function: invalid value"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice.function.name: no such tool; got \"f\"; expected one of tools",
        ),
        ({"tool_choice": "required"}, "tool_choice: invalid value; got \"required\"; expected tools with it"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls: invalid value"),
        ({"functions": [{"name": "f"}]}, "functions: not supported"),
        ({"response_format": "json"}, "response_format: invalid value"),
        ({"response_format": {"type": "xml"}}, "response_format.type: invalid value; got \"xml\"; expected \"text\""),
        ({"response_format": {"type": "json_object", "schema": {}}}, "schema: unknown field"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: invalid value"),
        (_schema(None), "response_format.json_schema.schema: invalid value; got null; expected an object"),
        (_schema({}, name=5), "response_format.json_schema.name: invalid value"),
        (_schema({}, strict=1), "response_format.json_schema.strict: invalid value"),
        (_schema({}, description=1), "response_format.json_schema.description: invalid value"),
        (
            _schema({"type": "strin"}),
            "response_format.json_schema.schema: not a supported grammar; got Invalid type: strin",
        ),
        (_schema({"enum": []}), "schema: not a supported grammar; got Unsatisfiable schema"),
        (_schema({"$ref": "#"}), "response_format.json_schema.schema: no text can end; got #, which refers to itself"),
        (
            _schema({"type": "object", "properties": {"a": ENDLESS}, "required": ["a"], "$defs": {"A": ENDLESS}}),
            "response_format.json_schema.schema: no text can end; got #/$defs/A, which refers to itself without end",
        ),
        (
            _tool(parameters={"properties": {"a": {"items": ENDLESS}}, "$defs": {"A": ENDLESS}}),
            "tools[0].function.parameters: no text can end; got #/$defs/A, which refers to itself without end",
        ),
    ],
)  # fmt: skip
def test_invalid_fields_are_named(client: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match="Error code: 400") as caught:
        client.chat.completions.create(model="demo", messages=QUESTION, extra_body=options)
    assert message in caught.value.body["message"]
    assert caught.value.body["type"] == "invalid_request_error"


def test_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without a known format answers without calls; one whose calls are plain JSON cannot have a schema too."""
    _, tokenizer = load(CHECKPOINT)
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    with (
        serving(load(CHECKPOINT)[0], tokenizer) as served,
        openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client,
    ):
        tokenizer.chat_templates = {"default": ChatTemplate("{{ messages[0].content }}", "template")}
        with pytest.raises(openai.BadRequestError, match="tools: the model has no known format of calls"):
            chat(client, tools=TOOLS)
        assert chat(client, tools=TOOLS, tool_choice="none", max_tokens=2)["content"]
        tokenizer.chat_templates = {"default": template(LLAMA)}
        assert len(chat(client, tools=TOOLS, tool_choice="required")["calls"]) == 1
        with pytest.raises(openai.BadRequestError, match="response_format: given together with tools"):
            chat(client, tools=TOOLS, response_format=schema)
        monkeypatch.setitem(sys.modules, "llguidance", None)
        for options in ({"tools": TOOLS}, {"response_format": schema}):
            with pytest.raises(openai.BadRequestError, match="needs the package llguidance"):
                chat(client, **options)


# Formats


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.open.strip() or "Llama")
def test_formats(form: ToolFormat) -> None:
    """The format is found, its grammar accepts calls and texts, and the parser finds them however the text arrives."""
    tokenizer = with_template(form, is_parallel=bool(form.separator))
    assert find_format(tokenizer) == (form, bool(form.separator))
    if form.separator:
        tokenizer.chat_templates = {"default": template(form, is_parallel=False)}
        assert find_format(tokenizer) == (form, False)
    names = ["add", "get_weather"][: 2 if form.separator else 1]
    arguments = json.dumps({"a": 'b"}]\\'})
    calls = form._replace(label="").text(names, arguments)
    before = "First <this>:\n" if form.trigger else ""
    for text, content, number in ((before + calls, before, len(names)), (calls, "", len(names)), ("So <x", "So <x", 0)):
        for size in (1, 5, 1000):
            parser, parts = ToolCallParser(form), [text[i : i + size] for i in range(0, len(text), size)]
            results = [parser.push(part, is_last=i == len(parts) - 1) for i, part in enumerate(parts)]
            found = whole_calls([delta for _, deltas in results for delta in deltas])
            assert "".join(one for one, _ in results) == content
            assert [call["function"] for call in found] == [
                {"name": name, "arguments": arguments} for name in names[:number]
            ]
            assert len({call["id"] for call in found}) == number
        functions = [Function(name, {"type": "object", "properties": {"a": {"type": "string"}}}) for name in names]
        for is_required in (False, True):
            tools = Tools(functions, form, is_required, True, {})
            is_allowed = not is_required or text == calls
            assert accepts(tools, tokenizer, text) == is_allowed, (text, is_required)
        assert not accepts(tools, tokenizer, calls.replace("add", "sub"))
    assert len(new_id(form)) == (9 if "[TOOL_CALLS]" in form.open else 29)


def accepts(tools: Tools, tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text is one of the grammar of answers."""
    state, eos = tools.constraint(None, tokenizer).start([1]), 1
    bits = np.zeros(3072 // 8, np.uint8)
    for token in [*tokenizer.encode(text, add_special_tokens=False), eos]:
        state.fill(bits)
        if not bits[token // 8] >> token % 8 & 1:
            return False
        state.append(token)
    return True


def test_special_tokens_of_a_format(client: Any, served: Served) -> None:
    """A special token may begin the calls: the grammar names it, and the text shows it to the parser."""
    form = next(form for form in FORMATS if form.head == "NAME[ARGS]")
    ids = {"[TOOL_CALLS]": 7, "[ARGS]": 8, "<other>": 9, "</s>": 1}
    tools = Tools([Function("f", {"type": "object", "properties": {}})], form, False, True, ids)
    assert tools.shown == {7: "[TOOL_CALLS]", 8: "[ARGS]"}
    source = tools.grammar(None)
    assert "start: text | text <[7]> calls" in source
    assert 'call_0: "f" <[8]> %json' in source
    assert "text: (TEXT <[1-1,9-9]>)* TEXT" in source
    tools.constraint(None, served.tokenizer)
