"""Requests for episodes -> recorded, rewarded episodes, many in flight at a time.

An episode is finished when its spans and its rewards are synced to the journal; only then is it counted and
reported. Invariants: an episode that fails is a row with a reason, not the end of the run; a disk that refuses or
a server that died ends the run, and loses nothing that was reported. It knows nothing of DuckDB or torch.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from langchain_core.language_models import BaseChatModel
from langgraph.callbacks import GraphCallbackHandler, GraphInterruptEvent

from marft_bridge.app import App, Task
from marft_bridge.episode import EpisodeContext, current_episode
from marft_bridge.errors import GraphError
from marft_bridge.recorded_graph import RecordedGraph
from marft_bridge.rewards.contract import Place, RunView
from marft_bridge.rewards.scoring import Score
from marft_bridge.routing import Route, Routing, current_routing
from trace_store.assemble import Incomplete, Malformed, spans_to_trajectory

MAX_FAILED_SHARE = 0.5  # a run in which more fails than works is stopped: something is broken
MIN_FAILED = 8


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """One episode to run. (task, sample, variant, round) identifies it within a run."""

    run_id: str
    task: Task
    split: str
    sample: int
    seed: int
    adapters: Mapping[str, int]  # node -> version
    round: int | None = None
    variant: str | None = None
    temperature: float | None = None  # None: the collector's

    @property
    def key(self) -> tuple[str, int, str | None, int | None]:
        """What resuming compares."""
        return (self.task["id"], self.sample, self.variant, self.round)


@dataclass(slots=True)
class Tally:
    """What has happened so far, for the progress line and the summary."""

    finished: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    reward_sums: Counter[str] = field(default_factory=Counter)
    reward_counts: Counter[str] = field(default_factory=Counter)
    absent: Counter[tuple[str, str]] = field(default_factory=Counter)  # (reward, why an episode went without it)
    sampled_tokens: int = 0
    answered: Counter[str] = field(default_factory=Counter)  # node -> recorded calls that its adapter answered
    elsewhere: Counter[str] = field(default_factory=Counter)  # node without a route -> calls of its own model
    began: float = field(default_factory=time.monotonic)

    def mean(self, name: str) -> float | None:
        """Mean of one team reward over the episodes that have it."""
        return self.reward_sums[name] / self.reward_counts[name] if self.reward_counts[name] else None

    def figures(self, reward: str) -> str:
        """For a progress bar."""
        seconds = max(time.monotonic() - self.began, 1e-9)
        mean = self.mean(reward)
        parts = [f"{self.sampled_tokens / seconds:.0f} tok/s"]
        parts += [f"{reward} {mean:.3f}"] if mean is not None else []
        parts += [f"{self.outcomes['failed']} failed"] if self.outcomes["failed"] else []
        return "  ".join(parts)

    def without(self) -> list[str]:
        """A line about each reward that episodes went without, and why."""
        return [
            f"{count} of {self.outcomes['terminated']} episodes go without the reward {name!r}: {why}"
            for (name, why), count in self.absent.most_common()
        ]

    def silent(self, nodes: Sequence[str]) -> list[str]:
        """A line about each of these nodes that made no call to learn from, in any episode so far."""
        if not self.outcomes["terminated"]:
            return []  # nothing ran to its end: the failures say more
        others = ", ".join(f"{node} ({calls})" for node, calls in self.elsewhere.most_common(5))
        seen = f"; calls came from nodes that are not in graph.nodes: {others}" if others else ""
        return [
            f"node {node!r} made no recorded call through its adapter in {self.finished} episodes: it did not run, or "
            f"calls its model in a way that cannot be redirected (not a LangChain chat model, or in a thread without "
            f"LangGraph's context){seen}"
            for node in nodes
            if not self.answered[node]
        ]


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
        chat: the served model, which answers for the models of the nodes that have a route; None leaves every model
            of the graph as it is. Needs `redirect.redirected_models`.
        lineage: what every episode depends on, see `records.Episode`; tools are recorded with each.
        place: where rewards are computed.

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
    ) -> None:
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
        await run_jobs(jobs, self._in_flight, lambda: on_finished(tally))
        return tally

    async def request_to_episode(self, request: EpisodeRequest, tally: Tally) -> None:
        """Runs one request and counts it. Raises: as `requests_to_episodes`."""
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
            subject_id=self._app.subject_of(request.task),
            lineage=self._lineage,
            recorder=self._graph.recorder,
            spans=[] if self._scorer.needs_record else None,
        )
        routes = {node: self._route_of(node, at, request.temperature) for node, at in request.adapters.items()}
        for node in self._app.frozen:
            routes[node] = replace(self._route_of(node, 0, request.temperature), trainable=False)
        routing = Routing(routes, request.seed, self._chat)
        current_episode.set(episode)  # this task's own context: nobody else sees it
        current_routing.set(routing)
        outcome, reason, result = await self._graph_to_result(episode, request.task)
        recorder = self._graph.recorder
        if recorder.failure is not None:
            raise recorder.failure
        if outcome == "failed":
            self._check_server()
        if outcome == "terminated" and episode.episode_id is not None:
            score = await self._scorer.run_to_score(self._view(request.task, result, episode))
            await self._keep(episode.episode_id, score)
            tally.reward_sums.update(score.team)
            tally.reward_counts.update(score.team.keys())
            tally.absent.update(score.absent.items())
        tally.sampled_tokens += routing.sampled_tokens
        tally.answered.update(routing.answered)
        tally.elsewhere.update(routing.elsewhere)
        tally.finished += 1
        tally.outcomes[outcome] += 1
        if reason is not None:
            tally.reasons[reason] += 1
        if (broken := _most_fail(tally)) is not None:
            await self._wait_for_dying_server()
            raise GraphError(broken)

    async def _wait_for_dying_server(self) -> None:
        """A server that is about to end refuses calls some seconds before; its own error says more than theirs."""
        for _ in range(20):
            self._check_server()
            await asyncio.sleep(0.5)

    async def _graph_to_result(self, episode: EpisodeContext, task: Task) -> tuple[str, str | None, Any]:
        thread = uuid.uuid4().hex  # a thread of its own: an app with a checkpointer remembers nothing of the others
        config: Any = {"configurable": {"thread_id": thread}, "callbacks": [_Interrupts(episode)]}
        running = asyncio.ensure_future(self._graph.ainvoke(self._app.task_to_input(task), config))
        try:
            done, _ = await asyncio.wait({running}, timeout=self._timeout_s)
            if not done:
                episode.cut_short = f"longer than {self._timeout_s:g} s"
                running.cancel()
                await asyncio.wait({running})
                return "truncated", episode.cut_short, None
            result = running.result()
        except asyncio.CancelledError:
            running.cancel()
            await asyncio.wait({running})
            raise
        except Exception as error:  # noqa: BLE001 - whatever the graph raises is a failed episode
            return "failed", f"{type(error).__name__}: {error}", None
        else:
            return ("truncated", episode.cut_short, None) if episode.cut_short else ("terminated", None, result)
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


async def run_jobs(jobs: Iterable[Job], in_flight: int, on_finished: Callable[[], None] = lambda: None) -> None:
    """Runs all jobs, at most `in_flight` at a time whoever collects them, in their order as places become free.

    Raises: as `Collector.requests_to_episodes`, which counts all of its requests in one tally.
    """
    # Sync nodes run in the loop's thread pool, whose default size on two cores is six.
    threads = ThreadPoolExecutor(max_workers=in_flight + 4)
    asyncio.get_running_loop().set_default_executor(threads)
    waiting = iter(jobs)

    async def work() -> None:
        for collector, request, tally in waiting:  # one shared iterator: each job goes to one worker
            await collector.request_to_episode(request, tally)
            on_finished()

    workers = [asyncio.create_task(work()) for _ in range(in_flight)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        threads.shutdown(wait=False)


def _most_fail(tally: Tally) -> str | None:
    failed = tally.outcomes["failed"]
    if failed < MIN_FAILED or failed <= MAX_FAILED_SHARE * tally.finished:
        return None
    reason, count = tally.reasons.most_common(1)[0]
    return f"{failed} of {tally.finished} episodes failed, {count} of them with: {reason}"


def task_order(tasks: Sequence[Task], seed: int) -> list[Task]:
    """The tasks in a seeded order that does not depend on their order in the file."""
    ordered = sorted(tasks, key=lambda task: str(task["id"]))
    random.Random(seed).shuffle(ordered)
    return ordered


def plan_episodes(
    tasks: Sequence[Task], episodes: int, samples_per_task: int, *, seed: int, **common: Any
) -> list[EpisodeRequest]:
    """`episodes` requests over `tasks` in order, from the start again when they run out.

    Groups of `samples_per_task` stay together. A task that comes again gets new sample numbers; every request
    gets its own seed, which depends on the run's seed, the task and the sample only.
    """
    used: Counter[str] = Counter()
    requests: list[EpisodeRequest] = []
    for number in range(-(-episodes // samples_per_task)):
        task = tasks[number % len(tasks)]
        for _ in range(samples_per_task):
            sample = used[task["id"]]
            used[task["id"]] += 1
            episode_seed = _derived_seed(seed, common.get("round"), task["id"], sample)
            requests.append(EpisodeRequest(task=task, sample=sample, seed=episode_seed, **common))
    return requests[:episodes]


def _derived_seed(seed: int, round_number: int | None, task_id: str, sample: int) -> int:
    digest = hashlib.sha256(f"{seed}/{round_number}/{task_id}/{sample}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
