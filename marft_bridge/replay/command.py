"""`marft-bridge replay`: episodes of a store, and the app -> a line for each of whether it comes out the same.

Invariants: nothing is written, and no model is called; a thread is in memory as long as a run of it is to come. An
episode that cannot be replayed is a line with the reason.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from marft_bridge.common.errors import ConfigError, GraphError
from marft_bridge.common.import_name import load_name
from marft_bridge.common.terminal_text import print_line
from marft_bridge.recording.recorder import LIVE
from marft_bridge.replay.earlier_runs import EarlierRunError, load_with_earlier, replay_earlier
from marft_bridge.replay.episodes import EARLIER, Ways, load_run, path_to_store
from marft_bridge.replay.private_memory import PrivateMemory
from marft_bridge.replay.prompt_ids import PromptModels, config_to_models, path_to_models
from marft_bridge.replay.recorded_models import RecordedChat
from marft_bridge.replay.recorded_run import RecordedRun
from marft_bridge.replay.replayed_run import Replayed, ReplayOptions, replay_run
from marft_bridge.replay.replayed_thread import ReplayedThread
from marft_bridge.rollouts.app_graph import call_app_factory, load_app_object, open_graph
from marft_bridge.rollouts.run_settings import RunSettings, load_run_settings
from marft_bridge.runs.run_choice import RunChoice
from marft_bridge.traces.episode_prefix import prefix_to_episode
from marft_bridge.traces.store_reader import open_for_reading
from trace_store.journal import is_recorded
from trace_store.store import TraceStore

_DIGITS = re.compile("[0-9a-f]{1,32}")  # of an episode's id
# The episodes that are named, or all; and whether one is a fork of an app's own run.
_CHOSEN = """
SELECT episode_id, task_id, fork_action IS NOT NULL AND (split = $1 OR from_checkpoint IS NOT NULL) FROM episodes
WHERE $2::VARCHAR[] IS NULL OR episode_id IN (SELECT unnest($2::VARCHAR[]))
ORDER BY started_ns, episode_id
"""


@dataclass(frozen=True, slots=True)
class ReplayedApp:
    """The app that is replayed, and how commands started its runs before the record said it."""

    name: str
    task_to_input: str | None = None
    runs: RunSettings = field(default_factory=RunSettings)

    @contextmanager
    def open_graph(self, runner: asyncio.Runner) -> Iterator[Any]:
        """The compiled graph. Raises GraphError where it cannot be loaded."""
        loaded = load_app_object(self.name, "graph.app")
        source = call_app_factory(loaded, self.name, RecordedChat())
        with open_graph(source, self.name, runner) as graph:
            yield graph

    def run_to_start(self, run: RecordedRun) -> dict[str, Any]:
        """What `replay_run` is to be given where the record does not say how a command's run was started."""
        if not run.is_dated or run.trajectory.episode.split == LIVE:
            return {}
        task = dict(run.trajectory.episode.task)
        start: dict[str, Any] = {"arguments": self.runs.to_arguments(task, {})}
        if self.task_to_input is not None:
            start["graph_input"] = load_name(self.task_to_input, "graph.task_to_input")(task)
        return start


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is said of one episode."""

    episode_id: str
    task_id: str
    replayed: Replayed | None
    reason: str | None = None  # why it could not be replayed

    @property
    def is_same(self) -> bool:
        """Whether it was replayed, and came out the same."""
        return self.replayed is not None and self.replayed.divergence is None

    @property
    def fault(self) -> str | None:
        """Why no later run of its thread can be replayed; None where one can."""
        if self.replayed is None:
            return f"could not be replayed: {self.reason}"
        divergence = self.replayed.divergence
        return None if divergence is None or divergence.is_of_tokens else f"did not come out the same: {divergence}"

    def to_line(self) -> str:
        """One line for people."""
        place = f"{self.episode_id[:12]} {self.task_id}"
        if self.replayed is None:
            return f"{place}: not replayed: {self.reason}"
        if self.replayed.divergence is not None:
            return f"{place}: diverged: {self.replayed.divergence}"
        to_the_token = f", {count} prompts to the token," if (count := self.replayed.prompts_compared) else ""
        counted = f"{self.replayed.call_count} calls{to_the_token} in {self.replayed.seconds:.2f} s of the app's run"
        note = "" if self.replayed.note is None else f" ({self.replayed.note})"
        return f"{place}: same, {counted}, recorded in {self.replayed.recorded_seconds:.2f} s{note}"

    def to_json(self) -> dict[str, Any]:
        """The same for programs."""
        state = "same" if self.is_same else "diverged" if self.replayed is not None else "not replayed"
        parts: dict[str, Any] = {"episode_id": self.episode_id, "task_id": self.task_id, "state": state}
        if self.replayed is None:
            return parts | {"reason": self.reason}
        divergence = self.replayed.divergence
        return parts | {
            "calls": self.replayed.call_count,
            "prompts_compared": self.replayed.prompts_compared,
            "seconds": self.replayed.seconds,
            "recorded_seconds": self.replayed.recorded_seconds,
            "note": self.replayed.note,
            "divergence": None if divergence is None else {**asdict(divergence), "sentence": str(divergence)},
        }


def flags_to_app(app: str | None, choice: RunChoice) -> ReplayedApp:
    """The app that `--app` or a bridge.toml names, else that of the run folder. Raises ConfigError."""
    if app is not None:
        if choice.config is not None:
            raise ConfigError("replay: --app and --config both say which app; leave one out")
        return ReplayedApp(app)
    if choice.config is None and not (path := choice.to_folder()).is_dir():
        raise ConfigError(
            f"replay: {path} does not say which app was recorded; name it with --app my_app.py:graph, or with --config"
        )
    graph = choice.to_config().graph
    return ReplayedApp(graph.app, graph.task_to_input, load_run_settings(graph.context, graph.config))


def words_to_choice(
    word: Path | None, episodes: Sequence[str], config: Path | None, run: str | None
) -> tuple[RunChoice, list[str]]:
    """What stands behind the command, RUN and episodes, or episodes alone -> the run, and the episodes.

    A first word that nothing here is called is an episode where it has the digits of one.
    """
    if word is not None and _DIGITS.fullmatch(str(word)) and not word.exists() and not is_recorded(word):
        return RunChoice("replay", None, config=config, run=run), [str(word), *episodes]
    return RunChoice("replay", word, config=config, run=run), list(episodes)


def choice_to_models(choice: RunChoice) -> PromptModels | None:
    """The base models that the run notes, or those of `--config`; None where it names none. Raises ConfigError."""
    if choice.config is None:
        return path_to_models(choice.to_folder())
    return config_to_models(choice.to_config().model_dump(mode="json"))


def replay_episodes(
    path: Path,
    prefixes: Sequence[str],
    app: ReplayedApp,
    options: ReplayOptions,
    models: PromptModels | None = None,
) -> Iterator[Outcome]:
    """Replays the episodes that are named, or all, in the order in which they ran.

    They share one store of LangGraph's, and those of one thread its checkpoints: an earlier run of a thread is replayed
    before a later one, also where it is not named. `models`: that rendered the prompts, see `replay_run`.
    """
    with open_for_reading(path_to_store(path)) as store, asyncio.Runner() as runner, app.open_graph(runner) as graph:
        models = None if models is None else models.with_runs(store.runs())
        yield from _Replays(store, graph, app, options=options, models=models, runner=runner).replay(prefixes)


class _Replays:
    def __init__(
        self,
        store: TraceStore,
        graph: Any,
        app: ReplayedApp,
        *,
        options: ReplayOptions,
        models: PromptModels | None,
        runner: asyncio.Runner,
    ) -> None:
        self._store, self._graph, self._app, self._options, self._runner = store, graph, app, options, runner
        self._models = models
        self._ways = Ways(store)
        self._memory = PrivateMemory()  # its stores are those of all threads
        self._threads: dict[str, ReplayedThread] = {}  # by the first run; while a run of it is to come
        self._outcomes: dict[str, Outcome] = {}
        self._apart_ids: set[str] = set()  # forks of an app's own runs: they begin where their parents began

    def replay(self, prefixes: Sequence[str]) -> Iterator[Outcome]:
        named_ids = list({prefix_to_episode(self._store, prefix, command="replay") for prefix in prefixes})
        rows = self._store.sql(_CHOSEN, (LIVE, named_ids or None))
        tasks: Mapping[str, str] = {str(episode_id): str(task_id) for episode_id, task_id, _ in rows}
        self._apart_ids = {str(episode_id) for episode_id, _, is_apart in rows if is_apart}
        self._ways.read(tasks)
        branches = self._find_branches(tasks)
        to_come = Counter(branches.values())
        for episode_id in tasks:
            outcome = self._replay_named(episode_id, tasks) if named_ids else self._replay_way(episode_id, tasks)
            branch = branches.get(episode_id, "")
            to_come[branch] -= 1
            if to_come[branch] <= 0:
                self._threads.pop(branch, None)
            yield outcome

    def _find_branches(self, episode_ids: Iterable[str]) -> dict[str, str]:
        """The first run of the thread of each episode."""
        branches = {}
        for episode_id in episode_ids:
            with suppress(GraphError):  # said where it is replayed
                branches[episode_id] = self._ways.way_to(episode_id)[0]
        return branches

    def _replay_named(self, episode_id: str, tasks: Mapping[str, str]) -> Outcome:
        """Where all episodes are replayed, what earlier ones left in a store is there; here it has to be made."""
        with suppress(GraphError):  # said where it is replayed
            if load_run(self._store, episode_id).had_store:
                return self._replay_apart(episode_id, tasks[episode_id])
        return self._replay_way(episode_id, tasks)

    def _replay_apart(self, episode_id: str, task_id: str) -> Outcome:
        """Replays an episode with a memory of its own."""
        try:
            run = load_with_earlier(self._store, episode_id, self._ways)
            load = partial(load_run, self._store)
            repeated = replay_earlier(self._graph, run, self._options, load=load, runner=self._runner)
            return self._replay_run(run.run, repeated.thread, task_id)
        except EarlierRunError as error:
            reason = f"{EARLIER}, {error.episode_id}, did not come out the same: {error.fault}"
        except GraphError as error:
            reason = str(error).removeprefix("replay: ")
        return Outcome(episode_id, task_id, None, reason=reason)

    def _replay_way(self, episode_id: str, tasks: Mapping[str, str]) -> Outcome:
        if episode_id in self._apart_ids:
            return self._replay_apart(episode_id, tasks[episode_id])
        try:
            way = self._ways.way_to(episode_id)
        except GraphError as error:
            return Outcome(episode_id, tasks[episode_id], None, reason=str(error).removeprefix("replay: "))
        for each in way:
            if each not in self._outcomes:
                self._outcomes[each] = self._replay_one(each, way[0], tasks.get(each, ""))
            if each != episode_id and (fault := self._outcomes[each].fault) is not None:
                return Outcome(episode_id, tasks[episode_id], None, reason=f"{EARLIER}, {each}, {fault}")
        return self._outcomes[episode_id]

    def _replay_one(self, episode_id: str, first_id: str, task_id: str) -> Outcome:
        thread = self._threads.setdefault(first_id, ReplayedThread(PrivateMemory(self._memory)))
        try:
            return self._replay_run(load_run(self._store, episode_id), thread, task_id)
        except GraphError as error:
            return Outcome(episode_id, task_id, None, reason=str(error).removeprefix("replay: "))

    def _replay_run(self, run: RecordedRun, thread: ReplayedThread, task_id: str) -> Outcome:
        start = self._app.run_to_start(run)
        replayed = replay_run(
            self._graph,
            run,
            thread=thread,
            options=self._options,
            runner=self._runner,
            models=self._models,
            **start,
        )
        return Outcome(run.episode_id, task_id, replayed)


def replay(
    path: Path,
    prefixes: Sequence[str],
    app: ReplayedApp,
    options: ReplayOptions,
    models: PromptModels | None = None,
    *,
    as_json: bool,
    console: Console,
) -> bool:
    """Replays and prints; whether all came out the same."""
    outcomes = []
    for outcome in replay_episodes(path, prefixes, app, options=options, models=models):
        outcomes.append(outcome)
        if not as_json:
            print_line(console, outcome.to_line())
    if not outcomes:
        raise ConfigError(f"replay: there is no episode in {path}")
    replayed = [outcome.replayed for outcome in outcomes if outcome.replayed is not None]
    counts = {
        "episodes": len(outcomes),
        "same": sum(outcome.is_same for outcome in outcomes),
        "diverged": sum(one.divergence is not None for one in replayed),
        "not_replayed": len(outcomes) - len(replayed),
        "seconds": sum(one.seconds for one in replayed),
        "recorded_seconds": sum(one.recorded_seconds for one in replayed),
    }
    if as_json:
        print_line(console, json.dumps({"episodes": [outcome.to_json() for outcome in outcomes], "summary": counts}))
    else:
        print_line(
            console,
            f"{counts['same']} of {counts['episodes']} episodes came out the same, {counts['diverged']} diverged,"
            f" {counts['not_replayed']} could not be replayed; the app ran {counts['seconds']:.2f} s, loading and"
            f" comparing apart, and {counts['recorded_seconds']:.2f} s when it was recorded",
        )
    return counts["same"] == counts["episodes"]
