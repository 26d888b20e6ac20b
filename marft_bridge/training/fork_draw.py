"""What rounds before a round showed of tasks and calls -> the order in which the runs of the round are forked.

Each draw takes a run, with chances in proportion to how undecided its task is (`task_draw.runs_to_weights`), and one
of the calls that runs make, in proportion to how often they make it and to how undecided it is: the variance of what
siblings at it earned. Invariant: the order follows from the seed, the round, and rounds before it alone. Nothing of the
round's own runs is looked at, neither what they earned nor how many calls they made, so that forks are blind
(`records.BLIND_FORK`): a call that a run did not reach is passed over.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from marft_bridge.training.task_draw import FLOOR, PRIOR_WEIGHT, uniform_of

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, order=True)
class CallSpot:
    """Where in a run a call stands, as it can be named before the run is made."""

    node: str
    number: int  # among those of its node, from 1


@dataclass(frozen=True, slots=True, order=True)
class ForkChoice:
    """One draw: this call of this run."""

    task_id: str
    sample: int
    spot: CallSpot


@dataclass(frozen=True, slots=True)
class SiblingRewards:
    """What the runs beneath one forked call earned, the run that was forked included."""

    spot: CallSpot
    values: tuple[float, ...]


def runs_to_reach(runs: Iterable[Sequence[CallSpot]]) -> dict[CallSpot, float]:
    """The calls of each of some runs -> the share of the runs that made each call."""
    counts: Counter[CallSpot] = Counter()
    run_count = 0
    for spots in runs:
        counts.update(set(spots))
        run_count += 1
    return {spot: count / run_count for spot, count in sorted(counts.items())}


def spots_to_weights(reach: Mapping[CallSpot, float], groups: Iterable[SiblingRewards]) -> dict[CallSpot, float]:
    """How often a call is drawn: the share of runs that make it, times the variance of what its siblings earned.

    The variance is that within groups of siblings, pooled over the groups of a call, with PRIOR_WEIGHT degrees of
    freedom of the mean over all groups, and no less than FLOOR of that mean. Without groups that differ it is 1.
    """
    squares, freedom = defaultdict[CallSpot, list[float]](list), Counter[CallSpot]()
    for group in groups:
        mean = math.fsum(group.values) / len(group.values)
        squares[group.spot].append(math.fsum((value - mean) ** 2 for value in group.values))
        freedom[group.spot] += len(group.values) - 1
    total = math.fsum(math.fsum(parts) for parts in squares.values())
    if total == 0:
        return dict(reach)
    usual = total / freedom.total()
    weights = {}
    for spot, share in reach.items():
        variance = (PRIOR_WEIGHT * usual + math.fsum(squares[spot])) / (PRIOR_WEIGHT + freedom[spot])
        weights[spot] = share * max(variance, FLOOR * usual)
    return weights


def draw_forks(
    runs: Iterable[tuple[str, int]],
    task_weights: Mapping[str, float],
    spot_weights: Mapping[CallSpot, float],
    key: str,
) -> list[ForkChoice]:
    """Every call of every run once, in the order in which they are forked while the round's budget lasts.

    Args:
        runs: task and sample of the round's runs.
        task_weights: at least those of their tasks; above 0.
        key: seeds the draws; every run has draws of its own, so that others may come and go.
    """
    # The k-th draw of a run is the k-th event of a Poisson process with the weight of its task as rate: whatever was
    # drawn before, the next event is a run's with a chance in proportion to its rate.
    timed: list[tuple[float, ForkChoice]] = []
    for task_id, sample in runs:
        run_key, time = f"{key}/{task_id}/{sample}", 0.0
        for number, spot in enumerate(draw_spots(spot_weights, run_key)):
            time -= math.log(uniform_of(f"{run_key}/{number}")) / task_weights[task_id]
            timed.append((time, ForkChoice(task_id, sample, spot)))
    return [choice for _, choice in sorted(timed)]


def fill_wave(left: float, costs: Iterable[tuple[Item, int]], samples: int, least: int = 1) -> list[tuple[Item, int]]:
    """The forks that are played next: calls in their order, each with how many forks it has.

    Half of the budget is given out, so that what forks really cost is known before the other half is; the first call is
    taken whatever it costs, with as many forks as fit. Empty where not even half a fork fits.

    Args:
        left: tokens of the round that are not spent yet.
        costs: calls, and what one fork of each should cost, at least 1 token.
        samples: forks of a call.
        least: forks of a call that are worth playing.
    """
    wave: list[tuple[Item, int]] = []
    given_out = 0
    for item, tokens in costs:
        count = min(samples, math.floor((left - given_out) / tokens + 0.5))
        if count < least or (wave and given_out + count * tokens > left / 2):
            break
        wave.append((item, count))
        given_out += count * tokens
    return wave


def draw_spots(weights: Mapping[CallSpot, float], key: str) -> list[CallSpot]:
    """All calls, drawn without replacement with chances in proportion to their weights; see `task_draw.order_tasks`."""
    times = {
        spot: -math.log(uniform_of(f"{key}/{spot.node}:{spot.number}")) / weight for spot, weight in weights.items()
    }
    return sorted(times, key=lambda spot: (times[spot], spot))
