"""Tasks -> the requests for episodes of a command, in an order and with seeds that are the same every time.

Invariants: the samples of a task stay together, and every task comes once before any comes again; a request that a
finished episode answers is not run again; what is learned from episodes and said of them follows the plan, and not when
each of them ran or how often its command was killed.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.model_calls.given_answers import Prefix
from marft_bridge.recording.episode_context import CANCELLED
from marft_bridge.recording.recorder import Recorder
from marft_bridge.runs.run_folder import COLLECT
from marft_bridge.tasks.reading import Task
from trace_store.records import Episode, Trajectory
from trace_store.store import TraceStore

# Episodes that need not run again: cut short by one of their limits, or ended and rewarded.
_FINISHED = """
SELECT task_id, sample, variant, round, if(fork_action IS NULL, NULL, [parent_episode, fork_action]) FROM episodes e
WHERE run_id = ? AND (outcome = 'truncated' AND reason <> ? OR outcome = 'terminated'
  AND EXISTS (SELECT 1 FROM rewards r WHERE r.episode_id = e.episode_id AND r.scope = 'episode'))
"""

# A kill between the end of an episode and its reward leaves one that ended and has none, and Ctrl-C one that was
# cancelled; its request ran again since.
_REPLACED = """
SELECT episode_id FROM episodes e
WHERE run_id = $1 AND (outcome = 'terminated' OR outcome = 'truncated' AND reason = $2)
AND NOT EXISTS (SELECT 1 FROM rewards r WHERE r.episode_id = e.episode_id AND r.scope = 'episode')
AND EXISTS (
  SELECT 1 FROM episodes f WHERE f.run_id = $1 AND f.task_id = e.task_id AND f.sample = e.sample
  AND f.variant IS NOT DISTINCT FROM e.variant AND f.round IS NOT DISTINCT FROM e.round
  AND f.fork_action IS NOT DISTINCT FROM e.fork_action
  AND (e.fork_action IS NULL OR f.parent_episode = e.parent_episode)
  AND (f.outcome = 'truncated' AND f.reason <> $2 OR f.outcome = 'terminated'
    AND EXISTS (SELECT 1 FROM rewards r WHERE r.episode_id = f.episode_id AND r.scope = 'episode')))
"""


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """Where a recorded episode is left: everything that does not depend on this action of it is given again."""

    episode_id: str
    action_id: str


Key = tuple[str, int, str | None, int | None, ForkPoint | None]
"""(task, sample, variant, round, fork): what identifies a request within its run."""


class RecordedBeginning(Protocol):
    """What a fork gives again of the episode that it leaves. It holds records only, so that a worker can be sent it."""

    def begin(self, recorder: Recorder) -> Prefix:
        """The answers for one run of the fork, whose calls `recorder` records."""


class RecordedStart(Protocol):
    """How the run that a fork leaves was started, where the app started it itself and no task of ours says how."""

    @property
    def subject_id(self) -> str | None:
        """The person whose data that run holds."""

    @property
    def checkpoints(self) -> Mapping[str, str]:
        """Checkpoint of its thread, as it was made again -> the recorded one."""

    def run(self, graph: Any, callbacks: Sequence[Any]) -> Coroutine[Any, Any, Any]:
        """Runs the graph as that run was started; nothing that the app keeps of its threads is touched."""


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """One episode to run. (task, sample, variant, round, fork) identifies it within a run.

    The samples of a fork point are counted from 0 on their own.
    """

    run_id: str
    task: Task
    split: str
    sample: int
    seed: int
    adapters: Mapping[str, int]  # node -> adapter version
    round: int | None = None
    variant: str | None = None
    temperature: float | None = None  # None: that of the configuration
    max_tokens: int | None = None  # of one call; None: that of the configuration
    answers: Mapping[str, str] = field(default_factory=dict)  # node -> the text that answers its calls, not a model
    prompts: Mapping[str, str] = field(default_factory=dict)  # node -> what its calls begin with
    fork: ForkPoint | None = None  # None: the whole episode is run
    beginning: RecordedBeginning | None = field(default=None, compare=False, repr=False)  # of a fork
    start: RecordedStart | None = field(default=None, compare=False, repr=False)  # of a fork; None: by its task
    tags: Mapping[str, str] = field(default_factory=dict)  # of the episode
    frozen: frozenset[str] = frozenset()  # nodes of which no call is learned from, whatever the configuration trains

    @property
    def key(self) -> Key:
        """The request's identity within its run, by which resuming finds finished episodes."""
        return (self.task["id"], self.sample, self.variant, self.round, self.fork)


def episode_to_fork(episode: Episode) -> ForkPoint | None:
    """Where an episode left another one; None for one that is no fork."""
    if episode.parent_episode is None or episode.fork_action is None:
        return None
    return ForkPoint(episode.parent_episode, episode.fork_action)


def episode_to_key(episode: Episode) -> Key:
    """`EpisodeRequest.key` of the request that an episode answers."""
    return (episode.task_id, episode.sample, episode.variant, episode.round, episode_to_fork(episode))


def task_order(tasks: Sequence[Task], seed: int) -> list[Task]:
    """The tasks in a seeded random order that does not depend on their order in the file."""
    ordered = sorted(tasks, key=lambda task: str(task["id"]))
    random.Random(seed).shuffle(ordered)
    return ordered


def plan_episodes(
    tasks: Sequence[Task], episodes: int, samples_per_task: int, *, seed: int, **common: Any
) -> list[EpisodeRequest]:
    """`episodes` requests over `tasks` in order, from the first task again when they run out.

    Groups of `samples_per_task` stay together. A task that comes again gets new sample numbers; every request
    gets its own seed, which depends on the run's seed, the round, the task and the sample only.

    Args:
        common: the fields of `EpisodeRequest` that all requests share.
    """
    samples_used: Counter[str] = Counter()
    requests: list[EpisodeRequest] = []
    for number in range(-(-episodes // samples_per_task)):
        task = tasks[number % len(tasks)]
        for _ in range(samples_per_task):
            sample = samples_used[task["id"]]
            samples_used[task["id"]] += 1
            episode_seed = derived_seed(seed, common.get("round"), task["id"], sample=sample)
            requests.append(EpisodeRequest(task=task, sample=sample, seed=episode_seed, **common))
    return requests[:episodes]


def finished_keys(store: TraceStore, run_id: str) -> set[Key]:
    """`EpisodeRequest.key` of every request of a run that a finished episode in the store answers."""
    return {
        (task_id, sample, variant, number, None if fork is None else ForkPoint(*fork))
        for task_id, sample, variant, number, fork in store.sql(_FINISHED, (run_id, CANCELLED))
    }


def unfinished_requests(store: TraceStore, requests: Sequence[EpisodeRequest]) -> list[EpisodeRequest]:
    """The requests that no finished episode in the store answers."""
    done = {run_id: finished_keys(store, run_id) for run_id in {r.run_id for r in requests}}
    return [request for request in requests if request.key not in done[request.run_id]]


def plan_collection(config: BridgeConfig, tasks: Sequence[Task]) -> list[EpisodeRequest]:
    """The requests of `collect`: its episodes at version 0, over the training tasks in their seeded order."""
    return plan_episodes(
        task_order(tasks, config.seed),
        config.collect.episodes,
        config.collect.samples_per_task,
        seed=config.seed,
        run_id=COLLECT,
        split="train",
        adapters=dict.fromkeys(config.graph.nodes, 0),
    )


def requests_to_versions(requests: Iterable[EpisodeRequest]) -> dict[str, list[int]]:
    """Node -> the adapter versions that these requests need."""
    node_versions: dict[str, list[int]] = {}
    for request in requests:
        for node, version in request.adapters.items():
            if version not in node_versions.setdefault(node, []):
                node_versions[node].append(version)
    return node_versions


def replaced_attempts(store: TraceStore, run_id: str) -> set[str]:
    """Ids of the episodes that a kill or Ctrl-C left without a reward, and whose request another one finished."""
    return {episode_id for (episode_id,) in store.sql(_REPLACED, (run_id, CANCELLED))}


def in_planned_order(
    trajectories: Iterable[Trajectory], requests: Sequence[EpisodeRequest], replaced: Collection[str]
) -> list[Trajectory]:
    """The episodes of a run in the order of its requests, without the replaced attempts.

    Attempts at one request stay in their order; episodes of no request come last, by task and sample.
    """
    positions = {request.key: position for position, request in enumerate(requests)}

    def place(episode: Episode) -> tuple[int, str, int]:
        return positions.get(episode_to_key(episode), len(positions)), episode.task_id, episode.sample

    kept_trajectories = [each for each in trajectories if each.episode.episode_id not in replaced]
    return sorted(kept_trajectories, key=lambda trajectory: place(trajectory.episode))


def derived_seed(seed: int, round_number: int | None, task_id: str, sample: int) -> int:
    """The seed of one sample of a task in a round, the same every time."""
    digest = hashlib.sha256(f"{seed}/{round_number}/{task_id}/{sample}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
