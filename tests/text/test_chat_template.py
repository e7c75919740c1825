"""Chat templates render as in transformers, and hostile templates are stopped."""

import enum
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

import ligerzoo.text.chat_template
from ligerzoo.errors import TokenizerError
from ligerzoo.text.chat_template import ChatTemplate
from ligerzoo.text.tokenizer import Tokenizer

BOMBS = Path(__file__).with_name("template_bombs.py")

CHATML = """
{%- for message in messages -%}
    {%- if loop.first and message.role != 'system' -%}
        {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' -}}
    {%- endif -%}
    {{- '<|im_start|>' ~ message['role'] ~ '\\n' ~ message['content'] | trim ~ '<|im_end|>' ~ '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

TOOLS = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start|>system\\n" + "Today: " + date_string + "\\n" + system }}
{%- if tools is not none %}
    {{- "\\nFunctions:\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\\n" + tool.function | tojson }}
    {%- endfor %}
{%- else %}
    {{- " (no functions)" }}
{%- endif %}
{{- eos_token }}
{%- for message in messages %}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("one call at a time") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson(separators=(',', ':'), sort_keys=true) }}{{ "}" }}
    {%- elif message.role in ('tool', 'ipython') %}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson(ensure_ascii=True) }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
    {%- else %}
        {{- '<|start|>' + message['role'] + '\\n' + message['content'] | trim }}
    {%- endif %}
    {{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
{%- endif %}
"""

REASONING = """{%- set ns = namespace(last_query=messages | length - 1, searching=true, depth=0) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- set is_result = message.content is string and message.content.startswith('<tool>') %}
    {%- if ns.searching and message.role == "user" and not is_result %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "tool" %}{% continue %}{% endif %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- generation %}
            {%- if loop.index0 > ns.last_query %}
                {{- '<think>' ~ thought ~ '</think>' }}
            {%- endif %}
            {{- content }}
        {%- endgeneration %}
    {%- else %}
        {{- '[' ~ message.role | upper ~ ']' ~ content }}
    {%- endif %}
    {%- set ns.depth = ns.depth + 1 %}
    {{- '\\n#' ~ ns.depth ~ ' ' ~ loop.index ~ '/' ~ loop.length ~ (',' if not loop.last else '.') }}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>' }}{% endif %}
"""

PARTS = """{%- macro show(value, depth=0) %}
    {%- if value is string %}{{ value | trim }}
    {%- elif value is mapping %}
        {%- for key, item in value | dictsort %}{{ '  ' * depth }}{{ key }}: {{ show(item, depth + 1) }};{% endfor %}
    {%- elif value is sequence %}
        {%- for item in value %}{{ show(item, depth + 1) }}{{ ", " if not loop.last }}{% endfor %}
    {%- else %}{{ value | string }}{% endif %}
{%- endmacro %}
{%- set header %}
  <docs>
  {% for document in documents or [] %}
  {{ loop.cycle('a', 'b') }} {{ document.title }}: {{ document['text'] | indent(4) }}
  {% else %}
  none
  {% endfor %}
  </docs>
{% endset %}
{{ header | replace('\\n', ' ') }}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate, not ' ~ messages | map(attribute='role') | join('/')) }}
    {% endif %}
    {# a comment #}
    {{ {'user': 'U', 'assistant': 'A'}.get(message.role, '?') }} {{ show(message.content) }}
{% endfor %}
{{ image_token }}|{{ mask_token }}
{{ (messages | selectattr('role', 'equalto', 'user') | list)[-1].content is defined }}
{{- [1, 2] + [3] }}{{ 2 ** 3 * 2 }}{{ 'ab' * 3 }}{{ '%s-%d' % ('x', 3) }}{{ '{:>4}'.format('y') }}
{{- dict(a=1).items() | list }}{{ '%.2f' | format(2.5) }}{{ 7 // 2 }}{{ 7 % 4 }}{{ -1 - 1 }}
"""

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Says <how> "it" is & will be: 天気',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SYSTEM = {"role": "system", "content": "  You help.\n"}
USER = {"role": "user", "content": " Is it <warm> & sunny? 日本 \n"}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}
CALL = {
    "role": "assistant",
    "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Kyōto", "a": 1.5}}}],
}
RESULT = {"role": "tool", "content": {"degrees": 21, "sky": "é"}}
PARTED = {"role": "user", "content": [{"type": "text", "text": " hi "}, {"type": "image"}, ["x", [True, None, 2]]]}

CASES: list[tuple[str, list[dict[str, Any]], dict[str, Any]]] = [
    (CHATML, [USER], {}),
    (CHATML, [SYSTEM, USER, ANSWER, USER], {"add_generation_prompt": True}),
    (TOOLS, [USER], {}),
    (TOOLS, [SYSTEM, USER], {"tools": [WEATHER], "add_generation_prompt": True}),
    (TOOLS, [USER, CALL, RESULT, ANSWER], {"tools": [WEATHER, WEATHER], "date_string": "1 Jan 2000"}),
    (TOOLS, [USER], {"tools": [], "bos_token": "<mine>"}),
    (REASONING, [SYSTEM, USER, ANSWER], {}),
    (REASONING, [USER, ANSWER, USER, CALL, RESULT, ANSWER], {"enable_thinking": False}),
    (PARTS, [USER, ANSWER, PARTED], {}),
    (PARTS, [PARTED], {"documents": [{"title": "T", "text": "one\ntwo"}, {"title": "S", "text": "three"}]}),
    ("{{ messages }}{{ tools }}{{ documents }}{{ add_generation_prompt }}{{ other }}{{ messages[7] }}", [USER], {}),
    ("  {% if true %}\n  a\n  {% endif %}\n  b {#- c -#} \n\n{% raw %}{{ d }}{% endraw %}\n", [USER], {}),
]  # fmt: skip

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<img>"]
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "image_token": "<img>",
    "padding_side": "left",
}


def write(directory: Path, files: dict[str, str], **config: Any) -> Path:
    """Writes a tokenizer of single bytes that adds <s> before a text, with these template files and config entries."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    (directory / "additional_chat_templates").mkdir(parents=True)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({**CONFIG, **config}))
    for name, content in files.items():
        (directory / name).write_text(content)
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("chat") / "model", {"chat_template.jinja": CHATML})


@pytest.fixture(scope="module")
def ours(directory: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def theirs(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory)


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source, "test.jinja").render(variables)


# Against transformers


@pytest.mark.parametrize("case", range(len(CASES)))
def test_prompts_equal_transformers(ours: Tokenizer, theirs: Any, case: int) -> None:
    template, messages, options = CASES[case]
    expected = theirs.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    assert ours.apply_chat_template(messages, chat_template=template, tokenize=False, **options) == expected
    ids = ours.apply_chat_template(messages, chat_template=template, **options)
    assert ids == ours.encode(expected, add_special_tokens=False)
    assert ids == theirs.apply_chat_template(messages, chat_template=template, return_dict=False, **options)


def test_bos_is_not_added_twice(ours: Tokenizer) -> None:
    bos = ours.bos_token_id
    assert ours.apply_chat_template([USER], chat_template="{{ bos_token }}x").count(bos) == 1
    assert ours.apply_chat_template([USER], chat_template="{{ 1 }}").count(bos) == 0


def test_a_template_that_fails_in_transformers_fails_here(ours: Tokenizer, theirs: Any) -> None:
    for template, messages in [(PARTS, [ANSWER]), (TOOLS, [USER, {**CALL, "tool_calls": CALL["tool_calls"] * 2}])]:
        with pytest.raises(Exception, match=r"alternate|one call"):
            theirs.apply_chat_template(messages, chat_template=template)
        with pytest.raises(TokenizerError, match=r"alternate|one call"):
            ours.apply_chat_template(messages, chat_template=template)


def test_a_batch_of_conversations(ours: Tokenizer, theirs: Any) -> None:
    batch = [[USER], [SYSTEM, USER, ANSWER, USER]]
    texts = [ours.apply_chat_template(conversation, tokenize=False) for conversation in batch]
    assert ours.apply_chat_template(batch, tokenize=False) == texts
    got = ours.apply_chat_template(batch, return_tensors="pt")
    theirs.pad_token = theirs.eos_token
    expected = theirs.apply_chat_template(batch, return_tensors="pt", return_dict=True, padding=True)
    assert torch.equal(got["input_ids"], expected["input_ids"])
    assert torch.equal(got["attention_mask"], expected["attention_mask"])
    right = ours.apply_chat_template(batch, padding_side="right")
    assert right["attention_mask"][0] == sorted(right["attention_mask"][0], reverse=True)
    single = ours.apply_chat_template(batch[0], return_tensors="pt")
    assert single["input_ids"].tolist() == [ours.apply_chat_template(batch[0])]


# Choice of the template

FILE, TEXT = "{{ 'file' }}", "{{ 'text' }}"
NAMED = [{"name": "default", "template": "{{ 'first' }}"}, {"name": "tool_use", "template": "{{ 'tools' }}"}]
RAG = "additional_chat_templates/rag.jinja"
TOOL_USE = "additional_chat_templates/tool_use.jinja"


@pytest.mark.parametrize(
    ("files", "config", "options", "expected"),
    [
        ({"chat_template.jinja": FILE}, {}, {}, "file"),
        ({"chat_template.jinja": FILE}, {"chat_template": TEXT}, {}, "file"),
        ({"chat_template.jinja": FILE}, {"chat_template": NAMED}, {"tools": [WEATHER]}, "file"),
        ({}, {"chat_template": TEXT}, {}, "text"),
        ({}, {"chat_template": TEXT}, {"tools": [WEATHER]}, "text"),
        ({}, {"chat_template": NAMED}, {}, "first"),
        ({}, {"chat_template": NAMED}, {"tools": [WEATHER]}, "tools"),
        ({}, {"chat_template": NAMED}, {"chat_template": "tool_use"}, "tools"),
        ({}, {"chat_template": NAMED}, {"tools": [WEATHER], "chat_template": "default"}, "first"),
        ({"chat_template.jinja": FILE, RAG: "rag"}, {}, {"chat_template": "rag"}, "rag"),
        # A byte order mark is a character of the template, also in transformers.
        ({"chat_template.jinja": "\ufeff" + FILE}, {}, {}, "\ufefffile"),
        ({"chat_template.jinja": FILE, RAG: "\ufeffa\r\nb\r\n"}, {}, {"chat_template": "rag"}, "\ufeffa\nb"),
        ({"chat_template.jinja": FILE, TOOL_USE: "{{ 'use' }}"}, {}, {"tools": [WEATHER]}, "use"),
        ({"chat_template.jinja": FILE, TOOL_USE: "{{ 'use' }}"}, {"chat_template": TEXT}, {}, "file"),
        ({"chat_template.json": '{"chat_template": "no"}'}, {"chat_template": TEXT}, {}, "text"),
        ({}, {"chat_template": TEXT}, {"chat_template": "{{ 'given' }}"}, "given"),
    ],
)
def test_the_choice_equals_transformers(
    tmp_path: Path, files: dict[str, str], config: dict[str, Any], options: dict[str, Any], expected: str
) -> None:
    path = write(tmp_path / "model", files, **config)
    for tokenizer in (Tokenizer.from_pretrained(path), AutoTokenizer.from_pretrained(path)):
        assert tokenizer.apply_chat_template([USER], tokenize=False, **options) == expected


def test_a_missing_template_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "model", {RAG: "rag"}, chat_template=TEXT)
    tokenizer = Tokenizer.from_pretrained(path)
    assert list(tokenizer.chat_templates) == ["rag"]
    with pytest.raises(TokenizerError, match=r"no chat template named 'default'; expected one of \['rag'\]"):
        tokenizer.apply_chat_template([USER])
    with pytest.raises(TokenizerError, match="no chat template named 'tool_used'"):
        tokenizer.apply_chat_template([USER], chat_template="tool_used")
    path = write(tmp_path / "base model", {})
    with pytest.raises(TokenizerError, match=r"base model: the tokenizer has no chat template\. Base models have"):
        Tokenizer.from_pretrained(path).apply_chat_template([USER])


# Variables


@pytest.mark.parametrize("messages", ["hello", USER, [USER, "hello"], [[USER], USER], [[USER], "hello"], 3])
def test_invalid_conversations_are_refused(ours: Tokenizer, messages: Any) -> None:
    with pytest.raises(TokenizerError, match="messages: not a list of dictionaries"):
        ours.apply_chat_template(messages)


def test_tools_and_documents_must_be_dictionaries(ours: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="tools: not a list of dictionaries"):
        ours.apply_chat_template([USER], tools=[print])  # type: ignore[list-item]
    with pytest.raises(TokenizerError, match="documents: not a list of dictionaries"):
        ours.apply_chat_template([USER], documents=["text"])  # type: ignore[list-item]


def test_templates_get_plain_data_only() -> None:
    class Role(enum.StrEnum):
        USER = "user"

    class Text(str):
        def leak(self) -> str:
            return "leaked"

    values = [Role.USER, Text("t"), torch.ones(2), Path("/"), (1, 2.5), {1: None}, True]
    assert (
        render("{{ values }}", values=values) == "['user', 't', '<Tensor>', '<PosixPath>', [1, 2.5], {1: None}, True]"
    )
    with pytest.raises(TokenizerError, match="leak"):
        render("{{ values[1].leak() }}", values=values)


def test_entries_that_are_none_are_dropped(ours: Tokenizer) -> None:
    template = "{% for m in messages %}{{ m.content is defined }}{{ m.parts }};{% endfor %}"
    messages = [{"content": None, "parts": [None]}, {"content": ""}]
    assert ours.apply_chat_template(messages, chat_template=template, tokenize=False) == "False[None];True;"


def test_messages_are_not_changed(ours: Tokenizer) -> None:
    messages = [{"role": "user", "content": None, "parts": [1]}]
    template = "{% set x = messages[0].update({'role': 'x'}) %}{% set y = messages[0].parts.append(2) %}"
    with pytest.raises(TokenizerError, match="unsafe"):
        ours.apply_chat_template(messages, chat_template=template)
    assert messages == [{"role": "user", "content": None, "parts": [1]}]


def test_special_tokens_cannot_replace_messages(tmp_path: Path) -> None:
    names = {"messages": "</s>", "tools": "</s>", "add_generation_prompt": "</s>", "eos_token": "<s>"}
    path = write(
        tmp_path / "model", {"chat_template.jinja": "{{ tools }}{{ messages[0].role }}"}, extra_special_tokens=names
    )
    assert Tokenizer.from_pretrained(path).apply_chat_template([USER], tokenize=False) == "Noneuser"


# Errors


@pytest.mark.parametrize(
    ("source", "line", "message"),
    [
        ("a\n{% if %}", 2, "malformed"),
        ("a\n\n{{ 'x }}", 3, "malformed"),
        ("{% for m in messages %}\n{% endif %}", 2, "malformed"),
        ("\n{{ x | no_such_filter }}", 2, "malformed: \"No filter named 'no_such_filter'"),
        ("\n{{ raise_exception('not this way') }}", 2, "fails: ['\"]not this way"),
        ("\n\n{{ messages.no.such }}", 3, "fails: .*no attribute 'no'"),
        ("{% macro f() %}\n{{ 1 / 0 }}\n{% endmacro %}\n{{ f() }}", 2, "fails: ['\"]ZeroDivisionError"),
        ("{% macro f() %}\n{{ f() }}\n{% endmacro %}\n{{ f() }}", 2, "fails: ['\"]RecursionError"),
        ("\n{{ messages | tojson(indent='x', nope=1) }}", 2, "fails: ['\"]TypeError"),
        ("\n{{ undefined | tojson }}", 2, "fails: ['\"]TypeError"),
        ("\n{% include 'other' %}", 2, "fails: "),
        ("\n{% import '/etc/passwd' as x %}", 2, "fails: "),
        ("{% for m in messages %}\n{{ 1 ~ m.no.such }}{% endfor %}", 2, "fails: .*no attribute 'no'"),
    ],
)
def test_an_error_names_the_file_and_the_line(tmp_path: Path, source: str, line: int, message: str) -> None:
    path = write(tmp_path / "model", {"chat_template.jinja": source})
    tokenizer = Tokenizer.from_pretrained(path)  # a broken template does not keep a tokenizer from loading
    with pytest.raises(TokenizerError, match=rf"model/chat_template\.jinja, line {line}: the template (is )?{message}"):
        tokenizer.apply_chat_template([USER])


def test_an_error_quotes_the_template_safely() -> None:
    with pytest.raises(TokenizerError) as caught:
        render("{{ raise_exception('\x1b[2J\n' ~ 'x' * 10 ** 6) }}")
    assert "\\x1b[2J\\nxxx" in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_an_error_names_the_field(tmp_path: Path) -> None:
    path = write(tmp_path / "model", {}, chat_template=[{"name": "default", "template": "\n{{ 1 / 0 }}"}])
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: chat_template 'default', line 2: .*division"):
        Tokenizer.from_pretrained(path).apply_chat_template([USER])
    with pytest.raises(TokenizerError, match="the chat_template argument, line 1: the template is malformed"):
        Tokenizer.from_pretrained(path).apply_chat_template([USER], chat_template="{{")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'] }}",
        "{{ (messages | attr('__class__')).__name__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ ['{0.__class__}'.format] | map('call') | list }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ lipsum() }}",
        "{% set messages.x = 1 %}",
    ],
)
def test_the_sandbox_blocks_escapes(source: str) -> None:
    try:
        text = render(source, messages=[])
    except TokenizerError:
        return
    assert text == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace() %}{% set ns.__call__ = range %}",
        "{{ namespace(__html__=range) }}",
        "{{ namespace({'__class__': 1}) }}",
    ],
)
def test_a_namespace_refuses_underscored_names(source: str) -> None:
    with pytest.raises(TokenizerError, match="it begins with an underscore"):
        render(source)


@pytest.mark.parametrize(
    "seconds, step", [(0.1, 3), pytest.param(ligerzoo.text.chat_template._MAX_SECONDS, 1, marks=pytest.mark.slow)]
)
def test_bombs_are_stopped(seconds: float, step: int) -> None:
    """Each raises an error that names it, within 256 MiB and at most 0.5 s of CPU time above the limit."""
    command = [sys.executable, str(BOMBS), str(seconds), str(step)]
    results = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert len(results) * step >= 60
    base = 24 * 2**20  # memory of an idle Python process
    for name, cost in results.items():
        assert cost["problem"].startswith(name), name
        assert "the template " in cost["problem"], name
        assert cost["seconds"] < seconds + 0.5, name
        assert cost["memory"] < base + 2**28, name


def test_a_long_text_is_refused() -> None:
    with pytest.raises(TokenizerError, match=r"fails: 'the output has 9000000 characters, more than the limit"):
        render("{{ text }}", text="x" * 9 * 10**6)


def test_the_limits_apply_to_each_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ligerzoo.text.chat_template, "_MAX_SECONDS", 0.2)
    template = ChatTemplate("{% for i in range(n) %}{% for j in range(1000) %}{% endfor %}{% endfor %}", "test.jinja")
    assert [template.render({"n": 2000}) for _ in range(8)] == [""] * 8  # 0.04 s each
    with pytest.raises(TokenizerError, match=r"test\.jinja, line 1: the template exceeds the limit of 0\.2 s"):
        template.render({"n": 99999})
    assert template.render({"n": 1}) == ""


def test_a_crash_of_the_worker_raises_tokenizer_error() -> None:
    assert render("{{ 1 }}") == "1"
    process = ligerzoo.text.chat_template._worker._process
    assert process is not None
    process.kill()
    with pytest.raises(TokenizerError, match=r"crashes the rendering process \(exit status -9\)"):
        render("{{ 1 }}")
    assert render("{{ 1 }}") == "1"


def test_an_interrupted_conversation_leaves_no_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(process: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ligerzoo.text.chat_template, "_receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            render("{{ 'one' }}")
    assert render("{{ 'two' }}") == "two"


def test_threads_and_forked_programs_get_their_own_replies() -> None:
    def rendered(number: int) -> bool:
        return all(render("{{ n }}", n=number) == str(number) for _ in range(20))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(rendered, range(8)))
    script = "import os, sys\nfrom ligerzoo.text.chat_template import ChatTemplate\n"
    script += "def render(n): assert ChatTemplate('{{ n }}', 'x').render({'n': n}) == str(n)\n"
    script += "render(0)\nchild = os.fork()\nfor _ in range(50): render(os.getpid())\n"
    script += "if child: assert os.waitpid(child, 0)[1] == 0\n"
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=60)


def test_without_a_python_interpreter_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ligerzoo.text.chat_template._worker.end()
    for executable, message in [("", "needs a Python interpreter"), ("/no/such/python", "cannot start the process")]:
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(TokenizerError, match=message):
            render("{{ 1 }}")


def test_slices_work_as_in_python() -> None:
    source = "{{ x[1:] }} {{ x[:-1] }} {{ x[::2] }} {{ x[::-1] }} {{ x[1:3] }} {{ (x | list)[-2:] }}"
    assert ChatTemplate(source, "here").render({"x": "abcd"}) == "bcd abc ac dcba bc ['c', 'd']"


def test_a_long_conversation_is_within_the_limits() -> None:
    messages = [{**USER, "content": "word " * 200}, ANSWER] * 1000
    expected = "".join(f"[USER]{m['content']}\n" if m["role"] == "user" else m["content"] for m in messages)
    template = "{% for m in messages %}{{ '[USER]' ~ m.content ~ '\n' if m.role == 'user' else m.content }}{% endfor %}"
    assert render(template, messages=messages) == expected
    gathering = (
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t ~ m.content %}{% endfor %}{{ ns.t }}"
    )
    assert render(gathering, messages=messages) == "".join(str(m["content"]) for m in messages)


LENGTHS = [{**message, "content": f"{message['content']} word" * 150} for message in (USER, ANSWER)] * 300
MANY_TOOLS = [
    {**WEATHER, "function": {**WEATHER["function"], "name": f"tool_{i}", "enum": ["x" * 50] * 20}} for i in range(200)
]


@pytest.mark.parametrize("template", [CHATML, TOOLS, REASONING, PARTS])
def test_a_megabyte_of_text_and_many_tools_equal_transformers(ours: Tokenizer, theirs: Any, template: str) -> None:
    options: dict[str, Any] = {"chat_template": template, "tokenize": False, "tools": MANY_TOOLS}
    expected = theirs.apply_chat_template(LENGTHS, **options)
    assert len(expected) > 10**6
    assert ours.apply_chat_template(LENGTHS, **options) == expected


def test_an_exception_with_a_nested_list_ends_within_the_limits() -> None:
    source = "{% set n = namespace(a=[0]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% endfor %}"
    with pytest.raises(TokenizerError, match="the template exceeds"):
        render(source + "{{ raise_exception(n.a) }}")


def test_a_key_that_json_lacks_is_refused() -> None:
    with pytest.raises(TokenizerError, match="messages: not a JSON key; got a key of type tuple; expected a string"):
        render("{{ messages }}", messages={(1, 2): 3})
