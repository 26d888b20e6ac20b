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
from trainers.errors import TrainError
from trainers.policies import Policies
from trainers.reality import check_served, logprob_gap

_CHECKED = 8  # actions of each node


def check_staleness(
    episodes: Sequence[Trajectory], nodes: Sequence[str], newest: int, limit: int, title: str
) -> dict[str, float] | None:
    """How many versions the calls of these nodes lie behind the newest, as they were recorded: mean and max.

    None where no call says which version answered it.

    Raises:
        TrainError: one lies further behind than `limit`.
    """
    behind = [
        newest - action.adapter_version
        for episode in episodes
        for action in episode.actions
        if action.node in nodes and action.adapter_version is not None
    ]
    if not behind:
        return None
    if max(behind) > limit:
        raise TrainError(
            f"{title} holds calls that were sampled {max(behind)} versions before the newest, and train.max_staleness "
            f"is {limit}: go on with train.max_staleness = {max(behind)}"
        )
    return {"mean": sum(behind) / len(behind), "max": max(behind)}


def served_versions(
    policies: Policies, registry: AdapterRegistry, episodes: Sequence[Trajectory], newest: int
) -> dict[str, bool | None]:
    """Node -> whether its calls were answered by the version that they claim; None where the log-probs cannot tell.

    They cannot where that version or the one before is gone, where there is no action to look at, or where the two
    differ by less than engine and trainer do (the first rounds of a bfloat16 server). Version 0 is the base model.

    Args:
        newest: the version that the trainer holds.

    Raises:
        TrainError: a node's calls were answered by the version before.
    """
    served: dict[str, bool | None] = {}
    for node in policies.trained:
        by_version: dict[int, list[Action]] = {}
        for action in _comparable(episodes, node):
            by_version.setdefault(action.adapter_version or 0, []).append(action)
        known = {_was_served(policies, registry, node, at, by_version[at], newest) for at in by_version}
        served[node] = True if True in known else None
    return served


def _was_served(
    policies: Policies, registry: AdapterRegistry, node: str, version: int, actions: Sequence[Action], newest: int
) -> bool | None:
    older = version - 1
    gone = [at for at in (version, older) if at not in (0, newest) and at not in registry.versions(node)]
    if version == 0 or gone:
        return None
    engine = [action.logprobs or () for action in actions]
    claimed = (
        policies.logprobs_of(node, actions)
        if version == newest
        else _logprobs_at(policies, registry, node, version, actions)
    )
    new = logprob_gap(engine, claimed, f"{node}@{version}")
    old = logprob_gap(engine, _logprobs_at(policies, registry, node, older, actions), f"{node}@{older}")
    return None if new is None or old is None else check_served(f"{node}@{version}", new, old)


def _logprobs_at(
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
