"""Paired outcomes at a few looks on the way to a declared number of tasks, into whether one may stop.

Looking several times at 5% finds nothing far more often than 5%. Here every look may spend only part of the error,
little at first, and all looks together spend at most `alpha`. Invariant: under no difference between the labels of a
task, the chance to ever stop is at most alpha, exactly and for any number of tasks, provided that neither the order of
the tasks nor the times of the looks depend on the outcomes. Every earlier look comes out as it did at the time when
the same call is made again with more tasks and the same seed.

Bounds come from flipping the signs of whole tasks, as in the test of `paired`, not from a normal curve: at a look
with five tasks, all of which may show the same difference, the curve would stop at once.

Sources:

- Lan and DeMets (1983), "Discrete sequential boundaries for clinical trials", Biometrika 70: spending the error by a
  function of the share of the data seen; here their O'Brien-Fleming type, half on each side.
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
from scipy.special import ndtr, ndtri

from marft_bridge.statistics.clusters import Floats, Labels, Totals, paired_values, standard_error, totals_in_order

_WIDENINGS = 30  # doublings of a standard error before a bound counts as absent
_HALVINGS = 20  # of the range that holds a bound


@dataclass(frozen=True, slots=True)
class Monitored:
    """Where a comparison stands. `p_value` is None while it goes on: only when it ended has it one."""

    metric: str
    tasks: int  # that the verdict rests on: all seen, or those at the look that stopped
    max_tasks: int
    diff: float  # mean of b - a over the pairs of those tasks
    stopped: bool  # a difference was found
    spent: float  # of the error, by the last look
    p_value: float | None


def spent_error(share: float, alpha: float = 0.05) -> float:
    """The share of the declared tasks that was seen, 0 to 1, into the two-sided error that may be spent by then.

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
        shares: of the declared tasks that had run by each look, up to 1; None: those that the looks say. Where tasks
            lost all their pairs, fewer are there than have run, and the last look still spends what is left.
        seed: the same at every look.
        flips: sign patterns drawn. A look that may spend less than 1 / (flips + 1) cannot stop.

    Raises:
        ValueError: as `paired_difference`; looks that do not rise, or that go past the tasks or their maximum.
    """
    totals, signs, budgets = _prepared(name, a, b, clusters, looks, max_tasks, shares, alpha, seed, flips)
    for (stop, spent), look in zip(budgets, _path(totals.sums, signs, budgets), strict=True):
        ended = stop == max_tasks or (shares is not None and stop == looks[-1] and shares[-1] == 1)
        if look.crossed or ended or stop == looks[-1]:
            p = look.at_least_as_far / (flips + 1) if look.crossed or ended else None
            diff = float(totals.sums[:stop].sum() / totals.sizes[:stop].sum())
            return Monitored(name, stop, max_tasks, diff, look.crossed, spent / (flips + 1), p)
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
    """The same arguments as `monitor` into the interval of the mean of b - a at the last look.

    The intervals of all looks hold together with probability 1 - alpha, whether or not one stopped, and that of a look
    leaves out 0 where `monitor` stops there. It holds every shift that the bound at this look does not refuse when it
    is taken from all differences. A bound is None where no shift, however large, would be refused: too few tasks, or
    too little error to spend.
    """
    (sums, sizes), signs, budgets = _prepared(name, a, b, clusters, looks, max_tasks, shares, alpha, seed, flips)
    estimate = float(sums.sum() / sizes.sum())
    scale = standard_error(Totals(sums, sizes)) if sums.size > 1 else 0.0
    scale = scale or abs(estimate) or 1.0

    def refused(shift: float) -> bool:
        *_, last = _path(sums - shift * sizes, signs, budgets)
        return last.past_the_bound

    def bound(direction: int) -> float | None:
        inside, outside = 0.0, scale
        for _ in range(_WIDENINGS):
            if refused(estimate + direction * outside):
                break
            inside, outside = outside, 2 * outside
        else:
            return None
        for _ in range(_HALVINGS):
            middle = (inside + outside) / 2
            inside, outside = (inside, middle) if refused(estimate + direction * middle) else (middle, outside)
        return estimate + direction * outside

    return bound(-1), bound(1)


@dataclass(frozen=True, slots=True)
class _LookTaken:
    """One look at the path that was seen, beside all flipped ones."""

    past_the_bound: bool
    crossed: bool  # here, and not at an earlier look
    at_least_as_far: int  # paths that crossed earlier, or did not and lie here at least as far out; itself included


def _prepared(
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
    """Arguments, checked, into the totals of the tasks up to the last look, their signs, and each look's budget."""
    left, right = paired_values(name, a, b)
    totals = totals_in_order(name, right - left, clusters)
    k = totals.sums.size
    if not 0 < alpha < 1 or flips < 1:
        raise ValueError(f"{name}: alpha {alpha} must lie between 0 and 1, flips {flips} must be at least 1")
    if not looks or looks[0] < 1 or any(late <= early for early, late in pairwise(looks)):
        raise ValueError(f"{name}: looks {list(looks)} must be numbers of tasks that rise from at least 1")
    if looks[-1] > min(k, max_tasks):
        raise ValueError(f"{name}: a look at {looks[-1]} tasks, but {k} are there and {max_tasks} were declared")
    declared = [look / max_tasks for look in looks] if shares is None else list(shares)
    if len(declared) != len(looks) or any(late <= early for early, late in pairwise([0.0, *declared])):
        raise ValueError(f"{name}: shares {declared} must be as many as looks {list(looks)}, and rise from above 0")
    if any(share > 1 or share < look / max_tasks for share, look in zip(declared, looks, strict=True)):
        raise ValueError(f"{name}: shares {declared} must lie between those of the looks {list(looks)} and 1")
    seen = Totals(*(part[: looks[-1]] for part in totals))
    return seen, _signs(looks[-1], flips, seed), _budgets(looks, declared, alpha, flips)


def _signs(tasks: int, flips: int, seed: int) -> NDArray[np.int8]:
    """Signs [tasks, flips + 1], the first column being what was seen. More tasks add rows and change none."""
    rng = np.random.default_rng(seed)
    signs = np.ones((tasks, flips + 1), dtype=np.int8)
    for row in signs:  # one draw each, so that a row does not depend on how many follow
        row[1:] -= 2 * rng.integers(0, 2, size=flips, dtype=np.int8)
    return signs


def _budgets(looks: Sequence[int], shares: Sequence[float], alpha: float, flips: int) -> list[tuple[int, int]]:
    """Each look's number of tasks, and how many of the flips + 1 paths may have crossed by then."""
    slack = 1e-9  # 0.05 x 1000 is 50, whatever binary fractions make of it
    spent = [math.floor(spent_error(share, alpha) * (flips + 1) + slack) for share in shares]
    return list(zip(looks, spent, strict=True))


def _path(values: Floats, signs: NDArray[np.int8], budgets: Sequence[tuple[int, int]]) -> Iterator[_LookTaken]:
    """Totals per task [K] and their signs into what each look shows.

    A look's bound is the smallest that lets at most its budget of paths cross up to there; equal paths cross together
    or not at all.
    """
    sums = np.zeros(signs.shape[1])
    going_on = np.ones(signs.shape[1], dtype=np.bool_)
    slack = 1e-12 * float(np.abs(values).sum())  # equal sums in another order differ in the last bits
    start = crossed = 0
    for stop, budget in budgets:
        sums += values[start:stop] @ signs[start:stop]
        start = stop
        sizes = np.abs(sums)
        left = sizes[going_on]
        room = budget - crossed
        at_least = crossed + int((left >= sizes[0] - slack).sum()) if going_on[0] else crossed
        if room <= 0 or not slack:
            bound = math.inf
        elif room >= left.size:
            bound = -math.inf
        else:
            bound = float(np.partition(left, left.size - room - 1)[left.size - room - 1]) + slack
        beyond = sizes > bound
        yield _LookTaken(bool(beyond[0]), bool(beyond[0] and going_on[0]), at_least)
        crossed += int((beyond & going_on).sum())
        going_on &= ~beyond
