"""/v1/embeddings, OpenAI's API for embeddings: its JSON, and the thread that computes them.

Fields that are not OpenAI's: `prompt_name`, the prompt that is put before each text, and vLLM's
`truncate_prompt_tokens`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Self

import torch
import torch.nn.functional as F
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from torch import Tensor

from ligerzoo.checks import integer, one_of
from ligerzoo.encoding import embed_rows, encoding_prompt, prompts_of, unpooled_tokens
from ligerzoo.errors import LigerzooError
from ligerzoo.models.embedding import EmbeddingModel, NormalizeStage
from ligerzoo.serve.app import MAX_BODY, BaseService, json_response, until_disconnected
from ligerzoo.serve.engine_thread import GenerationError, OverloadedError, failure_of
from ligerzoo.serve.fields import Fields, Json, check_names, checked, read
from ligerzoo.serve.metrics import Metrics
from ligerzoo.serve.prompts import PROMPTS, ContextLengthError, PromptEncoder, is_prompt
from ligerzoo.serve.protocol import WITHOUT_EFFECT

MAX_INPUTS = 2048
"""Texts of one request, as OpenAI's."""

_OWN_FIELDS = ("input", "encoding_format", "dimensions", "prompt_name", "truncate_prompt_tokens")
_FIELDS = ("model", *_OWN_FIELDS, *WITHOUT_EFFECT)
_FORMATS = one_of(("float", "base64"))._replace(expected='"float" or "base64"')


@dataclass(frozen=True)
class EmbeddingCall:
    """A request of a client.

    Attributes:
        model: the model's name.
        rows: token ids of the texts.
        prompt_tokens: tokens of the prompt that pooling leaves out, of each text.
        dimensions: number of features; None for all.
        is_base64: whether the response has the bytes of numbers in place of numbers.
        normalizes: scale shortened embeddings to length 1 again.
    """

    model: str
    rows: list[list[int]]
    prompt_tokens: int
    dimensions: int | None
    is_base64: bool
    normalizes: bool

    @classmethod
    def read(cls, fields: Fields, model: EmbeddingModel) -> Self:
        """Reads a request.

        Raises:
            LigerzooError: a field is unknown, unsupported or invalid.
            ContextLengthError: a text is too long.
        """
        check_names(fields, _FIELDS, {})
        given = checked(fields.get("input"), "input", PROMPTS)
        inputs: list[str | list[int]] = [given] if is_prompt(given) else given
        if len(inputs) > MAX_INPUTS:
            remedy = "Send several requests."
            raise LigerzooError("too many texts", where="input", got=len(inputs), expected=MAX_INPUTS, remedy=remedy)
        prompt = encoding_prompt(model, name=read(fields, "prompt_name", one_of(tuple(prompts_of(model))), None))
        longest: int | None = read(fields, "truncate_prompt_tokens", integer(-1, model.max_length), None)
        longest = model.max_length if longest == -1 else longest
        return cls(
            model=str(fields["model"]),
            rows=[_tokens(text, model, prompt, longest) for text in inputs],
            prompt_tokens=unpooled_tokens(model, prompt),
            dimensions=read(fields, "dimensions", integer(1, model.embedding_size), model.settings.dimensions),
            is_base64=read(fields, "encoding_format", _FORMATS, "float") == "base64",
            normalizes=type(model.settings.stages[-1]) is NormalizeStage,
        )

    def response(self, embeddings: Tensor) -> Json:
        """Returns the response with the embeddings, (n, D) in fp32 on the CPU."""
        if self.dimensions is not None and self.dimensions < embeddings.shape[1]:
            embeddings = embeddings[:, : self.dimensions]
            embeddings = F.normalize(embeddings, dim=-1) if self.normalizes else embeddings
        array = embeddings.numpy().astype("<f4")
        values = [base64.b64encode(row.tobytes()).decode() if self.is_base64 else row.tolist() for row in array]
        tokens = sum(map(len, self.rows))
        return {
            "object": "list",
            "data": [{"object": "embedding", "index": i, "embedding": value} for i, value in enumerate(values)],
            "model": self.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }


def _tokens(text: str | list[int], model: EmbeddingModel, prompt: str, longest: int | None) -> list[int]:
    """Returns the token ids of a text, at most `longest` of them."""
    tokenizer, limit = model.tokenizer, model.max_length
    match text:
        case str():
            if longest is None and (least := tokenizer.min_tokens(prompt + text)) > limit:
                raise _too_long(f"at least {least} tokens", limit)
            ids: list[int] = tokenizer.encode(prompt + text, truncation=longest is not None, max_length=longest)
        case _:
            ids = text[:longest]
            tokenizer.check_ids(torch.tensor(ids), model.input_vocab_size)
    if not ids:
        raise LigerzooError("a text without tokens", where="input", expected="at least one token in each text")
    if len(ids) > limit:
        raise _too_long(f"{len(ids)} tokens", limit)
    return ids


def _too_long(got: str, limit: int) -> ContextLengthError:
    what, remedy = "the text is too long", "Shorten the text, or pass truncate_prompt_tokens=-1."
    return ContextLengthError(what, where="input", got=got, expected=f"at most {limit}", remedy=remedy)


class _Job:
    """The texts of one request, while they are computed."""

    def __init__(self, call: EmbeddingCall) -> None:
        self.call, self.embeddings = call, [torch.empty(0)] * len(call.rows)
        self.future: asyncio.Future[Tensor] = asyncio.get_running_loop().create_future()
        self.waiting = deque(range(len(call.rows)))  # of the thread
        self.left, self.is_cancelled, self.submitted = len(call.rows), False, time.monotonic()


class EmbeddingThread:
    """Computes the embeddings of the requests of one event loop in one thread, texts of several together.

    Args:
        model: the model.
        batch_size: texts that are computed together.
        max_waiting: a request is refused while as many texts wait.

    Attributes:
        metrics: counters of the requests; of the event loop.
    """

    def __init__(self, model: EmbeddingModel, *, batch_size: int, max_waiting: int) -> None:
        self.metrics = Metrics()
        self._model, self._batch_size, self._max_waiting = model, batch_size, max_waiting
        self._active: set[_Job] = set()  # of the event loop
        self._inbox: SimpleQueue[_Job | None] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="ligerzoo-embeddings", daemon=True)

    @property
    def is_running(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its current batch."""
        self._inbox.put(None)
        self._thread.join()

    def metrics_text(self) -> str:
        """Returns the counters in the format of Prometheus. Texts count as requests."""
        return self.metrics.text(waiting=self._waiting(), running=0)

    def abort(self, reason: str) -> None:
        """Ends all requests with a GenerationError."""
        for job in self._active:
            _finish(job, GenerationError(reason))

    async def embed(self, call: EmbeddingCall) -> Tensor:
        """Returns the embeddings of a request, (n, D) in fp32 on the CPU.

        Raises:
            OverloadedError: too many texts wait.
            GenerationError: the model fails, or the server stops.
        """
        if self._waiting() >= self._max_waiting:
            raise OverloadedError
        self._loop, job, reason = asyncio.get_running_loop(), _Job(call), "error"
        self._active.add(job)
        self._inbox.put(job)
        self.metrics.prompt_tokens += sum(map(len, call.rows))
        try:
            embeddings = await job.future
            reason = "stop"
            return embeddings
        except asyncio.CancelledError:
            reason = "abort"
            raise
        finally:
            job.is_cancelled = True
            self._active.discard(job)
            self.metrics.finished[reason] += len(call.rows)
            self.metrics.request_seconds += len(call.rows) * (time.monotonic() - job.submitted)

    def _waiting(self) -> int:
        return sum(job.left for job in self._active)

    # In the thread

    def _run(self) -> None:
        jobs: deque[_Job] = deque()
        while True:
            while not jobs or not self._inbox.empty():
                job = self._inbox.get()
                if job is None:
                    return
                jobs.append(job)
            batch = self._batch(jobs)
            try:
                embeddings = _embed([(job.call, index) for job, index in batch], self._model)
            except Exception as error:
                ended = failure_of(error)
                failed = {job for job, _ in batch}
                jobs = deque(job for job in jobs if job not in failed)
                for job in failed:
                    self._call(partial(_finish, job, ended))
            else:
                self._call(partial(_deliver, batch, embeddings))

    def _batch(self, jobs: deque[_Job]) -> list[tuple[_Job, int]]:
        """Takes texts of the jobs in turn, so that a large request does not keep a small one waiting."""
        batch: list[tuple[_Job, int]] = []
        while jobs and len(batch) < self._batch_size:
            job = jobs.popleft()
            if job.is_cancelled or not job.waiting:
                continue
            batch.append((job, job.waiting.popleft()))
            jobs.append(job)
        return batch

    def _call(self, function: Callable[[], None]) -> None:
        """Calls a function on the event loop, unless it is closed."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)


def _embed(batch: Sequence[tuple[EmbeddingCall, int]], model: EmbeddingModel) -> Tensor:
    """Returns the embeddings of texts of several requests, (n, D) in fp32 on the CPU.

    Raises:
        LigerzooError: an embedding has numbers that are not finite.
    """
    embeddings = torch.empty(len(batch), model.embedding_size)
    by_prompt: dict[int, list[int]] = {}
    for position, (call, _) in enumerate(batch):
        by_prompt.setdefault(call.prompt_tokens, []).append(position)
    for prompt_tokens, positions in by_prompt.items():
        rows = [batch[position][0].rows[batch[position][1]] for position in positions]
        embeddings[positions] = embed_rows(model, rows, prompt_tokens).float().cpu()
    if not embeddings.isfinite().all():
        raise LigerzooError("an embedding has numbers that are not finite", remedy="Load the model in bfloat16.")
    return embeddings


def _deliver(batch: Sequence[tuple[_Job, int]], embeddings: Tensor) -> None:
    """Adds results to their requests, on the event loop."""
    for (job, index), embedding in zip(batch, embeddings, strict=True):
        job.embeddings[index] = embedding
        job.left -= 1
        if not job.left:
            _finish(job, torch.stack(job.embeddings))


def _finish(job: _Job, result: Tensor | GenerationError) -> None:
    if job.future.done():  # cancelled
        return
    match result:
        case GenerationError():
            job.future.set_exception(result)
        case _:
            job.future.set_result(result)


class EmbeddingService(BaseService):
    """The endpoints of an embedding model; see `BaseService`.

    Args:
        model: the model.
        engine: computes the embeddings.
        name: the model's name.
        max_body: largest size of a request's body in bytes.
    """

    def __init__(self, model: EmbeddingModel, engine: EmbeddingThread, *, name: str, max_body: int = MAX_BODY) -> None:
        encoder = PromptEncoder(model.tokenizer, model.input_vocab_size, model.max_length)
        super().__init__(engine, encoder, name=name, max_body=max_body)
        self._zoo_model, self._embeddings = model, engine

    def routes(self) -> list[Route]:
        return [Route("/v1/embeddings", self._embed, methods=["POST"]), *super().routes()]

    async def _embed(self, request: Request) -> Response:
        async with self.bodies.receive(request) as body:
            call = await self._preparing.run(lambda: EmbeddingCall.read(self._read(body), self._zoo_model))
        embeddings = await until_disconnected(request.receive, self._embeddings.embed(call))
        return await self._writing.run(lambda: json_response(call.response(embeddings)))
