"""Owns: ten thousand runs, 32 at a time, lose no span and leave nothing behind in memory."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any, TypedDict

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.graph import END, START, StateGraph

from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import RecordedGraph, wrap
from trace_store import conventions as names
from trace_store.journal import SUFFIX, Journal, lines_from
from trace_store.records import SpanRow

RUNS, AT_A_TIME, WARM = 10_000, 32, 2_000
SPANS_PER_RUN = 5  # the run, and two nodes with one call each
# What 8,000 runs more may add: half a kilobyte each is less than one forgotten span, and the allocator needs some play.
MAX_RSS_GROWTH = 4 * 2**20
MORE_RUNS = 1024


class Text(TypedDict):
    text: str


class Echo(BaseChatModel):
    """Answers at once with what it was asked."""

    @property
    def _llm_type(self) -> str:
        return "echo"

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=AIMessage(messages[0].text))])


def two_nodes() -> Any:
    model = Echo()

    async def node(state: Text) -> Text:
        return {"text": (await model.ainvoke(state["text"])).text}

    graph = StateGraph(Text)
    graph.add_node("draft", node)
    graph.add_node("edit", node)
    graph.add_edge(START, "draft")
    graph.add_edge("draft", "edit")
    graph.add_edge("edit", END)
    return graph.compile()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


async def run_many(graph: RecordedGraph, numbers: range) -> None:
    waiting = iter(numbers)

    async def work() -> None:
        for number in waiting:
            assert await graph.ainvoke({"text": str(number)}) == {"text": str(number)}

    await asyncio.gather(*(work() for _ in range(AT_A_TIME)))


def spans_per_trace(folder: Path) -> tuple[Counter[str], Counter[str]]:
    """Spans in the journal by trace, and what the roots say that there should be."""
    found: Counter[str] = Counter()
    said: Counter[str] = Counter()
    for path in folder.glob(f"*{SUFFIX}"):
        with path.open("rb") as file:
            for record, _ in lines_from(file, 0, growing=False):
                assert isinstance(record, SpanRow)
                found[record.trace_id] += 1
                said[record.trace_id] += record.attributes.get(names.SPAN_COUNT, 0)
    return found, said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_runs_across_32_tasks_lose_no_span_and_leave_nothing_behind(tmp_path: Path) -> None:
    recorder = Recorder(Journal(tmp_path))
    graph = wrap(two_nodes(), recorder)

    async def soak() -> tuple[int, int]:
        await run_many(graph, range(WARM))
        gc.collect()
        before = resident_bytes()
        await run_many(graph, range(WARM, RUNS))
        gc.collect()
        return before, resident_bytes()

    before, after = asyncio.run(soak())
    recorder.journal.close()
    found, said = spans_per_trace(tmp_path)
    assert len(found) == RUNS
    assert set(found.values()) == {SPANS_PER_RUN}
    assert said == found
    assert recorder._open_runs.snapshot() == {}
    assert (recorder.failures, recorder.failure) == (0, None)
    assert after - before < MAX_RSS_GROWTH


def bytes_held_by_the_recorder() -> int:
    """Memory that was allocated by lines of ours or of OpenTelemetry, and is still in use."""
    gc.collect()
    ours = [tracemalloc.Filter(True, f"*/{package}/*") for package in ("marft_bridge", "trace_store", "opentelemetry")]
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(ours).traces)


@pytest.mark.slow
def test_a_run_that_ended_leaves_no_object_behind(tmp_path: Path) -> None:
    graph = wrap(two_nodes(), Recorder(Journal(tmp_path)))

    async def growth() -> int:
        await run_many(graph, range(64))
        tracemalloc.start()
        try:
            await run_many(graph, range(64))
            settled = bytes_held_by_the_recorder()
            await run_many(graph, range(MORE_RUNS))
            return bytes_held_by_the_recorder() - settled
        finally:
            tracemalloc.stop()

    assert asyncio.run(growth()) < MORE_RUNS * 30
