"""Graphs and served models -> recorded episodes of all of them, in one order and under one limit.

A stage is what the graphs of one command share: the event loop that they run on, the recorder with its journal, and
the redirection of their models. Invariant: a graph without a served model calls the models that it was written with.
It knows nothing of adapters' files, plans or stores.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

from marft_bridge.app import App
from marft_bridge.config import BridgeConfig
from marft_bridge.instrumentation import instrument_paused
from marft_bridge.progress import Reporter
from marft_bridge.record import Recorder
from marft_bridge.recorded_graph import graph_to_original, wrap
from marft_bridge.redirect import redirected_models
from marft_bridge.rewards.contract import Place, Served
from marft_bridge.rollouts import Collector, Job, Tally, run_jobs
from marft_bridge.routing import Route
from marft_bridge.run_folder import RunFolder
from marft_bridge.served_models import ServedModels
from marft_bridge.server_keeper import ServerKeeper
from trace_store.journal import Journal


class Stage:
    """Where graphs run. Use it as a context manager; what runs on it is opened and closed inside."""

    def __init__(self, config: BridgeConfig, folder: RunFolder, reporter: Reporter) -> None:
        self._config, self._folder, self._reporter = config, folder, reporter
        self._stack = ExitStack()
        self._keepers: set[ServerKeeper] = set()
        self._running: asyncio.Task[Any] | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._journal = Journal(self._folder.journal)
            stack.callback(self._journal.close)
            self._recorder = Recorder(self._journal, self._config.record)
            self.loop = stack.enter_context(asyncio.Runner())
            stack.enter_context(redirected_models())
            stack.enter_context(instrument_paused())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    @contextmanager
    def opened(self, app: App, models: ServedModels | None, judged_at: Served | None) -> Iterator[Collector]:
        """The app's graph on the served models, recorded, until the block ends.

        Args:
            models: answer for the nodes that a request has versions of; None leaves every node its own model.
            judged_at: the model that rewards may ask; the same for all graphs that are compared.

        Raises:
            BridgeError: the app cannot be opened, or a reward of it cannot work here.
        """
        if models is not None:
            self._keepers.update(models.keepers)
        with app.opened(None if models is None else models.chat, self.loop) as graph:
            recorded = wrap(graph_to_original(graph), self._recorder)  # an app that records itself does not now
            try:
                yield Collector(
                    recorded,
                    app,
                    _no_route if models is None else models.route,
                    self._config.collect.in_flight,
                    self._config.collect.timeout_s,
                    _alive if models is None else models.check,
                    None if models is None else models.chat,
                    None if models is None else models.lineage,
                    Place(self._folder.path, judged_at),
                    self._config.collect.limits,
                    _never if models is None else models.came_back,
                )
            finally:
                recorded.unwrap()

    def run(self, jobs: Sequence[Job], title: str, reward: str) -> None:
        """Runs the jobs, shows how far they are, and says what was lost on the way.

        Raises: as `rollouts.run_jobs`.
        """
        tallies = list({id(tally): tally for *_, tally in jobs}.values())
        before = {id(tally): tally.finished for tally in tallies}
        with self._reporter.bars(), self._reporter.task(title, len(jobs)) as task:

            def show(_: Job) -> None:
                done = sum(tally.finished - before[id(tally)] for tally in tallies)
                task.update(done, _together(tallies).figures(reward))

            self.loop.run(self._stoppable(self.play(jobs, self._config.collect.in_flight, show)))
        if self.losses:
            self._reporter.say(self.losses)

    async def play(
        self, jobs: Iterable[Job] | AsyncIterable[Job], in_flight: int, on_finished: Callable[[Job], None]
    ) -> None:
        """Runs the jobs on this stage's loop, until a server is lost whose calls would wait for ever.

        Raises: as `rollouts.run_jobs`; ServingError when a server is lost.
        """
        await _unless_lost(run_jobs(jobs, in_flight, on_finished), self._keepers)

    def stop(self) -> None:
        """Ends what another thread runs on this stage now: its `run` raises CancelledError."""

        def cancel() -> None:
            if self._running is not None:
                self._running.cancel()

        self.loop.get_loop().call_soon_threadsafe(cancel)

    async def _stoppable(self, running: Coroutine[Any, Any, None]) -> None:
        self._running = asyncio.current_task()
        try:
            await running
        finally:
            self._running = None

    @property
    def losses(self) -> str:
        """A line about what the recorder could not write, or was told not to; empty where that is nothing."""
        losses = self._recorder.losses
        missing = "; episodes that lack spans are not used" if losses.callbacks or losses.spans else ""
        return f"recording: {losses}{missing}" if str(losses) else ""


def _together(tallies: Sequence[Tally]) -> Tally:
    """What the progress line shows of several tallies."""
    total = Tally(began=min(tally.began for tally in tallies))
    for tally in tallies:
        total.add(tally)
    return total


def _no_route(node: str, version: int, temperature: float | None) -> Route:  # noqa: ARG001
    raise AssertionError(f"{node}: a graph on its own models has no routes")


def _alive() -> None:
    """A graph on its own models depends on no server of ours."""


def _never(began: float) -> bool:  # noqa: ARG001
    """Nor is one started again for it."""
    return False


async def _unless_lost(running: Coroutine[Any, Any, None], keepers: Iterable[ServerKeeper]) -> None:
    """Waits for `running`; ends it with the keeper's error when a server is lost whose calls would wait for ever."""
    task = asyncio.create_task(running)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=1.0)
            for keeper in keepers:
                keeper.check()
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
