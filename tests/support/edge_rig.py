"""Recorded graphs -> their edges, as short texts to compare with hand-worked ones; and scripted models."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from pydantic import Field

from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from trace_store.assemble import spans_to_trajectory
from trace_store.journal import read_segment
from trace_store.records import SpanRow, Trajectory


class SaysNext(BaseChatModel):
    """Answers with the next of its messages, and with "ok" when there are none left. Takes tools and ignores them."""

    answers: list[AIMessage] = Field(default_factory=list)

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        answer = self.answers.pop(0) if self.answers else AIMessage("ok")
        return ChatResult(generations=[ChatGeneration(message=answer)])

    @property
    def _llm_type(self) -> str:
        return "says-next"

    def bind_tools(self, tools: Any, **_: Any) -> SaysNext:
        return self


_numbers = itertools.count()


def says(*answers: str | AIMessage) -> SaysNext:
    """A model with these answers."""
    return SaysNext(answers=[AIMessage(answer) if isinstance(answer, str) else answer for answer in answers])


def calls_tool(*names: str, **arguments: Any) -> AIMessage:
    """An answer that calls these tools, each with an id of its own."""
    calls = [{"name": name, "args": arguments, "id": f"call-{next(_numbers)}"} for name in names]
    return AIMessage("", tool_calls=calls)


def run_recorded(graph: Any, graph_input: Any, recorder: Recorder) -> dict[str, Any]:
    """What a compiled graph ends with, run once and recorded."""
    return cast(dict[str, Any], asyncio.run(wrap(graph, recorder).ainvoke(graph_input)))


def recorded_traces(recorder: Recorder) -> list[list[SpanRow]]:
    """The spans of every run, in the order in which the runs began."""
    recorder.journal.sync()
    traces: dict[str, list[SpanRow]] = {}
    for segment in sorted(Path(recorder.journal._folder).glob("*.segment")):
        for record in read_segment(segment)[0]:
            if isinstance(record, SpanRow):
                traces.setdefault(record.trace_id, []).append(record)
    return sorted(traces.values(), key=lambda spans: min(span.start_ns for span in spans))


def recorded_trajectories(recorder: Recorder) -> list[Trajectory]:
    """Every run as a trajectory. Fails when a callback of the recorder failed."""
    assert recorder.failures == 0
    return [spans_to_trajectory(spans) for spans in recorded_traces(recorder)]


def actions_to_labels(trajectory: Trajectory) -> dict[str, str]:
    """Action id -> its node, with a number from 1 where the node acts more than once, in topological order."""
    counts: dict[str, Iterator[int]] = {}
    often = {node for node, count in Counter(action.node for action in trajectory.actions).items() if count > 1}
    labels = {}
    for action in trajectory.actions:
        number = next(counts.setdefault(action.node, itertools.count(1)))
        labels[action.action_id] = f"{action.node}{number}" if action.node in often else action.node
    return labels


def edges_of(trajectory: Trajectory) -> dict[str, str]:
    """`{"trigger": "a>b b>c", "data": "a>b a?c"}`: per kind the edges in order, `?` for a bound."""
    labels = actions_to_labels(trajectory)
    kinds: dict[str, list[str]] = {}
    for edge in trajectory.edges:
        kinds.setdefault(edge.kind, []).append(f"{labels[edge.src]}{'>' if edge.exact else '?'}{labels[edge.dst]}")
    return {kind: " ".join(sorted(edges)) for kind, edges in kinds.items()}


def recorded_edges(recorder: Recorder) -> dict[str, str]:
    """The edges of the only run."""
    (trajectory,) = recorded_trajectories(recorder)
    return edges_of(trajectory)


def node_of(
    model: BaseChatModel, reads: Sequence[str], writes: dict[str, Any], attributes: bool = False
) -> Callable[[Any], dict[str, Any]]:
    """A node that reads these keys of a dict, or `attributes` of an object, calls the model with them, and writes.

    Its code names the keys, as an app's does: what a computed key reads is a bound.
    """
    seen = ", ".join(f"state.{key}" if attributes else f"state[{key!r}]" for key in reads)
    source = f"def node(state):\n    model.invoke(str([{seen}]))\n    return dict(writes)\n"
    return source_to_function(source, model=model, writes=writes)


def source_to_function(source: str, /, **names: Any) -> Callable[..., Any]:
    """The function `node` that this source defines, in which these names are global."""
    exec(source, names)  # noqa: S102 - written by the tests
    return cast(Callable[..., Any], names["node"])
