"""Who may send requests: the names of the server, and its key."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Collection

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ligerzoo.errors import LigerzooError, quote

OPEN_PATHS = ("/health",)
"""Paths that need no key."""


class Access:
    """An application for the requests that may be answered.

    A web page whose name resolves to this machine (DNS rebinding) has the origin of the server for a browser. So the
    header `Host` must be an address, `localhost`, or one of the names of the server.

    Args:
        app: the application.
        hosts: names of the server, without port. `*.example.org` allows all names that end with `.example.org`, and `*`
            all names.
        api_key: what clients must send as `Authorization: Bearer KEY`. None for no key.

    Raises:
        LigerzooError: the key is empty, or cannot be a header.
    """

    def __init__(self, app: ASGIApp, *, hosts: Collection[str] = (), api_key: str | None = None) -> None:
        if api_key is not None and not (api_key and api_key.isascii() and api_key.isprintable() and " " not in api_key):
            expected = "one or more letters, digits and signs of ASCII, without spaces"
            raise LigerzooError("invalid value", where="api_key", expected=expected)
        self._app, self._hosts, self._key = app, [host.lower() for host in hosts], api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers the request, or refuses it."""
        connection = HTTPConnection(scope)
        if not self._has_name(host := connection.headers.get("host", "")):
            message = f"Host: not a name of this server; got {quote(host)}. The option --allowed-host adds names."
            response = _refusal(421, message, None)
        elif not (scope["path"] in OPEN_PATHS or self._has_key(connection.headers.get("authorization", ""))):
            response = _refusal(401, "Authorization: not the API key of this server", "invalid_api_key")
            response.headers["www-authenticate"] = "Bearer"
        else:
            await self._app(scope, receive, send)
            return
        await response(scope, receive, send)

    def _has_name(self, host: str) -> bool:
        name = _without_port(host.lower())
        if name == "localhost" or _is_address(name):
            return True
        suffixes = (pattern[1:] for pattern in self._hosts if pattern.startswith("*"))
        return name != "" and (name in self._hosts or any(name.endswith(suffix) for suffix in suffixes))

    def _has_key(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        if self._key is None:
            return True
        is_equal = secrets.compare_digest(key.strip().encode(), self._key.encode())  # in constant time
        return scheme.lower() == "bearer" and is_equal


def names_of(host: str, *, is_local: bool) -> list[str]:
    """Returns the names of a server.

    Args:
        host: the name or address at which it listens.
        is_local: whether only programs on this machine can connect. Otherwise the names of the machine are its, too.
    """
    return [host] if is_local else [host, socket.gethostname(), socket.getfqdn()]


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        name, port = host, "0"
    return name.removesuffix(".") if port.isdecimal() else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
    except ValueError:
        return False
    return True


def _refusal(status: int, message: str, code: str | None) -> JSONResponse:
    content = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": content}, status)
