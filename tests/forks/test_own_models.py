"""Owns: nodes that call models of their own, in a fork: before it their recorded answers, after it their own models.

- A chat model of the app's and a hosted client are asked for nothing that is given again; streamed or not.
- Such a call can be the one that is made again; a version of it is refused.
- litellm cannot be given an answer there: the fork fails with that, and nothing goes out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.credit_rig import CreditLab
from support.fake_vllm import FakeVllm, running

from marft_bridge.commands.collect import collect
from marft_bridge.common.errors import ConfigError, EpisodesFailedError
from marft_bridge.config.bridge import BridgeConfig, toml_to_config
from marft_bridge.forks.command import ForkOptions, fork
from trace_store.records import Trajectory

APP = """
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langgraph.graph import END, START, StateGraph
from openai import OpenAI
from typing_extensions import TypedDict


class State(TypedDict, total=False):
    question: str
    own: str
    streamed: str
    plan: str
    hosted: str
    answer: str


def note():
    with open("CALLS", "a") as file:
        file.write("x")
    with open("CALLS") as file:
        return len(file.read())


class Own(BaseChatModel):
    @property
    def _llm_type(self):
        return "own"

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        return ChatResult(generations=[ChatGeneration(message=AIMessage(f"own {note()}"))])


class OwnStream(Own):
    def _stream(self, messages, stop=None, run_manager=None, **kwargs):
        for word in ("stream ", str(note())):
            yield ChatGenerationChunk(message=AIMessageChunk(word))


def build(model):
    def hosted(state):
        messages = [{"role": "user", "content": f"hosted {state['plan']}"}]
        with OpenAI(base_url="URL/v1", api_key="k", max_retries=0) as client:
            reply = client.chat.completions.create(model="base", messages=messages)
            return {"hosted": reply.choices[0].message.content}

    async def own(state):
        return {"own": (await Own().ainvoke(f"own {state['question']}")).text}

    async def streamed(state):
        return {"streamed": "".join([c.text async for c in OwnStream().astream(f"stream {state['own']}")])}

    graph = StateGraph(State)
    graph.add_node("own_node", own)
    graph.add_node("own_stream", streamed)
    graph.add_node("planner", lambda state: {"plan": model.invoke(f"plan {state['streamed']}").text})
    graph.add_node("hosted_node", hosted)
    graph.add_node("answerer", lambda state: {"answer": model.invoke(f"answer {state['hosted']}").text})
    order = [START, "own_node", "own_stream", "planner", "hosted_node", "answerer", END]
    for one, other in zip(order, order[1:]):
        graph.add_edge(one, other)
    return graph.compile()


def to_input(task):
    return {"question": f"q{task['x']}"}


def reward(task, state):
    return 1.0
"""
BY_OPENAI = """        with OpenAI(base_url="URL/v1", api_key="k", max_retries=0) as client:
            reply = client.chat.completions.create(model="base", messages=messages)
            return {"hosted": reply.choices[0].message.content}
"""
BY_LITELLM = """        where = {"api_base": "URL/v1", "api_key": "k"}
        reply = litellm.completion(model="openai/base", messages=messages, **where)
        return {"hosted": reply.choices[0].message.content}
"""
ORDER = ("own_node", "own_stream", "planner", "hosted_node", "answerer")


class OwnLab(CreditLab):
    """A team of five, of whom two are served."""

    app_text = APP

    @property
    def calls_file(self) -> Path:
        return self.folder / "calls"

    def own_config(self) -> BridgeConfig:
        self.config()
        (self.folder / "own_app.py").write_text(self.app.replace("CALLS", str(self.calls_file)))
        text = (self.folder / "bridge.toml").read_text().replace("app.py:", "own_app.py:")
        nodes = 'nodes = ["helper", "idler", "harmer"]\nfrozen = ["solver"]'
        assert nodes in text
        (self.folder / "own.toml").write_text(
            text.replace(nodes, 'nodes = ["planner", "answerer"]').replace("episodes = 24", "episodes = 1")
        )
        return toml_to_config(self.folder / "own.toml")

    @property
    def app(self) -> str:
        return self.app_text.replace("URL", self.server.url)

    def episodes(self, run_id: str) -> list[Trajectory]:
        with self.store() as store:
            return list(store.trajectories(run_ids=[run_id], forks=True))

    def own_calls(self) -> int:
        return len(self.calls_file.read_text()) if self.calls_file.exists() else 0


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[OwnLab]:
    with running(FakeVllm()) as server:
        lab = OwnLab(tmp_path, server)
        server.answer = lambda body: body["messages"][-1]["content"].split()[0] + f" said {len(server.asked)}"
        yield lab


def run_fork(lab: OwnLab, at: str, **options: Any) -> list[Trajectory]:
    (parent,) = lab.episodes("collect")
    chosen = ForkOptions(parent.episode.episode_id, at, samples=2, **options)
    lab.say(lambda reporter: fork(lab.own_config(), chosen, reporter, resume=False))
    return lab.episodes("fork-1")


@pytest.mark.slow
@pytest.mark.parametrize("at", ORDER)
def test_before_the_fork_own_models_are_not_asked_and_from_it_on_they_are(lab: OwnLab, at: str) -> None:
    collect(lab.own_config(), lab.reporter(), resume=False)
    (parent,) = lab.episodes("collect")
    assert [action.node for action in parent.actions] == list(ORDER)
    own_before = lab.own_calls()
    assert own_before == 2
    lab.server.asked.clear()
    live = ORDER[ORDER.index(at) :]
    for made in run_fork(lab, at):
        assert (made.episode.outcome, made.episode.reason) == ("terminated", None)
        for mine, recorded in zip(made.actions, parent.actions, strict=True):
            if mine.node in live:
                assert mine.replayed_from is None
            else:
                assert (mine.replayed_from, mine.completion) == (recorded.action_id, recorded.completion)
    assert lab.own_calls() - own_before == 2 * sum(node in live for node in ORDER[:2])
    asked = Counter(body["messages"][-1]["content"].split()[0] for body in lab.server.asked)
    words = {"planner": "plan", "hosted_node": "hosted", "answerer": "answer"}
    assert asked == {words[node]: 2 for node in live if node in words}


@pytest.mark.slow
def test_a_person_can_answer_for_an_own_model_and_a_version_of_it_is_refused(lab: OwnLab) -> None:
    collect(lab.own_config(), lab.reporter(), resume=False)
    own_before = lab.own_calls()
    for made in run_fork(lab, "own_stream", text="a person's word"):
        assert [action.completion for action in made.actions][1] == "a person's word"
    assert lab.own_calls() == own_before
    with pytest.raises(ConfigError, match="own_node calls a model of its own, and has no versions"):
        run_fork(lab, "own_node", version="0")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # litellm's, of its own classes
def test_litellm_cannot_be_given_an_answer_there_and_asks_nobody(lab: OwnLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    pytest.importorskip("litellm")
    assert BY_OPENAI in APP
    lab.app_text = "import litellm\n" + APP.replace(BY_OPENAI, BY_LITELLM)
    collect(lab.own_config(), lab.reporter(), resume=False)
    lab.server.asked.clear()
    with pytest.raises(EpisodesFailedError, match="a call of litellm from a node that is not"):
        run_fork(lab, "answerer")
    assert lab.server.asked == []
    (parent,) = lab.episodes("collect")
    chosen = ForkOptions(parent.episode.episode_id, "hosted_node", samples=1)
    lab.say(lambda reporter: fork(lab.own_config(), chosen, reporter, resume=False))
    assert [each.episode.outcome for each in lab.episodes("fork-2")] == ["terminated"]
