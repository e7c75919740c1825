"""A server of the demo's model, on a free port, in a thread."""

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from ligerzoo.demo.text import CHECKPOINT, load
from ligerzoo.generate import Scheduler, Update
from ligerzoo.models import Llama
from ligerzoo.serve.access import Access
from ligerzoo.serve.app import Service
from ligerzoo.serve.engine_thread import EngineThread
from ligerzoo.serve.prompts import PromptEncoder
from ligerzoo.serve.server import Server, listen, url
from ligerzoo.text.chat_template import ChatTemplate
from ligerzoo.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>\n"
    "{% endfor %}{% endfor %}"
    "{% if prefix %}{{ prefix }}{% endif %}"
)


def load_demo() -> tuple[Llama, Tokenizer]:
    """Returns the demo's model, and its tokenizer with a chat template."""
    model, tokenizer = load(CHECKPOINT)
    tokenizer.chat_templates = {"default": ChatTemplate(TEMPLATE, "template")}
    return model, tokenizer


class Served:
    """A running server, and its last scheduler."""

    def __init__(self, model: Llama, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.scheduler: Scheduler
        self.steps, self.longest_step = 0, 0.0
        self.url = ""
        self.pause = threading.Event()  # while it is set, no step is made

    def make_scheduler(self) -> Scheduler:
        served = self

        class Pausing(Scheduler):
            def step(self) -> list[Update]:
                while served.pause.is_set():
                    time.sleep(0.01)
                served.steps += 1
                start = time.monotonic()
                updates = super().step()
                served.longest_step = max(served.longest_step, time.monotonic() - start)
                return updates

        self.scheduler = Pausing(self.model, batch_size=4)
        return self.scheduler

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + 20
        while not self.scheduler.is_idle:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@contextmanager
def serving(
    model: Llama,
    tokenizer: Tokenizer,
    *,
    make_scheduler: Callable[[], Scheduler] | None = None,
    max_requests: int = 64,
    max_body: int = 2**20,
    name: str = "demo",
    hosts: Sequence[str] = (),
    api_key: str | None = None,
) -> Iterator[Served]:
    """Runs a server within `with`; its scheduler is `Served.scheduler` by default."""
    served = Served(model, tokenizer)
    encoder = PromptEncoder(tokenizer, model.config.vocab_size, model.config.max_position_embeddings)
    engine = EngineThread(make_scheduler or served.make_scheduler, max_requests=max_requests)
    service = Service(engine, encoder, name=name, max_body=max_body)
    with listen("127.0.0.1", 0) as listener:
        served.url = url(listener)
        app = Access(service.app(), hosts=hosts, api_key=api_key)
        server = Server(app, engine, service.bodies, listener)
        thread = threading.Thread(target=server.run_until_stopped)
        thread.start()
        try:
            yield served
        finally:
            server.should_exit = True
            thread.join(20)
            served.pause.clear()
            assert not thread.is_alive()


def connection(served: Served) -> http.client.HTTPConnection:
    address = urlsplit(served.url)
    return http.client.HTTPConnection(address.hostname or "", address.port, timeout=20)


def post(
    served: Served,
    body: Any,
    path: str = "/v1/completions",
    method: str = "POST",
    content_type: str = "application/json",
    headers: dict[str, str] | None = None,
) -> tuple[int, Any]:
    """Sends a request, and returns the status and the JSON of the response, if it has any."""
    link = connection(served)
    link.request(method, path, body, {"content-type": content_type, **(headers or {})})
    response = link.getresponse()
    content = response.read()
    link.close()
    return response.status, json.loads(content) if content else None
