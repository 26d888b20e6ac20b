"""Owns: rounds in which runs fork others.

A repeated call is learned from once; what a run counts is shared out at fork points; returns are means over branches;
and the policy gradient that is estimated is the exact one, by enumeration of all that can be sampled, for forks that
were chosen blindly. Forks that were chosen by how their run went are kept apart, and leave the rest as it was.
"""

# ruff: noqa: N806 (shape suffixes)
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.fork_toys import fork, run
from support.tiny_policy import save_tiny_llama
from support.trainer_options import trainer_options

from trace_store.records import Reward, Trajectory
from trainers.advantages.estimator import EstimatorInput, estimators
from trainers.advantages.returns import returns_by_source, run_positions
from trainers.advantages.settings import EstimatorSettings
from trainers.advantages.siblings import siblings_A
from trainers.batch import Round, trajectories_to_round
from trainers.config import TrainerOptions
from trainers.credit.credit import Credit
from trainers.marft import MarftTrainer
from trainers.objective.weighting import unit_shares
from trainers.rewards import ShapingTerm

NODES = ("plan", "act")
LONG = [("plan", 1), ("act", 2), ("plan", 3), ("act", 4)]


def to_round(*trajectories: Trajectory, agents: Sequence[str] = NODES, **options: Any) -> Round:
    return trajectories_to_round(trajectories, agents, "reward", dict.fromkeys(agents, 32), "on_policy", **options)


def advantages(data: Round, estimator: str, **settings: Any) -> np.ndarray:
    made = estimators()[estimator](EstimatorSettings(**settings))
    given = EstimatorInput(data, tuple(1 for _ in data.items), np.ones(len(data.items)))
    return made.estimate(given).estimate.advantage_U


def leaves(data: Round) -> dict[str, float]:
    assert data.forest is not None
    names = (episode.episode_id for episode in data.episodes)
    return dict(zip(names, data.forest.weight_E, strict=True))


def test_a_repeated_call_stands_once_in_the_run_that_sampled_it() -> None:
    parent = run("e", LONG, 1.0)
    data = to_round(parent, fork("f", parent, 2, [("plan", 5), ("act", 6)], 0.0))
    assert [episode.action_ids for episode in data.episodes] == [("e.0", "e.1", "e.2", "e.3"), ("f.2", "f.3")]
    assert data.drops == {"action: repeated by a fork, and counted where it was sampled": 2}
    assert [item.turn for item in data.episodes[1].actions] == [1, 1]  # the agents' second turns in the whole run
    # the calls before the fork point led to 1 and to 0
    np.testing.assert_allclose(returns_by_source(data, 1.0)["reward"], [0.5, 0.5, 1, 1, 0, 0])


def test_a_round_without_forks_has_no_forest() -> None:
    assert to_round(run("e", LONG, 1.0), run("c", LONG, 0.0)).forest is None


def test_weight_is_shared_out_at_every_fork_point_and_never_more_than_one_run_each_tree() -> None:
    parent = run("e", LONG, 1.0)
    early = [fork(f"f{k}", parent, 1, LONG[1:], 0.0) for k in range(2)]
    late = fork("g", parent, 3, LONG[3:], 0.5)
    deeper = fork("h", early[0], 2, LONG[2:], 0.25)
    data = to_round(run("c", LONG, 0.0), parent, *early, late, deeper)
    # at call 1: e and two forks, 1/3 each; of e's third half is g's, of f0's half is h's
    assert leaves(data) == pytest.approx({"c": 1, "e": 1 / 6, "f0": 1 / 6, "f1": 1 / 3, "g": 1 / 6, "h": 1 / 6})
    returns = dict(zip(ids(data), returns_by_source(data, 1.0)["reward"], strict=True))
    assert returns["e.0"] == pytest.approx((1 + 0 + 0.25) / 6 + 0 / 3 + 0.5 / 6)
    assert returns["e.1"] == returns["e.2"] == pytest.approx(0.75)  # e itself and g
    assert returns["f0.1"] == pytest.approx(0.125)  # f0 itself and h
    assert returns["f1.1"] == 0


def ids(data: Round) -> list[str]:
    return [action_id for episode in data.episodes for action_id in episode.action_ids]


def test_a_fork_of_a_repeated_call_joins_the_forks_of_the_run_that_sampled_it() -> None:
    parent = run("e", LONG, 1.0)
    late = fork("g", parent, 3, LONG[3:], 0.5)
    early_of_late = fork("h", late, 1, LONG[1:], 0.0)  # call 1 of g is call 1 of e
    data = to_round(parent, late, early_of_late)
    assert leaves(data) == pytest.approx({"e": 1 / 4, "g": 1 / 4, "h": 1 / 2})
    keys = dict(zip(ids(data), siblings_A(data), strict=True))
    assert keys["e.1"] == keys["h.1"]
    assert keys["e.3"] == keys["g.3"] != keys["e.1"]


def test_a_fork_whose_parent_is_elsewhere_counts_by_its_fork_point() -> None:
    parent = run("e", LONG, 1.0)
    lone = [fork(f"f{k}", parent, 2, LONG[2:], k / 2) for k in range(2)]
    data = to_round(run("c", LONG, 0.0), *lone)
    assert leaves(data) == pytest.approx({"c": 1, "f0": 1 / 2, "f1": 1 / 2})
    assert ids(data)[4:] == ["f0.2", "f0.3", "f1.2", "f1.3"]
    np.testing.assert_allclose(advantages(data, "c3")[4:], [-0.5, 0, 0.5, 0])


def test_step_rewards_reach_the_calls_before_a_fork_once_for_each_branch() -> None:
    def with_bonus(trajectory: Trajectory, call: str, value: float) -> Trajectory:
        bonus = Reward(trajectory.episode.episode_id, "bonus", value, "test", 1, scope="step", action_id=call)
        return replace(trajectory, rewards=(*trajectory.rewards, bonus))

    plain = run("e", LONG, 0.0)
    parent = with_bonus(plain, "e.3", 1.0)
    branch = with_bonus(fork("f", plain, 2, LONG[2:], 0.0), "f.3", 3.0)
    term = ShapingTerm(reward="bonus", level="step", weight=1.0)
    data = to_round(parent, branch, shaping=[term])
    # with discount 1/2: e.3 1, e.2 1/2, e.1 (1/4 + 3/4) / 2, e.0 (1/8 + 3/8) / 2; f.3 3, f.2 3/2
    np.testing.assert_allclose(returns_by_source(data, 0.5)["bonus"], [1 / 4, 1 / 2, 1 / 2, 1, 3 / 2, 3])


def test_c3_compares_siblings_only_by_hand() -> None:
    parent, chain = run("e", LONG, 1.0), run("c", LONG, 0.25)
    forks = [fork(f"f{k}", parent, 2, LONG[2:], reward) for k, reward in enumerate((0.0, 0.5))]
    data = to_round(parent, *forks, chain)
    # first calls: e's is worth (1 + 0 + 0.5) / 3 = 0.5, c's 0.25. At the fork point: 1, 0 and 0.5
    expected = {"e.0": 0.25, "c.0": -0.25, "e.2": 0.75, "f0.2": -0.75, "f1.2": 0.0}
    for call, advantage in zip(ids(data), advantages(data, "c3"), strict=True):
        assert advantage == pytest.approx(expected.get(call, 0.0))


def test_tree_grpo_mixes_the_branches_beside_with_the_other_trees_by_hand() -> None:
    parent, chain = run("e", LONG, 1.0), run("c", LONG, 0.25)
    forks = [fork(f"f{k}", parent, 2, LONG[2:], reward) for k, reward in enumerate((0.0, 0.5))]
    data = to_round(parent, *forks, chain)
    found = dict(zip(ids(data), advantages(data, "tree_grpo"), strict=True))
    assert found["e.0"] == found["e.1"] == pytest.approx(0.5 - 0.25)  # above the fork point: the other tree only
    assert found["e.2"] == found["e.3"] == pytest.approx(1 - (0.25 + 0.25) / 2)  # beside: (0 + 0.5) / 2
    assert found["f0.2"] == pytest.approx(0 - (0.75 + 0.25) / 2)
    # the other tree of c has three branches at these calls, each a third: 0.5
    assert found["c.3"] == pytest.approx(0.25 - 0.5)


def test_tree_grpo_compares_a_turn_of_an_agent_however_many_calls_led_to_it() -> None:
    short, long = run("e", [("plan", 1), ("act", 2)], 1.0), run("c", [("plan", 1), ("plan", 3), ("act", 2)], 0.25)
    data = to_round(short, long)
    positions = dict(zip(ids(data), run_positions(data), strict=True))
    assert positions["e.1"] != positions["c.2"]  # `act` came third in one run, so that a discount would differ
    advantage = dict(zip(ids(data), advantages(data, "tree_grpo"), strict=True))
    assert (advantage["e.1"], advantage["c.2"]) == (0.75, -0.75)


@pytest.mark.parametrize("estimator", ["tree_grpo", "c3", "at_grpo", "rloo", "grpo", "dr_mas", "mars2", "hrpo"])
@pytest.mark.parametrize("reward", [0.05, 0.1, -0.3])
def test_equal_rewards_teach_exactly_nothing(estimator: str, reward: float) -> None:
    """Nor does what rounding leaves of their differences, of which an optimiser would make whole steps."""
    parent, *chains = (run(name, LONG, reward) for name in "ecdgh")
    forks = [fork(f"f{k}", parent, 2, LONG[2:], reward) for k in range(3)]
    for data in (to_round(parent, *chains[:2]), to_round(parent, *chains), to_round(parent, *forks, *chains[:3])):
        assert set(advantages(data, estimator).tolist()) == {0.0}


@pytest.mark.parametrize("estimator", ["tree_grpo", "c3", "at_grpo"])
@pytest.mark.parametrize("other", [1.0, 0.0])
def test_a_lone_tree_is_flat_only_where_its_branches_earned_the_same(estimator: str, other: float) -> None:
    """Siblings lie in one tree; what tells them apart is a signal, and `skip_flat_groups` keeps the tree."""
    parent = run("e", LONG, 1.0)
    data = to_round(parent, fork("f", parent, 2, LONG[2:], other))
    made = estimators()[estimator](EstimatorSettings())
    count = len(data.items)
    estimated = made.estimate(EstimatorInput(data, (1,) * count, np.ones(count)))
    assert estimated.flat_groups is not None
    assert (estimated.flat_groups < 1) == (other != 1.0) == estimated.estimate.advantage_U.any()
    options = trainer_options(estimator=estimator, skip_flat_groups=True, offline={"mode": "filtered"})
    never_asked: Any = dict.fromkeys(NODES, SimpleNamespace(width=1))
    credit = Credit(options, never_asked, NODES, 0, lambda phase, total: lambda count: None)
    assert len(credit.informative(data).episodes) == (2 if other != 1.0 else 0)


def test_at_grpo_standardises_siblings() -> None:
    parent, chain = run("e", LONG, 1.0), run("c", LONG, 0.0)
    data = to_round(parent, fork("f", parent, 2, LONG[2:], 0.0), chain)
    found = dict(zip(ids(data), advantages(data, "at_grpo"), strict=True))
    half = 0.5**0.5  # of two that differ by d: mean in the middle, deviation d / sqrt(2)
    assert found == pytest.approx(
        {"e.0": half, "c.0": -half, "e.1": 0, "c.1": 0, "e.2": half, "f.2": -half}
        | dict.fromkeys(("e.3", "f.3", "c.2", "c.3"), 0),
        abs=1e-5,
    )


# -- unbiased, by enumeration -----------------------------------------------------------------------------------------
#
# Two calls: `plan` says 0 or 1, `act`, which reads it, 0 or 1; four rewards. Two runs of the task, and forks of the
# second of them by a rule. Everything that can be sampled is summed up with its probability.

LOGITS = np.array([0.3, -0.5, 0.8])  # of saying 1: by plan, by act after 0, by act after 1
REWARD = np.array([[1.0, -0.5], [0.2, 2.0]])
Outcome = tuple[int, int]
OUTCOMES = list(itertools.product(range(2), repeat=2))


def probability(row: int, token: int) -> float:
    one = 1 / (1 + np.exp(-LOGITS[row]))
    return float(one if token else 1 - one)


def score(row: int, token: int) -> np.ndarray:
    result = np.zeros(3)
    result[row] = token - probability(row, 1)
    return result


def likelihood(outcome: Outcome) -> float:
    return probability(0, outcome[0]) * probability(1 + outcome[0], outcome[1])


EXACT = sum((likelihood(o) * REWARD[o] * (score(0, o[0]) + score(1 + o[0], o[1])) for o in OUTCOMES), np.zeros(3))


def calls_of(outcome: Sequence[int], first: int = 0) -> list[tuple[str, int]]:
    return list(zip(NODES[first:], outcome, strict=True))


def gradient(data: Round, estimator: str, only: Callable[[str], bool] = lambda _: True) -> np.ndarray:
    """sum over calls of weight * advantage * d log pi, over the number of whole runs."""
    weight_A = np.ones(len(data.items)) if data.forest is None else data.forest.weight_A
    total = np.zeros(3)
    rows = zip(data.items, ids(data), weight_A, advantages(data, estimator), data.episode_A, strict=True)
    for item, _, weight, advantage, e in rows:
        if only(data.episodes[e].episode_id):
            row = 0 if item.agent == "plan" else 1 + item.prompt_ids[-1]
            total += weight * advantage * score(row, item.sampled_ids[0])
    return total / 2


Rule = Callable[[Outcome, Outcome], int | None]  # outcomes of both runs -> the call of the second that is forked


def rounds(rule: Rule, forks: int, *, blind: bool) -> Iterator[tuple[float, Round, Outcome, int | None]]:
    """Every round that can come out, with its probability."""
    for one, two in itertools.product(OUTCOMES, OUTCOMES):
        chains = [run("c", calls_of(one), REWARD[one]), run("e", calls_of(two), REWARD[two])]
        at = rule(one, two)
        if at is None:
            yield likelihood(one) * likelihood(two), to_round(*chains), two, at
            continue
        tails = [(b,) for b in range(2)] if at else OUTCOMES
        for drawn in itertools.product(tails, repeat=forks):
            chance, made = likelihood(one) * likelihood(two), []
            for k, tail in enumerate(drawn):
                whole = (two[0], *tail) if at else tail
                chance *= probability(1 + two[0], tail[0]) if at else likelihood(whole)  # type: ignore[arg-type]
                made.append(fork(f"f{k}", chains[1], at, calls_of(tail, at), REWARD[whole], blind=blind))
            yield chance, to_round(*chains, *made), two, at


BLIND_RULES: dict[str, Rule] = {
    "act, always": lambda one, two: 1,
    "plan, always": lambda one, two: 0,
    "act, where the other run earned little": lambda one, two: 1 if REWARD[one] < 0.5 else None,
    "act or plan, by the other run": lambda one, two: int(REWARD[one] < 0.5),
    "act, by what was planned": lambda one, two: 1 if two[0] == 1 else None,
}


@pytest.mark.parametrize("forks", [1, 2])
@pytest.mark.parametrize("rule", list(BLIND_RULES))
@pytest.mark.parametrize("estimator", ["tree_grpo", "rloo"])
def test_forks_that_are_chosen_blindly_leave_the_policy_gradient_exact(estimator: str, rule: str, forks: int) -> None:
    every = list(rounds(BLIND_RULES[rule], forks, blind=True))
    assert sum(chance for chance, *_ in every) == pytest.approx(1)
    expected = sum((chance * gradient(data, estimator) for chance, data, *_ in every), np.zeros(3))
    np.testing.assert_allclose(expected, EXACT, atol=1e-12)


def by_own_failure(one: Outcome, two: Outcome) -> int | None:
    return 1 if REWARD[two] < 0.5 else None


@pytest.mark.parametrize("estimator", ["tree_grpo", "rloo"])
def test_forks_that_are_chosen_by_their_runs_outcome_would_be_biased_as_blind_ones(estimator: str) -> None:
    every = rounds(by_own_failure, 1, blind=True)
    expected = sum((chance * gradient(data, estimator) for chance, data, *_ in every), np.zeros(3))
    assert np.abs(expected - EXACT).max() > 0.02


@pytest.mark.parametrize("estimator", ["tree_grpo", "rloo"])
def test_so_they_are_kept_apart_and_the_gradient_of_the_whole_runs_stays_exact(estimator: str) -> None:
    whole = sum(
        (
            chance * gradient(data, estimator, lambda name: name in ("c", "e"))
            for chance, data, *_ in rounds(by_own_failure, 2, blind=False)
        ),
        np.zeros(3),
    )
    np.testing.assert_allclose(whole, EXACT, atol=1e-12)


@pytest.mark.parametrize("estimator", ["tree_grpo", "c3"])
def test_what_they_add_is_the_exact_gradient_from_the_prompts_that_were_forked(estimator: str) -> None:
    added, from_there = np.zeros(3), np.zeros(3)
    for chance, data, two, at in rounds(by_own_failure, 2, blind=False):
        added += chance * gradient(data, estimator, lambda name: name.startswith("f"))
        if at is not None:
            row = 1 + two[0]
            slope = sum((probability(row, b) * REWARD[two[0], b] * score(row, b) for b in range(2)), np.zeros(3))
            from_there += chance * slope / 2
    np.testing.assert_allclose(added, from_there, atol=1e-12)
    assert np.abs(from_there).max() > 0.01


def test_c3_is_exact_where_every_call_has_siblings() -> None:
    # the first calls are siblings of each other; of the second only act's forked one counts, at half the runs
    every = list(rounds(lambda one, two: 1, 1, blind=True))
    found = sum((chance * gradient(data, "c3") for chance, data, *_ in every), np.zeros(3))
    assert found[0] == pytest.approx(EXACT[0])
    np.testing.assert_allclose(found[1:], EXACT[1:] / 2, atol=1e-12)


# -- the update -------------------------------------------------------------------------------------------------------

PLAIN = '''
import numpy as np

from trainers.advantages.estimator import BaselineEstimator
from trainers.advantages.group_baselines import Baseline


class Plain(BaselineEstimator):
    """The return itself."""

    name = "plain"

    def baseline(self, returns_A, data):
        return Baseline(np.zeros_like(returns_A), np.ones_like(returns_A))
'''


@pytest.mark.parametrize("granularity", ["action", "token"])
@pytest.mark.parametrize("weighting", ["episode", "action", "token"])
def test_the_update_on_a_tree_is_that_on_its_unrolled_runs(tmp_path: Path, granularity: str, weighting: str) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    model = save_tiny_llama(tmp_path / "model")
    parent = run("e", LONG, 1.0)
    # `episode` divides a run by its calls, a return is the mean over runs whatever these are: equal where they are
    tail = [("plan", 7), ("act", 8), *([] if weighting == "episode" else [("plan", 9)])]
    branch = fork("f", parent, 2, tail, -0.5)
    chain = run("c", LONG[:3], 0.5)
    # e and f weigh a half each, so unrolled every run but these stands twice
    unrolled = [parent, run("f", [*LONG[:2], *tail], -0.5), chain]
    unrolled.append(run("c again", LONG[:3], 0.5))

    def updated(trajectories: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
        options = trainer_options(
            estimator=f"{tmp_path / 'plain.py'}:Plain",
            granularity=granularity,
            weighting=weighting,
            update="simultaneous",
            engine_tolerance=100.0,
            mismatch="none",
            lr=0.01,
        )
        trainer = MarftTrainer(options, model, NODES, seed=0)
        trainer.update(trajectories)
        return {  # after one step the first moment is the gradient, times 1 - beta; the step itself is nearly its sign
            f"{name} {k}": learner.optimizer.state[p]["exp_avg"]
            for name, learner in trainer.learners.items()
            for k, p in enumerate(learner.parameters)
        }

    tree, runs = updated([parent, branch, chain]), updated(unrolled)
    assert max(float(value.abs().max()) for value in tree.values()) > 1e-3
    for name, value in tree.items():
        torch.testing.assert_close(value, runs[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("estimator", ["gae", "tree_grpo", "at_grpo", "c3", "rloo", "dr_mas", "rae", "hrpo"])
def test_every_estimator_learns_from_a_tree_with_the_defaults_of_the_trainer(tmp_path: Path, estimator: str) -> None:
    """In the agents' order, with their ratios compounded; every sampled call is credited once."""
    model = save_tiny_llama(tmp_path / "model")
    parent, chain = run("e", LONG, 1.0), run("c", LONG[:3], 0.5)
    options = TrainerOptions.model_validate(
        {
            "advantage": {"estimator": estimator},
            "importance": {"engine_tolerance": 100.0},
            "objective": {"negative_weight": 1.0},
        }
    )
    trainer = MarftTrainer(options, model, NODES, seed=0)
    credited: list[str] = []
    report = trainer.update(
        [parent, fork("f", parent, 2, [("plan", 7), ("act", 8)], -0.5), chain],
        credited=lambda every: credited.extend(credit.action_id for credit in every),
    )
    assert credited == ["e.0", "e.1", "e.2", "e.3", "f.2", "f.3", "c.0", "c.1", "c.2"]
    assert report["agents"]["plan"]["actions"] + report["agents"]["act"]["actions"] == len(credited)
    assert report["agents"]["plan"]["adapter_moved"] > 0


def test_older_runs_are_a_share_of_trees_and_not_of_their_branches(tmp_path: Path) -> None:
    """A tree weighs as one run: beside two trees of four branches at most two older runs make up half."""
    model = save_tiny_llama(tmp_path / "model")
    options = trainer_options(replay={"share": 0.5}, engine_tolerance=100.0, mismatch="truncate", estimator="tree_grpo")
    parents = [run(f"e{k}", LONG, 1.0) for k in range(2)]
    forks = [fork(f"f{k}.{i}", parents[k], 2, LONG[2:], 0.0) for k in range(2) for i in range(3)]
    older = [run(f"o{k}", LONG, 1.0) for k in range(5)]
    older = [replace(each, episode=replace(each.episode, task_id=each.episode.episode_id)) for each in older]
    report = MarftTrainer(options, model, NODES, seed=0).update([*parents, *forks], older)
    assert report["replayed"] == 2
    assert report["drops"]["replay: episode beyond replay.share"] == 3


def test_gae_of_a_shared_call_is_the_mean_over_its_runs_and_so_are_its_parts() -> None:
    parent = run("e", LONG, 1.0)
    data = to_round(parent, fork("f", parent, 2, LONG[2:], 0.0))
    values = [np.array([0.5])] * 6
    given = EstimatorInput(data, (1,) * 6, np.ones(6), values=values, bootstrap_A=np.zeros(6))
    estimate = estimators()["gae"](EstimatorSettings(gae_lambda=1.0)).estimate(given).estimate
    # lambda 1: the return less the value; above the fork point the return is (1 + 0) / 2
    np.testing.assert_allclose(estimate.advantage_U, [0, 0, 0.5, 0.5, -0.5, -0.5], atol=1e-12)
    np.testing.assert_allclose(estimate.by_source["reward"], [0.5, 0.5, 1, 1, 0, 0], atol=1e-12)
    np.testing.assert_allclose(sum(estimate.by_source.values()), estimate.advantage_U, atol=1e-12)


def test_a_share_is_that_of_all_runs_that_a_call_stands_in() -> None:
    # a call of two runs of a half each, then one of each; and a run of its own
    stands = [[(0, 0.5), (1, 0.5)], [(0, 0.5)], [(1, 0.5)], [(2, 1.0)]]
    shares = unit_shares([3, 2, 1, 4], [0, 0, 1, 2], "episode", "action", stands)
    assert shares == pytest.approx([1 / 4, 1 / 8, 1 / 8, 1 / 2])
    assert unit_shares([3, 2, 1, 4], [0, 0, 1, 2], "action", "action", stands) == pytest.approx(
        [1 / 3, 1 / 6, 1 / 6, 1 / 3]
    )
    tokens = 3 + 1 + 0.5 + 4
    assert unit_shares([3, 2, 1, 4], [0, 0, 1, 2], "token", "action", stands) == pytest.approx(
        [3 / tokens, 1 / tokens, 0.5 / tokens, 4 / tokens]
    )
