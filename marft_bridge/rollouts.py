"""Requests for episodes -> recorded, rewarded episodes, many in flight at a time.

An episode is finished when its spans and its rewards are synced to the journal; only then is it counted and
reported. Invariants: an episode that fails is a row with a reason, not the end of the run, and every attempt at it is
a row; a disk that refuses or a server that died ends the run, and loses nothing that was reported. It knows nothing of
DuckDB or torch.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from langchain_core.language_models import BaseChatModel
from langgraph.callbacks import GraphCallbackHandler, GraphInterruptEvent

from marft_bridge.app import App
from marft_bridge.episode import EpisodeContext, current_episode
from marft_bridge.errors import GraphError
from marft_bridge.fixed_answer import text_to_route
from marft_bridge.plan import EpisodeRequest, plan_episodes, task_order
from marft_bridge.recorded_graph import RecordedGraph
from marft_bridge.retries import Limits, pause_s
from marft_bridge.rewards.contract import Place, RunView
from marft_bridge.rewards.scoring import Score
from marft_bridge.routing import Route, Routing, current_routing
from marft_bridge.tally import Tally
from marft_bridge.tasks.reading import Task
from trace_store.assemble import Incomplete, Malformed, spans_to_trajectory

__all__ = ["Collector", "EpisodeRequest", "Job", "Tally", "plan_episodes", "run_jobs", "task_order"]

ATTEMPT = "attempt"  # tag of an episode that repeats one that failed: the number of the attempt, the first being 1
MAX_FAILED_SHARE = 0.5  # a run in which more fails than works is stopped: something is broken
MIN_FAILED = 8


class _Interrupts(GraphCallbackHandler):
    """Marks the episode of a run that stops to ask somebody: nobody answers, so its return is not known."""

    run_inline = True

    def __init__(self, episode: EpisodeContext) -> None:
        self._episode = episode

    def on_interrupt(self, event: GraphInterruptEvent) -> None:  # noqa: ARG002  LangGraph's signature
        """Comes before the end of the run is announced."""
        self._episode.cut_short = "interrupted"


RouteOf = Callable[[str, int, float | None], Route]
"""(node, version, temperature) -> where its calls go."""


class Collector:
    """Runs episodes of one recorded graph.

    Args:
        graph: the wrapped graph.
        app: the user's input function and reward.
        route_of: how a node at a version is reached.
        in_flight: episodes at the same time.
        timeout_s: after this an episode is cut short and recorded as truncated.
        check_server: raises when the model server has died; asked whenever an episode fails.
        came_back: whether the model server was started again since a time (monotonic seconds), now if need be; may
            take long and raises when it is lost. An attempt that this took away is repeated, whatever `limits` says.
        chat: the served model, which answers for the models of the nodes that have a route; None leaves every model
            of the graph as it is. Needs `redirect.redirected_models`.
        lineage: what every episode depends on, see `records.Episode`; tools are recorded with each.
        place: where rewards are computed.
        limits: tokens and attempts of one request.

    Raises:
        BridgeError: a reward of the app cannot work here.
    """

    def __init__(
        self,
        graph: RecordedGraph,
        app: App,
        route_of: RouteOf,
        in_flight: int,
        timeout_s: float,
        check_server: Callable[[], None] = lambda: None,
        chat: BaseChatModel | None = None,
        lineage: Mapping[str, str] | None = None,
        place: Place = Place(),  # noqa: B008 - frozen
        limits: Limits = Limits(),  # noqa: B008 - frozen
        came_back: Callable[[float], bool] = lambda _: False,
    ) -> None:
        self._limits, self._came_back = limits, came_back
        self._lineage = dict(lineage or {})
        self._scorer, self._place = app.scorer(), place
        self._graph, self._app, self._route_of, self._chat = graph, app, route_of, chat
        self._in_flight, self._timeout_s, self._check_server = in_flight, timeout_s, check_server

    async def requests_to_episodes(
        self, requests: Iterable[EpisodeRequest], on_finished: Callable[[Tally], None] = lambda _: None
    ) -> Tally:
        """Runs all requests, at most `in_flight` at a time, in their order as places become free.

        Raises:
            StoreError: the journal could not be written.
            ServingError: the model server died.
            GraphError: the reward is broken, or most episodes fail.
        """
        tally = Tally()
        jobs = ((self, request, tally) for request in requests)
        await run_jobs(jobs, self._in_flight, lambda _: on_finished(tally))
        return tally

    async def request_to_episode(self, request: EpisodeRequest, tally: Tally) -> None:
        """Runs one request, again where that may help, and counts its last attempt.

        Raises: as `requests_to_episodes`.
        """
        attempt = outages = 0
        while True:
            began = time.monotonic()
            if (error := await self._attempt(request, attempt, tally)) is None:
                break
            if await asyncio.to_thread(self._came_back, began):
                outages += 1
            elif self._limits.may_try_again(attempt - outages, error):
                await asyncio.sleep(pause_s(attempt - outages, request.seed))
            else:
                self._count(tally, "failed", _one_line(error))
                break
            tally.retried += 1
            attempt += 1
        if (broken := _most_fail(tally)) is not None:
            await self._wait_for_dying_server()
            raise GraphError(f"variant {request.variant!r}: {broken}" if request.variant is not None else broken)

    def _count(self, tally: Tally, outcome: str, reason: str | None) -> None:
        tally.finished += 1
        tally.outcomes[outcome] += 1
        if reason is not None:
            tally.reasons[reason] += 1

    async def _attempt(self, request: EpisodeRequest, attempt: int, tally: Tally) -> Exception | None:
        """Runs one episode. Gives back what it failed with, which is not counted yet."""
        episode = EpisodeContext(
            run_id=request.run_id,
            task_id=request.task["id"],
            split=request.split,
            sample=request.sample,
            task=request.task,
            round=request.round,
            variant=request.variant,
            seed=request.seed,
            adapters=request.adapters,
            tags={ATTEMPT: str(attempt + 1)} if attempt else {},
            subject_id=self._app.subject_of(request.task),
            lineage=self._lineage,
            recorder=self._graph.recorder,
            spans=[] if self._scorer.needs_record else None,
        )
        routes = {node: self._route_of(node, at, request.temperature) for node, at in request.adapters.items()}
        for node in self._app.frozen:
            routes[node] = replace(self._route_of(node, 0, request.temperature), trainable=False)
        routes |= {node: text_to_route(text) for node, text in request.answers.items()}
        routing = Routing(routes, request.seed, self._chat, max_tokens=self._limits.max_tokens)
        current_episode.set(episode)  # this task's own context: nobody else sees it
        current_routing.set(routing)
        result, error = await self._graph_to_result(episode, routing, request.task)
        recorder = self._graph.recorder
        if recorder.failure is not None:
            raise recorder.failure
        tally.sampled_tokens += routing.sampled_tokens
        tally.answered.update(routing.answered)
        tally.elsewhere.update(routing.elsewhere)
        if error is not None:
            self._check_server()
            return error
        if episode.cut_short is not None:
            self._count(tally, "truncated", episode.cut_short)
            return None
        if episode.episode_id is not None:
            score = await self._scorer.run_to_score(self._view(request.task, result, episode))
            await self._keep(episode.episode_id, score)
            tally.reward_sums.update(score.team)
            tally.reward_counts.update(score.team.keys())
            tally.absent.update(score.absent.items())
        self._count(tally, "terminated", None)
        return None

    async def _wait_for_dying_server(self) -> None:
        """A server that is about to end refuses calls some seconds before; its own error says more than theirs."""
        for _ in range(20):
            self._check_server()
            await asyncio.sleep(0.5)

    async def _graph_to_result(
        self, episode: EpisodeContext, routing: Routing, task: Task
    ) -> tuple[Any, Exception | None]:
        """The final state, or what the graph failed with; neither where the episode was cut short."""
        thread = uuid.uuid4().hex  # a thread of its own: an app with a checkpointer remembers nothing of the others
        config: Any = {"configurable": {"thread_id": thread}, "callbacks": [_Interrupts(episode)]}
        loop = asyncio.get_running_loop()
        running = asyncio.ensure_future(self._graph.ainvoke(self._app.task_to_input(task), config))

        def note_cut(reason: str) -> None:
            episode.cut_short = episode.cut_short or reason

        routing.note_cut = note_cut
        routing.stop = partial(loop.call_soon_threadsafe, running.cancel)  # a node may call its model from a thread
        try:
            done, _ = await asyncio.wait({running}, timeout=self._timeout_s)
            if not done:
                note_cut(f"longer than {self._timeout_s:g} s")
                running.cancel()
                await asyncio.wait({running})
            if episode.cut_short is not None and (running.cancelled() or running.exception() is not None):
                return None, None
            return running.result(), None
        except asyncio.CancelledError:
            running.cancel()
            await asyncio.wait({running})
            raise
        except Exception as error:  # noqa: BLE001 - whatever the graph raises is a failed episode
            return None, error
        finally:
            await self._forget(thread)

    async def _forget(self, thread: str) -> None:
        """Takes the episode out of the app's checkpointer: nothing will ask for it, and memory is not to grow."""
        checkpointer: Any = getattr(self._graph, "checkpointer", None)
        if hasattr(checkpointer, "adelete_thread"):
            with suppress(NotImplementedError):
                await checkpointer.adelete_thread(thread)

    def _view(self, task: Task, result: Any, episode: EpisodeContext) -> RunView:
        """The run as its rewards see it; without a trajectory where its spans are not all there."""
        trajectory = None
        if episode.spans:
            with suppress(Incomplete, Malformed):
                trajectory = spans_to_trajectory(episode.spans)
        return RunView(task, result, trajectory, episode.spans or (), place=self._place)

    async def _keep(self, episode_id: str, score: Score) -> None:
        journal = self._graph.recorder.journal
        journal.append_all(score.to_rewards(episode_id, time.time_ns()))
        await asyncio.to_thread(journal.sync)  # other episodes go on meanwhile, and share the sync


Job = tuple[Collector, EpisodeRequest, Tally]
"""One episode, the collector that runs it, and where it is counted."""


async def run_jobs(
    jobs: Iterable[Job] | AsyncIterable[Job], in_flight: int, on_finished: Callable[[Job], None] = lambda _: None
) -> None:
    """Runs all jobs, at most `in_flight` at a time whoever collects them, in their order as places become free.

    Jobs that are still to come are waited for where `jobs` is asynchronous; it is asked for several at a time.

    Raises: as `Collector.requests_to_episodes`, which counts all of its requests in one tally.
    """
    # Sync nodes run in the loop's thread pool, whose default size on two cores is six.
    threads = ThreadPoolExecutor(max_workers=in_flight + 4)
    asyncio.get_running_loop().set_default_executor(threads)
    next_job = _one_by_one(jobs)

    async def work() -> None:
        while (job := await next_job()) is not None:  # one shared iterator: each job goes to one worker
            collector, request, tally = job
            await collector.request_to_episode(request, tally)
            on_finished(job)

    workers = [asyncio.create_task(work()) for _ in range(in_flight)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        threads.shutdown(wait=False)


def _one_by_one(jobs: Iterable[Job] | AsyncIterable[Job]) -> Callable[[], Awaitable[Job | None]]:
    """A function that gives the next job, and None after the last."""
    if isinstance(jobs, AsyncIterable):
        coming = aiter(jobs)
        return lambda: anext(coming, None)
    waiting = iter(jobs)

    async def next_job() -> Job | None:
        return next(waiting, None)

    return next_job


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _most_fail(tally: Tally) -> str | None:
    failed = tally.outcomes["failed"]
    if failed < MIN_FAILED or failed <= MAX_FAILED_SHARE * tally.finished:
        return None
    reason, count = tally.reasons.most_common(1)[0]
    return f"{failed} of {tally.finished} episodes failed, {count} of them with: {reason}"
