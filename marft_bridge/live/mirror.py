"""Answered requests -> the same requests to the candidate, whose answers are recorded and never sent to a client.

A request is mirrored after its answer has been sent, by a few workers with a short queue; what does not fit is dropped
and counted. Invariants: `offer` returns at once and raises nothing; whatever the candidate does (slow, garbage, an
error) ends as a count and a span. The engine is shared, so `WORKERS` bounds how much of it mirroring takes.
"""

from __future__ import annotations

import asyncio
import logging
import time

from marft_bridge.live.calls import Call, LiveRecorder, LiveRequest
from marft_bridge.live.counts import LiveCounts
from marft_bridge.live.split import MIRRORED
from marft_bridge.live.teams import Team
from marft_bridge.live.upstream import EngineFailed, Upstream, read_answer
from marft_bridge.live.wire import Answer, body_to_engine, body_to_unstreamed

log = logging.getLogger("marft_bridge")

WORKERS = 4  # mirrored requests in flight
MAX_WAITING = 64  # requests in the queue
TIMEOUT_S = 300.0  # of one mirrored request


class Mirror:
    """Mirrors requests to one team. For the event loop of the proxy."""

    def __init__(self, team: Team, upstream: Upstream, recorder: LiveRecorder, counts: LiveCounts) -> None:
        self._team, self._upstream, self._recorder = team, upstream, recorder
        self._live_counts, self._mirror_counts = counts, counts.variants[MIRRORED]
        self._waiting: asyncio.Queue[Call] = asyncio.Queue(MAX_WAITING)

    @property
    def waiting(self) -> int:
        """The number of requests in the queue."""
        return self._waiting.qsize()

    def offer(self, call: Call | None) -> None:
        """Queues an answered call, if there is room; None, a call that could not be recorded, is ignored."""
        if call is None:
            return
        try:
            self._waiting.put_nowait(call)
        except asyncio.QueueFull:
            self._live_counts.dropped += 1

    async def work(self) -> None:
        """Mirrors until it is cancelled; what waits then is dropped and counted."""
        try:
            async with asyncio.TaskGroup() as task_group:
                for _ in range(WORKERS):
                    task_group.create_task(self._work())
        finally:
            self._live_counts.dropped += self._waiting.qsize()

    async def _work(self) -> None:
        while True:
            await self._mirror(await self._waiting.get())

    async def _mirror(self, mirrored_call: Call) -> None:
        request = mirrored_call.request
        shadow_request = LiveRequest(
            request.path,
            request.node,
            self._team,
            body=body_to_unstreamed(request.body),
            identity=request.identity,
            mirrored_call=mirrored_call,
        )
        body, answer_options = body_to_engine(
            shadow_request.path, shadow_request.body, self._team.served_names[shadow_request.node]
        )
        answer = Answer(answer_options)
        shadow_call, began = self._recorder.begin(shadow_request), time.monotonic()
        self._mirror_counts.requests += 1
        self._mirror_counts.in_flight += 1
        failure: str | None = "Cancelled: the proxy stopped"
        try:
            async with asyncio.timeout(TIMEOUT_S), self._upstream.post(shadow_request.path, body) as response:
                answer.body_to_client(await read_answer(response))
                failure = _failure(response.status_code, answer)
        except (EngineFailed, TimeoutError) as error:
            failure = f"{type(error).__name__}: {error}"
        except Exception as error:
            failure = f"{type(error).__name__}: mirroring failed"
            log.debug("mirroring failed", exc_info=error)
        finally:
            self._mirror_counts.in_flight -= 1
            self._mirror_counts.errors += failure is not None
            if failure is None:
                self._mirror_counts.latency_s.append(time.monotonic() - began)
            self._recorder.end(shadow_call, answer, failure)


def _failure(status: int, answer: Answer) -> str | None:
    if status != 200:
        return f"HTTPStatus: {status}"
    return f"Unreadable: {answer.error}" if answer.error is not None else None
