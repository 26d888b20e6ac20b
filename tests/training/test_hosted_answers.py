"""Owns: hosted nodes of a round, answered from the record where a recorded call is the same.

- The same call gets one of its recorded answers, nothing goes out, and its span says what it is; of several answers
  one is drawn by the episode's seed, each as often as it was recorded.
- Other messages, tools or parameters are another call: its own model answers, or the run fails with that.
- A node with a route, and a call that no answer can be given to, are never taken for one.
- `train` counts the share of each round.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

import httpx
import pytest
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.messages import AnyMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from rich.console import Console
from support.fake_vllm import FakeVllm, running
from support.ingest_rig import framed, hand_made, openinference, request
from support.school_rig import School, school_in

from marft_bridge.common.errors import ConfigError, EpisodesFailedError, GraphError
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import TrainOptions
from marft_bridge.config.record import RecordOptions
from marft_bridge.ingest.from_files import ingest_files
from marft_bridge.model_calls.node_chat_model import NodeChat
from marft_bridge.model_calls.redirect import redirected_models
from marft_bridge.model_calls.routing import Route, Routing, current_routing
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from marft_bridge.runs.run_folder import read_metrics
from marft_bridge.training.hosted_answers import AnswerPool, trajectories_to_hosted_metrics
from trace_store import conventions as c
from trace_store.assemble import spans_to_trajectory
from trace_store.journal import Journal, read_segment
from trace_store.records import REPLAYED, Action, SpanRow, Trajectory
from trace_store.store import TraceStore

ROUTE = Route("writer@3", "writer@3", 3, temperature=0.7, max_tokens=200)


class State(TypedDict, total=False):
    topic: str
    messages: Annotated[list[AnyMessage], add_messages]
    note: Any


@tool
def look_up(word: str) -> str:
    """Looks a word up."""
    return word


@tool
def forget(word: str) -> str:
    """Forgets a word."""
    return word


Node = Callable[[State], Any]


@dataclass
class Rig:
    """A provider of the app, a served model, and what was recorded so far."""

    provider: FakeVllm
    served: FakeVllm
    chat: NodeChat
    folder: Path
    pool: AnswerPool = field(default_factory=lambda: AnswerPool(["writer"], only=False))
    answers: list[Any] = field(default_factory=list)  # of the provider, each in its turn, the last one for ever

    def model(self, **options: Any) -> ChatOpenAI:
        """What a node of the app builds for itself."""
        return ChatOpenAI(model="base", base_url=f"{self.provider.url}/v1", api_key="k", max_retries=0, **options)

    def run(self, critic: Node, writer: Node | None = None, routing: Routing | None = None) -> tuple[Any, Trajectory]:
        """One recorded run: the critic's node, then the writer's, in an episode with this routing."""
        graph = StateGraph(State)
        graph.add_node("critic", critic)
        graph.add_node("writer", writer or (lambda _: {}))
        for one, other in ((START, "critic"), ("critic", "writer"), ("writer", END)):
            graph.add_edge(one, other)
        recorder = Recorder(Journal(self.folder / f"journal-{len(list(self.folder.iterdir()))}"))
        recorded = wrap(graph.compile(), recorder)
        with ExitStack() as stack:
            stack.callback(recorder.journal.close)
            stack.callback(recorded.unwrap)
            if routing is not None:
                routing.record = self.pool.begin(recorder, routing)
                stack.callback(current_routing.reset, current_routing.set(routing))
                stack.enter_context(redirected_models())
            state = recorded.invoke({"topic": "owls"})
        assert recorder.failures == 0
        segments = [read_segment(path)[0] for path in Path(recorder.journal._folder).glob("*.segment")]
        self.spans = [record for records in segments for record in records if isinstance(record, SpanRow)]
        return state, spans_to_trajectory(self.spans)

    def record(self, critic: Node, *answers: Any) -> list[Action]:
        """Records a run for each of these answers of the provider, and adds it to the pool; the calls of the critic."""
        calls: list[Action] = []
        for answer in answers:
            self.answers[:] = [answer]
            _, trajectory = self.run(critic)
            self.pool.add(trajectory, lambda _: self.spans)
            calls += [action for action in trajectory.actions if action.node == "critic"]
        self.answers[:] = ["the provider speaks"]
        self.provider.asked.clear()
        return calls

    def replay(self, critic: Node, writer: Node | None = None, seed: int = 7) -> tuple[Any, Sequence[Action]]:
        """A run of a round; what it ends with, and its calls."""
        state, trajectory = self.run(critic, writer, Routing({"writer": ROUTE}, seed, self.chat))
        return state, trajectory.actions


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    provider, served = FakeVllm(), FakeVllm()
    served.adapters["writer@3"] = "/adapters/writer/3"
    served.answer = lambda _: "served"
    with running(provider), running(served), httpx.Client(trust_env=False) as client:
        chat = NodeChat(
            model="base",
            base_url=f"{served.url}/v1",
            api_key="ours",
            http_client=client,
            http_async_client=httpx.AsyncClient(trust_env=False),
            max_retries=0,
        )
        rig = Rig(provider, served, chat, tmp_path)
        provider.auto_tools = True
        provider.answer = lambda _: rig.answers.pop(0) if len(rig.answers) > 1 else rig.answers[0]
        yield rig
        asyncio.run(chat.http_async_client.aclose())


def ask(rig: Rig, text: str = "criticise owls", tools: Sequence[Any] = (), **options: Any) -> Node:
    """A node that asks its own model once."""
    model: Any = rig.model(**options)
    bound = model.bind_tools(list(tools)) if tools else model
    return lambda _: {"messages": [bound.invoke([HumanMessage(text)])]}


def test_the_same_call_gets_its_recorded_answer_and_its_span_says_so(rig: Rig) -> None:
    (recorded,) = rig.record(ask(rig, temperature=0.2), "too short")
    state, actions = rig.replay(ask(rig, temperature=0.2), lambda _: {"note": rig.chat.invoke("write").text})
    assert [message.content for message in state["messages"]] == ["too short"]
    assert (state["note"], rig.provider.asked, len(rig.served.asked)) == ("served", [], 1)
    critic, writer = actions
    assert (critic.replayed_from, critic.untrainable_reason) == (recorded.action_id, REPLAYED)
    assert (critic.trainable, critic.sampled_ids, critic.completion) == (False, None, "too short")
    assert (critic.prompt_tokens, critic.finish_reason) == (recorded.prompt_tokens, "stop")
    assert (writer.replayed_from, writer.trainable) == (None, True)


def test_a_recorded_tool_call_is_given_with_its_arguments(rig: Rig) -> None:
    rig.record(ask(rig, tools=[look_up]), [("look_up", {"word": "owl"})])
    state, _ = rig.replay(ask(rig, tools=[look_up]))
    (message,) = state["messages"]
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [("look_up", {"word": "owl"})]
    assert rig.provider.asked == []


def test_a_streamed_call_gets_it_as_well(rig: Rig) -> None:
    rig.record(ask(rig), "too short")
    model = rig.model()
    state, _ = rig.replay(lambda _: {"note": "".join(c.text for c in model.stream([HumanMessage("criticise owls")]))})
    assert state["note"] == "too short"


def test_of_several_answers_each_is_drawn_as_often_as_it_was_recorded_and_by_the_seed(rig: Rig) -> None:
    rig.record(ask(rig), "a", "a", "b")

    def often(_: State) -> Any:
        model = rig.model()
        return {"note": [model.invoke([HumanMessage("criticise owls")]).text for _ in range(60)]}

    drawn = {seed: rig.replay(often, seed=seed)[0]["note"] for seed in (1, 2)}
    assert rig.replay(often, seed=1)[0]["note"] == drawn[1] != drawn[2]
    counts = Counter(drawn[1] + drawn[2])
    assert set(counts) == {"a", "b"}
    assert 0.52 < counts["a"] / 120 < 0.82  # two thirds, within three and a half deviations; the seeds are fixed
    assert rig.provider.asked == []


def test_the_same_answer_twice_in_one_state_is_two_messages(rig: Rig) -> None:
    rig.record(ask(rig), "too short")
    model = rig.model()
    twice: Node = lambda _: {"messages": [model.invoke([HumanMessage("criticise owls")]) for _ in range(2)]}  # noqa: E731
    state, _ = rig.replay(twice)
    assert [message.content for message in state["messages"]] == ["too short", "too short"]


OTHER_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "messages": ({"text": "criticise newts"}, "no recorded call of it has these messages"),
    "tools": ({"tools": [forget]}, "the recorded calls with these messages offered other tools"),
    "no tools": ({"tools": []}, "the recorded calls with these messages offered other tools"),
    "temperature": ({"temperature": 0.9}, "the recorded calls with these messages have another temperature"),
    "no temperature": ({"temperature": None}, "the recorded calls with these messages have another temperature"),
    "stop": ({"stop": ["."]}, "the recorded calls with these messages have another stop_sequences"),
}


@pytest.mark.parametrize("name", OTHER_CALLS)
@pytest.mark.parametrize("only", [False, True])
def test_another_call_is_answered_by_its_own_model_or_fails_the_run(rig: Rig, name: str, only: bool) -> None:
    request_options: dict[str, Any] = {"tools": [look_up], "temperature": 0.2}
    rig.record(ask(rig, **request_options), "too short")
    rig.pool.only = only
    changed, reason = OTHER_CALLS[name]
    critic = ask(rig, **request_options | changed)
    if only:
        expected = f"node 'critic' has no recorded answer (train.hosted_answers = 'recorded_only'): {reason}"
        with pytest.raises(GraphError) as raised:
            rig.replay(critic)
        assert str(raised.value) == expected
        assert rig.provider.asked == []
    else:
        state, actions = rig.replay(critic)
        assert state["messages"][-1].content == "the provider speaks"
        assert (len(rig.provider.asked), actions[0].replayed_from) == (1, None)


def test_a_run_whose_graph_caught_the_refusal_fails_all_the_same(rig: Rig) -> None:
    rig.record(ask(rig), "too short")
    rig.pool.only = True

    def careful(_: State) -> Any:
        try:
            return ask(rig, "criticise newts")(_)
        except GraphError:
            return {"note": "no critic today"}

    routing = Routing({"writer": ROUTE}, 7, rig.chat)
    rig.run(careful, None, routing)
    assert routing.record is not None
    assert "no recorded call of it has these messages" in str(routing.record.judge_end(None))


def test_a_completion_model_is_asked_only_where_that_is_allowed(rig: Rig) -> None:
    rig.record(ask(rig), "too short")
    completion: Node = lambda _: {"note": FakeListLLM(responses=["plain"]).invoke("criticise owls")}  # noqa: E731
    assert rig.replay(completion)[0]["note"] == "plain"
    rig.pool.only = True
    with pytest.raises(GraphError, match=r"a call of a completion model \(BaseLLM\) cannot be given a recorded answer"):
        rig.replay(completion)


def test_a_node_with_a_route_is_never_answered_from_the_record(rig: Rig) -> None:
    def same(_: State) -> Any:
        return {"note": rig.model().invoke([HumanMessage("criticise owls")]).text}

    pool = AnswerPool([], only=False)  # of a time when the writer was hosted too
    rig.answers[:] = ["hosted"]
    _, trajectory = rig.run(same, same)
    pool.add(trajectory, lambda _: rig.spans)
    rig.pool = pool
    assert rig.replay(lambda _: {}, same)[0]["note"] == "served"


def test_what_was_not_answered_by_a_provider_or_not_as_it_is_recorded_is_no_answer(rig: Rig) -> None:
    rig.record(ask(rig), "too short", "[redacted:email] is too short")
    assert (rig.pool.counts, rig.pool.refused) == ({"critic": 1}, {"it is redacted": 1})
    _, trajectory = rig.run(ask(rig), None, Routing({"writer": ROUTE}, 7, rig.chat))
    rig.pool.add(trajectory, lambda _: rig.spans)  # a given answer is none of the provider's
    assert rig.pool.counts == {"critic": 1}
    assert rig.pool.summary() == "hosted answers: 1 recorded calls can be given again (critic 1); not 1: it is redacted"


def test_a_prompt_of_lists_in_lists_without_end_is_known_by_its_text(rig: Rig) -> None:
    rig.answers[:] = ["too short"]
    _, trajectory = rig.run(ask(rig), None)
    deep = {c.INPUT_MESSAGES: "[" * 3_000}
    spans = [replace(s, attributes=dict(s.attributes) | deep) if s.operation == c.CHAT else s for s in rig.spans]
    pool = AnswerPool([], only=False)
    pool.add(trajectory, lambda _: spans)
    assert pool.counts.total() == len(trajectory.actions) > 0


def test_calls_that_another_tracer_recorded_are_compared_by_what_it_holds(rig: Rig, tmp_path: Path) -> None:
    trace = f"{5:032x}"
    place = {"langgraph_node": "critic", "langgraph_checkpoint_ns": "critic:1", "langgraph_step": 1}
    flat = {"llm.finish_reason": "stop", "llm.input_messages.0.message.role": "user"}
    flat |= {
        "llm.input_messages.0.message.content": "criticise owls",
        "llm.output_messages.0.message.role": "assistant",
    }
    flat |= {"llm.output_messages.0.message.content": "imported"}
    spans = [
        hand_made("1", None, "LangGraph", 0, 90, trace=trace, attributes=openinference("CHAIN")),
        hand_made(
            "2", "1", "critic", 10, 19, trace=trace, attributes=openinference("CHAIN", metadata=json.dumps(place))
        ),
        hand_made("3", "2", "ChatHosted", 11, 18, trace=trace, attributes=openinference("LLM", **flat)),
    ]
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "traces"
    path.write_bytes(framed(request(*spans).SerializeToString()))
    ingest_files([path], tmp_path / "in" / "store.duckdb", RecordOptions(), Reporter(Console(file=io.StringIO())))
    with TraceStore.open(tmp_path / "in" / "store.duckdb") as store:
        for trajectory in store.trajectories():
            rig.pool.add(trajectory, store.spans)
    rig.answers[:] = ["the provider speaks"]
    state, actions = rig.replay(ask(rig, temperature=0.3))  # the trace does not say how it was sampled
    assert [message.content for message in state["messages"]] == ["imported"]
    assert (actions[0].replayed_from, rig.provider.asked) == ("3".rjust(16, "0"), [])


def test_the_share_is_that_of_the_calls_of_nodes_without_a_route(rig: Rig) -> None:
    rig.record(ask(rig), "too short")
    writer: Node = lambda _: {"note": rig.chat.invoke("write").text}  # noqa: E731
    runs = [rig.run(node, writer, Routing({"writer": ROUTE}, 7, rig.chat))[1] for node in (ask(rig), ask(rig, "x"))]
    assert trajectories_to_hosted_metrics(runs, ["writer"]) == {
        "calls": 2,
        "recorded_share": 0.5,
        "nodes": {"critic": {"calls": 2, "recorded_share": 0.5}},
    }
    assert trajectories_to_hosted_metrics([], ["writer"])["recorded_share"] is None


def test_trees_and_recorded_answers_are_refused_together() -> None:
    with pytest.raises(ValueError, match="hosted_answers of a record cannot be given in forks yet"):
        TrainOptions.model_validate({"hosted_answers": "recorded_first", "trees": {"share": 0.5}})


# -- the command --------------------------------------------------------------------------------------------------

APP = """
from typing import TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from openai import OpenAI


class State(TypedDict, total=False):
    number: int
    hint: str
    plan: str
    check: str
    answer: str


def duo(model):
    def critic(state):
        own = ChatOpenAI(model="base", base_url="HOSTED/v1", api_key="k", max_retries=0, temperature=0.5)
        return {"hint": own.invoke(f"hint {state['number']}").text}

    def checker(state):
        messages = [{"role": "user", "content": f"check {state['plan']}"}]
        with OpenAI(base_url="HOSTED/v1", api_key="k", max_retries=0) as client:
            reply = client.chat.completions.create(model="base", messages=messages)
        return {"check": reply.choices[0].message.content}

    graph = StateGraph(State)
    graph.add_node("critic", critic)
    graph.add_node("reasoner", lambda state: {"plan": model.invoke(f"{state['number']} {state['hint']}").text})
    graph.add_node("checker", checker)
    graph.add_node("actor", lambda state: {"answer": model.invoke(f"{state['number']} {state['check']}").text})
    order = [START, "critic", "reasoner", "checker", "actor", END]
    for one, other in zip(order, order[1:]):
        graph.add_edge(one, other)
    return graph.compile()


def to_input(task):
    return {"number": task["number"]}


def reward(task, state):
    return float(state["answer"] == "yes")
"""


@pytest.fixture
def school(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[School, FakeVllm]]:
    """The duo with two hosted nodes, a LangChain model and OpenAI's client, between its own."""
    provider = FakeVllm()
    provider.answer = lambda body: f"on {body['messages'][-1]['content']}"
    with school_in(tmp_path, monkeypatch) as opened, running(provider):
        (tmp_path / "apps.py").write_text(APP.replace("HOSTED", provider.url))
        opened.server.answer = lambda body: "yes" if int(body["messages"][-1]["content"].split()[0]) % 3 else "no"
        yield opened, provider


@pytest.mark.slow
def test_a_round_asks_the_provider_for_nothing_that_is_recorded(school: tuple[School, FakeVllm]) -> None:
    lesson, provider = school
    lesson.collect()
    with lesson.store() as store:
        recorded = {trajectory.episode.task_id for trajectory in store.trajectories(run_ids=["collect"])}
    provider.asked.clear()
    said = lesson.train(hosted_answers="recorded_first", rounds=2, episodes_per_round=12)
    assert "recorded calls can be given again (checker 20, critic 20)" in said
    lines = [line for line in read_metrics(lesson.run / "metrics.jsonl") if line["phase"] == "online"]
    with lesson.store() as store:
        actions = [
            a for t in store.trajectories(run_ids=["train"]) for a in t.actions if a.node in ("critic", "checker")
        ]
        tasks = [t.episode.task_id for t in store.trajectories(run_ids=["train"])]
    given = [action for action in actions if action.replayed_from is not None]
    assert len(actions) - len(given) == len(provider.asked) > 0
    # the critic's prompt is known where its task is; what the checker is shown is "yes" or "no", always known
    assert sum(a.node == "critic" for a in given) == sum(task in recorded for task in tasks) > 0
    assert sum(a.node == "checker" for a in given) == len(tasks) == 24
    assert sum(line["hosted"]["calls"] for line in lines) == 48
    assert [line["hosted"]["nodes"]["checker"]["recorded_share"] for line in lines] == [1.0, 1.0]
    shares = [line["hosted"]["recorded_share"] * line["hosted"]["calls"] for line in lines]
    assert sum(shares) == pytest.approx(len(given))
    assert f"of {lines[0]['hosted']['calls']} hosted calls answered from the record (checker 100%, critic " in said


@pytest.mark.slow
def test_without_a_provider_a_run_on_an_unknown_prompt_fails_with_the_reason(school: tuple[School, FakeVllm]) -> None:
    lesson, provider = school
    lesson.collect()
    provider.asked.clear()
    lesson.write([{"id": f"new{n}", "number": 100 + n, "topic": "any"} for n in range(40)])
    with pytest.raises(EpisodesFailedError, match="no recorded call of it has these messages") as raised:
        lesson.train(hosted_answers="recorded_only", episodes_per_round=12)
    assert "node 'critic' has no recorded answer (train.hosted_answers = 'recorded_only')" in str(raised.value)
    assert provider.asked == []


@pytest.mark.slow
def test_a_record_without_a_hosted_call_is_refused_before_a_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with school_in(tmp_path, monkeypatch) as lesson:
        lesson.collect()
        with pytest.raises(ConfigError, match=r"no stored episode has an answer of a node that is neither"):
            lesson.train(hosted_answers="recorded_only")
