"""Connections that say nothing, as many as one likes."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def open_idle_sockets(port: int, count: int) -> Iterator[list[socket.socket]]:
    """So many connections to a server of this machine, open until the block ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 3 * count and count > 1000:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(3 * count, hard), hard))
    connections: list[socket.socket] = []
    try:
        connections.extend(socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(count))
        yield connections
    finally:
        for connection in connections:
            connection.close()
