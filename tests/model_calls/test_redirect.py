"""Owns: a node's own model is answered by the served model while an engine runs, and the app cannot tell.

- Every way to call a model gives the app the same result as without redirecting, and the recorder the exact tokens.
- Only nodes with a route are redirected; outside an episode, and after the last engine, nothing is.
- What the app asks for is carried, decided by the route, or refused by name; nothing disappears in silence.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import httpx
import pytest
from langchain.chat_models import init_chat_model
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.language_models import BaseChatModel, GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel, Field, PrivateAttr
from support.client_rig import node_chat
from support.fake_vllm import END_OF_TURN, Answer, FakeVllm, calls_to_text, id_to_logprob, running, text_to_ids

from marft_bridge.common.errors import GraphError
from marft_bridge.model_calls.node_chat_model import NodeChat
from marft_bridge.model_calls.redirect import redirected_models
from marft_bridge.model_calls.routing import Route, Routing, current_routing
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.wrap import wrap
from trace_store.assemble import spans_to_trajectory
from trace_store.journal import Journal, read_segment
from trace_store.records import Action, SpanRow

# LangChain dumps the events of a stream of structured output with the parsed object in them; redirected or not.
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")

WRITER = Route("writer@3", "writer@3", 3, temperature=0.7, max_tokens=200)


class Verdict(BaseModel):
    """What a judge says."""

    grade: int
    why: str


@tool
def look_up(word: str) -> str:
    """Looks a word up."""
    return word


ANTHROPIC_TOOL = {"name": "look_up", "description": "Looks up.", "input_schema": look_up.get_input_jsonschema()}


def scripted(body: dict[str, Any]) -> Answer:
    """The same on both servers, so that only the tokens tell who answered."""
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        return [(name, {"grade": 4, "why": "clear"} if name == "Verdict" else {"word": "owl"})]
    if body.get("tools"):
        return [("look_up", {"word": "owl"})]
    if body.get("response_format"):
        return json.dumps({"grade": 4, "why": "clear"})
    return "one two three four"


@dataclass
class Rig:
    """Our server, the app's provider, and a journal."""

    ours: FakeVllm
    hosted: FakeVllm
    chat: NodeChat
    folder: Path

    def model(self, **options: Any) -> ChatOpenAI:
        """What a node of the app builds for itself."""
        return ChatOpenAI(model="base", base_url=f"{self.hosted.url}/v1", api_key="hosted", max_retries=0, **options)

    def graph(self, node: Callable[..., Any], judge: Callable[..., Any] | None = None) -> Any:
        graph = StateGraph(State)
        graph.add_node("writer", node)
        graph.add_node("judge", judge or (lambda _: {}))
        graph.add_edge(START, "writer")
        graph.add_edge("writer", "judge")
        graph.add_edge("judge", END)
        return graph.compile()

    def redirected(self, run: Callable[[Any], Any], graph: Any, seed: int | None = 11) -> tuple[Any, list[Action]]:
        """The result of `run` on the recorded graph in an episode, and its actions."""
        recorder = Recorder(Journal(self.folder / f"journal-{len(list(self.folder.iterdir()))}"))
        recorded = wrap(graph, recorder)
        self.routing = Routing({"writer": WRITER}, seed, self.chat)
        token = current_routing.set(self.routing)
        try:
            with redirected_models():
                result = run(recorded)
        finally:
            current_routing.reset(token)
            recorded.unwrap()
            recorder.journal.close()
        assert recorder.failures == 0
        self.spans = [
            record
            for segment in Path(recorder.journal._folder).glob("*.segment")
            for record in read_segment(segment)[0]
            if isinstance(record, SpanRow)
        ]
        return result, list(spans_to_trajectory(self.spans).actions)


class State(TypedDict, total=False):
    out: Any


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    ours, hosted = FakeVllm(), FakeVllm()
    ours.adapters["writer@3"] = "/adapters/writer/3"
    ours.answer = hosted.answer = scripted
    hosted.auto_tools = ours.auto_tools = True
    with running(ours), running(hosted), httpx.Client(trust_env=False) as client:
        chat = node_chat(ours, client)
        yield Rig(ours, hosted, chat, tmp_path)


def plain(message: Any) -> Any:
    """A message as far as it may not depend on who answered."""
    return {
        "content": message.content,
        "calls": [(call["name"], call["args"]) for call in message.tool_calls],
        "finish": message.response_metadata.get("finish_reason"),
        "logprobs": message.response_metadata.get("logprobs"),
        "usage": message.usage_metadata,
        "type": type(message).__name__,
    }


def added(chunks: list[Any]) -> Any:
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    return [len(chunks), plain(total)]


# A config with a `configurable` of its own takes the place of LangGraph's, in which the node's task is named.
OWN_CONFIGURABLE: RunnableConfig = {"configurable": {"session_id": "s"}}
# Each gives what the app sees of the call; the same model is asked by all.
SYNC: dict[str, Callable[[ChatOpenAI], Any]] = {
    "invoke": lambda m: plain(m.invoke("hello")),
    "stream": lambda m: added(list(m.stream("hello"))),
    "stream with usage": lambda m: added(list(m.stream("hello", stream_usage=True))),
    "batch": lambda m: [plain(x) for x in m.batch(["a", "b"], {"max_concurrency": 1})],
    "logprobs that the app asks for": lambda m: plain(m.bind(logprobs=True).invoke("hello")),
    "stop": lambda m: plain(m.bind(stop=["three"]).invoke("hello")),
    "stop in stream": lambda m: added(list(m.stream("hello", stop=["three"]))),
    "named tool": lambda m: plain(m.bind_tools([look_up], tool_choice="look_up").invoke("hello")),
    "required tool": lambda m: plain(m.bind_tools([look_up], tool_choice="any").invoke("hello")),
    "auto tool": lambda m: plain(m.bind_tools([look_up]).invoke("hello")),
    "streamed tool": lambda m: added(list(m.bind_tools([look_up]).stream("hello"))),
    "json_schema": lambda m: m.with_structured_output(Verdict, method="json_schema").invoke("hello"),
    "function_calling": lambda m: m.with_structured_output(Verdict, method="function_calling").invoke("hello"),
    "json_mode": lambda m: m.with_structured_output(Verdict, method="json_mode").invoke("hello"),
    "streamed json_schema": lambda m: list(m.with_structured_output(Verdict, method="json_schema").stream("hello")),
    "with raw": lambda m: m.with_structured_output(Verdict, include_raw=True).invoke("hello")["parsed"],
    "fallbacks": lambda m: plain(m.with_fallbacks([m]).invoke("hello")),
    "v3 events": lambda m: m.stream_events("hello", version="v3").output.content,
    "configurable of the call": lambda m: plain(m.invoke("hello", OWN_CONFIGURABLE)),
    "configurable of a chain": lambda m: plain((RunnableLambda(str) | m).invoke("hello", OWN_CONFIGURABLE)),
    "configurable of a streamed chain": lambda m: added(
        list((RunnableLambda(str) | m).stream("hello", OWN_CONFIGURABLE))
    ),
}
ASYNC: dict[str, Callable[[ChatOpenAI], Any]] = {
    "ainvoke": lambda m: _plain(m.ainvoke("hello")),
    "astream": lambda m: _added(m.astream("hello")),
    "astream with usage": lambda m: _added(m.astream("hello", stream_usage=True)),
    "abatch": lambda m: _each(m.abatch(["a", "b"], {"max_concurrency": 1})),
    "stop": lambda m: _plain(m.bind(stop=["three"]).ainvoke("hello")),
    "named tool": lambda m: _plain(m.bind_tools([look_up], tool_choice="look_up").ainvoke("hello")),
    "streamed tool": lambda m: _added(m.bind_tools([look_up]).astream("hello")),
    "json_schema": lambda m: m.with_structured_output(Verdict, method="json_schema").ainvoke("hello"),
    "function_calling": lambda m: m.with_structured_output(Verdict, method="function_calling").ainvoke("hello"),
    "streamed json_schema": lambda m: _all(m.with_structured_output(Verdict, method="json_schema").astream("hello")),
    "fallbacks": lambda m: _plain(m.with_fallbacks([m]).ainvoke("hello")),
    "configurable of a chain": lambda m: _plain((RunnableLambda(str) | m).ainvoke("hello", OWN_CONFIGURABLE)),
}


async def _plain(answer: Any) -> Any:
    return plain(await answer)


async def _each(answers: Any) -> Any:
    return [plain(answer) for answer in await answers]


async def _all(chunks: Any) -> Any:
    return [chunk async for chunk in chunks]


async def _added(chunks: Any) -> Any:
    return added(await _all(chunks))


def check_tokens(action: Action, body: dict[str, Any]) -> None:
    """The action is what our server was asked and sampled, worked out from its answer."""
    answer = scripted(body)
    text = answer if isinstance(answer, str) else calls_to_text(answer)
    expected = text_to_ids(text)
    if body.get("stop"):
        expected = list(b"one two three")
    assert (action.node, action.trainable, action.untrainable_reason) == ("writer", True, None)
    assert action.prompt_ids == tuple(json.dumps(body["messages"]).encode())
    assert action.sampled_ids == tuple(expected)
    assert action.logprobs == tuple(id_to_logprob(token) for token in expected)
    assert (action.model, action.adapter, action.adapter_version) == ("writer@3", "writer@3", 3)
    assert (action.temperature, action.top_p, action.max_tokens) == (0.7, 1.0, 200)
    assert action.seed == body["seed"]
    assert action.finish_reason == ("stop" if isinstance(answer, str) else "tool_calls")


def check_redirected(rig: Rig, actions: list[Action]) -> None:
    assert rig.hosted.asked == []
    assert [body["model"] for body in rig.ours.asked] == ["writer@3"] * len(actions)
    assert actions
    for action, body in zip(actions, rig.ours.asked, strict=True):
        check_tokens(action, body)
        assert (body["top_p"], body["temperature"], body["logprobs"]) == (1.0, 0.7, True)


@pytest.mark.parametrize("how", SYNC)
def test_a_sync_call_gives_the_app_the_same_and_the_recorder_the_exact_tokens(rig: Rig, how: str) -> None:
    graph = rig.graph(lambda _: {"out": SYNC[how](rig.model())})
    unredirected = graph.invoke({})["out"]
    rig.hosted.asked.clear()
    result, actions = rig.redirected(lambda app: app.invoke({}), graph)
    assert result["out"] == unredirected
    check_redirected(rig, actions)


@pytest.mark.parametrize("how", ASYNC)
def test_an_async_call_gives_the_app_the_same_and_the_recorder_the_exact_tokens(rig: Rig, how: str) -> None:
    async def node(_: Any) -> Any:
        return {"out": await ASYNC[how](rig.model())}

    graph = rig.graph(node)
    unredirected = asyncio.run(graph.ainvoke({}))["out"]
    rig.hosted.asked.clear()
    result, actions = rig.redirected(lambda app: asyncio.run(app.ainvoke({})), graph)
    assert result["out"] == unredirected
    check_redirected(rig, actions)


@pytest.mark.parametrize("mode", ["messages", "updates"])
def test_a_streamed_graph_yields_the_same_parts(rig: Rig, mode: str) -> None:
    def parts(app: Any) -> list[Any]:
        streamed = app.stream({}, stream_mode=mode)
        return [
            plain(part[0]) | {"node": part[1]["langgraph_node"]} if mode == "messages" else part for part in streamed
        ]

    async def aparts(app: Any) -> list[Any]:
        streamed = app.astream({}, stream_mode=mode)
        return [
            plain(part[0]) | {"node": part[1]["langgraph_node"]} if mode == "messages" else part
            async for part in streamed
        ]

    graph = rig.graph(lambda _: {"out": rig.model().invoke("hello").content})
    unredirected = parts(graph)
    rig.hosted.asked.clear()
    result, actions = rig.redirected(parts, graph)
    assert result == unredirected
    check_redirected(rig, actions)
    assert rig.ours.asked[0].get("stream", False) is (mode == "messages")
    rig.ours.asked.clear()
    result, actions = rig.redirected(lambda app: asyncio.run(aparts(app)), graph)
    assert result == unredirected
    check_redirected(rig, actions)


@pytest.mark.parametrize("streamed", [False, True])
def test_several_answers_work_and_are_no_action_to_train_on(rig: Rig, streamed: bool) -> None:
    def node(_: Any, config: RunnableConfig) -> Any:
        model = rig.model(n=2)
        if streamed:
            return {"out": added(list(model.stream("hello")))}
        result = model.generate([[HumanMessage("hello")]], callbacks=config["callbacks"])
        return {"out": [generation.text for generation in result.generations[0]]}

    graph = rig.graph(node)
    unredirected = graph.invoke({})["out"]
    result, (action,) = rig.redirected(lambda app: app.invoke({}), graph)
    assert result["out"] == unredirected
    assert rig.ours.asked[0]["n"] == 2
    assert (action.trainable, action.untrainable_reason) == (False, "n=2: one call with several answers")
    assert action.sampled_ids is None


def test_several_prompts_in_one_request_are_several_actions(rig: Rig) -> None:
    def node(_: Any, config: RunnableConfig) -> Any:
        result = rig.model().generate([[HumanMessage("a")], [HumanMessage("bb")]], callbacks=config["callbacks"])
        return {"out": [each[0].text for each in result.generations]}

    _, actions = rig.redirected(lambda app: app.invoke({}), rig.graph(node))
    check_redirected(rig, sorted(actions, key=lambda action: len(action.prompt_ids or ())))


def test_a_retry_is_a_failed_call_and_one_that_counts(rig: Rig) -> None:
    rig.ours.fail_next = 1
    graph = rig.graph(lambda _: {"out": rig.model().with_retry(wait_exponential_jitter=False).invoke("hello").content})
    result, actions = rig.redirected(lambda app: app.invoke({}), graph)
    assert result["out"] == "one two three four"
    assert sorted(action.trainable for action in actions) == [False, True]
    (failed,) = [action for action in actions if not action.trainable]
    assert (failed.untrainable_reason or "").startswith("the call failed: OpenAIAPIError")


@pytest.mark.parametrize("fixed", [True, False])
def test_init_chat_model_is_redirected_with_and_without_a_fixed_model(rig: Rig, fixed: bool) -> None:
    options: dict[str, Any] = {"base_url": f"{rig.hosted.url}/v1", "api_key": "hosted"}

    def node(_: Any) -> Any:
        if fixed:
            return {"out": init_chat_model("openai:gpt-4o-mini", **options).invoke("hello").content}
        model = init_chat_model(configurable_fields=("model",), **options).bind_tools([look_up])
        config: Any = {"configurable": {"model": "openai:gpt-4o-mini"}}
        return {"out": model.invoke("hello", config).tool_calls[0]["args"]}

    result, actions = rig.redirected(lambda app: app.invoke({}), rig.graph(node))
    assert result["out"] == ("one two three four" if fixed else {"word": "owl"})
    check_redirected(rig, actions)


def test_a_node_without_a_route_keeps_its_model_and_its_settings(rig: Rig) -> None:
    def judge(_: Any) -> Any:
        return {"out": rig.model(temperature=0.1, seed=3, frequency_penalty=0.5).invoke("judge it").content}

    graph = rig.graph(lambda _: {"out": rig.model().invoke("hello").content}, judge)
    _, actions = rig.redirected(lambda app: app.invoke({}), graph)
    (body,) = rig.hosted.asked
    assert (body["model"], body["temperature"], body["seed"], body["frequency_penalty"]) == ("base", 0.1, 3, 0.5)
    assert "logprobs" not in body
    assert "return_token_ids" not in body
    by_node = {action.node: action for action in actions}
    assert by_node["writer"].trainable
    assert by_node["judge"].untrainable_reason == "no prompt token ids from the engine"
    assert rig.routing.routed_calls == {"writer": 1}
    assert rig.routing.unrouted_calls == {"judge": 1}


def test_outside_an_episode_and_after_the_last_engine_nothing_is_redirected(rig: Rig) -> None:
    before = dict(vars(BaseChatModel))
    with redirected_models():
        with redirected_models():
            pass
        assert vars(BaseChatModel)["generate"] is not before["generate"]
        assert rig.model().invoke("hello").content == "one two three four"
    assert {name: value for name, value in vars(BaseChatModel).items() if name in before} == before
    assert (len(rig.hosted.asked), len(rig.ours.asked)) == (1, 0)


def test_the_chat_span_names_the_model_and_provider_that_answered(rig: Rig) -> None:
    rig.redirected(lambda app: app.invoke({}), rig.graph(lambda _: {"out": rig.model().invoke("hello").content}))
    (span,) = [span for span in rig.spans if span.operation == "chat"]
    assert span.name == "chat writer@3"
    assert span.attributes["gen_ai.provider.name"] == "vllm"
    assert span.attributes["gen_ai.request.model"] == "writer@3"
    assert span.attributes["gen_ai.response.id"] == "chatcmpl-1"


class OverridesGenerate(ChatOpenAI):
    """A class that stands in front of the public methods."""

    def generate(self, messages: Any, stop: Any = None, callbacks: Any = None, **kwargs: Any) -> Any:
        """Straight to the method below."""
        from langchain_core.callbacks import CallbackManager
        from langchain_core.outputs import LLMResult

        manager = CallbackManager.configure(callbacks, self.callbacks)
        (run,) = manager.on_chat_model_start({}, messages, invocation_params={"model": self.model_name})
        kwargs = {name: value for name, value in kwargs.items() if name in ("tools", "tool_choice")}
        result: ChatResult = self._generate_with_cache(messages[0], stop=stop, run_manager=run, **kwargs)
        run.on_llm_end(LLMResult(generations=[result.generations]))
        return LLMResult(generations=[result.generations])


def test_a_class_that_overrides_the_public_methods_is_caught_below_them(rig: Rig) -> None:
    model = OverridesGenerate(model="base", base_url=f"{rig.hosted.url}/v1", api_key="hosted")
    _, actions = rig.redirected(lambda app: app.invoke({}), rig.graph(lambda _: {"out": model.invoke("hello").content}))
    check_redirected(rig, actions)
    (span,) = [span for span in rig.spans if span.operation == "chat"]
    assert span.attributes["gen_ai.provider.name"] == "vllm"


class JsonChat(ChatOpenAI):
    """An app's own class: asks for JSON, changes its requests, and tells the answer from what stands before it."""

    form: str | None = None
    _lead: str = PrivateAttr("So: ")

    def _with_form(self, options: dict[str, Any]) -> dict[str, Any]:
        return options | ({"response_format": {"type": "json_object"}} if self.form == "json" else {})

    def _without_lead(self, result: ChatResult) -> ChatResult:
        message = result.generations[0].message
        message.content = str(message.content).removeprefix(self._lead)
        return result

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        return self._without_lead(super()._generate(messages, stop, run_manager, **self._with_form(kwargs)))

    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        return self._without_lead(await super()._agenerate(messages, stop, run_manager, **self._with_form(kwargs)))

    def _stream(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield from super()._stream(*args, **self._with_form(kwargs))

    def _get_request_payload(self, input_: Any, *, stop: Any = None, **kwargs: Any) -> dict[str, Any]:
        payload = super()._get_request_payload(input_, stop=stop, **kwargs)
        return {**payload, "temperature": 0.1, "tool_choice": "none"}


OWN_CALLS: dict[str, Callable[[ChatOpenAI], Any]] = {
    "sync": lambda model: model.invoke("hello").content,
    "async": lambda model: asyncio.run(model.ainvoke("hello")).content,
    "stream": lambda model: "".join(str(part.content) for part in model.stream("hello")).removeprefix("So: "),
}


@pytest.mark.parametrize("how", OWN_CALLS)
def test_the_methods_of_an_apps_own_class_do_not_run_around_our_server_and_are_named(
    how: str, rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing makes sure that what they give is the engine's answer to the recorded prompt."""
    rig.ours.answer = lambda _: "So: one"
    model = JsonChat(model="base", base_url=f"{rig.hosted.url}/v1", api_key="hosted", form="json")
    graph = rig.graph(lambda _: {"out": OWN_CALLS[how](model)})
    with caplog.at_level(logging.WARNING, "marft_bridge"):
        result, (action,) = rig.redirected(lambda app: app.invoke({}), graph)
    assert result["out"] == ("one" if how == "stream" else "So: one")
    assert "response_format" not in rig.ours.asked[0]
    assert action.sampled_ids == tuple(text_to_ids("So: one"))
    assert [record.message for record in caplog.records] == [
        "node 'writer': in training its model's own _generate, _agenerate, _stream, _get_request_payload does not run: "
        "the served model answers in the place of JsonChat"
    ]


class Careful(BaseChatModel):
    """An app's own class that asks another model."""

    inner: BaseChatModel

    @property
    def _llm_type(self) -> str:
        return "careful"

    def _generate(self, messages: Any, *_: Any, **__: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self.inner.invoke([*messages, "Take care."]))])


class RawChat(ChatOpenAI):
    """An app's own class that asks in its own way."""

    def _generate(self, *_: Any, **__: Any) -> ChatResult:
        raise AssertionError("its own way")


def test_a_method_of_an_apps_own_class_that_cannot_run_is_named_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    anthropic: Any = pytest.importorskip("langchain_anthropic").ChatAnthropic

    class PatchedClaude(anthropic):  # type: ignore[misc]
        def _get_request_payload(self, *args: Any, **kwargs: Any) -> Any:
            return super()._get_request_payload(*args, **kwargs)

    models = (
        RawChat(model="base", api_key="hosted"),
        PatchedClaude(model="claude-sonnet-4-5", api_key="x"),
        Careful(inner=rig.model()),
        ForeignChat(messages=iter([])),
    )
    graph = rig.graph(lambda _: {"out": [model.invoke("hello").content for model in (*models, *models)]})
    with caplog.at_level(logging.WARNING, "marft_bridge"):
        result, actions = rig.redirected(lambda app: app.invoke({}), graph)
    assert result["out"] == ["one two three four"] * 8
    check_redirected(rig, actions)
    start = "node 'writer': in training its model's own"
    assert [record.message for record in caplog.records] == [
        f"{start} _generate does not run: the served model answers in the place of RawChat",
        f"{start} _get_request_payload does not run: the served model answers in the place of PatchedClaude",
        f"{start} _generate does not run: the served model answers in the place of Careful",
    ]


class ForeignChat(GenericFakeChatModel):
    """A chat model of another provider, with its own names for things."""

    stop_sequences: list[str] | None = None
    max_tokens: int | None = None
    top_k: int | None = None

    def bind_tools(self, tools: Any, *, tool_choice: Any = None, **kwargs: Any) -> Any:
        return self.bind(tools=tools, tool_choice=tool_choice, **kwargs)


NAMED = {"type": "function", "function": {"name": "look_up"}}


@pytest.mark.parametrize(
    ("choice", "openai_choice"),
    [
        ({"type": "tool", "name": "look_up"}, NAMED),  # Anthropic
        ({"type": "any"}, "required"),
        ({"type": "auto"}, "auto"),
        ({"tool": {"name": "look_up"}}, NAMED),  # Bedrock's Converse
        ({"any": {}}, "required"),
        ({"auto": {}}, "auto"),
        ("look_up", NAMED),  # Gemini
        ("any", "required"),
    ],
)
def test_tools_bound_in_another_providers_format_reach_our_server_in_its_own(
    choice: Any, openai_choice: Any, rig: Rig
) -> None:
    model = ForeignChat(messages=iter([]))
    node = lambda _: {"out": model.bind_tools([ANTHROPIC_TOOL], tool_choice=choice).invoke("hello").tool_calls}  # noqa: E731
    result, actions = rig.redirected(lambda app: app.invoke({}), rig.graph(node))
    assert [(call["name"], call["args"]) for call in result["out"]] == [("look_up", {"word": "owl"})]
    check_redirected(rig, actions)
    (body,) = rig.ours.asked
    assert body["tools"][0]["function"]["parameters"]["required"] == ["word"]
    assert body["tool_choice"] == openai_choice


SCHEMA = {"title": "Verdict", "type": "object", "properties": {"good": {"type": "boolean"}}, "required": ["good"]}
OPENAI_SCHEMA = {"type": "json_schema", "json_schema": {"name": "Verdict", "schema": SCHEMA, "strict": True}}
CONVERSE_FORMAT = {"type": "json_schema", "structure": {"jsonSchema": {"schema": json.dumps(SCHEMA)}}}
FORMATS: list[tuple[dict[str, Any], Any]] = [
    ({"response_mime_type": "application/json", "response_json_schema": SCHEMA}, OPENAI_SCHEMA),  # Gemini
    ({"response_mime_type": "application/json", "response_schema": SCHEMA}, OPENAI_SCHEMA),
    ({"response_mime_type": "application/json"}, {"type": "json_object"}),
    ({"response_mime_type": "text/plain"}, None),
    ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, OPENAI_SCHEMA),  # Anthropic
    ({"output_format": {"type": "json_schema", "schema": SCHEMA}}, OPENAI_SCHEMA),
    ({"output_config": {"textFormat": CONVERSE_FORMAT}}, OPENAI_SCHEMA),  # Bedrock's Converse
    ({"format": SCHEMA}, OPENAI_SCHEMA),  # Ollama
    ({"format": "json"}, {"type": "json_object"}),
    ({"format": ""}, None),
]


@pytest.mark.parametrize(("options", "response_format"), FORMATS)
def test_a_response_format_in_another_providers_form_reaches_our_server_in_its_own(
    options: dict[str, Any], response_format: Any, rig: Rig
) -> None:
    model = ForeignChat(messages=iter([])).bind(**options)
    _, actions = rig.redirected(lambda app: app.invoke({}), rig.graph(lambda _: {"out": model.invoke("hello").content}))
    check_redirected(rig, actions)
    (body,) = rig.ours.asked
    assert body.get("response_format") == response_format


class FormedChat(ForeignChat):
    """One whose answer's form is a setting of the model, as in Ollama's class, Gemini's and Anthropic's."""

    format: Any = None
    response_mime_type: str | None = None
    response_schema: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    model_kwargs: dict[str, Any] = Field(default_factory=dict)


@pytest.mark.parametrize(
    ("settings", "response_format"),
    [
        *(each for each in FORMATS if FormedChat.model_fields.keys() >= each[0].keys()),
        ({"model_kwargs": {"response_format": {"type": "json_object"}}}, {"type": "json_object"}),  # Groq, Mistral
    ],
)
def test_a_response_format_that_is_a_setting_of_the_model_holds_for_our_server(
    settings: dict[str, Any], response_format: Any, rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    model = FormedChat(messages=iter([]), **settings)
    _, actions = rig.redirected(lambda app: app.invoke({}), rig.graph(lambda _: {"out": model.invoke("hello").content}))
    check_redirected(rig, actions)
    (body,) = rig.ours.asked
    assert body.get("response_format") == response_format
    assert caplog.records == []


def own_class(provider: str) -> Any:
    if provider == "anthropic":
        return pytest.importorskip("langchain_anthropic").ChatAnthropic(model="claude-sonnet-4-5", api_key="x")
    return pytest.importorskip("langchain_google_genai").ChatGoogleGenerativeAI(model="gemini-3", api_key="x")


@pytest.mark.parametrize("provider", ["anthropic", "google"])
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_of_another_providers_class_is_our_servers(
    method: str, provider: str, rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """And of settings that the class fills in itself nothing is said."""
    model = own_class(provider).with_structured_output(Verdict, method=method)
    result, actions = rig.redirected(
        lambda app: app.invoke({}), rig.graph(lambda _: {"out": model.invoke("hello").model_dump()})
    )
    check_redirected(rig, actions)
    assert result["out"] == {"grade": 4, "why": "clear"}
    assert caplog.records == []


def test_hints_to_a_providers_cache_are_not_sent_to_our_server(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    hint = {"cache_control": {"type": "ephemeral"}}
    prompt = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief.", **hint}]},
        {"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "you", **hint}]},
    ]
    model = own_class("anthropic").bind_tools([ANTHROPIC_TOOL | hint])
    graph = rig.graph(lambda _: {"out": model.invoke(prompt, **hint).tool_calls})
    _, actions = rig.redirected(lambda app: app.invoke({}), graph)
    check_redirected(rig, actions)
    (body,) = rig.ours.asked
    assert "cache_control" not in json.dumps(body)
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "you"}]
    assert [message["content"] for message in body["messages"]] == ["Be brief.", parts]
    assert caplog.records == []


def test_a_class_that_streams_by_a_setting_streams_from_our_server(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    class StreamingChat(ForeignChat):
        streaming: bool = False

    model = StreamingChat(messages=iter([]), streaming=True)
    rig.redirected(lambda app: app.invoke({}), rig.graph(lambda _: {"out": model.invoke("hello").content}))
    assert [body["stream"] for body in rig.ours.asked] == [True]
    assert caplog.records == []


def test_a_response_type_that_our_server_has_no_word_for_is_refused_by_name(rig: Rig) -> None:
    model = ForeignChat(messages=iter([])).bind(response_mime_type="text/x.enum", response_schema=SCHEMA)
    graph = rig.graph(lambda _: {"out": model.invoke("hello").content})
    with pytest.raises(GraphError, match="asks its model for 'response_mime_type'"):
        rig.redirected(lambda app: app.invoke({}), graph)


def test_another_providers_settings_are_carried_or_said_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    model = ForeignChat(messages=iter([]), stop_sequences=["three"], max_tokens=6, top_k=5)
    with caplog.at_level(logging.WARNING, "marft_bridge"):
        graph = rig.graph(lambda _: {"out": [model.invoke(text).content for text in "ab"]})
        result, actions = rig.redirected(lambda app: app.invoke({}), graph)
    assert result["out"] == ["one tw", "one tw"]
    assert [body["stop"] for body in rig.ours.asked] == [["three"]] * 2
    assert [(action.max_tokens, action.finish_reason) for action in actions] == [(6, "length")] * 2
    assert [record.message for record in caplog.records] == [
        "node 'writer': in training its model's top_k has no effect; [sampling] decides"
    ]


def test_the_route_decides_what_the_trainers_ratios_depend_on(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    model = rig.model(
        temperature=0.0,
        top_p=0.5,
        seed=3,
        frequency_penalty=1.0,
        presence_penalty=1.0,
        logit_bias={50: 10},
        max_tokens=500,
        model_kwargs={"user": "u"},
        extra_body={"top_k": 3, "chat_template_kwargs": {"enable_thinking": False}},
    )
    with caplog.at_level(logging.WARNING, "marft_bridge"):
        _, actions = rig.redirected(lambda app: app.invoke({}), rig.graph(lambda _: {"out": model.invoke("a").content}))
    (body,) = rig.ours.asked
    check_redirected(rig, actions)
    assert body["max_tokens"] == 200
    assert body["seed"] != 3
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    gone = {"frequency_penalty", "presence_penalty", "logit_bias", "top_k", "user", "max_completion_tokens"}
    assert not gone & body.keys()
    (said,) = [record.message for record in caplog.records]
    for name in (
        "temperature",
        "top_p",
        "seed",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "top_k",
        "user",
    ):
        assert name in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"previous_response_id": "r"}, "node 'writer' asks its model for 'previous_response_id', which the served"),
        ({"extra_body": {"ignore_eos": True}}, "asks its model for 'extra_body.ignore_eos'"),
        ({"tools": [{"type": "web_search"}]}, "binds 'web_search', a tool that only a hosted service runs"),
        ({"tools": [{"function_declarations": []}]}, "tools in a form that cannot be read as OpenAI's"),
    ],
)
def test_what_our_server_cannot_do_is_refused_by_name(rig: Rig, options: dict[str, Any], message: str) -> None:
    graph = rig.graph(lambda _: {"out": rig.model().bind(**options).invoke("a").content})
    with pytest.raises(GraphError, match=message) as caught:
        rig.redirected(lambda app: app.invoke({}), graph)
    assert "\n" not in str(caught.value)
    assert rig.ours.asked == rig.hosted.asked == []


def test_tools_without_a_parser_on_the_server_are_refused_with_the_option(rig: Rig) -> None:
    rig.chat.auto_tools = False

    def bound(choice: Any) -> Callable[[Any], Any]:
        return lambda _: {"out": rig.model().bind_tools([look_up], tool_choice=choice).invoke("a").content}

    for choice in (None, "look_up", "required"):  # vLLM needs its parser for a named tool too
        with pytest.raises(GraphError, match=r"set serve\.tool_call_parser"):
            rig.redirected(lambda app: app.invoke({}), rig.graph(bound(choice)))
    _, actions = rig.redirected(lambda app: app.invoke({}), rig.graph(bound("none")))
    check_redirected(rig, actions)


def test_a_remembered_answer_is_no_sample_and_the_providers_rate_limit_does_not_bind(rig: Rig) -> None:
    slow = InMemoryRateLimiter(requests_per_second=0.001, max_bucket_size=1)
    model = rig.model(rate_limiter=slow, cache=InMemoryCache())
    set_llm_cache(InMemoryCache())
    try:
        graph = rig.graph(lambda _: {"out": [model.invoke("same").content for _ in range(3)]})
        _, actions = rig.redirected(lambda app: app.invoke({}), graph)
    finally:
        set_llm_cache(None)
    check_redirected(rig, actions)
    assert len({body["seed"] for body in rig.ours.asked}) == 3


def test_streaming_that_is_disabled_stays_disabled(rig: Rig) -> None:
    graph = rig.graph(lambda _: {"out": [plain(x) for x in rig.model(disable_streaming=True).stream("a")]})
    unredirected = graph.invoke({})["out"]
    rig.hosted.asked.clear()
    result, actions = rig.redirected(lambda app: app.invoke({}), graph)
    assert result["out"] == unredirected
    check_redirected(rig, actions)
    assert not rig.ours.asked[0].get("stream")


def test_a_model_on_the_responses_interface_gets_content_in_blocks(rig: Rig) -> None:
    graph = rig.graph(lambda _: {"out": rig.model(use_responses_api=True).invoke("a").content})
    result, actions = rig.redirected(lambda app: app.invoke({}), graph)
    assert [(block["type"], block["text"]) for block in result["out"]] == [("text", "one two three four")]
    check_redirected(rig, actions)


def test_callbacks_tags_and_metadata_of_the_apps_model_are_kept(rig: Rig) -> None:
    from langchain_core.callbacks import BaseCallbackHandler

    class Seen(BaseCallbackHandler):
        names: list[Any] = []  # noqa: RUF012

        def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
            self.names.append((serialized["name"], kwargs["tags"][-1], kwargs["metadata"]["mine"]))

    model = rig.model(callbacks=[Seen()], tags=["drafts"], metadata={"mine": 1})
    rig.redirected(lambda app: app.invoke({}), rig.graph(lambda _: {"out": model.invoke("a").content}))
    assert Seen.names == [("ChatOpenAI", "drafts", 1)]


def test_a_node_chat_that_the_app_built_itself_is_redirected_too(rig: Rig) -> None:
    def own() -> NodeChat:
        return NodeChat(model="base", base_url=f"{rig.hosted.url}/v1", api_key="hosted")

    graph = rig.graph(lambda _: {"out": own().invoke("a").content}, lambda _: {"out": own().invoke("b").content})
    _, actions = rig.redirected(lambda app: app.invoke({}), graph)
    assert [(body["model"], body["messages"][0]["content"]) for body in rig.hosted.asked] == [("base", "b")]
    assert [body["messages"][0]["content"] for body in rig.ours.asked] == ["a"]
    assert [action.adapter for action in actions] == ["writer@3", None]


def test_a_count_of_the_engine_that_disagrees_makes_the_action_untrainable(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support import fake_vllm

    right = fake_vllm._usage
    monkeypatch.setattr(fake_vllm, "_usage", lambda choices: right(choices) | {"completion_tokens": 3})
    graph = rig.graph(lambda _: {"out": [chunk.content for chunk in rig.model().stream("a")]})
    _, (action,) = rig.redirected(lambda app: app.invoke({}), graph)
    assert (
        action.untrainable_reason == f"{len(text_to_ids('one two three four'))} sampled tokens but the engine counted 3"
    )
    assert END_OF_TURN in (action.sampled_ids or ())


def test_a_plain_message_is_what_the_app_gets(rig: Rig) -> None:
    graph = rig.graph(lambda _: {"out": rig.model().invoke("a")})
    result, _ = rig.redirected(lambda app: app.invoke({}), graph)
    message: AIMessage = result["out"]
    assert "token_ids" not in str(message)
    assert message.response_metadata.get("logprobs") is None
