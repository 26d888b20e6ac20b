"""Owns: what a round is made of where older episodes join it, runs fail, or runs earn alike.

- Of older episodes those of one group join together or not at all, also where fresh runs failed.
- Which episodes a round is of stays, though an agent's older calls are then refused and returns become others.
- Without groups a round whose runs all earned alike is wasted as a whole, unless older runs in it earned otherwise.
- A run that teaches by what its calls earned themselves is not counted as wasted, though all samples earned alike.
- How far successes of before have been left behind is not how far a round moves its policy.
- A success of before is one more sample of its task where `success_groups` says so, and is never pushed down.
- A success of which nobody said how likely it was is held against the policy at the start of the round.
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

from trace_store.records import RETOKENISED, Reward, Trajectory
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


# -- successes in groups -----------------------------------------------------------------------------------------


def in_groups(model_dir: Path, estimator: str = "grpo", *, groups: bool = True, **options: Any) -> MarftTrainer:
    fixed: dict[str, Any] = {"estimator": estimator, "replay": {"successes": 0.3}, "success_groups": groups}
    return trainer_of(model_dir, **fixed, **options)


def worth_of(trainer: MarftTrainer, fresh: list[Trajectory], older: list[Trajectory]) -> tuple[dict[str, float], Any]:
    """What each run's calls were worth in the loss, all of one run alike; and what the update returned."""
    credited: list[Any] = []
    learned = trainer.update(fresh, older, credited.extend)
    worths: dict[str, set[float]] = {}
    for each in credited:
        worths.setdefault(each.episode_id, set()).add(round(float(each.normalised_U[0]), 5))
        assert sum(float(part[0]) for part in each.by_source_U.values()) == pytest.approx(float(each.advantage_U[0]))
    assert all(len(values) == 1 for values in worths.values())
    return {name: min(values) for name, values in worths.items()}, learned


@pytest.mark.parametrize(
    ("options", "failed", "success"),
    [
        ({"estimator": "grpo", "group_std": False}, -1 / 4, 3 / 4),  # mean 1/4
        ({"estimator": "grpo"}, -1 / 2, 3 / 2),  # sample deviation: root of (3/16 + 9/16) / 3 = 1/2
        ({"estimator": "rloo"}, -1 / 3, 1.0),  # the other three: 1/3 for a failure, 0 for the success
        ({"estimator": "dr_mas", "group_std": False}, -1 / 4, 3 / 4),
        ({"estimator": "at_grpo", "group_std": False}, -1 / 4, 3 / 4),
        ({"estimator": "hrpo", "group_std": False}, -1 / 4, 3 / 4),
        ({"estimator": "tree_grpo"}, -1 / 3, 1.0),
    ],
    ids=lambda value: value["estimator"] if isinstance(value, dict) else None,
)
def test_a_stored_success_is_one_more_sample_of_its_task_beside_three_failures(
    model_dir: Path, options: dict[str, Any], failed: float, success: float
) -> None:
    """Task `a`: three fresh failures and a success of before. Without it nothing in the round says what was better."""
    trainer = in_groups(model_dir, **options)
    fresh, older = played(trainer, "fresh", [0.0] * 3, ["a"] * 3), played(trainer, "older", [1.0], ["a"])
    assert trainer.teaching_episodes(fresh) == set()
    assert trainer.teaching_episodes(fresh, older) == {"fresh0", "fresh1", "fresh2"}
    worths, learned = worth_of(trainer, fresh, older)
    assert worths == pytest.approx(
        dict.fromkeys(("fresh0", "fresh1", "fresh2"), failed) | {"older0": success}, abs=1e-5
    )
    assert (learned["critic"]["flat_groups"], learned["replayed"]) == (0.0, 1)
    assert {agent: learned["agents"][agent]["steps"] for agent in AGENTS} == dict.fromkeys(AGENTS, 1)
    assert trainer.credit.spreads.to_state() == {}  # all fresh runs earned the same; a success is no fair sample


def test_a_success_of_a_task_that_the_round_does_not_play_is_in_no_group(model_dir: Path) -> None:
    """Fresh: a failed thrice, b came out 0 and 1. A success of c is worth what it earned beyond their mean, 1/5."""
    rewards, tasks = [0.0, 0.0, 0.0, 0.0, 1.0], ["a", "a", "a", "b", "b"]
    for groups, of_failures, of_success, flat in ((True, -1 / 4, 3 / 4, 0.0), (False, 0.0, 4 / 5, 1 / 2)):
        trainer = in_groups(model_dir, group_std=False, groups=groups)
        fresh, older = played(trainer, "fresh", rewards, tasks), played(trainer, "older", [1.0, 1.0], ["a", "c"])
        worths, learned = worth_of(trainer, fresh, older)
        expected = dict.fromkeys(("fresh0", "fresh1", "fresh2"), of_failures) | {"fresh3": -1 / 2, "fresh4": 1 / 2}
        assert worths == pytest.approx(expected | {"older0": of_success, "older1": 4 / 5}, abs=1e-5)
        assert learned["critic"]["flat_groups"] == flat
        assert len(trainer.teaching_episodes(fresh, older)) == (5 if groups else 2)


def test_flat_groups_are_left_out_where_no_success_stands_in_them(model_dir: Path) -> None:
    """Of four tasks a has a success beside its failures, b and c are flat with and without one, d tells by itself.
    Beside the four fresh runs that are left 0.3 of the round is one success, so that of e, in no group, gives way."""
    tasks = ["a", "a", "b", "b", "c", "c", "d", "d"]
    for groups, dropped in ((True, {"fresh2", "fresh3", "fresh4", "fresh5", "older1"}), (False, None)):
        trainer = in_groups(model_dir, skip_flat_groups=True, groups=groups)
        fresh = played(trainer, "fresh", [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0], tasks)
        older = played(trainer, "older", [1.0, 1.0, 1.0], ["a", "c", "e"])
        worths, learned = worth_of(trainer, fresh, older)
        everything = {f"fresh{i}" for i in range(8)} | {"older0", "older1", "older2"}
        if dropped is None:  # only d tells, and of the successes two runs let none join
            assert set(worths) == {"fresh6", "fresh7"}
            assert learned["drops"]["group without signal"] == 6
        else:
            assert set(worths) == everything - dropped - {"older2"}
            assert learned["drops"]["replay: episode beyond replay.successes"] == 1
            assert learned["drops"]["group without signal"] == len(dropped)
            assert learned["critic"]["flat_groups"] == 0.0


def test_successes_are_at_most_their_share_of_what_is_left_without_flat_groups(model_dir: Path) -> None:
    """Of four tasks a, b and c came out 1 four times, and their successes earned the same: only d tells, with four
    fresh runs. Half of the round are four older ones: d's own, which stays, and the three of other tasks that were
    drawn first, though they would stand last as planned. Without groups the four that were drawn first."""
    fresh_tasks, earned = [task for task in "abcd" for _ in range(4)], [1.0] * 12 + [0.0, 0.0, 0.0, 1.0]
    for groups, kept in ((True, {"older0", "older1", "older2", "older15"}), (False, {f"older{i}" for i in range(4)})):
        trainer = trainer_of(
            model_dir,
            estimator="rloo",
            skip_flat_groups=True,
            replay={"successes": 0.5},
            **({"success_groups": True} if groups else {}),
        )
        fresh = played(trainer, "fresh", earned, fresh_tasks)
        older = played(trainer, "older", [1.0] * 17, "zyxwvutsrqpoabcdn")  # one more than joins 16 fresh runs
        joined = trainer._join(fresh, older, newest=None)
        assert {episode.episode_id for episode in joined.episodes} == {f"fresh{i}" for i in range(12, 16)} | kept
        assert joined.drops["group without signal"] == (12 + 3 if groups else 12)
        assert joined.drops["replay: episode beyond replay.successes"] == (1 + 9 if groups else 13)
        # read once more without an agent's older calls it is of the same episodes, left out for the same reasons
        again = trainer._join(fresh, older, {"actor": "test"}, newest=None, read=joined)
        assert [episode.episode_id for episode in again.episodes] == [e.episode_id for e in joined.episodes]
        for reason in ("group without signal", "replay: episode beyond replay.successes"):
            assert again.drops[reason] == joined.drops[reason]


@pytest.mark.parametrize("normalize", ["none", "agent"])
def test_a_success_that_the_policy_outdoes_by_now_is_not_pushed_down(model_dir: Path, normalize: str) -> None:
    """Two fresh runs earned 1 and two 0.5, as the success: 0.7 in the mean of its group."""
    trainer = in_groups(model_dir, group_std=False, normalize=normalize)
    fresh = played(trainer, "fresh", [1.0, 1.0, 0.5, 0.5], ["a"] * 4)
    worths, _ = worth_of(trainer, fresh, played(trainer, "older", [0.5], ["a"]))
    assert worths["older0"] == 0.0
    assert worths["fresh0"] == pytest.approx(-1.5 * worths["fresh2"], abs=1e-4)
    assert worths["fresh0"] > 0


def test_a_success_without_log_probs_is_held_against_the_policy_at_the_start_of_the_round(model_dir: Path) -> None:
    """As one that today's policy sampled: with log-probs that these weights give it, the update is the same."""
    moved = []
    for is_text in (True, False):
        trainer = in_groups(model_dir, success_traces=True, group_std=False)
        fresh, older = played(trainer, "fresh", [0.0] * 3, ["a"] * 3), played(trainer, "older", [1.0], ["a"])
        if is_text:
            assert trainer.imitable_ids(older) == {"older0"}
            older = [as_text(run) for run in older]
        assert trainer.imitable_ids(older) == {"older0"}
        worths, learned = worth_of(trainer, fresh, older)
        assert worths["older0"] == 0.75
        assert learned["replayed"] == 1
        moved.append(torch.cat([p.detach().flatten() for p in trainer.policies.parameters("actor").values()]))
    torch.testing.assert_close(moved[0], moved[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"proximal": "engine", "mismatch": "none"},
        {"success_shaping": 0.1},
        {"success_shaping": 0.1, "granularity": "token"},
        {"update": "alternating"},
    ],
    ids=str,
)
def test_text_of_a_stronger_model_moves_the_adapters_whatever_the_ratio_is_taken_to(
    model_dir: Path, options: dict[str, Any]
) -> None:
    trainer = in_groups(model_dir, "rloo", success_traces=True, **options)
    fresh, older = played(trainer, "fresh", [0.0] * 3, ["a"] * 3), played(trainer, "older", [1.0], ["a"])
    learned = trainer.update(fresh, [as_text(run) for run in older])
    told = [figures for figures in learned["agents"].values() if "steps" in figures]
    assert learned["replayed"] == 1
    assert told
    assert all(figures["adapter_moved"] > 0 for figures in told)


def test_text_joins_no_round_unless_it_may(model_dir: Path) -> None:
    trainer = in_groups(model_dir)
    fresh, older = played(trainer, "fresh", [0.0, 1.0, 0.0], ["a"] * 3), played(trainer, "older", [1.0], ["a"])
    learned = trainer.update(fresh, [as_text(run) for run in older])
    assert learned["replayed"] == 0
    assert learned["drops"]["replay: episode without an action to train on"] == 1


def test_only_episodes_that_earned_something_and_have_a_call_to_imitate_may_be_drawn(model_dir: Path) -> None:
    trainer = in_groups(model_dir, success_traces=True)
    good, unpaid, failed, without_ids = played(trainer, "older", [1.0] * 4, ["a"] * 4)
    unpaid = replace(unpaid, rewards=())
    failed = replace(failed, episode=replace(failed.episode, outcome="failed", reason="test"))
    bare = (replace(a, prompt_ids=None, sampled_ids=None, logprobs=None, trainable=False) for a in without_ids.actions)
    without_ids = replace(without_ids, actions=tuple(bare))
    assert trainer.imitable_ids([as_text(good), unpaid, failed, without_ids]) == {"older0"}


def as_text(run: Trajectory) -> Trajectory:
    """The run as `offline.retokenise` makes it of messages: with ids, and no more."""
    unknown = {"logprobs": None, "temperature": None, "trainable": False, "untrainable_reason": RETOKENISED}
    return replace(run, actions=tuple(replace(action, **unknown) for action in run.actions))
