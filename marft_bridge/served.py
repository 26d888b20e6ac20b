"""Fresh episodes and the adapter versions on disk -> whether the server answered with the adapters that were trained.

Some actions of each node are scored twice by the trainer: with the adapter that they claim, and with the version
before it. The engine's log-probs must agree with the first better than with the second.

Invariant: the trainer's weights are afterwards, bit for bit, what they were. It knows nothing of rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from marft_bridge.adapters import AdapterRegistry
from trace_store.records import Action, Trajectory
from trainers.batch import narrows_sampling
from trainers.policies import Policies
from trainers.reality import check_served, logprob_gap

_CHECKED = 8  # actions of each node


def served_versions(
    policies: Policies, registry: AdapterRegistry, episodes: Sequence[Trajectory], version: int
) -> dict[str, bool | None]:
    """Node -> whether its calls were answered by `version`; None where the log-probs cannot tell.

    They cannot where the version before is gone, where there is no action to look at, or where the two versions differ
    by less than engine and trainer do (the first rounds of a bfloat16 server). Version 0 is the base model.

    Raises:
        TrainError: a node's calls were answered by the version before.
    """
    served: dict[str, bool | None] = {}
    for node in policies.trained:
        actions = _comparable(episodes, node)
        older = version - 1
        if not actions or (older and older not in registry.versions(node)):
            served[node] = None
            continue
        engine = [action.logprobs or () for action in actions]
        new = logprob_gap(engine, policies.logprobs_of(node, actions), f"{node}@{version}")
        old = logprob_gap(engine, _older_logprobs(policies, registry, node, older, actions), f"{node}@{older}")
        served[node] = None if new is None or old is None else check_served(f"{node}@{version}", new, old)
    return served


def _older_logprobs(
    policies: Policies, registry: AdapterRegistry, node: str, version: int, actions: Sequence[Action]
) -> list[list[float]]:
    if version == 0:  # the base model, whatever stands in the adapter's place
        return policies.logprobs_of(node, actions, reference=True)
    with policies.lent(node, Path(registry.get(node, version).path)):
        return policies.logprobs_of(node, actions)


def _comparable(episodes: Sequence[Trajectory], node: str) -> list[Action]:
    """Some of the node's actions whose log-probs are those of its whole policy, spread over the episodes."""
    found = [
        action
        for episode in episodes
        for action in episode.actions
        if action.node == node and action.trainable and action.temperature and not narrows_sampling(action)
    ]
    return found[:: max(1, len(found) // _CHECKED)][:_CHECKED]
