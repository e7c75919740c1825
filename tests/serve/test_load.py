"""Many clients at a time: each gets the answer that it gets alone, and none stops the others."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ligerzoo.models import Llama
from ligerzoo.text.tokenizer import Tokenizer
from tests.serve.clients import send
from tests.serve.serving import Served, serving

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
KINDS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "import {}", "temperature": 0, "max_tokens": 12}),
    (COMPLETIONS, {"prompt": "def {}", "seed": 3, "n": 2, "max_tokens": 12, "stream": True}),
    (COMPLETIONS, {"prompt": "import os  # {}\n" * 50, "temperature": 0, "max_tokens": 5, "logprobs": 2}),
    (CHATS, {"messages": [{"role": "user", "content": "{}"}], "temperature": 0, "max_tokens": 9, "logprobs": True,
             "top_logprobs": 5, "stream": True}),
    (COMPLETIONS, {"prompt": "class {}:\n    pass\n" * 30, "echo": True, "logprobs": 20, "max_tokens": 1, "seed": 2}),
    (COMPLETIONS, {"prompt": ["for {} in ", "{}"], "echo": True, "logprobs": 1, "max_tokens": 0, "stream": True}),
    (COMPLETIONS, {"prompt": "while {}", "stop": ["\n", "e"], "temperature": 0, "min_new_tokens": 3}),
    ("/tokenize", {"prompt": "import os  # {}\n" * 5000}),
]  # fmt: skip


def request(number: int) -> tuple[str, str]:
    """Returns the path and the body of one of many different requests."""
    path, fields = KINDS[number % len(KINDS)]
    return path, json.dumps({"model": "demo", **fields}).replace("{}", f"name_{number}")


def meaning(response: str) -> Any:
    """Returns the text and the log-probabilities of each choice, or the tokens."""
    lines = [line.removeprefix("data: ") for line in response.split("\n\n")]
    found: dict[int, tuple[str, list[float | None]]] = {}
    for event in (json.loads(line) for line in lines if line.startswith("{")):
        if "tokens" in event:
            return event
        for choice in event["choices"]:
            text, logps = found.setdefault(choice["index"], ("", []))
            more = choice.get("text") or choice.get("delta", {}).get("content") or ""
            logprobs = choice["logprobs"] or {}
            logps += logprobs.get("token_logprobs") or [one["logprob"] for one in logprobs.get("content") or []]
            found[choice["index"]] = text + more, logps
    return found


@pytest.fixture(scope="module")
def busy(demo: tuple[Llama, Tokenizer]) -> Iterator[Served]:
    with serving(*demo, max_requests=512) as running:
        yield running


@pytest.mark.parametrize("clients", [1, 8, 32, pytest.param(128, marks=pytest.mark.slow)])
def test_clients_at_a_time(busy: Served, clients: int) -> None:
    requests, port = list(map(request, range(clients))), urlsplit(busy.url).port
    assert port is not None
    alone = [meaning(send(port, "POST", *one)) for one in requests]
    line = [sys.executable, str(Path(__file__).parent / "clients.py"), str(port)]
    finished = subprocess.run(line, input=json.dumps(requests), capture_output=True, text=True, check=True, timeout=200)
    result = json.loads(finished.stdout)
    assert result["wait"] < 0.5
    assert busy.longest_step < 0.5
    for answer, expected in zip(map(meaning, result["answers"]), alone, strict=True):
        if "tokens" in expected:
            assert answer == expected
            continue
        assert answer.keys() == expected.keys()
        for index, (text, logps) in expected.items():
            assert answer[index][0] == text
            assert answer[index][1] == pytest.approx(logps, abs=1e-3)
