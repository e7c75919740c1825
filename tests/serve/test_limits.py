"""A client cannot keep others from using the server, and only the allowed ones may use it."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from ligerzoo.errors import LigerzooError
from ligerzoo.models import Llama
from ligerzoo.serve import limits, server, strict_json
from ligerzoo.serve.access import Access, names_of
from ligerzoo.serve.strict_json import encode_json
from ligerzoo.text.tokenizer import Tokenizer
from tests.serve.serving import Served, post, serving

HEAD = (
    "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
)


@contextmanager
def connected(served: Served, data: str | bytes = b"") -> Iterator[socket.socket]:
    address = urlsplit(served.url)
    assert address.hostname is not None
    with socket.create_connection((address.hostname, address.port or 0), timeout=20) as client:
        client.sendall(data.encode() if isinstance(data, str) else data)
        yield client


def received(client: socket.socket) -> bytes:
    """Returns what the server sends until it closes the connection."""
    parts = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


@contextmanager
def watched(served: Served) -> Iterator[list[float]]:
    """Measures how long others wait for a response."""
    waits, stop = [0.0], threading.Event()

    def probe() -> None:
        while not stop.wait(0.02):
            start = time.monotonic()
            assert post(served, None, "/v1/models", "GET")[0] == 200
            waits.append(time.monotonic() - start)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield waits
    finally:
        stop.set()
        thread.join()


# Requests


@pytest.mark.parametrize("prompts", [200, 10_000])
@pytest.mark.parametrize("prompt", ["x", [5]])
def test_continuations_are_counted_before_they_are_made(served: Served, prompts: int, prompt: Any) -> None:
    start = time.monotonic()
    with watched(served) as waits:
        fields = {"model": "demo", "prompt": [prompt] * prompts, "n": 128, "max_tokens": 1}
        status, content = post(served, json.dumps(fields))
    assert status == 400
    assert f"too many continuations; got {prompts * 128}" in content["error"]["message"]
    assert time.monotonic() - start < 5
    assert max(waits) < 0.5


def test_responses_are_encoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """json.dumps stops all threads until it has finished."""
    tops = [{f"té{i}{j}": -0.5 * j for j in range(20)} for i in range(600)]
    response = {"a": [None, *tops], "b": list(range(1000)), "c": {"d": ["x\n"] * 700, "e": {}}, "f": [], "g": [[]]}
    sizes: list[int] = []
    dumps = json.dumps

    def spy(value: Any, **options: Any) -> str:
        sizes.append(len(value) if isinstance(value, list | dict) else 1)
        return dumps(value, **options)

    monkeypatch.setattr(strict_json.json, "dumps", spy)
    assert encode_json(response) == dumps(response, ensure_ascii=False, separators=(",", ":")).encode()
    assert max(sizes) <= 256
    with pytest.raises(ValueError, match="Out of range float"):
        encode_json({"a": [float("nan")]})


@pytest.mark.parametrize("value", ["[]", "{}", "1e1", '{"a":1}'])
def test_bodies_with_too_many_values_are_not_parsed(demo: tuple[Llama, Tokenizer], value: str) -> None:
    body = '{"model": [' + ",".join([value] * (10_000_000 // (len(value) + 1))) + "]}"
    with serving(*demo, max_body=10 * 2**20) as served, watched(served) as waits:
        status, content = post(served, body)
    message = "body: too many values; expected at most 500,000. Send several requests."
    assert (status, content["error"]["message"]) == (413, message)
    assert max(waits) < 0.5


def test_signs_within_texts_are_not_counted() -> None:
    limits.check_values(json.dumps(["," * 600_000, '["' * 300_000, "\\" * 300_000]).encode())
    for text in (b'"' + b'\\"' * 300_000, b"[" * 500_000):
        limits.check_values(text)
    for text in (b"[" * 500_001, b'"",' * 500_001):
        with pytest.raises(Exception, match="413"):
            limits.check_values(text)


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", ["5e-324", "1e-46", "1e-40", "1e-38", "1e-31", "3.5e38", "1e308", "1" + "0" * 400])
def test_numbers_beyond_fp32(served: Served, field: str, value: str) -> None:
    status, content = post(served, f'{{"model": "demo", "prompt": "a", "max_tokens": 2, "{field}": {value}}}')
    if field in ("top_p", "min_p") and value.count("-"):
        assert status == 200  # near 0, which has a meaning
    else:
        assert status == 400
        assert content["error"]["param"] == field


@pytest.mark.parametrize(
    "body",
    [
        '{"model":"demo","prompt":"a","\\ud800":1}',
        '{"model":"demo","prompt":"\\uDC00"}',
        '{"model":"\\udfff","prompt":"a"}',
        '{"model":"demo","prompt":"a","stop":["\\ud83d"]}',
        '{"model":"demo","prompt":"a","metadata":{"a":[{"\\udead":1}]}}',
        b'{"model":"demo","prompt":"\xed\xa0\x80"}',
        '{"model":"demo","prompt":"a"}'.encode("utf-16"),
    ],
)
def test_half_characters_are_refused(served: Served, body: str | bytes) -> None:
    status, content = post(served, body)
    assert status == 400
    assert content["error"]["message"].startswith("body: not valid JSON")


def test_a_whole_surrogate_pair_is_a_character(served: Served) -> None:
    body = '{"model":"demo","prompt":"\\ud83e\\udd81 \\\\ud800","max_tokens":1}'
    assert post(served, body)[0] == 200


def test_messages_name_no_files(served: Served, demo: tuple[Llama, Tokenizer]) -> None:
    where = demo[1].backend.where
    for body in (
        {"prompt": [999_999]},
        {"prompt": "x", "stop": 3},
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"prefix": {"a": [1] * 3}}},
    ):
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        status, content = post(served, json.dumps({"model": "demo", "max_tokens": 1, **body}), path)
        assert status in (200, 400)
        assert where not in json.dumps(content)


# Connections


def test_unfinished_bodies_and_headers_end_in_time(
    demo: tuple[Llama, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.5)
    monkeypatch.setattr(limits, "HEADER_SECONDS", 0.5)
    with serving(*demo) as served:
        with connected(served, HEAD.format(1000) + "{") as client:
            response = received(client)
            assert response.startswith(b"HTTP/1.1 408 ")
            assert b"body: not received within 0.5 seconds" in response
        for data in ("", "POST /v1/comp", HEAD.format(5)[:-2]):
            with connected(served, data) as client:
                assert received(client) == b""
        assert post(served, json.dumps({"model": "demo", "prompt": "x", "max_tokens": 1}))[0] == 200


def test_a_client_may_take_its_time_between_requests(served: Served) -> None:
    body = b'{"model":"demo","prompt":"x","max_tokens":1}'
    with connected(served) as client:
        for _ in range(2):
            for part in (HEAD.format(len(body)).encode()[:20], HEAD.format(len(body)).encode()[20:], body):
                client.sendall(part)
                time.sleep(0.05)
            response = b""
            while not response.endswith(b"}"):
                response += client.recv(65536)
            assert response.startswith(b"HTTP/1.1 200 ")


def test_the_largest_unfinished_body_makes_room_for_others(demo: tuple[Llama, Tokenizer]) -> None:
    body, half = json.dumps({"model": "demo", "prompt": "x", "max_tokens": 1}), "x" * 60_000
    with serving(*demo, max_body=100_000) as served:
        clients = [connected(served, HEAD.format(90_000) + half + "x" * i) for i in range(7)]
        opened = [client.__enter__() for client in clients]
        refused = received(opened[-1])
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"too many bodies arrive" in refused
        assert post(served, body)[0] == 200
        for client in clients:
            client.__exit__(None, None, None)
        assert post(served, body)[0] == 200


def test_silent_connections_make_room(demo: tuple[Llama, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CONNECTIONS", 8)
    with serving(*demo) as served:
        silent = [connected(served) for _ in range(20)]
        opened = [client.__enter__() for client in silent]
        with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
            served.pause.set()
            stream = client.completions.create(model="demo", prompt="x", stream=True)
            silent += [connected(served) for _ in range(20)]
            opened += [client.__enter__() for client in silent[20:]]
            served.pause.clear()
            assert len(list(stream)) > 1  # a request is not silent
        assert received(opened[0]) == b""
        for link in silent:
            link.__exit__(None, None, None)


def unread_stream(served: Served, name: str) -> Any:
    """A stream of more than the buffers of a connection hold, which the client does not read."""
    fields = {
        "model": name, "prompt": "x", "n": 4, "max_tokens": 300, "min_new_tokens": 300, "temperature": 0,
        "stream": True,
    }  # fmt: skip
    body = json.dumps(fields)
    return connected(served, HEAD.format(len(body)) + body)


def test_an_unread_stream_leaves_the_queue_after_its_last_token(
    demo: tuple[Llama, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WRITE_SECONDS", 1.0)
    name = "m" * 8000  # is in each event
    with serving(*demo, name=name, max_requests=4) as served:
        body = json.dumps({"model": name, "prompt": "x", "max_tokens": 1})
        with unread_stream(served, name) as client:
            while served.steps == 0 or not served.scheduler.is_idle:
                time.sleep(0.01)
            time.sleep(0.1)
            assert post(served, body)[0] == 200
            time.sleep(1.5)
            assert b"[DONE]" not in received(client)  # cut off
        assert post(served, body)[0] == 200


@pytest.mark.parametrize("kind", ["half a body", "half of the headers", "unread"])
def test_shutdown_does_not_wait_for_clients(
    kind: str, demo: tuple[Llama, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "GRACE", 1.0)
    name = "m" * 8000
    with serving(*demo, name=name) as served:
        if kind == "unread":
            clients = unread_stream(served, name)
        else:
            clients = connected(served, HEAD.format(1000) + "{" if kind == "half a body" else HEAD[:50])
        client = clients.__enter__()
        time.sleep(1)
        start = time.monotonic()
    assert time.monotonic() - start < (4 if kind == "unread" else 1.5)
    if kind == "half a body":
        assert b"the server is shutting down" in received(client)
    clients.__exit__(None, None, None)


# Access


@pytest.mark.parametrize(
    "host, is_allowed",
    [
        ("127.0.0.1", True),
        ("127.0.0.1:8000", True),
        ("192.168.1.5:80", True),
        ("[::1]:8000", True),
        ("[::1]", True),
        ("localhost:1", True),
        ("LocalHost.", True),
        ("lab.example.org", True),
        ("LAB.example.org:8000", True),
        ("a.b.example.com", True),
        ("example.com", False),
        ("evil.example:8000", False),
        ("127.0.0.1.evil.example:8000", False),
        ("localhost.evil.example", False),
        ("evillab.example.org", False),
        ("localhost:evil.example", False),
        ("evil.example#localhost", False),
        ("user@localhost", False),
        ("", False),
    ],
)
def test_the_host_must_be_the_server(demo: tuple[Llama, Tokenizer], host: str, is_allowed: bool) -> None:
    access = Access(None, hosts=["lab.example.org", "*.example.com"])  # type: ignore[arg-type]
    assert access._has_name(host) == is_allowed


def test_other_hosts_are_refused_everywhere(served: Served) -> None:
    for path in ("/v1/completions", "/v1/completions/", "/v1/models", "/health", "/"):
        status, content = post(served, "{}", path, headers={"host": "evil.example"})
        assert (status, content["error"]["type"]) == (421, "invalid_request_error")
        assert "Host: not a name of this server; got 'evil.example'" in content["error"]["message"]
    assert post(served, "{}", "/v1/completions/")[0] == 404  # no redirect


def test_names_of_the_server() -> None:
    assert names_of("localhost", is_local=True) == ["localhost"]
    assert socket.gethostname() in names_of("0.0.0.0", is_local=False)
    assert Access(None, hosts=["*"])._has_name("any.example")  # type: ignore[arg-type]


def test_the_key(demo: tuple[Llama, Tokenizer]) -> None:
    with serving(*demo, api_key="secret") as served:
        with openai.OpenAI(base_url=served.url, api_key="secret", max_retries=0) as client:
            assert client.completions.create(model="demo", prompt="x", max_tokens=1).choices
        with openai.OpenAI(base_url=served.url, api_key="secrets", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                client.models.list()
            assert (caught.value.code, caught.value.type) == ("invalid_api_key", "invalid_request_error")
        assert post(served, "{}", "/v1/completions")[0] == 401
        for value in ("secret", "Basic secret", "Bearer", "Bearer sécret"):
            assert post(served, "{}", headers={"authorization": value.encode().decode("latin-1")})[0] == 401
        assert post(served, "{}", headers={"authorization": "bearer secret"})[0] == 400
        assert post(served, None, "/health", "GET") == (200, None)


@pytest.mark.parametrize("key", ["", "two words", "schlüssel", "line\n"])
def test_keys_that_cannot_be_sent(key: str) -> None:
    with pytest.raises(LigerzooError, match="api_key: invalid value"):
        Access(None, api_key=key)  # type: ignore[arg-type]
