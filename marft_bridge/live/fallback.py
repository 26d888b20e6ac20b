"""A local answer on its way to the client -> the same answer, or the reason why a hosted model is to answer instead.

An answer is held until it is known to be good: a stream that declares no format and has no judge until its first
piece, any other to its end. Reasons: the engine failed (`failure`), it took too long (`time`), the answer has not the
format that the request declares (`format`): tools with schemas, JSON, JSON of a schema; or a judge scores it too low
(`doubt`), or gives no score (`judge_...`) where the options say that this is a reason. Invariant: nothing of an answer
that is replaced reaches the client, and one that has begun to is not replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from starlette.types import Message, Send

from marft_bridge.config.fallback import FallbackOptions
from marft_bridge.live.answer_judge import AnswerJudge, Unjudged, UnjudgedReason
from marft_bridge.live.calls import LiveRequest
from marft_bridge.live.upstream import Upstream
from marft_bridge.live.wire import CHAT, Answer
from marft_bridge.recording.format_check import DeclaredFormat, openai_message_fits, request_to_format

FallbackReason = Literal["failure", "time", "format", "doubt"] | UnjudgedReason


@dataclass(frozen=True, slots=True)
class FallbackKeys:
    """The keys of the addresses in `[fallback]`; None sends none."""

    hosted: str | None = None
    judge: str | None = None


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why an answer is to be replaced, and what that rests on, for the record."""

    reason: FallbackReason
    sentence: str


class Fallback:
    """The hosted models behind the local ones. For one event loop."""

    def __init__(self, options: FallbackOptions, keys: FallbackKeys) -> None:
        self.models, self.after_s = options.models, options.after_s
        self.upstream = Upstream(options.base_url.rstrip("/"), keys.hosted)
        self.judge = AnswerJudge(options.judge, keys.judge) if options.judge is not None else None

    async def aclose(self) -> None:
        """Closes the connections."""
        await self.upstream.aclose()
        if self.judge is not None:
            await self.judge.aclose()

    def hold(self, request: LiveRequest, send: Send) -> HeldAnswer:
        """What holds the local answer to a request on its way to `send`."""
        is_judged = self.judge is not None and request.node in self.judge.options.rubrics
        return HeldAnswer(send, request, self.after_s, judge=self.judge if is_judged else None)


class HeldAnswer:
    """The messages of one ASGI response, kept back until they may go."""

    def __init__(self, send: Send, request: LiveRequest, after_s: float, *, judge: AnswerJudge | None) -> None:
        self._send, self._request, self._after_s, self._judge = send, request, after_s, judge
        self._format: DeclaredFormat | None = request_to_format(request.body) if request.path == CHAT else None
        is_streamed = bool(request.body.get("stream"))
        self._ends_with_first_piece = is_streamed and self._format is None and judge is None
        self._held: list[Message] = []
        self._timeout: asyncio.Timeout | None = None
        self.is_released = False  # it was begun and can be no other any more
        self.is_late = False
        self.unjudged: Unjudged | None = None  # why the judge, once asked, gave no score

    @property
    def is_held_whole(self) -> bool:
        """Whether no piece goes out before the last."""
        return not self._ends_with_first_piece

    async def send(self, message: Message) -> None:
        """Keeps a message back, or sends it on once the answer is released."""
        if self.is_released:
            await self._send(message)
            return
        self._held.append(message)
        has_begun = message["type"] == "http.response.body" and self._held[0].get("status") == 200
        if self._ends_with_first_piece and has_begun:
            await self.release()

    async def release(self) -> None:
        """Sends on what was held, and lets the rest through."""
        self.is_released = True
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

    async def check(self, answer: Answer, error: str | None) -> Rejection | None:
        """Why the answer, which has ended, is to be replaced; None for one that is good, or has begun to go out."""
        if self.is_released:
            return None
        if self.is_late:
            return Rejection("time", f"no answer within {self._after_s:g} s")
        if error is not None:
            return Rejection("failure", error)
        if False in [openai_message_fits(self._format, message) for message in answer.messages.values()]:
            return Rejection("format", "not the format that the request declares")
        return None if self._judge is None else await self._ask(self._judge, answer)

    async def _ask(self, judge: AnswerJudge, answer: Answer) -> Rejection | None:
        score = await judge.score(self._request.node, self._request.body, answer)
        if isinstance(score, Unjudged):
            self.unjudged = score
            return Rejection(score.reason, score.sentence) if judge.options.unjudged == "hosted" else None
        below = judge.options.below
        return Rejection("doubt", f"the judge gave {score:g}, below {below:g}") if score < below else None
