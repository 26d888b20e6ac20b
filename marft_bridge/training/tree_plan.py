"""The whole runs of a round -> the forks that are played next, in waves, until the round's tokens are spent.

A round has as many sampled tokens as `train.episodes_per_round` whole runs would have, by the mean of those that it
played. A wave takes what should cost half of what is left of them, in the order of `fork_draw`, and the last ones a
single call, so that the round ends within about half a fork of its budget. Forks of stored runs come first, as far as
`stored_share` goes; then those of the round's own. Invariants: what is forked follows from the seed, earlier rounds and
the runs of this one, so that a round that was stopped anywhere goes on as it would have; what is written down is
played, and nothing else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from marft_bridge.common.errors import BridgeError, GraphError
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.forks.fork_plan import ForkChange, plan_forks, refuse_other_models, spans_to_parent
from marft_bridge.forks.recorded_prefix import PrefixParts, RecordedPrefix, run_to_prefix
from marft_bridge.rollouts.episode_plan import (
    EpisodeRequest,
    Key,
    derived_seed,
    episode_to_fork,
    episode_to_key,
    replaced_attempts,
    unfinished_requests,
)
from marft_bridge.serving.adapter_registry import AdapterRegistry
from marft_bridge.training.fork_draw import (
    CallSpot,
    ForkChoice,
    SiblingRewards,
    draw_forks,
    draw_spots,
    fill_wave,
    spots_to_weights,
)
from marft_bridge.training.planned_forks import (
    PlannedFork,
    Wave,
    actions_to_spots,
    fork_to_known_requests,
    read_waves,
    sampled_count,
    write_waves,
)
from marft_bridge.training.round_plan import RoundPlan
from marft_bridge.training.round_runs import RoundRuns
from marft_bridge.training.success_draw import draw_order
from trace_store.errors import StoreError
from trace_store.records import BLIND_FORK, Action, Episode, Trajectory
from trace_store.store import TraceStore

# What the runs beneath each forked call of earlier rounds earned; a stored run, of another policy, is none of them.
_SIBLINGS = """
WITH earned AS (
  SELECT e.episode_id, e.parent_episode, e.fork_action, e.round, arg_max(r.value, r.created_ns) AS value
  FROM episodes e JOIN rewards r USING (episode_id)
  WHERE e.run_id = $1 AND e.round <= $2 AND e.outcome <> 'failed' AND r.scope = 'episode' AND r.name = $3
  GROUP BY ALL HAVING isfinite(value)
), spots AS (
  SELECT episode_id, action_id, node, row_number() OVER (
    PARTITION BY episode_id, node ORDER BY started_ns, action_id
  ) AS number
  FROM actions WHERE episode_id IN (SELECT parent_episode FROM earned WHERE fork_action IS NOT NULL)
)
SELECT s.node, s.number, p.value, list(f.value ORDER BY f.value)
FROM earned f JOIN spots s ON s.action_id = f.fork_action AND s.episode_id = f.parent_episode
LEFT JOIN earned p ON p.episode_id = f.parent_episode AND p.round = f.round
GROUP BY f.round, f.parent_episode, f.fork_action, s.node, s.number, p.value ORDER BY ALL
"""


@dataclass(frozen=True, slots=True)
class ForkRules:
    """What forks of every round of a run are planned by."""

    config: BridgeConfig
    registry: AdapterRegistry
    folder: Path  # of the plans
    run_id: str
    is_heldout: Callable[[Episode], bool]


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run of before a round, which the round may go on from."""

    episode_id: str
    weight: float  # how likely it is drawn


@dataclass(frozen=True, slots=True)
class KnownBefore:
    """What a round knows of tasks and calls, of rounds before it that are over in every execution."""

    task_weights: Mapping[str, float]
    reach: Mapping[CallSpot, float]  # see `runs_to_reach`
    siblings: Sequence[SiblingRewards]
    stored: Mapping[str, StoredRun] = field(default_factory=dict)  # by a name that is the same in every execution


def siblings_of_rounds(store: TraceStore, run_id: str, last_round: int, reward: str) -> list[SiblingRewards]:
    """What siblings at forked calls earned, in a run's rounds up to one."""
    rows = store.sql(_SIBLINGS, (run_id, last_round, reward))
    return [
        SiblingRewards(CallSpot(node, number), tuple(forks) if parent is None else (parent, *forks))
        for node, number, parent, forks in rows
    ]


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that may be forked next."""

    choice: ForkChoice
    run: Trajectory
    action: Action
    blind: bool
    stored: bool = False


def _started(run: Trajectory, forked_action: str) -> int:
    """When the call was made that was forked, or the one that was made in its place."""
    starts = [action.started_ns for action in run.actions if action.action_id == forked_action]
    return starts[0] if starts else min(a.started_ns for a in run.actions if a.replayed_from is None)


class RoundForks:
    """The forks of one round, as a store holds the round now.

    Args:
        plan: of the round's whole runs, which are all played.
        known: makes what is known before the round; called only where a wave is to be planned.
        runs: of the round, kept from one wave to the next.
    """

    def __init__(
        self,
        rules: ForkRules,
        store: TraceStore,
        plan: RoundPlan,
        *,
        known: Callable[[], KnownBefore],
        runs: RoundRuns,
    ) -> None:
        self._rules, self._store, self._plan, self._known, self._round_runs = rules, store, plan, known, runs
        self._number = runs.number
        assert rules.config.train.trees is not None
        self._options = rules.config.train.trees
        self._parts: dict[str, PrefixParts] = {}  # of runs that are forked, by episode
        self._stored_runs: dict[str, Trajectory | None] = {}
        self._refusals: Counter[str] = Counter()

    def next_wave(self, played: Collection[EpisodeRequest]) -> list[EpisodeRequest]:
        """The forks to be played next; empty where the round's tokens are spent.

        Args:
            played: what this process has played of the round, which is not repeated where it failed.

        Raises:
            GraphError: no run of the round can be forked.
        """
        waves = read_waves(self._rules.folder, self._number)
        played_keys = {request.key for request in played}
        planned = [fork for wave in waves for fork in wave]
        if open_requests := [r for r in self._open_requests(planned) if r.key not in played_keys]:
            return open_requests
        wave = self._plan_wave(waves)
        if not wave:
            if not waves and self._refusals:
                ((reason, _),) = self._refusals.most_common(1)
                raise GraphError(f"train.trees: no call of round {self._number} can be forked: {reason}")
            return []
        write_waves(self._rules.folder, self._number, [*waves, wave])
        return self._open_requests(wave)

    # -- what was planned ----------------------------------------------------------------------------------------

    def _open_requests(self, planned: Sequence[PlannedFork]) -> list[EpisodeRequest]:
        """The forks, of those planned, that no finished episode answers; none of a run that is erased since."""
        requests_of_forks = [(fork, requests) for fork in planned if (requests := self._known_requests(fork))]
        # asked of the store once for all: it looks through all episodes of the run
        open_keys = {
            r.key for r in unfinished_requests(self._store, [r for _, of_fork in requests_of_forks for r in of_fork])
        }
        requests = []
        for fork, of_fork in requests_of_forks:
            if any(request.key in open_keys for request in of_fork):
                requests += [r for r in self._to_requests(fork) if r.key in open_keys]
        return requests

    def _to_requests(self, fork: PlannedFork) -> list[EpisodeRequest]:
        parts = self._run_parts(fork.episode)
        run = parts.run
        prefix = self._prefix(parts, fork.action)
        seed = self._rules.config.seed
        planned = plan_forks(run, prefix, ForkChange(), run_id=self._rules.run_id, samples=fork.forks, seed=seed)
        place = f"{fork.task}/{fork.sample}/{fork.node}:{fork.call}"
        if fork.stored:  # runs of several rounds may have this place
            parent = run.trajectory.episode
            place = f"{parent.run_id}/{parent.round}/{place}"
        return [
            replace(
                request,
                round=self._number,
                seed=derived_seed(seed, self._number, place, sample=request.sample),
                tags={BLIND_FORK: "yes"} if fork.blind else {},
                adapters=self._adapters if fork.stored else request.adapters,
            )
            for request in planned
        ]

    def _known_requests(self, fork: PlannedFork) -> list[EpisodeRequest]:
        """Those by which the store knows a fork; none where its run is erased since."""
        parent = self._stored_run(fork.episode) if fork.stored else None
        episode = self._episodes.get(fork.episode) if parent is None else parent.episode
        return fork_to_known_requests(fork, episode, self._rules.run_id, number=self._number)

    # -- what is planned next ------------------------------------------------------------------------------------

    def _plan_wave(self, waves: Sequence[Wave]) -> Wave:
        planned = [fork for wave in waves for fork in wave]
        budget = self._fork_budget()
        left = budget - self._spent(planned)
        stored_forks = [fork for fork in planned if fork.stored]
        if len(stored_forks) == len(planned) and self._options.stored_share:  # else their turn is over
            stored_left = min(left, self._options.stored_share * budget - self._spent(stored_forks))
            # forks of a stored run are compared with each other alone: two or none
            if wave := self._fill_wave(stored_left, self._stored_calls(stored_forks), least=2):
                return wave
        own_forks = [fork for fork in planned if not fork.stored]
        walks = self._options.go_on_from == "best"
        return self._fill_wave(left, self._walked_calls(own_forks) if walks else self._drawn_calls(own_forks))

    def _fill_wave(self, left: float, calls: Iterable[_Call], least: int = 1) -> Wave:
        costs = ((fork, fork.tokens) for fork in self._forkable(calls))
        filled = fill_wave(left, costs, self._options.samples, least=least)
        return tuple(replace(fork, forks=count) for fork, count in filled)

    def _fork_budget(self) -> float:
        """Tokens of the round that its whole runs left."""
        chains = [self._attempts[request.key] for request in self._plan.planned if request.key in self._attempts]
        if not chains:
            return 0.0
        chain_tokens = sum(sampled_count(each.actions) for each in chains)
        return self._rules.config.train.episodes_per_round * chain_tokens / len(chains) - chain_tokens

    def _spent(self, planned: Sequence[PlannedFork]) -> int:
        """The tokens of some forks. One that failed counts as what it was expected to cost, so that no round goes on
        for ever; of several attempts at a request the last one counts."""
        spent = 0
        for fork in planned:
            for request in self._known_requests(fork):
                attempt = self._attempts.get(request.key)
                tokens = 0 if attempt is None else sampled_count(attempt.actions)
                is_whole = attempt is not None and attempt.episode.outcome != "failed" and tokens
                spent += tokens if is_whole else max(tokens, fork.tokens)
        return spent

    def _order(self) -> list[ForkChoice]:
        known = self._known()
        return draw_forks(
            [(request.task["id"], request.sample) for request in self._plan.planned],
            known.task_weights,
            spots_to_weights(known.reach, known.siblings),
            key=f"{self._rules.config.seed}/forks/{self._number}",
        )

    def _stored_calls(self, planned: Sequence[PlannedFork]) -> Iterator[_Call]:
        """A call of each stored run in the order of the draw, behind the one that was planned last.

        Which call is drawn by how undecided calls were; one before which there is none would be a whole run again.
        """
        key, rounds = f"{self._rules.config.seed}/stored/{self._number}", self._known()
        order = draw_order({name: run.weight for name, run in rounds.stored.items()}, key)
        planned_ids = {fork.episode for fork in planned}
        places = [n for n, name in enumerate(order) if rounds.stored[name].episode_id in planned_ids]
        for name in order[max(places, default=-1) + 1 :]:
            run = self._stored_run(rounds.stored[name].episode_id)
            if run is None or not self._is_learned_from(run):
                continue
            begun = min((action.started_ns for action in run.actions), default=0)
            spots = {
                spot: action
                for spot, action in actions_to_spots(run.actions, self._nodes).items()
                if action.started_ns > begun
            }
            weights = spots_to_weights(dict.fromkeys(spots, 1.0), rounds.siblings)
            for spot in draw_spots(weights, f"{key}/{name}")[:1]:
                choice = ForkChoice(run.episode.task_id, run.episode.sample, spot)
                yield _Call(choice, run, spots[spot], blind=False, stored=True)

    def _drawn_calls(self, planned: Sequence[PlannedFork]) -> Iterator[_Call]:
        """Calls of whole runs in the order of the draw, behind the one that was planned last."""
        runs = self._whole_runs
        order = self._order()
        after = planned[-1].choice if planned else None
        for choice in order[order.index(after) + 1 if after in order else 0 :]:
            run = runs.get((choice.task_id, choice.sample))
            action = None if run is None else actions_to_spots(run.actions, self._nodes).get(choice.spot)
            if run is not None and action is not None:
                yield _Call(choice, run, action, blind=True)

    def _walked_calls(self, planned: Sequence[PlannedFork]) -> Iterator[_Call]:
        """The next call of every walk: of the run that earned most of those that were forked last, and their forks.

        Walks that are less far come first, and among these the runs in the order of the draw.
        """
        walked: dict[tuple[str, int], list[PlannedFork]] = {}
        for fork in planned:
            walked.setdefault((fork.task, fork.sample), []).append(fork)
        roots = list(dict.fromkeys((choice.task_id, choice.sample) for choice in self._order()))
        for task_id, sample in sorted(roots, key=lambda root: len(walked.get(root, ()))):
            steps = walked.get((task_id, sample))
            run = self._best(steps[-1]) if steps else self._whole_runs.get((task_id, sample))
            if run is None:
                continue
            begin = _started(run, steps[-1].action) if steps else None
            spots = actions_to_spots(run.actions, self._nodes)
            for spot, action in spots.items():  # by their start
                if begin is None or action.started_ns > begin:
                    yield _Call(ForkChoice(task_id, sample, spot), run, action, blind=begin is None)
                    break

    def _best(self, fork: PlannedFork) -> Trajectory | None:
        """Of a run and its forks at a call the one that earned most; the run, or the first fork, of several."""
        own = [each for each in self._trajectories if each.episode.episode_id == fork.episode]
        forks = [each for each in self._trajectories if episode_to_fork(each.episode) == fork.point]
        runs = [*own, *sorted(forks, key=lambda each: each.episode.sample)]
        reward = self._rules.config.train.trainer.reward
        scored = [each for each in runs if self._is_learned_from(each)]
        return max(scored, key=lambda each: each.team_reward(reward) or 0.0, default=None)

    def _forkable(self, calls: Iterable[_Call]) -> Iterator[PlannedFork]:
        """Those of some calls that can be forked, with what a fork should cost."""
        for call in calls:
            run, episode_id = call.run, call.run.episode.episode_id
            try:
                prefix = self._prefix(self._run_parts(episode_id), call.action.action_id)
            except (BridgeError, StoreError) as error:
                if not call.stored:  # the round can do without stored runs
                    self._refusals[str(error).replace(episode_id, episode_id[:12]).removeprefix("fork: ")] += 1
                continue
            given_ids = {given.call.action_id for given in prefix.given}
            rest = [each for each in run.actions if each.action_id not in given_ids]
            yield PlannedFork(
                call.choice.task_id,
                call.choice.sample,
                node=call.choice.spot.node,
                call=call.choice.spot.number,
                episode=episode_id,
                action=call.action.action_id,
                forks=self._options.samples,
                tokens=max(1, sampled_count(rest)),
                blind=call.blind,
                stored=call.stored,
            )

    @property
    def _nodes(self) -> tuple[str, ...]:
        return self._rules.config.graph.nodes

    @cached_property
    def _whole_runs(self) -> dict[tuple[str, int], Trajectory]:
        chains = [each for each in self._trajectories if each.episode.fork_action is None]
        return {(t.episode.task_id, t.episode.sample): t for t in chains if self._is_learned_from(t)}

    def _is_learned_from(self, run: Trajectory) -> bool:
        reward = run.team_reward(self._rules.config.train.trainer.reward)
        came_off = run.episode.outcome != "failed" and not self._rules.is_heldout(run.episode)
        return came_off and reward is not None and math.isfinite(reward)

    @cached_property
    def _trajectories(self) -> list[Trajectory]:
        """The attempts at the round's episodes that count, by their start."""
        replaced = replaced_attempts(self._store, self._rules.run_id)
        return [each for each in self._round_runs.read(self._store) if each.episode.episode_id not in replaced]

    @cached_property
    def _attempts(self) -> dict[Key, Trajectory]:
        """Of every request of the round that was played the attempt that counts."""
        return {episode_to_key(attempt.episode): attempt for attempt in self._trajectories}

    @cached_property
    def _adapters(self) -> dict[str, int]:
        """The versions that play the round."""
        whole_runs = (run for run in self._trajectories if run.episode.fork_action is None)
        return next((run.episode.adapters for run in whole_runs), {})

    def _stored_run(self, episode_id: str) -> Trajectory | None:
        """A run of before the round; None where it is erased since."""
        if episode_id not in self._stored_runs:
            self._stored_runs[episode_id] = self._store.trajectory(episode_id)
        return self._stored_runs[episode_id]

    @cached_property
    def _episodes(self) -> dict[str, Episode]:
        return {each.episode.episode_id: each.episode for each in self._trajectories}

    def _run_parts(self, episode_id: str) -> PrefixParts:
        if episode_id not in self._parts:
            run = spans_to_parent(self._store.spans(episode_id))
            refuse_other_models(run, self._rules.config, self._rules.registry)
            self._parts[episode_id] = PrefixParts(run)
        return self._parts[episode_id]

    def _prefix(self, parts: PrefixParts, action_id: str) -> RecordedPrefix:
        call = next(call for call in parts.run.calls if call.action_id == action_id)
        return run_to_prefix(parts.run, call, parts=parts)
