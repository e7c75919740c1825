"""Listens on a socket and runs the application until Ctrl-C."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

import uvicorn
from starlette.types import ASGIApp

from ligerzoo.errors import LigerzooError
from ligerzoo.serve.engine_thread import ComputeThread
from ligerzoo.serve.limits import Bodies, Connection

GRACE = 5.0
"""Seconds that running requests have to finish after Ctrl-C."""


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket.

    Args:
        host: name or address.
        port: number of the port. 0 chooses a free one.

    Raises:
        LigerzooError: the address does not exist on this machine, or the port is in use.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        got, remedy = f"{host}, {port}: {error.strerror or error}", "Choose another port; --port 0 finds a free one."
        raise LigerzooError("cannot listen there", where="--host and --port", got=got, remedy=remedy) from error
    return listener


def url(listener: socket.socket) -> str:
    """Returns the base URL for clients."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def is_local(listener: socket.socket) -> bool:
    """Returns whether only programs on this machine can connect."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


class Server(uvicorn.Server):
    """Runs the application on a socket.

    After Ctrl-C, new connections and bodies that have not arrived are refused, and running requests have `GRACE`
    seconds to finish. Then they end with an error, or are cut off if the client does not read it. A second Ctrl-C ends
    the server at once.
    """

    def __init__(self, app: ASGIApp, engine: ComputeThread, bodies: Bodies, listener: socket.socket) -> None:
        # Log records go to the program's own logging configuration.
        config = uvicorn.Config(app, lifespan="off", http=Connection, ws="none", log_config=None, access_log=False)
        super().__init__(config)
        self._engine, self._bodies, self._listener = engine, bodies, listener

    def run_until_stopped(self) -> None:
        """Serves requests until Ctrl-C, which raises KeyboardInterrupt when all connections are closed."""
        self._engine.start()
        try:
            self.run([self._listener])
        finally:
            self._engine.stop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the connections."""
        self._bodies.close()
        loop = asyncio.get_running_loop()
        timers = [
            loop.call_later(GRACE, self._engine.abort, "the server is shutting down"),
            loop.call_later(GRACE + 0.5, self._cut_off),
        ]
        await super().shutdown(sockets)
        for timer in timers:
            timer.cancel()

    def _cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for task in list(self.server_state.tasks):
            task.cancel()
