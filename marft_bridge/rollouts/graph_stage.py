"""Graphs and served models -> recorded episodes of all of them, in one order and under one limit.

A stage is what the graphs of one command share: the event loop that they run on, the recorder with its journal, and
the redirection of their models. Invariant: a graph without a served model calls its own models.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from marft_bridge.common.loop_threads import LoopThreads
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.model_calls.clients.hooks import redirected_clients
from marft_bridge.model_calls.redirect import redirected_models
from marft_bridge.recording.instrument import instrument_paused
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import graph_to_original, wrap
from marft_bridge.rewards.contract import ModelAddress, RewardEnvironment
from marft_bridge.rollouts.app import App
from marft_bridge.rollouts.app_tracing import app_tracing
from marft_bridge.rollouts.collector import OWN_MODELS, Collector, HostedAnswers, Job, run_jobs
from marft_bridge.rollouts.graph_loop import open_graph_loop
from marft_bridge.rollouts.run_counts import Tally
from marft_bridge.rollouts.user_code import UserCode
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.served_bases import ServedBases
from marft_bridge.serving.supervisor import Supervisor
from trace_store.journal import Journal


@contextmanager
def open_stage(config: BridgeConfig, folder: RunFolder, reporter: Reporter) -> Iterator[Stage]:
    """The journal of the folder, a recorder and an event loop, until the block ends; the app's tracers are silent."""
    journal = Journal(folder.journal)
    threads = LoopThreads(_to_thread_count(config.collect.in_flight))
    try:
        recorder = Recorder(journal, config.record)
        with (
            app_tracing(config.record.keep_app_tracing),
            open_graph_loop(threads, UserCode(config.graph.app), reporter.say) as loop,
            redirected_models(),
            redirected_clients() if config.record.other_clients else nullcontext(),
            instrument_paused(),
        ):
            yield Stage(config, folder, reporter, loop=loop, threads=threads, recorder=recorder)
    finally:
        journal.close()


class Stage:
    """Runs the graphs of one command. `open_stage` makes it; apps are opened and closed within that block."""

    def __init__(
        self,
        config: BridgeConfig,
        folder: RunFolder,
        reporter: Reporter,
        *,
        loop: asyncio.Runner,
        threads: LoopThreads,
        recorder: Recorder,
    ) -> None:
        self.loop = loop
        self._threads = threads
        self._config, self._folder, self._reporter, self._recorder = config, folder, reporter, recorder
        self._supervisors: set[Supervisor] = set()
        self._running: asyncio.Task[Any] | None = None

    @contextmanager
    def open_app(
        self,
        app: App,
        models: ServedBases | None,
        judge: ModelAddress | None,
        hosted: HostedAnswers | None = None,
    ) -> Iterator[Collector]:
        """The app's graph on the served models, recorded, until the block ends.

        Args:
            models: answer for the nodes of which a request names a version; None leaves every node its own model.
            judge: the model that rewards may call; the same for all graphs of a comparison.
            hosted: as of `Collector`.

        Raises:
            BridgeError: the app cannot be opened, or one of its rewards cannot be computed here.
        """
        if models is not None:
            self._supervisors.update(models.supervisors)
        with app.open_graph(None if models is None else models.chat, self.loop) as graph:
            recorded = wrap(graph_to_original(graph), self._recorder)  # replaces the recorder of an app that has one
            try:
                yield Collector(
                    graph=recorded,
                    app=app,
                    backend=OWN_MODELS if models is None else models,
                    reward_context=RewardEnvironment(self._folder.path, judge),
                    hosted=hosted,
                    teacher_rounds=self._config.train.asking_rounds,
                    options=self._config.collect,
                )
            finally:
                recorded.unwrap()

    def run(self, jobs: Sequence[Job], title: str, reward: str) -> None:
        """Runs the jobs, shows their progress, and reports what the recorder lost.

        Raises: as `run_jobs`.
        """
        tallies = list({id(tally): tally for *_, tally in jobs}.values())
        finished_before = {id(tally): tally.finished for tally in tallies}
        with self._reporter.bars(), self._reporter.task(title, len(jobs)) as task:

            def show(_: Job) -> None:
                done = sum(tally.finished - finished_before[id(tally)] for tally in tallies)
                task.update(done, _sum_tallies(tallies).figures(reward))

            self.loop.run(self._run_stoppable(self.run_async(jobs, self._config.collect.in_flight, show)))
        if self.losses:
            self._reporter.say(self.losses)

    async def run_async(
        self, jobs: Iterable[Job] | AsyncIterable[Job], in_flight: int, on_finished: Callable[[Job], None]
    ) -> None:
        """Runs the jobs on this stage's loop.

        Raises: as `run_jobs`; ServingError when a server is lost, whose calls would wait for ever.
        """
        self._threads.allow(_to_thread_count(in_flight))
        await _run_unless_server_lost(run_jobs(jobs, in_flight, on_finished), self._supervisors)

    def stop(self) -> None:
        """Ends the `run` of another thread, which raises CancelledError there."""

        def cancel() -> None:
            if self._running is not None:
                self._running.cancel()

        self.loop.get_loop().call_soon_threadsafe(cancel)

    async def _run_stoppable(self, running: Coroutine[Any, Any, None]) -> None:
        self._running = asyncio.current_task()
        try:
            await running
        finally:
            self._running = None

    @property
    def losses(self) -> str:
        """A line about records that the recorder could not write, or was told to leave out; empty without any."""
        losses = self._recorder.losses
        missing = "; episodes that lack spans are not used" if losses.callbacks or losses.spans else ""
        return f"recording: {losses}{missing}" if str(losses) else ""


def _to_thread_count(in_flight: int) -> int:
    """Threads for the sync nodes of so many episodes. A loop's own pool has six where there are two cores."""
    return in_flight + 4


def _sum_tallies(tallies: Sequence[Tally]) -> Tally:
    """One tally over all of them, for the progress line."""
    total = Tally(started_s=min(tally.started_s for tally in tallies))
    for tally in tallies:
        total.add(tally)
    return total


async def _run_unless_server_lost(running: Coroutine[Any, Any, None], supervisors: Iterable[Supervisor]) -> None:
    """Waits for `running`, and cancels it with the supervisor's error when a server is lost."""
    task = asyncio.create_task(running)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=1.0)
            for supervisor in supervisors:
                supervisor.check()
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
