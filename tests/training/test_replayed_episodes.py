"""Owns: which stored episodes join a round as replay.

- Only those that can be learned from are drawn: a draw of an episode that failed, or was stopped before its reward was
  there, would leave a round with less replay than was asked for.
- Episodes of other programs join as successes of the tasks that they are of, also where a round is played again.
- What is measured by is not learned from, whatever another program calls it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import duckdb
import pytest
from support.growth_rig import fill, trace_id
from support.sample_spans import SampleTrace
from support.school_rig import TASKS, School, learned, school_in

from marft_bridge.common.errors import ConfigError
from marft_bridge.config.progress import ProgressOptions
from marft_bridge.rollouts.app import split_tasks
from marft_bridge.runs.run_folder import read_metrics
from marft_bridge.training import train as training
from marft_bridge.training.progress import split_measured
from marft_bridge.training.stored_episodes import StoredEpisodes
from trace_store.parquet import store_to_parquet
from trace_store.records import Reward
from trace_store.store import TraceStore
from trainers.errors import TrainError


@pytest.fixture
def school(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[School]:
    with school_in(tmp_path, monkeypatch) as opened:
        yield opened


@pytest.mark.slow
def test_what_cannot_be_learned_from_is_not_drawn(school: School) -> None:
    school.collect()
    with school.store() as store:
        stored = [episode.episode_id for episode in store.episodes(run_id="collect")]
    assert len(stored) == 20
    failed, unrewarded, fine = stored[:6], stored[6:14], stored[14:]
    with duckdb.connect(str(school.run / "store.duckdb")) as con:
        con.execute("UPDATE episodes SET outcome = 'failed', reason = 'a test' WHERE episode_id IN ?", [failed])
        con.execute("DELETE FROM rewards WHERE episode_id IN ?", [unrewarded])
    trainer = {"importance": {"mismatch": "truncate"}, "replay": {"share": 0.5, "max_staleness": 4}}
    school.train(without_signal=True, trainer=trainer)  # so few episodes are left that nothing is forecast
    lines = read_metrics(school.run / "metrics.jsonl")
    assert [line.get("replayed") for line in lines] == [None, 6]  # as many as the six fresh ones
    replayed = [episode.episode_id for episode in school.learned[-12:] if episode.run_id == "collect"]
    assert sorted(replayed) == sorted(fine)


@pytest.mark.slow
def test_successes_of_before_are_those_that_earned_more_than_their_task_usually_does(school: School) -> None:
    school.collect()
    with school.store() as store:
        stored = list(store.episodes(run_id="collect"))
    best = {episode.episode_id for episode in stored[::5]}
    with duckdb.connect(str(school.run / "store.duckdb")) as con:
        con.execute("UPDATE rewards SET value = 0.0")
        con.execute("UPDATE rewards SET value = 50.0 WHERE episode_id IN ?", [sorted(best)])
    school.train(trainer={"replay": {"successes": 0.5}})
    lines = read_metrics(school.run / "metrics.jsonl")
    assert [line.get("replayed") for line in lines] == [None, len(best)]
    replayed = {episode.episode_id for episode in school.learned[-6 - len(best) :] if episode.run_id == "collect"}
    assert replayed == best


@pytest.mark.slow
def test_episodes_of_others_join_a_round_as_successes_of_its_tasks_and_again_where_it_was_killed(
    school: School,
) -> None:
    """All that was collected earned 0. Others' episodes earned 50: two of a task of the rounds, by its id and by its
    input under another one; one without a call to imitate, and one of a held-out task, which are not drawn."""
    school.collect()
    with duckdb.connect(str(school.run / "store.duckdb")) as con:
        con.execute("UPDATE rewards SET value = 0.0")
    (free, *_), (held, *_) = split_tasks(TASKS, 0.25)
    traces = [
        one_call("1", TASK_ID=free["id"], TASK=json.dumps(free)),
        one_call("2", TASK_ID="session/2", TASK=json.dumps({"number": free["number"], "log": []})),
        one_call("3", node="stranger:1", TASK_ID=free["id"], TASK=json.dumps(free)),
        one_call("4", TASK_ID="session/4", TASK=json.dumps({"number": held["number"], "log": []})),
    ]
    put_traces(school, traces)
    options = {"replay": {"successes": 0.5}, "experimental": {"success_traces": True}}
    fields: dict[str, Any] = {"trainer": options, "traces": [str(school.folder / "other")], "without_signal": True}
    collected = school.folder / "collected"
    copytree(school.run, collected)
    said = school.train(**fields)
    assert "rounds draw successes from 2 of 3 episodes of other programs" in said
    assert [line.get("replayed") for line in read_metrics(school.run / "metrics.jsonl")] == [None, 2]
    joined = {e.episode_id: e.task_id for e in school.rounds[-1].episodes if e.replayed}
    assert joined == {trace_id("1"): free["id"], trace_id("2"): free["id"]}
    whole = learned(school)
    rmtree(school.run)
    copytree(collected, school.run)
    school.train_until_killed(3, **fields)
    school.train(resume=True, **fields)
    assert learned(school) == whole


def test_who_has_no_episode_of_others_is_told_so(school: School) -> None:
    school.collect()
    with pytest.raises(ConfigError, match=r"success_traces: this run has no episode of another program: name some in"):
        school.train(trainer={"replay": {"successes": 0.5}, "experimental": {"success_traces": True}})


def test_a_trace_is_of_the_task_whose_content_it_has_whatever_its_id_says(school: School) -> None:
    """Another program calls its tasks as this one does. Traces: the content of the second task under the first one's
    id; the first one's own; no content; content that no task has, twice, once under an id that no task has."""
    school.collect()
    first, second = split_tasks(TASKS, 0.25)[0][:2]
    put_traces(
        school,
        [
            one_call(
                "1", TASK_ID=first["id"], TASK=json.dumps({"id": first["id"], "number": second["number"], "log": []})
            ),
            one_call("2", TASK_ID=first["id"], TASK=json.dumps(first)),
            one_call("3", TASK_ID=first["id"], TASK="{}"),
            one_call("4", TASK_ID=first["id"], TASK=json.dumps({"number": 999, "log": []})),
            one_call("5", TASK_ID="session/5", TASK=json.dumps({"number": 999, "log": []})),
        ],
    )
    options = {"replay": {"successes": 0.5}, "experimental": {"success_traces": True}}
    stored = stored_for(school, trainer=options, traces=[str(school.folder / "other")])
    assert {trace.episode.episode_id: trace.episode.task_id for trace in stored.traces} == {
        trace_id("1"): second["id"],
        trace_id("2"): first["id"],
        trace_id("3"): first["id"],
        trace_id("4"): f"trace:{first['id']}",
        trace_id("5"): "session/5",
    }


def test_no_trace_of_a_measured_task_is_learned_from_under_another_id(school: School) -> None:
    """Traces: a measured task under its own id, by its content and by its input under others; and a task of rounds."""
    progress = {"agent": "reasoner", "metric": "correct", "tasks": 4}
    (measured, *_), (free, *_) = split_measured(split_tasks(TASKS, 0.25)[0], ProgressOptions(**progress), 0)
    school.collect()
    put_traces(
        school,
        [
            one_call("1", TASK_ID=measured["id"], TASK=json.dumps(measured)),
            one_call("2", TASK_ID="session/2", TASK=json.dumps(measured | {"id": "session/2"})),
            one_call("3", TASK_ID="session/3", TASK=json.dumps({"number": measured["number"], "log": []})),
            one_call("4", TASK_ID="session/4", TASK=json.dumps({"number": free["number"], "log": []})),
        ],
    )
    trainer: dict[str, Any] = {
        "sides": {"left": ["reasoner"], "right": ["actor"]},
        "shaping": [{"reward": "progress", "level": "agent", "weight": 1.0}],
        "advantage": {"estimator": "rae", "normalize": "none"},
        "importance": {"mismatch": "truncate"},
    }
    stored = stored_for(school, trainer=trainer, traces=[str(school.folder / "other")], progress=progress)
    assert measured in stored.measured
    own_ids = {*stored.own_ids}
    assert {t.episode.episode_id for t in stored.collected} - own_ids == {trace_id("4")}


def put_traces(school: School, traces: Sequence[Any]) -> None:
    """In the folder `other`: each earned 50."""
    path = school.folder / "other.duckdb"
    fill(path, traces)
    with TraceStore.open(path) as store:
        store.put_rewards([Reward(trace_id(str(n)), "reward", 50.0, "test", 1) for n in range(1, len(traces) + 1)])
        store_to_parquet(store, school.folder / "other")


def stored_for(school: School, **options: Any) -> StoredEpisodes:
    """What a training with these options would begin with."""
    read: list[StoredEpisodes] = []
    real = training.read_stored_episodes

    def read_and_stop(*args: Any, **named: Any) -> StoredEpisodes:
        read.append(real(*args, **named))
        raise TrainError("read")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "read_stored_episodes", read_and_stop)
        with pytest.raises(TrainError, match="read"):
            school.train(**options)
    return read[0]


def one_call(name: str, node: str = "actor:1", **root: Any) -> Any:
    sample = SampleTrace(name)
    sample.call("call", sample.node(node, 1, 9, step=1), 2, 3)
    return sample.spans(**root)
