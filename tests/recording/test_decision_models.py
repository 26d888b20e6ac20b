"""Owns: a decision model of LangChain's is asked as a chat model is: its call is an action, which is never trained.

- The two middlewares that ask one (a router of models, a guard of tools) have the D that was worked out by hand.
- A decision that fails is a call that failed.
"""

from __future__ import annotations

import asyncio
import json
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.tools import tool
from langgraph.graph import START, StateGraph
from support.edge_rig import calls_tool, edges_of, recorded_traces, recorded_trajectories, says

from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from trace_store import conventions as c
from trace_store.journal import Journal

decisions = pytest.importorskip("langchain_core.decisions", reason="langchain-core has decision models from 1.8 on")
middleware = pytest.importorskip("langchain.agents.middleware")


class Question(TypedDict, total=False):
    q: str


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Journal(tmp_path / "journal"))


def decides(choice: str, risk: float = 0.0) -> Any:
    """A decision model that chooses this route, and finds every tool as risky as this."""

    class Decides(decisions.BaseDecisionModel):  # type: ignore[misc, name-defined]
        model: str = "judge-1"

        @property
        def _provider(self) -> str:
            return "mistral"

        def _classify(self, state: Any, questions: Any) -> Any:
            chosen = {"type": "choice", "choice": choice, "probabilities": {choice: 1.0}, "confidence": 1.0}
            answers = {
                key: decisions.ChoiceAnswer.model_validate(chosen)
                if isinstance(question, decisions.Choice)
                else decisions.NoulAnswer.model_validate({"type": "noul", "noul": risk})
                for key, question in questions.items()
            }
            usage = {"input_tokens": 7, "output_tokens": 1}
            return decisions.ClassifierResponse(model="judge-1b", answers=answers, usage=usage, request_id="r")

    return Decides()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_model_router_that_decides_acts_before_the_agent(asynchronous: bool, recorder: Recorder) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is in beta.*")
        router = middleware.ModelRouterMiddleware(
            choices={"fast": middleware.ModelChoice(model=says("quick"), criteria="simple")},
            instructions="choose",
            classifier=decides("fast"),
        )
    graph = wrap(create_agent(says("slow"), middleware=[router], name="worker"), recorder)
    question = {"messages": [("user", "hard?")]}
    result = asyncio.run(graph.ainvoke(question)) if asynchronous else graph.invoke(question)
    assert result["messages"][-1].content == "quick"
    (trajectory,) = recorded_trajectories(recorder)
    decision, answer = trajectory.actions
    # The model was chosen by what it wrote; the agent's code hands its state on, so that what it read is a bound.
    assert edges_of(trajectory) == {
        "trigger": f"{decision.node}>worker",
        "data": f"{decision.node}?worker",
    }
    assert (decision.node, decision.model) == ("worker/ModelRouterMiddleware.before_agent", "judge-1b")
    assert (decision.prompt_tokens, decision.sampled_tokens) == (7, 1)
    assert decision.untrainable_reason == "a decision model answers questions and samples no text"
    (spans,) = recorded_traces(recorder)
    (span,) = [span for span in spans if span.span_id == decision.action_id]
    assert (span.name, span.attributes[c.PROVIDER]) == ("chat judge-1", "mistral_ai")
    assert "hard?" in span.attributes[c.INPUT_MESSAGES]
    assert "fast" in span.attributes[c.OUTPUT_MESSAGES]
    assert answer.completion == "quick"


@pytest.mark.parametrize("risk", [0.1, 0.9])
def test_a_guard_that_decides_on_a_tool_is_asked_between_the_call_and_its_result(
    risk: float, recorder: Recorder
) -> None:
    @tool
    def delete(path: str) -> str:
        """Deletes it."""
        return "deleted"

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is in beta.*")
        guard = middleware.AutoModeMiddleware(tools=[delete], classifier=decides("", risk))
    agent = create_agent(says(calls_tool("delete", path="x"), "done"), [delete], middleware=[guard], name="worker")
    wrap(agent, recorder).invoke({"messages": [("user", "delete x")]})
    (trajectory,) = recorded_trajectories(recorder)
    assert [action.node for action in trajectory.actions] == ["worker", "worker/tools", "worker"]
    # The guard was sent the request and saw it as a message; the agent saw its own request, and the result that the
    # guard let through or wrote.
    assert edges_of(trajectory) == {
        "send": "worker1>worker/tools",
        "trigger": "worker/tools>worker2",
        "data": "worker/tools>worker2 worker1>worker/tools worker1>worker2",
        "tool": "worker1>worker2",
    }
    (spans,) = recorded_traces(recorder)
    assert len([span for span in spans if span.operation == c.EXECUTE_TOOL]) == (risk < 0.5)


def test_a_decision_that_fails_is_a_call_that_failed(recorder: Recorder) -> None:
    class Fails(decisions.BaseDecisionModel):  # type: ignore[misc, name-defined]
        model: str = "judge-1"

        @property
        def _provider(self) -> str:
            return "judges"

        def _classify(self, state: Any, questions: Any) -> Any:
            raise ConnectionError("no answer")

    def asks(state: Question) -> dict[str, Any]:
        with suppress(ConnectionError):
            Fails().invoke({"state": state["q"], "questions": {"is_it": decisions.Noul(instructions="is it?")}})
        return {}

    graph = StateGraph(Question)
    graph.add_node("asks", asks)
    graph.add_edge(START, "asks")
    wrap(graph.compile(), recorder).invoke({"q": "?"})
    (spans,) = recorded_traces(recorder)
    (call,) = [span for span in spans if span.operation == c.CHAT]
    assert (call.status, call.attributes[c.ERROR_TYPE]) == ("error", "ConnectionError")
    assert json.loads(call.attributes[c.INPUT_MESSAGES])[0]["role"] == "user"
