"""Reads the bodies of requests, within limits of size, time and memory."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.exceptions import HTTPException
from starlette.requests import Request

from ligerzoo.errors import quote

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
