"""Attempts at replaying a run that diverged -> how the next one chooses between calls that nothing tells apart.

Two branches of one node may ask the same at once, and get different answers; which branch is which, no record says. The
first attempt takes them as they come. Each node that an attempt diverged in chooses otherwise in the next one, the
others as before, so what had come out right is kept, and the attempts that are needed add up over the nodes, where
drawing all anew would multiply them. Invariant: the same divergences give the same choices.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from marft_bridge.replay.divergence import Divergence
from marft_bridge.replay.recorded_run import RecordedCall

_ATTEMPTS_PER_NODE = 16


class EqualCalls:
    """What is known of the equal calls of one run, over all attempts at replaying it."""

    def __init__(self) -> None:
        self._changes: Counter[str] = Counter()  # by node of the outermost graph
        self._nodes: set[str] = set()  # in which equal calls were made, in any attempt
        self._nodes_now: set[str] = set()
        self._chances: dict[str, random.Random] = {}
        self._failed_count = 0

    def begin_attempt(self) -> None:
        """Chooses from here on as the attempts so far suggest."""
        self._nodes_now = set()
        self._chances = {node: random.Random(f"{node} {count}") for node, count in self._changes.items()}

    def choose(self, node: str, calls: Sequence[RecordedCall], default: RecordedCall) -> RecordedCall:
        """One of equal calls of different answers: `default`, until an attempt has diverged in its node."""
        outer = _outer(node)
        self._nodes.add(outer)
        self._nodes_now.add(outer)
        chance = self._chances.get(outer)
        return default if chance is None else chance.choice(calls)

    def is_worth_another(self, divergence: Divergence) -> bool:
        """Whether to try again after this one, which is where the choices of the next attempt come from."""
        self._failed_count += 1
        if not self._nodes_now or self._failed_count > _ATTEMPTS_PER_NODE * len(self._nodes):
            return False
        outer = _outer(divergence.node or "")
        # A node that chose nothing was given something that others made of their answers.
        self._changes.update([outer] if outer in self._nodes_now else sorted(self._nodes_now))
        return True


def _outer(node: str) -> str:
    return node.partition("/")[0]
