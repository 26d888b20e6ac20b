"""Teams and held-out tasks -> the plan of a comparison, and the requests that follow it up to its interim looks.

Every team runs the same tasks with the same samples and seeds, one after the other on each (task, sample), so that
load and faults of the machines affect all teams alike. Invariants: the order of the tasks follows from the seed and
from no outcome; a resumed plan is the plan that was begun; a settled candidate runs no further, nor do the mixed teams
between the base and it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from marft_bridge.common.digests import canonical_json, text_sha256
from marft_bridge.common.errors import ConfigError
from marft_bridge.comparison.stopping import (
    InterimResult,
    Scores,
    equally_spaced_looks,
    min_tasks_to_settle,
    scores_to_interim_result,
)
from marft_bridge.comparison.variants import Lineup, Team
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.rollouts.episode_plan import EpisodeRequest, plan_episodes, task_order
from trace_store.store import TraceStore

Task = Mapping[str, Any]
_JUDGE_ADDRESS = {"base_url", "api_key_env", "allow_remote"}  # where a judge answers; which model it is counts


@dataclass(frozen=True, slots=True)
class Plan:
    """The episodes that a comparison runs: teams x tasks x samples, and its interim looks."""

    run_id: str
    lineup: Lineup
    tasks: tuple[dict[str, Any], ...]  # in the order in which they run
    samples: int
    seed: int
    temperature: float  # that of [sampling] where [compare] has none
    metric: str
    limits: Mapping[str, float | None] = field(default_factory=dict)  # of a call and of an episode, by option
    rewards: Mapping[str, str] = field(default_factory=dict)  # reward -> a function, a value or a digest
    looks: tuple[int, ...] = ()  # numbers of tasks after which the outcomes are tested; none: only at the end

    def requests(self, teams: Sequence[Team], first: int, last: int) -> list[EpisodeRequest]:
        """The requests of tasks `first` to `last` (excluded), by task, then sample, then team."""
        tasks = self.tasks[first:last]
        planned = plan_episodes(
            tasks,
            len(tasks) * self.samples,
            self.samples,
            seed=self.seed,
            run_id=self.run_id,
            split="heldout",
            adapters={},
            temperature=self.temperature,
        )
        return [
            replace(
                request,
                variant=team.name,
                adapters=team.adapters,
                prompts=team.prompts,
                max_tokens=team.max_tokens,
            )
            for request in planned
            for team in teams
        ]

    def task_ids(self) -> list[str]:
        """The ids of all tasks, in the order in which they run."""
        return [str(task["id"]) for task in self.tasks]

    def content(self) -> dict[str, Any]:
        """The plan as JSON values, which a resumed comparison must equal."""
        ids = json.dumps(self.task_ids())
        return {
            "variants": [team.content() for team in self.lineup.all_teams],
            "tasks": len(self.tasks),
            "task_ids": hashlib.sha256(ids.encode()).hexdigest(),
            # A digest, since a task may hold personal data that has to be erasable.
            "task_contents": text_sha256(canonical_json(self.tasks)),
            "samples_per_task": self.samples,
            "seed": self.seed,
            "temperature": self.temperature,
            **self.limits,
            "rewards": dict(self.rewards),
            "metric": self.metric,
            "looks": list(self.looks),
        }


@dataclass(slots=True)
class Progress:
    """How far a plan has been followed."""

    tasks: dict[str, int] = field(default_factory=dict)  # team -> tasks that it ran
    interim_results: dict[str, InterimResult] = field(default_factory=dict)  # by candidate, where the plan has looks
    looks: list[int] = field(default_factory=list)  # that were taken, in tasks

    @property
    def used(self) -> int:
        """The number of tasks that ran in at least two teams."""
        return max(self.tasks.values(), default=0)


def resolve_metric(config: BridgeConfig, store: TraceStore) -> BridgeConfig:
    """Sets compare.metric to the trained reward, where it is not configured and the store lacks its default name.

    The rewards that a function of the app gives are known only from those in the store.
    """
    options, trained_metric = config.compare, config.train.trainer.reward
    stored_metrics = {name for (name,) in store.sql("SELECT DISTINCT name FROM episode_reward")}
    if "metric" in options.model_fields_set or options.metric in stored_metrics or trained_metric not in stored_metrics:
        return config
    return config.model_copy(update={"compare": options.model_copy(update={"metric": trained_metric})})


def config_to_plan(config: BridgeConfig, run_id: str, lineup: Lineup, heldout: Sequence[dict[str, Any]]) -> Plan:
    """`[compare]`, the teams and the held-out tasks into the plan.

    Raises:
        ConfigError: there are too few tasks for interim looks.
    """
    options = config.compare
    tasks = tuple(task_order(heldout, config.seed)[: options.tasks])
    needed_tasks = min_tasks_to_settle(len(lineup.candidates))
    if options.stop_early and len(tasks) < needed_tasks:
        raise ConfigError(
            f"compare.stop_early: {len(tasks)} tasks settle nothing, however clear; take {needed_tasks} or more"
        )
    looks = equally_spaced_looks(len(tasks), options.looks) if options.stop_early else ()
    return Plan(
        run_id=run_id,
        lineup=lineup,
        tasks=tasks,
        samples=options.samples_per_task,
        seed=config.seed,
        temperature=options.temperature or config.sampling.temperature,
        metric=options.metric,
        limits={
            "max_tokens": config.sampling.max_tokens,
            "max_tokens_per_episode": config.collect.max_tokens_per_episode,
            "timeout_s": config.collect.timeout_s,
        },
        rewards=_config_to_rewards(config),
        looks=looks,
    )


def _config_to_rewards(config: BridgeConfig) -> dict[str, str]:
    """Each reward, with its function, its value or the digest of its table: another table computes other values."""
    rewards = {} if config.graph.reward is None else {"graph.reward": config.graph.reward}
    if config.graph.limit_reward is not None:
        rewards["graph.limit_reward"] = f"{config.graph.limit_reward:g}"
    for table in config.rewards:
        rewards[table.name] = text_sha256(canonical_json(table.model_dump(mode="json", exclude=_JUDGE_ADDRESS)))[:16]
    return rewards


def refuse_other_plan(store: TraceStore, plan: Plan) -> None:
    """Raises ConfigError where the run that is resumed began with another plan."""
    stored_plan = next((run.config.get("plan") for run in store.runs() if run.run_id == plan.run_id), None)
    if stored_plan is None:
        return
    current_plan = plan.content()
    for key, value in current_plan.items():
        if key not in stored_plan or stored_plan[key] != value:
            stored_text = _describe_stored_entry(key, stored_plan)
            current_text = _describe_plan_entry(key, value)
            raise ConfigError(
                f"compare --resume: {plan.run_id} began with {stored_text}, now it would be {current_text}; "
                "start a new comparison without --resume"
            )


def _describe_stored_entry(key: str, stored_plan: Mapping[str, Any]) -> str:
    """As `_describe_plan_entry`; a plan of an earlier version lacks entries, and one without a temperature had None."""
    value = stored_plan.get(key)
    if key not in stored_plan or (key == "temperature" and value is None):
        return f"no record of its {_ENTRY_TITLES.get(key, key)}"
    return _describe_plan_entry(key, value)


_ENTRY_TITLES = {"task_ids": "tasks", "task_contents": "tasks' contents"}


def _describe_plan_entry(key: str, value: Any) -> str:
    if key in _ENTRY_TITLES:
        return f"other {_ENTRY_TITLES[key]}"
    if key != "variants":
        return f"{key} = {value}"
    return "; ".join(map(_describe_plan_team, value or []))


def _describe_plan_team(team: Mapping[str, Any]) -> str:
    limit = f" with max_tokens {team['max_tokens']}" if "max_tokens" in team else ""
    return f"{team['name']} = {team['adapters'] or team['app']}{limit}"


def follow_plan(
    plan: Plan,
    run: Callable[[Sequence[EpisodeRequest]], None],
    scores_of: Callable[[str], Scores],
    check: Callable[[], None] = lambda: None,
) -> Progress:
    """Runs the plan until all tasks have run or every candidate is settled.

    Args:
        run: runs those of the requests whose episodes are not stored yet, and returns when they are.
        scores_of: the name of a team -> its scores so far.
        check: is called after the first task, and again after every look, and may raise.
    """
    progress = Progress()
    running = list(plan.lineup.all_teams)
    first = 0
    for stop in sorted({1, *(plan.looks or (len(plan.tasks),))}):
        run(plan.requests(running, first, stop))
        first = stop
        progress.tasks.update(dict.fromkeys((team.name for team in running), stop))
        check()
        if stop in plan.looks:
            progress.looks.append(stop)
            running = _take_look(plan, progress, running, scores_of=scores_of)
            if len(running) < 2:
                break
    return progress


def _take_look(
    plan: Plan, progress: Progress, running: Sequence[Team], scores_of: Callable[[str], Scores]
) -> list[Team]:
    """Tests every candidate that still runs, records the results in `progress` -> the teams that run on."""
    lineup = plan.lineup
    base = scores_of(lineup.base.name)
    for team in lineup.candidates:
        if team in running:
            result = scores_to_interim_result(
                team.name,
                plan.task_ids(),
                base,
                candidate=scores_of(team.name),
                looks=progress.looks,
                candidates=len(lineup.candidates),
                seed=plan.seed,
            )
            if result is not None:
                progress.interim_results[team.name] = result
    settled = {name for name, result in progress.interim_results.items() if result.stopped}
    if all(team.name in settled for team in lineup.candidates):
        return []
    idle_names = {team.name for team in lineup.mixed_only_teams} if lineup.mixed_candidate in settled else set()
    return [team for team in running if team.name not in settled | idle_names]


_SCORES = """
SELECT e.task_id, e.sample, r.value FROM episodes e JOIN episode_reward r USING (episode_id)
WHERE e.run_id = ? AND e.variant = ? AND r.name = ? ORDER BY e.started_ns, e.episode_id
"""


def stored_scores(store: TraceStore, run_id: str, variant: str, metric: str) -> dict[tuple[str, int], float]:
    """(task, sample) -> the metric of the variant's latest episode that has it."""
    rows = store.sql(_SCORES, (run_id, variant, metric))
    return {(task, sample): value for task, sample, value in rows}
