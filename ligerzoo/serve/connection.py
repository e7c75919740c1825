"""One HTTP connection, which a client cannot hold without using it."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

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
