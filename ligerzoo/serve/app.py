"""The HTTP application: endpoints, bodies, server-sent events, errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from http import HTTPStatus
from itertools import repeat
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ligerzoo.errors import LigerzooError, TokenizerError, quote
from ligerzoo.generate import Request as GenerationRequest
from ligerzoo.serve.call import Call
from ligerzoo.serve.continuation import Continuation, Piece, TokenTexts
from ligerzoo.serve.engine_thread import SEE_LOG, ComputeThread, EngineThread, GenerationError, Job, OverloadedError
from ligerzoo.serve.fields import STRING, Fields, Json, parse_object, read, show
from ligerzoo.serve.limits import Bodies, Threads, check_values
from ligerzoo.serve.prompts import ContextLengthError, PromptEncoder
from ligerzoo.serve.protocol import Chat, Endpoint, TextCompletion
from ligerzoo.serve.strict_json import encode_json
from ligerzoo.serve.tokenization import detokenize_request, tokenize_request

MAX_BODY = 10 * 2**20
_MAX_BODIES = 4  # of the largest size, that may be in memory

T = TypeVar("T")


class ModelNotFoundError(HTTPException):
    """The server has no model of this name."""


class BaseService:
    """The endpoints of every model.

    Args:
        engine: runs the requests.
        encoder: encodes and checks the prompts.
        name: the model's name; requests have it or none.
        max_body: largest size of a request's body in bytes.

    Attributes:
        bodies: the bodies that arrive.
    """

    def __init__(self, engine: ComputeThread, encoder: PromptEncoder, *, name: str, max_body: int = MAX_BODY) -> None:
        self._state, self._encoder = engine, encoder
        # Only texts to tokenize may be longer than the context, and take long: they do not keep prompts waiting.
        self._preparing, self._writing, self._tokenizing = Threads(8), Threads(8), Threads(2)
        self.bodies = Bodies(max_body, _MAX_BODIES * max_body)
        self._name = name
        self._model: Json = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "ligerzoo"}

    def routes(self) -> list[Route]:
        """Returns the endpoints, the most important first."""
        return [
            Route("/tokenize", partial(self._convert, tokenize_request), methods=["POST"]),
            Route("/detokenize", partial(self._convert, detokenize_request), methods=["POST"]),
            Route("/v1/models", self.list_models),
            Route("/v1/models/{name:path}", self.show_model),
            Route("/metrics", self.metrics),
            Route("/health", self.health),
        ]

    def app(self) -> Starlette:
        """Returns the ASGI application."""
        app = Starlette(
            routes=self.routes(),
            exception_handlers={
                HTTPException: _http_error,
                LigerzooError: _invalid_request,
                GenerationError: _generation_error,
                OverloadedError: _overloaded,
                ClientDisconnect: _disconnected,
                Exception: _internal_error,
            },
        )
        app.router.redirect_slashes = False
        return app

    async def health(self, _request: Request) -> Response:
        return Response(status_code=200 if self._state.is_running else 503)

    async def metrics(self, _request: Request) -> Response:
        return Response(self._state.metrics_text(), media_type="text/plain; version=0.0.4")

    async def list_models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model]})

    async def show_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model)

    async def _convert(self, function: Callable[[Fields, PromptEncoder], Json], request: Request) -> Response:
        """Responds to a request that needs the tokenizer only."""

        def respond(body: bytes) -> Response:
            return json_response(function(self._read(body), self._encoder))

        async with self.bodies.receive(request) as body:
            return await self._tokenizing.run(respond, body)

    def _read(self, body: bytes) -> Fields:
        """Returns the fields of a body for this model, which is the default of `model`."""
        check_values(body)
        fields = parse_object(body, "body")
        self._check_model(read(fields, "model", STRING._replace(expected=show(self._name)), self._name))
        return {**fields, "model": self._name}

    def _check_model(self, name: str) -> None:
        if name != self._name:
            raise ModelNotFoundError(404, f"model: no such model; got {show(name)}; expected {show(self._name)}")


class Service(BaseService):
    """The endpoints of a model that generates text; see `BaseService`."""

    def __init__(self, engine: EngineThread, encoder: PromptEncoder, *, name: str, max_body: int = MAX_BODY) -> None:
        super().__init__(engine, encoder, name=name, max_body=max_body)
        self._engine, self._texts = engine, TokenTexts(encoder.tokenizer)

    def routes(self) -> list[Route]:
        chats = Route("/v1/chat/completions", partial(self._respond, Chat), methods=["POST"])
        completions = Route("/v1/completions", partial(self._respond, TextCompletion), methods=["POST"])
        return [chats, completions, *super().routes()]

    async def _respond(self, kind: type[Endpoint], request: Request) -> Response | EventStream:
        async with self.bodies.receive(request) as body:
            call, requests, outputs = await self._preparing.run(self._prepare, body, kind)
        job = await self._engine.submit(requests)
        endpoint = kind(call, self._texts)
        if call.delivery.is_streamed:
            return EventStream(job, outputs, endpoint)
        try:
            choices = await until_disconnected(request.receive, outputs.collect(job))
        finally:
            job.close()
        return await self._writing.run(lambda: json_response(endpoint.response(choices, outputs.num_tokens)))

    def _prepare(self, body: bytes, kind: type[Endpoint]) -> tuple[Call, list[GenerationRequest], Outputs]:
        """Returns what a body asks for; in a thread, since it may take seconds."""
        call = kind.read(self._read(body), self._encoder, self._engine.max_requests)
        return call, call.requests(self._encoder, self._engine), Outputs(call, self._encoder)


class Outputs:
    """The continuations of one call while their tokens arrive."""

    def __init__(self, call: Call, encoder: PromptEncoder) -> None:
        self._continuations = [
            Continuation(
                encoder.tokenizer,
                call.options.stop,
                echoed=echoed,
                continues_text=call.continues_text,
                shown=call.tools.shown if call.tools else None,
            )
            for echoed in call.echoed or repeat(None, len(call.prompts))
            for _ in range(call.delivery.n)
        ]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all continuations so far."""
        return sum(continuation.num_tokens for continuation in self._continuations)

    async def pieces(self, job: Job) -> AsyncIterator[tuple[int, Piece]]:
        """Yields (index of the continuation, its next part)."""
        async for index, update in job:
            piece = self._continuations[index].push(update)
            if piece.finish_reason is not None:
                job.cancel(index)
            if piece != Piece("", [], None):
                yield index, piece

    async def collect(self, job: Job) -> list[Piece]:
        """Returns the whole continuations."""
        parts: list[list[Piece]] = [[] for _ in self._continuations]
        async for index, piece in self.pieces(job):
            parts[index].append(piece)
        return [
            Piece(
                "".join(piece.text for piece in pieces),
                [token for piece in pieces for token in piece.tokens],
                pieces[-1].finish_reason,
            )
            for pieces in parts
        ]


class EventStream:
    """A response that sends the parts of the continuations as server-sent events while they arrive."""

    def __init__(self, job: Job, outputs: Outputs, endpoint: Endpoint) -> None:
        self._job, self._outputs, self._endpoint = job, outputs, endpoint

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnected(receive, self._send_all(send))
        except ClientDisconnect:
            pass
        finally:
            self._job.close()

    async def _send_all(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for event in self._events():
            await send({"type": "http.response.body", "body": b"data: %s\n\n" % event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        for chunk in self._endpoint.opening():
            yield encode_json(chunk)
        try:
            async for index, piece in self._outputs.pieces(self._job):
                yield encode_json(self._endpoint.chunk(index, piece))
        except GenerationError as error:  # the status has been sent
            yield encode_json(_error(str(error), "server_error"))
            return
        for chunk in self._endpoint.closing(self._outputs.num_tokens):
            yield encode_json(chunk)
        yield b"[DONE]"


async def until_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine, or cancels it when the client disconnects.

    Raises:
        ClientDisconnect: the client disconnected first.
    """
    task, disconnection = asyncio.ensure_future(work), asyncio.ensure_future(_disconnection(receive))
    try:
        await asyncio.wait([task, disconnection], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        disconnection.cancel()
        await asyncio.gather(task, disconnection, return_exceptions=True)


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(content: object) -> Response:
    return Response(encode_json(content), media_type="application/json")


# Errors


def _endpoints(app: Starlette) -> str:
    """Returns the methods and paths of all endpoints."""
    routes = [(*(route.methods or ()), route.path) for route in app.routes if isinstance(route, Route)]
    names = [f"{'POST' if 'POST' in methods else 'GET'} {path}" for *methods, path in routes]
    return f"{', '.join(names[:-1])} or {names[-1]}".replace("{name:path}", "NAME")


def _error(message: str, kind: str, param: object = None, code: str | None = None) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail, code = error.detail, "model_not_found" if isinstance(error, ModelNotFoundError) else None
    if detail == HTTPStatus(error.status_code).phrase:  # of the router
        detail = f"no such endpoint; got {request.method} {quote(request.url.path)}; expected {_endpoints(request.app)}"
    content = _error(detail, "invalid_request_error" if error.status_code < 500 else "server_error", code=code)
    return JSONResponse(content, error.status_code, error.headers)


def _invalid_request(_request: Request, error: Exception) -> Response:
    assert isinstance(error, LigerzooError)
    code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
    if isinstance(error, TokenizerError):  # names a file of the server
        error = error.moved_to(None)
    return JSONResponse(_error(str(error), "invalid_request_error", error.where, code), 400)


def _generation_error(_request: Request, error: Exception) -> Response:
    return JSONResponse(_error(str(error), "server_error"), 500)


def _overloaded(_request: Request, _problem: Exception) -> Response:
    message = "too many requests wait; try again later"
    return JSONResponse(_error(message, "server_error", code="overloaded"), 503, {"retry-after": "1"})


def _disconnected(_request: Request, _problem: Exception) -> Response:
    return Response(status_code=499)  # is not sent


def _internal_error(_request: Request, error: Exception) -> Response:
    return JSONResponse(_error(f"{type(error).__name__}. {SEE_LOG}", "server_error"), 500)
