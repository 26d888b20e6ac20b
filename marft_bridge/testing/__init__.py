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

from marft_bridge.replay.episodes import load_runs
from marft_bridge.replay.own_loop import call_without_loop
from marft_bridge.replay.replayed_run import Replayed, ReplayedThread, ReplayOptions, replay_run

__all__ = ["replay"]


def replay(
    app: Any,
    episode: str | Path,
    *,
    store: str | Path | None = None,
    tools: str = "recorded",
    freeze_time: bool = False,
    seed: int | None = None,
    allow_connections: bool = False,
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

    Runs of the same thread that come before the episode are replayed first. Raises AssertionError, with the first
    difference, where a run does not come out the same; a BridgeError where the episode cannot be replayed.
    """
    __tracebackhide__ = True
    if tools not in ("recorded", "run"):
        raise ValueError(f"tools is 'recorded' or 'run', not {tools!r}")
    options = ReplayOptions(
        "run" if tools == "run" else "recorded",
        freeze_time=freeze_time,
        seed=seed,
        allow_connections=allow_connections,
    )
    runs = load_runs(episode, store)
    thread = ReplayedThread()
    replayed: Replayed | None = None
    for run in runs:
        replayed = call_without_loop(partial(replay_run, app, run, thread=thread, options=options))
        if replayed.divergence is not None:
            earlier = "" if run is runs[-1] else f", an earlier run of the thread of {runs[-1].episode_id}"
            raise AssertionError(f"episode {replayed.episode_id}{earlier} is not the same: {replayed.divergence}")
    assert replayed is not None  # `load_runs` gives one at least
    return replayed
