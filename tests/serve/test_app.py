"""The server, with the official client over a socket."""

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import TestCase

import openai
import pytest
import torch

from ligerzoo.errors import LigerzooError
from ligerzoo.generate import BrokenLogitsError, Scheduler
from ligerzoo.models import Llama
from ligerzoo.serve.metrics import REASONS
from ligerzoo.text.tokenizer import Tokenizer
from tests.serve.serving import Served, connection, post, serving

QUESTION = [{"role": "user", "content": "def read(path):"}]
GREEDY = {"model": "demo", "temperature": 0, "max_tokens": 16}


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


def expected(served: Served, prompt: str, **options: Any) -> tuple[str, list[int], list[int]]:
    """Returns the greedy continuation from `model.generate`: its text, the ids of the prompt, its ids."""
    ids = served.tokenizer.encode(prompt)
    new = served.model.generate(torch.tensor([ids]), **{"max_new_tokens": 16, **options})[0, len(ids) :].tolist()
    return served.tokenizer.decode(new, skip_special_tokens=True), ids, new


# Responses


def test_chat(client: Any, served: Served) -> None:
    prompt = served.tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)
    new = served.model.generate(torch.tensor([prompt]), max_new_tokens=16)[0, len(prompt) :].tolist()
    text = served.tokenizer.decode(new, skip_special_tokens=True)
    response = client.chat.completions.create(messages=QUESTION, **GREEDY)
    (choice,) = response.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", text, "length")
    assert choice.logprobs is None
    assert response.object == "chat.completion"
    assert response.model == "demo"
    assert abs(response.created - time.time()) < 60
    assert response.usage.to_dict() == {
        "prompt_tokens": len(prompt), "completion_tokens": 16, "total_tokens": len(prompt) + 16,
    }  # fmt: skip


def test_chat_stream(client: Any) -> None:
    whole = client.chat.completions.create(messages=QUESTION, logprobs=True, **GREEDY)
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        messages=QUESTION, logprobs=True, stream=True, stream_options=options, **GREEDY
    )
    first, *middle, last = list(stream)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert len(middle) > 5
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in middle] == [None] * (len(middle) - 1) + ["length"]
    logprobs = [token for chunk in middle for token in chunk.choices[0].logprobs.content]
    assert logprobs == whole.choices[0].logprobs.content
    assert all(chunk.usage is None for chunk in (first, *middle))
    assert (last.choices, last.usage) == ([], whole.usage)
    assert len({chunk.id for chunk in (first, *middle, last)}) == 1


def test_async_clients_share_the_model(served: Served) -> None:
    prompts = ["import ", "class A", "for i in", "while", "def f", "try:"]

    async def one(client: Any, prompt: str, streams: bool) -> str:
        if not streams:
            return (await client.completions.create(prompt=prompt, **GREEDY)).choices[0].text
        stream = await client.completions.create(prompt=prompt, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def everyone() -> list[str]:
        async with openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, prompt, i % 2 == 0) for i, prompt in enumerate(prompts)))

    assert asyncio.run(everyone()) == [expected(served, prompt)[0] for prompt in prompts]


def test_completions_of_texts_and_of_ids(client: Any, served: Served) -> None:
    texts = ["import ", "class A"]
    outputs = [expected(served, text) for text in texts]
    ids = [prompt for _, prompt, _ in outputs]
    for prompt in (texts, ids, texts[0], ids[0]):
        response = client.completions.create(prompt=prompt, **GREEDY)
        count = 2 if prompt in (texts, ids) else 1
        assert [choice.text for choice in response.choices] == [text for text, _, _ in outputs][:count]
        assert [choice.index for choice in response.choices] == list(range(count))
        assert response.usage.prompt_tokens == sum(map(len, ids[:count]))
        assert response.usage.completion_tokens == 16 * count
    assert response.object == "text_completion"


def test_default_lengths(client: Any, served: Served) -> None:
    """Completions have 16 tokens, as in the API; chats continue to the end of the context."""
    assert client.completions.create(model="demo", prompt="x", seed=0).usage.completion_tokens == 16
    ids = served.tokenizer.encode("import os\n" * 300)[:500]
    usage = client.completions.create(model="demo", prompt=ids, max_tokens=12, temperature=0).usage
    assert usage.total_tokens == 512
    question = [{"role": "user", "content": "import os\n" * 160}]
    usage = client.chat.completions.create(model="demo", messages=question, temperature=0).usage
    assert usage.prompt_tokens > 400
    assert usage.total_tokens == 512


def test_logprobs(client: Any, served: Served) -> None:
    text, prompt, new = expected(served, "import ")
    logits = served.model(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1].float()
    logps = logits.log_softmax(-1)[range(16), new].tolist()
    logprobs = client.completions.create(prompt="import ", logprobs=0, **GREEDY).choices[0].logprobs
    assert logprobs.token_logprobs == pytest.approx(logps, abs=1e-4)
    assert "".join(logprobs.tokens) == text
    assert all(text[i:].startswith(token) for i, token in zip(logprobs.text_offset, logprobs.tokens, strict=True))
    chat = client.chat.completions.create(messages=QUESTION, logprobs=True, **GREEDY).choices[0]
    assert bytes(byte for token in chat.logprobs.content for byte in token.bytes).decode() == chat.message.content
    assert all(token.logprob <= 0 for token in chat.logprobs.content)


@pytest.mark.parametrize("streams", [False, True])
def test_stop_strings(streams: bool, client: Any, served: Served) -> None:
    text, _, _ = expected(served, "import ", max_new_tokens=40)
    stop = text[20:23]
    response = client.completions.create(
        model="demo", prompt="import ", temperature=0, max_tokens=40, stop=[stop, "\0"], stream=streams
    )
    chunks = list(response) if streams else [response]
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"
    served.wait_until_idle()


def test_the_end_of_sequence_ends_the_answer(client: Any, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, new = expected(served, "import ")
    monkeypatch.setitem(served.model.generation_config, "eos_token_id", [1, new[5]])
    choice = client.completions.create(prompt="import ", **GREEDY).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.text == served.tokenizer.decode(new[: new.index(new[5])])


def test_seeds_repeat_and_choices_differ(client: Any) -> None:
    def texts(**options: Any) -> list[str]:
        response = client.completions.create(model="demo", prompt="import ", max_tokens=20, **options)
        return [choice.text for choice in sorted(response.choices, key=lambda choice: choice.index)]

    first = texts(n=3, seed=5)
    assert texts(n=3, seed=5) == first
    assert texts(seed=5) == first[:1]
    assert len(set(first)) == 3
    assert texts(n=3, seed=6) != first
    assert len(set(texts(n=2))) == 2  # the API's default samples
    assert len(set(texts(n=2, temperature=0))) == 1
    assert len(set(texts(n=2, seed=5, extra_body={"top_k": 1}))) == 1
    assert len(set(texts(n=2, seed=5, top_p=1e-6))) == 1


def test_generation_config_has_the_defaults_of_requests(
    client: Any, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    banned = expected(served, "import ")[2][:2]
    file = {"temperature": 0.5, "top_k": 3, "suppress_tokens": banned, "repetition_penalty": 1.3}
    for name, value in file.items():
        monkeypatch.setitem(served.model.generation_config, name, value)
    options = {"model": "demo", "prompt": "import ", "max_tokens": 12}
    greedy = client.completions.create(**options, temperature=0).choices[0].text
    assert greedy == expected(served, "import ", max_new_tokens=12, do_sample=False)[0]
    for given in ({}, {"temperature": 2.0}, {"top_k": 9, "repetition_penalty": 1.0}):
        text = client.completions.create(**options, seed=4, extra_body=given).choices[0].text
        generator = torch.Generator().manual_seed(4)
        of_call = {"max_new_tokens": 12, "do_sample": True, "generator": generator, **given}
        assert text == expected(served, "import ", **of_call)[0]


def test_seeded_tokens_do_not_depend_on_other_requests(served: Served) -> None:
    async def texts(client: Any, seed: int, n: int) -> list[str]:
        response = await client.completions.create(model="demo", prompt="import ", max_tokens=20, seed=seed, n=n)
        return [choice.text for choice in response.choices]

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
            alone = [await texts(client, seed, 2) for seed in range(4)]
            others = (texts(client, seed, 3) for seed in range(10, 13))
            together = await asyncio.gather(*(texts(client, seed, 2) for seed in range(4)), *others)
        assert together[:4] == alone

    asyncio.run(run())


@pytest.mark.parametrize(
    "options", [{"min_new_tokens": 14}, {"no_repeat_ngram_size": 1}, {"bad_words_ids": "the first tokens"}], ids=str
)
def test_options_beyond_the_api(
    options: dict[str, Any], client: Any, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, _, new = expected(served, "import ")
    monkeypatch.setitem(served.model.generation_config, "eos_token_id", [1, new[5]])
    if "bad_words_ids" in options:
        options = {"bad_words_ids": [[new[0]], new[1:3]]}
    other, _, _ = expected(served, "import ", **options)
    assert other != text
    choice = client.completions.create(prompt="import ", **GREEDY, extra_body=options).choices[0]
    assert choice.text == other


def test_messages(client: Any) -> None:
    def prompt_tokens(*messages: dict[str, Any], **options: Any) -> int:
        response = client.chat.completions.create(messages=list(messages), **GREEDY, **options)
        return response.usage.prompt_tokens

    system = {"role": "system", "content": "Be\nkind."}
    parts = [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}]
    count = prompt_tokens(system, *QUESTION)
    assert prompt_tokens({"role": "developer", "content": parts}, *QUESTION) == count
    variables = {"chat_template_kwargs": {"prefix": "return return"}}
    assert prompt_tokens(system, *QUESTION, extra_body=variables) == count + 2


def test_models(client: Any) -> None:
    (model,) = client.models.list()
    assert model.id == "demo"
    assert client.models.retrieve("demo") == model


# Refusals


@pytest.mark.parametrize(
    "options, message",
    [
        ({"top_p": 0}, "top_p: invalid value; got 0; expected a number greater than 0"),
        ({"temperature": -1}, "temperature: invalid value; got -1; expected 0, or a number from 1e-30 to 1000"),
        ({"temperature": "hot"}, "temperature: invalid value"),
        ({"max_tokens": 0}, "max_tokens: invalid value"),
        ({"n": 0}, "n: invalid value"),
        ({"n": 65}, "too many continuations; got 65; expected at most 64"),
        ({"seed": 2**63}, "seed: invalid value"),
        ({"stop": [""]}, "stop: invalid value"),
        ({"stop": ["x"] * 17}, "stop: invalid value"),
        ({"stop": [7]}, "stop: invalid value"),
        ({"stream": "yes"}, "stream: invalid value"),
        ({"stream_options": {"include_usage": True}}, "stream_options: invalid value"),
        ({"stream": True, "stream_options": {"usage": True}}, "usage: unknown field"),
        ({"presence_penalty": 0.5}, "presence_penalty: not supported; got 0.5; expected 0. Use repetition_penalty"),
        ({"frequency_penalty": 1}, "frequency_penalty: not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias: not supported"),
        ({"extra_body": {"top_k": 0}}, "top_k: invalid value"),
        ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty: invalid value"),
        ({"extra_body": {"min_new_tokens": -1}}, "min_new_tokens: invalid value"),
        (
            {"extra_body": {"no_repeat_ngram_size": 65}},
            "no_repeat_ngram_size: invalid value; got 65; expected an",
        ),
        ({"extra_body": {"bad_words_ids": [[]]}}, "bad_words_ids: invalid value; got [[]]; expected up to 256 lists"),
        ({"extra_body": {"bad_words_ids": [5]}}, "bad_words_ids: invalid value"),
        (
            {"extra_body": {"bad_words_ids": [[3072]]}},
            "bad_words_ids: invalid value; got 3072; expected token ids",
        ),
        (
            {"extra_body": {"logprob_token_ids": [5]}},
            "logprob_token_ids: invalid value; got [5]; expected no such field",
        ),
        ({"extra_body": {"temprature": 1}}, "temprature: unknown field. Did you mean 'temperature'?"),
    ],
)
@pytest.mark.parametrize("endpoint", ["chat", "completion"])
def test_invalid_fields_are_named(client: Any, endpoint: str, options: dict[str, Any], message: str) -> None:
    create = client.chat.completions.create if endpoint == "chat" else client.completions.create
    prompt: Any = {"messages": QUESTION} if endpoint == "chat" else {"prompt": "x"}
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="demo", **prompt, **options)
    assert message in caught.value.body["message"]
    assert caught.value.body["type"] == "invalid_request_error"
    if ":" in message:
        assert caught.value.param == message.split(":")[0]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"messages": []}, "messages: invalid value"),
        ({"messages": ["hello"]}, "messages[0]: invalid value"),
        ({"messages": [{"content": "x"}]}, "messages[0]: unknown role; got no role"),
        ({"messages": [{"role": "usr", "content": "x"}]}, "messages[0]: unknown role; got 'usr'"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": None}]}, "messages[1].content: invalid value"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: invalid value"),
        (
            {"messages": [{"role": "user", "contents": "x"}]},
            "messages[0]: unknown field 'contents'. Did you mean 'content'?",
        ),
        ({"max_tokens": 4, "max_completion_tokens": 4}, "max_tokens: given together with max_completion_tokens"),
        ({"extra_body": {"chat_template_kwargs": []}}, "chat_template_kwargs: invalid value; got []"),
        ({"extra_body": {"chat_template_kwargs": {"self": 1}}}, 'not a variable of the template; got "self"'),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "messages[0].content[0]: invalid value",
        ),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs: invalid value; got 21; expected an integer from 0"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs: invalid value"),
        ({"top_logprobs": 2.0, "logprobs": True}, "top_logprobs: invalid value"),
        ({"top_logprobs": 2}, "top_logprobs: invalid value; got 2; expected 0 or null without logprobs"),
        ({"extra_body": {"logprobs": 1}}, "logprobs: invalid value; got 1; expected true or false"),
        ({"logprobs": True, "extra_body": {"logprob_token_ids": [-1]}}, "logprob_token_ids: invalid value; got [-1]"),
        ({"extra_body": {"echo": True}}, "echo: unknown field"),
        ({"extra_body": {"chat_template_kwargs": {"tokenize": False}}}, "not a variable of the template"),
    ],
)
def test_invalid_chats_are_named(client: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match="Error code: 400") as caught:
        client.chat.completions.create(**{"model": "demo", "messages": QUESTION, **options})
    assert message in caught.value.body["message"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"prompt": ""}, None),
        ({"prompt": []}, "prompt: invalid value"),
        ({"prompt": [[]]}, "prompt: invalid value"),
        ({"prompt": ["x", 5]}, "prompt: invalid value"),
        ({"prompt": [5, 4000]}, "got id 4000; expected an id below 3072"),
        ({"prompt": [5, -1]}, "prompt: invalid value"),
        ({"prompt": "\ud800"}, "half of a surrogate pair"),
        ({"logprobs": 21}, "logprobs: invalid value; got 21; expected null, or an integer from 0 to 20"),
        ({"logprobs": -1}, "logprobs: invalid value"),
        ({"logprobs": True}, "logprobs: invalid value"),
        ({"echo": 1}, "echo: invalid value; got 1; expected true or false"),
        (
            {"logprobs": 0, "logprob_token_ids": [7, 3072]},
            "logprob_token_ids: invalid value; got 3072; expected token",
        ),
        ({"logprobs": 0, "logprob_token_ids": [5] * 129}, "logprob_token_ids: invalid value"),
        ({"logprobs": 0, "logprob_token_ids": "yes"}, "logprob_token_ids: invalid value"),
        ({"max_tokens": 0}, "max_tokens: invalid value; got 0; expected an integer from 1"),
        ({"max_tokens": False, "echo": True}, "max_tokens: invalid value"),
        ({"max_tokens": -1, "echo": True}, "max_tokens: invalid value"),
        ({"best_of": 2}, "best_of: not supported"),
        ({"suffix": "x"}, "suffix: not supported"),
    ],
)
def test_invalid_completions_are_named(served: Served, options: dict[str, Any], message: str | None) -> None:
    fields = {"model": "demo", "prompt": "x", "max_tokens": 1, **options}
    status, content = post(served, json.dumps(fields))
    if message is None:  # an empty text has the beginning-of-sequence token
        assert status == 200
    else:
        assert status == 400
        assert message in content["error"]["message"]


def test_values_without_an_effect_are_accepted(client: Any) -> None:
    client.chat.completions.create(
        messages=QUESTION, n=1, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, tools=[], tool_choice="none",
        response_format={"type": "text"}, top_logprobs=0, user="me", stop=None, store=False, **GREEDY
    )  # fmt: skip
    client.completions.create(prompt="x", echo=False, best_of=1, suffix=None, stop=[], **GREEDY)


def test_a_context_that_is_too_long(client: Any) -> None:
    for prompt, options in ((list(range(5, 517)), {}), ([5] * 500, {"max_tokens": 13})):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="demo", prompt=prompt, **options)
        assert caught.value.code == "context_length_exceeded"
        assert "expected at most 512 in total" in caught.value.body["message"]


def test_the_model_is_the_default(client: Any, served: Served) -> None:
    named = client.completions.create(prompt="x", **GREEDY)
    for fields in ({"temperature": 0, "max_tokens": 16}, {**GREEDY, "model": None}):
        status, content = post(served, json.dumps({**fields, "prompt": "x"}))
        assert (status, content["model"], content["choices"][0]["text"]) == (200, "demo", named.choices[0].text)


def test_an_unknown_model(client: Any) -> None:
    for call in (
        lambda: client.completions.create(model="other", prompt="x"),
        lambda: client.models.retrieve("other"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert caught.value.code == "model_not_found"
        assert 'got "other"; expected "demo"' in caught.value.body["message"]


@pytest.mark.parametrize(
    "body, message",
    [
        (b"", "body: not valid JSON"),
        (b"{", "body: not valid JSON"),
        (b"\xff", "body: not valid JSON"),
        (b"[]", "body: invalid value"),
        (b"[" * 200_000, "body: not valid JSON"),
        (b'{"model": "demo", "prompt": "x", "temperature": NaN}', "NaN is not a JSON number"),
        (b'{"model": "demo", "prompt": "x", "temperature": 1e999}', "temperature: invalid value"),
        (b'{"model": "demo", "prompt": "x", "seed": ' + b"9" * 5000 + b"}", "body: not valid JSON"),
        (b'{"model": 7, "prompt": "x"}', "model: invalid value"),
        (b'{"model": "demo"}', "prompt: invalid value"),
    ],
)
def test_malformed_bodies(served: Served, body: bytes, message: str) -> None:
    status, content = post(served, body)
    assert status == 400
    assert message in content["error"]["message"]
    assert set(content["error"]) == {"message", "type", "param", "code"}


def metrics(served: Served) -> dict[str, float]:
    link = connection(served)
    link.request("GET", "/metrics")
    response = link.getresponse()
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = response.read().decode().splitlines()
    link.close()
    names = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert all(re.fullmatch(r'(\w+?)(_sum|_count)?({reason="\w+"})?', name)[1] in names for name in values)  # type: ignore[index]
    return {name.removeprefix("ligerzoo_"): float(value) for name, value in values.items()}


def test_metrics(served: Served) -> None:
    model, tokenizer = served.model, served.tokenizer
    with serving(model, tokenizer) as own, openai.OpenAI(base_url=own.url, api_key="none", max_retries=0) as client:
        assert set(metrics(own).values()) == {0.0}
        text = client.completions.create(prompt="import ", **GREEDY).choices[0].text
        client.completions.create(prompt="import ", stop=text[4:6], n=2, **GREEDY)
        own.pause.set()
        stream = client.completions.create(prompt="import ", stream=True, **GREEDY)
        assert metrics(own)["requests_waiting"] == 1
        own.pause.clear()
        next(iter(stream))
        stream.close()
        deadline = time.monotonic() + 20
        while (found := metrics(own))["requests_running"]:
            assert time.monotonic() < deadline
        ended = {reason: found[f'requests_finished_total{{reason="{reason}"}}'] for reason in REASONS}
        assert ended | {"length": 1, "abort": 1} == {"stop": 2, "length": 1, "abort": 1, "error": 0}
        assert ended["length"] + ended["abort"] == 2  # the stream may have ended before it was closed
        assert found["prompt_tokens_total"] == 4 * len(tokenizer.encode("import "))
        assert found["new_tokens_total"] > 16
        assert found["first_token_seconds_count"] == found["request_seconds_count"] == 4
        assert 0 < found["first_token_seconds_sum"] < found["request_seconds_sum"]


def test_unknown_paths_methods_and_types(served: Served) -> None:
    for status, path, method in ((404, "/v1/embeddings", "POST"), (405, "/v1/completions", "GET")):
        got, content = post(served, "{}", path=path, method=method)
        assert (got, content["error"]["code"]) == (status, None)
        message = f"no such endpoint; got {method} '{path}'; expected POST /v1/chat/completions, "
        assert content["error"]["message"].startswith(message)
    status, content = post(served, "{}", content_type="text/plain")
    assert status == 415
    assert "expected 'application/json'" in content["error"]["message"]


@pytest.mark.parametrize("size", [2**20 + 1, 2**21 - 100, 2**23])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_bodies_over_the_limit(served: Served, size: int, is_chunked: bool) -> None:
    body = b" " * size
    link = connection(served)
    try:
        link.request(
            "POST",
            "/v1/completions",
            (body[i : i + 65536] for i in range(0, size, 65536)) if is_chunked else body,
            {"content-type": "application/json"},
            encode_chunked=is_chunked,
        )
        response = link.getresponse()
    except ConnectionError:
        assert size > 2**21  # more is not read
    else:
        assert response.status == 413
        assert "expected at most 1,048,576 bytes" in json.loads(response.read())["error"]["message"]
    link.close()


# Several requests, failures and the end


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_disconnects_cancels_its_request(served: Served, streams: bool) -> None:
    served.wait_until_idle()
    served.pause.set()
    link = connection(served)
    fields = {"model": "demo", "prompt": "import ", "max_tokens": 400, "temperature": 0, "n": 3, "stream": streams}
    link.request("POST", "/v1/completions", json.dumps(fields), {"content-type": "application/json"})
    deadline = time.monotonic() + 20
    while served.scheduler.is_idle:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    served.pause.clear()
    if streams:
        assert link.getresponse().read(20).startswith(b"data: ")
    steps = served.steps
    link.sock.shutdown(2)
    link.close()
    served.wait_until_idle()
    assert served.steps < steps + 300  # of 400


def test_a_full_queue_is_refused(demo: tuple[Llama, Tokenizer]) -> None:
    with serving(*demo, max_requests=2) as served, openai.OpenAI(base_url=served.url, api_key="none") as client:
        served.pause.set()
        first = client.completions.create(model="demo", prompt="x", max_tokens=2, n=2, stream=True)
        with pytest.raises(openai.InternalServerError) as caught:
            client.with_options(max_retries=0).completions.create(model="demo", prompt="x")
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "1"
        served.pause.clear()
        assert len([chunk for chunk in first if chunk.choices[0].finish_reason]) == 2
        client.completions.create(model="demo", prompt="x", max_tokens=1)  # there is room again


@pytest.mark.parametrize(
    "error, message",
    [
        (RuntimeError("/path/to/model"), "RuntimeError. The log of the server says more."),
        (LigerzooError("no token can be chosen", where="logits"), "logits: no token can be chosen"),
    ],
)
def test_a_failed_step_ends_its_requests_and_not_the_server(
    error: Exception, message: str, demo: tuple[Llama, Tokenizer]
) -> None:
    schedulers: list[Any] = []

    class Failing(Scheduler):
        def step(self) -> Any:
            if self is schedulers[0] and self.steps == 2:
                raise error
            self.steps += 1
            return super().step()

    def make() -> Any:
        schedulers.append(Failing(demo[0], batch_size=4))
        schedulers[-1].steps = 0
        return schedulers[-1]

    with (
        TestCase().assertLogs("ligerzoo.serve") as logs,
        serving(*demo, make_scheduler=make) as served,
        openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client,
    ):
        stream = client.completions.create(model="demo", prompt="x", stream=True)
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert caught.value.message == message
        assert client.completions.create(model="demo", prompt="x").usage.completion_tokens == 16
        schedulers[0] = schedulers[-1]
        schedulers[-1].steps = 2
        with pytest.raises(openai.InternalServerError, match=message):
            client.completions.create(model="demo", prompt="x")
    assert len(schedulers) == 2
    assert "generation failed" in {record.getMessage() for record in logs.records}


def test_broken_logits_end_their_request_only(demo: tuple[Llama, Tokenizer]) -> None:
    class Failing(Scheduler):
        broken: int | None = None

        def add(self, prompt: Any, **options: Any) -> int:
            index = super().add(prompt, **options)
            if prompt.max_new_tokens == 7:
                self.broken = index
            return index

        def step(self) -> Any:
            if self.broken is None:
                return super().step()
            broken, self.broken = self.broken, None
            self.cancel(broken)
            raise BrokenLogitsError([broken])

    scheduler = Failing(demo[0], batch_size=4)
    with (
        serving(*demo, make_scheduler=lambda: scheduler) as served,
        openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client,
    ):
        expected = client.completions.create(prompt="x", **GREEDY).choices[0].text
        stream = client.completions.create(prompt="x", stream=True, **GREEDY)
        first = next(stream).choices[0].text
        with pytest.raises(openai.InternalServerError, match="no token can be chosen"):
            client.completions.create(model="demo", prompt="y", max_tokens=7, n=2)
        assert first + "".join(chunk.choices[0].text for chunk in stream) == expected
        served.scheduler = scheduler
        served.wait_until_idle()


def test_a_refusal_of_the_scheduler_is_a_bad_request(demo: tuple[Llama, Tokenizer]) -> None:
    class Refusing(Scheduler):
        def add(self, prompt: Any, **options: Any) -> int:
            if prompt.max_new_tokens == 7 and not self.is_idle:
                raise LigerzooError("too long", where="max_new_tokens")
            index: int = super().add(prompt, **options)
            return index

    scheduler = Refusing(demo[0], batch_size=4)
    with (
        serving(*demo, make_scheduler=lambda: scheduler) as served,
        openai.OpenAI(base_url=served.url, api_key="none") as client,
    ):
        for streams in (False, True):
            with pytest.raises(openai.BadRequestError, match="too long"):
                client.completions.create(model="demo", prompt="x", max_tokens=7, n=2, stream=streams)
        assert scheduler.is_idle  # the first of the two requests too
        assert client.completions.create(model="demo", prompt="x").usage.completion_tokens == 16


def test_shutdown_ends_running_requests_with_an_error(
    demo: tuple[Llama, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ligerzoo.serve.server.GRACE", 0.5)
    with openai.OpenAI(base_url="http://nowhere", api_key="none", max_retries=0) as client:
        with serving(*demo) as served:
            served.pause.set()
            client = client.with_options(base_url=served.url)
            stream = client.completions.create(model="demo", prompt="x", stream=True)
            stop = threading.Timer(1.5, served.pause.clear)
            stop.start()
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)
        with pytest.raises(openai.APIConnectionError):
            client.models.list()
