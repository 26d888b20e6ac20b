"""A call of the leader's trainer to bytes that every follower reads: JSON in one message of torch's process group.

Invariant: what is read equals what was sent, field by field, floats bit for bit. Nothing is pickled, so that whoever
reaches the port of a process group can make none of them run code. A follower waits for its next call without a limit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trace_store.records import Action, Edge, Episode, Reward, Trajectory
from trainers.common.workers import meeting

END = "end"
_LEADER = 0
_WAIT = timedelta(days=365)  # rollouts between two updates take as long as they take
_TUPLES = ("prompt_ids", "sampled_ids", "logprobs")  # of an action; JSON has lists


class Calls:
    """What the leader says to all followers, in order. Made by every process of the default process group at once."""

    def __init__(self) -> None:
        with meeting():
            self._group = dist.new_group(backend="gloo", timeout=_WAIT)

    def send(self, name: str, values: Mapping[str, Any]) -> None:
        """Says one call to all followers; `values` are JSON values, NaN and infinity among them.

        Raises:
            LostProcessError: a follower has ended.
        """
        message = torch.frombuffer(bytearray(json.dumps([name, values]).encode()), dtype=torch.uint8)
        with meeting():
            dist.broadcast(torch.tensor([len(message)]), src=_LEADER, group=self._group)
            dist.broadcast(message, src=_LEADER, group=self._group)

    def receive(self) -> tuple[str, dict[str, Any]]:
        """The leader's next call, once it comes.

        Raises:
            LostProcessError: the leader has ended.
        """
        length = torch.zeros(1, dtype=torch.int64)
        with meeting():
            dist.broadcast(length, src=_LEADER, group=self._group)
            message = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(message, src=_LEADER, group=self._group)
        name, values = json.loads(message.numpy().tobytes())
        return name, values


Part = Sequence[Trajectory] | Path | int | None
"""An argument of a call."""


def part_to_value(part: Part) -> Any:
    """An argument as a JSON value, which tells by its type what it is."""
    if part is None or isinstance(part, int):
        return part
    return str(part.absolute()) if isinstance(part, Path) else trajectories_to_values(part)


def value_to_part(value: Any) -> Part:
    """The argument that was sent as `value`; a folder is an absolute one."""
    if value is None or isinstance(value, int):
        return value
    return Path(value) if isinstance(value, str) else values_to_trajectories(value)


def trajectories_to_values(trajectories: Iterable[Trajectory]) -> list[dict[str, Any]]:
    """Trajectories as JSON values."""
    return [
        {
            "episode": _to_values(trajectory.episode),
            "actions": list(map(_to_values, trajectory.actions)),
            "edges": list(map(_to_values, trajectory.edges)),
            "rewards": list(map(_to_values, trajectory.rewards)),
        }
        for trajectory in trajectories
    ]


def values_to_trajectories(values: Sequence[Mapping[str, Any]]) -> list[Trajectory]:
    """The inverse of `trajectories_to_values`."""
    return [
        Trajectory(
            Episode(**each["episode"]),
            actions=tuple(map(_to_action, each["actions"])),
            edges=tuple(Edge(**edge) for edge in each["edges"]),
            rewards=tuple(Reward(**reward) for reward in each["rewards"]),
        )
        for each in values
    ]


def _to_values(record: Episode | Action | Edge | Reward) -> dict[str, Any]:
    # not dataclasses.asdict, which copies every token by itself
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _to_action(values: Mapping[str, Any]) -> Action:
    tuples = {name: tuple(values[name]) for name in _TUPLES if values[name] is not None}
    return Action(**{**values, **tuples})
