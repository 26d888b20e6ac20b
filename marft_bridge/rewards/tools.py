"""Signals about tools, from the spans of a run: tool_success, tool_error_rate, tool_selection_accuracy.

A tool call failed when its span ended with an error. Invariant: a run that called no tool has no rate: the reward is
absent, which is not 0. Formulas with hand-worked examples are in docs/rewards.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from marft_bridge.common.errors import GraphError
from marft_bridge.rewards.contract import Earned, Kind, RewardOptions, RunView
from marft_bridge.rewards.facts import Measurement, ToolCall, mean, measurements_to_earned, run_to_tool_calls
from trace_store.records import RewardScope


class ToolSuccessOptions(RewardOptions):
    """Whether the tools that were called succeeded: a failure is a tool span that ended with an error."""

    kind: Literal["tool_success"] = "tool_success"
    tools: tuple[str, ...] = ()
    """Only these; none names all. A named one that was not called counts for nothing."""
    mode: Literal["all", "last", "share"] = "all"
    """`all`: 1 if none failed. `last`: 1 if the last one did not. `share`: the share that did not."""
    level: RewardScope = "episode"
    """`step` and `agent`: for the action or agent that requested the tools."""


class ToolErrorRateOptions(RewardOptions):
    """Tool calls that failed, as a share of the tool calls."""

    kind: Literal["tool_error_rate"] = "tool_error_rate"
    tools: tuple[str, ...] = ()
    """Only these; none names all."""
    level: RewardScope = "episode"


class ToolSelectionOptions(RewardOptions):
    """Tool calls that the task expects, over the number of calls or of expected ones, whichever is larger."""

    kind: Literal["tool_selection_accuracy"] = "tool_selection_accuracy"
    expected_from: str = Field(min_length=1)
    """Dotted path into the task: a list of tool names, one for each call; with level `agent`, such a list by agent."""
    ordered: bool = False
    """The calls must also come in that order: what counts is the longest common subsequence."""
    level: Literal["episode", "agent"] = "episode"


_MODES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "all": min,
    "last": lambda values: values[-1],
    "share": mean,
}


def _select_calls(run: RunView, tools: Sequence[str]) -> list[ToolCall]:
    return [call for call in run_to_tool_calls(run) if not tools or call.name in tools]


def _measure(calls: Sequence[ToolCall], value: Callable[[ToolCall], float]) -> list[Measurement]:
    return [
        Measurement(value(call), call.requested_by.action_id if call.requested_by is not None else None, call.agent)
        for call in calls
    ]


async def tool_success(options: ToolSuccessOptions, run: RunView) -> list[Earned]:
    """See `ToolSuccessOptions`."""
    successes = _measure(_select_calls(run, options.tools), lambda call: float(call.ok))
    return measurements_to_earned(options.level, successes, _MODES[options.mode])


async def tool_error_rate(options: ToolErrorRateOptions, run: RunView) -> list[Earned]:
    """See `ToolErrorRateOptions`."""
    failures = _measure(_select_calls(run, options.tools), lambda call: float(not call.ok))
    return measurements_to_earned(options.level, failures, mean)


async def tool_selection_accuracy(options: ToolSelectionOptions, run: RunView) -> list[Earned]:
    """See `ToolSelectionOptions`."""
    expected, calls = run.expected(options.expected_from), run_to_tool_calls(run)
    location = f"{options.expected_from!r} of task {run.task.get('id')!r}"
    if options.level == "episode":
        expected_names = parse_names(expected, location)
        return [Earned(selection_accuracy([call.name for call in calls], expected_names, ordered=options.ordered))]
    if not isinstance(expected, Mapping):
        raise GraphError(f"{location} is not a mapping from agents to lists of tool names, which level 'agent' needs")
    return [
        Earned(
            selection_accuracy(
                [call.name for call in calls if call.agent == agent],
                parse_names(agent_names, f"{location}, agent {agent!r},"),
                ordered=options.ordered,
            ),
            "agent",
            node=str(agent),
        )
        for agent, agent_names in expected.items()
    ]


def parse_names(value: Any, location: str) -> list[str]:
    """A list of names out of a task. Raises GraphError for anything else, at `location`."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise GraphError(f"{location} is not a list of names")
    return list(value)


def selection_accuracy(called: Sequence[str], expected: Sequence[str], *, ordered: bool) -> float:
    """Calls that were expected / max(called, expected); 1 where nothing was expected and nothing called."""
    if not called and not expected:
        return 1.0
    hits = _common_subsequence_length(called, expected) if ordered else (Counter(called) & Counter(expected)).total()
    return hits / max(len(called), len(expected))


def _common_subsequence_length(a: Sequence[str], b: Sequence[str]) -> int:
    # Dynamic programming in one row: row[j] is the length for the names of `a` so far and the first j of `b`.
    row = [0] * (len(b) + 1)
    for a_name in a:
        diagonal = 0
        for j, b_name in enumerate(b, start=1):
            diagonal, row[j] = row[j], diagonal + 1 if a_name == b_name else max(row[j], row[j - 1])
    return row[-1]


KINDS = (
    Kind(ToolSuccessOptions, tool_success),
    Kind(ToolErrorRateOptions, tool_error_rate),
    Kind(ToolSelectionOptions, tool_selection_accuracy),
)
