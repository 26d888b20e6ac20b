"""Counts over the episodes of a command -> figures and lines for people.

Invariants: an episode is counted once, by its last attempt; tokens are those of all attempts; the share that failed is
that of the run, of which a resumed command runs only what failed or never ran.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from marft_bridge.common.errors import EpisodesFailedError

_SHOWN_REASONS = 3


@dataclass(slots=True)
class Tally:
    """The counts so far, for the progress line and the summary."""

    finished: int = 0
    finished_before: int = 0  # requests of the same run that have a finished episode, and are not run again
    retried: int = 0  # attempts that failed and were followed by another
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)  # why episodes failed or were cut short
    failures: Counter[str] = field(default_factory=Counter)  # why they failed, alone
    reward_sums: Counter[str] = field(default_factory=Counter)
    reward_counts: Counter[str] = field(default_factory=Counter)
    missing_rewards: Counter[tuple[str, str]] = field(default_factory=Counter)  # (reward, reason) -> episodes
    sampled_tokens: int = 0
    adapter_calls: Counter[str] = field(default_factory=Counter)  # node -> recorded calls that its adapter answered
    prompted_calls: Counter[str] = field(default_factory=Counter)  # node -> calls that began with its prompt
    own_model_calls: Counter[str] = field(default_factory=Counter)  # node without a route -> calls of its own model
    started_s: float = field(default_factory=time.monotonic)  # on the monotonic clock

    @property
    def run_episodes(self) -> int:
        """The episodes of the run so far, with those that were there before."""
        return self.finished_before + self.finished

    def mean(self, name: str) -> float | None:
        """Mean of one team reward over the episodes that have it."""
        return self.reward_sums[name] / self.reward_counts[name] if self.reward_counts[name] else None

    def figures(self, reward: str) -> str:
        """Tokens per second, the mean reward and failures so far, for a progress bar."""
        seconds = max(time.monotonic() - self.started_s, 1e-9)
        mean = self.mean(reward)
        parts = [f"{self.sampled_tokens / seconds:.0f} tok/s"]
        parts += [f"{reward} {mean:.3f}"] if mean is not None else []
        parts += [f"{self.outcomes['failed']} failed"] if self.outcomes["failed"] else []
        parts += [f"{self.retried} tried again"] if self.retried else []
        return "  ".join(parts)

    def missing_reward_lines(self) -> list[str]:
        """A line for each reward that episodes went without, with the reason."""
        return [
            f"{count} of {self.outcomes['terminated']} episodes go without the reward {name!r}: {reason}"
            for (name, reason), count in self.missing_rewards.most_common()
        ]

    def lines(self, nodes: Sequence[str]) -> list[str]:
        """What a user is told after a list of requests: failures, missing rewards, and nodes that were silent."""
        return [*self.failure_lines(), *self.missing_reward_lines(), *self.silent_node_lines(nodes)]

    def failure_lines(self) -> list[str]:
        """A line for each of the commonest reasons for which some of the episodes failed, the most frequent first."""
        failed = self.outcomes["failed"]
        lines = [
            f"{count} of {self.run_episodes} episodes failed: {reason}"
            for reason, count in self.failures.most_common(_SHOWN_REASONS)
        ]
        remaining = failed - sum(count for _, count in self.failures.most_common(_SHOWN_REASONS))
        return [*lines, f"{remaining} more failed for other reasons"] if remaining else lines

    def refuse_if_all_failed(self) -> None:
        """Raises EpisodesFailedError, with the commonest reason, where every episode of the run failed."""
        if self.finished and self.outcomes["failed"] == self.run_episodes:
            raise EpisodesFailedError(most_common_failure(self))

    def silent_node_lines(self, nodes: Sequence[str]) -> list[str]:
        """A line for each of these nodes that made no recorded call through its adapter, in any episode so far."""
        if not self.outcomes["terminated"]:
            return []  # no episode came to its end: the failures say more
        calling_nodes = ", ".join(f"{node} ({calls})" for node, calls in self.own_model_calls.most_common(5))
        addendum = f"; calls came from nodes that are not in graph.nodes: {calling_nodes}" if calling_nodes else ""
        return [
            f"node {node!r} made no recorded call through its adapter in {self.finished} episodes: it did not run, or "
            "calls its model in a way that cannot be redirected (neither a LangChain chat model nor openai, anthropic "
            f"or litellm, or in a thread without LangGraph's context){addendum}"
            for node in nodes
            if not self.adapter_calls[node]
        ]

    def unused_prompt_lines(self, nodes: Iterable[str]) -> list[str]:
        """A line for each of these nodes that made no call that began with its prompt, in any episode so far."""
        if not self.outcomes["terminated"]:
            return []
        return [
            f"node {node!r} made no call in {self.finished} episodes whose system message its prompt could replace: it "
            "did not run, is called otherwise, or calls its model in a way that cannot be seen"
            for node in nodes
            if not self.prompted_calls[node]
        ]

    def add(self, tally: Tally) -> None:
        """Adds the counts of another tally of the same run to this one, which keeps its own `finished_before`."""
        self.finished += tally.finished
        self.retried += tally.retried
        self.sampled_tokens += tally.sampled_tokens
        counters = "outcomes", "reasons", "reward_sums", "reward_counts", "missing_rewards", "failures"
        for name in (*counters, "adapter_calls", "own_model_calls", "prompted_calls"):
            getattr(self, name).update(dict(getattr(tally, name)))  # a copy: another thread may still count into it


def most_common_failure(tally: Tally) -> str:
    """How many episodes failed, and the commonest reason."""
    reason, count = tally.failures.most_common(1)[0]
    return f"{tally.outcomes['failed']} of {tally.run_episodes} episodes failed, {count} of them with: {reason}"
