"""The planned forks of a round <-> a file of the run's folder, and what is read of runs to plan them.

    runs/x/trees/round-00003.json    every wave, written down before it is played

Invariant: a file exists whole or not at all. It holds ids and counts, no text.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from marft_bridge.common.files import write_atomically
from marft_bridge.rollouts.episode_plan import EpisodeRequest, ForkPoint
from marft_bridge.training.fork_draw import CallSpot, ForkChoice, runs_to_reach
from trace_store.files import make_folder, open_to_read
from trace_store.records import Action, Episode, Trajectory


@dataclass(frozen=True, slots=True)
class PlannedFork:
    """One call that is forked, as it is written down."""

    task: str
    sample: int  # of the run
    node: str
    call: int  # among those of its node, from 1
    episode: str
    action: str
    forks: int
    tokens: int  # that a fork is expected to sample: those of the run from this call on
    blind: bool = True  # chosen without a look at how that run went on
    stored: bool = False  # the run is one of before the round

    @property
    def choice(self) -> ForkChoice:
        """The draw that it comes from."""
        return ForkChoice(self.task, self.sample, CallSpot(self.node, self.call))

    @property
    def point(self) -> ForkPoint:
        """Where the run is left."""
        return ForkPoint(self.episode, self.action)


Wave = tuple[PlannedFork, ...]


def plan_path(folder: Path, number: int) -> Path:
    """The file of a round."""
    return folder / f"round-{number:05}.json"


def read_waves(folder: Path, number: int) -> list[Wave]:
    """The waves of a round that are written down so far."""
    try:
        with open_to_read(plan_path(folder, number)) as file:
            content = json.loads(file.read())
    except FileNotFoundError:
        return []
    return [tuple(PlannedFork(**fork) for fork in wave) for wave in content["waves"]]


def write_waves(folder: Path, number: int, waves: Sequence[Wave]) -> None:
    """Writes, or replaces, the file of a round, atomically."""
    make_folder(folder)
    content = {"waves": [[asdict(fork) for fork in wave] for wave in waves]}
    write_atomically(plan_path(folder, number), json.dumps(content, indent=1) + "\n")


def fork_to_known_requests(fork: PlannedFork, parent: Episode | None, run_id: str, number: int) -> list[EpisodeRequest]:
    """Requests by which the forks of a call in a round are known; they cannot be run."""
    if parent is None:
        return []
    return [
        EpisodeRequest(
            run_id,
            parent.task,
            split=parent.split,
            sample=sample,
            seed=0,
            adapters={},
            round=number,
            fork=fork.point,
        )
        for sample in range(fork.forks)
    ]


def actions_to_spots(
    actions: Sequence[Action], nodes: Collection[str], *, all_calls: bool = False
) -> dict[CallSpot, Action]:
    """The calls of a run, those of some nodes, by where they stand: see `RecordedCall.number`.

    Args:
        all_calls: also those that cannot be trained on.
    """
    counts: Counter[str] = Counter()
    spots = {}
    for action in sorted(actions, key=lambda each: (each.started_ns, each.action_id)):
        counts[action.node] += 1
        if action.node in nodes and (action.trainable or all_calls):
            spots[CallSpot(action.node, counts[action.node])] = action
    return spots


def sampled_count(actions: Sequence[Action]) -> int:
    """The tokens that were sampled for some actions, as far as known; none where an answer was given again."""
    return sum(_tokens(each.sampled_tokens, each.sampled_ids) for each in actions if each.replayed_from is None)


def prompt_count(action: Action) -> int:
    """The tokens of an action's prompt, as far as known."""
    return _tokens(action.prompt_tokens, action.prompt_ids)


def _tokens(counted: int | None, ids: Sequence[int] | None) -> int:
    return counted if counted is not None else len(ids or ())


def known_runs_to_reach(
    runs: Sequence[Trajectory], collected: Sequence[Trajectory], nodes: Collection[str]
) -> dict[CallSpot, float]:
    """How often runs make each call of some nodes, by runs of before; those that failed say nothing.

    Args:
        runs: of a round, by calls that can be trained on.
        collected: what was there before the rounds, which says it where `runs` do not: by all calls, since those of an
            app's own traces may be such as nothing is trained on.
    """
    by_round = [list(actions_to_spots(run.actions, nodes)) for run in _not_failed(runs)]
    by_collected = [list(actions_to_spots(run.actions, nodes, all_calls=True)) for run in _not_failed(collected)]
    return runs_to_reach(by_round) or runs_to_reach(by_collected)


def _not_failed(runs: Sequence[Trajectory]) -> list[Trajectory]:
    return [run for run in runs if run.episode.outcome != "failed"]


def forks_in_planned_order(
    trajectories: Sequence[Trajectory], waves: Sequence[Wave], replaced: Collection[str]
) -> list[Trajectory]:
    """The forks of a round in the order of its plan, without the replaced attempts; attempts stay in their order."""
    positions = {fork.point: position for position, fork in enumerate(fork for wave in waves for fork in wave)}

    def place(episode: Episode) -> tuple[int, int]:
        point = ForkPoint(episode.parent_episode or "", episode.fork_action or "")
        return positions.get(point, len(positions)), episode.sample

    forks = [each for each in trajectories if each.episode.fork_action is not None]
    kept_forks = [each for each in forks if each.episode.episode_id not in replaced]
    return sorted(kept_forks, key=lambda each: place(each.episode))
