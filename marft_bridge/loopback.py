"""A port -> a socket on loopback that is this process's, and a server that says when it listens on it.

Invariant: nothing here is reachable from another machine. It knows no routes and no threads.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn

from marft_bridge.errors import BridgeError

ADDRESS = "127.0.0.1"


class SayingServer(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._say_started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, and then says so."""
        await super().startup(sockets)
        self._say_started()


def port_to_socket(port: int, command: str, refusal: type[BridgeError]) -> socket.socket:
    """A bound socket on `port`, 0 for a free one. Raises `refusal`, in the name of `command`, when it is taken."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((ADDRESS, port))
    except OSError as error:
        bound.close()
        raise refusal(
            f"{command}: cannot listen on {ADDRESS}:{port}: {error.strerror}; choose another --port"
        ) from None
    return bound
