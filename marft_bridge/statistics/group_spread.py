"""Outcomes of runs by task -> how likely fresh groups of runs are to hold two that differ.

A run of task t has outcome v with chance p_tv; the tasks' chances are drawn from a Dirichlet distribution around the
pooled shares m_v, with 1 / (1 + concentration) = rho, the correlation of runs of one task. Not known are rho (uniform a
priori) and the share of runs that differ from the commonest outcome (Jeffreys' Beta(1/2, 1/2)); both are summed over a
grid, weighted by the likelihood of what was seen. With two outcomes this is the Beta-binomial model. Invariant: of
outcomes that were all alike the chance is not 0; it falls as more of them are seen.

Source: Gelman et al. (2013), "Bayesian Data Analysis", sections 5.3 (rates of many groups) and 2.8 (Jeffreys).

Shapes: _G one entry per point of the grid; _R per value of rho; _V per kind of outcome; _P per pattern of a task's
outcomes; _X per kind in a pattern.
"""

# ruff: noqa: N803, N806, N815 (shape suffixes)
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marft_bridge.statistics.clusters import Floats
from marft_bridge.statistics.distributions import bdtrc, gammaln

_Numbers = NDArray[np.floating[Any]]
_SHARES = np.sin(np.pi / 2 * (np.arange(64) + 0.5) / 64) ** 2  # midpoints of equal parts of Beta(1/2, 1/2)
_CORRELATIONS = (np.arange(20) + 0.5) / 20
_CONCENTRATION_R = 1 / _CORRELATIONS - 1
_NEGLIGIBLE = 1e-9  # weight of a point, relative to the heaviest


@dataclass(frozen=True, slots=True)
class GroupSpread:
    """What is believed of the chance that a group holds two runs that differ: values, and weights that sum to 1."""

    chance_G: Floats
    weight_G: Floats

    def expected(self, groups: int) -> float:
        """How many of so many groups will hold runs that differ, on average."""
        return float(groups * (self.weight_G * self.chance_G).sum())

    def chance_of(self, count: int, groups: int) -> float:
        """The chance that `count` of so many groups or more (1 at least) will."""
        if count > groups:
            return 0.0
        return float((self.weight_G * bdtrc(count - 1, groups, self.chance_G)).sum())


def outcomes_to_spread(
    outcomes: Mapping[str, Sequence[Hashable]], size: int, same_task: bool, kept_share: float = 1.0
) -> GroupSpread:
    """Outcomes by task to the chance that those of `size` fresh runs that count are not all alike.

    Args:
        outcomes: one at least; equal ones are the same.
        size: runs that a group is planned with.
        same_task: whether a group's runs are of one of these tasks (each as likely), or each of a task of its own.
        kept_share: the chance that a run counts at all. How many of a task's group do is binomial; runs of a task of
            their own each are grouped once it is known which of them count, so that there are fewer groups.
    """
    table = _Table.of(outcomes)
    shares = [table.kind_shares(share) for share in _SHARES]
    likelihoods = [table.log_likelihood(share_V) for share_V in shares]
    binomial = [math.comb(size, k) * kept_share**k * (1 - kept_share) ** (size - k) for k in range(size + 1)]
    heaviest = max(likelihood_R.max() for likelihood_R in likelihoods)
    chances, weights = [], []
    for share_V, likelihood_R in zip(shares, likelihoods, strict=True):
        weight_R = np.exp(likelihood_R - heaviest)
        if weight_R.max() < _NEGLIGIBLE:
            continue
        if same_task:
            differ_R = np.zeros(weight_R.shape)
            for count in range(2, size + 1):
                if binomial[count] > 0:
                    differ_R += binomial[count] * (1 - table.chance_alike(share_V, count))
            chances.append(differ_R)
        else:
            chances.append(np.full(weight_R.shape, kept_share * (1 - (table.copies_V * share_V**size).sum())))
        weights.append(weight_R)
    weight_G = np.concatenate(weights)
    return GroupSpread(np.clip(np.concatenate(chances), 0.0, 1.0), weight_G / weight_G.sum())


@dataclass(frozen=True, slots=True)
class _Table:
    """The outcomes, with tasks of the same pattern counted once, and outcomes that are as frequent counted once."""

    odds_V: Floats  # of each kind of outcome but the commonest, which is kind 0: its share of those that are not it
    copies_V: Floats  # outcomes of this kind
    kind_X: NDArray[np.intp]
    count_X: Floats
    pattern_X: NDArray[np.intp]
    runs_P: Floats  # of one task of the pattern
    tasks_P: Floats

    @classmethod
    def of(cls, outcomes: Mapping[str, Sequence[Hashable]]) -> _Table:
        totals = Counter(outcome for runs in outcomes.values() for outcome in runs)
        ((commonest, highest), *_) = totals.most_common(1)
        rest = sum(totals.values()) - highest
        copies = Counter(count for outcome, count in totals.items() if outcome != commonest)
        kinds = sorted(copies) if copies else [1]
        kind_of = {outcome: 0 if outcome == commonest else 1 + kinds.index(count) for outcome, count in totals.items()}
        patterns = Counter(
            tuple(sorted((kind_of[outcome], count) for outcome, count in Counter(runs).items()))
            for runs in outcomes.values()
            if runs
        )
        entries = [(kind, count, p) for p, pattern in enumerate(patterns) for kind, count in pattern]
        kind_X, count_X, pattern_X = np.array(entries).T
        return cls(
            odds_V=np.array([1.0, *(count / rest if rest else 1.0 for count in kinds)]),
            copies_V=np.array([1.0, *(float(copies[count]) if copies else 1.0 for count in kinds)]),
            kind_X=kind_X,
            count_X=count_X.astype(np.float64),
            pattern_X=pattern_X,
            runs_P=np.bincount(pattern_X, weights=count_X).astype(np.float64),
            tasks_P=np.array(list(patterns.values()), dtype=np.float64),
        )

    def kind_shares(self, share: float) -> Floats:
        """What part of all runs has an outcome of each kind, [V], where `share` is not of the commonest."""
        share_V = self.odds_V * share
        share_V[0] = 1 - share
        return share_V

    def log_likelihood(self, share_V: Floats) -> Floats:
        """Of the outcomes that were seen, [R]."""
        alpha_XR = np.outer(share_V[self.kind_X], _CONCENTRATION_R)
        terms_XR = _log_rising(alpha_XR, self.count_X[:, None]) * self.tasks_P[self.pattern_X][:, None]
        runs_PR = _log_rising(_CONCENTRATION_R[None, :], self.runs_P[:, None]) * self.tasks_P[:, None]
        return np.asarray(terms_XR.sum(axis=0) - runs_PR.sum(axis=0))

    def chance_alike(self, share_V: Floats, size: int) -> Floats:
        """That `size` fresh runs of one of the tasks are all alike, [R]: the Dirichlet-multinomial's, task by task."""
        alpha_VR = np.outer(share_V, _CONCENTRATION_R)
        unseen_R = np.asarray((self.copies_V[:, None] * np.exp(_log_rising(alpha_VR, size))).sum(axis=0))
        alpha_XR = alpha_VR[self.kind_X]
        extra_XR = np.exp(_log_rising(alpha_XR + self.count_X[:, None], size)) - np.exp(_log_rising(alpha_XR, size))
        alike_PR = np.zeros((len(self.runs_P), len(_CONCENTRATION_R)))
        np.add.at(alike_PR, self.pattern_X, extra_XR)
        alike_PR = (alike_PR + unseen_R) / np.exp(_log_rising(_CONCENTRATION_R + self.runs_P[:, None], size))
        return np.asarray((self.tasks_P[:, None] * alike_PR).sum(axis=0) / self.tasks_P.sum())


def _log_rising(x: _Numbers, count: _Numbers | float) -> Floats:
    """Logarithm of x (x + 1) ... (x + count - 1)."""
    return np.asarray(gammaln(x + count) - gammaln(x))
