"""Owns: nodes that call their model with openai or anthropic are answered by the real engine, tokens and all.

The app's clients are made for a host that does not exist. The engine's ids decode to the text that the app got, and
there are as many ids as log-probs as tokens that the engine counted. test_clients_*.py have the same on a fake server,
with every corner; here is what only the real one can prove.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import httpx
import pytest
from anthropic import Anthropic, AsyncAnthropic
from conftest import RunningServer
from langgraph.graph import START, StateGraph
from openai import AsyncOpenAI, OpenAI
from support.edge_rig import recorded_trajectories

from marft_bridge.model_calls.clients.hooks import redirected_clients
from marft_bridge.model_calls.node_chat_model import NodeChat
from marft_bridge.model_calls.routing import Route, Routing, current_routing
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from marft_bridge.serving.adapter_registry import AdapterRegistry, publish
from marft_bridge.serving.zero_adapter import write_zero_adapter
from trace_store.journal import Journal
from trace_store.records import Action
from trainers.common.files import weights_to_sha256

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

NODE, VERSION = "asker", 700
QUESTION: Any = [{"role": "user", "content": "Say a number between one and nine."}]
NOWHERE: Any = {"api_key": "none", "base_url": "http://127.0.0.1:9/v1"}
TOOL: Any = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}


class Text(TypedDict, total=False):
    text: Any


@pytest.fixture(scope="module")
def route(vllm_server: RunningServer) -> Route:
    registry = AdapterRegistry(vllm_server.adapter_root, weights_to_sha256(vllm_server.model_dir))
    write_zero_adapter(registry.new_folder(NODE, VERSION), vllm_server.model_dir, ("q_proj", "v_proj"))
    registry.register(NODE, VERSION, None, {})
    publish(vllm_server.server, registry, NODE, VERSION)
    name = AdapterRegistry.served_name(NODE, VERSION)
    return Route(model=name, adapter=name, version=VERSION, temperature=0.7, max_tokens=48)


def run_episode(server: RunningServer, route: Route, node: Callable[[], Any], folder: Path) -> tuple[Any, Action]:
    """What the node of an app got, redirected and recorded, and its action."""
    options: dict[str, Any] = {"trust_env": False, "timeout": 300.0}
    recorder = Recorder(Journal(folder / "journal"))

    async def act(_: Text) -> Text:
        return {"text": await node()}

    graph = StateGraph(Text)
    graph.add_node(NODE, act)
    graph.add_edge(START, NODE)

    async def episode() -> Any:
        async with httpx.AsyncClient(**options) as async_client:
            with httpx.Client(**options) as client, redirected_clients():
                chat = NodeChat(
                    model=server.endpoint.model,
                    base_url=server.endpoint.base_url,
                    api_key=server.endpoint.api_key,
                    http_client=client,
                    http_async_client=async_client,
                )
                current_routing.set(Routing({NODE: route}, seed=7, chat=chat))
                return await wrap(graph.compile(), recorder).ainvoke({"text": ""})

    text = asyncio.run(episode())["text"]
    (trajectory,) = recorded_trajectories(recorder)
    (action,) = trajectory.actions
    return text, action


async def chat() -> Any:
    return OpenAI(**NOWHERE).chat.completions.create(model="gpt", messages=QUESTION).choices[0].message.content


async def chat_async_stream() -> Any:
    async with AsyncOpenAI(**NOWHERE) as client:
        chunks = await client.chat.completions.create(model="gpt", messages=QUESTION, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


async def responses() -> Any:
    return OpenAI(**NOWHERE).responses.create(model="gpt", input=QUESTION).output_text


async def responses_async_stream() -> Any:
    async with AsyncOpenAI(**NOWHERE) as client, client.responses.stream(model="gpt", input=QUESTION) as stream:
        events = [event async for event in stream]
        deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert events[-1].type in ("response.completed", "response.incomplete")
        assert deltas == events[-1].response.output_text
        return deltas


async def messages() -> Any:
    answer = Anthropic(**NOWHERE).messages.create(model="claude", max_tokens=48, messages=QUESTION)
    return "".join(block.text for block in answer.content if block.type == "text")


async def messages_async_stream() -> Any:
    async with (
        AsyncAnthropic(**NOWHERE) as client,
        client.messages.stream(model="claude", max_tokens=48, messages=QUESTION) as stream,
    ):
        text = "".join([part async for part in stream.text_stream])
        final = await stream.get_final_message()
        assert "".join(block.text for block in final.content if block.type == "text") == text
        assert final.usage.output_tokens > 0
        return text


async def messages_with_a_tool() -> Any:
    """The tool is forced, so that the small model calls it."""
    choice: Any = {"type": "tool", "name": "add"}
    answer = Anthropic(**NOWHERE).messages.create(
        model="claude", max_tokens=48, messages=QUESTION, tools=[TOOL], tool_choice=choice
    )
    assert [(block.type, block.name) for block in answer.content if block.type == "tool_use"] == [("tool_use", "add")]
    return None


WAYS = (chat, chat_async_stream, responses, responses_async_stream, messages, messages_async_stream)


@pytest.mark.parametrize("way", [*WAYS, messages_with_a_tool])
def test_a_call_is_answered_by_the_engine_under_the_nodes_adapter(
    way: Callable[[], Any], vllm_server: RunningServer, route: Route, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    text, action = run_episode(vllm_server, route, way, folder=tmp_path)
    assert (action.node, action.adapter, action.adapter_version) == (NODE, route.adapter, VERSION)
    assert action.trainable, action.untrainable_reason
    assert action.prompt_ids
    assert action.sampled_ids
    assert action.logprobs
    assert len(action.sampled_ids) == len(action.logprobs) == action.sampled_tokens or action.sampled_tokens is None
    assert max(action.logprobs) <= 0.0
    if text is not None:
        tokenizer = AutoTokenizer.from_pretrained(vllm_server.model_dir)
        assert tokenizer.decode(action.sampled_ids, skip_special_tokens=True) == text
