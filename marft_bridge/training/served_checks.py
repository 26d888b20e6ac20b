"""Fresh episodes and the adapter versions on disk -> whether the server answered with the adapters that were trained.

The trainer scores some actions of each node twice: with the adapter version that they name, and with the version
before it. The engine's log-probs must agree with the first better than with the second.

Invariant: afterwards the trainer's weights are bit for bit the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from marft_bridge.serving.adapter_registry import AdapterRegistry
from trace_store.records import Action, Trajectory
from trainers.batch import forced_tokens, narrows_sampling
from trainers.checks.reality import check_served, logprob_gap
from trainers.common.spread import spread_rows
from trainers.errors import TrainError
from trainers.policies.policies import Policies

_ACTIONS_PER_NODE = 8  # that are scored again
_NOISE = 0.1  # nats a token: three times what a bfloat16 engine differs by


def check_staleness(
    episodes: Sequence[Trajectory], nodes: Sequence[str], newest: int, limit: int, title: str
) -> dict[str, float] | None:
    """Mean and max of the number of versions by which the recorded calls of these nodes lag behind the newest.

    Of those that can be learned from: an opponent of the league may be of any version. None where no call names the
    version that answered it.

    Raises:
        TrainError: a call lags by more than `limit` versions.
    """
    lags = [
        newest - action.adapter_version
        for episode in episodes
        for action in episode.actions
        if action.node in nodes and action.trainable and action.adapter_version is not None
    ]
    if not lags:
        return None
    if max(lags) > limit:
        raise TrainError(
            f"{title} holds calls that were sampled {max(lags)} versions before the newest, and train.max_staleness "
            f"is {limit}: go on with train.max_staleness = {max(lags)}"
        )
    return {"mean": sum(lags) / len(lags), "max": max(lags)}


def served_versions(
    policies: Policies, registry: AdapterRegistry, episodes: Sequence[Trajectory], newest: int
) -> dict[str, bool | None]:
    """Node -> whether its calls were answered by the version that they name; None where the log-probs cannot tell.

    They cannot where that version or the one before is deleted, where there is no action to score, where the two
    versions differ by less than engine and trainer do (the first rounds of a bfloat16 server), or where a grammar held
    the engine and explains why it says more than the newest. Version 0 is the base model.

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
        verdicts = {
            _was_served(policies, registry, node, version=version, actions=by_version[version], newest=newest)
            for version in by_version
        }
        served[node] = True if True in verdicts else None
    return served


def _was_served(
    policies: Policies, registry: AdapterRegistry, node: str, version: int, actions: Sequence[Action], newest: int
) -> bool | None:
    older = version - 1
    on_disk = registry.versions(node)
    is_missing = any(number not in (0, newest) and number not in on_disk for number in (version, older))
    if version == 0 or is_missing:
        return None
    engine_logprobs = _of_decided([action.logprobs or () for action in actions], actions)
    # the older version first: what the trainer was asked last, the update that follows may take from it
    older_logprobs = _logprobs_at(policies, registry, node, version=older, actions=actions)
    trainer_logprobs = (
        _of_decided(policies.logprobs_of(node, actions), actions)
        if version == newest
        else _logprobs_at(policies, registry, node, version=version, actions=actions)
    )
    gap = logprob_gap(engine_logprobs, trainer_logprobs, f"{node}@{version}")
    older_gap = logprob_gap(engine_logprobs, older_logprobs, f"{node}@{older}")
    if gap is None or older_gap is None:
        return None
    is_held = any(forced_tokens(action) for action in actions)
    if gap > older_gap and is_held and _shortfall(engine_logprobs, trainer_logprobs) <= _NOISE:
        return None
    return check_served(f"{node}@{version}", gap, older_gap)


def _logprobs_at(
    policies: Policies, registry: AdapterRegistry, node: str, version: int, actions: Sequence[Action]
) -> list[list[float]]:
    if version == 0:  # the base model: its adapter changes nothing
        return _of_decided(policies.logprobs_of(node, actions, reference=True), actions)
    with policies.lent(node, Path(registry.get(node, version).path)):
        return _of_decided(policies.logprobs_of(node, actions), actions)


def _of_decided(logprobs: Sequence[Sequence[float]], actions: Sequence[Action]) -> list[list[float]]:
    """The log-probs of each action without those of its forced tokens, which no policy decided."""
    forced = [set(forced_tokens(action)) for action in actions]
    return [
        [logprob for k, logprob in enumerate(part) if k not in positions]
        for part, positions in zip(logprobs, forced, strict=True)
    ]


def _shortfall(engine: Sequence[Sequence[float]], trainer: Sequence[Sequence[float]]) -> float:
    """By how much the engine's log-probs lie below the trainer's, in nats: the mean over tokens, 0 where above.

    A grammar only raises what the engine gives to the tokens that it allows. So an engine under a grammar that lies
    above the newest adapter, however far, may well serve it; one that lies below it does not.
    """
    shortfalls = [max(t - e, 0.0) for es, ts in zip(engine, trainer, strict=True) for e, t in zip(es, ts, strict=True)]
    return math.fsum(shortfalls) / max(len(shortfalls), 1)


def _comparable(episodes: Sequence[Trajectory], node: str) -> list[Action]:
    """Some of the node's actions, spread over its turns and over the episodes, whose log-probs are those of the
    unrestricted policy."""
    comparable = [
        (turn, action)
        for episode in episodes
        for turn, action in enumerate(action for action in episode.actions if action.node == node)
        if action.trainable and action.temperature and not narrows_sampling(action)
    ]
    turns = [turn for turn, _ in comparable]
    return [comparable[k][1] for k in spread_rows(turns, _ACTIONS_PER_NODE)]
