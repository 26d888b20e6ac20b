"""C3: a call's return less the mean of its siblings' (Contextual Counterfactual Credit Assignment, arXiv 2603.06859).

Siblings answer the same prompt in the same situation, so what is left is what the answer was worth: the leave-one-out
mean depends on nothing that the call did, and the estimate of the policy gradient stays unbiased. A call without a
sibling has the advantage 0. The return of a call is the mean over the runs beneath it.
"""

# ruff: noqa: N803 (shape suffixes)
from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import ClassVar

from trainers.advantages.arrays import Floats
from trainers.advantages.estimator import BaselineEstimator
from trainers.advantages.group_baselines import Baseline, leave_one_out
from trainers.advantages.siblings import siblings_A
from trainers.batch import Round


class C3(BaselineEstimator):
    """A call against its siblings; calls without one are not learned from."""

    name: ClassVar[str] = "c3"
    needs_groups: ClassVar[bool] = True
    needs_forks: ClassVar[bool] = True
    compares_siblings: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("skip_flat_groups",)

    def groups(self, data: Round) -> list[Hashable]:
        """Siblings."""
        return siblings_A(data)

    def samples(self, data: Round) -> Sequence[Hashable]:
        """Each call: siblings lie in one tree."""
        return range(len(data.items))

    def baseline(self, returns_A: Floats, data: Round) -> Baseline:
        """The mean of the siblings, see `leave_one_out`."""
        return leave_one_out(returns_A, self.groups(data), self.samples(data))
