"""Requests -> the engine, over kept-alive connections; any failure on the way -> `EngineFailed` with a status.

Each request has a connection to itself, the one that was free last. One httpx pool for all would be less code, but it
looks through all of its connections at the start and the end of each request: at 32 in flight that took half of the
proxy's time. Invariants: only this module has the engine's key, and no proxy of the environment sees it; a request is
counted as under way until its answer is read, whoever sent it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from marft_bridge.model_calls.call_monitor import AsyncWatchedTransport, CallsUnderWay

SILENCE_TIMEOUT_S = 600.0  # without a byte from the engine, then the request has failed; as in OpenAI's own client
CONNECT_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 2.0  # vLLM closes after 5 s; a request that is sent while it does would fail
MAX_FREE_CONNECTIONS = 256  # idle connections, kept for the next requests
MAX_ANSWER_BYTES = 64 << 20  # bytes of an answer in one piece


class EngineFailed(Exception):  # noqa: N818 - an answer to the client, not a fault of ours
    """The engine was not reached or fell silent; `status` and `code` go to the client."""

    def __init__(self, status: int, code: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.code = status, code


async def read_answer(response: httpx.Response) -> bytes:
    """The whole body as it was sent, never decompressed. Raises EngineFailed beyond MAX_ANSWER_BYTES."""
    content = bytearray()
    async for piece in response.aiter_raw():
        content += piece
        if len(content) > MAX_ANSWER_BYTES:
            reason = f"the model server sent an answer of more than {MAX_ANSWER_BYTES >> 20} MiB"
            raise EngineFailed(502, "engine_answer", reason)
    return bytes(content)


class Upstream:
    """The engine's HTTP interface, for the one event loop that it was made on."""

    def __init__(self, base_url: str, api_key: str | None, calls: CallsUnderWay | None = None) -> None:
        """`base_url` ends with /v1; None sends no key; `calls` is told of every request and of all that is answered."""
        self._calls = calls if calls is not None else CallsUnderWay()
        self._address = base_url.removesuffix("/v1")
        self._headers = {
            "Host": httpx.URL(base_url).netloc.decode(),
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
            **({"Authorization": f"Bearer {api_key}"} if api_key is not None else {}),
        }
        self._timeout = httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S).as_dict()
        self._free: list[httpx.AsyncHTTPTransport] = []

    async def aclose(self) -> None:
        """Closes the connections that are free; the others close when their requests end."""
        free, self._free = self._free, []
        await asyncio.gather(*(connection.aclose() for connection in free))

    @asynccontextmanager
    async def post(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[httpx.Response]:
        """The engine's answer, its body still to come; leaving the block early has the engine stop.

        Raises:
            EngineFailed: also from inside the block, while the body is read.
        """
        content = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        request = httpx.Request(
            "POST",
            self._address + path,
            headers=self._headers,
            content=content,
            extensions={"timeout": self._timeout},
        )
        connection, is_reusable = self._free.pop() if self._free else self._open_connection(), False
        try:
            response = await connection.handle_async_request(request)
            try:
                yield response
            finally:
                await response.aclose()
            is_reusable = len(self._free) < MAX_FREE_CONNECTIONS
        except httpx.TimeoutException as error:
            reason = f"the model server fell silent ({type(error).__name__})"
            raise EngineFailed(504, "engine_timeout", reason) from error
        except httpx.HTTPError as error:
            reason = f"the model server failed ({type(error).__name__})"
            raise EngineFailed(502, "engine_unreachable", reason) from error
        finally:
            if is_reusable:
                self._free.append(connection)
            else:
                await connection.aclose()

    def _open_connection(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=IDLE_TIMEOUT_S)
        return AsyncWatchedTransport(self._calls, limits)
