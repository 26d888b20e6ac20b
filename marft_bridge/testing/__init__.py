"""For an app's own tests: a recorded episode is run again on today's code, without a model.

    from marft_bridge.testing import replay

    def test_the_answer_to_the_question_of_monday():
        replay(graph, "4be1", store="traces.duckdb")

Invariant: it needs the light core alone, and no model is called.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from marft_bridge.common.hub_names import model_to_directory
from marft_bridge.replay.earlier_runs import EarlierRunError, load_with_earlier, replay_earlier
from marft_bridge.replay.episodes import file_to_run, load_run, path_to_store
from marft_bridge.replay.own_loop import call_without_loop
from marft_bridge.replay.prompt_ids import PromptModels, directory_to_models, path_to_models
from marft_bridge.replay.recorded_run import RecordedRun
from marft_bridge.replay.replayed_run import Replayed, ReplayOptions, replay_run, require_graph
from marft_bridge.replay.replayed_thread import ReplayedThread
from marft_bridge.traces.episode_prefix import prefix_to_episode
from marft_bridge.traces.store_reader import KeptJournals
from trace_store.records import RunRow

__all__ = ["replay"]

_journals = KeptJournals()


def replay(
    app: Any,
    episode: str | Path,
    *,
    store: str | Path | None = None,
    tools: str = "recorded",
    freeze_time: bool = False,
    seed: int | None = None,
    allow_connections: bool = False,
    model: str | Path | None = None,
) -> Replayed:
    """Runs a recorded episode again on `app`, its models answered from the record.

    Args:
        app: the compiled graph; one that `wrap` recorded is replayed as it was before.
        episode: the first digits of an episode's id, with `store`; or a file that `traces show --json` wrote.
        store: a store, an export of one, or a run folder.
        tools: `recorded` gives back what they gave; `run` runs them.
        freeze_time: the app's clock stands at the start of the recorded run.
        seed: what `random` and numpy begin with.
        allow_connections: whether the app's nodes may connect, to a database of theirs.
        model: the directory of the base model that answered, whose tokenizer the prompts are compared by, to the token;
            None: those that the run folder notes, for the nodes that they served.

    What was read of a store's journal is kept for the next replay of this process.
    Runs of the same thread that come before the episode are replayed first. Raises AssertionError, with the first
    difference, where a run does not come out the same; a BridgeError where `app` is no compiled graph, or the episode
    cannot be replayed.
    """
    __tracebackhide__ = True
    if tools not in ("recorded", "run"):
        raise ValueError(f"tools is 'recorded' or 'run', not {tools!r}")
    require_graph(app)
    options = ReplayOptions(
        "run" if tools == "run" else "recorded",
        freeze_time=freeze_time,
        seed=seed,
        allow_connections=allow_connections,
    )
    models = _find_models(store, model)
    run, thread, run_rows = _prepare(app, episode, store, options=options)
    models = None if models is None else models.with_runs(run_rows)
    replayed = call_without_loop(partial(replay_run, app, run, thread=thread, options=options, models=models))
    if replayed.divergence is not None:
        raise AssertionError(f"episode {replayed.episode_id} is not the same: {replayed.divergence}")
    return replayed


def _find_models(store: str | Path | None, model: str | Path | None) -> PromptModels | None:
    if model is not None:
        return directory_to_models(model_to_directory(str(model)))
    return None if store is None else path_to_models(Path(store))


def _prepare(
    app: Any, episode: str | Path, store: str | Path | None, *, options: ReplayOptions
) -> tuple[RecordedRun, ReplayedThread, list[RunRow]]:
    """The run, its thread as the runs before it left it, and what commands noted. The runs before are loaded one at a
    time: the store is open, for reading, until they have been replayed."""
    __tracebackhide__ = True
    if store is None:
        return file_to_run(Path(episode)), ReplayedThread(), []
    with _journals.open_for_reading(path_to_store(Path(store))) as reader:
        run = load_with_earlier(reader, prefix_to_episode(reader, str(episode), command="replay"))
        load = partial(load_run, reader)
        try:
            repeated = call_without_loop(partial(replay_earlier, app, run, options, load=load))
        except EarlierRunError as error:
            thread = f"an earlier run of the thread of {run.run.episode_id}"
            raise AssertionError(f"episode {error.episode_id}, {thread}, is not the same: {error.fault}") from None
        return run.run, repeated.thread, reader.runs()
