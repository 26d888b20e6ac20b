"""Owns: an app that builds its own models is answered by the real engine under its nodes' adapters, tokens and all.

The app knows nothing of us: its nodes build `ChatOpenAI` for a host that does not exist. Each way of calling a model
is made on the real vLLM, sync, async and streamed; the engine's ids decode to the text that the app got, and there
are as many ids as log-probs as tokens that the engine counted. test_redirect.py has the same on a fake server, with
every corner; here is what only the real one can prove.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import httpx
import pytest
from conftest import RunningServer
from langchain_core.messages import BaseMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph
from pydantic import BaseModel, Field
from support.edge_rig import recorded_trajectories

from marft_bridge.model_calls.node_chat_model import NodeChat
from marft_bridge.model_calls.redirect import redirected_models
from marft_bridge.model_calls.routing import Route, Routing, current_routing
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from marft_bridge.serving.adapter_registry import AdapterRegistry, publish
from marft_bridge.serving.zero_adapter import write_zero_adapter
from trace_store.journal import Journal
from trace_store.records import Action
from trainers.common.files import weights_to_sha256

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

NODE, VERSION = "writer", 600
QUESTION = "Say a number between one and nine."


class Text(TypedDict, total=False):
    text: Any


class Sum(BaseModel):
    """A sum."""

    left: int = Field(ge=0, le=9)
    right: int = Field(ge=0, le=9)


@tool
def add(left: int, right: int) -> int:
    """Adds two numbers."""
    return left + right


@pytest.fixture(scope="module")
def route(vllm_server: RunningServer) -> Route:
    registry = AdapterRegistry(vllm_server.adapter_root, weights_to_sha256(vllm_server.model_dir))
    write_zero_adapter(registry.new_folder(NODE, VERSION), vllm_server.model_dir, ("q_proj", "v_proj"))
    registry.register(NODE, VERSION, None, {})
    publish(vllm_server.server, registry, NODE, VERSION)
    name = AdapterRegistry.served_name(NODE, VERSION)
    return Route(model=name, adapter=name, version=VERSION, temperature=0.7, max_tokens=96)


@pytest.fixture
def ask(vllm_server: RunningServer, route: Route, tmp_path: Path) -> Callable[..., tuple[Any, Action]]:
    """Runs one node of an app, redirected and recorded: (what the node got, its action)."""
    endpoint, options = vllm_server.endpoint, {"trust_env": False, "timeout": 300.0}

    def run(node: Callable[[ChatOpenAI], Any], how: str) -> tuple[Any, Action]:
        recorder = Recorder(Journal(tmp_path / "journal"))

        async def anode(_: Text) -> Text:
            return {"text": await node(_own_model())}

        graph = StateGraph(Text)
        graph.add_node(NODE, anode if how.startswith("a") else lambda _: {"text": node(_own_model())})
        graph.add_edge(START, NODE)

        async def episode() -> Any:
            async with httpx.AsyncClient(**options) as async_client:
                with httpx.Client(**options) as client, redirected_models():
                    chat = NodeChat(
                        model=endpoint.model,
                        base_url=endpoint.base_url,
                        api_key=endpoint.api_key,
                        http_client=client,
                        http_async_client=async_client,
                    )
                    current_routing.set(Routing({NODE: route}, seed=7, chat=chat))
                    return await wrap(graph.compile(), recorder).ainvoke({"text": ""})

        got = asyncio.run(episode())["text"]
        (trajectory,) = recorded_trajectories(recorder)
        (action,) = trajectory.actions
        return got, action

    return run


def _own_model() -> ChatOpenAI:
    return ChatOpenAI(model="gpt-nowhere", base_url="http://127.0.0.1:9/v1", api_key="none")  # type: ignore[arg-type]


def decoded(server: RunningServer, action: Action) -> str:
    """The engine's ids as text, by the model's own tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(server.model_dir)
    text: str = tokenizer.decode(action.sampled_ids or (), skip_special_tokens=True)
    return text


def streamed(model: Any, question: str = QUESTION) -> Any:
    whole: Any = None
    for chunk in model.stream(question):
        whole = chunk if whole is None else whole + chunk
    return whole


async def astreamed(model: Any, question: str = QUESTION) -> Any:
    whole: Any = None
    async for chunk in model.astream(question):
        whole = chunk if whole is None else whole + chunk
    return whole


WAYS: dict[str, Callable[..., Any]] = {
    "invoke": lambda model, *question: model.invoke(*question or (QUESTION,)),
    "ainvoke": lambda model, *question: model.ainvoke(*question or (QUESTION,)),
    "stream": streamed,
    "astream": astreamed,
}


def _written_call(text: str) -> Any:
    """A tool call as the model writes it under the parser `hermes`."""
    return json.loads(text.strip().removeprefix("<tool_call>").removesuffix("</tool_call>"))


def expect_exact(action: Action) -> None:
    assert action.trainable, action.untrainable_reason  # ids, log-probs and the engine's count agree
    assert action.adapter == f"{NODE}@{VERSION}"
    assert action.adapter_version == VERSION
    assert action.temperature == 0.7
    assert action.prompt_ids


@pytest.mark.parametrize("how", WAYS)
def test_a_plain_call_is_answered_by_the_adapter_with_exact_tokens(
    how: str, ask: Callable[..., Any], vllm_server: RunningServer
) -> None:
    got, action = ask(WAYS[how], how)
    expect_exact(action)
    assert isinstance(got, BaseMessage)
    assert decoded(vllm_server, action).strip() == str(got.content).strip() != ""
    assert action.finish_reason in ("stop", "length")


@pytest.mark.parametrize("how", WAYS)
def test_a_tool_that_the_call_names_is_called_with_exact_tokens(
    how: str, ask: Callable[..., Any], vllm_server: RunningServer
) -> None:
    got, action = ask(lambda m: WAYS[how](m.bind_tools([add], tool_choice="add", strict=True), "Add 3 and 4."), how)
    expect_exact(action)
    (call,) = got.tool_calls
    assert call["name"] == "add"
    assert set(call["args"]) == {"left", "right"}
    assert _written_call(decoded(vllm_server, action)) == {"name": "add", "arguments": call["args"]}


@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_fits_its_schema_with_exact_tokens(
    how: str, method: str, ask: Callable[..., Any], vllm_server: RunningServer
) -> None:
    def asks(model: ChatOpenAI) -> Any:
        return WAYS[how](model.with_structured_output(Sum, method=method, strict=True), "Add 3 and 4.")

    got, action = ask(asks, how)
    expect_exact(action)
    assert isinstance(got, Sum)
    text = decoded(vllm_server, action)
    written = json.loads(text) if method == "json_schema" else _written_call(text)["arguments"]
    assert Sum.model_validate(written) == got


@pytest.mark.parametrize("how", WAYS)
def test_a_stop_sequence_ends_the_answer_and_the_ids_are_still_whole(
    how: str, ask: Callable[..., Any], vllm_server: RunningServer
) -> None:
    got, action = ask(lambda m: WAYS[how](m.bind(stop=["e"])), how)
    expect_exact(action)
    assert "e" not in got.content
    # The engine's last token holds the stop sequence, which is not part of the text.
    assert decoded(vllm_server, action).strip().startswith(str(got.content).strip())


def test_several_answers_to_one_call_are_no_action_to_train_on(ask: Callable[..., Any]) -> None:
    got, action = ask(lambda m: m.bind(n=2).invoke(QUESTION), "invoke")
    assert got.content
    assert action.untrainable_reason == "n=2: one call with several answers"
