"""Requests for episodes -> recorded, rewarded episodes, many in flight at a time.

An episode is finished when its spans and its rewards are synced to the journal; only then is it counted and
reported. Invariants: an episode that fails is a row with a reason, not the end of the run, and every attempt at it is
a row; a disk that refuses or a server that died ends the run, and loses nothing that was reported.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from langchain_core.language_models import BaseChatModel
from langgraph.callbacks import GraphCallbackHandler, GraphInterruptEvent

from marft_bridge.common.errors import EpisodesFailedError, GraphError, RewardFailedError, ServingError
from marft_bridge.common.retries import pause_s
from marft_bridge.common.run_limits import is_limit, time_reason
from marft_bridge.config.bridge import CollectOptions
from marft_bridge.model_calls.given_answers import AnswerRecord
from marft_bridge.model_calls.routing import Route, Routing, current_routing
from marft_bridge.model_calls.scripted_answer import text_to_route
from marft_bridge.recording.episode_context import EpisodeContext, current_episode, end_to_outcome
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import RecordedGraph
from marft_bridge.rewards.contract import RewardEnvironment, RunView
from marft_bridge.rewards.scoring import Score
from marft_bridge.rollouts.app import App
from marft_bridge.rollouts.episode_plan import EpisodeRequest
from marft_bridge.rollouts.run_counts import Tally, most_common_failure
from marft_bridge.rollouts.user_code import UserCode, error_to_place
from marft_bridge.tasks.reading import Task
from trace_store.assemble import Incomplete, Malformed, spans_to_trajectory

ATTEMPT = "attempt"  # tag of an episode that repeats a failed one: the number of the attempt; the first is 1
PROMPT = "prompt:"  # before the name of a node: tag of an episode with the SHA-256 of the prompt that it gave the node
MAX_FAILED_SHARE = 0.5  # a run in which more episodes fail than succeed is stopped: something is broken
MIN_FAILED = 8
CANCEL_GRACE_S = 10.0  # for a run that is cancelled; its nodes may have something to put away


class _InterruptMarker(GraphCallbackHandler):
    """Marks the episode of a run that interrupts itself to ask a person: nobody answers, so its return is unknown."""

    run_inline = True

    def __init__(self, episode: EpisodeContext) -> None:
        self._episode = episode

    def on_interrupt(self, event: GraphInterruptEvent) -> None:  # noqa: ARG002  LangGraph's signature
        """LangGraph calls it before the end of the run. One that has gone wrong by then fails, and is not cut short."""
        if self._episode.judge_end(None) is None:
            self._episode.cut_short = "interrupted"


class Backend(Protocol):
    """Answers for the nodes of which a request names a version. `ServedBases` is one, `OWN_MODELS` another."""

    @property
    def chat(self) -> BaseChatModel | None:
        """The served model, which answers in place of the models of the nodes that have a route; None leaves every
        model of the graph as it is. Needs `redirect.redirected_models`."""

    @property
    def lineage(self) -> Mapping[str, str]:
        """The digests of base models and the like that every episode depends on, see `records.Episode.lineage`."""

    def route(self, node: str, version: int, temperature: float | None) -> Route:
        """Where the calls of a node at a version go."""

    def check(self) -> None:
        """Raises when the model server has died; asked whenever an episode fails."""

    def came_back(self, began: float) -> bool:
        """Whether the model server was restarted since a time (monotonic seconds); restarts a dead one now.

        May take long. Raises when the server is lost. An attempt that an outage broke is repeated beyond the limits.
        """


class HostedAnswers(Protocol):
    """Recorded answers for the nodes that call their own models."""

    def begin(self, recorder: Recorder, routing: Routing) -> AnswerRecord:
        """Those of one episode, which is drawn by its seed."""


class _OwnModels:
    """The backend of a graph that calls its own models: there is no server of ours."""

    chat: BaseChatModel | None = None
    lineage: Mapping[str, str] = MappingProxyType({})

    def route(self, node: str, version: int, temperature: float | None) -> Route:  # noqa: ARG002
        raise AssertionError(f"{node}: a graph on its own models has no routes")

    def check(self) -> None:
        """No server, so no failure."""

    def came_back(self, began: float) -> bool:  # noqa: ARG002
        return False


OWN_MODELS: Backend = _OwnModels()


class Collector:
    """Runs episodes of one recorded graph.

    Args:
        graph: the wrapped graph.
        app: the user's input function and reward.
        backend: answers for the graph's nodes.
        reward_context: the run folder and the judge's server, for rewards that need them.
        teacher_rounds: in so many first rounds the own models of nodes with a route are asked beside it.
        hosted: answers for nodes without a route, before their own models do; None: those are asked.
        options: episodes in flight, the time limit after which one is recorded as truncated, and the limits on tokens
            and attempts of one request.

    Raises:
        BridgeError: a reward of the app cannot be computed here.
    """

    def __init__(
        self,
        *,
        graph: RecordedGraph,
        app: App,
        backend: Backend,
        reward_context: RewardEnvironment = RewardEnvironment(),  # noqa: B008 - frozen
        hosted: HostedAnswers | None = None,
        teacher_rounds: int = 0,
        options: CollectOptions = CollectOptions(),  # noqa: B008 - frozen
    ) -> None:
        self._hosted, self._teacher_rounds = hosted, teacher_rounds
        self._graph, self._app, self._backend, self._options = graph, app, backend, options
        self._limits = options.limits
        self._code = UserCode(app.name)
        self._scorer, self._reward_context = app.scorer(), reward_context

    @property
    def graph(self) -> RecordedGraph:
        """The wrapped graph."""
        return self._graph

    def take_thread_lines(self) -> list[str]:
        """As `Scorer.take_thread_lines`."""
        return self._scorer.take_thread_lines()

    async def requests_to_episodes(
        self,
        requests: Iterable[EpisodeRequest],
        on_finished: Callable[[Tally], None] = lambda _: None,
        *,
        finished_before: int = 0,
    ) -> Tally:
        """Runs all requests in their order, at most `in_flight` at a time.

        Args:
            finished_before: as of `Tally`.

        Raises:
            StoreError: the journal could not be written.
            ServingError: the model server died.
            EpisodesFailedError: most episodes fail.
            GraphError: a reward reads what is not there, a function for the runs' context or config is broken, or the
                prompt of a node has nothing to replace.
        """
        tally = Tally(finished_before=finished_before)
        jobs = ((self, request, tally) for request in requests)
        await run_jobs(jobs, self._options.in_flight, lambda _: on_finished(tally))
        return tally

    async def request_to_episode(self, request: EpisodeRequest, tally: Tally) -> None:
        """Runs one request, retries it where that may help, and counts its last attempt.

        Raises: as `requests_to_episodes`.
        """
        attempt = outages = 0
        while True:
            started_s = time.monotonic()
            if (error := await self._attempt(request, attempt, tally)) is None:
                break
            if await asyncio.to_thread(self._backend.came_back, started_s):
                outages += 1
            elif self._limits.may_try_again(attempt - outages, error):
                await asyncio.sleep(pause_s(attempt - outages, request.seed))
            else:
                self._count(tally, "failed", self._error_to_reason(error))
                break
            tally.retried += 1
            attempt += 1
        if (failure := _common_failure(tally)) is not None:
            await self._wait_for_dying_server()
            raise EpisodesFailedError(
                f"variant {request.variant!r}: {failure}" if request.variant is not None else failure
            )

    def _error_to_reason(self, error: Exception) -> str:
        """What an episode failed with, on one line, with the line of the app's own code that it came through last."""
        place = error_to_place(error, self._code)
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return text if place is None else f"{text} ({place})"

    def _count(self, tally: Tally, outcome: str, reason: str | None) -> None:
        tally.finished += 1
        tally.outcomes[outcome] += 1
        if reason is not None:
            tally.reasons[reason] += 1
            if outcome == "failed":
                tally.failures[reason] += 1

    def _pay_limit(self, episode: EpisodeContext, tally: Tally, reason: str) -> None:
        """Writes what a run earned by being cut short at a limit, before its end is written: no run in the store lacks
        it, wherever a command is killed."""
        reward = self._app.limit_reward
        if reward is None or episode.episode_id is None or not is_limit(reason):
            return
        score = reward.to_score()
        self._graph.recorder.journal.append_rewards(score.to_rewards(episode.episode_id, time.time_ns()))
        tally.reward_sums.update(score.team)
        tally.reward_counts.update(score.team.keys())

    async def _count_cut(self, tally: Tally, reason: str | None) -> None:
        """Counts a run that was cut short, once it is on the disk."""
        await asyncio.to_thread(self._graph.recorder.journal.sync)
        self._count(tally, "truncated", reason)

    async def _attempt(self, request: EpisodeRequest, attempt: int, tally: Tally) -> Exception | None:
        """Runs one episode. Returns the error that it failed with, which is not counted yet."""
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
            tags=_request_to_tags(request, attempt),
            subject_id=self._app.subject_of(request.task) if request.start is None else request.start.subject_id,
            parent_episode=None if request.fork is None else request.fork.episode_id,
            fork_action=None if request.fork is None else request.fork.action_id,
            recorded_checkpoints={} if request.start is None else request.start.checkpoints,
            lineage=dict(self._backend.lineage),
            recorder=self._graph.recorder,
            spans=[] if self._scorer.needs_record else None,
        )
        routes = {node: self._request_to_route(request, node, version) for node, version in request.adapters.items()}
        for node in request.frozen:
            routes[node] = replace(routes[node], trainable=False)
        for node in self._app.frozen:
            routes[node] = replace(self._request_to_route(request, node, 0), trainable=False)
        routes |= {node: text_to_route(text) for node, text in request.answers.items()}
        routing = Routing(
            routes,
            request.seed,
            self._backend.chat,
            max_tokens=self._limits.max_tokens,
            actors=episode.actors,
            prompts=request.prompts,
        )
        routing.asks_teacher = request.round is not None and 1 <= request.round <= self._teacher_rounds
        if request.beginning is not None:
            routing.prefix = request.beginning.begin(self._graph.recorder)
            episode.judge_end = routing.prefix.judge_end
        elif self._hosted is not None:
            routing.record = self._hosted.begin(self._graph.recorder, routing)
            episode.judge_end = routing.record.judge_end
        episode.before_cut = partial(self._pay_limit, episode, tally)
        current_episode.set(episode)  # in the context of this asyncio task: other episodes do not see it
        current_routing.set(routing)
        result, error = await self._graph_to_result(episode, routing, request)
        if episode.cut_short is None:
            error = episode.judge_end(error) or error
        if routing.refusal is not None:  # every episode would meet it
            raise GraphError(f"variant {request.variant!r}: {routing.refusal}")
        recorder = self._graph.recorder
        if recorder.failure is not None:
            raise recorder.failure
        tally.sampled_tokens += routing.sampled_tokens - routing.given_tokens
        tally.adapter_calls.update(routing.routed_calls)
        tally.prompted_calls.update(routing.prompted_calls)
        tally.own_model_calls.update(routing.unrouted_calls)
        if error is not None:
            outcome, reason = end_to_outcome(episode, error)
            if outcome == "truncated":  # as the store has it: at LangGraph's own limit on supersteps
                await self._count_cut(tally, reason)
                return None
            self._backend.check()
            return error
        if episode.cut_short is not None:
            await self._count_cut(tally, episode.cut_short)
            return None
        if episode.episode_id is not None:
            try:
                score = await self._scorer.run_to_score(self._run_view(request.task, result, episode))
            except RewardFailedError as failure:  # not tried again: the run itself went well
                self._count(tally, "failed", " ".join(str(failure).split()))
                return None
            await self._store_rewards(episode.episode_id, score)
            tally.reward_sums.update(score.team)
            tally.reward_counts.update(score.team.keys())
            tally.missing_rewards.update(score.absent.items())
        self._count(tally, "terminated", None)
        return None

    def _request_to_route(self, request: EpisodeRequest, node: str, version: int) -> Route:
        """The backend's route of a node, with the limit of a call that the request asks for."""
        route = self._backend.route(node, version, request.temperature)
        return route if request.max_tokens is None else replace(route, max_tokens=request.max_tokens)

    async def _wait_for_dying_server(self) -> None:
        """Gives a dying server 10 s to be noticed, which raises its own error: it says more than the refused calls."""
        for _ in range(20):
            self._backend.check()
            await asyncio.sleep(0.5)

    async def _graph_to_result(
        self, episode: EpisodeContext, routing: Routing, request: EpisodeRequest
    ) -> tuple[Any, Exception | None]:
        """The final state, or the error that the graph failed with; neither where the episode was cut short."""
        started_s = time.monotonic()
        thread = uuid.uuid4().hex  # a new thread id: an app with a checkpointer remembers nothing of other episodes
        callbacks = [_InterruptMarker(episode)]
        loop = asyncio.get_running_loop()
        running = asyncio.ensure_future(
            self._run_task(request.task, thread, callbacks)
            if request.start is None
            else request.start.run(self._graph, callbacks)
        )

        def note_cut(reason: str) -> None:
            episode.cut_short = episode.cut_short or reason

        routing.note_cut = note_cut
        routing.stop = partial(loop.call_soon_threadsafe, running.cancel)  # a node may call its model from a thread
        try:
            done, _ = await asyncio.wait({running}, timeout=self._options.timeout_s)
            was_out = not done and await self._was_server_out(started_s)
            if not running.done():
                reason = time_reason(self._options.timeout_s)
                note_cut(f"{reason}, in which the model server was out" if was_out else reason)
                if not await _end(running):
                    self._graph.recorder.end_episode(episode)
                    return None, None
            if episode.cut_short is not None and (running.cancelled() or running.exception() is not None):
                return None, None
            return running.result(), None
        except asyncio.CancelledError:
            if not await _end(running):
                self._graph.recorder.end_episode(episode)
            raise
        except Exception as error:  # noqa: BLE001 - any error of the graph is a failed episode
            return None, error
        finally:
            if request.start is None:
                await self._delete_thread(thread)

    async def _was_server_out(self, since_s: float) -> bool:
        """Whether what a run did not get done since then may be for the server: no limit is worth anything then, also
        where `graph.limit_reward` is set later and `score` looks at stored runs."""
        try:
            return await asyncio.to_thread(self._backend.came_back, since_s)
        except ServingError:  # lost for good, which the next call tells
            return True

    def _run_task(self, task: Task, thread: str, callbacks: list[Any]) -> Coroutine[Any, Any, Any]:
        config = {"configurable": {"thread_id": thread}, "callbacks": callbacks}
        arguments = self._app.runs.to_arguments(task, config)
        running: Coroutine[Any, Any, Any] = self._graph.ainvoke(self._app.task_to_input(task), **arguments)
        return running

    async def _delete_thread(self, thread: str) -> None:
        """Deletes the episode from the app's checkpointer, whose memory would grow with every episode."""
        checkpointer: Any = getattr(self._graph, "checkpointer", None)
        if hasattr(checkpointer, "adelete_thread"):
            with suppress(NotImplementedError):
                await checkpointer.adelete_thread(thread)

    def _run_view(self, task: Task, result: Any, episode: EpisodeContext) -> RunView:
        """The run as its rewards read it; without a trajectory where spans are missing."""
        trajectory = None
        if episode.spans:
            with suppress(Incomplete, Malformed):
                trajectory = spans_to_trajectory(episode.spans)
        return RunView(task, result, trajectory, spans=episode.spans or (), environment=self._reward_context)

    async def _store_rewards(self, episode_id: str, score: Score) -> None:
        journal = self._graph.recorder.journal
        # An episode with a part of them would never be played again.
        journal.append_rewards(score.to_rewards(episode_id, time.time_ns()))
        await asyncio.to_thread(journal.sync)  # off the loop: other episodes go on, and share the sync


Job = tuple[Collector, EpisodeRequest, Tally]
"""The collector that runs an episode, its request, and the tally that counts it."""


async def run_jobs(
    jobs: Iterable[Job] | AsyncIterable[Job], in_flight: int, on_finished: Callable[[Job], None] = lambda _: None
) -> None:
    """Runs all jobs in their order, at most `in_flight` at a time over all collectors.

    Where `jobs` is asynchronous, several workers wait for its next one at the same time.

    Raises: as `Collector.requests_to_episodes`.
    """
    next_job = _job_source(jobs)

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


async def _end(running: asyncio.Future[Any]) -> bool:
    """Cancels a run of the graph, and waits for its end within a limit -> whether it has ended.

    A node may catch its cancellation, or wait for a thread that cannot be cancelled. It is left behind then, and the
    end of the loop says so.
    """
    running.cancel()
    await asyncio.wait({running}, timeout=CANCEL_GRACE_S)
    return running.done()


def _request_to_tags(request: EpisodeRequest, attempt: int) -> dict[str, str]:
    """The tags of an episode: those of its request, the prompts that it gives nodes, by digest, and the attempt."""
    tags = dict(request.tags)
    for node, text in request.prompts.items():
        tags[f"{PROMPT}{node}"] = hashlib.sha256(text.encode()).hexdigest()
    return {**tags, ATTEMPT: str(attempt + 1)} if attempt else tags


def _job_source(jobs: Iterable[Job] | AsyncIterable[Job]) -> Callable[[], Awaitable[Job | None]]:
    """A function that returns the next job, and None after the last."""
    if isinstance(jobs, AsyncIterable):
        async_iterator = aiter(jobs)
        return lambda: anext(async_iterator, None)
    iterator = iter(jobs)

    async def next_job() -> Job | None:
        return next(iterator, None)

    return next_job


def _common_failure(tally: Tally) -> str | None:
    """The most frequent reason, where so many episodes failed that the run has to stop; else None."""
    failed = tally.outcomes["failed"]
    if failed < MIN_FAILED or failed <= MAX_FAILED_SHARE * tally.run_episodes:
        return None
    return most_common_failure(tally)
