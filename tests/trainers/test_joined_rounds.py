"""Owns: what a round is made of where older episodes join it, runs fail, or runs earn alike.

- Of older episodes those of one group join together or not at all, also where fresh runs failed.
- Which episodes a round is of stays, though an agent's older calls are then refused and returns become others.
- Without groups a round whose runs all earned alike is wasted as a whole, unless older runs in it earned otherwise.
- A run that teaches by what its calls earned themselves is not counted as wasted, though all samples earned alike.
- How far successes of before have been left behind is not how far a round moves its policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_policy import AGENTS, both_low, play, save_tiny_llama
from support.trainer_options import trainer_options

from trace_store.records import Reward, Trajectory
from trainers.marft import MarftTrainer


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def trainer_of(model_dir: Path, **options: Any) -> MarftTrainer:
    fixed = {"device": "cpu", "lr": 0.02, "engine_tolerance": 9.0}
    return MarftTrainer(trainer_options(**fixed, **options), model_dir, AGENTS, 0)


def played(trainer: MarftTrainer, name: str, earned: Sequence[float], tasks: Sequence[str]) -> list[Trajectory]:
    """As many runs as rewards, called e.g. fresh0, fresh1."""
    runs = play(trainer, len(earned), torch.Generator().manual_seed(len(name)), both_low)
    return [
        replace(
            run,
            episode=replace(run.episode, episode_id=f"{name}{i}", task_id=task),
            rewards=(Reward(f"{name}{i}", "reward", value, "test", 1),),
        )
        for i, (run, value, task) in enumerate(zip(runs, earned, tasks, strict=True))
    ]


def move(trainer: MarftTrainer, agent: str) -> None:
    """Other weights than those that sampled."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in trainer.policies.parameters(agent).items():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)


def test_where_fresh_runs_failed_older_groups_still_join_whole(model_dir: Path) -> None:
    """Of 8 fresh runs 3 failed, so of two older groups of 4 only one is half of the round."""
    trainer = trainer_of(model_dir, estimator="grpo", replay={"share": 0.5})
    earned = [0.0, 1.0] * 4
    fresh = played(trainer, "fresh", earned, ["a"] * 4 + ["b"] * 4)
    for i in (0, 1, 4):
        fresh[i] = replace(fresh[i], episode=replace(fresh[i].episode, outcome="failed", reason="test"))
    older = played(trainer, "older", earned, ["c", "d"] * 4)
    credited: list[Any] = []
    learned = trainer.update(fresh, older, credited.extend)
    assert learned["replayed"] == 4
    assert learned["drops"]["replay: episode beyond replay.share"] == 4
    joined = {each.episode_id for each in credited if each.episode_id.startswith("older")}
    assert joined == {"older0", "older2", "older4", "older6"}


@pytest.mark.parametrize(
    ("options", "joined"),
    [
        ({"estimator": "gae", "replay": {"share": 0.5}}, ["older2", "older6", "older5", "older7"]),
        ({"estimator": "rloo", "replay": {"successes": 0.5}}, ["older2", "older6", "older5", "older7"]),
        # with 3 fresh runs that did not fail 3 may join: the two of task a in round 2, and no part of another group
        ({"estimator": "rloo", "replay": {"share": 0.5}}, ["older4", "older6"]),
    ],
)
def test_of_older_episodes_that_are_too_many_those_drawn_first_join_as_they_were_planned(
    model_dir: Path, options: dict[str, Any], joined: list[str]
) -> None:
    """Of 8 fresh runs 4 failed, so 4 older ones may join: those that the draw had first, whatever round they are of."""
    trainer = trainer_of(model_dir, **options)
    fresh = played(trainer, "fresh", [0.0, 1.0] * 4, ["a"] * 4 + ["b"] * 4)
    for i in (0, 1, 4, 5):
        fresh[i] = replace(fresh[i], episode=replace(fresh[i].episode, outcome="failed", reason="test"))
    if "share" in options["replay"] and options["estimator"] == "rloo":
        fresh[2] = replace(fresh[2], episode=replace(fresh[2].episode, outcome="failed", reason="test"))
    earlier = played(trainer, "older", [1.0, 0.0] * 4, ["a", "b"] * 4)
    older = [replace(e, episode=replace(e.episode, round=1 + i // 4, sample=i)) for i, e in enumerate(earlier)]
    credited: list[Any] = []
    trainer.update(fresh, [older[i] for i in (6, 2, 7, 5, 4, 0, 1, 3)], credited.extend)
    ids = [each.episode_id for each in credited if each.episode_id.startswith("older")]
    assert list(dict.fromkeys(ids)) == joined


def test_the_choice_of_episodes_stands_when_an_agents_older_calls_are_refused(model_dir: Path) -> None:
    """Without the calls of one agent the older runs have fewer links, so discounted they earn otherwise than fresh
    ones of their task, and its group, which was left out as flat, no longer is."""
    options = {"estimator": "at_grpo", "gamma": 0.5, "skip_flat_groups": True}
    trainer = trainer_of(model_dir, **options, replay={"share": 0.5, "min_ess": 0.999})
    older = played(trainer, "older", [1.0, 1.0, 0.0, 1.0], ["flat", "flat", "t", "t"])
    move(trainer, "actor")
    fresh = played(trainer, "fresh", [1.0, 1.0, 0.0, 1.0], ["flat", "flat", "t", "t"])
    learned = trainer.update(fresh, older)
    assert learned["drops"]["group without signal"] == 4
    assert learned["replayed"] == 2
    assert any("effective sample size" in reason for reason in learned["drops"])


def test_a_call_that_earned_something_itself_teaches_though_all_samples_earned_alike(model_dir: Path) -> None:
    own = [{"reward": "own", "level": "step", "weight": 1.0}]
    trainer = trainer_of(model_dir, estimator="hrpo", shaping=own)
    runs = [
        replace(
            run,
            rewards=(
                *run.rewards,
                Reward(run.episode.episode_id, "own", -0.5, "test", 1, "step", action_id=run.actions[0].action_id),
            ),
        )
        for run in played(trainer, "alike", [1.0] * 4, ["t"] * 4)
    ]
    assert trainer.teaching_episodes(runs) == {"alike0", "alike1", "alike2", "alike3"}
    assert trainer.update(runs)["agents"]["reasoner"]["steps"] == 1
    plain = trainer_of(model_dir, estimator="grpo")
    assert plain.teaching_episodes(played(plain, "alike", [1.0] * 4, ["t"] * 4)) == set()


def test_without_groups_a_round_whose_runs_all_earned_alike_teaches_nothing(model_dir: Path) -> None:
    trainer = trainer_of(model_dir)  # gae
    alike = played(trainer, "alike", [1.0] * 4, ["t", "u", "v", "w"])
    assert trainer.teaching_episodes(alike) == set()
    assert trainer.teaching_episodes([*alike[1:], *played(trainer, "less", [0.5], ["t"])]) == {
        *("alike1", "alike2", "alike3", "less0")
    }
    older = played(trainer, "older", [0.0, 1.0], ["t", "u"])
    assert len(trainer.teaching_episodes(alike, older)) == 4  # which are compared with the fresh ones
    assert trainer.teaching_episodes(alike, older[1:]) == set()
    successes = trainer_of(model_dir, replay={"successes": 0.3})
    assert successes.teaching_episodes(alike, older) == set()  # which are compared with nobody
    running_mean = trainer_of(model_dir, estimator="rae", normalize="none")
    assert len(running_mean.teaching_episodes(alike)) == 4  # above the mean of before


@pytest.mark.parametrize(("own", "teaches"), [(-0.5, False), (0.5, True)])
def test_a_penalty_teaches_nothing_by_itself_where_negative_advantages_do_not_count(
    model_dir: Path, own: float, teaches: bool
) -> None:
    """Four samples that earned alike, whose first calls have half a unit of their own: no group of the actor's says
    anything, and the reasoner's says something where that is more than 0."""
    shaping = [{"reward": "own", "level": "step", "weight": 1.0}]
    trainer = trainer_of(model_dir, estimator="hrpo", shaping=shaping, negative_weight=0.0)
    runs = [
        replace(
            run,
            rewards=(
                *run.rewards,
                Reward(run.episode.episode_id, "own", own, "test", 1, "step", action_id=run.actions[0].action_id),
            ),
        )
        for run in played(trainer, "alike", [1.0] * 4, ["t"] * 4)
    ]
    assert len(trainer.teaching_episodes(runs)) == (4 if teaches else 0)
    learned = trainer.update(runs)
    assert learned["agents"]["reasoner"]["steps"] == int(teaches)
    assert learned["critic"]["flat_groups"] == (0.5 if teaches else 1.0)
    assert ("'reasoner' took no step" in " ".join(learned["warnings"])) != teaches


def test_what_a_call_earned_by_itself_reaches_no_call_before_it_in_any_phase(model_dir: Path) -> None:
    """The team earned 1; the second call has a penalty of half a unit. By hand, with each estimator."""
    shaping = [{"reward": "own", "level": "step", "weight": 1.0}]
    earned = {}
    for estimator in ("hrpo", "dr_mas"):
        trainer = trainer_of(model_dir, estimator=estimator, shaping=shaping)
        (run,) = played(trainer, "run", [1.0], ["t"])
        second = run.actions[1].action_id
        own = Reward(run.episode.episode_id, "own", -0.5, "test", 1, "step", action_id=second)
        data = trainer._read([replace(run, rewards=(*run.rewards, own))], "on_policy")
        earned[estimator] = trainer.credit.returns(data).tolist()
    assert earned == {"hrpo": [1.0, 0.5], "dr_mas": [0.5, 0.5]}


def test_successes_of_an_older_policy_do_not_stop_a_round(model_dir: Path) -> None:
    """They were sampled by weights from far away. Of one step nothing has moved before it, so its KL is 0."""
    trainer = trainer_of(model_dir, kl_stop=0.05, replay={"successes": 0.3})
    successes = played(trainer, "success", [1.0, 1.0], ["a", "b"])
    for agent in AGENTS:
        move(trainer, agent)
    fresh = played(trainer, "fresh", [0.0, 1.0] * 3, ["a"] * 3 + ["b"] * 3)
    learned = trainer.update(fresh, successes)
    assert learned["replayed"] == 2
    for agent in AGENTS:
        told = learned["agents"][agent]
        assert (told["steps"], told["stopped_early"]) == (1, False)
        assert told["approx_kl"] == pytest.approx(0, abs=1e-9)
