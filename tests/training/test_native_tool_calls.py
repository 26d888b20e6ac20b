"""Owns: tools that an app binds are in the record of its calls, and its tool calls can be imitated from that record.

- An app with `bind_tools`, recorded by `wrap`, taken into a store: its calls have the ids that `apply_chat_template`
  makes of the messages and the very tools, and imitation counts them as learned from.
- Where the template does not know tools, where the record does not hold them, and where redaction took something out of
  them, the calls are left out with the reason; a call that offered none is learned from beside calls that did.
- The definitions have the form of the conventions, are bounded, and keep the order in which they were sent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.graph import START, MessagesState, StateGraph
from support.chat_rig import CHATML, save_chat_model, save_chat_tokenizer
from support.trainer_options import trainer_options
from transformers import AutoTokenizer

from marft_bridge.config.record import RecordOptions
from marft_bridge.ingest.recorded_chats import attributes_to_tools
from marft_bridge.recording.tool_definitions import MAX_LENGTH, request_to_definitions
from marft_bridge.recording.wrap import wrap
from marft_bridge.training.retokenise import ChatTokenizer, Retokeniser
from trace_store import conventions as c
from trace_store.records import Reward, SpanRow, Trajectory
from trace_store.store import TraceStore
from trainers.marft import MarftTrainer

TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% for t in m.tool_calls or [] %}{{ '[call ' + t.function.name + ' ' + (t.function.arguments | tojson) + ']' }}"
    "{% endfor %}{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@tool
def look_up(word: str, again: bool = False) -> str:
    """Looks a word up. Ask a.person@mail.example about it."""
    return f"{word}: {again}"


class Hosted(BaseChatModel):
    """Calls a tool when it is asked, and ends when it has the tool's result."""

    @property
    def _llm_type(self) -> str:
        return "hosted"

    def bind_tools(self, tools: Sequence[Any], **options: Any) -> Any:
        return self.bind(tools=[convert_to_openai_tool(each) for each in tools])

    def _generate(self, messages: list[BaseMessage], *_: Any, **kwargs: Any) -> ChatResult:
        if kwargs.get("tools") and not isinstance(messages[-1], ToolMessage):
            call = {"name": "look_up", "args": {"word": "owl"}, "id": "c1"}
            answer = AIMessage("", tool_calls=[call], response_metadata={"finish_reason": "tool_calls"})
        else:
            answer = AIMessage("an owl", response_metadata={"finish_reason": "stop"})
        return ChatResult(generations=[ChatGeneration(message=answer)])


def app() -> Any:
    """One node with three calls: one without tools, one that calls a tool, one that has its result."""
    plain = Hosted()
    bound = plain.bind_tools([look_up])

    def reasoner(state: MessagesState) -> dict[str, Any]:
        question = [HumanMessage(plain.invoke(state["messages"]).text)]
        asked = bound.invoke(question)
        result = ToolMessage(look_up.invoke(asked.tool_calls[0]["args"]), tool_call_id="c1")
        return {"messages": [bound.invoke([*question, asked, result])]}

    graph = StateGraph(MessagesState)
    graph.add_node("reasoner", reasoner)
    graph.add_edge(START, "reasoner")
    return graph.compile()


def recorded(folder: Path, options: RecordOptions | None = None) -> tuple[Trajectory, list[SpanRow]]:
    """A run of the app, from a store, with the reward that makes it good."""
    path = folder / "traces.duckdb"
    graph = wrap(app(), path, options)
    graph.invoke({"messages": [("user", "What is it?")]})
    graph.unwrap()
    graph.recorder.journal.close()
    with TraceStore.open(path) as store:
        store.take_in()
        (trajectory,) = store.trajectories()
        store.put_rewards([Reward(trajectory.episode.episode_id, "reward", 1.0, source="test", created_ns=1)])
        (trajectory,) = store.trajectories()
        return trajectory, list(store.spans(trajectory.episode.episode_id))


def retokenised(folder: Path, trajectory: Trajectory, spans: list[SpanRow]) -> tuple[Trajectory, Retokeniser]:
    made = Retokeniser(ChatTokenizer(folder), ["reasoner"])
    return made.trajectory_to_retokenised(trajectory, lambda _: spans), made


def test_native_tool_calls_have_the_ids_of_the_chat_template_and_are_learned_from(tmp_path: Path) -> None:
    model = save_chat_model(tmp_path / "model")
    save_chat_tokenizer(model, TOOLS)
    trajectory, made = retokenised(model, *recorded(tmp_path))
    assert (made.without_ids, made.retokenised, made.open_ended, dict(made.refused)) == (3, 3, 0, {})

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tools = [convert_to_openai_tool(look_up)]
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": {"word": "owl"}}}
    asked = [{"role": "user", "content": "an owl"}]
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "owl: False"}
    end = {"role": "assistant", "content": "an owl"}
    question = [{"role": "user", "content": "What is it?"}]
    for action, prompt, answer, offered in (
        (trajectory.actions[0], question, end, None),
        (trajectory.actions[1], asked, said, tools),
        (trajectory.actions[2], [*asked, said, result], end, tools),
    ):
        options = {"tools": offered, "return_dict": False}
        expected = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, **options)
        whole = tokenizer.apply_chat_template([*prompt, answer], **options)
        ids = [*(action.prompt_ids or ()), *(action.sampled_ids or ())]
        assert list(action.prompt_ids or ()) == expected
        assert ids == whole[: len(ids)]
        assert tokenizer.decode(whole[len(ids) - 1 :]) == "<|im_end|>\n"

    options = trainer_options(device="cpu", threads=1, offline={"mode": "filtered", "retokenise": True})
    result = MarftTrainer(options, model, ["reasoner"], seed=0).replay([trajectory])
    assert (result["used"], result["drops"]) == (3, {})
    assert result["agents"]["reasoner"]["actions"] == 3


def test_a_template_that_does_not_know_tools_has_no_call_that_offered_some(tmp_path: Path) -> None:
    """Neither the one that calls a tool nor the one that has its result: only what ends would be taught."""
    trajectory, made = retokenised(save_chat_tokenizer(tmp_path / "model", CHATML), *recorded(tmp_path))
    assert [action.prompt_ids is None for action in trajectory.actions] == [False, True, True]
    assert dict(made.refused) == {
        "the chat template does not render the answer as it was said": 1,
        "the chat template does not show the tools that it offered": 1,
    }


def test_tools_that_the_record_lacks_are_missed_as_before(tmp_path: Path) -> None:
    """Older records, and lists that are too long: the hash of the tools says that there were some."""
    trajectory, spans = recorded(tmp_path)
    without = [
        replace(span, attributes={key: value for key, value in span.attributes.items() if key != c.TOOL_DEFINITIONS})
        for span in spans
    ]
    _, made = retokenised(save_chat_tokenizer(tmp_path / "model", TOOLS), trajectory, without)
    assert dict(made.refused) == {"it offered tools that the record does not hold": 3}


def test_what_is_redacted_in_a_schema_costs_the_call_its_ids(tmp_path: Path) -> None:
    trajectory, spans = recorded(tmp_path, RecordOptions(redact=("email",)))
    (definitions,) = {span.attributes.get(c.TOOL_DEFINITIONS) for span in spans} - {None}
    assert "[redacted:email]" in definitions
    assert "a.person" not in json.dumps([span.attributes for span in spans])
    _, made = retokenised(save_chat_tokenizer(tmp_path / "model", TOOLS), trajectory, spans)
    assert made.without_ids == 1, "the call without tools"


# -- the attribute -----------------------------------------------------------------------------------------------------

ADD = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {"b": {}, "a": {}}}}
NESTED = {"type": "function", "function": ADD}


@pytest.mark.parametrize(
    "parameters",
    [
        {"tools": [NESTED]},
        {"tools": (NESTED,)},
        {"functions": [ADD]},
        {"tools": [{"name": "add", "description": "adds", "input_schema": ADD["parameters"]}]},
    ],
    ids=["openai", "tuple", "functions", "anthropic"],
)
def test_definitions_have_the_form_of_the_conventions_and_read_as_the_tools_that_were_sent(
    parameters: dict[str, Any],
) -> None:
    text = request_to_definitions(parameters)
    assert text is not None
    (definition,) = json.loads(text)
    assert (definition["type"], definition["name"], definition["description"]) == ("function", "add", "adds")
    assert attributes_to_tools({c.TOOL_DEFINITIONS: text}) == (NESTED,)
    if "input_schema" not in definition:
        assert json.dumps(attributes_to_tools({c.TOOL_DEFINITIONS: text})) == json.dumps([NESTED]), "in their order"


def test_what_no_form_is_known_for_stays_as_it_is() -> None:
    odd = [{"type": "web_search"}, NESTED | {"cache_control": {}}]
    assert json.loads(request_to_definitions({"tools": odd}) or "") == odd


def test_a_list_that_is_too_long_or_no_json_is_not_recorded() -> None:
    circular: dict[str, Any] = {}
    circular["self"] = circular
    for tools in ([look_up], [circular], [NESTED, {"type": "x", "name": "y" * MAX_LENGTH}], [], None):
        assert request_to_definitions({"tools": tools}) is None
