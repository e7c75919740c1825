"""`/tokenize` and `/detokenize`, in vLLM's shapes."""

import json
from typing import Any

import pytest

from tests.serve.serving import Served, post

MESSAGES = [{"role": "user", "content": "def read(path): <s>"}]
TEXTS = ["", "x", "def größe(löwe):\n    return '🦁'", "a<s>b</s>", "import os\n" * 5000]


def ask(served: Served, path: str, **fields: Any) -> Any:
    status, content = post(served, json.dumps(fields), path)
    assert status == 200, content
    return content


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_texts(served: Served, text: str) -> None:
    """They may exceed the context, so that clients can shorten them."""
    tokenizer = served.tokenizer
    for adds in (None, True, False):
        fields = {} if adds is None else {"add_special_tokens": adds}
        ids = tokenizer.encode(text, add_special_tokens=adds is not False)
        expected = {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": None}
        assert ask(served, "/tokenize", prompt=text, model="demo", **fields) == expected
        found = ask(served, "/tokenize", prompt=text, return_token_strs=True, **fields)
        assert found == {**expected, "token_strs": tokenizer.convert_ids_to_tokens(ids)}
        assert ask(served, "/detokenize", tokens=ids) == {"prompt": tokenizer.decode(ids)}


def test_conversations(served: Served) -> None:
    """The tokens are those that the chat endpoint counts."""
    for options in (
        {}, {"add_generation_prompt": False}, {"special_tokens": "control"}, {"continue_final_message": True},
        {"chat_template_kwargs": {"prefix": "return return"}},
    ):  # fmt: skip
        variables = dict(options.get("chat_template_kwargs", {}))  # type: ignore[call-overload]
        given = {name: value for name, value in options.items() if name != "chat_template_kwargs"}
        ids = served.tokenizer.apply_chat_template(
            MESSAGES,
            **{"add_generation_prompt": "continue_final_message" not in given, "special_tokens": "text", **given},
            **variables,
        )
        found = ask(served, "/tokenize", messages=MESSAGES, **options)
        assert (found["tokens"], found["count"], found["token_strs"]) == (ids, len(ids), None)
        chat = {"model": "demo", "messages": MESSAGES, "max_tokens": 1, **options}
        assert ask(served, "/v1/chat/completions", **chat)["usage"]["prompt_tokens"] == len(ids)
        with_bos = ask(served, "/tokenize", messages=MESSAGES, add_special_tokens=True, **options)["tokens"]
        assert with_bos == [served.tokenizer.bos_token_id, *ids]


@pytest.mark.parametrize(
    "path, fields, message",
    [
        ("/tokenize", {}, "prompt: invalid request; got none; expected either prompt or messages"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt: invalid request; got both"),
        ("/tokenize", {"prompt": ["x"]}, 'prompt: invalid value; got ["x"]; expected a text'),
        ("/tokenize", {"prompt": None}, "prompt: invalid value; got null; expected a text"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens: invalid value; got 1"),
        ("/tokenize", {"prompt": "x", "return_token_strs": "no"}, "return_token_strs: invalid value"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt: unknown field"),
        ("/tokenize", {"prompt": "x", "special": 1}, "special: unknown field"),
        ("/tokenize", {"messages": []}, "messages: invalid value; got []; expected a list of messages"),
        (
            "/tokenize",
            {"messages": MESSAGES, "tools": [5]},
            "tools: invalid value; got [5]; expected a list of",
        ),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "{{x}}"}, "chat_template: not supported"),
        ("/tokenize", {"prompt": "x", "model": 7}, 'model: invalid value; got 7; expected "demo"'),
        ("/detokenize", {}, "tokens: invalid value; got null; expected a list of token ids"),
        ("/detokenize", {"tokens": [1.5]}, "tokens: invalid value"),
        ("/detokenize", {"tokens": [True]}, "tokens: invalid value"),
        ("/detokenize", {"tokens": [3071, 3072]}, "tokens: invalid value; got 3072; expected token ids below 3072"),
        ("/detokenize", {"tokens": "x"}, "tokens: invalid value"),
        ("/detokenize", {"tokens": [5], "prompt": "x"}, "prompt: unknown field"),
    ],
)
def test_invalid_fields_are_named(served: Served, path: str, fields: dict[str, Any], message: str) -> None:
    status, content = post(served, json.dumps(fields), path)
    assert status == 400
    assert message in content["error"]["message"]


def test_another_model_and_method(served: Served) -> None:
    assert post(served, '{"prompt": "x", "model": "other"}', "/tokenize")[0] == 404
    assert post(served, None, "/tokenize", "GET")[0] == 405
    assert post(served, '{"tokens": []}', "/detokenize") == (200, {"prompt": ""})
