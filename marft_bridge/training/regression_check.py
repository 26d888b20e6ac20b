"""A training run's rounds -> one sentence, where the last round's reward fell clearly below an earlier one's.

Training may lose what it had gained. Invariant: two rounds are told apart only where their 95 % intervals do not
overlap. It compares rounds as they were played, on whatever tasks; which version counts is for `best_version` to say.
Rounds that were played ahead, and that nothing was learned from, are none; one without an interval is not told apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from marft_bridge.runs.learning_curve import LearningPoint, runs_to_points
from trace_store.store import TraceStore


def run_to_regression_text(store: TraceStore, run_id: str, reward: str, *, rounds_learned: int) -> str | None:
    """The sentence for a training run, or None where its last round is not clearly below another."""
    points = runs_to_points(store, (run_id,), reward)
    rounds = points_to_regression([point for point in points if point.round <= rounds_learned])
    if rounds is None:
        return None
    best, last = rounds
    return f"the last round earned {_earned(last)}, less than round {best.round} with {_earned(best)}"


def points_to_regression(points: Sequence[LearningPoint]) -> tuple[LearningPoint, LearningPoint] | None:
    """The best round and the last, where the interval of the last lies wholly below that of the best; else None.

    The best is the round whose interval begins highest, so that a few lucky episodes do not make one.
    """
    with_interval = [(point.reward_low, point.round, point) for point in points if point.reward_low is not None]
    if not with_interval or (high := points[-1].reward_high) is None:
        return None
    low, _, best = max(with_interval, key=lambda entry: entry[:2])  # of equal lows the latest round
    return (best, points[-1]) if high < low else None


def _earned(point: LearningPoint) -> str:
    return f"{point.reward_mean:.3f} (95% {point.reward_low:.3f} to {point.reward_high:.3f})"
