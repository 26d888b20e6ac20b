"""Owns: the whole run is in the record: what went in and out, whose it was, and what it goes on with.

- Input and output of live runs, tags, metadata, user and thread, under the same redaction as everything else.
- Turns, resumes and forks are linked by the checkpoint that was loaded; also from another process; never by thread id.
- Lists, drawings and pages show it.
"""

from __future__ import annotations

import asyncio
import json
import operator
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt
from pydantic import BaseModel
from support.paths import ROOT, TESTS
from support.traces_rig import traces
from support.view_rig import serving

import marft_bridge
from marft_bridge.config.record import RecordOptions
from trace_store import conventions as c
from trace_store.erasure import subject_to_traces
from trace_store.records import Episode
from trace_store.store import TraceStore
from trace_store.threads import episode_to_next, episodes_to_links


class State(TypedDict, total=False):
    q: str
    seen: Annotated[list[str], operator.add]


def asking(*names: str, stops_at: str | None = None) -> StateGraph[Any, Any, Any, Any]:
    """Nodes in a line; the one at which it stops asks the user."""

    def node(name: str) -> Callable[[Any], dict[str, Any]]:
        return lambda _: {"seen": [name + (interrupt("ok?") if name == stops_at else "")]}

    builder = StateGraph(State)
    for name in names:
        builder.add_node(name, node(name))
    for before, after in zip((START, *names[:-1]), names, strict=True):
        builder.add_edge(before, after)
    return builder


def thread(name: str, **config: Any) -> Any:
    return {"configurable": {"thread_id": name}, **config}


def episodes(path: Path) -> list[Episode]:
    with TraceStore.open(path, read_only=True) as store:
        return store.episodes()


def links(path: Path) -> list[tuple[str | None, int | None, int | None]]:
    """(kind, number of the episode that it goes on with, turn) of each episode, in the order of their starts."""
    with TraceStore.open(path, read_only=True) as store:
        ids = [episode.episode_id for episode in store.episodes()]
        found = episodes_to_links(store, ids)
    numbers = {episode_id: number for number, episode_id in enumerate(ids)}
    ordered = [found[episode_id] for episode_id in ids]
    return [(link.kind, numbers.get(link.linked_episode or ""), link.turn) for link in ordered]


def root_attributes(path: Path, number: int = 0) -> dict[str, Any]:
    with TraceStore.open(path, read_only=True) as store:
        spans = store.spans(store.episodes()[number].episode_id)
    return next(span.attributes for span in spans if span.parent_span_id is None)


def test_a_live_run_has_its_input_output_tags_metadata_user_and_thread(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    graph = marft_bridge.wrap(asking("a", "b").compile(checkpointer=InMemorySaver()), path)
    metadata = {"user_id": "ada", "plan": {"name": "pro"}, "marft_subject_id": "s1"}
    graph.invoke({"q": "why"}, thread("t1", tags=["prod", "eu"], metadata=metadata))
    (episode,) = episodes(path)
    assert (episode.thread_id, episode.user_id, episode.subject_id) == ("t1", "ada", "s1")
    assert episode.metadata == {"user_id": "ada", "plan": {"name": "pro"}}
    assert episode.tags == {"prod": "", "eu": ""}
    attributes = root_attributes(path)
    assert json.loads(attributes[c.INPUT]) == {"q": "why"}
    assert json.loads(attributes[c.OUTPUT]) == {"q": "why", "seen": ["a", "b"]}


@pytest.mark.parametrize("key", ["user_id", "langgraph_auth_user_id", "langgraph_user_id"])
def test_a_user_is_known_as_apps_and_langgraphs_server_name_them(tmp_path: Path, key: str) -> None:
    path = tmp_path / "s.duckdb"
    graph = marft_bridge.wrap(asking("a").compile(), path)
    graph.invoke({"q": "x"}, {"configurable": {key: "u7"}})
    graph.invoke({"q": "x"}, {"metadata": {key: 7}})
    assert [episode.user_id for episode in episodes(path)][1] == "7"


class Question(BaseModel):
    text: str
    parts: list[Any]


class Stubborn:
    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __repr__(self) -> str:
        return "no text"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Question(text="x", parts=[{1, 2}]), {"text": "x", "parts": [[1, 2]]}),
        (HumanMessage("hi", id="1"), "hi"),
        ({(1, 2): "x"}, "{'v': {(1, 2): 'x'}}"),
        ([Stubborn()], "{'v': [no text]}"),
        (b"ab", "b'ab'"),
    ],
)
def test_an_input_of_any_type_is_recorded_and_harms_nothing(tmp_path: Path, value: Any, expected: Any) -> None:
    builder = StateGraph(dict)
    builder.add_node("a", lambda state: {"done": True})
    builder.add_edge(START, "a")
    path = tmp_path / "s.duckdb"
    assert marft_bridge.wrap(builder.compile(), path).invoke({"v": value}) is not None
    recorded = json.loads(root_attributes(path)[c.INPUT])
    recorded = recorded["v"] if isinstance(recorded, dict) else recorded
    if isinstance(value, HumanMessage):
        recorded = recorded["data"]["content"]
    assert recorded == expected


def test_privacy_holds_for_what_the_app_says_of_a_run(tmp_path: Path) -> None:
    secret = "sk-ant-api03-" + "a1B2" * 24
    config = thread("t1", tags=[f"tag {secret}"], metadata={"user_id": "ada", "note": secret})
    for name, options in (("redacted", RecordOptions()), ("empty", RecordOptions(content=False))):
        path = tmp_path / f"{name}.duckdb"
        graph = marft_bridge.wrap(asking("a").compile(checkpointer=InMemorySaver()), path, options)
        graph.invoke({"q": f"use {secret}"}, config)
        attributes = root_attributes(path)
        assert secret not in json.dumps(attributes)
        (episode,) = episodes(path)
        assert (episode.thread_id, episode.user_id) == ("t1", "ada")
        assert (c.INPUT in attributes) == (name == "redacted")
        assert bool(episode.metadata) == (name == "redacted")


@pytest.mark.parametrize("is_async", [False, True])
def test_turns_resumes_and_forks_are_told_apart(tmp_path: Path, is_async: bool) -> None:
    path = tmp_path / "s.duckdb"
    graph = marft_bridge.wrap(asking("plan", "ask", stops_at="ask").compile(checkpointer=InMemorySaver()), path)

    def invoke(value: Any, config: Any) -> Any:
        return asyncio.run(graph.ainvoke(value, config)) if is_async else graph.invoke(value, config)

    invoke({"q": "1"}, thread("t"))  # 0: interrupted
    first_stop = graph.get_state(thread("t")).config
    invoke(Command(resume="!"), thread("t"))  # 1
    first_end = graph.get_state(thread("t")).config
    invoke({"q": "2"}, thread("t"))  # 2: interrupted
    invoke({"q": "3"}, thread("t"))  # 3: a new input on an interrupted thread is no resume
    invoke({"q": "1"}, thread("other"))  # 4
    invoke(None, first_stop)  # 5: replays the question of 0
    invoke({"q": "2b"}, first_end)  # 6: another second turn
    assert links(path) == [
        (None, None, 1),
        ("resume", 0, 1),
        ("turn", 1, 2),
        ("turn", 2, 3),
        (None, None, 1),
        ("fork", 0, 1),
        ("fork", 1, 2),
    ]
    stored = episodes(path)
    assert [episode.parent_episode for episode in stored] == [
        None,
        stored[0].episode_id,
        None,
        None,
        None,
        stored[0].episode_id,
        stored[1].episode_id,
    ]
    with TraceStore.open(path, read_only=True) as store:
        nexts = episode_to_next(store, stored[0].episode_id)
    assert nexts == [(stored[1].episode_id, "resume"), (stored[5].episode_id, "fork")]


def test_a_breakpoint_an_edited_state_and_a_failure_are_gone_on_with(tmp_path: Path) -> None:
    path, calls = tmp_path / "s.duckdb", []

    def fail_once(_: Any) -> dict[str, Any]:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("boom")
        return {}

    builder = asking("a", "b")
    builder.add_node("c", fail_once)
    builder.add_edge("b", "c")
    graph = marft_bridge.wrap(builder.compile(checkpointer=InMemorySaver(), interrupt_before=["b"]), path)
    graph.invoke({"q": "1"}, thread("t"))
    graph.update_state(thread("t"), {"q": "edited"})
    with pytest.raises(RuntimeError, match="boom"):
        graph.invoke(None, thread("t"))
    graph.invoke(None, thread("t"))
    assert links(path) == [(None, None, 1), ("resume", 0, 1), ("resume", 1, 1)]


@pytest.mark.parametrize("saver_is_shared", [True, False])
def test_another_graph_on_the_same_thread_is_no_link(tmp_path: Path, saver_is_shared: bool) -> None:
    path, saver = tmp_path / "s.duckdb", InMemorySaver()
    recorder = marft_bridge.instrument(path)
    try:
        first = asking("plan", "ask", stops_at="ask").compile(checkpointer=saver)
        second = asking("plan", "write").compile(checkpointer=saver if saver_is_shared else InMemorySaver())
        first.invoke({"q": "1"}, thread("t"))
        second.invoke({"q": "1"}, thread("t"))
        asking("plan", "write").compile().invoke({"q": "1"}, thread("t"))  # without a checkpointer
        if not saver_is_shared:
            first.invoke(Command(resume="!"), thread("t"))
    finally:
        marft_bridge.uninstrument()
    assert recorder.failures == 0
    rest = [] if saver_is_shared else [("resume", 0, 1)]
    assert links(path) == [(None, None, 1), (None, None, 1), (None, None, None), *rest]


def test_a_function_with_a_checkpointer_and_exit_durability_are_linked(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"

    @entrypoint(checkpointer=InMemorySaver())
    def app(question: str) -> str:
        return question + str(interrupt("ok?"))

    marft_bridge.instrument(path)
    try:
        app.invoke("1", thread("f"))
        assert app.invoke(Command(resume="!"), thread("f")) == "1!"
        graph = asking("plan", "ask", stops_at="ask").compile(checkpointer=InMemorySaver())
        graph.invoke({"q": "1"}, thread("t"), durability="exit")
        graph.invoke(Command(resume="!"), thread("t"), durability="exit")
        graph.invoke({"q": "2"}, thread("t"), durability="exit")
    finally:
        marft_bridge.uninstrument()
    assert links(path) == [(None, None, 1), ("resume", 0, 1), (None, None, 1), ("resume", 2, 1), ("turn", 3, 2)]


SCRIPT = """
import pickle, sys
from collections import defaultdict
from pathlib import Path
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from recording.test_threads import asking, thread
import marft_bridge

# A saver on the disk: what it holds is loaded and saved whole.
folder, value = Path(sys.argv[1]), eval(sys.argv[2])
nodes, saver, file = sys.argv[3].split(","), InMemorySaver(), folder / sys.argv[4]
if file.exists():
    storage, saver.writes, blobs = pickle.loads(file.read_bytes())
    saver.writes = defaultdict(dict, saver.writes)
    saver.blobs.update(blobs)
    for name, namespaces in storage.items():
        for namespace, checkpoints in namespaces.items():
            saver.storage[name][namespace].update(checkpoints)
graph = marft_bridge.wrap(asking(*nodes, stops_at="ask").compile(checkpointer=saver), folder / "s.duckdb")
graph.invoke(value, thread("t"))
storage = {name: dict(namespaces) for name, namespaces in saver.storage.items()}
file.write_bytes(pickle.dumps((storage, dict(saver.writes), dict(saver.blobs))))
"""


def run_in_a_process(folder: Path, value: str, nodes: str = "plan,ask", saver: str = "saver") -> None:
    """One run on the thread `t` in a process of its own, which finds the thread in a file."""
    prelude = f"import sys; sys.path[:0] = [{str(TESTS)!r}, {str(ROOT)!r}]\n"
    command = [sys.executable, "-c", prelude + SCRIPT, str(folder), value, nodes, saver]
    subprocess.run(command, check=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("taken_in", [(), (0,), (1,), (0, 1, 2)])
def test_runs_of_other_processes_are_linked_whatever_was_taken_in(tmp_path: Path, taken_in: tuple[int, ...]) -> None:
    path = tmp_path / "s.duckdb"
    for number, value in enumerate(("{'q': '1'}", "Command(resume='!')", "{'q': '2'}")):
        run_in_a_process(tmp_path, value)
        if number in taken_in:
            with TraceStore.open(path) as store:
                store.take_in()
    assert links(path) == [(None, None, 1), ("resume", 0, 1), ("turn", 1, 2)]
    assert {episode.parent_episode for episode in episodes(path)} == {None}  # no process knew the other's


@pytest.mark.slow
def test_across_processes_another_graph_is_no_link_and_a_new_input_no_resume(tmp_path: Path) -> None:
    run_in_a_process(tmp_path, "{'q': '1'}")  # 0: interrupted
    run_in_a_process(
        tmp_path, "{'q': '1'}", nodes="plan,write", saver="own saver"
    )  # 1: another graph of that thread id
    run_in_a_process(tmp_path, "{'q': '2'}")  # 2: a new input, interrupted too
    run_in_a_process(tmp_path, "Command(resume='!')")  # 3
    assert links(tmp_path / "s.duckdb") == [(None, None, 1), (None, None, 1), ("turn", 0, 2), ("resume", 2, 2)]


@pytest.mark.slow
def test_across_processes_what_another_graph_left_on_the_thread_is_no_link(tmp_path: Path) -> None:
    run_in_a_process(tmp_path, "{'q': '1'}")  # 0: interrupted
    run_in_a_process(tmp_path, "{'q': '1'}", nodes="plan,write")  # 1: another graph in the same file
    run_in_a_process(tmp_path, "{'q': '2'}")  # 2: finds what 1 left
    assert links(tmp_path / "s.duckdb") == [(None, None, 1)] * 3


def test_a_subject_is_erased_with_the_turns_that_repeat_what_was_said(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    graph = marft_bridge.wrap(asking("a").compile(checkpointer=InMemorySaver()), path)
    graph.invoke({"q": "1"}, thread("t", metadata={"marft_subject_id": "ada"}))
    graph.invoke({"q": "2"}, thread("t"))
    graph.invoke({"q": "1"}, thread("other"))
    with TraceStore.open(path) as store:
        store.take_in()
        chosen, ids = subject_to_traces(store, "ada"), [episode.episode_id for episode in store.episodes()]
    assert set(chosen.trace_ids) == set(ids[:2])
    assert chosen.replays == (ids[1],)


def test_recording_adds_nothing_that_an_app_can_see_of_its_thread(tmp_path: Path) -> None:
    seen: list[list[Any]] = []
    for record in (False, True):
        builder, configs = StateGraph(State), []
        builder.add_node("a", lambda _, config, configs=configs: configs.append(config["metadata"]) or {})
        builder.add_edge(START, "a")
        graph: Any = builder.compile(checkpointer=InMemorySaver())
        graph = marft_bridge.wrap(graph, tmp_path / "s.duckdb") if record else graph
        chunks = list(graph.stream({"q": "1"}, thread("t", metadata={"k": 1}), stream_mode=["debug", "checkpoints"]))
        metadata = [snapshot.metadata for snapshot in graph.get_state_history(thread("t"))]
        keys = [sorted(chunk[1].get("payload", chunk[1]).get("metadata", {})) for chunk in chunks]
        names = [sorted(config) for config in configs]
        seen.append([metadata, keys, names])
    assert seen[0] == seen[1]


def test_lists_drawings_and_pages_show_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.duckdb"
    graph = marft_bridge.wrap(asking("plan", "ask", stops_at="ask").compile(checkpointer=InMemorySaver()), path)
    graph.invoke({"q": "what <b>now</b>"}, thread("t1", tags=["prod"], metadata={"user_id": "ada", "plan": "pro"}))
    graph.invoke(Command(resume="!"), thread("t1"))
    graph.invoke({"q": "other"}, thread("t2", tags=["test"]))
    first, second, third = (episode.episode_id for episode in episodes(path))

    def ids(*words: str) -> list[str]:
        code, out, _ = traces(capsys, "list", "--store", path, "--json", *words)
        assert code == 0
        return [episode["episode_id"] for episode in json.loads(out)]

    assert ids("--thread", "t1") == [second, first]
    assert ids("--user", "ada") == ids("--tag", "prod") == [first]
    assert ids("--tag", "pro") == ids("--thread", "t") == []
    assert "t1 turn 1, resume" in traces(capsys, "list", "--store", path)[1]
    _, drawing, _ = traces(capsys, "show", second, "--store", path, "--text")
    assert "thread t1 turn 1" in drawing
    assert f"resumes {first}" in drawing
    assert '{"resume": "!"}' in drawing
    _, drawing, _ = traces(capsys, "show", first, "--store", path)
    assert f"then resume {second}" in drawing
    assert "user ada" in drawing
    assert "tag prod" in drawing
    with serving(path) as served:
        page = served.text(f"/episode?id={first}")
        assert f"/episode?id={second}" in page
        assert "what &lt;b&gt;now" in page
        run = episodes(path)[0].run_id
        assert third[:8] not in served.text(f"/run?id={run}&thread=t1")
        assert first[:8] in served.text(f"/run?id={run}&tag=prod")
