"""Owns: `collect` trains a node that calls its model with the openai package as it is, unless that is turned off."""

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
from trace_store.store import TraceStore

APP = """
from langgraph.graph import START, StateGraph
from openai import AsyncOpenAI
from typing_extensions import TypedDict


class State(TypedDict, total=False):
    question: str
    answer: str


async def say(state: State):
    async with AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="k", max_retries=0) as client:
        messages = [{"role": "user", "content": state["question"]}]
        answer = await client.chat.completions.create(model="gpt-nowhere", messages=messages)
        return {"answer": answer.choices[0].message.content}


graph = StateGraph(State)
graph.add_node("say", say)
graph.add_edge(START, "say")
app = graph.compile()
tasks = [{"id": n, "question": f"q{n}"} for n in range(20)]


def reward(task, state):
    return float(state["answer"] == "say@0 speaks")
"""


def collected(url: str, **record: Any) -> str:
    table = {"app": "asks.py:app", "nodes": ["say"], "tasks": "asks.py:tasks", "reward": "asks.py:reward"}
    config = BridgeConfig.model_validate(
        {
            "graph": table,
            "model": {"path": "model"},
            "serve": {"attach": url},
            "collect": {"episodes": 3},
            "record": record,
        }
    )
    text = io.StringIO()
    collect(config, Reporter(Console(file=text, width=400)), resume=False)
    return text.getvalue()


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    Path("asks.py").write_text(APP)
    save_model(tmp_path / "model")
    with running(FakeVllm()) as server:
        yield server


@pytest.mark.slow
def test_a_node_with_a_client_of_its_own_is_collected_to_train_on(vllm: FakeVllm, tmp_path: Path) -> None:
    assert "3 terminated" in collected(vllm.url)
    (path,) = tmp_path.rglob("*.duckdb")
    with TraceStore.open(path) as store:
        store.take_in()
        actions = [action for trajectory in store.trajectories() for action in trajectory.actions]
        rewards = [reward.value for trajectory in store.trajectories() for reward in trajectory.rewards]
    assert [(action.node, action.adapter, action.adapter_version, action.trainable) for action in actions] == [
        ("say", "say@0", 0, True)
    ] * 3
    assert rewards == [1.0] * 3


def test_turned_off_its_calls_go_where_the_app_sends_them(vllm: FakeVllm) -> None:
    with pytest.raises(Exception, match="APIConnectionError"):
        collected(vllm.url, other_clients=False)
    assert vllm.asked == []
