"""Paired outcomes at the interim looks of a declared number of tasks -> whether the comparison may stop.

Several tests at 5% find a difference where there is none far more often than in 5% of comparisons. Here every look may
spend only part of the error, little at first, and all looks together spend at most `alpha`. Invariant: under the null
hypothesis that the labels a and b of a task could be swapped, the probability of ever stopping is at most alpha,
exactly and for any number of tasks, provided that neither the order of the tasks nor the times of the looks depend on
the outcomes. The same call with more tasks and the same seed repeats the results of all earlier looks.

Bounds come from a permutation test that flips the signs of whole tasks, as in `paired`, not from a normal
approximation: at a look with five tasks, all of which may show the same difference, that would stop at once. Where the
declared tasks are so few that all sign patterns are no more than those that would be drawn, all are enumerated.

Sources:

- Lan and DeMets (1983), "Discrete sequential boundaries for clinical trials", Biometrika 70: spending the error by a
  function of the information fraction; here their O'Brien-Fleming type, half on each side.
- Plamadeala and Rosenberger (2012), "Sequential monitoring with conditional randomization tests", Annals of
  Statistics 40: spending it on the distribution of re-randomised paths.
- Jennison and Turnbull (2000), "Group sequential methods", chapters 8.4 and 9: p-values by order of stopping, repeated
  confidence intervals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from marft_bridge.statistics.clusters import Floats, Labels, Totals, paired_values, standard_error, totals_in_order
from marft_bridge.statistics.distributions import ndtr, ndtri

_MAX_DOUBLINGS = 30  # of a standard error, before a bound of the interval counts as absent
_BISECTIONS = 20  # of the range that holds a bound of the interval


@dataclass(frozen=True, slots=True)
class Monitored:
    """The state of a comparison after its last look. `p_value` is None unless it stopped or all tasks have run."""

    metric: str
    tasks: int  # that the result rests on: those of the last look, or of the look that stopped
    max_tasks: int
    diff: float  # mean of b - a over the pairs of those tasks
    stopped: bool  # a bound was crossed: there is a difference
    spent: float  # type I error spent by the last look, at most alpha
    p_value: float | None


def spent_error(share: float, alpha: float = 0.05) -> float:
    """The information fraction (share of the declared tasks that has run), 0 to 1, into the two-sided error to spend.

    O'Brien-Fleming type of Lan and DeMets, for each side alpha / 2: 2 (1 - Phi(z_{1-alpha/4} / sqrt(share))).
    """
    if share <= 0:
        return 0.0
    return float(4.0 * ndtr(ndtri(alpha / 4) / math.sqrt(min(1.0, share))))


def monitor(
    name: str,
    a: ArrayLike,
    b: ArrayLike,
    *,
    clusters: Labels | None = None,
    looks: Sequence[int],
    max_tasks: int,
    shares: Sequence[float] | None = None,
    alpha: float = 0.05,
    seed: int,
    flips: int = 4_999,
) -> Monitored:
    """Pairs in order of arrival, and the looks taken so far, into whether the comparison may stop.

    Args:
        a: array [n], parallel to `b`: same task and same seed, all samples of a task that counts among them.
        b: array [n].
        clusters: the task of each pair, [n]; None means that every pair is a task of its own.
        looks: how many tasks were complete at each look, upwards; the last is the present one.
        max_tasks: declared before the first outcome was seen.
        shares: information fractions: the share of the declared tasks that had run by each look, up to 1; None: look /
            max_tasks. They are larger where tasks lost all their pairs, so that the last look still spends the rest.
        seed: of the sign flips, the same at every look.
        flips: sign patterns drawn (permutations). A look that may spend less than 1 / (flips + 1) cannot stop. Where
            all 2^max_tasks patterns are no more than flips + 1, these are taken instead: exact, whatever the seed.

    Raises:
        ValueError: as `paired_difference`; looks that do not rise, or that go past the tasks or their maximum.
    """
    totals, signs, budgets = _prepare(
        name,
        a,
        b,
        clusters=clusters,
        looks=looks,
        max_tasks=max_tasks,
        shares=shares,
        alpha=alpha,
        seed=seed,
        flips=flips,
    )
    for (tasks, spent), look in zip(budgets, _evaluate_looks(totals.sums, signs, budgets), strict=True):
        is_final = tasks == max_tasks or (shares is not None and tasks == looks[-1] and shares[-1] == 1)
        if look.first_crossing or is_final or tasks == looks[-1]:
            p = look.paths_as_extreme / signs.shape[1] if look.first_crossing or is_final else None
            diff = float(totals.sums[:tasks].sum() / totals.sizes[:tasks].sum())
            return Monitored(
                name, tasks, max_tasks, diff=diff, stopped=look.first_crossing, spent=spent / signs.shape[1], p_value=p
            )
    raise AssertionError("the last look returns")


def repeated_interval(
    name: str,
    a: ArrayLike,
    b: ArrayLike,
    *,
    clusters: Labels | None = None,
    looks: Sequence[int],
    max_tasks: int,
    shares: Sequence[float] | None = None,
    alpha: float = 0.05,
    seed: int,
    flips: int = 4_999,
) -> tuple[float | None, float | None]:
    """The same arguments as `monitor` into the repeated confidence interval of the mean of b - a at the last look.

    The intervals of all looks hold together with probability 1 - alpha, whether or not one stopped, and that of a look
    excludes 0 where `monitor` stops there. The interval inverts the test: it holds every shift that this look does not
    reject when it is subtracted from all differences. A bound is None where no shift, however large, would be
    rejected: too few tasks, or too little error to spend.
    """
    (sums, sizes), signs, budgets = _prepare(
        name,
        a,
        b,
        clusters=clusters,
        looks=looks,
        max_tasks=max_tasks,
        shares=shares,
        alpha=alpha,
        seed=seed,
        flips=flips,
    )
    estimate = float(sums.sum() / sizes.sum())
    scale = standard_error(Totals(sums, sizes)) if sums.size > 1 else 0.0
    scale = scale or abs(estimate) or 1.0

    def rejects_shift(shift: float) -> bool:
        *_, last = _evaluate_looks(sums - shift * sizes, signs, budgets)
        return last.exceeds_bound

    def find_bound(direction: int) -> float | None:
        inside, outside = 0.0, scale
        for _ in range(_MAX_DOUBLINGS):
            if rejects_shift(estimate + direction * outside):
                break
            inside, outside = outside, 2 * outside
        else:
            return None
        for _ in range(_BISECTIONS):
            middle = (inside + outside) / 2
            inside, outside = (inside, middle) if rejects_shift(estimate + direction * middle) else (middle, outside)
        return estimate + direction * outside

    return find_bound(-1), find_bound(1)


@dataclass(frozen=True, slots=True)
class _LookResult:
    """One look at the observed path of sums, compared with the paths of all sign flips."""

    exceeds_bound: bool
    first_crossing: bool  # exceeds the bound here, and did at no earlier look
    paths_as_extreme: int  # that crossed earlier, or lie at least as far out here; the observed path included


def _prepare(
    name: str,
    a: ArrayLike,
    b: ArrayLike,
    clusters: Labels | None,
    looks: Sequence[int],
    max_tasks: int,
    shares: Sequence[float] | None,
    alpha: float,
    seed: int,
    flips: int,
) -> tuple[Totals, NDArray[np.int8], list[tuple[int, int]]]:
    """Checked arguments of `monitor` -> totals [K] up to the last look, signs [K, paths], budgets of the looks."""
    values_a, values_b = paired_values(name, a, b)
    totals = totals_in_order(name, values_b - values_a, clusters)
    k = totals.sums.size
    if not 0 < alpha < 1 or flips < 1:
        raise ValueError(f"{name}: alpha {alpha} must lie between 0 and 1, flips {flips} must be at least 1")
    if not looks or looks[0] < 1 or any(late <= early for early, late in pairwise(looks)):
        raise ValueError(f"{name}: looks {list(looks)} must be numbers of tasks that rise from at least 1")
    if looks[-1] > min(k, max_tasks):
        raise ValueError(f"{name}: a look at {looks[-1]} tasks, but {k} are there and {max_tasks} were declared")
    fractions = [look / max_tasks for look in looks] if shares is None else list(shares)
    if len(fractions) != len(looks) or any(late <= early for early, late in pairwise([0.0, *fractions])):
        raise ValueError(f"{name}: shares {fractions} must be as many as looks {list(looks)}, and rise from above 0")
    if any(share > 1 or share < look / max_tasks for share, look in zip(fractions, looks, strict=True)):
        raise ValueError(f"{name}: shares {fractions} must lie between those of the looks {list(looks)} and 1")
    totals_so_far = Totals(*(part[: looks[-1]] for part in totals))
    signs = _signs(looks[-1], flips, seed, max_tasks=max_tasks)
    return totals_so_far, signs, _budgets(looks, fractions, alpha, paths=signs.shape[1])


def _signs(tasks: int, flips: int, seed: int, max_tasks: int) -> NDArray[np.int8]:
    """Signs [tasks, paths], all 1 in the first column: the observed path. More tasks add rows and change none.

    All 2^max_tasks paths where they are at most flips + 1: of few tasks, chance could draw the rarest patterns too
    often for the clearest outcome to settle anything. The declared tasks decide, not those that ran: every look has the
    same paths, and those of fewer tasks are equally often among them.
    """
    if max_tasks < (flips + 1).bit_length():  # 2^max_tasks <= flips + 1
        patterns = np.arange(2**max_tasks)
        return np.stack([1 - 2 * ((patterns >> task) & 1) for task in range(tasks)]).astype(np.int8)
    rng = np.random.default_rng(seed)
    signs = np.ones((tasks, flips + 1), dtype=np.int8)
    for row in signs:  # one draw each, so that a row does not depend on how many follow
        row[1:] -= 2 * rng.integers(0, 2, size=flips, dtype=np.int8)
    return signs


def _budgets(looks: Sequence[int], shares: Sequence[float], alpha: float, paths: int) -> list[tuple[int, int]]:
    """Each look's number of tasks, and how many of the paths may have crossed a bound by then."""
    rounding = 1e-9  # 0.05 x 1000 is 50, whatever binary fractions make of it
    spent = [math.floor(spent_error(share, alpha) * paths + rounding) for share in shares]
    return list(zip(looks, spent, strict=True))


def _evaluate_looks(
    values: Floats, signs: NDArray[np.int8], budgets: Sequence[tuple[int, int]]
) -> Iterator[_LookResult]:
    """Totals per task [K], their signs [K, paths] and (tasks, budget) per look into the result of each look.

    A look's bound is the smallest that at most its budget of paths have crossed by then; paths of equal sums cross
    together or not at all.
    """
    sums = np.zeros(signs.shape[1])
    active = np.ones(signs.shape[1], dtype=np.bool_)
    tolerance = 1e-12 * float(np.abs(values).sum())  # equal sums in another order differ in the last bits
    start = crossed = 0
    for tasks, budget in budgets:
        sums += values[start:tasks] @ signs[start:tasks]
        start = tasks
        distances = np.abs(sums)
        active_distances = distances[active]
        budget_left = budget - crossed
        extreme = crossed
        if active[0]:
            extreme += int((active_distances >= distances[0] - tolerance).sum())
        if budget_left <= 0 or not tolerance:
            bound = math.inf
        elif budget_left >= active_distances.size:
            bound = -math.inf
        else:
            rank = active_distances.size - budget_left - 1
            bound = float(np.partition(active_distances, rank)[rank]) + tolerance
        exceeds = distances > bound
        yield _LookResult(bool(exceeds[0]), bool(exceeds[0] and active[0]), extreme)
        crossed += int((exceeds & active).sum())
        active &= ~exceeds
