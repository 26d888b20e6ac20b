"""Scored episodes of one run of the store -> the runs to measure, and the requests for their forks.

Runs are drawn by the seed and never by what they earned, so that a recorded run is one more sample beside its forks.
Invariants: sample j of every level of a run has the seed of sample j of the others, so that what a call does not change
comes out alike on both sides of a difference, and the samples of one level have different seeds; every task gives one
run before any gives a second.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from marft_bridge.agent_credit.substitutes import Substitute
from marft_bridge.common.errors import ConfigError, GraphError
from marft_bridge.fork_credit.run_levels import CallLevels, Level, RunLevels
from marft_bridge.rollouts.episode_plan import EpisodeRequest, Key, derived_seed
from trace_store.records import Episode

_SIZED_RUNS = 8  # from whose forks the number of runs that fit the budget follows


@dataclass(frozen=True, slots=True)
class ChosenRuns:
    """The runs to measure."""

    runs: Sequence[RunLevels]
    refused: Counter[str]  # reason -> episodes that were drawn and cannot be forked


@dataclass(frozen=True, slots=True)
class CreditPlan:
    """The requests of one command."""

    run_id: str
    seed: int
    samples: int  # of each level
    nodes: Sequence[str]
    substitute: Substitute | None  # None: nobody stands in

    def forks_of_run(self, levels: RunLevels) -> int:
        """How many forks of one run there are."""
        stood_in = 0 if self.substitute is None else len(levels.calls)
        return self.samples * (len(levels.levels) + stood_in)

    def tokens_of_run(self, levels: RunLevels) -> int:
        """How many tokens the forks of one run sample where each answer is as long as the recorded one."""
        sampled = {action.action_id: action.sampled_tokens or 0 for action in levels.run.trajectory.actions}
        forked = [*levels.levels, *(call.before for call in levels.calls if self.substitute is not None)]
        given = [sampled[each.call.action_id] for level in forked for each in level.prefix.given]
        return self.samples * (len(forked) * sum(sampled.values()) - sum(given))

    def requests(self, levels: RunLevels) -> list[EpisodeRequest]:
        """The forks of one run."""
        episode = levels.run.trajectory.episode
        requests = [
            request for level in levels.levels for request in self._level_to_requests(level, episode, level.variant)
        ]
        if self.substitute is not None:
            for each in levels.calls:
                requests += self._stand_in_requests(each, episode, self.substitute)
        return requests

    def level_keys(self, level: Level, episode: Episode) -> list[Key]:
        """The keys of the forks of one level."""
        return [request.key for request in self._level_to_requests(level, episode, level.variant)]

    def stand_in_keys(self, call: CallLevels, episode: Episode) -> list[Key]:
        """The keys of the forks in which another one answers for the node of a call; none where nobody stands in."""
        if self.substitute is None:
            return []
        return [request.key for request in self._stand_in_requests(call, episode, self.substitute)]

    def _stand_in_requests(self, call: CallLevels, episode: Episode, substitute: Substitute) -> list[EpisodeRequest]:
        node = [call.call.node]
        adapters, answers = substitute.replace_agents(frozenset(), node, episode.adapters)
        variant = substitute.team_name(frozenset(), node)
        return self._level_to_requests(call.before, episode, variant, adapters=adapters, answers=answers)

    def _level_to_requests(
        self,
        level: Level,
        episode: Episode,
        variant: str | None,
        *,
        adapters: dict[str, int] | None = None,
        answers: dict[str, str] | None = None,
    ) -> list[EpisodeRequest]:
        return [
            EpisodeRequest(
                run_id=self.run_id,
                task=episode.task,
                split=episode.split,
                sample=sample,
                seed=derived_seed(self.seed, None, f"{episode.task_id}/{episode.sample}/forks", sample=sample),
                adapters=dict(episode.adapters) if adapters is None else adapters,
                variant=variant,
                answers=answers or {},
                fork=level.point,
                beginning=level.prefix,
            )
            for sample in range(self.samples)
        ]


def choose_runs(
    episodes: Sequence[Episode],
    to_levels: Callable[[Episode], RunLevels],
    *,
    budget: int,
    forks_of_run: Callable[[RunLevels], int],
    seed: int,
) -> ChosenRuns:
    """Draws runs until their forks fill the budget, as far as the first runs tell how many that are.

    Args:
        to_levels: raises GraphError or ConfigError for an episode that cannot be forked.
        budget: forks, about.

    Raises:
        ConfigError: the runs that can be forked are of fewer than two tasks, or the budget does not reach two runs.
    """
    runs: list[RunLevels] = []
    refused: Counter[str] = Counter()
    wanted = 2
    for episode in _draw_order(episodes, seed):
        if len(runs) >= wanted:
            break
        try:
            levels = to_levels(episode)
        except (GraphError, ConfigError) as error:
            refused[str(error).replace(f"episode {episode.episode_id}", "it")] += 1
            continue
        runs.append(levels)
        if len(runs) <= _SIZED_RUNS:
            mean_forks = sum(map(forks_of_run, runs)) / len(runs)
            wanted = max(2, round(budget / mean_forks))
            if len(runs) > 1 and budget < mean_forks * 1.5:  # one long run says little of the others
                raise ConfigError(
                    f"credit --forks: {budget} forks do not reach two runs, each of which takes {mean_forks:.0f};"
                    " name fewer nodes with --nodes, or more forks"
                )
    if len({each.run.trajectory.episode.task_id for each in runs}) < 2:
        reason = f": {refused.most_common(1)[0][0]}" if refused else ""
        raise ConfigError(f"credit --by forks: the runs that can be forked are of fewer than two tasks{reason}")
    return ChosenRuns(runs, refused)


def _draw_order(episodes: Sequence[Episode], seed: int) -> list[Episode]:
    """A random order in which every task comes once before any comes again."""
    chance = random.Random(seed)
    by_task: dict[str, list[Episode]] = {}
    for episode in sorted(episodes, key=lambda each: (each.task_id, each.sample, each.started_ns)):
        by_task.setdefault(episode.task_id, []).append(episode)
    for each in by_task.values():
        chance.shuffle(each)
    tasks = sorted(by_task)
    chance.shuffle(tasks)
    longest = max(map(len, by_task.values()), default=0)
    return [by_task[task][k] for k in range(longest) for task in tasks if k < len(by_task[task])]
