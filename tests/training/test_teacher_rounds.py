"""Owns: rounds in which a trained node's own model is asked beside the served one, and imitated (DAgger).

- The graph goes on with the served model's answer; the own model gets the call as the app made it, once, and no app
  callback and no span of its own tells of it. Its failure is noted, and nothing else.
- Whoever has no own model is refused; who is not trained is not taught.
- What is imitated is the teacher's answer behind the engine's own prompt ids, and nothing that the policy said itself.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import httpx
import pytest
import torch
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from support.chat_rig import save_chat_model
from support.client_rig import node_chat
from support.fake_vllm import FakeVllm, running
from support.school_rig import School, learned
from support.tiny_policy import AGENTS, make_action, make_trajectory, save_tiny_llama
from support.trainer_options import trainer_options

from marft_bridge.common.errors import GraphError
from marft_bridge.config.bridge import TrainOptions
from marft_bridge.ingest.recorded_chats import span_to_chat
from marft_bridge.model_calls.node_chat_model import NodeChat
from marft_bridge.model_calls.redirect import redirected_models
from marft_bridge.model_calls.routing import Route, Routing, current_routing
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from marft_bridge.runs.run_folder import read_metrics
from marft_bridge.training.retokenise import ChatTokenizer
from marft_bridge.training.teacher_labels import TeacherLabels, teacher_metrics_to_text
from trace_store import conventions as c
from trace_store.assemble import spans_to_trajectory
from trace_store.journal import Journal, read_segment
from trace_store.records import RETOKENISED, SpanRow
from trainers.marft import MarftTrainer

ROUTE = Route("writer@3", "writer@3", 3, temperature=0.7, max_tokens=200)
ASKED = [SystemMessage("writer"), HumanMessage("What is two plus two?")]


class State(TypedDict, total=False):
    text: str


@tool
def look_up(word: str) -> str:
    """Looks a word up."""
    return word


@dataclass
class Rig:
    """The app's own provider, who teaches, and the served model."""

    teacher: FakeVllm
    served: FakeVllm
    chat: NodeChat
    folder: Path

    def model(self, **options: Any) -> ChatOpenAI:
        return ChatOpenAI(
            model="base", base_url=f"{self.teacher.url}/v1", api_key="k", max_retries=0, temperature=0.1, **options
        )

    def play(self, node: Callable[[State], Any], route: Route = ROUTE) -> tuple[Any, SpanRow]:
        """A run of the one node in a taught round: what it ends with, and the span of its call."""
        graph = StateGraph(State)
        graph.add_node("writer", node)
        graph.add_edge(START, "writer")
        graph.add_edge("writer", END)
        recorder = Recorder(Journal(self.folder / f"journal-{len(list(self.folder.iterdir()))}"))
        recorded = wrap(graph.compile(), recorder)
        token = current_routing.set(Routing({"writer": route}, 7, self.chat, asks_teacher=True))
        try:
            with redirected_models():
                state = recorded.invoke({})
        finally:
            current_routing.reset(token)
            recorded.unwrap()
            recorder.journal.close()
        assert recorder.failures == 0
        segments = [read_segment(path)[0] for path in Path(recorder.journal._folder).glob("*.segment")]
        self.spans = [record for records in segments for record in records if isinstance(record, SpanRow)]
        (span,) = [span for span in self.spans if span.operation == c.CHAT]
        return state, span


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    teacher, served = FakeVllm(), FakeVllm()
    served.adapters["writer@3"] = "/adapters/writer/3"
    served.answer, teacher.answer = lambda _: "five", lambda _: "four"
    teacher.auto_tools = served.auto_tools = True
    with running(teacher), running(served), httpx.Client(trust_env=False) as client:
        chat = node_chat(served, client)
        yield Rig(teacher, served, chat, tmp_path)
        asyncio.run(chat.http_async_client.aclose())


def teacher_text(span: SpanRow) -> str:
    (message,) = json.loads(span.attributes[c.TEACHER_MESSAGES])
    text: str = message["parts"][0]["content"]
    return text


def test_the_graph_goes_on_with_the_served_answer_and_the_teachers_is_noted_beside_it(rig: Rig) -> None:
    model = rig.model(stop=["."])
    state, span = rig.play(lambda _: {"text": model.invoke(ASKED).text})
    assert (state["text"], teacher_text(span)) == ("five", "four")
    (asked,) = rig.teacher.asked
    assert (asked["messages"][1]["content"], asked["temperature"], asked["stop"]) == (ASKED[1].content, 0.1, ["."])
    assert len(rig.served.asked) == 1
    assert span.attributes[c.ADAPTER] == "writer@3"
    assert span.attributes[c.TEACHER_OUTPUT_TOKENS] == len("four") + 1
    assert span.attributes[c.TEACHER_FINISH_REASON] == "stop"
    (action,) = spans_to_trajectory(rig.spans).actions  # of the policy, and trainable as ever
    assert (action.completion, action.trainable) == ("five", True)


def test_a_streamed_and_an_asynchronous_call_are_taught_as_well(rig: Rig) -> None:
    model = rig.model()

    async def alone(_: State) -> Any:
        return {"text": (await model.ainvoke(ASKED)).text}

    async def streamed(_: State) -> Any:
        return {"text": "".join([chunk.text async for chunk in model.astream(ASKED)])}

    for node in (lambda _: {"text": "".join(chunk.text for chunk in model.stream(ASKED))}, alone, streamed):
        state, span = play_anyhow(rig, node)
        assert (state["text"], teacher_text(span)) == ("five", "four")
    assert len(rig.teacher.asked) == 3


def play_anyhow(rig: Rig, node: Any) -> tuple[Any, SpanRow]:
    if not asyncio.iscoroutinefunction(node):
        return rig.play(node)
    return rig.play(lambda state: asyncio.run(node(state)))


def test_the_teacher_is_offered_the_tools_of_the_call(rig: Rig) -> None:
    rig.teacher.answer = lambda _: [("look_up", {"word": "owl"})]
    model = rig.model().bind_tools([look_up])
    _, span = rig.play(lambda _: {"text": model.invoke(ASKED).text})
    assert [each["function"]["name"] for each in rig.teacher.asked[0]["tools"]] == ["look_up"]
    (message,) = json.loads(span.attributes[c.TEACHER_MESSAGES])
    assert [(part["type"], part["name"], part["arguments"]) for part in message["parts"]] == [
        ("tool_call", "look_up", {"word": "owl"})
    ]


def test_a_teacher_that_fails_leaves_the_run_as_it_is(rig: Rig) -> None:
    rig.teacher.fail_next = 1
    state, span = rig.play(lambda _: {"text": rig.model().invoke(ASKED).text})
    assert state["text"] == "five"
    assert span.attributes[c.TEACHER_ERROR] == "OpenAIAPIError" or span.attributes[c.TEACHER_ERROR].endswith("Error")
    assert c.TEACHER_MESSAGES not in span.attributes


def test_a_trained_node_without_a_model_of_its_own_is_refused_and_a_frozen_one_is_not_taught(rig: Rig) -> None:
    with pytest.raises(GraphError, match="node 'writer' is given the served model, and has none of its own"):
        rig.play(lambda _: {"text": rig.chat.invoke(ASKED).text})
    frozen = replace(ROUTE, trainable=False)
    for model in (rig.chat, rig.model()):
        state, span = rig.play(lambda _, model=model: {"text": model.invoke(ASKED).text}, frozen)
        assert (state["text"], span.attributes.get(c.TEACHER_MESSAGES)) == ("five", None)
    assert rig.teacher.asked == []


# -- what is imitated ---------------------------------------------------------------------------------------------


def test_the_teachers_answer_stands_behind_the_engines_own_prompt(rig: Rig, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(save_chat_model(tmp_path / "model"))
    _, span = rig.play(lambda _: {"text": rig.model().invoke(ASKED).text})
    trajectory = spans_to_trajectory(rig.spans)
    labels = TeacherLabels({"writer": (tokenizer, None)})
    (action,) = labels.trajectory_to_taught(trajectory, lambda _: rig.spans).actions
    answered = replace(span, attributes=span.attributes | {c.OUTPUT_MESSAGES: span.attributes[c.TEACHER_MESSAGES]})
    assert action.sampled_ids == tokenizer.chat_to_ids(span_to_chat(answered), ended=True).answer
    assert action.prompt_ids == trajectory.actions[0].prompt_ids
    assert (action.logprobs, action.trainable, action.untrainable_reason) == (None, False, RETOKENISED)
    assert teacher_metrics_to_text(labels.metrics()) == (
        f"1 of 1 calls have an answer of the teacher, which read {span.attributes[c.TEACHER_INPUT_TOKENS]} and sampled "
        "5 tokens"
    )


@pytest.mark.parametrize(
    ("change", "limit", "reason"),
    [
        ({c.TEACHER_MESSAGES: None}, None, "the teacher was not asked"),
        ({c.TEACHER_MESSAGES: None, c.TEACHER_ERROR: "RateLimitError"}, None, "the teacher failed (RateLimitError)"),
        ({}, 8, "longer than the base model reads"),
    ],
)
def test_a_call_without_a_usable_answer_teaches_nothing_and_says_why(
    rig: Rig, tmp_path: Path, change: dict[str, Any], limit: int | None, reason: str
) -> None:
    tokenizer = ChatTokenizer(save_chat_model(tmp_path / "model"))
    rig.play(lambda _: {"text": rig.model().invoke(ASKED).text})
    spans = [
        replace(span, attributes={k: v for k, v in (span.attributes | change).items() if v is not None})
        if span.operation == c.CHAT
        else span
        for span in rig.spans
    ]
    labels = TeacherLabels({"writer": (tokenizer, limit)})
    (action,) = labels.trajectory_to_taught(spans_to_trajectory(rig.spans), lambda _: spans).actions
    assert (action.prompt_ids, action.sampled_ids, labels.labelled) == (None, None, 0)
    assert action.untrainable_reason == f"no answer of the teacher: {reason}"
    assert labels.refused == {reason: 1}


def test_a_round_of_imitation_moves_to_what_the_teacher_says_and_keeps_what_was_shown(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "tiny")
    options = trainer_options(
        device="cpu", lr=0.05, offline={"mode": "filtered", "threshold": 1.0, "epochs": 8, "kl_budget": 1e3}
    )
    trainer = MarftTrainer(options, model, AGENTS, seed=0)
    shown = [make_trajectory([make_action("actor", [3], [5])], 1.0, task_id=f"s{i}") for i in range(16)]
    bad = [make_trajectory([make_action("actor", [9], [11])], 0.0, task_id=f"b{i}") for i in range(16)]
    lesson = make_action("actor", [4], [7], logprobs=None, trainable=False, untrainable_reason=RETOKENISED)
    taught = [make_trajectory([lesson], 0.0, task_id=f"t{i}") for i in range(16)]  # whatever it earned
    result = trainer.distil([*shown, *bad], taught)
    assert (trainer.rounds, result["mode"], result["used"], result["episodes"]) == (1, "distil", 32, 32)
    assert result["agents"]["actor"]["drops"] == {"episode below offline.threshold": 16}
    policy = trainer.policies.model_of("actor")
    policy.use(trainer.policies.adapter_of("actor"))
    with torch.no_grad():
        said = [int(policy.peft(input_ids=torch.tensor([[prompt]])).logits[0, -1].argmax()) for prompt in (3, 4)]
    assert said == [5, 7]


# -- the command --------------------------------------------------------------------------------------------------

APP = """
from typing import TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph


class State(TypedDict, total=False):
    number: int
    plan: str
    answer: str


def duo():
    own = ChatOpenAI(model="base", base_url="HOSTED/v1", api_key="k", max_retries=0)
    graph = StateGraph(State)
    graph.add_node("reasoner", lambda state: {"plan": own.invoke(f"{state['number']} plan").text})
    graph.add_node("actor", lambda state: {"answer": own.invoke(f"{state['number']} {state['plan']}").text})
    graph.add_edge(START, "reasoner")
    graph.add_edge("reasoner", "actor")
    graph.add_edge("actor", END)
    return graph.compile()


def to_input(task):
    return {"number": task["number"]}


def reward(task, state):
    return float(state["answer"] == "yes")
"""


@pytest.mark.slow
def test_the_first_rounds_imitate_the_teacher_and_the_others_learn_from_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = FakeVllm()
    teacher.answer = lambda body: f"right {body['messages'][-1]['content'].split()[0]}"
    with running(FakeVllm()) as server, running(teacher):
        school = School(tmp_path, save_chat_model(tmp_path / "model"), server, monkeypatch)
        (tmp_path / "apps.py").write_text(APP.replace("HOSTED", teacher.url))
        school.collect()
        assert teacher.asked == []
        options: dict[str, Any] = {
            "rounds": 3,
            "teacher_rounds": 2,
            "episodes_per_round": 8,
            "trainer": {"offline": {"mode": "filtered"}},
        }
        said = school.train(**options)
        assert len(teacher.asked) == 2 * 8 * 2
        lines = [line for line in read_metrics(school.run / "metrics.jsonl") if line["phase"] == "online"]
        assert [line.get("teacher", {}).get("labelled") for line in lines] == [16, 16, None]
        assert [line.get("mode") for line in lines] == ["distil", "distil", None]
        stored = lines[0]["agents"]["actor"]["actions"] - 8  # good collected ones, in every taught round
        assert lines[1]["agents"]["actor"]["actions"] == stored + 16  # those of round 1 are learned from again
        assert "round 2: 16 of 16 calls have an answer of the teacher, which read " in said
        assert (school.run / "adapters" / "actor" / "4" / "marft.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [4, 12, 20])
def test_a_training_that_was_killed_in_any_round_imitates_what_it_would_have_imitated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    """In the first taught round, in the second, which learns from the first again, and in the round after them."""
    options: dict[str, Any] = {
        "rounds": 3,
        "teacher_rounds": 2,
        "episodes_per_round": 8,
        "trainer": {"offline": {"mode": "filtered"}},
    }
    contents = []
    for name in ("unbroken", "broken"):
        (tmp_path / name).mkdir()
        teacher = FakeVllm()
        teacher.answer = lambda body: f"right {body['messages'][-1]['content'].split()[0]}"
        with running(FakeVllm()) as server, running(teacher):
            school = School(tmp_path / name, save_chat_model(tmp_path / name / "model"), server, monkeypatch)
            (tmp_path / name / "apps.py").write_text(APP.replace("HOSTED", teacher.url))
            school.collect()
            if name == "broken":
                school.train_until_killed(stop_at, **options)
                school.train(resume=True, **options)
            else:
                school.train(**options)
            contents.append(learned(school))
    assert [key for key in contents[0] if contents[0][key] != contents[1].get(key)] == []


def test_rounds_with_a_teacher_are_refused_where_they_would_do_nothing() -> None:
    filtered = {"offline": {"mode": "filtered"}}
    for options, reason in (
        ({"rounds": 1, "teacher_rounds": 2, "trainer": filtered}, "but there are only 1 rounds"),
        ({"teacher_rounds": 2}, "set train.trainer.offline.mode to 'filtered'"),
        ({"teacher_rounds": 2, "trainer": filtered, "trees": {"share": 0.5}}, "play whole runs"),
    ):
        with pytest.raises(ValueError, match=reason):
            TrainOptions.model_validate(options)
