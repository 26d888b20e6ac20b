"""Requests -> the engine, over kept connections; what goes wrong on the way -> one error with a status.

Each request has a connection to itself, the one that was free last. One pool for all would be less to write, but
httpx's looks through all of its connections at the start and the end of each request: at 32 in flight that took half
of the proxy's time. Invariant: the engine's key and address are known here only, and no proxy of the environment sees
them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

SILENCE_S = 600.0  # of the engine, after which a request has failed; what OpenAI's own client waits
CONNECT_S = 10.0
IDLE_S = 2.0  # vLLM closes after 5 s; a request that is sent while it does would fail
KEPT = 256  # connections that wait for the next request


class EngineFailed(Exception):  # noqa: N818 - an answer to the client, not a fault of ours
    """The engine was not reached or fell silent; `status` is what the client is told."""

    def __init__(self, status: int, code: str, why: str) -> None:
        super().__init__(why)
        self.status, self.code = status, code


class Upstream:
    """The engine's HTTP interface, for the one event loop that it was made on."""

    def __init__(self, base_url: str, api_key: str) -> None:
        """`base_url` ends with /v1."""
        self._address = base_url.removesuffix("/v1")
        self._headers = {
            "Host": httpx.URL(base_url).netloc.decode(),
            "Authorization": f"Bearer {api_key}",
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
        }
        self._timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S).as_dict()
        self._free: list[httpx.AsyncHTTPTransport] = []
        self._certificates = httpx.create_ssl_context(trust_env=False)  # 30 ms, so once

    async def aclose(self) -> None:
        """Closes the connections that are free; the others close when their requests end."""
        free, self._free = self._free, []
        await asyncio.gather(*(connection.aclose() for connection in free))

    @asynccontextmanager
    async def asked(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[httpx.Response]:
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
        connection, kept = self._free.pop() if self._free else self._new(), False
        try:
            response = await connection.handle_async_request(request)
            try:
                yield response
            finally:
                await response.aclose()
            kept = len(self._free) < KEPT
        except httpx.TimeoutException as error:
            why = f"the model server fell silent ({type(error).__name__})"
            raise EngineFailed(504, "engine_timeout", why) from error
        except httpx.HTTPError as error:
            why = f"the model server failed ({type(error).__name__})"
            raise EngineFailed(502, "engine_unreachable", why) from error
        finally:
            if kept:
                self._free.append(connection)
            else:
                await connection.aclose()

    def _new(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=IDLE_S)
        return httpx.AsyncHTTPTransport(verify=self._certificates, trust_env=False, limits=limits)
