"""Owns: the variance that a call decides, by exact enumeration of a toy.

- Over all recorded runs and all forks the estimate's mean is the exact first term of the law of total variance.
- Along a run the parts add up to the whole variance; an answer that changes nothing decides nothing.
- The share and its interval are hand-worked ones; what has no interval has none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from marft_bridge.statistics.decided_variance import decided_variance, share_of_variance, unseen_share

DEPTH = 3
Path = tuple[int, ...]


def chance_of_one(path: Path) -> float:
    """Of the next answer: it depends on all answers before it, but for the second, which nobody reads."""
    read = sum(answer for position, answer in enumerate(path) if position != 1)
    return (0.3, 0.6, 0.5)[len(path)] if not read else 0.8


def reward(path: Path) -> float:
    return (1.0 if path[0] == path[2] else 0.0) + 0.5 * path[0]


def runs_from(path: Path) -> Iterator[tuple[float, Path]]:
    """Every whole run that begins so, with its chance given that."""
    if len(path) == DEPTH:
        yield 1.0, path
        return
    for answer in (0, 1):
        chance = chance_of_one(path) if answer else 1 - chance_of_one(path)
        yield from ((chance * rest, run) for rest, run in runs_from((*path, answer)))


def mean(path: Path) -> float:
    return sum(chance * reward(run) for chance, run in runs_from(path))


def variance(path: Path) -> float:
    return sum(chance * reward(run) ** 2 for chance, run in runs_from(path)) - mean(path) ** 2


def exactly_decided(position: int) -> float:
    """Var(E[R | H, A] | H), the mean over H."""
    total = 0.0
    for chance, run in runs_from(()):
        before = run[:position]  # each H comes as often as runs begin with it
        means = [mean((*before, answer)) for answer in (0, 1)]
        one = chance_of_one(before)
        total += chance * ((1 - one) * means[0] ** 2 + one * means[1] ** 2 - mean(before) ** 2)
    return total


def expected_estimate(position: int, forks: int) -> float:
    """The estimate, over every recorded run and every set of forks before and after the call."""
    total = 0.0
    for chance, run in runs_from(()):
        recorded = reward(run)
        for level, sign in ((position, 1), (position + 1, -1)):
            if level == DEPTH:
                continue  # nothing is sampled after the last call
            for sampled in itertools.product(list(runs_from(run[:level])), repeat=forks):
                joint = float(np.prod([each for each, _ in sampled]))
                rewards = [recorded, *(reward(each) for _, each in sampled)]
                total += sign * chance * joint * decided_variance(rewards, None)
    return total


@pytest.mark.parametrize("forks", [1, 2])
@pytest.mark.parametrize("position", range(DEPTH))
def test_the_mean_of_the_estimate_is_what_the_call_decides_whatever_the_number_of_forks(
    position: int, forks: int
) -> None:
    assert expected_estimate(position, forks) == pytest.approx(exactly_decided(position), abs=1e-12)


def test_the_parts_add_up_to_the_variance_and_an_answer_that_nobody_reads_decides_nothing() -> None:
    parts = [exactly_decided(position) for position in range(DEPTH)]
    assert sum(parts) == pytest.approx(variance(()))
    assert parts[1] == pytest.approx(0.0, abs=1e-12)
    assert min(parts[0], parts[2]) > 0.01


def test_one_estimate_is_the_difference_of_two_sample_variances() -> None:
    """1, 0, 1: mean 2/3, (2/9 + 4/9) / 2 ... = 1/3; 1, 1 differ by nothing; 1, 0: 1/2."""
    assert decided_variance([1.0, 0.0, 1.0], [1.0, 1.0]) == pytest.approx(1 / 3)
    assert decided_variance([1.0, 0.0, 1.0], [1.0, 0.0]) == pytest.approx(1 / 3 - 1 / 2)
    assert decided_variance([1.0, 0.0], None) == 0.5
    for before, after in (([1.0], None), ([1.0, 0.0], [1.0])):
        with pytest.raises(ValueError, match="2 rewards at least"):
            decided_variance(before, after)


def test_a_share_is_a_ratio_of_sums_with_the_t_interval_of_a_ratio() -> None:
    """Parts 1, 0, 1 of 2, 1, 1: 1/2. Residuals 0, -1/2, 1/2: sqrt(3/2 * 1/2) / 4; t(2, 0.975) = 4.302653."""
    share = share_of_variance([1.0, 0.0, 1.0], [2.0, 1.0, 1.0])
    assert share is not None
    assert share.mean == 0.5
    assert share.high == pytest.approx(0.5 + 4.302653 * np.sqrt(0.75) / 4, abs=1e-6)
    assert share.low == pytest.approx(0.5 - 4.302653 * np.sqrt(0.75) / 4, abs=1e-6)
    grouped = share_of_variance([1.0, 0.0, 1.0], [2.0, 1.0, 1.0], clusters=["t", "t", "t"])
    assert grouped is not None
    assert (grouped.mean, grouped.low, grouped.high) == (0.5, None, None)
    assert share_of_variance([0.0, 0.0], [0.0, 0.0]) is None


def test_what_could_go_unseen_is_bounded() -> None:
    """(1 - q)^32 = 0.05."""
    assert unseen_share(32, 0.05) == pytest.approx(1 - 0.05 ** (1 / 32))
    assert (1 - unseen_share(32, 0.05)) ** 32 == pytest.approx(0.05)
