"""What has happened to the episodes of a command so far -> figures and lines for people.

Invariant: an episode is counted once, by its last attempt; tokens are those of all attempts. It knows nothing of how
episodes run or where they are stored.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """What has happened so far, for the progress line and the summary."""

    finished: int = 0
    retried: int = 0  # attempts that failed and were followed by another
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    reward_sums: Counter[str] = field(default_factory=Counter)
    reward_counts: Counter[str] = field(default_factory=Counter)
    absent: Counter[tuple[str, str]] = field(default_factory=Counter)  # (reward, why an episode went without it)
    sampled_tokens: int = 0
    answered: Counter[str] = field(default_factory=Counter)  # node -> recorded calls that its adapter answered
    elsewhere: Counter[str] = field(default_factory=Counter)  # node without a route -> calls of its own model
    began: float = field(default_factory=time.monotonic)

    def mean(self, name: str) -> float | None:
        """Mean of one team reward over the episodes that have it."""
        return self.reward_sums[name] / self.reward_counts[name] if self.reward_counts[name] else None

    def figures(self, reward: str) -> str:
        """For a progress bar."""
        seconds = max(time.monotonic() - self.began, 1e-9)
        mean = self.mean(reward)
        parts = [f"{self.sampled_tokens / seconds:.0f} tok/s"]
        parts += [f"{reward} {mean:.3f}"] if mean is not None else []
        parts += [f"{self.outcomes['failed']} failed"] if self.outcomes["failed"] else []
        parts += [f"{self.retried} tried again"] if self.retried else []
        return "  ".join(parts)

    def without(self) -> list[str]:
        """A line about each reward that episodes went without, and why."""
        return [
            f"{count} of {self.outcomes['terminated']} episodes go without the reward {name!r}: {why}"
            for (name, why), count in self.absent.most_common()
        ]

    def silent(self, nodes: Sequence[str]) -> list[str]:
        """A line about each of these nodes that made no call to learn from, in any episode so far."""
        if not self.outcomes["terminated"]:
            return []  # nothing ran to its end: the failures say more
        others = ", ".join(f"{node} ({calls})" for node, calls in self.elsewhere.most_common(5))
        seen = f"; calls came from nodes that are not in graph.nodes: {others}" if others else ""
        return [
            f"node {node!r} made no recorded call through its adapter in {self.finished} episodes: it did not run, or "
            f"calls its model in a way that cannot be redirected (not a LangChain chat model, or in a thread without "
            f"LangGraph's context){seen}"
            for node in nodes
            if not self.answered[node]
        ]

    def add(self, other: Tally) -> None:
        """Counts what another tally counted, too."""
        self.finished += other.finished
        self.retried += other.retried
        self.sampled_tokens += other.sampled_tokens
        for name in ("outcomes", "reasons", "reward_sums", "reward_counts", "absent", "answered", "elsewhere"):
            getattr(self, name).update(dict(getattr(other, name)))  # a copy: the other may still be counting
