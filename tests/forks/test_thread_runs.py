"""Owns: runs that an app started itself can be forked: later turns of a thread, resumes, runs from a checkpoint.

- The earlier runs of the thread are replayed first, and each fork goes on from a copy of what they left.
- Nodes call the models that the app was written with; no server is started, no version is known.
- Nothing that the app keeps, of its threads or in its stores, is read or written, whichever graph holds it.
- A fork is replayed and forked itself, from where its parent began.
- What was not recorded, was edited, or does not come out the same is refused in one line before anything is sampled.
"""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from langgraph.types import Command
from rich.console import Console

from marft_bridge import cli, wrap
from marft_bridge.common.errors import BridgeError, ConfigError, EpisodesFailedError, GraphError
from marft_bridge.common.import_name import load_name
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig, toml_to_config
from marft_bridge.config.record import RecordOptions
from marft_bridge.forks.command import ForkOptions, fork
from marft_bridge.forks.fork_plan import spans_to_parent
from marft_bridge.replay.command import ReplayedApp, replay_episodes
from marft_bridge.replay.replayed_run import ReplayOptions
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.testing import replay
from trace_store.records import Trajectory
from trace_store.store import TraceStore
from trace_store.threads import episodes_to_links

APP = """
from collections import Counter
from typing import TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_store
from langgraph.graph import END, START, StateGraph
from langgraph.store.memory import InMemoryStore
from langgraph.types import Command, interrupt


class Model(BaseChatModel):
    calls: list = []

    @property
    def _llm_type(self):
        return "counting"

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        self.calls.append(messages[-1].text)
        return ChatResult(generations=[ChatGeneration(message=AIMessage(f"answer {len(self.calls)}"))])


class State(TypedDict, total=False):
    ask: str
    plan: str
    log: list[str]


model, saver, store, notes = Model(), InMemorySaver(), InMemoryStore(), InMemorySaver()


def note(state):
    return {"log": [*state.get("log", []), state["ask"]]}


diary = StateGraph(State)
diary.add_node("note", note)
diary.add_edge(START, "note")
diary = diary.compile(checkpointer=notes)


def plan(state):
    said = model.invoke(f"plan {state['ask']} knowing {state.get('log', [])}").text
    return {"plan": said}


def write(state):
    known = [item.value["text"] for item in get_store().search(("known",))]
    days = diary.invoke({"ask": state["ask"]}, {"configurable": {"thread_id": "diary"}})["log"]
    said = model.invoke(f"write {state['plan']} {state.get('log', [])} {known} {days}").text
    get_store().put(("known",), said, {"text": said})
    return {"log": [*state.get("log", []), said]}


def review(state):
    first = model.invoke(f"review {state['log'][-1]}").text
    decision = interrupt({"draft": first})
    last = model.invoke(f"settle {first} as {decision}").text
    return {"log": [*state["log"], last]}


def tell(state):
    return {"log": [*state.get("log", []), model.invoke(f"tell {state['plan']} {state.get('log', [])}").text]}


def recall(state):
    known = [item.value["text"] for item in get_store().search(("known",))]
    said = model.invoke(f"write {state['plan']} {known}").text
    get_store().put(("known",), said, {"text": said})
    return {"log": [said]}


def build(path, **nodes):
    graph = StateGraph(State)
    for name, node in ({"plan": plan, "write": write, "review": review} | nodes).items():
        graph.add_node(name, node)
    for one, other in zip((START, *path), (*path, END)):
        graph.add_edge(one, other)
    return graph.compile(checkpointer=saver, store=store)


graph = build(["plan", "write"])
reviewed = build(["plan", "write", "review"])
recalling = build(["plan", "write"], write=recall)
plain = build(["plan", "write"], write=tell)


def embed(texts):
    return [[float(text.count("answer 2")), float(text.count("answer")), 0.1] for text in texts]


indexed = InMemoryStore(index={"dims": 3, "embed": embed})


def recall_likest(state):
    known = get_store().search(("known",), query="answer 2", limit=1)
    said = model.invoke(f"write {state['plan']} {[(item.value, item.score) for item in known]}").text
    get_store().put(("known",), said, {"text": said})
    return {"log": [said]}


likest = build(["plan", "write"], write=recall_likest)
likest.store = indexed


def kept():
    return [len(list(each.list(None))) for each in (saver, notes)] + [len(store.search((), limit=100))]


def reward(task, state):
    return float(len(state["log"]))
"""
T: Any = {"configurable": {"thread_id": "t"}}


class Lab:
    """An app in a file, the store of a run folder that its runs are recorded in, and forks of them."""

    def __init__(self, folder: Path, graph: str = "graph", options: RecordOptions | None = None) -> None:
        self.folder, self.run_folder, self.name = folder, RunFolder(folder / "run"), graph
        (folder / "app.py").write_text(APP)
        (folder / "tasks.jsonl").write_text("".join(json.dumps({"id": f"t{n}", "ask": "x"}) + "\n" for n in range(40)))
        self.run_folder.create()
        self.recorded = wrap(self.load(graph), self.run_folder.store, options)

    def load(self, name: str) -> Any:
        return load_name(f"{self.folder / 'app.py'}:{name}", "app")

    def close(self) -> list[str]:
        """Ends the recording; the ids of the episodes in their order."""
        self.recorded.unwrap()
        self.recorded.recorder.journal.close()
        with TraceStore.open(self.run_folder.store) as store:
            store.take_in()
        return [each.episode.episode_id for each in self.episodes("live")]

    def episodes(self, run_id: str) -> list[Trajectory]:
        with TraceStore.open(self.run_folder.store, read_only=True) as store:
            every = store.trajectories(forks=True)
            return [each for each in every if each.episode.run_id.startswith("fork-") == (run_id != "live")]

    def store_sql(self, statement: str) -> None:
        with TraceStore.open(self.run_folder.store) as store:
            store.sql(statement)

    def config(self, app: str = "app.py") -> BridgeConfig:
        path = self.folder / "bridge.toml"
        path.write_text(
            f"""
run = "{self.run_folder.path}"
[graph]
app = "{self.folder / app}:{self.name}"
nodes = ["plan", "write"]
tasks = "{self.folder / "tasks.jsonl"}"
reward = "{self.folder / "app.py"}:reward"
"""
        )
        return toml_to_config(path)

    def fork(self, episode_id: str, at: str, app: str = "app.py", **options: Any) -> tuple[list[Trajectory], list[str]]:
        """The forks of an episode, and what was printed."""
        text = io.StringIO()
        options = {"samples": 2} | options
        count = len(self.episodes("forks"))
        fork(
            self.config(app),
            ForkOptions(episode_id, at, **options),
            Reporter(Console(file=text, width=400)),
            resume=False,
        )
        lines = [line for line in text.getvalue().splitlines() if not line.endswith(" s]")]
        return self.episodes("forks")[count:], lines


def test_a_later_turn_of_a_thread_is_forked_from_what_the_earlier_ones_left(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    for ask in ("a", "b", "c"):
        lab.recorded.invoke({"ask": ask}, T)
    ids, model, kept = lab.close(), lab.load("model"), lab.load("kept")
    before, call_count = kept(), len(model.calls)
    parent = lab.episodes("live")[2]
    forks, lines = lab.fork(ids[2], "write")
    assert [each.replayed_from for each in forks[0].actions] == [parent.actions[0].action_id, None]
    assert model.calls[call_count:] == 2 * [model.calls[5]]  # the prompt of the third turn's second call
    assert "['answer 2', 'answer 4']" in model.calls[5]
    assert {each.actions[1].completion for each in forks} == {"answer 7", "answer 8"}
    assert kept() == before
    assert lines[0] == (
        f"fork-1: {ids[2][:12]} at write, call 1; 1 call before it given again; 2 earlier runs of its thread replayed;"
        " run from its beginning: the app keeps a store of LangGraph's"
    )
    assert [line.split(" ", 3)[3] for line in lines[1:3]] == ["reward 3", "reward 3"]


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_a_run_that_a_person_resumed_is_forked_before_and_after_the_question(tmp_path: Path, is_async: bool) -> None:
    lab = Lab(tmp_path, "reviewed")
    for graph_input in ({"ask": "a"}, Command(resume="shorter")):
        if is_async:
            asyncio.run(lab.recorded.ainvoke(graph_input, T))
        else:
            lab.recorded.invoke(graph_input, T)
    ids, kept, model = lab.close(), lab.load("kept"), lab.load("model")
    before, calls = kept(), list(model.calls)
    assert [each.split()[0] for each in calls] == ["plan", "write", "review", "review", "settle"]
    (settled, _), _ = lab.fork(ids[1], "review:2")
    assert [each.replayed_from is None for each in settled.actions] == [False, True]
    assert model.calls[5:] == 2 * [calls[4]]
    (asked, _), _ = lab.fork(ids[1], "review:1", text="too long")
    assert model.calls[7:] == 2 * ["settle too long as shorter"]
    assert [asked.episode.outcome, asked.episode.begins] == ["terminated", "resume"]
    (first, _), lines = lab.fork(ids[0], "write")
    assert (first.episode.outcome, first.episode.reason) == ("truncated", "interrupted")
    assert "earlier" not in lines[0]
    assert kept() == before


@pytest.mark.slow
def test_a_run_from_an_earlier_checkpoint_is_forked_from_there(tmp_path: Path) -> None:
    lab = Lab(tmp_path, "plain")
    for ask in ("a", "b"):
        lab.recorded.invoke({"ask": ask}, T)
    history = list(lab.recorded.get_state_history(T))
    after_plan = next(each for each in history if each.next == ("write",) and each.values["ask"] == "a")
    lab.recorded.invoke(None, after_plan.config)
    ids, model = lab.close(), lab.load("model")
    (made, _), _ = lab.fork(ids[2], "write")
    assert model.calls[5:] == [model.calls[4]] * 2
    assert (made.episode.forked, made.episode.from_checkpoint) == (
        True, lab.episodes("live")[2].episode.from_checkpoint,
    )  # fmt: skip


@pytest.mark.slow
def test_a_fork_says_where_its_parent_began_and_is_itself_replayed_and_forked(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    for ask in ("a", "b"):
        lab.recorded.invoke({"ask": ask}, {**T, "metadata": {"user_id": "anna", "marft_subject_id": "s1"}})
    ids = lab.close()
    parent = lab.episodes("live")[1].episode
    (made, _), _ = lab.fork(ids[1], "write")
    fork_id = made.episode.episode_id
    for name in ("thread_id", "user_id", "subject_id", "split", "begins", "from_checkpoint", "task_id", "metadata"):
        assert getattr(made.episode, name) == getattr(parent, name)
    with TraceStore.open(lab.run_folder.store, read_only=True) as store:
        link = episodes_to_links(store, [fork_id])[fork_id]
    assert (link.kind, link.linked_episode) == ("fork", ids[1])
    assert replay(lab.load("graph"), fork_id, store=lab.run_folder.store).call_count == 2
    (again, other), lines = lab.fork(fork_id, "plan")
    assert "1 earlier run of its thread replayed" in lines[0]
    assert (again.episode.parent_episode, again.episode.from_checkpoint) == (fork_id, parent.from_checkpoint)
    assert sorted(lab.load("model").calls[-4:]) == sorted(
        2 * ["plan b knowing ['answer 2']"]
        + [f"write {each.actions[0].completion} ['answer 2'] ['answer 2'] ['a', 'b']" for each in (again, other)]
    )


@pytest.mark.slow
def test_a_threads_forks_are_replayed_beside_the_runs_of_the_thread(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    for ask in ("a", "b"):
        lab.recorded.invoke({"ask": ask}, T)
    ids = lab.close()
    lab.fork(ids[1], "plan")
    app = ReplayedApp(f"{lab.folder / 'app.py'}:graph")
    outcomes = list(replay_episodes(lab.run_folder.store, [], app, ReplayOptions()))
    assert [each.to_line().split(": ")[1].split(",")[0] for each in outcomes] == ["same"] * 4


@pytest.mark.slow
def test_what_other_runs_of_the_user_left_in_the_store_is_there(tmp_path: Path) -> None:
    """Two threads of one user, and one of another, whose run has no answer to give any more and is left out."""
    lab = Lab(tmp_path, "recalling")
    for thread_id, user in (("one", "anna"), ("two", "bert"), ("three", "anna")):
        config: Any = {"configurable": {"thread_id": thread_id}, "metadata": {"user_id": user}}
        lab.recorded.invoke({"ask": user}, config)
    ids, model, kept = lab.close(), lab.load("model"), lab.load("kept")
    before = kept()
    assert model.calls[5] == "write answer 5 ['answer 2', 'answer 4']"
    outcome = named(lab, ids[2])
    assert outcome.endswith("""differs at word 4: recorded "2', 'answer 4']", now "2']\"""")
    lab.store_sql("UPDATE episodes SET user_id = 'anna'")
    assert ": same, 2 calls" in named(lab, ids[2])
    assert replay(lab.load("recalling"), ids[2], store=lab.run_folder.store).call_count == 2
    lab.fork(ids[2], "write")
    assert model.calls[6:] == 2 * [model.calls[5]]
    assert kept() == before


def test_what_earlier_runs_left_in_a_store_is_searched_by_meaning(tmp_path: Path) -> None:
    lab = Lab(tmp_path, "likest")
    for ask in ("a", "b", "c"):
        lab.recorded.invoke({"ask": ask}, T)
    ids, model = lab.close(), lab.load("model")
    assert model.calls[5].startswith("write answer 5 [({'text': 'answer 2'}, ")
    forks, _ = lab.fork(ids[2], "write")
    assert {each.episode.outcome for each in forks} == {"terminated"}
    assert model.calls[6:] == 2 * [model.calls[5]]


def named(lab: Lab, episode_id: str) -> str:
    """The line of one episode in `replay`."""
    app = ReplayedApp(f"{lab.folder / 'app.py'}:{lab.name}")
    (outcome,) = replay_episodes(lab.run_folder.store, [episode_id], app, ReplayOptions())
    return outcome.to_line()


@pytest.mark.slow
def test_an_answer_to_a_question_by_its_id_is_given_by_the_id_of_the_repeated_one(tmp_path: Path) -> None:
    lab = Lab(tmp_path, "reviewed")
    (question,) = lab.recorded.invoke({"ask": "a"}, T)["__interrupt__"]
    lab.recorded.invoke(Command(resume={question.id: "shorter"}), T)
    ids, model = lab.close(), lab.load("model")
    assert ": same, 2 calls" in named(lab, ids[1])
    lab.fork(ids[1], "review:2")
    assert model.calls[5:] == 2 * [model.calls[4]]


@pytest.mark.slow
def test_a_run_of_another_store_is_brought_in_as_the_page_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = Lab(tmp_path)
    other = wrap(lab.load("graph"), tmp_path / "traces.duckdb")
    other.invoke({"ask": "a"}, T)
    other.recorder.journal.close()
    lab.close()
    archive = str(tmp_path / "archive")
    assert cli.run(["traces", "export", archive, "--store", str(tmp_path / "traces.duckdb")]) == 0
    assert cli.run(["traces", "import", archive, "--store", str(lab.run_folder.store)]) == 0
    (parent,) = lab.episodes("live")
    lab.config()
    words = [
        parent.episode.episode_id[:8],
        "--config",
        str(tmp_path / "bridge.toml"),
        "--at",
        "write",
        "--samples",
        "1",
    ]
    capsys.readouterr()
    assert cli.run(["fork", *words, "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert (findings["given_again"], findings["earlier_runs"], findings["mean"]) == (1, 0, 1.0)


# -- what is refused ----------------------------------------------------------------------------------------------


def refusal(lab: Lab, episode_id: str, at: str = "write", **options: Any) -> str:
    call_count = len(lab.load("model").calls)
    with pytest.raises(BridgeError) as error:
        lab.fork(episode_id, at, **options)
    assert len(lab.load("model").calls) == call_count
    assert lab.episodes("forks") == []
    return str(error.value)


def test_an_earlier_run_that_was_not_recorded_is_said(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.load("graph").invoke({"ask": "a"}, T)
    lab.recorded.invoke({"ask": "b"}, T)
    (episode_id,) = lab.close()
    assert refusal(lab, episode_id) == (
        f"fork: episode {episode_id} goes on with a run of its thread that is not in the store"
    )


@pytest.mark.slow
def test_an_earlier_run_that_does_not_come_out_the_same_is_named_with_its_first_difference(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    for ask in ("a", "b"):
        lab.recorded.invoke({"ask": ask}, T)
    ids = lab.close()
    (tmp_path / "changed.py").write_text(APP.replace('f"plan {state', 'f"think {state'))
    assert refusal(lab, ids[1], app="changed.py") == (
        f"fork: episode {ids[1]} goes on with an earlier run of its thread, {ids[0]}, which does not come out the same:"
        ' plan, call 1: message 0 (user) differs at word 0: recorded "plan a knowing []", now "think a knowing []"'
    )
    with pytest.raises(EpisodesFailedError, match="DivergedError: plan, call 1: message 0"):
        lab.fork(ids[0], "write", app="changed.py")


def test_a_thread_that_was_edited_between_two_runs_is_refused(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.recorded.invoke({"ask": "a"}, T)
    lab.recorded.update_state(T, {"plan": "another"})
    lab.recorded.invoke({"ask": "b"}, T)
    ids = lab.close()
    assert refusal(lab, ids[1]) == (
        f"fork: episode {ids[1]} begins after its thread was edited by update_state, and what was written there is not"
        " recorded"
    )
    with pytest.raises(GraphError, match="begins after its thread was edited by update_state"):
        replay(lab.load("graph"), ids[1], store=lab.run_folder.store)


@pytest.mark.slow
def test_a_redacted_record_of_an_earlier_run_is_refused(tmp_path: Path) -> None:
    lab = Lab(tmp_path, "recalling", options=RecordOptions(redact=["email"]))
    for ask in ("write to anna@example.org", "b"):
        lab.recorded.invoke({"ask": ask}, T)
    ids = lab.close()
    assert refusal(lab, ids[1]) == (
        f"fork: episode {ids[1]} goes on with an earlier run of its thread, {ids[0]}, which has a redacted record, so"
        " it cannot be repeated as it was"
    )


@pytest.mark.slow
def test_versions_are_refused_and_other_commands_leave_such_runs_out(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.recorded.invoke({"ask": "a"}, T)
    (episode_id,) = lab.close()
    with pytest.raises(ConfigError, match="ran on its app's own models, which have no versions"):
        lab.fork(episode_id, "write", version="newest")
    with (
        TraceStore.open(lab.run_folder.store, read_only=True) as store,
        pytest.raises(GraphError, match="was started by its app, not by a command; `marft-bridge fork` can fork it"),
    ):
        spans_to_parent(store.spans(episode_id))
