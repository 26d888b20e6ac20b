"""Requests to put the engine to sleep and to wake it -> the engine's own calls, inside vLLM's server process.

vLLM has such routes in its development mode only, where they and others, which run any method of the engine, ask for no
key. Invariant: without the server's key nothing sleeps. vLLM loads the class by its name (`--middleware`).
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

SLEEP_PATH = "/v1/marft/sleep"
WAKE_PATH = "/v1/marft/wake"
_LEVEL = 1  # weights and adapters go to main memory, the cache is given up; 2 would lose the weights

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class SleepRoute:
    """Two routes in front of vLLM's application (ASGI)."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers the two paths, and passes on everything else."""
        if scope["type"] != "http" or scope["path"] not in (SLEEP_PATH, WAKE_PATH):
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if not secrets.compare_digest(given, self._expected):
            await _answer(send, 401, "Unauthorized")
        elif scope["method"] != "POST":
            await _answer(send, 405, "only POST")
        else:
            engine = scope["app"].state.engine_client
            if scope["path"] == SLEEP_PATH:
                await engine.sleep(_LEVEL, "wait")  # for calls under way
            else:
                await engine.wake_up()
            await _answer(send, 200, None)


async def _answer(send: Send, status: int, problem: str | None) -> None:
    content = {} if problem is None else {"error": {"message": problem}}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})
