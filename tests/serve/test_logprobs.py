"""Log-probabilities of the server, and prompts that it echoes, with the official client."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from tests.serve.serving import Served

PROMPT = "def größe(löwe):\n    return '🦁'  # \u200d👩\u200d🚀 import "
QUESTION = [{"role": "user", "content": "def read(path):"}]


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


def all_logps(served: Served, ids: list[int]) -> torch.Tensor:
    """Returns the (T, V) log-probabilities after each token."""
    with torch.no_grad():
        return served.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def greedy(served: Served, prompt: list[int], count: int) -> list[int]:
    return served.model.generate(torch.tensor([prompt]), max_new_tokens=count)[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def complete(client: Any, *, streams: bool, **options: Any) -> list[dict[str, Any]]:
    """Returns the choices: text, finish reason, and the lists of the log-probabilities."""
    response = client.completions.create(model="demo", temperature=0, stream=streams, **options)
    choices: dict[int, dict[str, Any]] = {}
    for chunk in response if streams else [response]:
        for choice in chunk.choices:
            found = choices.setdefault(choice.index, {"text": "", "finish_reason": None, "logprobs": {}})
            assert found["finish_reason"] is None
            found["text"] += choice.text
            found["finish_reason"] = choice.finish_reason
            for name, values in (choice.logprobs.to_dict() if choice.logprobs else {}).items():
                found["logprobs"][name] = found["logprobs"].get(name, []) + (values or [])
    return [choices[index] for index in sorted(choices)]


CASES = [(top, limit, n) for top in (None, 0, 1, 20) for limit, n in ((0, 1), (1, 2), (9, 1))]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_completions(client: Any, served: Served, streams: bool, echo: bool) -> None:
    """The log-probabilities are those of one forward, and the texts of the tokens are the text."""
    encode, decode = served.tokenizer.encode, served.tokenizer.decode
    ids = encode(PROMPT)
    text, short, of_ids, of_one = (PROMPT, ids), ("x", encode("x")), (decode(ids), ids), (decode([7]), [7])
    prompts: list[tuple[Any, list[tuple[str, list[int]]]]] = [
        (PROMPT, [text]), (ids, [of_ids]), ([PROMPT, "x"], [text, short]), ([ids, [7]], [of_ids, of_one])
    ]  # fmt: skip
    for number, (top, limit, n) in enumerate(CASES):
        if limit == 0 and not echo:
            continue
        prompt, sources = prompts[number % 4]
        options = {"prompt": prompt, "max_tokens": limit, "echo": echo, "logprobs": top, "n": n}
        choices = complete(client, streams=streams, **options)
        assert len(choices) == n * len(sources)
        for i, choice in enumerate(choices):
            check_completion(served, choice, *sources[i // n], top, limit, echo=echo)


def check_completion(
    served: Served, choice: dict[str, Any], text: str, source: list[int], top: int | None, limit: int, *, echo: bool
) -> None:
    new = greedy(served, source, limit) if limit else []
    shown = (source if echo else []) + new
    assert choice["text"] == (text if echo else "") + served.tokenizer.decode(new, skip_special_tokens=True)
    assert choice["finish_reason"] == ("stop" if served.tokenizer.eos_token_id in new else "length")
    if top is None:
        assert choice["logprobs"] == {}
        return
    found, rows = choice["logprobs"], all_logps(served, source + new)
    assert "".join(found["tokens"]) == choice["text"]
    assert all(choice["text"][i:].startswith(t) for i, t in zip(found["text_offset"], found["tokens"], strict=True))
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(shown)
    first = len(source) + len(new) - len(shown)  # index of the first token that is shown
    start = 1 if echo else 0
    assert found["token_logprobs"][:start] == [None] * start
    expected = [rows[first + i - 1, shown[i]].item() for i in range(start, len(shown))]
    assert found["token_logprobs"][start:] == pytest.approx(expected, abs=2e-4)
    if top == 0:
        assert not found["top_logprobs"]
        return
    assert found["top_logprobs"][:start] == [None] * start
    for i in range(start, len(shown)):
        likely, row = found["top_logprobs"][i], rows[first + i - 1]
        assert top <= len(likely) <= top + 1
        assert list(likely.values())[:top] == pytest.approx(row.topk(top).values.tolist(), abs=2e-4)
        assert found["token_logprobs"][i] in likely.values()
        if shown[i] == row.argmax():
            assert found["token_logprobs"][i] == max(likely.values())


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("top", [0, 1, 20])
def test_chats(client: Any, served: Served, streams: bool, top: int) -> None:
    prompt = served.tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)
    new = greedy(served, prompt, 9)
    rows = all_logps(served, prompt + new)[len(prompt) - 1 :]
    response = client.chat.completions.create(
        model="demo", temperature=0, messages=QUESTION, max_tokens=9, logprobs=True, top_logprobs=top, stream=streams
    )
    chunks = [chunk.choices[0] for chunk in (response if streams else [response])]
    content = [token for choice in chunks for token in choice.logprobs.content]
    assert "".join(token.token for token in content) == served.tokenizer.decode(new, skip_special_tokens=True)
    for token, row, new_id in zip(content, rows, new, strict=False):
        assert bytes(token.bytes).decode() == token.token
        assert token.logprob == pytest.approx(row[new_id].item(), abs=2e-4)
        assert [one.logprob for one in token.top_logprobs] == pytest.approx(row.topk(top).values.tolist(), abs=2e-4)
        assert len({one.token for one in token.top_logprobs}) == top
        for one, token_id in zip(token.top_logprobs, row.topk(top).indices.tolist(), strict=True):
            assert one.token.encode() == bytes(one.bytes) or "\\x" in one.token
            (alone,) = [served.tokenizer.token_bytes()(token_id)]
            assert bytes(one.bytes) == alone


@pytest.mark.parametrize("streams", [False, True])
def test_selected_tokens(client: Any, served: Served, streams: bool) -> None:
    """They replace the most likely ones: in their order, at each position, normalized over the vocabulary."""
    ids, selected = served.tokenizer.encode(PROMPT), [40, 7, 3000, 40, *range(900, 930)]
    unique = list(dict.fromkeys(selected))
    extra = {"logprob_token_ids": selected}
    new = greedy(served, ids, 3)
    rows = all_logps(served, ids + new)[:-1][:, unique].tolist()
    texts = [client_text(served, token_id) for token_id in unique]
    options = {"max_tokens": 3, "echo": True, "logprobs": 5, "extra_body": extra}
    (choice,) = complete(client, streams=streams, prompt=PROMPT, **options)
    assert choice["logprobs"]["top_logprobs"][0] is None
    for likely, row in zip(choice["logprobs"]["top_logprobs"][1:], rows, strict=True):
        assert list(likely)[: len(unique)] == texts
        assert list(likely.values())[: len(unique)] == pytest.approx(row, abs=2e-4)
    response = client.chat.completions.create(
        model="demo", temperature=0, messages=QUESTION, max_tokens=2, logprobs=True, stream=streams, extra_body=extra
    )
    chunks = [chunk.choices[0] for chunk in (response if streams else [response])]
    prompt = served.tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)
    rows = all_logps(served, prompt + greedy(served, prompt, 2))[len(prompt) - 1 : -1][:, unique].tolist()
    content = [token for chunk in chunks for token in chunk.logprobs.content]
    for token, row in zip(content, rows, strict=True):
        assert [one.token for one in token.top_logprobs] == texts
        assert [one.logprob for one in token.top_logprobs] == pytest.approx(row, abs=2e-4)


def client_text(served: Served, token_id: int) -> str:
    return served.tokenizer.token_bytes()(token_id).decode(errors="backslashreplace")


def test_every_token_is_there(client: Any, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the one that ends the sequence, those of a stop string and those of a part of a character."""
    ids = served.tokenizer.encode("import ")
    new = greedy(served, ids, 20)
    text = served.tokenizer.decode(new)
    for stop in (text[3:7], text[10]):
        (choice,) = complete(client, streams=False, prompt="import ", max_tokens=20, stop=stop, logprobs=1, echo=True)
        assert choice["text"] == "".join(choice["logprobs"]["tokens"]) == "import " + text[: text.index(stop)]
        usage = client.completions.create(model="demo", prompt="import ", temperature=0, max_tokens=20, stop=stop).usage
        assert len(choice["logprobs"]["tokens"]) == usage.total_tokens
    monkeypatch.setitem(served.model.generation_config, "eos_token_id", [1, new[2]])
    (choice,) = complete(client, streams=False, prompt="import ", max_tokens=20, logprobs=1, echo=True)
    assert (choice["finish_reason"], len(choice["logprobs"]["tokens"])) == ("stop", len(ids) + new.index(new[2]) + 1)
    assert choice["text"] == "".join(choice["logprobs"]["tokens"])


def test_a_prompt_of_the_whole_context_is_scored(client: Any, served: Served) -> None:
    ids = (served.tokenizer.encode("import os\n" * 300))[:512]
    (choice,) = complete(client, streams=True, prompt=ids, max_tokens=0, echo=True, logprobs=0)
    rows = all_logps(served, ids)
    expected = rows[range(511), ids[1:]].tolist()
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-3)
    usage = client.completions.create(model="demo", prompt=ids, max_tokens=0, echo=True).usage
    assert usage.to_dict() == {"prompt_tokens": 512, "completion_tokens": 0, "total_tokens": 512}
    with pytest.raises(openai.BadRequestError, match="the context is too long"):
        client.completions.create(model="demo", prompt=ids, max_tokens=1, echo=True)
