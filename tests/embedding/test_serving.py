"""/v1/embeddings of a running server, read by OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ligerzoo import AutoModelForEmbedding
from tests.embedding.test_embedding_model import write_new_model

if TYPE_CHECKING:
    from openai import OpenAI

    from ligerzoo.models import EmbeddingModel
    from tests.embedding.serving import Served

if not all(map(find_spec, ("starlette", "uvicorn", "openai"))):
    pytest.skip("the server's packages are not installed", allow_module_level=True)

TEXTS = ["liger", "a tiger and a lion", "", "cats"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> EmbeddingModel:
    directory = tmp_path_factory.mktemp("embedding")
    write_new_model(directory)
    return AutoModelForEmbedding.from_pretrained(directory)


@pytest.fixture(scope="module")
def served(model: EmbeddingModel) -> Iterator[Served]:
    from tests.embedding.serving import serving

    with serving(model) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    from openai import OpenAI

    with OpenAI(base_url=served.url, api_key="secret", max_retries=0) as client:
        yield client


def test_embeddings_are_those_of_encode(served: Served, client: OpenAI) -> None:
    want = served.model.encode(TEXTS)
    response = client.embeddings.create(model="tiny", input=TEXTS)  # the client asks for base64
    assert [entry.index for entry in response.data] == [0, 1, 2, 3]
    torch.testing.assert_close(torch.tensor([entry.embedding for entry in response.data]), want)
    ids = served.model.tokenizer(TEXTS)["input_ids"]
    assert response.usage.prompt_tokens == response.usage.total_tokens == sum(map(len, ids))
    assert (response.model, response.object) == ("tiny", "list")
    for given in (TEXTS[1], ids[1], [ids[1]]):
        one = client.embeddings.create(model="tiny", input=given, encoding_format="float", user="someone")
        torch.testing.assert_close(torch.tensor([one.data[0].embedding]), want[1:2])
    assert client.models.list().data[0].id == "tiny"


def test_options_of_a_request(served: Served, client: OpenAI) -> None:
    def embedding(given: str, **options: Any) -> torch.Tensor:
        response = client.embeddings.create(model="tiny", input=given, **options)
        return torch.tensor(response.data[0].embedding)

    want = served.model.encode(TEXTS[1], truncate_dim=7, normalize=True)  # the model's embeddings have length 1
    torch.testing.assert_close(embedding(TEXTS[1], dimensions=7), want)
    want = served.model.encode(TEXTS[1], prompt_name="query")
    torch.testing.assert_close(embedding(TEXTS[1], extra_body={"prompt_name": "query"}), want)
    long = "cats " * 30
    torch.testing.assert_close(embedding(long, extra_body={"truncate_prompt_tokens": -1}), served.model.encode(long))
    want = served.model.encode(TEXTS[1][:4])
    torch.testing.assert_close(embedding(TEXTS[1], extra_body={"truncate_prompt_tokens": 5}), want)


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"input": []}, "input: invalid value; got .*; expected a text, a list of texts"),
        ({"input": ["a", 3]}, "input: invalid value"),
        ({"input": ["a"] * 2049}, "input: too many texts; got 2049; expected 2048"),
        ({"input": "cats " * 10}, "input: the text is too long; got 51 tokens; expected at most 40"),
        ({"input": [999]}, "999"),
        ({"input": "a", "dimensions": 25}, "dimensions: invalid value; got 25; expected an integer from 1 to 24"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format: invalid value"),
        (
            {"input": "a", "extra_body": {"prompt_name": "passage"}},
            "prompt_name: invalid value; got .*; expected one of",
        ),
        ({"input": "a", "extra_body": {"dimension": 3}}, "dimension: unknown field. Did you mean 'dimensions'"),
        ({"input": "a", "model": "other"}, "model: no such model"),
    ],
)
def test_requests_that_are_refused(client: OpenAI, options: dict[str, Any], problem: str) -> None:
    from openai import APIStatusError

    with pytest.raises(APIStatusError, match=problem) as caught:
        client.embeddings.create(**{"model": "tiny", **options})
    assert caught.value.status_code in (400, 404)
    assert caught.value.type == "invalid_request_error"


def test_other_endpoints_are_named(client: OpenAI) -> None:
    from openai import NotFoundError

    with pytest.raises(
        NotFoundError, match="no such endpoint; got POST '/v1/completions'; expected POST /v1/embeddings, "
    ):
        client.completions.create(model="tiny", prompt="a")


def test_requests_are_computed_together_in_turn(served: Served) -> None:
    """A request of many texts does not keep one of a single text waiting; a client that leaves makes room."""
    from openai import AsyncOpenAI

    order = []

    async def run() -> None:
        async with AsyncOpenAI(base_url=served.url, api_key="secret", max_retries=0) as client:

            async def ask(name: str, count: int) -> None:
                await client.embeddings.create(model="tiny", input=["liger"] * count)
                order.append(name)

            served.pause.set()
            requests = []
            for name, count in (("first", 4), ("large", 20), ("left", 20), ("small", 1)):
                requests.append(asyncio.ensure_future(ask(name, count)))
                await asyncio.to_thread(served.wait_for, len(requests))
            requests.pop(2).cancel()
            await asyncio.to_thread(served.wait_for, len(requests))
            served.batches.clear()
            served.pause.clear()
            await asyncio.gather(*requests)

    asyncio.run(run())
    assert order.index("small") < order.index("large")
    assert sum(served.batches) <= 4 + 20 + 1
    assert max(served.batches) == 4


def test_too_many_texts_wait(model: EmbeddingModel) -> None:
    from openai import InternalServerError, OpenAI

    from tests.embedding.serving import serving

    with (
        serving(model, max_waiting=3) as served,
        OpenAI(base_url=served.url, api_key="secret", max_retries=0) as client,
    ):
        served.pause.set()
        thread = threading.Thread(target=lambda: client.embeddings.create(model="tiny", input=["a"] * 3))
        thread.start()
        served.wait_for(1)
        with pytest.raises(InternalServerError, match="too many requests wait"):
            client.embeddings.create(model="tiny", input="a")
        served.pause.clear()
        thread.join(20)
        assert len(client.embeddings.create(model="tiny", input=["a"] * 9).data) == 9


def test_a_failure_ends_its_requests_only(served: Served, client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    from openai import InternalServerError

    def fail(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("secret path")

    def broken(*_: Any, **options: Any) -> torch.Tensor:
        return torch.full((len(options["cu_seqlens"]) - 1, 24), torch.nan)

    for forward, message in ((fail, "RuntimeError. The log of the server says more"), (broken, "not finite")):
        with monkeypatch.context() as patch:
            patch.setattr(served.model, "forward", forward)
            with pytest.raises(InternalServerError, match=message) as caught:
                client.embeddings.create(model="tiny", input="a")
            assert "secret path" not in str(caught.value)
    assert len(client.embeddings.create(model="tiny", input="a").data) == 1


def test_metrics_and_key(served: Served) -> None:
    import http.client
    from urllib.parse import urlsplit

    address = urlsplit(served.url)
    link = http.client.HTTPConnection(address.hostname or "", address.port, timeout=20)
    link.request("GET", "/metrics", headers={"authorization": "Bearer secret"})
    text = link.getresponse().read().decode()
    assert 'ligerzoo_requests_finished_total{reason="stop"}' in text
    link.request("POST", "/v1/embeddings", json.dumps({"input": "a"}), {"content-type": "application/json"})
    assert link.getresponse().status == 401
    link.close()
