"""A request to the model server -> the same request, if it has the server's key; inside vLLM's server process.

vLLM itself asks for the key below /v1 and a few other paths only, and mounts more, such as POST /adapters, which loads
adapters and replaces them. Its routes to put the engine to sleep exist in its development mode only, beside others that
run any method of the engine; two of ours stand in for them. Invariant: without the key no route but /health is reached,
whatever vLLM mounts. vLLM loads the class by its name (`--middleware`).
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

SLEEP_PATH = "/v1/marft/sleep"
WAKE_PATH = "/v1/marft/wake"
_OPEN_PATH = "/health"
_LEVEL = 1  # weights and adapters go to main memory, the cache is given up; 2 would lose the weights

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class KeyGuard:
    """What stands in front of vLLM's application (ASGI); the key is in VLLM_API_KEY, as vLLM has it."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        key = os.environ.get("VLLM_API_KEY")
        if not key:
            raise RuntimeError("marft_bridge's KeyGuard: VLLM_API_KEY is not set; it holds the server's key")
        self._app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on what has the key, and the server's own start and end; answers the two paths of sleep itself.

        A browser's question whether another page may ask (CORS) has no key; vLLM answers it before any route.
        """
        if scope["type"] == "lifespan" or (scope["type"] == "http" and _is_open(scope)):
            await self._app(scope, receive, send)
        elif not secrets.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self._expected):
            await _refuse(scope, send)
        elif scope["type"] == "http" and scope["path"] in (SLEEP_PATH, WAKE_PATH):
            await _sleep_or_wake(scope, send)
        else:
            await self._app(scope, receive, send)


def _is_open(scope: Scope) -> bool:
    if scope["method"] == "OPTIONS":
        return {b"origin", b"access-control-request-method"} <= {name for name, _ in scope["headers"]}
    return bool(scope["path"] == _OPEN_PATH)


async def _refuse(scope: Scope, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})  # before it is accepted: the client reads 403
    else:
        await _answer(send, 401, "Unauthorized")


async def _sleep_or_wake(scope: Scope, send: Send) -> None:
    if scope["method"] != "POST":
        await _answer(send, 405, "only POST")
        return
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
