"""Owns: what recording does for each run, once for as much as it can.

- A second run of a graph analyses no function again; the texts of a run are searched together, and written in one go.
- A graph without a checkpointer is not asked about checkpoints; a span is no span of OpenTelemetry's SDK.
- Random bits are drawn for many spans at once; the fast encoder alone writes a line of the journal; the frame of a
  node is looked for where it was the last time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, TypedDict

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from opentelemetry.sdk import trace as sdk

from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.recording import function_reads, open_span, state_reads
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.redaction import Redactor
from marft_bridge.recording.wrap import wrap
from trace_store import journal as journal_module
from trace_store.journal import Journal

KEY = "sk-proj-abcdefghijklmnopqrstuvwxyz0123456789ABCD"


class Text(TypedDict):
    text: str


def two_calls(checkpointer: Any = None) -> Any:
    """START -> first -> second -> END with one call in each: five spans."""
    model = ScriptedPolicy(script=lambda _node, prompt, _random: prompt)
    graph = StateGraph(Text)

    def first(state: Text) -> dict[str, str]:
        return {"text": model.invoke(state["text"]).text}

    def second(state: Text) -> dict[str, str]:
        return {"text": model.invoke(state["text"]).text}

    graph.add_node("first", first)
    graph.add_node("second", second)
    graph.add_edge(START, "first")
    graph.add_edge("first", "second")
    graph.add_edge("second", END)
    return graph.compile(checkpointer=checkpointer)


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    recorder = Recorder(Journal(tmp_path / "journal"))
    yield recorder
    recorder.journal.close()
    assert (recorder.failures, recorder.losses.spans) == (0, 0)


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """A list that gets the first argument after `self` of each call of `owner.name` from now on."""
    original, arguments = getattr(owner, name), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        arguments.append(args[1] if len(args) > 1 else None)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return arguments


def test_a_second_run_of_a_graph_analyses_no_function_again(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    analysed = count_calls(monkeypatch, function_reads, "code_to_reads")
    graph = wrap(two_calls(), recorder)
    graph.invoke({"text": "x"})
    assert len(analysed) == 2
    graph.invoke({"text": "x"})
    assert len(analysed) == 2


def test_the_texts_of_a_run_are_searched_together_and_one_by_one_only_where_one_is_suspect(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder._processor.privacy._redactor = Redactor(["secrets"])
    searched = count_calls(monkeypatch, Redactor, "passes")
    graph = wrap(two_calls(), recorder)
    graph.invoke({"text": "harmless"})
    assert len(searched) == 1
    assert searched[0].count("harmless") >= 4  # both prompts and both answers
    graph.invoke({"text": KEY})
    assert len(searched) == 1 + 1 + 5  # the run, then each of its spans
    assert recorder.losses.redactions["openai_key"] >= 4


def test_the_spans_of_a_run_are_written_in_one_go(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = count_calls(monkeypatch, Journal, "append_lines")
    wrap(two_calls(), recorder).invoke({"text": "x"})
    assert [lines.count(b"\n") for lines in writes] == [5]


@pytest.mark.parametrize(("checkpointer", "noted_count"), [(None, 0), (InMemorySaver(), 1)])
def test_a_graph_without_a_checkpointer_is_not_asked_about_checkpoints(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, checkpointer: Any, noted_count: int
) -> None:
    starts = count_calls(monkeypatch, Recorder, "note_loop_start")
    checkpoints = count_calls(monkeypatch, Recorder, "note_checkpoint")
    wrap(two_calls(checkpointer), recorder).invoke({"text": "x"}, {"configurable": {"thread_id": "t"}})
    assert len(starts) == noted_count
    assert bool(checkpoints) == bool(noted_count)


def test_recording_makes_no_span_of_opentelemetry_s_sdk(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_calls(monkeypatch, sdk.Span, "__init__")
    wrap(two_calls(), recorder).invoke({"text": "x"})
    assert made == []


def test_random_bits_are_drawn_for_many_spans_at_once(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = wrap(two_calls(), recorder)
    graph.invoke({"text": "x"})
    draws: list[int] = []
    spare_count = len(open_span._spare_ids)

    def draw(size: int) -> bytes:
        draws.append(size)
        return os.urandom(size)

    monkeypatch.setattr(open_span, "os", SimpleNamespace(urandom=draw))
    for _ in range(20):
        graph.invoke({"text": "x"})
    # Each run has five spans and one trace, whose id has the size of two.
    assert len(draws) == -((spare_count - 20 * 7) // open_span._DRAWN_IDS)


def test_a_line_of_json_values_is_written_by_the_fast_encoder_alone(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_lines = count_calls(monkeypatch, journal_module, "_value_to_json")
    wrap(two_calls(), recorder).invoke({"text": "x"})
    assert slow_lines == []


def test_the_frame_of_a_node_is_looked_for_where_it_was_the_last_time(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = wrap(two_calls(), recorder)
    graph.invoke({"text": "x"})
    depths: list[int] = []

    def getframe(depth: int = 0) -> FrameType:
        depths.append(depth)
        return sys._getframe(depth + 1)

    monkeypatch.setattr(state_reads, "sys", SimpleNamespace(_getframe=getframe))
    graph.invoke({"text": "x"})
    assert len(depths) == 2  # one for each call
    assert min(depths) > 5  # and not from the innermost frame on
