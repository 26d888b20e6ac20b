"""Owns: `marft-bridge replay` and `marft_bridge.testing.replay`, on real stores.

- One line an episode, a summary, JSON; exit code 1 where one diverges; what cannot be replayed is said in one line.
- Runs of a thread are replayed after those that they go on with: turns, resumes, forks. A run that was cut is the same
  up to there. An older record is replayed as far as it goes.
- In an app's own tests a divergence is an AssertionError that names it; the light core is enough.
- One argument is enough: a run, or an episode of the run that other commands find. What was read of a journal is kept
  in a process while it is the same, and what was erased since is not.
- A store is asked as much of each run, however many there are; a thread is in memory while a run of it is to come, and
  an earlier run while it is replayed.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.store.memory import InMemoryStore
from langgraph.types import Command, interrupt
from support.alive import count_alive
from support.edge_rig import says
from support.light_app import write_app
from support.paths import ROOT
from support.traces_rig import traces

from marft_bridge import cli, wrap
from marft_bridge.common.errors import ConfigError, GraphError
from marft_bridge.config.record import RecordOptions
from marft_bridge.replay import command
from marft_bridge.replay.command import Outcome, ReplayedApp, replay_episodes
from marft_bridge.replay.episodes import file_to_run
from marft_bridge.replay.private_memory import PrivateMemory
from marft_bridge.replay.recorded_run import RecordedRun
from marft_bridge.replay.replayed_run import ReplayOptions
from marft_bridge.testing import replay
from marft_bridge.traces.store_reader import KeptJournals
from trace_store import unread
from trace_store.journal import journal_of
from trace_store.records import SpanRow
from trace_store.store import TraceStore

APP = """
from typing import TypedDict

from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langgraph.graph import END, START, StateGraph


class State(TypedDict, total=False):
    question: str
    draft: str
    answer: str


model = GenericFakeChatModel(messages=iter(AIMessage(f"reply {n}") for n in range(ANSWERS)))


def write(state):
    return {"draft": model.invoke("Write: " + state["question"]).text}


def edit(state):
    return {"answer": model.invoke("Edit: " + state["draft"]).text}


builder = StateGraph(State)
builder.add_node("write", write)
builder.add_node("edit", edit)
builder.add_edge(START, "write")
builder.add_edge("write", "edit")
builder.add_edge("edit", END)
graph = builder.compile()
"""


def load(file: Path, text: str) -> Any:
    names: dict[str, Any] = {"__name__": file.stem}
    file.write_text(text)
    exec(compile(text, str(file), "exec"), names)  # noqa: S102 - written above
    return names["graph"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a store of two episodes, and the app beside it, whose model has no answer left."""
    monkeypatch.chdir(tmp_path)
    graph = load(tmp_path / "recorded_app.py", APP.replace("ANSWERS", "10"))
    recorded = wrap(graph, "traces.duckdb")
    recorded.invoke({"question": "How fast?"})
    asyncio.run(recorded.ainvoke({"question": "How slow?"}))
    recorded.recorder.journal.close()
    (tmp_path / "app.py").write_text(APP.replace("ANSWERS", "0"))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run(["replay", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def ids(store: Path) -> list[str]:
    with TraceStore.open(store, read_only=True) as reader:
        return [episode.episode_id for episode in reader.episodes()]


def test_every_episode_is_a_line_and_all_the_same_is_exit_code_0(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "traces.duckdb", "--app", "app.py:graph")
    first, second, summary = out.splitlines()
    assert code == 0
    for line, episode in zip((first, second), ids(project / "traces.duckdb"), strict=True):
        assert line.startswith(episode[:12])
        assert re.search(r": same, 2 calls in \d+\.\d\d s of the app's run, recorded in ", line)
    assert summary.startswith("2 of 2 episodes came out the same, 0 diverged, 0 could not be replayed; the app ran ")


def test_a_divergence_is_named_and_exits_with_1_also_as_json(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "app.py").write_text(APP.replace("ANSWERS", "0").replace("Edit: ", "Improve: "))
    episode = ids(project / "traces.duckdb")[1]
    code, out, _ = run(capsys, "traces.duckdb", episode[:12], "--app", "app.py:graph")
    sentence = 'edit, call 1: message 0 (user) differs at word 0: recorded "Edit: reply 2", now "Improve: reply 2"'
    assert (code, len(out.splitlines())) == (1, 2)
    assert out.splitlines()[0].endswith(f": diverged: {sentence}")
    code, out, _ = run(capsys, "traces.duckdb", "--app", "app.py:graph", "--json")
    whole = json.loads(out)
    assert code == 1
    assert whole["summary"]["diverged"] == 2
    assert whole["episodes"][1]["state"] == "diverged"
    assert whole["episodes"][1]["divergence"] == {
        "kind": "prompt",
        "node": "edit",
        "call": 1,
        "text": "message 0 (user) differs at word 0",
        "recorded": "Edit: reply 2",
        "replayed": "Improve: reply 2",
        "sentence": sentence,
    }


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("traces.duckdb",), "name it with --app my_app.py:graph, or with --config"),
        (("traces.duckdb", "ffff0000", "--app", "app.py:graph"), "replay: no episode begins with 'ffff0000'"),
        (("traces.duckdb", "--app", "app.py:nothing"), "nothing"),
        (("nowhere.duckdb", "--app", "app.py:graph"), "nowhere.duckdb"),
        (("traces.duckdb", "--app", "app.py:graph", "--config", "b.toml"), "--app and --config both say which app"),
    ],
)
def test_a_mistake_is_one_line(
    project: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], line: str
) -> None:
    code, out, errors = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert line in errors
    assert len(errors.splitlines()) == 1


def write_run(project: Path) -> list[str]:
    """Makes the project one with a bridge.toml, whose run folder has the store; the ids of its episodes."""
    (project / "runs/app").mkdir(parents=True)
    for path in project.glob("traces.duckdb*"):
        path.rename(project / "runs/app" / path.name.replace("traces", "store"))
    (project / "bridge.toml").write_text(
        'run = "runs/app"\n[graph]\napp = "app.py:graph"\nreward = "app.py:reward"\n'
        'nodes = ["write"]\ntasks = "t.jsonl"\n'
    )
    return ids(project / "runs/app/store.duckdb")


def test_an_episode_alone_is_one_of_the_run_that_other_commands_find(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, errors = run(capsys, "4be1", "--app", "app.py:graph")
    assert "replay: there is no bridge.toml here; name a run folder" in errors
    first, second = write_run(project)
    for arguments in ((second[:12],), (second[:12], "--run", "runs/app"), (second[:12], "--config", "bridge.toml")):
        code, out, _ = run(capsys, *arguments)
        assert code == 0
        assert [line[:12] for line in out.splitlines()[:-1]] == [second[:12]]
    code, out, _ = run(capsys, first[:12], second[:12])
    assert (code, len(out.splitlines())) == (0, 3)
    code, _, errors = run(capsys, "ffff0000")
    assert (code, errors) == (2, "marft-bridge: replay: no episode begins with 'ffff0000'; `traces list` names them\n")


def test_a_run_alone_and_a_run_with_episodes_are_what_they_were_also_where_its_name_has_the_digits_of_an_episode(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, second = write_run(project)
    (project / "runs/app").rename(project / "fade")
    code, out, _ = run(capsys, "fade", "--app", "app.py:graph")
    assert (code, len(out.splitlines())) == (0, 3)
    code, out, _ = run(capsys, "fade", second[:12], "--app", "app.py:graph")
    assert (code, out[:12], len(out.splitlines())) == (0, second[:12], 2)


def test_an_episode_without_content_is_said_to_have_no_answers(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = load(project / "quiet_app.py", APP.replace("ANSWERS", "10"))
    recorded = wrap(graph, "quiet.duckdb", RecordOptions(content=False))
    recorded.invoke({"question": "How fast?"})
    recorded.recorder.journal.close()
    code, out, _ = run(capsys, "quiet.duckdb", "--app", "app.py:graph")
    assert code == 1
    assert "was recorded without content, so there is no answer to give back" in out.splitlines()[0]


# -- threads ----------------------------------------------------------------------------------------------------------


class Reviewed(TypedDict, total=False):
    ask: str
    log: list[str]


def reviewed(model: Any) -> Any:
    """A draft that somebody approves; what was said before stays on the thread."""

    def write(state: dict[str, Any]) -> dict[str, Any]:
        return {"log": [*state.get("log", []), model.invoke(f"{state['ask']} after {len(state.get('log', []))}").text]}

    def review(state: dict[str, Any]) -> Command[Any]:
        decision = interrupt({"draft": state["log"][-1]})
        return Command(goto=END if decision == "approve" else "write", update={"ask": decision})

    graph = StateGraph(Reviewed)
    graph.add_node("write", write)
    graph.add_node("review", review)
    graph.add_edge(START, "write")
    graph.add_edge("write", "review")
    return graph.compile(checkpointer=InMemorySaver())


def test_turns_resumes_and_forks_of_a_thread_are_replayed_after_what_they_go_on_with(tmp_path: Path) -> None:
    store = tmp_path / "traces.duckdb"
    graph = reviewed(says("one", "two", "three", "four"))
    recorded = wrap(graph, store)
    config: Any = {"configurable": {"thread_id": "t"}}
    recorded.invoke({"ask": "a mail"}, config)
    recorded.invoke(Command(resume="shorter"), config)
    recorded.invoke(Command(resume="approve"), config)
    recorded.invoke({"ask": "another"}, config)
    begin = list(recorded.get_state_history(config))[-2].config  # where the first node was about to run
    recorded.invoke(None, begin)
    recorded.recorder.journal.close()
    episodes = ids(store)
    assert len(episodes) == 5
    quiet = reviewed(says())
    for episode in episodes:
        assert replay(quiet, episode, store=store).divergence is None
    changed = reviewed(says())
    changed.nodes["write"].bound.func = lambda state: {"log": []}
    with pytest.raises(AssertionError, match="an earlier run of the thread of"):
        replay(changed, episodes[3], store=store)


def test_a_later_run_names_the_earlier_one_that_diverged_and_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "traces.duckdb"
    recorded = wrap(reviewed(says("one", "two")), store)
    config: Any = {"configurable": {"thread_id": "t"}}
    recorded.invoke({"ask": "a mail"}, config)
    recorded.invoke(Command(resume="shorter"), config)
    recorded.recorder.journal.close()
    first, second = ids(store)
    (tmp_path / "app.py").write_text(
        "from replay.test_command import reviewed, says\n"
        "graph = reviewed(says())\n"
        "graph.nodes['write'].bound.func = lambda state: {'log': []}\n"
    )
    code, out, _ = run(capsys, str(store), second, "--app", f"{tmp_path / 'app.py'}:graph")
    assert code == 1
    assert f": not replayed: an earlier run of its thread, {first}, did not come out the same: " in out.splitlines()[0]


def test_a_run_that_goes_on_with_one_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, saver_graph = tmp_path / "traces.duckdb", reviewed(says("one", "two"))
    config: Any = {"configurable": {"thread_id": "t"}}
    saver_graph.invoke({"ask": "a mail"}, config)  # unrecorded
    recorded = wrap(saver_graph, store)
    recorded.invoke(Command(resume="approve"), config)
    recorded.recorder.journal.close()
    with pytest.raises(GraphError, match="goes on with a run of its thread that is not in the store"):
        replay(reviewed(says()), ids(store)[0], store=store)


def test_a_run_that_was_cut_is_the_same_up_to_there(tmp_path: Path) -> None:
    store = tmp_path / "traces.duckdb"
    graph = load(tmp_path / "app.py", APP.replace("ANSWERS", "10"))
    recorded = wrap(graph, store)
    steps = recorded.stream({"question": "How fast?"})
    next(steps)
    steps.close()
    recorded.recorder.journal.close()
    replayed = replay(load(tmp_path / "app.py", APP.replace("ANSWERS", "0")), ids(store)[0], store=store)
    assert replayed.call_count == 1
    assert replayed.note == "the recorded run was cut (the stream was closed before its end); the same up to there"


def test_a_run_that_was_streamed_is_the_same_where_the_graphs_output_is_less_than_its_state(tmp_path: Path) -> None:
    class Notes(TypedDict, total=False):
        question: str
        notes: str
        answer: str

    class Answer(TypedDict, total=False):
        answer: str

    def graph_of(last_note: str) -> Any:
        builder = StateGraph(Notes, output_schema=Answer)
        builder.add_node("note", lambda state: {"notes": state["question"] + last_note})
        builder.add_node("answer", lambda state: {"answer": str(len(state["notes"]))})
        builder.add_edge(START, "note")
        builder.add_edge("note", "answer")
        return builder.compile()

    store = tmp_path / "traces.duckdb"
    recorded = wrap(graph_of("!"), store)
    assert list(recorded.stream({"question": "How fast?"}, stream_mode=["updates", "values"]))[-1][1]["notes"]
    assert recorded.invoke({"question": "How fast?"}) == {"answer": "10"}
    recorded.recorder.journal.close()
    for episode_id in ids(store):
        replay(graph_of("!"), episode_id, store=store)
    with pytest.raises(AssertionError, match="the result differs at notes"):
        replay(graph_of("?"), ids(store)[0], store=store)


# -- an app's own tests -----------------------------------------------------------------------------------------------


def test_an_exported_file_is_an_apps_own_regression_test(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, graph = project / "traces.duckdb", load(project / "app.py", APP.replace("ANSWERS", "0"))
    code, text, _ = traces(capsys, "show", ids(store)[0], "--store", store, "--json")
    (project / "episode.json").write_text(text)
    assert code == 0
    assert replay(graph, project / "episode.json").call_count == 2
    changed = load(project / "app.py", APP.replace("ANSWERS", "0").replace("Write: ", "Draft: "))
    with pytest.raises(AssertionError, match=r"is not the same: write, call 1: message 0 \(user\) differs at word 0"):
        replay(changed, project / "episode.json")
    (project / "episode.json").write_text("{}")
    with pytest.raises(GraphError, match="is not what `traces show EPISODE --json` writes"):
        replay(graph, project / "episode.json")


@pytest.mark.parametrize("kind", ["str", "function", "StateGraph", "NoneType"])
def test_what_is_no_compiled_graph_is_named_in_one_line(kind: str, project: Path) -> None:
    apps: dict[str, Any] = {
        "str": "app.py:graph",
        "function": lambda: load(project / "app.py", APP.replace("ANSWERS", "0")),
        "StateGraph": StateGraph(Reviewed),
        "NoneType": None,
    }
    with pytest.raises(GraphError) as raised:
        replay(apps[kind], ids(project / "traces.duckdb")[0], store=project / "traces.duckdb")
    assert str(raised.value) == (
        f"replay: a {kind} is no compiled graph; give the one that .compile() returns, or that the factory makes"
    )


def test_a_replay_works_inside_a_running_loop(project: Path) -> None:
    store, graph = project / "traces.duckdb", load(project / "app.py", APP.replace("ANSWERS", "0"))

    async def replay_here() -> Any:
        return replay(graph, ids(store)[1], store=store)

    assert asyncio.run(replay_here()).divergence is None


def test_an_older_record_is_replayed_and_says_what_it_lacks(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, graph = project / "traces.duckdb", load(project / "app.py", APP.replace("ANSWERS", "0"))
    _, text, _ = traces(capsys, "show", ids(store)[0], "--store", store, "--json")
    parts = json.loads(text)
    for span in parts["spans"]:
        span["attributes"].pop("marft.run_config", None)
    (project / "older.json").write_text(json.dumps(parts))
    assert file_to_run(project / "older.json").is_dated
    replayed = replay(graph, project / "older.json")
    assert replayed.note == "recorded before the record said how a run was started: it was run asynchronously"


@pytest.mark.slow
def test_the_light_core_replays(tmp_path: Path) -> None:
    write_app(tmp_path)
    script = "\n".join(
        [
            "import support.light_core",
            "from marft_bridge import cli, wrap",
            "from graphs.support import build",
            "wrap(build(), 'traces.duckdb').invoke({'question': 'How fast?'})",
            "code = cli.run(['replay', 'traces.duckdb', '--app', 'graphs.support:build'])",
            "import sys; assert not {'torch', 'transformers', 'openai'} & set(sys.modules); sys.exit(code)",
        ]
    )
    (tmp_path / "script.py").write_text(script)
    path = f"{tmp_path}:{ROOT / 'tests'}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "MARFT_QUIET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 episodes came out the same" in done.stdout


# -- what a store is asked --------------------------------------------------------------------------------------------


def remembering(model: Any) -> Any:
    """One call a turn, about what the thread holds."""

    def write(state: dict[str, Any]) -> dict[str, Any]:
        log = state.get("log", [])
        return {"log": [*log, model.invoke(f"{state['ask']} after {len(log)}").text]}

    graph = StateGraph(Reviewed)
    graph.add_node("write", write)
    graph.add_edge(START, "write")
    graph.add_edge("write", END)
    return graph.compile(checkpointer=InMemorySaver(), store=InMemoryStore())


def record_turns(store: Path, turns: int, threads: int = 1) -> list[str]:
    """The ids of the runs of some threads, which take turns."""
    recorded = wrap(remembering(says(*(f"answer {n}" for n in range(turns * threads)))), store)
    for _ in range(turns):
        for thread in range(threads):
            recorded.invoke({"ask": "more"}, {"configurable": {"thread_id": f"t{thread}"}})
    recorded.recorder.journal.close()
    recorded.unwrap()
    return ids(store)


def outcomes_of(store: Path, prefixes: Sequence[str] = ()) -> Iterator[Outcome]:
    return replay_episodes(store, prefixes, ReplayedApp("replay.test_command:quiet"), ReplayOptions())


def quiet() -> Any:
    return remembering(says())


class Asked:
    """How many queries a store is asked, and how many rows they give."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queries = self.rows = 0
        original = TraceStore.sql

        def counted(store: TraceStore, query: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
            rows = original(store, query, params)
            self.queries, self.rows = self.queries + 1, self.rows + len(rows)
            return rows

        monkeypatch.setattr(TraceStore, "sql", counted)

    def while_replaying(self, store: Path, prefixes: Sequence[str] = ()) -> tuple[int, int]:
        before = self.queries, self.rows
        assert all(outcome.is_same for outcome in outcomes_of(store, prefixes))
        return self.queries - before[0], self.rows - before[1]


def test_a_replay_asks_as_many_queries_of_each_run_however_long_its_thread_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = tmp_path / "short.duckdb", tmp_path / "long.duckdb"
    record_turns(short, 2)
    last_id = record_turns(long, 7)[-1]
    asked = Asked(monkeypatch)
    of_short, _ = asked.while_replaying(short)
    of_long, _ = asked.while_replaying(long)
    assert of_long - of_short == 5 * 2  # the two that read the spans of a run
    of_last, _ = asked.while_replaying(long, [last_id])
    assert of_last <= of_long + 5  # to find it, and its own spans twice more


def test_a_named_episode_is_replayed_without_a_row_of_other_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = tmp_path / "few.duckdb", tmp_path / "many.duckdb"
    named = {store: record_turns(store, 1, threads)[0] for store, threads in ((few, 2), (many, 9))}
    asked = Asked(monkeypatch)
    (_, rows_of_few), (_, rows_of_many) = (asked.while_replaying(store, [named[store]]) for store in (few, many))
    assert rows_of_few == rows_of_many


def test_the_checkpoints_of_a_thread_are_let_go_after_its_last_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, alive = tmp_path / "traces.duckdb", weakref.WeakSet[PrivateMemory]()

    class Watched(PrivateMemory):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            alive.add(self)

    monkeypatch.setattr(command, "PrivateMemory", Watched)
    for thread in range(3):
        recorded = wrap(remembering(says("one", "two")), store)
        for _ in range(2):
            recorded.invoke({"ask": "more"}, {"configurable": {"thread_id": f"t{thread}"}})
        recorded.recorder.journal.close()
        recorded.unwrap()
    counts = []
    for outcome in outcomes_of(store):
        assert outcome.is_same
        gc.collect()
        counts.append(len(alive))
    assert counts == [2, 1] * 3  # one is that whose stores all threads share


def test_one_earlier_run_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread's, and those beside it that may have left something in the store."""
    store = tmp_path / "traces.duckdb"
    last_id = record_turns(store, 4, threads=2)[-1]
    original, counts = TraceStore.spans, list[int]()

    def counted(reader: TraceStore, episode_id: str) -> list[SpanRow]:
        counts.append(count_alive(RecordedRun))
        return original(reader, episode_id)

    monkeypatch.setattr(TraceStore, "spans", counted)
    before = count_alive(RecordedRun)
    with TraceStore.open(store) as writer:
        writer.take_in()
        writer.sql("UPDATE episodes SET user_id = 'u'")  # so that the runs of both threads are beside each other
    assert replay(quiet(), last_id, store=store).divergence is None
    assert len(counts) >= 4
    assert max(counts) - before <= 1  # the run itself; of those before it none is left when the next one is loaded


# -- what a journal is asked ------------------------------------------------------------------------------------------


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[int]]:
    """How many bytes of segments were read, one entry for each time; by a process that has replayed nothing yet."""
    sizes, journals, original = list[int](), KeptJournals(), unread.lines_from

    def counted(file: Any, offset: int, **options: Any) -> Any:
        sizes.append(os.fstat(file.fileno()).st_size - offset)
        return original(file, offset, **options)

    monkeypatch.setattr("marft_bridge.testing._journals", journals)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(unread, "lines_from", counted)
    yield sizes
    journals.close()
    assert not list((tmp_path / "temporary").glob("marft-unread-*"))


def test_a_journal_that_nobody_took_in_is_read_once_for_all_replays_of_a_process(
    tmp_path: Path, readings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "traces.duckdb"
    episode_ids = record_turns(store, 1, threads=3)
    (segment,) = journal_of(store).glob("*.segment")
    size = segment.stat().st_size
    readings.clear()  # of `ids`
    for episode_id in episode_ids:
        assert replay(quiet(), episode_id, store=store).divergence is None
    monkeypatch.chdir(tmp_path)
    assert replay(quiet(), episode_ids[0], store="traces.duckdb").divergence is None
    assert readings == [size]
    later_ids = record_turns(store, 1)
    readings.clear()
    (new_id,) = set(later_ids) - set(episode_ids)
    assert replay(quiet(), new_id, store=store).divergence is None
    assert sum(readings) == sum(path.stat().st_size for path in journal_of(store).glob("*.segment")) - size


def test_what_was_erased_is_not_replayed_from_what_was_read_before(
    tmp_path: Path, readings: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "traces.duckdb"
    (episode_id,) = record_turns(store, 1)
    replay(quiet(), episode_id, store=store)
    assert list((tmp_path / "temporary").glob("marft-unread-*"))
    code, _, _ = traces(capsys, "erase", "--older-than", "0h", "--store", store)
    assert code == 0
    with pytest.raises(ConfigError, match="no episode begins with"):
        replay(quiet(), episode_id, store=store)
    assert not list((tmp_path / "temporary").glob("marft-unread-*"))


def test_of_many_stores_the_last_ones_are_kept_and_one_that_is_open_is_read_beside(
    tmp_path: Path, readings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marft_bridge.traces.store_reader._MAX_KEPT", 2)
    journals, stores = KeptJournals(), [tmp_path / f"{number}.duckdb" for number in range(3)]
    for store in stores:
        record_turns(store, 1)
    readings.clear()
    for store in (*stores, stores[2], stores[1], stores[0]):
        with journals.open_for_reading(store) as reader:
            assert reader.counts()["episodes"] == 1
    assert len(readings) == 4  # the first one again: it was let go for the third
    with journals.open_for_reading(stores[0]), journals.open_for_reading(stores[0]) as reader:
        assert reader.counts()["episodes"] == 1
    assert len(readings) == 5
    journals.close()
