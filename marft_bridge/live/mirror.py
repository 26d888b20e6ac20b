"""Answered requests -> the same requests to the candidate, in the shadow: recorded, never answering.

A request is mirrored after its answer has gone out, by a few workers with a short queue; what does not fit is dropped
and counted. Invariants: offering returns at once and raises nothing; whatever the candidate does (slow, garbage, an
error) is a number and a span. The engine's time is shared, so `AT_ONCE` bounds what mirroring takes of it.
"""

from __future__ import annotations

import asyncio
import logging
import time

from marft_bridge.live.calls import Asked, Call, LiveRecorder
from marft_bridge.live.counts import LiveCounts
from marft_bridge.live.split import MIRRORED
from marft_bridge.live.teams import Team
from marft_bridge.live.upstream import EngineFailed, Upstream
from marft_bridge.live.wire import Answer, body_to_engine, body_to_whole

log = logging.getLogger("marft_bridge")

AT_ONCE = 4
WAITING = 64
LONGEST_S = 300.0


class Mirror:
    """The shadow of one team. For the event loop of the proxy."""

    def __init__(self, team: Team, upstream: Upstream, recorder: LiveRecorder, counts: LiveCounts) -> None:
        self._team, self._upstream, self._recorder = team, upstream, recorder
        self._all, self._counts = counts, counts.variants[MIRRORED]
        self._waiting: asyncio.Queue[Call] = asyncio.Queue(WAITING)

    @property
    def waiting(self) -> int:
        """Requests that were not sent yet."""
        return self._waiting.qsize()

    def offer(self, call: Call | None) -> None:
        """An answered call is to be mirrored, if there is room; one that could not be recorded is not."""
        if call is None:
            return
        try:
            self._waiting.put_nowait(call)
        except asyncio.QueueFull:
            self._all.dropped += 1

    async def work(self) -> None:
        """Mirrors until it is cancelled; what waits then is dropped."""
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(AT_ONCE):
                    workers.create_task(self._work())
        finally:
            self._all.dropped += self._waiting.qsize()

    async def _work(self) -> None:
        while True:
            await self._mirror(await self._waiting.get())

    async def _mirror(self, shadowed: Call) -> None:
        asked = shadowed.asked
        shadow = Asked(asked.path, asked.node, self._team, body_to_whole(asked.body), asked.sticky, shadowed)
        body, shown = body_to_engine(shadow.path, shadow.body, self._team.served[shadow.node])
        answer = Answer(shown)
        call, error, began = self._recorder.begin(shadow), "Cancelled: the proxy stopped", time.monotonic()
        self._counts.requests += 1
        self._counts.in_flight += 1
        failure: str | None = error
        try:
            async with asyncio.timeout(LONGEST_S), self._upstream.asked(shadow.path, body) as response:
                answer.whole_to_client(await response.aread())
                failure = _failure(response.status_code, answer)
        except (EngineFailed, TimeoutError) as failed:
            failure = f"{type(failed).__name__}: {failed}"
        except Exception as failed:
            failure = f"{type(failed).__name__}: mirroring failed"
            log.debug("mirroring failed", exc_info=failed)
        finally:
            self._counts.in_flight -= 1
            self._counts.errors += failure is not None
            if failure is None:
                self._counts.latency_s.append(time.monotonic() - began)
            self._recorder.end(call, answer, failure)


def _failure(status: int, answer: Answer) -> str | None:
    if status != 200:
        return f"HTTPStatus: {status}"
    return f"Unreadable: {answer.error}" if answer.error is not None else None
