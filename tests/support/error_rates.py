"""How often the claims of marft_bridge.statistics are wrong, by simulation.

`python tests/support/error_rates.py [simulations]` prints the table of docs/statistics.md; test_statistics_rates.py
checks every row. A row that breaks a rule on purpose (no correction, no clusters) shows that the study would notice.
"""

from __future__ import annotations

import functools
import math
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.stats

from marft_bridge.statistics import (
    Contrast,
    avg_at_k,
    compare_family,
    confidence_sequence,
    mean_interval,
    minimum_detectable_effect,
    monitor,
    non_inferiority_p_value,
    paired_difference,
    pass_at_k,
    repeated_interval,
    tasks_for_non_inferiority,
    tasks_to_settle,
)
from marft_bridge.statistics.bradley_terry import Game
from marft_bridge.statistics.elo import games_to_ratings

SIMULATIONS = 1_000
EQUALS, AT_MOST, AT_LEAST, BROKEN, ROUGHLY = "equals", "at most", "at least", "broken", "roughly"
LEVEL, POWER, COVERAGE = "false positives", "power", "coverage"
Rng = np.random.Generator
Trial = Callable[[Rng, int], bool]


@dataclass(frozen=True)
class Study:
    """One question to simulate; `says` is the rate that theory gives, `how` the relation that must hold to it.

    `broken`: the rate must miss what theory says by `margin` or more. `roughly`: an approximation is used outside what
    it assumes, or an asymptotic formula for a finite number, and may be off by `margin`.
    """

    kind: str
    claim: str
    says: float
    how: str
    margin: float
    trial: Trial

    def hits(self, simulations: int = SIMULATIONS) -> int:
        return _hits(self, simulations)

    def holds(self, hits: int, simulations: int = SIMULATIONS) -> bool:
        """Up to one chance in a thousand."""
        rate = hits / simulations
        if self.how == BROKEN:
            return abs(rate - self.says) >= self.margin
        if self.how == ROUGHLY:
            noise = 3.3 * math.sqrt(self.says * (1 - self.says) / simulations)
            return abs(rate - self.says) <= self.margin + noise
        side = {EQUALS: "two-sided", AT_MOST: "greater", AT_LEAST: "less"}[self.how]
        return bool(scipy.stats.binomtest(hits, simulations, self.says, alternative=side).pvalue > 1e-3)


@functools.cache
def _hits(study: Study, simulations: int) -> int:
    rng = np.random.default_rng(zlib.crc32(study.claim.encode()))
    return sum(study.trial(rng, seed) for seed in range(simulations))


STUDIES: list[Study] = []


def study(kind: str, claim: str, says: float, how: str = EQUALS, margin: float = 0.0) -> Callable[[Trial], Trial]:
    def register(trial: Trial) -> Trial:
        STUDIES.append(Study(kind, claim, says, how, margin, trial))
        return trial

    return register


def p_of(seed: int, diffs: Any, clusters: Any = None, *, ranks: bool = False, resamples: int = 399) -> float:
    zeros = np.zeros(len(diffs))
    return paired_difference("x", zeros, diffs, clusters=clusters, seed=seed, resamples=resamples, ranks=ranks).p_value


def covers(seed: int, diffs: Any, truth: float, clusters: Any = None) -> bool:
    zeros = np.zeros(len(diffs))
    low, high = paired_difference("x", zeros, diffs, clusters=clusters, seed=seed, resamples=999).ci95
    return low - 1e-9 <= truth <= high + 1e-9


def coins(rng: Rng, tasks: int, chance: float = 0.4) -> Any:
    return (rng.random((2, tasks)) < chance).astype(float)


def sampled(rng: Rng, tasks: int, samples: int, mean: float = 0.0) -> tuple[Any, Any]:
    """Differences of several samples per task, and their tasks; tasks differ more than the samples of one."""
    labels = np.repeat(np.arange(tasks), samples)
    return rng.normal(mean, 1, tasks)[labels] + rng.normal(0, 0.5, labels.size), labels


def changed(rng: Rng, tasks: int, won: float, lost: float) -> Any:
    """Differences of outcomes of 0 and 1, of which these shares of the tasks are won and lost."""
    draws = rng.random(tasks)
    return np.where(draws < won, 1.0, np.where(draws < won + lost, -1.0, 0.0))


def not_inferior(
    seed: int, diffs: Any, margin: float, clusters: Any = None, *, by_interval_alone: bool = False
) -> bool:
    """The claim of a comparison: the interval is above -margin, and the one-sided test rejects at 2.5%."""
    base, values = np.maximum(-diffs, 0.0), np.maximum(diffs, 0.0)
    result = paired_difference("x", base, values, clusters=clusters, seed=seed, resamples=999)
    p = non_inferiority_p_value("x", base, values, margin=margin, value_range=1.0, clusters=clusters)
    return result.ci95[0] > -margin and (by_interval_alone or p < 0.025)


# -- no difference: how often is one found? ----------------------------------------------------------------------


@study(LEVEL, "sign flips, 15 tasks, normal scores", 0.05)
def _(rng: Rng, seed: int) -> bool:
    return p_of(seed, rng.normal(0, 1, 15)) <= 0.05


@study(LEVEL, "sign flips, 40 tasks, scores with a long tail on both sides", 0.05)
def _(rng: Rng, seed: int) -> bool:
    a, b = rng.lognormal(0, 1.5, (2, 40))
    return p_of(seed, b - a) <= 0.05


@study(LEVEL, "sign flips, 10 tasks, equal means but only b skewed (its assumption fails)", 0.05, ROUGHLY, 0.08)
def _(rng: Rng, seed: int) -> bool:
    return p_of(seed, rng.exponential(1, 10) - 1) <= 0.05


@study(LEVEL, "McNemar, 30 tasks", 0.05, AT_MOST)
def _(rng: Rng, seed: int) -> bool:
    a, b = coins(rng, 30)
    return paired_difference("x", a, b, seed=seed, resamples=10).p_value <= 0.05


@study(LEVEL, "McNemar, 400 tasks", 0.05, AT_MOST)
def _(rng: Rng, seed: int) -> bool:
    a, b = coins(rng, 400)
    return paired_difference("x", a, b, seed=seed, resamples=10).p_value <= 0.05


@study(LEVEL, "Wilcoxon, 15 tasks, normal scores", 0.05)
def _(rng: Rng, seed: int) -> bool:
    return p_of(seed, rng.normal(0, 1, 15), ranks=True, resamples=10) <= 0.05


@study(LEVEL, "Wilcoxon, 25 tasks, scores in fifths (ties and zeros)", 0.05, AT_MOST)
def _(rng: Rng, seed: int) -> bool:
    a, b = rng.integers(0, 6, (2, 25)) / 5
    return p_of(seed, b - a, ranks=True, resamples=10) <= 0.05


@study(LEVEL, "sign flips, 12 tasks x 8 samples, clustered", 0.05)
def _(rng: Rng, seed: int) -> bool:
    return p_of(seed, *sampled(rng, 12, 8)) <= 0.05


@study(LEVEL, "Wilcoxon, 12 tasks x 8 samples, clustered", 0.05)
def _(rng: Rng, seed: int) -> bool:
    return p_of(seed, *sampled(rng, 12, 8), ranks=True, resamples=10) <= 0.05


@study(LEVEL, "sign flips, 12 tasks x 8 samples, CLUSTERS IGNORED", 0.05, BROKEN, 0.2)
def _(rng: Rng, seed: int) -> bool:
    return p_of(seed, sampled(rng, 12, 8)[0], resamples=199) <= 0.05


@study(LEVEL, "Wilcoxon, 12 tasks x 8 samples, CLUSTERS IGNORED", 0.05, BROKEN, 0.2)
def _(rng: Rng, seed: int) -> bool:
    return p_of(seed, sampled(rng, 12, 8)[0], ranks=True, resamples=10) <= 0.05


# -- worse by exactly the margin: how often is it called non-inferior? --------------------------------------------


@study(LEVEL, "non-inferior at a loss of the margin, 200 tasks, 10% won and 13% lost, margin 0.03", 0.025, AT_MOST)
def _(rng: Rng, seed: int) -> bool:
    return not_inferior(seed, changed(rng, 200, 0.1, 0.13), 0.03)


@study(LEVEL, "non-inferior at a loss of the margin, 120 tasks, none won and 3% lost, margin 0.03", 0.025, AT_MOST)
def _(rng: Rng, seed: int) -> bool:
    return not_inferior(seed, changed(rng, 120, 0.0, 0.03), 0.03)


@study(LEVEL, "non-inferior at a loss of the margin, 100 tasks x 4 samples, clustered, margin 0.1", 0.025, AT_MOST)
def _(rng: Rng, seed: int) -> bool:
    labels = np.repeat(np.arange(100), 4)
    diffs = rng.normal(-0.1, 0.2, 100)[labels] + rng.normal(0, 0.2, 400)
    return not_inferior(seed, np.clip(diffs, -1, 1), 0.1, labels)


@study(LEVEL, "non-inferior at a loss of the margin, 30 tasks, 3% lost, INTERVAL ALONE", 0.025, BROKEN, 0.2)
def _(rng: Rng, seed: int) -> bool:
    return not_inferior(seed, changed(rng, 30, 0.0, 0.03), 0.03, by_interval_alone=True)


# -- several variants and metrics --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Outcome:
    any_verdict: bool
    any_p: bool
    any_uncorrected: bool
    all_covered: bool


@functools.cache
def _family(seed: int, real: bool) -> _Outcome:
    """Two variants with two related metrics beside one base, 16 tasks. With `real`, variant 0 is truly better."""
    rng = np.random.default_rng([7, seed, real])
    base = rng.normal(0, 1, (2, 16))
    truth = [[1.2 if real and variant == 0 else 0.0] * 2 for variant in range(2)]
    contrasts = []
    for variant in range(2):
        shared = rng.normal(0, 0.8, 16)  # one variant's metrics move together
        for metric in range(2):
            values = truth[variant][metric] + shared + rng.normal(0, 0.6, 16)
            contrasts.append(Contrast(f"v{variant}", f"m{metric}", base[metric], values))
    members = compare_family(contrasts, seed=seed, resamples=1)
    truths = [x for row in truth for x in row]
    null = [member for member, true in zip(members, truths, strict=True) if true == 0]
    return _Outcome(
        any_verdict=any(member.verdict != "not settled" for member in null),
        any_p=any(member.p_adjusted <= 0.05 for member in null),
        any_uncorrected=any(member.result.p_value <= 0.05 for member in null),
        all_covered=all(
            member.simultaneous[0] <= true <= member.simultaneous[1]
            for member, true in zip(members, truths, strict=True)
        ),
    )


@study(LEVEL, "any false verdict, 2 variants x 2 metrics, Holm and interval", 0.05, AT_MOST)
def _(rng: Rng, seed: int) -> bool:
    return _family(seed, False).any_verdict


@study(LEVEL, "any Holm p-value below 5%, 2 variants x 2 metrics", 0.05, AT_MOST)
def _(rng: Rng, seed: int) -> bool:
    return _family(seed, False).any_p


@study(LEVEL, "any false verdict where the other variant is truly better", 0.05, AT_MOST)
def _(rng: Rng, seed: int) -> bool:
    return _family(seed, True).any_verdict


@study(LEVEL, "any p-value below 5%, 2 variants x 2 metrics, NO CORRECTION", 0.05, BROKEN, 0.05)
def _(rng: Rng, seed: int) -> bool:
    return _family(seed, False).any_uncorrected


# -- looking before the end --------------------------------------------------------------------------------------

FIVE_LOOKS = (20, 40, 60, 80, 100)


def stops(seed: int, diffs: Any, looks: Any, clusters: Any = None) -> bool:
    zeros = np.zeros(len(diffs))
    return monitor("x", zeros, diffs, clusters=clusters, looks=looks, max_tasks=looks[-1], seed=seed, flips=999).stopped


@study(LEVEL, "group-sequential, 5 looks at 100 tasks, normal scores", 0.05)
def _(rng: Rng, seed: int) -> bool:
    return stops(seed, rng.normal(0, 1, 100), FIVE_LOOKS)


@study(LEVEL, "group-sequential, a look at each of 100 tasks, 0 or 1", 0.05, AT_MOST)
def _(rng: Rng, seed: int) -> bool:
    a, b = coins(rng, 100)
    return stops(seed, b - a, range(1, 101))


@study(LEVEL, "group-sequential, 5 looks at 10 tasks", 0.05, AT_MOST)
def _(rng: Rng, seed: int) -> bool:
    return stops(seed, rng.normal(0, 1, 10), (2, 4, 6, 8, 10))


@study(LEVEL, "group-sequential, 4 looks at 20 tasks x 4 samples, clustered", 0.05)
def _(rng: Rng, seed: int) -> bool:
    diffs, labels = sampled(rng, 20, 4)
    return stops(seed, diffs, (5, 10, 15, 20), labels)


@study(LEVEL, "5 looks at 100 tasks, each tested at 5%, PEEKING", 0.05, BROKEN, 0.05)
def _(rng: Rng, seed: int) -> bool:
    diffs = rng.normal(0, 1, 100)
    return any(p_of(seed, diffs[:tasks], resamples=199) <= 0.05 for tasks in FIVE_LOOKS)


@study(LEVEL, "4 looks at 20 tasks x 4 samples, spent but CLUSTERS IGNORED", 0.05, BROKEN, 0.15)
def _(rng: Rng, seed: int) -> bool:
    return stops(seed, sampled(rng, 20, 4)[0], (20, 40, 60, 80))


def bets(diffs: Any, clusters: Any = None) -> Any:
    return confidence_sequence("x", np.zeros(len(diffs)), diffs, clusters=clusters, grid=100)


@study(LEVEL, "betting, a look at each of 300 tasks, 0 or 1", 0.05, AT_MOST)
def _(rng: Rng, seed: int) -> bool:
    a, b = coins(rng, 300)
    return bets(b - a).settled_after is not None


@study(LEVEL, "betting, a look at each of 100 tasks x 4 samples, skewed, clustered", 0.05, AT_MOST)
def _(rng: Rng, seed: int) -> bool:
    chance = rng.beta(0.3, 2.7, 100)  # rare large gains, many small losses: a mean of 0, far from symmetric
    labels = np.repeat(np.arange(100), 4)
    return bets((rng.random(400) < chance[labels]) - 0.1, labels).settled_after is not None


@study(LEVEL, "t interval after each of 300 tasks, 0 or 1, PEEKING", 0.05, BROKEN, 0.2)
def _(rng: Rng, seed: int) -> bool:
    a, b = coins(rng, 300)
    diffs, tasks = b - a, np.arange(1, 301)
    mean = np.cumsum(diffs) / tasks
    error = np.sqrt(np.maximum(np.cumsum(diffs**2) / tasks - mean**2, 1e-12) / np.maximum(tasks - 1, 1))
    return bool((np.abs(mean) > scipy.stats.t.ppf(0.975, np.maximum(tasks - 1, 1)) * error)[9:].any())


# -- a known difference: how often is it found? ------------------------------------------------------------------


def t_power(effect: float, tasks: int) -> float:
    """Power of a t test at 5% for this effect in deviations: the non-central t distribution."""
    critical = scipy.stats.t.ppf(0.975, tasks - 1)
    moved = scipy.stats.nct(tasks - 1, effect * math.sqrt(tasks))
    return float(moved.sf(critical) + moved.cdf(-critical))


def mcnemar_power(wins: float, losses: float, tasks: int) -> float:
    """Every table of an exact McNemar test at 5%, weighted by its chance."""
    total = 0.0
    for moved in range(tasks + 1):
        of_them = np.arange(moved + 1)
        p = np.minimum(1, 2 * scipy.stats.binom.cdf(np.minimum(of_them, moved - of_them), moved, 0.5))
        found = scipy.stats.binom.pmf(of_them, moved, wins / (wins + losses))[p <= 0.05].sum()
        total += scipy.stats.binom.pmf(moved, tasks, wins + losses) * found
    return float(total)


def wilcoxon_power(effect: float, tasks: int) -> float:
    """Lehmann (1975), "Nonparametrics", chapter 4: the rank sum of normal differences as a normal variable."""
    one = scipy.stats.norm.cdf(effect)  # a difference is positive
    pair = scipy.stats.norm.cdf(effect * math.sqrt(2))  # two add up to more than 0
    related = scipy.stats.multivariate_normal([0, 0], [[1, 0.5], [0.5, 1]]).cdf([effect * math.sqrt(2)] * 2)
    n = tasks
    mean = n * (n - 1) / 2 * pair + n * one
    variance = (
        n * (n - 1) * (n - 2) * (related - pair**2)
        + n * (n - 1) / 2 * (2 * (one - pair) ** 2 + 3 * pair * (1 - pair))
        + n * one * (1 - one)
    )
    bound = n * (n + 1) / 4 + scipy.stats.norm.ppf(0.975) * math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
    return float(scipy.stats.norm.sf((bound - mean) / math.sqrt(variance)))


def o_brien_fleming_power(effect: float, tasks: int) -> float:
    """A Brownian motion that meets the published five bounds of Lan and DeMets' O'Brien-Fleming type at 5%."""
    bounds = np.array([4.8769, 3.3569, 2.6803, 2.2898, 2.0310])
    steps = np.random.default_rng(5).normal(effect * math.sqrt(tasks / 5), 1, (400_000, 5))
    z = steps.cumsum(axis=1) / np.sqrt(np.arange(1, 6))
    return float((np.abs(z) > bounds).any(axis=1).mean())


@study(POWER, "sign flips, 25 tasks, 0.6 deviations (closed form: t test)", t_power(0.6, 25), ROUGHLY, 0.01)
def _(rng: Rng, seed: int) -> bool:
    return p_of(seed, rng.normal(0.6, 1, 25), resamples=999) <= 0.05


@study(POWER, "McNemar, 60 tasks, 30% won and 10% lost (closed form: all tables)", mcnemar_power(0.3, 0.1, 60))
def _(rng: Rng, seed: int) -> bool:
    moved = rng.choice([-1, 0, 1], 60, p=[0.1, 0.6, 0.3])
    return paired_difference("x", moved < 0, moved > 0, seed=seed, resamples=10).p_value <= 0.05


@study(POWER, "Wilcoxon, 40 tasks, 0.5 deviations (closed form: Lehmann)", wilcoxon_power(0.5, 40), ROUGHLY, 0.02)
def _(rng: Rng, seed: int) -> bool:
    return p_of(seed, rng.normal(0.5, 1, 40), ranks=True, resamples=10) <= 0.05


def _unit_deviation() -> tuple[Any, Any]:
    """16 tasks x 4 samples whose task means have deviation 1 exactly."""
    rng = np.random.default_rng(1)
    means = rng.normal(0, 1, 16)
    means = (means - means.mean()) / means.std(ddof=1)
    within = rng.normal(0, 1, (16, 4))
    within -= within.mean(axis=1, keepdims=True)
    return (means[:, None] + within).ravel(), np.repeat(np.arange(16), 4)


@study(POWER, "minimum detectable effect, 16 tasks x 4 samples, clustered", 0.8, ROUGHLY, 0.02)
def _(rng: Rng, seed: int) -> bool:
    effect = minimum_detectable_effect(_unit_deviation()[0], clusters=_unit_deviation()[1])
    assert effect is not None
    labels = np.repeat(np.arange(16), 4)
    within = rng.normal(0, 1, (16, 4))
    diffs = rng.normal(effect, 1, 16)[labels] + (within - within.mean(axis=1, keepdims=True)).ravel()
    return p_of(seed, diffs, labels, resamples=999) <= 0.05


@study(POWER, "as many tasks as would settle 0.4 deviations, from 16 x 4 seen", 0.8, ROUGHLY, 0.02)
def _(rng: Rng, seed: int) -> bool:
    plan = tasks_to_settle(_unit_deviation()[0], 0.4, clusters=_unit_deviation()[1])
    assert plan is not None
    return p_of(seed, rng.normal(0.4, 1, plan.tasks), resamples=999) <= 0.05


@study(
    POWER,
    "group-sequential, 5 looks at 100 tasks, 0.3 deviations (closed form: published bounds)",
    o_brien_fleming_power(0.3, 100),
    ROUGHLY,
    0.02,
)
def _(rng: Rng, seed: int) -> bool:
    return stops(seed, rng.normal(0.3, 1, 100), FIVE_LOOKS)


@functools.cache
def _tasks_for_non_inferiority() -> int:
    """From 200 tasks of which 5% were won and 5% lost."""
    tasks = tasks_for_non_inferiority(np.repeat([1.0, -1.0, 0.0], [10, 10, 180]), margin=0.1, value_range=1.0)
    assert tasks is not None
    return tasks


@study(POWER, "non-inferior, no true difference, as many tasks as planned, 5% won and lost", 0.8, ROUGHLY, 0.05)
def _(rng: Rng, seed: int) -> bool:
    return not_inferior(seed, changed(rng, _tasks_for_non_inferiority(), 0.05, 0.05), 0.1)


@study(POWER, "non-inferior, no true difference, 400 tasks, 10% won and lost, margin 0.1", 0.97, AT_LEAST)
def _(rng: Rng, seed: int) -> bool:
    return not_inferior(seed, changed(rng, 400, 0.1, 0.1), 0.1)


# -- intervals: how often do they hold the truth? ----------------------------------------------------------------


def bca_study(claim: str, draw: Callable[[Rng], Any], truth: float, how: str = EQUALS, margin: float = 0.0) -> None:
    def trial(rng: Rng, seed: int) -> bool:
        return covers(seed, draw(rng), truth)

    STUDIES.append(Study(COVERAGE, f"BCa, {claim}", 0.95, how, margin, trial))


TRINOMIAL = {"p": [0.1, 0.6, 0.3]}  # lost, equal, won
bca_study("10 tasks, normal", lambda rng: rng.normal(0.5, 1, 10), 0.5, ROUGHLY, 0.015)
bca_study("200 tasks, normal", lambda rng: rng.normal(0.5, 1, 200), 0.5)
bca_study("20 tasks, 0 or 1", lambda rng: rng.choice([-1, 0, 1], 20, **TRINOMIAL), 0.2, ROUGHLY, 0.02)
bca_study("200 tasks, 0 or 1", lambda rng: rng.choice([-1, 0, 1], 200, **TRINOMIAL), 0.2)
bca_study("20 tasks, bounded scores", lambda rng: rng.beta(2, 1, 20) - rng.beta(1, 2, 20), 1 / 3)
bca_study("200 tasks, bounded scores", lambda rng: rng.beta(2, 1, 200) - rng.beta(1, 2, 200), 1 / 3)
bca_study("20 tasks, skewed (exponential)", lambda rng: rng.exponential(1, 20), 1.0, ROUGHLY, 0.03)
bca_study("200 tasks, skewed (exponential)", lambda rng: rng.exponential(1, 200), 1.0, ROUGHLY, 0.01)


@study(COVERAGE, "BCa, 25 tasks with 1 to 6 samples, clustered", 0.95, ROUGHLY, 0.02)
def _(rng: Rng, seed: int) -> bool:
    labels = np.repeat(np.arange(25), rng.integers(1, 7, 25))
    return covers(seed, rng.normal(0.3, 1, 25)[labels] + rng.normal(0, 0.5, labels.size), 0.3, labels)


@study(COVERAGE, "BCa, 12 tasks x 8 samples, CLUSTERS IGNORED", 0.95, BROKEN, 0.2)
def _(rng: Rng, seed: int) -> bool:
    return covers(seed, sampled(rng, 12, 8)[0], 0.0)


@study(COVERAGE, "percentile bootstrap, 10 tasks, normal, NOT CORRECTED", 0.95, BROKEN, 0.03)
def _(rng: Rng, seed: int) -> bool:
    values = rng.normal(0.5, 1, 10)
    low, high = np.quantile(values[rng.integers(0, 10, (999, 10))].mean(axis=1), [0.025, 0.975])
    return bool(low <= 0.5 <= high)


@study(COVERAGE, "mean of one side, 12 tasks x 8 samples, clustered", 0.95)
def _(rng: Rng, seed: int) -> bool:
    diffs, labels = sampled(rng, 12, 8)
    interval = mean_interval(diffs, clusters=labels)
    return interval.low is not None and interval.high is not None and interval.low <= 0 <= interval.high


@study(COVERAGE, "pass@4 from 8 samples of 40 tasks", 0.95, ROUGHLY, 0.02)
def _(rng: Rng, seed: int) -> bool:
    chances = rng.beta(1, 2, 40)  # E[1 - (1 - p)^4] = 1 - 2 / 6
    correct = rng.random((40, 8)) < chances[:, None]
    interval = pass_at_k(correct.ravel(), np.repeat(np.arange(40), 8), 4)
    assert interval.low is not None
    assert interval.high is not None
    return interval.low <= 2 / 3 <= interval.high


@study(COVERAGE, "avg@4 of 30 tasks, bounded scores", 0.95, ROUGHLY, 0.01)
def _(rng: Rng, seed: int) -> bool:
    chances = rng.beta(2, 2, 30)
    interval = avg_at_k(rng.binomial(5, np.repeat(chances, 4)) / 5, np.repeat(np.arange(30), 4), 4)
    assert interval.low is not None
    assert interval.high is not None
    return interval.low <= 0.5 <= interval.high


def elo_covers(rng: Rng, seed: int, tasks: int) -> bool:
    """Two players of equal strength, four games a task; who is favoured differs by task. No interval misses nothing."""
    first_wins = rng.random((tasks, 4)) < rng.random((tasks, 1))
    games = [Game("a", "b", "first" if won else "second") for won in first_wins.ravel()]
    rating = games_to_ratings(games, np.repeat(np.arange(tasks), 4).tolist(), "a", seed=seed).by_player["b"]
    return rating.low is None or rating.high is None or rating.low <= 0 <= rating.high


@study(COVERAGE, "Elo, 5 tasks x 4 games of equal players", 0.95, ROUGHLY, 0.03)
def _(rng: Rng, seed: int) -> bool:
    return elo_covers(rng, seed, 5)


@study(COVERAGE, "Elo, 15 tasks x 4 games of equal players", 0.95, ROUGHLY, 0.02)
def _(rng: Rng, seed: int) -> bool:
    return elo_covers(rng, seed, 15)


@study(COVERAGE, "all simultaneous intervals of a family, 16 tasks, 2 variants x 2 metrics", 0.95, ROUGHLY, 0.02)
def _(rng: Rng, seed: int) -> bool:
    return _family(seed, True).all_covered


@study(COVERAGE, "repeated intervals of all 4 looks at 40 tasks, normal", 0.95, AT_LEAST)
def _(rng: Rng, seed: int) -> bool:
    diffs, looks = rng.normal(0.3, 1, 40), (10, 20, 30, 40)
    for taken in range(1, 5):
        low, high = repeated_interval("x", np.zeros(40), diffs, looks=looks[:taken], max_tasks=40, seed=seed, flips=399)
        if (low is not None and low > 0.3) or (high is not None and high < 0.3):
            return False
    return True


@study(COVERAGE, "betting, the intervals after each of 300 tasks, 0 or 1", 0.95, AT_LEAST)
def _(rng: Rng, seed: int) -> bool:
    sequence = bets(rng.choice([-1, 0, 1], 300, **TRINOMIAL))
    return bool(((sequence.low <= 0.2) & (sequence.high >= 0.2)).all())


def row(one: Study, hits: int, simulations: int) -> str:
    """One line of the table, as Markdown."""
    relation = "should fail" if one.how == BROKEN else one.how
    return f"| {one.kind} | {one.claim} | {one.says:.3f} | {relation} | {hits / simulations:.3f} |"


def main(simulations: int) -> None:
    """Prints the table row by row, a second or so each."""
    sys.stdout.write("| rate | study | theory | relation | measured |\n|---|---|---|---|---|\n")
    for one in STUDIES:
        sys.stdout.write(row(one, one.hits(simulations), simulations) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else SIMULATIONS)
