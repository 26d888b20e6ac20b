"""A training run's rounds -> one sentence, where the last of them earned less than an earlier one.

Training may lose what it had gained, and the newest version is the one that `compare` takes. Invariant: only what the
95 % intervals of two rounds tell apart is said; the best of many rounds is partly luck, so it is a reason to look, no
result. It knows no trainer.
"""

from __future__ import annotations

from collections.abc import Sequence

from marft_bridge.comparison.records import LearningPoint
from marft_bridge.reward_points import runs_to_points
from trace_store.store import TraceStore

_VERSION = """
SELECT max(a.adapter_version) FROM episodes e JOIN actions a USING (episode_id) WHERE e.run_id = $1 AND e.round = $2
"""


def run_to_lost_ground(store: TraceStore, run_id: str, reward: str) -> str | None:
    """The sentence for a training run, or None where its last round is not clearly below another."""
    rounds = points_to_lost_ground(runs_to_points(store, (run_id,), reward))
    if rounds is None:
        return None
    best, last = rounds
    ((version,),) = store.sql(_VERSION, (run_id, best.round))
    line = f"the last round earned {_earned(last)}, less than round {best.round} with {_earned(best)}"
    if version is None:
        return line
    return f"{line}; `marft-bridge compare --after {version}` takes what played round {best.round}"


def points_to_lost_ground(points: Sequence[LearningPoint]) -> tuple[LearningPoint, LearningPoint] | None:
    """The best round and the last, where the interval of the last lies wholly below that of the best; else None.

    The best is the round whose interval begins highest, so that a few lucky episodes do not make one.
    """
    known = [(point.reward_low, point.round, point) for point in points if point.reward_low is not None]
    if not known or (high := points[-1].reward_high) is None:
        return None
    low, _, best = max(known, key=lambda each: each[:2])
    return (best, points[-1]) if high < low else None


def _earned(point: LearningPoint) -> str:
    return f"{point.reward_mean:.3f} (95% {point.reward_low:.3f} to {point.reward_high:.3f})"
