"""Teams and held-out tasks -> stored episodes: the plan, and how far it is followed.

Every team runs the same tasks with the same samples and seeds, one after the other on each (task, sample), so that
what the machines do to one they do to all. Invariants: tasks come in an order that the seed decides and no outcome
does; a plan that is resumed is the plan that was begun; a candidate that is settled runs no further, and with it the
teams that were mixed for its sake. It knows neither servers nor figures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from marft_bridge.comparison.stopping import Scores, Standing, equal_looks, fewest_tasks, scores_to_standing
from marft_bridge.comparison.variants import Lineup, Team
from marft_bridge.config import BridgeConfig
from marft_bridge.errors import ConfigError
from marft_bridge.rollouts import EpisodeRequest, plan_episodes, task_order
from trace_store.store import TraceStore

Task = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a comparison runs."""

    run_id: str
    lineup: Lineup
    tasks: tuple[dict[str, Any], ...]  # in the order in which they run
    samples: int
    seed: int
    temperature: float | None
    metric: str
    looks: tuple[int, ...] = ()  # numbers of tasks; none: nobody looks before the end

    def requests(self, teams: Sequence[Team], first: int, last: int) -> list[EpisodeRequest]:
        """Tasks `first` to `last` (left out), task by task, sample by sample, the teams next to each other."""
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
        return [replace(each, variant=team.name, adapters=team.adapters) for each in planned for team in teams]

    def task_ids(self) -> list[str]:
        """Of all tasks, in the order in which they run."""
        return [str(task["id"]) for task in self.tasks]

    def content(self) -> dict[str, Any]:
        """As JSON values: what a resumed comparison must find again."""
        ids = json.dumps(self.task_ids())
        return {
            "variants": [team.content() for team in self.lineup.all],
            "tasks": len(self.tasks),
            "task_ids": hashlib.sha256(ids.encode()).hexdigest(),
            "samples_per_task": self.samples,
            "seed": self.seed,
            "temperature": self.temperature,
            "metric": self.metric,
            "looks": list(self.looks),
        }


@dataclass(slots=True)
class Progress:
    """How far a plan was followed."""

    tasks: dict[str, int] = field(default_factory=dict)  # team -> tasks that it ran
    standings: dict[str, Standing] = field(default_factory=dict)  # candidate -> where it stands, if one looks
    looks: list[int] = field(default_factory=list)

    @property
    def used(self) -> int:
        """Tasks that at least two variants ran."""
        return max(self.tasks.values(), default=0)


def with_known_metric(config: BridgeConfig, store: TraceStore) -> BridgeConfig:
    """Has the reward that is trained on decide, where nobody said which one does and none has the default's name.

    What a function of the app gives is known only from what it gave before: the rewards in the store.
    """
    options, trained = config.compare, config.train.trainer.reward
    known = {name for (name,) in store.sql("SELECT DISTINCT name FROM episode_reward")}
    if "metric" in options.model_fields_set or options.metric in known or trained not in known:
        return config
    return config.model_copy(update={"compare": options.model_copy(update={"metric": trained})})


def config_to_plan(config: BridgeConfig, run_id: str, lineup: Lineup, heldout: Sequence[dict[str, Any]]) -> Plan:
    """`[compare]` and the held-out tasks into what is run.

    Raises:
        ConfigError: there are too few tasks for looks on the way.
    """
    options = config.compare
    tasks = tuple(task_order(heldout, config.seed)[: options.tasks])
    needed = fewest_tasks(len(lineup.candidates))
    if options.stop_early and len(tasks) < needed:
        raise ConfigError(
            f"compare.stop_early: {len(tasks)} tasks settle nothing, however clear; take {needed} or more"
        )
    looks = equal_looks(len(tasks), options.looks) if options.stop_early else ()
    return Plan(
        *(run_id, lineup, tasks, options.samples_per_task, config.seed, options.temperature, options.metric), looks
    )


def refuse_other_plan(store: TraceStore, plan: Plan) -> None:
    """Raises ConfigError where the run that is resumed began with something else."""
    begun = next((run.config.get("plan") for run in store.runs() if run.run_id == plan.run_id), None)
    if begun is None:
        return
    now = plan.content()
    for key, value in now.items():
        if begun.get(key) != value:
            was, will_be = _shown(key, begun.get(key)), _shown(key, value)
            raise ConfigError(
                f"compare --resume: {plan.run_id} began with {was}, now it would be {will_be}; "
                "start a new comparison without --resume"
            )


def _shown(key: str, value: Any) -> str:
    if key == "task_ids":
        return "other tasks" if value is not None else "no record of its tasks"
    if key != "variants":
        return f"{key} = {value}"
    return "; ".join(f"{each['name']} = {each['adapters'] or each['app']}" for each in value or [])


def follow_plan(
    plan: Plan,
    run: Callable[[Sequence[EpisodeRequest]], None],
    scores_of: Callable[[str], Scores],
    check: Callable[[], None] = lambda: None,
) -> Progress:
    """Runs the plan, as far as its looks let it.

    Args:
        run: the episodes of these requests that are not there yet; returns when they are stored.
        scores_of: a team's scores until now.
        check: is called after the first task, and again after every look, and may raise.
    """
    progress = Progress()
    active = list(plan.lineup.all)
    first = 0
    for stop in sorted({1, *(plan.looks or (len(plan.tasks),))}):
        run(plan.requests(active, first, stop))
        first = stop
        progress.tasks.update(dict.fromkeys((team.name for team in active), stop))
        check()
        if stop in plan.looks:
            progress.looks.append(stop)
            active = _after_look(plan, progress, active, scores_of)
            if len(active) < 2:
                break
    return progress


def _after_look(
    plan: Plan, progress: Progress, active: Sequence[Team], scores_of: Callable[[str], Scores]
) -> list[Team]:
    """The teams that go on."""
    lineup = plan.lineup
    base = scores_of(lineup.base.name)
    for team in lineup.candidates:
        if team in active:
            standing = scores_to_standing(
                team.name,
                plan.task_ids(),
                base,
                scores_of(team.name),
                looks=progress.looks,
                candidates=len(lineup.candidates),
                seed=plan.seed,
            )
            if standing is not None:
                progress.standings[team.name] = standing
    settled = {name for name, standing in progress.standings.items() if standing.stopped}
    if all(team.name in settled for team in lineup.candidates):
        return []
    idle = {team.name for team in lineup.between} if lineup.mixed_candidate in settled else set()
    return [team for team in active if team.name not in settled | idle]


_SCORES = """
SELECT e.task_id, e.sample, r.value FROM episodes e JOIN episode_reward r USING (episode_id)
WHERE e.run_id = ? AND e.variant = ? AND r.name = ? ORDER BY e.started_ns, e.episode_id
"""


def stored_scores(store: TraceStore, run_id: str, variant: str, metric: str) -> dict[tuple[str, int], float]:
    """(task, sample) -> the metric of the variant's latest episode that has it."""
    rows = store.sql(_SCORES, (run_id, variant, metric))
    return {(task, sample): value for task, sample, value in rows}
