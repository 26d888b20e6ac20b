"""A run and a goal -> task_completion (1 when every condition is met), goal_progress (the share of conditions met).

Invariant: a condition that cannot be checked (a reward that is absent, a final state that is not stored) makes the
whole reward absent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, model_validator

from marft_bridge.common.distinct_names import DistinctNames
from marft_bridge.common.errors import GraphError
from marft_bridge.rewards.contract import Earned, Kind, RewardOptions, RunView
from marft_bridge.rewards.facts import mean, run_to_tool_calls
from marft_bridge.rewards.tools import parse_names


class _GoalOptions(RewardOptions):
    rewards: dict[str, float] = Field(default_factory=dict)
    """Name of a team reward -> least value."""
    tools: tuple[str, ...] = ()
    """Tools that must have been called without an error at least once."""
    tools_from: str | None = Field(None, min_length=1)
    """Dotted path into the task: a list of such tools."""
    nodes: DistinctNames = ()
    """Nodes that must have called their model."""
    fields: tuple[str, ...] = ()
    """Dotted paths into the final state that must lead to something: not to nothing, an empty text or an empty list."""

    @model_validator(mode="after")
    def _require_condition(self) -> _GoalOptions:
        if not (self.rewards or self.tools or self.tools_from or self.nodes or self.fields):
            raise ValueError("give the goal: one or more of rewards, tools, tools_from, nodes, fields")
        return self

    def required_rewards(self) -> tuple[str, ...]:
        """The rewards among the conditions."""
        return tuple(self.rewards)


class TaskCompletionOptions(_GoalOptions):
    """1 where every condition of the goal is met, else 0."""

    kind: Literal["task_completion"] = "task_completion"


class GoalProgressOptions(_GoalOptions):
    """Share of the conditions of the goal that are met."""

    kind: Literal["goal_progress"] = "goal_progress"


def _check_conditions(options: _GoalOptions, run: RunView) -> Iterator[float]:
    """For each condition of the goal, 1 where it is met, else 0."""
    for name, least in options.rewards.items():
        yield float(run.team_reward(name) >= least)
    tools = list(options.tools)
    if options.tools_from is not None:
        location = f"{options.tools_from!r} of task {run.task.get('id')!r}"
        tools += parse_names(run.expected(options.tools_from), location)
    succeeded_tools = {call.name for call in run_to_tool_calls(run) if call.ok} if tools else set()
    yield from (float(tool in succeeded_tools) for tool in tools)
    acting_nodes = {action.node for action in run.game().actions} if options.nodes else set()
    yield from (float(node in acting_nodes) for node in options.nodes)
    yield from (float(_has_content(run, path)) for path in options.fields)


def _has_content(run: RunView, path: str) -> bool:
    try:
        value = run.answer(path)
    except GraphError:  # the final state has no such path: the condition is not met
        return False
    return value is not None and value != "" and value != [] and value != {}


async def task_completion(options: TaskCompletionOptions, run: RunView) -> list[Earned]:
    """See `TaskCompletionOptions`."""
    conditions = list(_check_conditions(options, run))
    return [Earned(min(conditions))] if conditions else []  # a task that names no tool may leave no condition


async def goal_progress(options: GoalProgressOptions, run: RunView) -> list[Earned]:
    """See `GoalProgressOptions`."""
    conditions = list(_check_conditions(options, run))
    return [Earned(mean(conditions))] if conditions else []


KINDS = (Kind(TaskCompletionOptions, task_completion), Kind(GoalProgressOptions, goal_progress))
