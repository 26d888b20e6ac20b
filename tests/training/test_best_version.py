"""Owns: what a training run's rewards say of its versions, which one is named, and when rounds stop.

- The estimate is the one worked by hand, and that of the mixed model written out as one normal distribution.
- Runs that came to no result count as the worst reward, so that no version wins by those that survived.
- Harder tasks make no version worse; equal rewards, however scaled, ordered or shifted, name equal versions.
- On invented runs the named version is nearer to the best than the newest and than the luckiest; few that rise stop.
"""

from __future__ import annotations

import math
import re
from functools import cache
from statistics import NormalDist, mean

import numpy as np
import pytest
from support.paths import ROOT
from support.reward_curves import FALLING, FLAT, RISING, TrainingRun, invent_run

from marft_bridge.runs.named_version import VersionEvidence
from marft_bridge.training import best_version
from marft_bridge.training.best_version import (
    ScoredEpisode,
    episodes_to_evidence,
    evidence_to_best,
    evidence_to_stop,
)


def test_the_estimate_is_the_one_worked_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """No task effects, steps as large as the noise: a, b, c minimise a^2 + (3 - b)^2 + (b - a)^2 + (c - b)^2.

    So a = 1, b = c = 2, with the residual 3 on one degree of freedom: the noise has the variance 3. The inverse of the
    equations is a third of (2 1 1; 1 2 2; 1 2 5), and c - a has the variance 3 x (2 + 5 - 2) / 3 = 5.
    """
    monkeypatch.setattr(best_version, "TASK_VARIANCES", (0.0,))
    monkeypatch.setattr(best_version, "STEP_VARIANCES", (1.0,))
    first, second, newest = episodes_to_evidence([ScoredEpisode(1, "a", 0.0), ScoredEpisode(2, "b", 3.0)], newest=3)
    assert [row.estimate for row in (first, second, newest)] == pytest.approx([1.0, 2.0, 2.0])
    assert [row.high - row.estimate for row in (first, second, newest)] == pytest.approx(
        [1.96 * math.sqrt(variance) for variance in (2, 2, 5)], rel=1e-4
    )
    assert first.above_newest == pytest.approx(NormalDist().cdf(-1 / math.sqrt(5)))
    assert second.above_newest == newest.above_newest == pytest.approx(0.5)
    assert [row.mean for row in (first, second, newest)] == [0.0, 3.0, None]


def test_a_task_s_effect_is_shrunk_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """One version, task effects as varied as the noise: a task of n episodes weighs n / (1 + n) in the mean.

    Three episodes of 1 on task a and one of 0 on task b: (3/4 x 1 + 1/2 x 0) / (3/4 + 1/2) = 0.6, where the plain
    mean is 0.75.
    """
    monkeypatch.setattr(best_version, "TASK_VARIANCES", (1.0,))
    episodes = [*[ScoredEpisode(1, "a", 1.0)] * 3, ScoredEpisode(1, "b", 0.0)]
    (only,) = episodes_to_evidence(episodes, newest=1)
    assert (only.mean, only.estimate) == (0.75, pytest.approx(0.6))


def written_out(episodes: list[ScoredEpisode], newest: int) -> tuple[list[float], list[float]]:
    """Estimates and deviations by generalised least squares on the covariance matrix of all rewards."""
    rewards = np.array([e.reward for e in episodes], float)
    tasks = sorted({e.task for e in episodes})
    by_task = np.array([[e.task == task for task in tasks] for e in episodes], float)
    fixed = np.array([[e.version == 0, e.version > 0] for e in episodes], float)
    # a version's effect is that of version 1 and of every step since
    by_step = np.array([[0 < step <= e.version - 1 for step in range(1, newest)] for e in episodes], float)
    weights, means, variances = [], [], []
    for task_variance in best_version.TASK_VARIANCES:
        for step_variance in best_version.STEP_VARIANCES:
            cov = np.eye(len(rewards)) + task_variance * by_task @ by_task.T + step_variance * by_step @ by_step.T
            inverse = np.linalg.inv(cov)
            of_fixed = np.linalg.inv(fixed.T @ inverse @ fixed)
            beta = of_fixed @ fixed.T @ inverse @ rewards
            left = rewards - fixed @ beta
            freedom = len(rewards) - 2
            noise = left @ inverse @ left / freedom
            weights.append(
                -0.5 * (np.linalg.slogdet(cov)[1] - np.linalg.slogdet(of_fixed)[1] + freedom * math.log(noise))
            )
            to_versions = np.tril(np.ones((newest, newest)), -1)[:, : newest - 1]
            gain = step_variance * to_versions @ by_step.T @ inverse
            means.append(beta[1] + gain @ left)
            share = np.c_[np.zeros(newest), np.ones(newest)] - gain @ fixed
            spread = step_variance * (to_versions @ to_versions.T - gain @ by_step @ to_versions.T)
            variances.append(noise * np.diag(spread + share @ of_fixed @ share.T))
    weight = np.exp(np.array(weights) - max(weights))
    weight /= weight.sum()
    estimate = weight @ np.array(means)
    variance = weight @ (np.array(variances) + (np.array(means) - estimate) ** 2)
    return estimate.tolist(), np.sqrt(variance).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_the_evidence_is_that_of_the_whole_normal_distribution(seed: int) -> None:
    rng = np.random.default_rng(seed)
    episodes = [
        ScoredEpisode(version, f"t{task}", float(rng.normal(0.1 * version + 0.3 * task, 0.5)))
        for version in (0, 1, 2, 4)
        for task in rng.integers(0, 6, 7)
    ]
    rows = episodes_to_evidence(episodes, newest=5)
    estimates, deviations = written_out(episodes, newest=5)
    assert [row.estimate for row in rows] == pytest.approx(estimates)
    assert [(row.high - row.low) / 2 for row in rows] == pytest.approx([1.959964 * d for d in deviations], rel=1e-5)


def test_harder_tasks_make_no_version_worse() -> None:
    """Every version earns 0.9 on easy tasks and 0.1 on hard ones; later rounds draw ever more of the hard ones."""
    rng = np.random.default_rng(0)
    episodes = [
        ScoredEpisode(version, f"{kind}{number % 5}", float(np.clip(level + rng.normal(0, 0.05), 0, 1)))
        for version, hard in enumerate((8, 8, 11, 14))
        for kind, level, count in (("easy", 0.9, 16 - hard), ("hard", 0.1, hard))
        for number in range(count)
    ]
    rows = episodes_to_evidence(episodes, newest=4)
    means = [row.mean for row in rows[:3]]
    assert means[0] is not None
    assert means[2] is not None
    assert means[0] - means[2] > 0.25
    assert rows[0].estimate == pytest.approx(rows[2].estimate, abs=0.04)
    assert evidence_to_best(rows).version == 4


def test_order_scale_and_origin_of_rewards_change_no_choice() -> None:
    run = invent_run("rises and falls", rounds=8, episodes_per_round=32, seed=3)
    rows = episodes_to_evidence(run.episodes, run.newest)
    changed = [ScoredEpisode(e.version, e.task, 100 * (e.reward or 0.0) - 7) for e in reversed(run.episodes)]
    scaled = episodes_to_evidence(changed, run.newest)
    assert [row.above_newest for row in scaled] == pytest.approx([row.above_newest for row in rows])
    assert [row.estimate for row in scaled] == pytest.approx([100 * row.estimate - 7 for row in rows])
    assert evidence_to_best(scaled).version == evidence_to_best(rows).version


def played(version: int, right: int, wrong: int, lost: int = 0) -> list[ScoredEpisode]:
    rewards = [1.0] * right + [0.0] * wrong + [None] * lost
    return [ScoredEpisode(version, f"{version}-{n}", reward) for n, reward in enumerate(rewards)]


def test_a_version_whose_runs_seldom_end_is_not_named_for_those_that_do() -> None:
    """Version 2 got 14 of 14 right and lost 50 more runs, version 4 got 46 of 64 right."""
    others = [*played(0, 30, 162), *played(1, 20, 44), *played(3, 44, 20), *played(4, 46, 18)]
    rows = episodes_to_evidence([*others, *played(2, 14, 0, lost=50)], newest=5)
    assert evidence_to_best(rows).version > 2
    assert [(row.episodes, row.without_result, row.mean) for row in rows[1:3]] == [(64, 50, 14 / 64), (64, 0, 44 / 64)]
    as_failures = episodes_to_evidence([*others, *played(2, 14, 50)], newest=5)
    assert [row.estimate for row in rows] == [row.estimate for row in as_failures]
    assert evidence_to_best(episodes_to_evidence([*others, *played(2, 14, 0)], newest=5)).version == 2


@pytest.mark.parametrize(("rewards", "worst"), [([0.5, 1.0], 0.0), ([-2.0, 1.0], -2.0), ([-3.0, -1.0], -3.0)])
def test_a_run_without_a_result_counts_as_the_worst_that_was_earned_and_as_no_more_than_nothing(
    rewards: list[float], worst: float
) -> None:
    scored = [ScoredEpisode(1, f"t{n}", reward) for n, reward in enumerate(rewards)]
    (row,) = episodes_to_evidence([*scored, ScoredEpisode(1, "t9", None)], newest=1)
    assert row.mean == pytest.approx((sum(rewards) + worst) / 3)


def row(version: int, estimate: float, above_newest: float) -> VersionEvidence:
    return VersionEvidence(
        version=version, episodes=8, mean=0.5, estimate=estimate, low=0.0, high=1.0, above_newest=above_newest
    )


@pytest.mark.parametrize(
    ("rows", "best", "stops"),
    [
        ([row(1, 0.7, 0.59), row(2, 0.5, 0.5)], 2, False),  # not credible
        ([row(1, 0.7, 0.6), row(2, 0.6, 0.7), row(3, 0.5, 0.5)], 1, False),  # of the credible the best estimate
        ([row(1, 0.9, 0.59), row(2, 0.6, 0.7), row(3, 0.5, 0.5)], 2, False),
        ([row(1, 0.6, 0.9), row(2, 0.6, 0.9), row(3, 0.5, 0.5)], 2, False),  # of two alike the newer
        ([row(1, 0.9, 0.95), row(2, 0.5, 0.5), row(3, 0.5, 0.5)], 1, False),  # two versions back
        ([row(1, 0.9, 0.90), row(2, 0.5, 0.5), row(3, 0.5, 0.5), row(4, 0.5, 0.5)], 1, True),
        ([row(1, 0.9, 0.89), row(2, 0.5, 0.5), row(3, 0.5, 0.5), row(4, 0.5, 0.5)], 1, False),
    ],
)
def test_the_newest_is_named_unless_an_earlier_one_is_credibly_better(
    rows: list[VersionEvidence], best: int, stops: bool
) -> None:
    assert evidence_to_best(rows).version == best
    assert evidence_to_stop(rows) is stops


def test_where_nothing_is_known_nothing_is_claimed() -> None:
    assert episodes_to_evidence([], newest=3) == ()
    assert episodes_to_evidence([ScoredEpisode(0, "a", 1.0)] * 9, newest=1) == ()
    assert episodes_to_evidence([ScoredEpisode(1, "a", 1.0)], newest=2) == ()
    assert episodes_to_evidence([ScoredEpisode(1, f"t{n}", None) for n in range(9)], newest=2) == ()
    assert not evidence_to_stop(())


def test_rewards_that_are_all_equal_name_the_newest() -> None:
    rows = episodes_to_evidence([ScoredEpisode(v, f"t{n}", 1.0) for v in range(6) for n in range(8)], newest=6)
    assert [row.estimate for row in rows] == [1.0] * 6
    assert evidence_to_best(rows).version == 6
    assert not evidence_to_stop(rows)


# -- invented runs --------------------------------------------------------------------------------------------

GUIDE = (ROOT / "docs/training.md").read_text()
SIZES = ((6, 64), (12, 32), (20, 32))  # rounds, episodes of each
SEEDS = 40


@cache
def runs_of(shape: str) -> list[TrainingRun]:
    return [invent_run(shape, rounds, episodes, seed) for rounds, episodes in SIZES for seed in range(SEEDS)]


@cache
def regrets(shape: str) -> dict[str, float]:
    """The mean of what three choices lose against the best version."""
    runs = runs_of(shape)
    return {
        "named": mean(
            run.regret(evidence_to_best(episodes_to_evidence(run.episodes, run.newest)).version) for run in runs
        ),
        "newest": mean(run.regret(run.newest) for run in runs),
        "luckiest": mean(run.regret(run.luckiest()) for run in runs),
    }


@pytest.mark.parametrize("shape", RISING)
def test_where_training_rises_next_to_nothing_is_lost(shape: str) -> None:
    lost = regrets(shape)
    assert lost["named"] < 0.02 < lost["luckiest"]
    assert lost["named"] < 0.3 * lost["luckiest"]


@pytest.mark.parametrize("shape", FALLING)
def test_where_training_falls_much_less_is_lost_than_by_the_newest(shape: str) -> None:
    lost = regrets(shape)
    assert lost["named"] < 0.5 * lost["newest"]


def test_over_all_shapes_the_named_version_loses_least() -> None:
    shapes = RISING + FALLING
    named, newest, luckiest = (mean(regrets(s)[rule] for s in shapes) for rule in ("named", "newest", "luckiest"))
    assert named < 0.6 * newest
    assert named < 0.6 * luckiest


def stopped_after(run: TrainingRun) -> int | None:
    """The round after which `train` would have stopped."""
    rounds = run.newest - 1
    for number in range(1, rounds):
        if evidence_to_stop(episodes_to_evidence(run.until(number), number + 1)):
            return number
    return None


@cache
def stops(shape: str) -> list[tuple[TrainingRun, int | None]]:
    return [(run, stopped_after(run)) for run in runs_of(shape)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", RISING)
def test_at_most_one_in_twenty_runs_that_rise_is_stopped(shape: str) -> None:
    assert mean(number is not None for _, number in stops(shape)) <= 0.05


@pytest.mark.slow
def test_a_third_of_the_runs_that_broke_down_are_stopped_half_way_and_lose_little() -> None:
    stopped = [(run, number) for run, number in stops("breaks down") if number is not None]
    assert len(stopped) > SEEDS * len(SIZES) / 3
    assert mean(run.newest - 1 - number for run, number in stopped) > 4
    named = [
        run.regret(evidence_to_best(episodes_to_evidence(run.until(number), number + 1)).version)
        for run, number in stopped
    ]
    assert mean(named) < 0.06


@pytest.mark.slow
def test_the_guide_has_the_figures_of_these_runs() -> None:
    rows = re.findall(r"^\| ([a-z ]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (\d+) % \|$", GUIDE, flags=re.MULTILINE)
    for shape, *losses, share in rows:
        lost = regrets(shape)
        assert losses == [f"{lost[rule]:.3f}" for rule in ("named", "newest", "luckiest")], shape
        assert share == f"{mean(number is not None for _, number in stops(shape)):.0%}".rstrip("%"), shape
    assert [shape for shape, *_ in rows] == [*RISING, *FLAT, *FALLING]
