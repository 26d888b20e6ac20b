"""The trainer of the process that decides: what it is asked to learn, it has all followers learn too.

Invariant: every call that meets other processes was said to them before. What is said depends on the call alone, so a
follower that was built as this trainer ends each call with the same bits. Drawing, scoring for a check, adapter files
and checkpoints are the leader's alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trace_store.records import Episode, Trajectory
from trainers.common.card_order import card_order
from trainers.common.workers import Workers
from trainers.config import TrainerOptions
from trainers.credit.action_credits import Credited
from trainers.learners.calls import END, Calls, Part, part_to_value
from trainers.marft import MarftTrainer, Progress

BUILD = "build"
IDLE = "idle"


class LeadingTrainer(MarftTrainer):
    """A `MarftTrainer` whose processes follow `calls`; `say_build` must have been said to them.

    Args:
        calls: how they are told; the others are those of `MarftTrainer`.
    """

    def __init__(
        self,
        options: TrainerOptions,
        model_dirs: Mapping[str, Path],
        agents: Sequence[str],
        *,
        seed: int,
        progress: Progress,
        lineage: Mapping[str, str],
        is_heldout: Callable[[Episode], bool],
        workers: Workers,
        calls: Calls,
    ) -> None:
        self._calls = calls
        super().__init__(
            options,
            model_dirs,
            agents,
            seed=seed,
            progress=progress,
            lineage=lineage,
            workers=workers,
            is_heldout=is_heldout,
        )
        self.policies.others_idle = self._others_idle
        self.policies.workers.wait()  # until the followers have loaded their models

    def wait(self) -> None:
        """Followers do nothing until they are called, so there is nobody to wait for."""

    def warm_up(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        """As `MarftTrainer.warm_up`."""
        with self._led("warm_up", trajectories=trajectories):
            return super().warm_up(trajectories)

    def replay(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        """As `MarftTrainer.replay`."""
        with self._led("replay", trajectories=trajectories):
            return super().replay(trajectories)

    def distil(self, stored: Sequence[Trajectory], taught: Sequence[Trajectory]) -> dict[str, Any]:
        """As `MarftTrainer.distil`."""
        with self._led("distil", stored=stored, taught=taught):
            return super().distil(stored, taught)

    def distil_on_policy(
        self, trajectories: Sequence[Trajectory], teacher_dir: Path, *, newest: int | None = None
    ) -> dict[str, Any]:
        """As `MarftTrainer.distil_on_policy`; each process holds the teacher while it scores."""
        with self._led("distil_on_policy", trajectories=trajectories, teacher_dir=teacher_dir, newest=newest):
            return super().distil_on_policy(trajectories, teacher_dir, newest=newest)

    def update(
        self,
        trajectories: Sequence[Trajectory],
        replayed: Sequence[Trajectory] = (),
        credited: Credited | None = None,
        *,
        newest: int | None = None,
    ) -> dict[str, Any]:
        """As `MarftTrainer.update`; the followers tell nobody of the credits."""
        with self._led("update", trajectories=trajectories, replayed=replayed, newest=newest):
            return super().update(trajectories, replayed, credited, newest=newest)

    @contextmanager
    def _others_idle(self, base: int, passes: int) -> Iterator[None]:
        if not self.options.system.shard_base:
            yield
            return
        with self._led(IDLE, base=base, passes=passes):
            yield

    @contextmanager
    def _led(self, name: str, **parts: Part) -> Iterator[None]:
        """The followers do as this process does until the block ends, and have given back card memory then."""
        self._calls.send(name, {part: part_to_value(value) for part, value in parts.items()})
        yield
        self.policies.workers.wait()


def say_build(
    calls: Calls,
    options: TrainerOptions,
    model_dirs: Mapping[str, Path],
    *,
    agents: Sequence[str],
    seed: int,
    lineage: Mapping[str, str],
    devices: Sequence[str],
    sharers: Sequence[int],
    checkpoint: Path | None,
    start: Mapping[str, Path],
    learned_tasks: Sequence[str],
) -> None:
    """Has every follower build the leader's trainer; the arguments are those of `MarftTrainer`.

    Args:
        devices: where each process computes, by rank.
        sharers: by rank, how many processes share the machine that each is on.
        checkpoint: what all of them load; None for a run that begins.
        start: the folder of the adapter that an agent goes on from, which all of them load.
        learned_tasks: as of `MarftTrainer.begin_from`.
    """
    values = {
        "options": options_to_values(options),
        "model_dirs": {agent: str(folder.absolute()) for agent, folder in model_dirs.items()},
        "agents": list(agents),
        "seed": seed,
        "lineage": dict(lineage),
        "devices": list(devices),
        "card_order": card_order(),  # by which these numbers are meant
        "sharers": list(sharers),
        "checkpoint": None if checkpoint is None else str(checkpoint.absolute()),
        "start": {agent: str(folder.absolute()) for agent, folder in start.items()},
        "learned_tasks": list(learned_tasks),
    }
    calls.send(BUILD, values)


def options_to_values(options: TrainerOptions) -> dict[str, Any]:
    """What was set of some options, as JSON values that `TrainerOptions` takes."""
    values: dict[str, Any] = json.loads(json.dumps(options.model_dump(exclude_unset=True), default=str))
    return values


def say_end(calls: Calls) -> None:
    """Lets the followers go."""
    calls.send(END, {})
