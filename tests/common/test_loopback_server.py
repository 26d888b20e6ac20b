"""Owns: nobody keeps others out of a server of ours by holding connections open.

- 2,000 connections without a request do not keep out a user, nor end the requests under way.
- A head or a body that does not arrive in time ends the connection, however it is dripped; an answer may take long.
- The receiver of traces, which is no LoopbackServer, is held to the same in tests/ingest/test_ingest_receiver.py.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send
from support.idle_sockets import open_idle_sockets

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.loopback_server import Limits, LoopbackServer
from marft_bridge.live import proxy_server
from marft_bridge.view import web

SMALL = Limits(connections=3, grace_s=1, head_s=0.4, body_s=0.8)


UNDER_WAY, MAY_END = threading.Semaphore(0), threading.Event()


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """`/slow` ends when it may; a body is read to its end, other than for `/unread`."""
    if scope["path"] == "/slow":
        UNDER_WAY.release()
        while not MAY_END.is_set():
            await asyncio.sleep(0.01)
    while scope["path"] != "/unread":
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture(autouse=True)
def nothing_may_end() -> None:
    MAY_END.clear()


@contextmanager
def serving(limits: Limits) -> Iterator[LoopbackServer]:
    @asynccontextmanager
    async def lifespan(_port: int) -> AsyncIterator[ASGIApp]:
        yield answer

    with LoopbackServer(
        lifespan, 0, title="the server", command="test", error_class=ConfigError, limits=limits
    ) as server:
        yield server


def get(server: LoopbackServer, path: str = "/") -> int:
    return httpx.get(f"{server.url}{path}", timeout=60, trust_env=False).status_code


def seconds_until_closed(server: LoopbackServer, first: bytes, drip: bytes) -> float:
    """How long a connection lasts that sends `first`, and then `drip` again and again, for a minute at most."""
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection, suppress(OSError):
        connection.sendall(first)
        while drip and time.monotonic() - began < 60:
            connection.sendall(drip)
            time.sleep(0.02)
        connection.recv(1)
    return time.monotonic() - began


@pytest.mark.parametrize("limits", [web.LIMITS, proxy_server.LIMITS], ids=["view", "live"])
def test_two_thousand_idle_sockets_do_not_keep_out_a_user(limits: Limits) -> None:
    with serving(limits) as server, open_idle_sockets(server.port, 2_000):
        assert [get(server) for _ in range(3)] == [200] * 3


def test_connections_fit_into_the_descriptors_of_the_process() -> None:
    """1,024 descriptors, as most systems give, cannot hold 1,024 connections."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serving(replace(SMALL, connections=1_000_000)) as roomy, open_idle_sockets(roomy.port, 20):
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, before[1]))
        try:
            few = replace(SMALL, connections=1_000_000, head_s=20)
            with serving(few) as server, open_idle_sockets(server.port, 150):
                assert get(server) == 200
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_request_under_way_gives_no_place_to_another_connection() -> None:
    """With three under way, a fourth connection gets 503; when they are done, their answers are whole."""
    with serving(SMALL) as server:
        statuses: list[int] = []
        threads = [threading.Thread(target=lambda: statuses.append(get(server, "/slow"))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in threads:
            UNDER_WAY.acquire()
        assert get(server) == 503
        with open_idle_sockets(server.port, 10):
            MAY_END.set()
            for thread in threads:
                thread.join()
        assert statuses == [200] * 3
        assert get(server) == 200


def test_the_connection_that_has_waited_longest_gives_way() -> None:
    with serving(replace(SMALL, head_s=20)) as server, open_idle_sockets(server.port, 4) as connections:
        first, *later = connections
        with suppress(ConnectionResetError):
            assert first.recv(1) == b""
        for connection in later:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize(
    ("first", "drip", "limit_s"),
    [
        (b"", b"", 0.4),
        (b"GET / HTTP/1.1\r\nX: ", b"y", 0.4),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n", b"y", 0.8),
        (b"POST /unread HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n", b"y", 0.8),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\nX: ", b"y", 0.4),
    ],
    ids=["nothing", "a head", "a body", "a body that nobody reads", "a second head"],
)
def test_what_does_not_arrive_in_time_ends_the_connection(first: bytes, drip: bytes, limit_s: float) -> None:
    with serving(SMALL) as server:
        assert limit_s - 0.1 <= seconds_until_closed(server, first, drip) < 50


def test_an_answer_may_take_longer_than_its_request() -> None:
    with serving(SMALL) as server, httpx.Client(trust_env=False, timeout=20) as client:
        threading.Timer(1.5, MAY_END.set).start()
        assert client.post(f"{server.url}/slow", content=b"x" * 100_000).status_code == 200
        time.sleep(0.6)  # an answered connection may wait longer than a head may take
        assert client.get(server.url).status_code == 200
