"""A server of an embedding model, on a free port, in a thread."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ligerzoo.models import EmbeddingModel
from ligerzoo.serve.access import Access
from ligerzoo.serve.embeddings import EmbeddingService, EmbeddingThread
from ligerzoo.serve.server import Server, listen, url


class Served:
    """A running server."""

    def __init__(self, model: EmbeddingModel) -> None:
        self.model, self.url = model, ""
        self.pause = threading.Event()  # while it is set, no batch is computed
        self.batches: list[int] = []
        self.engine: EmbeddingThread

    def wait_for(self, requests: int) -> None:
        """Waits until the thread has this number of requests."""
        deadline = time.monotonic() + 20
        while len(self.engine._active) != requests:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@contextmanager
def serving(
    model: EmbeddingModel, max_waiting: int = 64, *, name: str = "tiny", api_key: str | None = "secret"
) -> Iterator[Served]:
    """Runs a server within `with`."""
    served = Served(model)
    forward = model.forward

    def pausing(*arguments: Any, **options: Any) -> torch.Tensor:
        while served.pause.is_set():
            time.sleep(0.01)
        served.batches.append(len(options["cu_seqlens"]) - 1)
        return forward(*arguments, **options)

    engine = served.engine = EmbeddingThread(model, batch_size=4, max_waiting=max_waiting)
    service = EmbeddingService(model, engine, name=name, max_body=2**20)
    with listen("127.0.0.1", 0) as listener, pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "forward", pausing)
        served.url = url(listener)
        server = Server(Access(service.app(), api_key=api_key), engine, service.bodies, listener)
        thread = threading.Thread(target=server.run_until_stopped)
        thread.start()
        try:
            yield served
        finally:
            served.pause.clear()
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()
