"""An ASGI app -> a web server on loopback, in a thread of its own, until the block ends.

Invariants: it listens on 127.0.0.1 only; a request must arrive in bounded time, and a connection that waits for one
gives way to a newer connection, so that nobody keeps others out by holding connections open; when the block has ended,
nothing listens, no connection is open, and no task or thread of it is left. It runs in a thread because the main thread
handles Ctrl-C and watches the other processes.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from marft_bridge.common.errors import BridgeError

ADDRESS = "127.0.0.1"
KEEP_ALIVE_S = 75  # longer than clients keep a connection, so that they do not reuse one that is just being closed
_DESCRIPTORS_PER_CONNECTION = 2  # the client's, and the one to who answers
_OTHER_DESCRIPTORS = 128  # of the rest of the process

Lifespan = Callable[[int], AbstractAsyncContextManager[ASGIApp]]
"""The port -> the app. Entered before serving and left after it, on the server's own event loop."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on the load of a server."""

    connections: int  # open at once; a further one takes the place of one that waits, or gets 503 where none does
    grace_s: int  # seconds that responses under way may take when the server is stopped
    header_bytes: int = 64 << 10  # size of a request's headers
    head_s: float = 10.0  # seconds in which a request's head must have come, from its first byte or the connection
    body_s: float = 60.0  # seconds in which its body must have come after that


class LoopbackServer:
    """A server that runs while its `with` block does.

    Args:
        title: what error messages call it.
        command: the command that it belongs to, for messages.
        error_class: class of the errors that it raises.
    """

    def __init__(
        self,
        lifespan: Lifespan,
        port: int,
        *,
        title: str,
        command: str,
        error_class: type[BridgeError],
        limits: Limits,
    ) -> None:
        """Binds `port`, or a free one for 0. Raises `error_class` when the port is taken."""
        self._lifespan, self._title, self._error_class, self._limits = lifespan, title, error_class, limits
        self._socket = _port_to_socket(port, command, error_class)
        self.port = int(self._socket.getsockname()[1])
        self._ready = threading.Event()
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=title, daemon=True)

    @property
    def url(self) -> str:
        """Address of the server, without a path."""
        return f"http://{ADDRESS}:{self.port}"

    @property
    def is_stopping(self) -> bool:
        """Whether the block has ended: a response that would go on for ever should end now."""
        return self._stopping.is_set()

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        self.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()

    def check(self) -> None:
        """Raises `error_class` when the server has failed or ended."""
        if self._failure is not None:
            raise self._error_class(f"{self._title} failed: {type(self._failure).__name__}: {self._failure}")
        if not self._thread.is_alive():
            raise self._error_class(f"{self._title} ended")

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - `check` raises it in the thread that watches
            self._failure = error
        finally:
            self._ready.set()
            self._socket.close()

    async def _serve(self) -> None:
        async with self._lifespan(self.port) as app:
            limits = self._limits
            connection_count = min(limits.connections, _free_descriptors() // _DESCRIPTORS_PER_CONNECTION)
            config = uvicorn.Config(
                app,
                http=_connection_class(limits, connection_count),
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=limits.header_bytes,
                limit_concurrency=connection_count + 1,  # of which uvicorn refuses the last
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=limits.grace_s,
            )
            server = _Server(config, self._ready, self._stopping)
            await server.serve(sockets=[self._socket])
            # Responses that were cut off must run their cleanup before the lifespan closes what they use.
            await asyncio.gather(*server.server_state.tasks, return_exceptions=True)


class _BoundedConnection(H11Protocol):
    """uvicorn's connection, closed where a request takes too long to arrive, or a newer connection needs its place."""

    limits: Limits
    max_connections: int
    waiting: dict[_BoundedConnection, None]  # the connections without a request, the one that has waited longest first
    _arrival_timer: asyncio.TimerHandle | None = None
    _is_body_timed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Takes the place of the connection that has waited longest where too many are open."""
        super().connection_made(transport)
        self.waiting[self] = None
        self._limit_arrival(self.limits.head_s)
        longest_waiting = next(iter(self.waiting))
        if len(self.connections) > self.max_connections and longest_waiting is not self:
            longest_waiting._drop()

    def data_received(self, data: bytes) -> None:
        """Reads what came, and sets the time for what is still to come."""
        super().data_received(data)
        self._note_state()

    def on_response_complete(self) -> None:
        """Waits for the next request."""
        super().on_response_complete()
        self._note_state()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        super().connection_lost(exc)
        self._end_arrival()
        self.waiting.pop(self, None)

    def _is_waiting(self) -> bool:
        cycle = cast("Any", self.cycle)  # None before the first request, which uvicorn's types do not say
        return cycle is None or bool(cycle.response_complete)

    def _note_state(self) -> None:
        if self not in self.connections:
            return
        if self._is_waiting():
            self.waiting.setdefault(self)
        else:
            self.waiting.pop(self, None)
        if self.conn.their_state is h11.SEND_BODY:
            if not self._is_body_timed:
                self._limit_arrival(self.limits.body_s)
                self._is_body_timed = True
        elif self.conn.their_state is not h11.IDLE or not self.conn.trailing_data[0]:
            self._end_arrival()  # the whole request is here, or nothing of the next
        elif self._arrival_timer is None:
            self._limit_arrival(self.limits.head_s)

    def _limit_arrival(self, seconds: float) -> None:
        self._end_arrival()
        self._arrival_timer = self.loop.call_later(seconds, self._drop)

    def _end_arrival(self) -> None:
        if self._arrival_timer is not None:
            self._arrival_timer.cancel()
        self._arrival_timer, self._is_body_timed = None, False

    def _drop(self) -> None:
        self.connections.discard(self)  # now, as the next connection may come before this one is seen to end
        self.waiting.pop(self, None)
        self.transport.abort()


def _connection_class(limits: Limits, max_connections: int) -> type[H11Protocol]:
    """The connections of one server."""

    class Connection(_BoundedConnection):
        pass

    Connection.limits, Connection.max_connections, Connection.waiting = limits, max_connections, {}
    return Connection


def _free_descriptors() -> int:
    """File descriptors that connections may take, by the limit of this process."""
    return max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_DESCRIPTORS, 2 * _DESCRIPTORS_PER_CONNECTION)


class _Server(uvicorn.Server):
    """uvicorn's server, which signals when it listens and stops on request."""

    def __init__(self, config: uvicorn.Config, ready: threading.Event, stopping: threading.Event) -> None:
        super().__init__(config)
        self._ready, self._stopping = ready, stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts as uvicorn does, then sets `ready`."""
        await super().startup(sockets)
        self._ready.set()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; returns whether the server should exit."""
        self.should_exit = self.should_exit or self._stopping.is_set()
        return await super().on_tick(counter)


def _port_to_socket(port: int, command: str, error_class: type[BridgeError]) -> socket.socket:
    """A socket bound to `port`, or to a free one for 0. Raises `error_class`, naming `command`, if it is taken."""
    bound_socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound_socket.bind((ADDRESS, port))
    except OSError as error:
        bound_socket.close()
        raise error_class(
            f"{command}: cannot listen on {ADDRESS}:{port}: {error.strerror}; choose another --port"
        ) from None
    return bound_socket
