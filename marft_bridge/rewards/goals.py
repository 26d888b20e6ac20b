"""How far a run came: task_completion (1 when every condition of a goal is met) and goal_progress (the share that is).

Invariant: a condition that cannot be looked at (a reward that is absent, a final state that is not stored) makes the
whole reward absent. What a good goal is, only the user knows; nothing is judged here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, model_validator

from marft_bridge.errors import GraphError
from marft_bridge.rewards.contract import Earned, Kind, RewardOptions, RunView
from marft_bridge.rewards.facts import mean, run_to_tool_calls
from marft_bridge.rewards.tools import names_of


class _GoalOptions(RewardOptions):
    rewards: dict[str, float] = Field(default_factory=dict)
    """Name of a team reward -> least value."""
    tools: tuple[str, ...] = ()
    """Tools that must have been called without an error at least once."""
    tools_from: str | None = Field(None, min_length=1)
    """Dotted path into the task: a list of such tools."""
    nodes: tuple[str, ...] = ()
    """Nodes that must have called their model."""
    fields: tuple[str, ...] = ()
    """Dotted paths into the final state that must lead to something: not to nothing, an empty text or an empty list."""

    @model_validator(mode="after")
    def _some_condition(self) -> _GoalOptions:
        if not (self.rewards or self.tools or self.tools_from or self.nodes or self.fields):
            raise ValueError("give the goal: one or more of rewards, tools, tools_from, nodes, fields")
        return self

    def reads(self) -> tuple[str, ...]:
        """The rewards among the conditions."""
        return tuple(self.rewards)


class TaskCompletionOptions(_GoalOptions):
    """1 where every condition of the goal is met, else 0."""

    kind: Literal["task_completion"] = "task_completion"


class GoalProgressOptions(_GoalOptions):
    """Share of the conditions of the goal that are met."""

    kind: Literal["goal_progress"] = "goal_progress"


def _met(options: _GoalOptions, run: RunView) -> Iterator[float]:
    for name, least in options.rewards.items():
        yield float(run.team_reward(name) >= least)
    wanted = list(options.tools)
    if options.tools_from is not None:
        where = f"{options.tools_from!r} of task {run.task.get('id')!r}"
        wanted += names_of(run.expected(options.tools_from), where)
    worked = {call.name for call in run_to_tool_calls(run) if call.ok} if wanted else set()
    yield from (float(tool in worked) for tool in wanted)
    acted = {action.node for action in run.game().actions} if options.nodes else set()
    yield from (float(node in acted) for node in options.nodes)
    yield from (float(_leads_to_something(run, path)) for path in options.fields)


def _leads_to_something(run: RunView, path: str) -> bool:
    try:
        found = run.answer(path)
    except GraphError:  # no such place: just what is asked here
        return False
    return found is not None and found != "" and found != [] and found != {}


async def task_completion(options: TaskCompletionOptions, run: RunView) -> list[Earned]:
    """See `TaskCompletionOptions`."""
    met = list(_met(options, run))
    return [Earned(min(met))] if met else []  # a task that names no tool may leave no condition


async def goal_progress(options: GoalProgressOptions, run: RunView) -> list[Earned]:
    """See `GoalProgressOptions`."""
    met = list(_met(options, run))
    return [Earned(mean(met))] if met else []


KINDS = (Kind(TaskCompletionOptions, task_completion), Kind(GoalProgressOptions, goal_progress))
