"""What one client cannot take from others: threads, memory for bodies, and connections."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from ligerzoo.errors import quote

T = TypeVar("T")


class Threads:
    """Runs functions of one kind, each in a new thread, which does not delay the end of the process.

    Args:
        limit: largest number of threads at a time; others wait. A thread that runs Python keeps the interpreter lock
            for 5 ms, so that with a hundred of them the event loop would get it every half a second.
    """

    def __init__(self, limit: int) -> None:
        self._free = asyncio.Semaphore(limit)

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Returns the result of a function."""
        async with self._free:
            return await _in_thread(partial(function, *arguments))


async def _in_thread(function: Callable[[], T]) -> T:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def resolve(outcome: Callable[[], None]) -> None:
        if not future.done():  # cancelled
            outcome()

    def run() -> None:
        try:
            outcome = partial(future.set_result, function())
        except Exception as error:
            outcome = partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(resolve, outcome)

    threading.Thread(target=run, daemon=True).start()
    return await future


BODY_SECONDS = 60.0
"""Time in which a body must arrive."""

MAX_VALUES = 500_000
"""Values in the JSON of a body. Parsing more would stop all threads for half a second."""

_CLOSE = {"connection": "close"}
_VALUES = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[,\[{]', re.DOTALL)  # a text, or what begins a value


class Bodies:
    """The bodies that arrive or are used. Together they hold a limited number of bytes.

    When they exceed it, the largest one that has not arrived is refused. So neither large bodies nor unfinished ones
    keep others from sending theirs.

    Args:
        max_body: largest size of a body in bytes.
        max_total: largest size of all bodies together.
    """

    def __init__(self, max_body: int, max_total: int) -> None:
        self._max_body, self._max_total = max_body, max_total
        self._sizes: dict[object, int] = {}
        self._arriving: dict[object, asyncio.Timeout] = {}
        self._is_closed = False

    @asynccontextmanager
    async def receive(self, request: Request) -> AsyncIterator[bytes]:
        """Reads a body, whose bytes count within `with`.

        Raises:
            HTTPException: the content type is not JSON (a web page can send others to any server without asking it),
                the body is too large or takes too long, all bodies are too large, or the server shuts down.
        """
        content_type = request.headers.get("content-type", "")
        if content_type.partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, f"content-type: got {quote(content_type)}; expected 'application/json'")
        key = object()
        try:
            yield await self._read(request, key)
        finally:
            self._sizes.pop(key, None)

    def close(self) -> None:
        """Refuses the bodies that have not arrived, and later ones."""
        self._is_closed = True
        for key in list(self._arriving):
            self._refuse(key)

    async def _read(self, request: Request, key: object) -> bytes:
        try:
            async with asyncio.timeout(BODY_SECONDS) as timeout:
                self._arriving[key] = timeout
                return await self._collect(request, key)
        except TimeoutError:
            if key in self._arriving:
                raise HTTPException(408, f"body: not received within {BODY_SECONDS:g} seconds", _CLOSE) from None
            reason = "the server is shutting down" if self._is_closed else "too many bodies arrive; try again later"
            raise HTTPException(503, reason, {**_CLOSE, "retry-after": "1"}) from None
        finally:
            self._arriving.pop(key, None)

    async def _collect(self, request: Request, key: object) -> bytes:
        """Reads a body. Up to `max_body` further bytes are dropped: many clients read the response only afterwards."""
        if self._is_closed:
            self._refuse(key)
        body, size = bytearray(), 0
        async for part in request.stream():
            if key not in self._arriving:
                raise TimeoutError
            size += len(part)
            if size <= self._max_body:
                body += part
                self._sizes[key] = size
                if sum(self._sizes.values()) > self._max_total:
                    self._refuse(max(self._arriving, key=lambda other: self._sizes.get(other, 0)))
            elif size > 2 * self._max_body:
                break
        if size > self._max_body:
            raise HTTPException(413, f"body: too large; expected at most {self._max_body:,} bytes", _CLOSE)
        return bytes(body)

    def _refuse(self, key: object) -> None:
        self._sizes.pop(key, None)
        self._arriving.pop(key).reschedule(0)


def check_values(body: bytes) -> None:
    """Raises HTTPException if a body has more than MAX_VALUES values, roughly counted."""
    if sum(map(body.count, (b",", b"[", b"{"))) <= MAX_VALUES:
        return
    count = 0
    for match in _VALUES.finditer(body):
        count += body[match.start()] != ord('"')
        if count > MAX_VALUES:
            raise HTTPException(413, f"body: too many values; expected at most {MAX_VALUES:,}. Send several requests.")


MAX_CONNECTIONS = 512
"""Open connections. Beyond them, the one that has waited for a request for the longest time is closed."""

HEADER_SECONDS = 15.0
"""Time in which the headers of a request must arrive, from the connection or from their first byte on."""

WRITE_SECONDS = 30.0
"""Time for which a client may stop reading a response."""


class Connection(H11Protocol):
    """uvicorn's protocol, with limits of time and of the number of connections.

    uvicorn itself closes connections that send no next request within 5 seconds.
    """

    _waits_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for a request."""
        super().connection_made(transport)
        self._waits_since = self.loop.time()
        self._headers, self._reader = _Wait(transport), _Wait(transport)
        self._headers.begin(HEADER_SECONDS)
        if len(self.connections) > MAX_CONNECTIONS:
            connections = [other for other in self.connections if isinstance(other, Connection)]
            idle = [other for other in connections if not other.has_request]
            min(idle, key=lambda other: other._waits_since).transport.abort()  # at least the new one is idle

    @property
    def has_request(self) -> bool:
        """Whether the headers of a request have arrived, and its response is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Ends the wait, or begins the one for the rest of the headers."""
        super().data_received(data)
        if self.has_request:
            self._headers.end()
        else:
            self._headers.begin(HEADER_SECONDS)

    def on_response_complete(self) -> None:
        """Begins to wait for the next request."""
        self._waits_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Begins to wait until the client reads."""
        super().pause_writing()
        self._reader.begin(WRITE_SECONDS)

    def resume_writing(self) -> None:
        """Ends the wait."""
        super().resume_writing()
        self._reader.end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends all waits."""
        super().connection_lost(exc)
        self._headers.end()
        self._reader.end()


class _Wait:
    """Something for which a connection waits, and which closes it if it takes too long."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, seconds: float) -> None:
        """Begins to wait, unless it does so already."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._transport.abort)

    def end(self) -> None:
        """Ends the wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
