"""An episode of a store -> the call at which it left another one, and its own forks by call, with what each was worth.

Invariants: forks of one call are told apart by run and variant, so that a worth is of forks that were sampled alike and
no seed counts twice; of several attempts at a sample one counts. Texts are returned as they are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marft_bridge.statistics.fork_worth import ForkWorth, interval_to_text, rewards_to_worth
from trace_store.records import Episode
from trace_store.store import TraceStore

_Point = tuple[str, str, str | None, int | None]
"""Forked action, run, variant, round: what forks share that are looked at together."""


@dataclass(frozen=True, slots=True)
class ForkOrigin:
    """Where a fork left another episode. Node and call are None where that is no longer stored."""

    episode_id: str
    action_id: str
    node: str | None
    call: int | None  # among those of its node, from 1


@dataclass(frozen=True, slots=True)
class ForkBranch:
    """One fork. `answer`: of the call that was made again; None where it was not reached."""

    episode_id: str
    sample: int
    outcome: str
    reason: str | None
    answer: str | None
    rewards: dict[str, float]
    fork_count: int  # forks that leave this one


@dataclass(frozen=True, slots=True)
class ForkedCall:
    """A call of an episode and its forks in one run. `worths`: by the name of the team reward."""

    action_id: str
    node: str | None  # None where the episode has no such call
    call: int | None  # among those of its node, from 1
    index: int | None  # among all calls of the episode, from 0
    run_id: str
    round: int | None
    variant: str | None
    answer: str | None  # the recorded one
    rewards: dict[str, float]  # of the recorded run
    comparable: bool  # whether the recorded answer was sampled as the forks' were
    branches: list[ForkBranch]
    worths: dict[str, ForkWorth]


@dataclass(frozen=True, slots=True)
class _CallRow:
    action_id: str
    node: str
    index: int
    completion: str | None
    replayed_from: str | None
    temperature: float | None


def episode_to_origin(store: TraceStore, episode: Episode) -> ForkOrigin | None:
    """Where an episode left another one; None for one that is no fork."""
    if episode.parent_episode is None or episode.fork_action is None:
        return None
    calls = _ids_to_calls(store, [episode.parent_episode]).get(episode.parent_episode, [])
    position = _position_of(calls, episode.fork_action)
    node, number = (None, None) if position is None else (calls[position].node, _number_of(calls, position))
    return ForkOrigin(episode.parent_episode, episode.fork_action, node=node, call=number)


def episode_to_forks(store: TraceStore, episode: Episode) -> list[ForkedCall]:
    """The calls at which an episode was forked, in the order of its calls, then of the first fork of each run."""
    attempts = store.sql(
        'SELECT fork_action, run_id, variant, "round", episode_id, sample, outcome, reason, adapters FROM episodes'
        " WHERE parent_episode = ? AND fork_action IS NOT NULL ORDER BY started_ns, episode_id",
        (episode.episode_id,),
    )
    if not attempts:
        return []
    ids = [episode.episode_id, *(row[4] for row in attempts)]
    rewards = ids_to_rewards(store, ids)
    calls_by_episode = _ids_to_calls(store, ids)
    counts = dict(
        store.sql(
            "SELECT parent_episode, count(*) FROM episodes WHERE fork_action IS NOT NULL"
            " AND parent_episode IN (SELECT unnest(?::VARCHAR[])) GROUP BY parent_episode",
            (ids,),
        )
    )
    rows_by_point = sample_attempts(attempts, rewards)
    recorded_calls = calls_by_episode.get(episode.episode_id, [])
    points = []
    for (action_id, run_id, variant, round_number), samples in rows_by_point.items():
        position = _position_of(recorded_calls, action_id)
        recorded = None if position is None else recorded_calls[position]
        branches, is_alike = [], recorded is not None and variant is None
        for sample, (*_, fork_id, _, outcome, reason, adapters) in sorted(samples.items()):
            made = None if recorded is None else _call_made_again(calls_by_episode.get(fork_id, []), recorded.node)
            is_alike = is_alike and json.loads(adapters) == dict(episode.adapters)
            if recorded is not None and made is not None:
                is_alike = is_alike and made.temperature == recorded.temperature
            answer = None if made is None else made.completion
            branches.append(
                ForkBranch(
                    fork_id,
                    sample,
                    outcome,
                    reason=reason,
                    answer=answer,
                    rewards=rewards.get(fork_id, {}),
                    fork_count=counts.get(fork_id, 0),
                )
            )
        own_rewards = rewards.get(episode.episode_id, {})
        points.append(
            ForkedCall(
                action_id,
                node=None if recorded is None else recorded.node,
                call=None if position is None else _number_of(recorded_calls, position),
                index=None if recorded is None else recorded.index,
                run_id=run_id,
                round=round_number,
                variant=variant,
                answer=None if recorded is None else recorded.completion,
                rewards=own_rewards,
                comparable=is_alike,
                branches=branches,
                worths=_to_worths(own_rewards, branches, comparable=is_alike),
            )
        )
    return sorted(points, key=lambda point: len(recorded_calls) if point.index is None else point.index)


def worth_to_text(name: str, worth: ForkWorth) -> str:
    """`reward: recorded 0; 7 forks, mean 0.571, 95% interval 0.0771 to 1.07; recorded - mean -0.571`."""
    recorded = "none" if worth.recorded is None else f"{worth.recorded:g}"
    start = f"{name}: recorded {recorded}; "
    if worth.mean is None:
        return f"{start}no fork has it"
    forks = f"{start}{worth.resampled} {'fork' if worth.resampled == 1 else 'forks'}, mean {worth.mean:.3g}"
    forks += f", {interval_to_text(worth)}"
    return forks if worth.recorded_over_mean is None else f"{forks}; recorded - mean {worth.recorded_over_mean:+.3g}"


def _to_worths(recorded: dict[str, float], branches: Sequence[ForkBranch], comparable: bool) -> dict[str, ForkWorth]:
    names = dict.fromkeys([*recorded, *(name for branch in branches for name in branch.rewards)])
    return {
        name: rewards_to_worth(
            recorded.get(name), [branch.rewards.get(name) for branch in branches], comparable=comparable
        )
        for name in names
    }


def sample_attempts(
    rows: Iterable[tuple[Any, ...]], rewards: Mapping[str, Mapping[str, float]]
) -> dict[_Point, dict[int, tuple[Any, ...]]]:
    """Rows of (forked action, run, variant, round, episode, sample, ...), by their start -> what counts, by sample.

    The latest attempt at a sample counts, unless it was cut off before its reward and an earlier one was not.
    """
    rows_by_point: dict[_Point, dict[int, tuple[Any, ...]]] = {}
    for row in rows:
        samples = rows_by_point.setdefault(row[:4], {})
        earlier = samples.get(row[5])
        if earlier is None or rewards.get(row[4]) or not rewards.get(earlier[4]):
            samples[row[5]] = row
    return rows_by_point


def ids_to_rewards(store: TraceStore, ids: Sequence[str]) -> dict[str, dict[str, float]]:
    """Episode -> its team rewards by name; one without any is absent."""
    rewards: dict[str, dict[str, float]] = {}
    rows = store.sql(
        "SELECT episode_id, name, value FROM episode_reward WHERE episode_id IN (SELECT unnest(?::VARCHAR[]))"
        " ORDER BY episode_id, name",
        (list(ids),),
    )
    for episode_id, name, value in rows:
        rewards.setdefault(episode_id, {})[name] = value
    return rewards


def _ids_to_calls(store: TraceStore, ids: Sequence[str]) -> dict[str, list[_CallRow]]:
    calls: dict[str, list[_CallRow]] = {}
    rows = store.sql(
        'SELECT episode_id, action_id, node, "index", completion, replayed_from, temperature FROM actions'
        ' WHERE episode_id IN (SELECT unnest(?::VARCHAR[])) ORDER BY episode_id, "index"',
        (list(ids),),
    )
    for episode_id, *columns in rows:
        calls.setdefault(episode_id, []).append(_CallRow(*columns))
    return calls


def _position_of(calls: Sequence[_CallRow], action_id: str) -> int | None:
    return next((index for index, call in enumerate(calls) if call.action_id == action_id), None)


def _number_of(calls: Sequence[_CallRow], position: int) -> int:
    return Counter(call.node for call in calls[: position + 1])[calls[position].node]


def _call_made_again(calls: Sequence[_CallRow], node: str) -> _CallRow | None:
    """The forked call in a fork: what its node did before was given again, and what depends on it comes later."""
    return next((call for call in calls if call.node == node and call.replayed_from is None), None)
