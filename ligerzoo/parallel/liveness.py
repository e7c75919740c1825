"""Ends all processes of a run when one of them has died, also those that wait for its GPU in a kernel.

A process that waits in a collective of NCCL notices a dead one after minutes. So the main process has a connection to
each other one, which the system closes when either process dies, and checks every few seconds while it says nothing. A
thread waits for that: pure Python, which no kernel and no stopped process blocks.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import torch.distributed as dist

from ligerzoo.errors import LigerzooError
from ligerzoo.parallel.processes import failing_together, gather_objects

GRACE = 10.0
"""Seconds in which a process may end by itself, with its own error, before it is ended."""
_CONNECTING = 60.0
_GOODBYE = b"."
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A host that has lost its power or its network is noticed after 35 seconds."""


@contextmanager
def ending_together() -> Iterator[None]:
    """In this context, the processes of a run end within seconds if one of them has died. All must enter it.

    Raises:
        LigerzooError: A process has died, and a collective has failed because of it; or the processes cannot connect.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    watch = _Watch(_connections())
    try:
        yield
    except (LigerzooError, RuntimeError) as error:
        if of_collective := "gloo" in f"{error} {error.__cause__}":  # which often fails first
            watch.has_lost.wait(1.0)
        watch.stop()
        if watch.lost is None or not of_collective:
            raise
        raise watch.error() from error
    except BaseException:
        watch.stop()
        raise
    else:
        watch.stop(_GOODBYE)


class _Watch:
    """Waits in a thread for the end of a connection without a goodbye.

    Args:
        connections: to other processes, by rank.

    Attributes:
        lost: the rank of a process that has died, or None.
        has_lost: set with `lost`.
    """

    def __init__(self, connections: Mapping[int, socket.socket]) -> None:
        self._connections, self._stopped, self.has_lost = connections, threading.Event(), threading.Event()
        self.lost: int | None = None
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, -1)
        for rank, connection in connections.items():
            self._selector.register(connection, selectors.EVENT_READ, rank)
        self._thread = threading.Thread(target=self._run, name="ligerzoo-liveness")
        self._thread.start()

    def stop(self, message: bytes = b"") -> None:
        """Ends the thread and the connections: with a goodbye, or as a process that dies."""
        self._stopped.set()
        self._wake.close()
        self._thread.join()
        for connection in self._connections.values():
            with suppress(OSError):
                connection.sendall(message)
            connection.close()
        self._woken.close()
        self._selector.close()

    def error(self) -> LigerzooError:
        """Returns the error of the processes that remain."""
        what = "a process of the run has died, so all end"
        remedy = "Its output says why. --resume continues from the newest checkpoint, on any number of processes."
        return LigerzooError(what, where=f"rank {self.lost}", remedy=remedy)

    def _run(self) -> None:
        while (lost := self._wait()) is None:
            pass
        if lost < 0:
            return
        self.lost = lost
        for connection in self._connections.values():  # the main process informs all others
            with suppress(OSError):
                connection.sendall(b"%d\n" % lost)
        self.has_lost.set()
        if not self._stopped.wait(GRACE):
            print(f"ligerzoo: error: {self.error()}", file=sys.stderr, flush=True)
            os._exit(1)

    def _wait(self) -> int | None:
        """Returns the rank of a process that has died, -1 to end the thread, or None after a goodbye."""
        key = self._selector.select()[0][0]
        if key.data < 0:
            return -1
        connection = self._connections[key.data]
        try:
            message = connection.recv(16)
        except OSError:
            message = b""
        if message == _GOODBYE:
            self._selector.unregister(connection)
            return None
        rank = message.strip()
        return int(rank) if rank.isdigit() else int(key.data)


def _connections() -> dict[int, socket.socket]:
    """Returns a connection to each other process in the main process, and to the main process in the others."""
    rank, hosts = dist.get_rank(), gather_objects(socket.gethostname())
    is_one_host = len(set(hosts)) == 1
    address = "127.0.0.1" if is_one_host else os.environ.get("MASTER_ADDR", hosts[0])
    found: dict[int, socket.socket] = {}
    with socket.socket() as listener:
        if rank == 0:
            listener.bind((address if is_one_host else "", 0))
            listener.listen(len(hosts))
        port = listener.getsockname()[1] if rank == 0 else 0
        port, token = gather_objects((port, secrets.token_bytes(16)))[0]
        with failing_together("connecting the processes"):
            if rank == 0:
                listener.settimeout(_CONNECTING)
                while len(found) < len(hosts) - 1:
                    connection = listener.accept()[0]
                    connection.settimeout(_CONNECTING)
                    greeting = _received(connection, 20)
                    if secrets.compare_digest(greeting[:16], token):
                        found[int.from_bytes(greeting[16:], "big")] = connection
                    else:
                        connection.close()
            else:
                found[0] = socket.create_connection((address, port), _CONNECTING)
                found[0].sendall(token + rank.to_bytes(4, "big"))
    for connection in found.values():
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # Linux
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return found


def _received(connection: socket.socket, length: int) -> bytes:
    """Returns bytes of this length, or fewer if the other side closes the connection."""
    data = b""
    while len(data) < length and (more := connection.recv(length - len(data))):
        data += more
    return data
