"""Owns: a round plays what was planned, and then what its flat groups lack, up to the budget; a round that was stopped
anywhere goes on with the same requests.

On a scripted duo and a real store, and in whole trainings on a tiny model.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langgraph.graph import END, START, StateGraph
from support.duo_rig import COMMON, TASKS, Rig
from support.school_rig import School, school_in
from support.tiny_policy import make_action, make_trajectory

from graphs import math_duo
from marft_bridge.config.bridge import BridgeConfig, TrainOptions
from marft_bridge.rewards.limit_reward import LimitReward
from marft_bridge.rollouts.episode_plan import EpisodeRequest
from marft_bridge.training.round_plan import (
    RoundPlan,
    next_wave,
    plan_round,
    runs_of_rounds,
    runs_of_stored,
    wasted_share,
)
from marft_bridge.training.task_draw import LostRun, TaskReward
from trace_store.records import Outcome, Reward, Trajectory

GRPO = {"advantage": {"estimator": "grpo"}, "offline": {"mode": "off"}}
OF_ROUND = COMMON | {"round": 1}


def options(**changes: Any) -> TrainOptions:
    return TrainOptions.model_validate({"episodes_per_round": 8, "samples_per_task": 2, "trainer": GRPO} | changes)


def in_groups(requests: Sequence[EpisodeRequest]) -> list[tuple[str, int]]:
    return [(request.task["id"], request.sample) for request in requests]


# -- the plan -----------------------------------------------------------------------------------------------------


def test_a_plan_has_the_groups_of_the_round_and_those_that_may_be_added_each_request_once() -> None:
    plan = plan_round(TASKS, options(), seed=5, **OF_ROUND)
    assert in_groups(plan.planned) == [(f"t{n}", sample) for n in range(4) for sample in range(2)]
    assert in_groups(plan.addable) == [("t4", 0), ("t4", 1), ("t5", 0), ("t5", 1)]
    assert len({request.key for request in plan.requests}) == len({request.seed for request in plan.requests}) == 12


@pytest.mark.parametrize(
    ("tasks", "changes", "added"),
    [
        (8, {"refill": 0.25}, 1),
        (8, {"refill": 0.6}, 3),  # 2.4 groups
        (8, {"refill": 0.05}, 1),  # 0.2 groups: what may be refilled at all has a group for it
        (8, {"refill": 9.0}, 4),  # there are no further tasks
        (8, {"refill": 0.0}, 0),
        (5, {}, 1),
        (4, {}, 0),
        (3, {}, 0),
        (8, {"trainer": {}}, 0),  # gae compares no groups
    ],
)
def test_the_budget_is_a_share_of_the_groups_and_no_more_than_further_tasks(
    tasks: int, changes: dict[str, Any], added: int
) -> None:
    plan = plan_round(TASKS[:tasks], options(**changes), seed=0, **OF_ROUND)
    assert (len(plan.addable_tasks), len(plan.addable), len(plan.planned)) == (added, 2 * added, 8)
    assert not plan.planned_tasks & set(plan.addable_tasks)


def test_a_refill_that_would_do_nothing_is_refused() -> None:
    graph = {"app": "a:b", "nodes": ["x"], "tasks": "t.jsonl", "reward": "a:r"}
    with pytest.raises(ValueError, match=r"train.refill has no effect with train.trainer.advantage.estimator 'gae'"):
        BridgeConfig.model_validate({"graph": graph, "train": {"refill": 0.5}})
    assert BridgeConfig.model_validate({"graph": graph, "train": {"refill": 0.0}}).train.refill_share == 0.0


# -- waves --------------------------------------------------------------------------------------------------------


class Play:
    """Plays a round on the scripted duo. The samples of the tasks in `informative` differ; others all earn 0."""

    def __init__(self, folder: Path, informative: set[str]) -> None:
        self.calls: Counter[str] = Counter()

        def reward(task: dict[str, Any], _result: Any) -> dict[str, float]:
            self.calls[task["id"]] += 1
            return {"reward": float(self.calls[task["id"]] % 2) if task["id"] in informative else 0.0}

        folder.mkdir(exist_ok=True)
        self.rig = Rig(folder, reward=reward)
        self.waves: list[list[tuple[str, int]]] = []

    def go_on(self, plan: RoundPlan, *, stop_after: int | None = None) -> None:
        """Plays to the end, or until `stop_after` episodes are stored, as in a process that began just now."""
        played: list[EpisodeRequest] = []
        while wave := self.next_wave(plan, played):
            self.waves.append(in_groups(wave))
            played += wave
            if stop_after is not None and len(played) > stop_after:
                self.rig.run(wave[: stop_after - (len(played) - len(wave))])
                return
            self.rig.run(wave)

    def next_wave(self, plan: RoundPlan, played: Sequence[EpisodeRequest]) -> list[EpisodeRequest]:
        with self.rig.store() as store:
            return next_wave(plan, store, played, to_teaching=in_mixed_groups)

    def stored(self) -> set[tuple[str, int, int | None]]:
        with self.rig.store() as store:
            return {(e.task_id, e.sample, e.seed) for e in store.episodes(run_id="run")}


def in_mixed_groups(episodes: Sequence[Trajectory]) -> set[str]:
    values: dict[str, set[float | None]] = {}
    for each in episodes:
        values.setdefault(each.episode.task_id, set()).add(each.team_reward("reward"))
    return {each.episode.episode_id for each in episodes if len(values[each.episode.task_id]) > 1}


def test_flat_groups_are_replaced_until_as_many_as_planned_are_informative(tmp_path: Path) -> None:
    play = Play(tmp_path, {"t0", "t1", "t3", "t4", "t5", "t6", "t7"})
    play.go_on(plan_round(TASKS, options(refill=1.0), seed=0, **OF_ROUND))
    # t2 is flat: 1 is missing, and 3 of 4 were informative: 1 * 4 / 3 = 1.3 groups
    assert play.waves[1:] == [[("t4", 0), ("t4", 1), ("t5", 0), ("t5", 1)]]


def test_a_refill_stops_at_its_budget(tmp_path: Path) -> None:
    play = Play(tmp_path, {"t0", "t1"})
    play.go_on(plan_round(TASKS, options(refill=0.75), seed=0, **OF_ROUND))
    # half of the groups say nothing: 2 * 4 / 2 = 4 groups, and 3 are allowed
    assert [len(wave) for wave in play.waves] == [8, 6]
    assert {task for task, _ in play.waves[1]} == {"t4", "t5", "t6"}


def test_a_round_without_flat_groups_or_without_a_budget_is_not_refilled(tmp_path: Path) -> None:
    whole = Play(tmp_path / "whole", {task["id"] for task in TASKS})
    whole.go_on(plan_round(TASKS, options(refill=1.0), seed=0, **OF_ROUND))
    flat = Play(tmp_path / "flat", set())
    flat.go_on(plan_round(TASKS, options(refill=0.0), seed=0, **OF_ROUND))
    assert [len(wave) for wave in whole.waves] == [len(wave) for wave in flat.waves] == [8]


@pytest.mark.parametrize("stop_after", [3, 8, 9, 11])
def test_a_round_that_was_stopped_goes_on_with_the_same_episodes(tmp_path: Path, stop_after: int) -> None:
    plan = plan_round(TASKS, options(refill=1.0), seed=7, **OF_ROUND)
    informative = {"t0", "t2", "t3", "t5", "t6"}
    unbroken, broken = Play(tmp_path / "unbroken", informative), Play(tmp_path / "broken", informative)
    unbroken.go_on(plan)
    broken.go_on(plan, stop_after=stop_after)
    assert len(broken.stored()) == stop_after
    broken.go_on(plan)
    assert broken.stored() == unbroken.stored()
    # t1 and t4 are flat: 4 / 3 groups, of which t5 is informative
    assert {task for task, _, _ in broken.stored()} == {f"t{n}" for n in range(6)}
    with broken.rig.store() as store:
        assert len(list(store.episodes(run_id="run"))) == 12  # none was played twice


def test_groups_whose_episodes_left_nothing_are_not_begun_for_ever(tmp_path: Path) -> None:
    play = Play(tmp_path, set())
    plan = plan_round(TASKS, options(), seed=0, **OF_ROUND)
    play.rig.run(list(plan.planned))
    assert play.next_wave(plan, plan.planned) == list(plan.addable)
    assert play.next_wave(plan, plan.requests) == []


def test_what_rounds_came_to_is_read_by_task_with_what_failed_and_without_later_rounds(tmp_path: Path) -> None:
    def reward(task: dict[str, Any], _result: Any) -> dict[str, float]:
        return {"reward": float(task["answer"]), "cost": 9.0}

    def script(_node: str, prompt: str, _random: Any) -> str:
        if "2 + 1?" in prompt:
            raise ConnectionResetError("cut")
        return "1"

    rig = Rig(tmp_path, script, reward=reward)
    for number in (1, 2, 3):
        rig.run(list(plan_round(TASKS[number:], options(episodes_per_round=4), 0, **COMMON, round=number).planned))
    with rig.store() as store:
        failed = [e.episode_id for e in store.episodes(run_id="run") if e.outcome == "failed" and e.round == 2]
        assert len(failed) == 2
        # scored again afterwards: what failed teaches nothing all the same, and of two values the later counts
        first_id = store.episodes(run_id="run", round=1)[0].episode_id
        earlier = Reward(first_id, "reward", 7.0, "test", created_ns=1)
        store.put_rewards([earlier, *(Reward(id_, "reward", 7.0, "test", created_ns=1) for id_ in failed)])
        known = runs_of_rounds(store, "run", 2, reward="reward")
        assert runs_of_rounds(store, "collect", 2, reward="reward") == []
    assert known == [
        *[TaskReward("t1", 1, 2.0)] * 2,
        *[LostRun("t2", 1)] * 2,
        *[LostRun("t2", 2)] * 2,
        *[TaskReward("t3", 2, 4.0)] * 2,
    ]


def test_a_run_that_a_limit_ended_is_played_and_known_by_what_that_earned(tmp_path: Path) -> None:
    """On the even tasks the graph goes round in circles."""

    def build(_model: Any) -> Any:
        graph = StateGraph(math_duo.DuoState)
        graph.add_node("reasoner", lambda state: {})
        graph.add_edge(START, "reasoner")
        graph.add_conditional_edges(
            "reasoner", lambda state: END if int(state["question"].split(" ")[0]) % 2 else "reasoner"
        )
        return graph.compile().with_config(recursion_limit=4)

    plan = plan_round(TASKS, options(episodes_per_round=4, samples_per_task=1, trainer={}), seed=0, **OF_ROUND)
    for name, limit in (("paid", LimitReward("reward", -1.0)), ("unpaid", None)):
        (tmp_path / name).mkdir()
        rig = Rig(tmp_path / name, build=build, reward=lambda *_: 0.0, limit_reward=limit)
        rig.run(list(plan.planned))
        with rig.store() as store:
            assert next_wave(plan, store, [], to_teaching=in_mixed_groups) == []
            known = runs_of_rounds(store, "run", 1, reward="reward")
            played = list(store.trajectories())
        collected = runs_of_stored(played, {each.episode.episode_id for each in played}, "reward")
        cut = [LostRun(f"t{n}", 1) if limit is None else TaskReward(f"t{n}", 1, -1.0) for n in (0, 2)]
        assert sorted(known, key=repr) == sorted([*cut, TaskReward("t1", 1, 0.0), TaskReward("t3", 1, 0.0)], key=repr)
        assert sum(isinstance(run, LostRun) for run in collected) == (2 if limit is None else 0)


def test_what_was_collected_is_known_once_a_request_and_traces_of_others_by_their_rewards_alone() -> None:
    def run(name: str, reward: float | None, sample: int = 0, outcome: Outcome = "terminated") -> Trajectory:
        made = make_trajectory([make_action("actor", [1], [2])], reward, task_id="t", outcome=outcome)
        return replace(made, episode=replace(made.episode, episode_id=name, sample=sample))

    cancelled = run("e6", None, 4, "truncated")
    cancelled = replace(cancelled, episode=replace(cancelled.episode, reason="cancelled"))
    collected = [
        run("e1", 0.5),
        run("e2", None, 1, "failed"),
        run("e3", 1.0, 1),  # the same request, tried again
        run("e4", None, 2, "failed"),
        run("e5", None, 3, "truncated"),
        cancelled,
    ]
    others = [run("x1", 0.25), run("x2", None)]
    ids = {each.episode.episode_id for each in collected}
    task_runs = runs_of_stored([*collected, *others], ids, "reward")
    rewards = [TaskReward("t", 0, value) for value in (0.5, 1.0, 0.25)]
    assert task_runs == [*rewards, LostRun("t", 0), LostRun("t", 0)]
    # nothing collected has a reward of this name, so that nothing says how often runs end
    assert runs_of_stored([*collected[3:], *others], ids, "reward") == rewards[2:]


def test_the_share_of_wasted_rollouts_by_hand() -> None:
    assert wasted_share(played=12, teaching=9) == 0.25
    assert wasted_share(played=4, teaching=0) == 1.0
    assert wasted_share(played=0, teaching=0) is None


# -- whole trainings ----------------------------------------------------------------------------------------------


@pytest.fixture
def school(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[School]:
    with school_in(tmp_path, monkeypatch) as opened:
        opened.server.answer = by_seed_of_some
        yield opened


def by_seed_of_some(body: dict[str, Any]) -> str:
    """Tasks of an even number are hopeless; the samples of the others differ."""
    number = int(str(body["messages"][-1]["content"]).split(" ")[0])
    return "yes" if number % 2 and body["seed"] % 2 else "no"


def lines_of(school: School) -> list[dict[str, Any]]:
    """Those of the offline phase and of the rounds."""
    lines = [json.loads(line) for line in (school.run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["phase"] != "forecast"]


def rounds_of(school: School) -> dict[int, Counter[tuple[str, int, int | None]]]:
    rounds: dict[int, Counter[tuple[str, int, int | None]]] = {}
    with school.store() as store:
        for episode in store.episodes(run_id="train"):
            assert episode.round is not None
            rounds.setdefault(episode.round, Counter())[episode.task_id, episode.sample, episode.seed] += 1
    return rounds


GROUPS = {"rounds": 3, "episodes_per_round": 8, "samples_per_task": 2, "trainer": GRPO}


@pytest.mark.slow
def test_the_line_of_a_round_says_what_was_wasted_and_flat_groups_stay_in_the_round(school: School) -> None:
    school.collect()
    text = school.train(**GROUPS, loggers=["tensorboard"], without_signal=True)
    with school.store() as store:
        for line in lines_of(school)[1:]:
            episodes = list(store.trajectories(run_ids=["train"], round=line["round"]))
            teaching = in_mixed_groups(episodes)
            assert 8 <= len(episodes) <= 12
            assert line["episodes"] == len(episodes)
            assert line["wasted_rollouts"] == pytest.approx(1 - len(teaching) / len(episodes))
            assert f"over {len(episodes)} episodes, {line['wasted_rollouts']:.0%} wasted" in text
            informative = {each.episode.task_id for each in episodes if each.episode.episode_id in teaching}
            assert len(episodes) == 12 or len(informative) >= 4
    assert scalars_of(school, "wasted_rollouts") == [line["wasted_rollouts"] for line in lines_of(school)[1:]]


def scalars_of(school: School, tag: str) -> list[float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(school.run / "tensorboard"))
    events.Reload()
    return [pytest.approx(point.value) for point in events.Scalars(tag)]


@pytest.mark.slow
@pytest.mark.parametrize(("staleness", "stop_at"), [(0, 3), (0, 10), (2, 26)])
def test_a_training_that_was_killed_plays_the_rounds_that_it_would_have_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int, stop_at: int
) -> None:
    """Stopped in a round, in its refill, and in a round that was planned before the one before it was played."""
    changes = GROUPS | {"max_staleness": staleness, "trainer": GRPO | {"importance": {"mismatch": "truncate"}}}
    runs = []
    for name in ("unbroken", "broken"):
        (tmp_path / name).mkdir()
        with school_in(tmp_path / name, monkeypatch) as school:
            school.server.answer = by_seed_of_some
            school.collect()
            if name == "broken":
                school.train_until_killed(stop_at, **changes, without_signal=True)
                school.train(resume=True, **changes)
            else:
                school.train(**changes, without_signal=True)
            runs.append((rounds_of(school), [line.get("wasted_rollouts") for line in lines_of(school)]))
    assert runs[0] == runs[1]
    assert {count for number in runs[1][0].values() for count in number.values()} == {1}
    assert len(runs[0][0]) == 3


@pytest.mark.slow
def test_without_groups_what_failed_or_has_no_reward_is_wasted(school: School) -> None:
    def answer(body: dict[str, Any]) -> str:
        number = int(str(body["messages"][-1]["content"]).split(" ")[0])
        return "crash" if number % 5 == 0 else by_seed_of_some(body)

    school.collect()
    school.server.answer = answer
    text = school.train(rounds=2, episodes_per_round=10, without_signal=True)
    with school.store() as store:
        for line in lines_of(school)[1:]:
            outcomes = Counter(episode.outcome for episode in store.episodes(run_id="train", round=line["round"]))
            assert line["wasted_rollouts"] == pytest.approx(outcomes["failed"] / outcomes.total())
            assert "wasted_rollouts" not in lines_of(school)[0]
    assert any(line["wasted_rollouts"] for line in lines_of(school)[1:])
    assert "refill" not in text
