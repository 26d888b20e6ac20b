"""Requests -> the engine, over kept connections; what goes wrong on the way -> one error with a status.

Invariant: the engine's key and address are known here only, and no proxy of the environment sees them.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

SILENCE_S = 600.0  # of the engine, after which a request has failed; what OpenAI's own client waits
CONNECT_S = 10.0


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
        self._client = httpx.AsyncClient(
            trust_env=False,
            headers={"Authorization": f"Bearer {api_key}", "Accept-Encoding": "identity"},
            timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
        )

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    @asynccontextmanager
    async def asked(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[httpx.Response]:
        """The engine's answer, its body still to come; leaving the block early has the engine stop.

        Raises:
            EngineFailed: also from inside the block, while the body is read.
        """
        content = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        request = self._client.build_request(
            "POST", self._address + path, content=content, headers={"Content-Type": "application/json"}
        )
        try:
            response = await self._client.send(request, stream=True)
            try:
                yield response
            finally:
                await response.aclose()
        except httpx.TimeoutException as error:
            raise EngineFailed(
                504, "engine_timeout", f"the model server fell silent ({type(error).__name__})"
            ) from error
        except httpx.HTTPError as error:
            raise EngineFailed(
                502, "engine_unreachable", f"the model server failed ({type(error).__name__})"
            ) from error
