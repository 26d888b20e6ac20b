"""A local answer on its way to the client -> the same answer, or the reason why a hosted model is to answer instead.

An answer is held until it is known to be good: a stream whose request declares no format until its first piece, any
other to its end. Reasons: the engine failed (`failure`), it took too long (`time`), or the answer has not the format
that the request declares (`format`): tools with schemas, JSON, JSON of a schema. Invariant: nothing of an answer that
is replaced reaches the client, and one that has begun to is not replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

from starlette.types import Message, Send

from marft_bridge.config.fallback import FallbackOptions
from marft_bridge.live.upstream import Upstream
from marft_bridge.live.wire import CHAT, Answer
from marft_bridge.recording.format_check import DeclaredFormat, openai_message_fits, request_to_format

FallbackReason = Literal["failure", "time", "format"]


class Fallback:
    """The hosted models behind the local ones. For one event loop."""

    def __init__(self, options: FallbackOptions, api_key: str | None) -> None:
        self.models, self.after_s = options.models, options.after_s
        self.upstream = Upstream(options.base_url.rstrip("/"), api_key)

    def hold(self, path: str, body: Mapping[str, Any], send: Send) -> HeldAnswer:
        """What holds the local answer to a request on its way to `send`."""
        declared_format = request_to_format(body) if path == CHAT else None
        return HeldAnswer(send, self.after_s, declared_format, is_streamed=bool(body.get("stream")))


class HeldAnswer:
    """The messages of one ASGI response, kept back until they may go."""

    def __init__(
        self, send: Send, after_s: float, declared_format: DeclaredFormat | None, *, is_streamed: bool
    ) -> None:
        self._send, self._after_s, self._format = send, after_s, declared_format
        self._ends_with_first_piece = is_streamed and declared_format is None
        self._held: list[Message] = []
        self._is_good = False  # it was begun and can be no other any more
        self._timeout: asyncio.Timeout | None = None
        self.is_late = False

    @property
    def is_held_whole(self) -> bool:
        """Whether no piece goes out before the last."""
        return not self._ends_with_first_piece

    async def send(self, message: Message) -> None:
        """Keeps a message back, or sends it on once the answer is released."""
        if self._is_good:
            await self._send(message)
            return
        self._held.append(message)
        has_begun = message["type"] == "http.response.body" and self._held[0].get("status") == 200
        if self._ends_with_first_piece and has_begun:
            await self.release()

    async def release(self) -> None:
        """Sends on what was held, and lets the rest through."""
        self._is_good = True
        if self._timeout is not None:
            self._timeout.reschedule(None)
        held, self._held = self._held, []
        for message in held:
            await self._send(message)

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """Ends the block, quietly and with `is_late`, where the answer is not released in time."""
        self._timeout = timeout = asyncio.timeout(self._after_s)
        try:
            async with timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            self.is_late = True
        finally:
            self._timeout = None

    def rejection(self, answer: Answer, error: str | None) -> FallbackReason | None:
        """Why the answer, which has ended, is to be replaced; None for one that is good, or has begun to go out."""
        if self._is_good:
            return None
        if self.is_late:
            return "time"
        if error is not None:
            return "failure"
        fits = [openai_message_fits(self._format, message) for message in answer.messages.values()]
        return "format" if False in fits else None

    def rejection_text(self, error: str | None) -> str:
        """What a rejection rests on, for the record."""
        if self.is_late:
            return f"no answer within {self._after_s:g} s"
        return error or "not the format that the request declares"
