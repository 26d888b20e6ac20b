"""Rewards of a recorded run and of its forks before and after one of its calls -> how much that call decided.

Let H be what had happened before the call, A its answer and R the reward of the run. By the law of total variance

    Var(R | H) = Var(E[R | H, A] | H) + E[Var(R | H, A) | H]

and the first term is what the answer decides: 0 for an answer that changes nothing that matters, all of Var(R | H) for
one after which the reward is certain. The recorded run and its forks at the call are independent samples given H; the
recorded run and its forks after the call are independent samples given H and the recorded answer, which is itself drawn
by the policy. So the difference of the two sample variances has the first term as its expectation. It may be negative.

Source: Sobol' (1993), "Sensitivity estimates for nonlinear mathematical models": Var(E[Y | X]) / Var(Y), here along a
run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from marft_bridge.statistics.clusters import Labels, Totals, paired_values, standard_error, totals_by_label
from marft_bridge.statistics.distributions import stdtrit
from marft_bridge.statistics.means import MeanInterval


def decided_variance(before: Sequence[float], after: Sequence[float] | None) -> float:
    """The variance that one call of one recorded run decided, in squared units of the reward; unbiased over runs.

    Args:
        before: rewards of the recorded run and of its forks at the call, 2 at least.
        after: of the recorded run and of its forks after the call, 2 at least; None: nothing is sampled after it.

    Raises:
        ValueError: fewer rewards.
    """
    if len(before) < 2 or (after is not None and len(after) < 2):
        raise ValueError("decided variance: a sample variance needs 2 rewards at least")
    return float(np.var(before, ddof=1)) - (0.0 if after is None else float(np.var(after, ddof=1)))


def share_of_variance(
    parts: ArrayLike, wholes: ArrayLike, *, clusters: Labels | None = None, level: float = 0.95
) -> MeanInterval | None:
    """Parts and wholes of runs, [n] each, into sum(parts) / sum(wholes) with its interval over tasks.

    Student's t with K - 1 degrees of freedom on the linearised standard error of a ratio (Cochran 1977, 6.3), so its
    bias is of order 1 / K; the bounds are None with one task. None where the wholes sum to nothing.

    Raises:
        ValueError: for NaN or infinite values, none at all, or lengths that differ.
    """
    values, sizes = paired_values("share of the variance", parts, wholes)
    if sizes.sum() <= 0:
        return None
    labels = list(range(values.size)) if clusters is None else clusters
    sums = totals_by_label("share of the variance", values, labels).sums
    totals = Totals(sums, totals_by_label("share of the variance", sizes, labels).sums)
    share = float(totals.sums.sum() / totals.sizes.sum())
    if sums.size < 2:
        return MeanInterval(share, None, None)
    half_width = float(stdtrit(sums.size - 1, (1 + level) / 2)) * standard_error(totals)
    return MeanInterval(share, share - half_width, share + half_width)


def unseen_share(clusters: int, alpha: float) -> float:
    """The largest share of tasks that could differ and yet be seen in none of so many, with chance `alpha`."""
    return float(1 - alpha ** (1 / clusters))
