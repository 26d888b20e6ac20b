"""Owns: no held-out task is learned from, and no task that was learned from is compared on.

Through the real commands, on a tiny model and a stand-in for its server:
- What `collect` and fresh rounds run, what lies in the store, in exports and in a round that was cut short, and what is
  replayed: episodes of held-out tasks are left out, and how many is said; known by id, by content, by graph input.
- The trainer refuses what is held out, whoever hands it over.
- A task that a run folder learned from is found again, wherever its episode lay, and refused as held out.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.growth_rig import fill
from support.sample_spans import SampleTrace, chain
from support.school_rig import TASKS, School, Task, save_school_model, school_in
from support.tiny_policy import make_action, make_trajectory
from support.trainer_options import trainer_options

from marft_bridge.common.errors import ConfigError, GraphError
from marft_bridge.common.progress import Reporter
from marft_bridge.comparison.command import compare
from marft_bridge.recording.tool_lineage import request_to_tools, tools_to_lineage, tools_to_single_lineage
from marft_bridge.rollouts.app import split_tasks
from marft_bridge.rollouts.held_out import LEARNED_FILE, HeldOutTasks, heldout_leaks, record_learned_tasks
from trace_store.assemble import spans_to_trajectory
from trace_store.parquet import store_to_parquet
from trace_store.records import RunRow
from trace_store.store import TraceStore
from trainers import marft
from trainers.batch import trajectories_to_round
from trainers.errors import TrainError


def ids(tasks: list[Task]) -> set[str]:
    return {str(task["id"]) for task in tasks}


def sides(heldout: float, tasks: list[Task] = TASKS) -> tuple[set[str], set[str]]:
    """Ids of the training tasks and of the held-out ones."""
    train, held = split_tasks(tasks, heldout)
    return ids(train), ids(held)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_school_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def school(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[School]:
    with school_in(tmp_path, monkeypatch) as opened:
        yield opened


# -- what runs ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_neither_collect_nor_a_round_runs_a_held_out_task(school: School) -> None:
    school.collect()
    school.train()
    train, held = sides(0.25)
    assert school.played("collect") <= train
    assert school.played("train") <= train
    assert {episode.task_id for episode in school.learned} <= train
    assert not {episode.task_id for episode in school.learned} & held


def test_a_training_task_that_is_held_out_under_another_id_does_not_run(school: School) -> None:
    """Its answer may be another, and its topic: with one input it is one task."""
    _, held = split_tasks(TASKS, 0.25)
    twins = [task | {"id": f"again-{task['id']}", "topic": "other"} for task in held]
    tasks = [*TASKS, *twins]
    train, _ = sides(0.25, tasks)
    leaking = {twin["id"] for twin in twins} & train
    assert leaking  # some of them fall on the training side
    school.write(tasks)
    said = school.collect()
    assert f"{len(leaking)} of {len(train)} training tasks left out: they are held out under another id" in said
    school.train()
    assert not (school.played("collect") | school.played("train")) & leaking


def test_where_all_training_tasks_are_held_out_too_nothing_runs() -> None:
    tasks = [{"id": "a", "number": 1}, {"id": "b", "number": 1}]
    with pytest.raises(GraphError, match="every training task is held out under another id"):
        HeldOutTasks(tasks[:1], lambda task: task).drop_held_out_tasks(tasks[1:], lambda _: None)


# -- what is stored -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_episodes_of_tasks_that_were_held_out_since_are_left_out_and_counted(school: School) -> None:
    school.collect(heldout=0.25)
    newly = school.played("collect") & sides(0.6)[1]
    assert newly
    said = school.train(heldout=0.6)
    assert f"{len(newly)} of 20 stored episodes left out: their tasks are held out" in said
    assert {episode.task_id for episode in school.learned} <= sides(0.6)[0]
    with school.store() as store:
        rows = store.sql("SELECT DISTINCT task_id FROM adapter_episodes JOIN episodes USING (episode_id)")
    assert {task_id for (task_id,) in rows} <= sides(0.6)[0]


@pytest.mark.slow
def test_where_every_stored_episode_is_held_out_there_is_nothing_to_train_on(school: School) -> None:
    school.collect()
    stored = [task for task in TASKS if task["id"] in school.played("collect")]
    fresh = {"number": 1000, "topic": "any"}
    school.write([*(renamed(task, held_out=True) for task in stored), renamed(fresh, held_out=False)])
    with pytest.raises(ConfigError, match="holds no collected episode"):
        school.train()
    assert school.learned == []


def renamed(task: Task, held_out: bool) -> Task:
    """The task by an id that puts it on this side."""
    candidates = [task | {"id": f"{task['number']}-{n}"} for n in range(1000)]
    return split_tasks(candidates, 0.25)[held_out][0]


def elsewhere(folder: Path, held: Task, free: Task) -> str:
    """An export that holds, of a held-out task: its episode, one by another id, a live one of its input; and of a task
    that is not: one of a comparison, and two others."""
    spec = [
        ("1", held["id"], held, "train"),
        ("2", "another id", held | {"id": "another id"}, "train"),
        ("3", "session/1", {"number": held["number"], "log": []}, "live"),
        ("4", free["id"], free, "heldout"),
        ("5", free["id"], free, "train"),
        ("6", "session/2", {"number": free["number"], "log": []}, "live"),
    ]
    path = folder / "other.duckdb"
    fill(path, [_trace(name, TASK_ID=i, TASK=json.dumps(task), SPLIT=split) for name, i, task, split in spec])
    with TraceStore.open(path) as store:
        store.put_run(RunRow("run", "collect", 1, {}))
        store_to_parquet(store, folder / "other")
    return str(folder / "other")


def _trace(name: str, **root: Any) -> Any:
    sample = SampleTrace(name)
    node = sample.node("actor:1", 1, 9, step=1)
    sample.call("call", node, 2, 3, PROMPT_IDS=[1, 2], SAMPLED_IDS=[3, 4], LOGPROBS=[-0.5, -0.5])
    return sample.spans(**root)


@pytest.mark.slow
def test_an_export_with_held_out_tasks_is_learned_from_without_them(school: School) -> None:
    school.collect()
    train, held = split_tasks(TASKS, 0.25)
    place = elsewhere(school.folder, held[0], train[0])
    said = school.train(rounds=0, traces=[place])
    assert "5 episodes from" in said  # the comparison's is not even read
    assert "3 of 25 stored episodes left out: their tasks are held out" in said
    foreign = {episode.episode_id[-1] for episode in school.learned if episode.run_id == "run"}
    assert foreign == {"5", "6"}


# -- what a resumed or a replaying round takes ----------------------------------------------------------------


@pytest.mark.slow
def test_a_round_that_was_cut_short_is_learned_from_without_what_is_held_out_since(
    school: School, monkeypatch: pytest.MonkeyPatch
) -> None:
    school.collect()
    real = marft.MarftTrainer.update

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(marft.MarftTrainer, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        school.train(episodes_per_round=18)
    monkeypatch.setattr(marft.MarftTrainer, "update", real)
    newly = school.played("train") & sides(0.6)[1]
    assert newly  # only 17 of the tasks that are drawn from are not among them
    school.learned.clear()
    said = school.train(resume=True, heldout=0.6, episodes_per_round=18)
    assert f"{len(newly)} of " in said
    assert "episodes of round 1 left out: their tasks are held out" in said
    assert {episode.task_id for episode in school.learned} <= sides(0.6)[0]


@pytest.mark.slow
def test_replayed_episodes_are_not_held_out_either(school: School) -> None:
    school.collect()
    replay: dict[str, Any] = {
        "trainer": {"importance": {"mismatch": "truncate"}, "replay": {"share": 0.5, "max_staleness": 4}}
    }
    school.train(**replay)
    school.learned.clear()
    said = school.train(resume=True, heldout=0.6, rounds=2, **replay)
    assert "replayed episodes left out: their tasks are held out" in said
    assert {episode.task_id for episode in school.learned} <= sides(0.6)[0]


# -- the last door --------------------------------------------------------------------------------------------


def test_no_batch_is_made_of_a_held_out_episode(tiny: Path) -> None:
    fine = make_trajectory([make_action("actor", [1], [2])], 1.0)
    compared = spans_to_trajectory(chain().spans(SPLIT="heldout"))
    with pytest.raises(TrainError, match="of task 'task' is held out"):
        trajectories_to_round([fine, compared], ["actor"], "reward", {"actor": 32}, "imitation")
    options = trainer_options(lora={"rank": 4})
    trainer = marft.MarftTrainer(options, tiny, ["actor"], 0, is_heldout=lambda episode: episode.task_id == "t")
    for hand_over in (trainer.warm_up, trainer.replay, trainer.update):
        with pytest.raises(TrainError, match="of task 't' is held out"):
            hand_over([fine])
    with pytest.raises(TrainError, match="is held out"):
        trainer.update([compared])
    assert trainer.rounds == 0


# -- what was learned from ------------------------------------------------------------------------------------


def test_a_task_that_was_trained_on_is_not_compared_on(school: School) -> None:
    school.collect()
    school.train()
    learned = {episode.task_id for episode in school.learned}
    _, held = split_tasks(TASKS, 0.25)
    with school.store() as store:
        assert heldout_leaks(store, held) == []
        _, more = split_tasks(TASKS, 0.6)
        leaked = heldout_leaks(store, more)
        assert set(leaked) == learned & ids(more)
        # Under other ids they are the same tasks.
        assert heldout_leaks(store, [task | {"id": f"new-{task['id']}"} for task in more]) == [
            f"new-{i}" for i in leaked
        ]
    with pytest.raises(ConfigError, match=f"{len(leaked)} of {len(more)} held-out tasks were trained on"):
        compare(school.config(heldout=0.6), Reporter(Console(file=io.StringIO())), resume=False)


def test_what_was_learned_from_elsewhere_is_known_too(school: School) -> None:
    school.collect()
    free = {"id": "far", "number": 7000, "topic": "any"}
    place = elsewhere(school.folder, split_tasks(TASKS, 0.25)[1][0], free)
    school.train(rounds=0, traces=[place])
    with school.store() as store:
        assert heldout_leaks(store, [free, {"id": "not far", "number": 7001, "topic": "any"}]) == ["far"]
        assert heldout_leaks(store, [free | {"id": "renamed"}]) == ["renamed"]


def test_what_was_learned_is_noted_without_its_content(tmp_path: Path) -> None:
    record_learned_tasks(tmp_path, [spans_to_trajectory(chain().spans(TASK='{"question": "who is Ada?"}'))])
    noted = (tmp_path / LEARNED_FILE).read_text()
    assert "Ada" not in noted
    assert (tmp_path / LEARNED_FILE).stat().st_mode & 0o777 == 0o600
    record_learned_tasks(tmp_path, [])
    assert (tmp_path / LEARNED_FILE).read_text() == noted


def test_in_a_folder_from_before_it_was_recorded_the_collected_episodes_count(tmp_path: Path) -> None:
    from trace_store.records import AdapterRow

    path = tmp_path / "store.duckdb"
    fill(path, [chain("a").spans(RUN_ID="collect", TASK_ID="t1"), chain("b").spans(RUN_ID="session", TASK_ID="t2")])
    tasks = [{"id": "t1", "x": 1}, {"id": "t2", "x": 2}]
    with TraceStore.open(path) as store:
        assert heldout_leaks(store, tasks) == []  # nothing was trained
        store.put_adapter(AdapterRow("a", 1, 0, "somewhere", "0" * 64, "0" * 64, 1))
        assert heldout_leaks(store, tasks) == ["t1"]


# -- tools ----------------------------------------------------------------------------------------------------


def tools(*names: str) -> str:
    offered = {"actor": request_to_tools({"tools": [{"function": {"name": name}} for name in names]})}
    return json.dumps({**tools_to_lineage(offered), **tools_to_single_lineage(offered)})


def test_stored_runs_with_different_tools_are_not_learned_from_together(school: School) -> None:
    first, second = (str(task["id"]) for task in split_tasks(TASKS, 0.25)[0][:2])
    traces = [
        _trace("1", RUN_ID="collect", LINEAGE=tools("search"), TASK_ID=first),
        _trace("2", RUN_ID="other", LINEAGE=tools("search", "calc"), TASK_ID=second),
    ]
    path = school.folder / "other.duckdb"
    fill(path, traces)
    with TraceStore.open(path) as store:
        store_to_parquet(store, school.folder / "other")
    place = str(school.folder / "other")
    with pytest.raises(ConfigError, match=r"of node 'actor' changed: added calc \(between run collect and run other\)"):
        school.train(traces=[place])
    assert school.learned == []
    school.train(traces=[place], allow_tool_change=True, rounds=0)
    assert {episode.run_id for episode in school.learned} == {"collect", "other"}


@pytest.mark.slow
def test_a_round_with_other_tools_is_refused_before_its_update(school: School) -> None:
    """What is stored had a tool that the app offers no more."""
    school.run.mkdir()
    first = str(split_tasks(TASKS, 0.25)[0][0]["id"])
    fill(school.run / "store.duckdb", [_trace("1", RUN_ID="collect", LINEAGE=tools("search"), TASK_ID=first)])
    with pytest.raises(ConfigError, match=r"'actor' changed: removed search \(between what was learned from and round"):
        school.train(without_signal=True)  # one trace forecasts no signal
    assert not (school.run / "adapters/actor/2").exists()
    said = school.train(resume=True, allow_tool_change=True)
    assert "trained reasoner@2, actor@2" in said
