"""Owns: the summary of `collect` says what made its episodes worth less than they could be.

- Whose answers were cut, as an app that parses them goes another way for it.
- How many stopped at an interrupt, where nobody answers.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.compare_rig import save_model
from support.fake_vllm import FakeVllm, running

from marft_bridge.commands.collect import collect
from marft_bridge.common.progress import Reporter
from marft_bridge.config.bridge import BridgeConfig

APP = """
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

model = ChatOpenAI(model="base", base_url="http://127.0.0.1:9/v1", api_key="k", max_retries=0)


def grade(state: MessagesState):
    return {"messages": [model.invoke("Grade it.")]}


def write(state: MessagesState):
    return {"messages": [model.invoke("Write it.")]}


graph = StateGraph(MessagesState)
graph.add_node("grade", grade)
graph.add_node("write", write)
graph.add_edge(START, "grade")
graph.add_edge("grade", "write")
app = graph.compile()
tasks = [{"id": n, "messages": [("user", f"q{n}")]} for n in range(8)]


def reward(task, state):
    return 1.0
"""


def summary(max_tokens: int) -> str:
    """What the user is told of two episodes in which the grade is 20 tokens long, and the text 5."""

    def answer(body: dict[str, Any]) -> str:
        return "g" * 19 if "Grade" in str(body["messages"]) else "text"

    said, server = io.StringIO(), FakeVllm()
    server.answer = answer
    with running(server):
        config = BridgeConfig.model_validate(
            {
                "graph": {
                    "app": "my_app.py:app",
                    "nodes": ["grade", "write"],
                    "tasks": "my_app.py:tasks",
                    "reward": "my_app.py:reward",
                },
                "model": {"path": "model"},
                "serve": {"attach": server.url},
                "collect": {"episodes": 2},
                "sampling": {"max_tokens": max_tokens},
            }
        )
        collect(config, Reporter(Console(file=said, width=400)), resume=False)
    return said.getvalue()


@pytest.mark.parametrize(
    ("max_tokens", "cut_lines"),
    [
        (10, ["2 of 2 answers of 'grade' were cut at the limit of tokens: sampling.max_tokens is 10"]),
        (40, []),
    ],
)
def test_answers_that_were_cut_are_said_by_agent(
    max_tokens: int, cut_lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_app.py").write_text(APP)
    save_model(tmp_path / "model")
    said = summary(max_tokens)
    assert "collected 2 terminated" in said
    assert [line.partition(", where")[0] for line in said.splitlines() if "cut at the limit" in line] == cut_lines


def test_episodes_that_stopped_at_an_interrupt_are_said_to_have_no_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_app.py").write_text(APP.replace("graph.compile()", "graph.compile(interrupt_before=['write'])"))
    save_model(tmp_path / "model")
    said = summary(40)
    assert "collected 2 truncated" in said
    assert "2 stopped at an interrupt: nobody answers there, so that they have no reward" in said
    assert "mean rewards: none; store: " in said
