"""The run that docs/rewards.md works out by hand, and helpers to score runs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from marft_bridge.rewards.contract import Earned, RewardOptions, RunView
from marft_bridge.rewards.registry import AnyReward
from marft_bridge.rewards.scoring import Score, Scorer
from support.sample_spans import SampleTrace
from trace_store.assemble import spans_to_trajectory
from trace_store.records import SpanRow

SECOND = 10**9
TASK = {"id": "t1", "answer": 12, "tools": ["search", "calc"], "ideal": 3}


def example_spans() -> list[SpanRow]:
    """planner and worker in turns, five LLM calls in twelve seconds, three tool calls of which one fails."""
    sample = SampleTrace()
    before: tuple[str, ...] = ()
    turns = [
        # agent, seconds of the call, prompt tokens, sampled tokens, tool (works or not), finish reason
        ("planner", 0, 1, 10, 4, ("search", True), "tool_calls"),
        ("worker", 2, 4, 20, 6, ("calc", False), "tool_calls"),
        ("planner", 5, 6, 30, 2, None, "stop"),
        ("worker", 7, 9, 40, 8, ("calc", True), "tool_calls"),
        ("planner", 10, 11, 50, 5, None, "length"),
    ]
    for number, (agent, begin, end, prompt, sampled, tool, finish) in enumerate(turns, start=1):
        ns = f"{agent}:{number}"
        last = number == len(turns)
        node = sample.node(ns, begin * SECOND, (12 if last else end + 1) * SECOND, step=number, after=before)
        sample.call(
            *(f"call{number}", node, begin * SECOND, end * SECOND),
            PROMPT_IDS=[7] * prompt,
            SAMPLED_IDS=[number] * sampled,
            LOGPROBS=[-0.5] * sampled,
            USAGE_OUTPUT_TOKENS=sampled,
            FINISH_REASONS=[finish],
            RESPONSE_MODEL=f"{agent}@1",
        )
        if tool is not None:
            name, works = tool
            sample.tool(name, node, end * SECOND, end * SECOND + 1, ok=works, node=agent)
        before = (ns,)
    return sample.spans()


def example_run(task: Mapping[str, Any] = TASK, result: Any = None, **changes: Any) -> RunView:
    """That run, as a reward sees it."""
    spans = example_spans()
    return RunView(task, result, spans_to_trajectory(spans), spans, **changes)


def table(**options: Any) -> RewardOptions:
    """One `[[rewards]]` table; its name is its kind unless given."""
    options = {"name": options["kind"], **options}
    return TypeAdapter(AnyReward).validate_python(options)  # type: ignore[no-any-return]


def score(run: RunView, *tables: RewardOptions, known: Mapping[str, float] | None = None, **scorer: Any) -> Score:
    """What these tables find in a run."""
    return asyncio.run(Scorer(tables, **scorer).run_to_score(run, stored=known))


def earned(run: RunView, **options: Any) -> list[Earned]:
    """What one table finds in a run; nothing where it is absent."""
    options = {"name": "it", **options}
    return score(run, table(**options)).earned.get(options["name"], [])


def value(run: RunView, **options: Any) -> float | None:
    """The team's number that one table finds in a run; None where it is absent."""
    found = earned(run, **options)
    assert len(found) <= 1
    return found[0].value if found else None
