"""An ASGI app for a port -> a server on loopback, in a thread of its own, until the block ends.

Invariants: it listens on 127.0.0.1 only; when the block has ended, nothing listens and no thread of it is left. Why a
thread: the command's own takes Ctrl-C.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

import uvicorn
from starlette.types import ASGIApp

from marft_bridge.errors import ConfigError
from marft_bridge.loopback import SayingServer, port_to_socket

GRACE_S = 2  # for pages that are under way when it is stopped
KEEP_ALIVE_S = 75  # longer than a client keeps a connection, so that it does not reuse one that is just being closed
START_S = 60.0


class RunningView:
    """A server from the start of the block to its end."""

    def __init__(self, app_of: Callable[[int], ASGIApp], port: int) -> None:
        """Takes the port, 0 for a free one. Raises ConfigError when it is taken."""
        self._socket = port_to_socket(port, "view", ConfigError)
        self.port = int(self._socket.getsockname()[1])
        config = uvicorn.Config(
            app_of(self.port),
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=64,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
        self._ready = threading.Event()
        self._server = SayingServer(config, self._ready.set)
        self._thread = threading.Thread(target=self._run, name="view", daemon=True)

    def __enter__(self) -> RunningView:
        self._thread.start()
        self._ready.wait(START_S)
        self.check()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.should_exit = True
        self._thread.join()

    def check(self) -> None:
        """Raises ConfigError when it does not answer any more; what went wrong was printed."""
        if not self._thread.is_alive():
            raise ConfigError("view: the server ended")

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._ready.set()
            self._socket.close()
