"""Owns: pay for what a round changed: how a change is measured, whom it is paid to, and when that is learned from.

- A change is the difference of two versions over the same tasks, which are in no round and in no stored lesson.
- It reaches the calls of the paid agent in the round that made it, in the update of the next round, and no other call.
- A run that was stopped measures, pays and learns as one that was not. What does not go with it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.school_rig import School, learned, school_in
from support.tiny_trajectory import action, trajectory

from marft_bridge.common.errors import ConfigError
from marft_bridge.config.bridge import TrainOptions
from marft_bridge.config.progress import PROGRESS, ProgressOptions
from marft_bridge.runs.run_folder import MEASURE, TRAIN, RunFolder
from marft_bridge.training.progress import (
    LEARNED_BEFORE,
    NOT_SETTLED,
    Change,
    change_to_rewards,
    join_settled,
    split_measured,
)
from trace_store.records import Reward, Trajectory
from trainers.batch import Round
from trainers.marft import MarftTrainer

OPTIONS = ProgressOptions(agent="coach", metric="correct")


def game(task_id: str, *nodes: str, **team: float) -> Trajectory:
    """An episode in which these nodes acted, with team rewards."""
    made = trajectory(task_id, [action(node) for node in nodes])
    rewards = tuple(Reward(made.episode.episode_id, name, value, "test", 1) for name, value in team.items())
    return replace(made, rewards=rewards)


def test_an_episodes_part_of_a_change_is_the_change_times_its_scale() -> None:
    change = Change(before=0.25, after=0.375, tasks=8, known_ns=77)
    episodes = [
        game("half", "coach", "player", learnable=0.5),
        game("none", "coach", "player", learnable=0.0),
        game("unknown", "coach", "player"),
        game("silent", "player", learnable=1.0),
    ]
    scaled = change_to_rewards(change, episodes, OPTIONS.model_copy(update={"scaled_by": "learnable"}))
    assert scaled == [
        Reward("episode of half", PROGRESS, 0.0625, "train.progress", 77, scope="agent", node="coach"),
        Reward("episode of none", PROGRESS, 0.0, "train.progress", 77, scope="agent", node="coach"),
    ]
    same = {reward.episode_id: reward.value for reward in change_to_rewards(change, episodes, OPTIONS)}
    assert same == {"episode of half": 0.125, "episode of none": 0.125, "episode of unknown": 0.125}


def test_fresh_calls_of_the_paid_agent_wait_and_settled_ones_are_alone() -> None:
    fresh, settled = game("new", "exam", "coach", "player"), game("old", "exam", "coach", "player")
    joined = join_settled([fresh], [settled], "coach")
    reasons = [[a.untrainable_reason for a in each.actions] for each in joined]
    assert reasons == [[None, NOT_SETTLED, None], [LEARNED_BEFORE, None, LEARNED_BEFORE]]
    assert [[a.trainable for a in each.actions] for each in joined] == [[True, False, True], [False, True, False]]
    assert fresh.actions[1].trainable  # what was given is as it was


def test_measured_tasks_are_drawn_by_the_seed_and_are_in_no_round() -> None:
    tasks = [{"id": f"t{n}"} for n in range(12)]
    options = OPTIONS.model_copy(update={"tasks": 5})
    measured, rest = split_measured(tasks, options, 0)
    assert (len(measured), len(rest)) == (5, 7)
    assert sorted(task["id"] for task in (*measured, *rest)) == sorted(task["id"] for task in tasks)
    assert split_measured(tasks[::-1], options, 0)[0] == measured
    assert split_measured(tasks, options, 1)[0] != measured
    assert split_measured(tasks, None, 0) == ([], tasks)
    with pytest.raises(ConfigError, match=r"^train.progress.tasks keeps 5 of 5 training tasks"):
        split_measured(tasks[:5], options, 0)


TRAINER: dict[str, Any] = {
    "sides": {"left": ["reasoner"], "right": ["actor"]},
    "shaping": [
        {"reward": "own", "level": "agent", "weight": 1.0},
        {"reward": PROGRESS, "level": "agent", "weight": 2.0},
    ],
    "advantage": {"estimator": "rae", "normalize": "none"},
    "importance": {"mismatch": "truncate", "engine_tolerance": 1e3},
    "offline": {"mode": "off"},
}
PLAN: dict[str, Any] = {
    "rounds": 3,
    "episodes_per_round": 6,
    "stop_early": False,
    "progress": {"agent": "reasoner", "metric": "correct", "tasks": 4},
    "trainer": TRAINER,
}


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"progress": None}, "'progress' is paid where there is a table [train.progress]"),
        ({"trainer": TRAINER | {"shaping": TRAINER["shaping"][:1]}}, "add it to train.trainer.shaping"),
        ({"trainer": TRAINER | {"importance": {"mismatch": "none"}}}, "proximal to 'recomputed', and its mismatch"),
        ({"trainer": TRAINER | {"agents": {"reasoner": {"adapter": "x"}}}}, "needs an adapter of its own"),
        ({"trainer": TRAINER | {"agents": {"reasoner": {"frozen": True}}}}, "needs an adapter of its own"),
        ({"trainer": TRAINER | {"replay": {"share": 0.5}}}, "leave out train.trainer.replay.share or successes"),
        ({"trainer": TRAINER | {"objective": {"update": "alternating"}}}, "leave out train.trainer.objective.update"),
        ({"trees": {}}, "leave out train.trees"),
        ({"league": {}}, "leave out train.league"),
        ({"max_staleness": 1}, "leave out train.max_staleness"),
    ],
)
def test_what_does_not_go_with_progress_is_refused(options: dict[str, Any], line: str) -> None:
    assert TrainOptions.model_validate(PLAN).progress is not None
    with pytest.raises(ValidationError) as caught:
        TrainOptions.model_validate(PLAN | options)
    assert line in str(caught.value)


REWARD = """

def game(task, result):
    correct = float(result["log"][-1] == "yes")
    return {"correct": correct, "reward": 0.5, "own": {"agent:reasoner": 0.25, "agent:actor": correct}}
"""


def to_game(school: School) -> None:
    """Has the actor of version 2, and of no other, right on every task."""
    school.use_reward(REWARD, "game")
    school.server.answer = lambda body: "yes" if body["model"] == "actor@2" else "no"


@pytest.fixture
def school(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[School]:
    with school_in(tmp_path, monkeypatch) as made:
        to_game(made)
        yield made


@pytest.mark.slow
def test_a_change_reaches_the_paid_agents_calls_of_its_round_and_no_others(
    school: School, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[Round] = []
    newest: list[int] = []
    real = MarftTrainer.update

    def update(trainer: MarftTrainer, trajectories: Any, *rest: Any, **options: Any) -> Any:
        batches.append(trainer._to_round(trajectories, "on_policy"))
        newest.append(options["newest"])
        return real(trainer, trajectories, *rest, **options)

    monkeypatch.setattr(MarftTrainer, "update", update)
    school.collect(**PLAN)
    said = school.train(without_signal=True, **PLAN)
    with school.store() as store:
        measured = list(store.trajectories(run_ids=[MEASURE]))
        rounds = {n: list(store.trajectories(run_ids=[TRAIN], round=n)) for n in (1, 2, 3)}
        trained_on = store.sql("SELECT node, version, episode_id FROM adapter_episodes WHERE version > 1")
    # Versions 1 to 3, each once on the same four tasks, of which no round and no lesson has one.
    tasks = {(each.episode.round, each.episode.task_id) for each in measured}
    measured_ids = {task_id for _, task_id in tasks}
    assert (len(measured), len(tasks), len(measured_ids)) == (12, 12, 4)
    assert {number for number, _ in tasks} == {1, 2, 3}
    assert not measured_ids & {episode.task_id for episode in school.learned}
    # Measured 0, 1 and 0: round 1 changed it by 1, round 2 by -1; of round 3 it is not known.
    paid = {n: {r.value for each in rounds[n] for r in each.rewards if r.name == PROGRESS} for n in rounds}
    assert paid == {1: {1.0}, 2: {-1.0}, 3: set()}
    metrics = [json.loads(line) for line in RunFolder(school.run).metrics.read_text().splitlines()]
    assert [line["progress"] for line in metrics if line["phase"] == "online"] == [
        None,
        {"before": 0.0, "after": 1.0, "change": 1.0, "tasks": 4},
        {"before": 1.0, "after": 0.0, "change": -1.0, "tasks": 4},
    ]
    assert "round 1 changed correct by +1.000, from 0.000 to 1.000 on 4 measured tasks" in said
    # Who learned what, in which update: [agent, round of the call, what progress it was paid, weighed by 2].
    round_of = {each.episode.episode_id: n for n in rounds for each in rounds[n]}
    seen = [
        {
            (item.agent, round_of[episode.episode_id], episode.rewards.private.get(PROGRESS, {}).get(item.agent))
            for episode in batch.episodes
            for item in episode.actions
        }
        for batch in batches
    ]
    assert seen == [
        {("actor", 1, None)},
        {("actor", 2, None), ("reasoner", 1, 2.0)},
        {("actor", 3, None), ("reasoner", 2, -2.0)},
    ]
    calls = [action_id for batch in batches for episode in batch.episodes for action_id in episode.action_ids]
    assert len(calls) == len(set(calls)) == 6 + 12 + 12
    assert newest == [1, 2, 3]  # so a late lesson is known to be of an older version
    late = {(node, version, round_of[episode_id]) for node, version, episode_id in trained_on}
    assert late == {("actor", v, v - 1) for v in (2, 3, 4)} | {("reasoner", v, v - 2) for v in (3, 4)}


@pytest.mark.slow
@pytest.mark.parametrize("played", [2, 13, 17])
def test_a_run_that_was_stopped_measures_pays_and_learns_the_same(
    played: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped while version 1 is measured, while version 2 is, and in round 2."""
    contents = []
    for killed in (False, True):
        folder = tmp_path / str(killed)
        folder.mkdir()
        with school_in(folder, monkeypatch) as school:
            to_game(school)
            school.collect(**PLAN)
            if killed:
                school.train_until_killed(played, without_signal=True, **PLAN)
            school.train(resume=killed, without_signal=True, **PLAN)
            contents.append(learned(school))
            with school.store() as store:
                assert store.sql("SELECT count(*) FROM rewards WHERE name = 'progress'") == [(12,)]
    assert contents[0] == contents[1]
