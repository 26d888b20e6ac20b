"""Outcomes of the base and of one candidate, task by task in the order in which they ran -> may the candidate stop?

Invariants: what is decided at a look depends on the tasks up to it only, so that a resumed comparison decides the same;
a task counts when all of its samples have run; one that lost every pair counts as run and brings no pair. The error is
shared out over the candidates before the first outcome is seen. It knows neither episodes nor stores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marft_bridge.comparison.records import SIGNIFICANCE
from marft_bridge.statistics import monitor, repeated_interval

Scores = Mapping[tuple[str, int], float]
"""(task, sample) -> the deciding metric; an episode that lacks it is absent."""
Bounds = tuple[float | None, float | None]

_FLIPS = 5_000  # sign patterns for each candidate that shares the error, less the one that was seen


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one candidate stands after a look. `p_value` is None while it may go on."""

    tasks: int  # that had run by then
    stopped: bool
    spent: float  # of this candidate's share of the error
    p_value: float | None
    interval: Bounds  # holds at all looks together, for this candidate alone; of None where it may go on
    simultaneous: Bounds  # for all candidates together


def scores_to_standing(
    name: str,
    tasks: Sequence[str],
    base: Scores,
    candidate: Scores,
    *,
    looks: Sequence[int],
    candidates: int,
    seed: int,
) -> Standing | None:
    """The looks until now into what the last of them shows; None where not one task has a pair.

    Args:
        tasks: all that are planned, in the order in which they run.
        looks: how many of them had run at each look, upwards.
        candidates: how many share the error.
    """
    a: list[float] = []
    b: list[float] = []
    clusters: list[str] = []
    paired: list[int] = []  # tasks with a pair among the first 1, 2, ...
    samples: dict[str, list[int]] = {}
    for task, sample in sorted(base.keys() & candidate.keys()):
        samples.setdefault(task, []).append(sample)
    for task in tasks[: looks[-1]]:
        for sample in samples.get(task, ()):
            a.append(base[task, sample])
            b.append(candidate[task, sample])
            clusters.append(task)
        paired.append((paired[-1] if paired else 0) + (task in samples))
    if not a:
        return None
    seen, shares = _rising(looks, [paired[look - 1] for look in looks], len(tasks))
    share = SIGNIFICANCE / candidates
    common = {"clusters": clusters, "looks": seen, "shares": shares, "max_tasks": len(tasks)}
    flips = _FLIPS * candidates - 1

    def interval(alpha: float) -> Bounds:
        if found.p_value is None:
            return (None, None)
        return repeated_interval(name, a, b, alpha=alpha, seed=seed, flips=flips, **common)  # type: ignore[arg-type]

    found = monitor(name, a, b, alpha=share, seed=seed, flips=flips, **common)  # type: ignore[arg-type]
    return Standing(
        tasks=looks[-1],
        stopped=found.stopped,
        spent=found.spent,
        p_value=found.p_value,
        interval=interval(SIGNIFICANCE),
        simultaneous=interval(share),
    )


def _rising(looks: Sequence[int], paired: Sequence[int], planned: int) -> tuple[list[int], list[float]]:
    """The looks by tasks with pairs, and their shares of the declared tasks; a look without a new pair is none.

    The last one of the plan is always taken, because what is left of the error is spent there.
    """
    seen: list[int] = []
    shares: list[float] = []
    for look, tasks in zip(looks, paired, strict=True):
        if tasks > (seen[-1] if seen else 0):
            seen.append(tasks)
            shares.append(look / planned)
        elif seen and look == planned:
            shares[-1] = 1.0
    return seen, shares


def equal_looks(tasks: int, looks: int) -> tuple[int, ...]:
    """The numbers of tasks at which one looks: equally spaced, the last one being all."""
    return tuple(sorted({-(-tasks * number // looks) for number in range(1, looks + 1)}))


def fewest_tasks(candidates: int) -> int:
    """With fewer tasks than these even the clearest difference could not settle: 2 x 0.5^tasks is above the error."""
    tasks = 1
    while 2 * 0.5**tasks > SIGNIFICANCE / candidates:
        tasks += 1
    return tasks
