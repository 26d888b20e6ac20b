"""Outcomes of the base and of one candidate, task by task in the order in which they ran -> may the candidate stop?

Invariants: the decision at a look depends on the tasks up to it only, so that a resumed comparison decides the same;
a task counts when all of its samples have run; one that lost every pair counts as run and brings no pair. The error is
shared out over the candidates (Bonferroni) before the first outcome is seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marft_bridge.comparison.records import SIGNIFICANCE
from marft_bridge.statistics import monitor, repeated_interval

Scores = Mapping[tuple[str, int], float]
"""(task, sample) -> the deciding metric; an episode that lacks it is absent."""
Bounds = tuple[float | None, float | None]
"""Of an interval of the difference; None where it has none."""

_FLIPS_PER_CANDIDATE = 5_000  # sign patterns, the observed one included: a smaller alpha needs more of them


@dataclass(frozen=True, slots=True)
class InterimResult:
    """The state of one candidate after an interim look. `p_value` and the bounds are None while it may go on."""

    tasks: int  # that had run by the look
    stopped: bool  # a difference was found
    spent: float  # of this candidate's share of the error
    p_value: float | None
    interval: Bounds  # repeated 95% interval: holds at all looks together, for this candidate alone
    simultaneous: Bounds  # holds at all looks together, for all candidates


def scores_to_interim_result(
    name: str,
    tasks: Sequence[str],
    base: Scores,
    candidate: Scores,
    *,
    looks: Sequence[int],
    candidates: int,
    seed: int,
) -> InterimResult | None:
    """Scores and the looks so far into the result of the last look; None where no task has a pair.

    Args:
        name: of the candidate, for messages.
        tasks: ids of all that are planned, in the order in which they run.
        looks: how many of them had run at each look, upwards.
        candidates: how many share the error.
        seed: of the sign flips, the same at every look; of few tasks all are taken, and it plays no part.
    """
    a: list[float] = []
    b: list[float] = []
    clusters: list[str] = []
    tasks_with_pairs: list[int] = []  # tasks with a pair among the first 1, 2, ...
    samples: dict[str, list[int]] = {}
    for task, sample in sorted(base.keys() & candidate.keys()):
        samples.setdefault(task, []).append(sample)
    for task in tasks[: looks[-1]]:
        for sample in samples.get(task, ()):
            a.append(base[task, sample])
            b.append(candidate[task, sample])
            clusters.append(task)
        tasks_with_pairs.append((tasks_with_pairs[-1] if tasks_with_pairs else 0) + (task in samples))
    if not a:
        return None
    paired_looks, shares = _looks_with_new_pairs(looks, [tasks_with_pairs[look - 1] for look in looks], len(tasks))
    alpha_share = SIGNIFICANCE / candidates
    arguments = {"clusters": clusters, "looks": paired_looks, "shares": shares, "max_tasks": len(tasks)}
    flips = _FLIPS_PER_CANDIDATE * candidates - 1

    def interval(alpha: float) -> Bounds:
        if monitored.p_value is None:
            return (None, None)
        return repeated_interval(name, a, b, alpha=alpha, seed=seed, flips=flips, **arguments)  # type: ignore[arg-type]

    monitored = monitor(name, a, b, alpha=alpha_share, seed=seed, flips=flips, **arguments)  # type: ignore[arg-type]
    return InterimResult(
        tasks=looks[-1],
        stopped=monitored.stopped,
        spent=monitored.spent,
        p_value=monitored.p_value,
        interval=interval(SIGNIFICANCE),
        simultaneous=interval(alpha_share),
    )


def _looks_with_new_pairs(
    looks: Sequence[int], tasks_with_pairs: Sequence[int], planned: int
) -> tuple[list[int], list[float]]:
    """The looks counted in tasks with pairs, and their information fractions; a look without a new pair is left out.

    The last look of the plan always counts, as the rest of the error is spent there: without a new pair, the look
    before it takes its fraction of 1.
    """
    paired_looks: list[int] = []
    shares: list[float] = []
    for look, tasks in zip(looks, tasks_with_pairs, strict=True):
        if tasks > (paired_looks[-1] if paired_looks else 0):
            paired_looks.append(tasks)
            shares.append(look / planned)
        elif paired_looks and look == planned:
            shares[-1] = 1.0
    return paired_looks, shares


def equally_spaced_looks(tasks: int, looks: int) -> tuple[int, ...]:
    """`looks` numbers of tasks, equally spaced and rounded up; the last is `tasks`."""
    return tuple(sorted({-(-tasks * number // looks) for number in range(1, looks + 1)}))


def min_tasks_to_settle(candidates: int) -> int:
    """The fewest tasks with which a difference can be significant: 2 x 0.5^tasks is the smallest p-value of sign flips.

    It must not exceed the share of the error that each of `candidates` has. A plan of so few tasks is tested with all
    sign patterns, so that p-value is reached, not only come near to.
    """
    tasks = 1
    while 2 * 0.5**tasks > SIGNIFICANCE / candidates:
        tasks += 1
    return tasks
