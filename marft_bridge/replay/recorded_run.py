"""The spans of one episode -> what a replay needs of it: how it was started, its calls with their answers, its tools.

Invariant: nothing is guessed. Where the record lacks what a replay needs (its content was not captured, its prompts
have an older form), it is refused in one line; where it is older and only says less, `age_note` says so.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from langchain_core.messages import AIMessage, InvalidToolCall, ToolCall, messages_from_dict
from langgraph.types import Command, Send

from marft_bridge.common.errors import GraphError
from marft_bridge.common.run_limits import RECURSION_LIMIT
from marft_bridge.recording.value_forms import ValuePath, forms_to_value, is_message_form
from marft_bridge.replay.call_options import CallOptions, spans_to_options
from marft_bridge.replay.quoted_messages import without_reports
from trace_store import conventions as c
from trace_store.assemble import spans_to_trajectory
from trace_store.attributes import Malformed
from trace_store.json_text import read_json
from trace_store.records import SpanRow, Trajectory

NOT_FINISHED = "TimeoutError: not finished when the run ended"
"""What the recorder says of a call that was under way when its run ended."""
GIVEN_INPUTS = (c.TASK, c.INPUT, c.RUN_CONFIG)
"""Attributes of what a replay or a fork is given as the record has it."""
_CANCELLED = "CancelledError"
_CLOSED = ("GeneratorExit", "StreamClosedError")
_CUT = (_CANCELLED, "KeyboardInterrupt", *_CLOSED)
_CALL_PARTS = ("tool_call", "tool_call_response")
_UUID = re.compile("[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_BUBBLING = frozenset({"GraphInterrupt", "NodeInterrupt", "ParentCommand", "GraphBubbleUp"})


@dataclass(frozen=True, slots=True)
class RecordedError:
    """An error, by the class and the text that are recorded of it."""

    name: str
    text: str
    classes: tuple[str, ...] = ()  # `module:qualname` of its class and of those above; (): one of Python's own
    http_status: int | None = None  # of the answer that it carried

    @property
    def is_cut(self) -> bool:
        """Whether the run, or the app around this, stopped it while it was under way, so that nobody knows its end."""
        return f"{self.name}: {self.text}" == NOT_FINISHED or self.name in _CUT

    @property
    def is_closed_stream(self) -> bool:
        """Whether the app stopped reading a stream."""
        return self.name in _CLOSED

    def to_exception(self) -> Exception:
        """An exception of its class and with its text; of other fields it has the status of an HTTP answer alone.

        Of a class that no loaded module has, one of the same name stands in, under the classes above it that are
        loaded: the app's `except` and retry policies tell no difference. Nothing is imported.
        """
        names = self.classes or (f"builtins:{self.name}",)
        loaded = [error_class for error_class in map(_name_to_class, names) if error_class is not None]
        own_class = _name_to_class(names[0])
        pythons_own = [error_class for error_class in loaded if error_class.__module__ == "builtins"]
        ways: list[Callable[[], type[Exception]]] = [
            lambda: own_class or _derive(self.name, loaded),
            lambda: _derive(self.name, loaded, text=self.text),  # its text is made of fields
            lambda: _derive(self.name, pythons_own, text=self.text),  # it cannot be made without its arguments
        ]
        for make_class in ways:
            with suppress(Exception):
                error_class = make_class()
                error = error_class.__new__(error_class)
                error.args = (self._to_argument(error_class),)
                if self.http_status is not None:
                    _carry_response(error, self.http_status)
                if str(error) == self.text:
                    return error
        return _derive(self.name, [])(self.text)

    def _to_argument(self, error_class: type[Exception]) -> Any:
        if issubclass(error_class, KeyError):  # its text is the representation of its key
            with suppress(ValueError, SyntaxError):
                return ast.literal_eval(self.text)
        return self.text


def _carry_response(error: Exception, status: int) -> None:
    """Gives an error the answer that retry policies ask for its status; None where it counts as false (`requests`)."""
    is_false = any(above.__module__.partition(".")[0] == "requests" for above in type(error).__mro__)
    vars(error)["response"] = None if is_false else SimpleNamespace(status_code=status)
    vars(error)["status_code"] = status


def _name_to_class(name: str) -> type[Exception] | None:
    """The class of an error by `module:qualname`; None where no loaded module has it."""
    module, _, qualname = name.partition(":")
    part_of_module: Any = sys.modules.get(module)
    for part in qualname.split("."):
        part_of_module = getattr(part_of_module, "__dict__", {}).get(part)  # a module's own `__getattr__` may import
    return part_of_module if isinstance(part_of_module, type) and issubclass(part_of_module, Exception) else None


def _derive(name: str, above: Sequence[type[Exception]], text: str | None = None) -> type[Exception]:
    """A class of this name under the lowest of these, with this text whatever its fields."""
    bases: list[type[Exception]] = []
    for error_class in above:
        if not any(issubclass(base, error_class) for base in bases):
            bases.append(error_class)
    own_text = {} if text is None else {"__str__": lambda _: text}
    return type(name, tuple(bases) or (Exception,), own_text)


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One LLM call."""

    action_id: str
    node: str
    number: int  # among those of its node, from 1, by their start
    prompt: list[Any]  # messages in the form of the GenAI conventions
    answer: AIMessage | None  # None where it failed
    error: RecordedError | None
    started_ns: int
    ended_ns: int
    namespace: str  # LangGraph's, of the execution that made it
    rank: int  # of that execution among those of its node, from 0
    tools: tuple[str, ...] = ()  # that it was made inside of, innermost first: name and arguments as JSON
    options: CallOptions = field(default_factory=CallOptions)  # what else it asked for

    @property
    def has_no_end(self) -> bool:
        """Whether it was stopped while it was under way; see `RecordedError.is_cut`."""
        return self.error is not None and self.error.is_cut


@dataclass(frozen=True, slots=True)
class RecordedTool:
    """One run of a tool."""

    span_id: str
    name: str
    node: str
    call_id: str | None
    arguments: Any
    result: str
    output: dict[str, Any] | None  # see recording.tool_output; None: `result` says all
    error: RecordedError | None
    has_calls: bool  # a model was called inside it
    was_cancelled: bool = False  # by the app, whose run went on

    @property
    def must_run(self) -> bool:
        """Whether only the tool itself can do what it did: it calls models, or gives back an object of the app's."""
        is_unknown = (self.output or {}).get("run_again") is not None
        is_cut = self.error is not None and self.error.is_cut and not self.was_cancelled
        is_control = self.error is not None and self.error.name in _BUBBLING
        return self.has_calls or is_unknown or is_control or is_cut


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """One episode, as a replay reads it."""

    trajectory: Trajectory
    spans: Sequence[SpanRow]
    root: SpanRow
    calls: Sequence[RecordedCall]  # by their start
    tools: Sequence[RecordedTool]
    run_config: Mapping[str, Any] = field(default_factory=dict)  # see recording.run_facts.loop_to_run_config

    @property
    def episode_id(self) -> str:
        """The episode's id."""
        return self.trajectory.episode.episode_id

    @property
    def is_dated(self) -> bool:
        """Whether it was recorded before the record kept how a run was started, and what tools gave back."""
        return c.RUN_CONFIG not in self.root.attributes

    @property
    def had_store(self) -> bool:
        """Whether its graph had a store of LangGraph's, as far as the record says."""
        return bool(self.run_config.get("has_store"))

    def graph_input(self, classes: Mapping[str, type]) -> tuple[Any, list[str]]:
        """What the graph was given, with objects of the app's `classes`; and what of it is no more than its JSON."""
        is_task = self.root.attributes.get(c.INPUT) is None  # a recorded null is an input: the thread goes on
        value = dict(self.trajectory.episode.task) if is_task else load_recorded(self.root.attributes[c.INPUT])
        forms = load_recorded(self.root.attributes.get(c.INPUT_FORMS)) or []
        value, lost = forms_to_value(json_to_value(value, forms), forms, classes)
        is_command = self.root.attributes.get(c.INPUT_KIND) == "command"
        if not is_task and (is_command or (self.is_dated and self._resumes_with(value))):
            return json_to_command(value), lost
        return value, lost

    def context(self, classes: Mapping[str, type]) -> tuple[Any, list[str]]:
        """The context that it was given, as `graph_input` is; None where it had none."""
        forms = self.run_config.get("context_forms") or []
        return forms_to_value(json_to_value(self.run_config.get("context"), forms), forms, classes)

    def _resumes_with(self, value: Any) -> bool:
        return self.trajectory.episode.begins == "resume" and isinstance(value, dict) and "resume" in value

    @property
    def output(self) -> Any:
        """What the run gave back, as JSON; None where that is not recorded."""
        return load_recorded(self.root.attributes.get(c.OUTPUT))

    @property
    def was_cut(self) -> bool:
        """Whether it was stopped from outside, at a moment that no replay can meet."""
        episode = self.trajectory.episode
        by_itself = ("interrupted", RECURSION_LIMIT)
        return episode.outcome == "truncated" and episode.reason not in by_itself


def load_recorded(text: Any) -> Any:
    """The value of an attribute that holds JSON, or has been read. Raises GraphError where it cannot be read."""
    try:
        return read_json(text) if isinstance(text, str) else text
    except ValueError as error:
        raise GraphError(f"replay: a recorded value cannot be read as JSON ({error}); replay another episode") from None


def spans_to_run(spans: Sequence[SpanRow]) -> RecordedRun:
    """The run that these spans record. Raises GraphError where they cannot be replayed, with the reason."""
    try:
        trajectory = spans_to_trajectory(spans)
    except (Malformed, ValueError) as error:
        raise GraphError(f"replay: these spans are no whole episode: {error}") from None
    episode_id = trajectory.episode.episode_id
    root = next(span for span in spans if span.parent_span_id is None)
    by_start = sorted(spans, key=lambda span: (span.start_ns, span.span_id))
    by_id = {span.span_id: span for span in spans}
    nodes = {action.action_id: action.node for action in trajectory.actions}
    ranks = spans_to_ranks(by_start)
    options = spans_to_options(by_start, trajectory.episode, is_dated=c.RUN_CONFIG not in root.attributes)
    numbers: Counter[str] = Counter()
    calls: list[RecordedCall] = []
    for span in by_start:
        if span.operation != c.CHAT:
            continue
        node = nodes.get(span.span_id, "")
        numbers[node] += 1
        call = _span_to_call(span, node, numbers[node], ranks=ranks, by_id=by_id, episode_id=episode_id)
        calls.append(replace(call, options=options[span.span_id]))
    around_calls = {
        outer for span in spans if span.operation in (c.CHAT, c.INVOKE_AGENT) for outer in tools_around(span, by_id)
    }
    run_config = load_recorded(root.attributes.get(c.RUN_CONFIG)) or {}
    run = RecordedRun(trajectory, spans, root, calls=calls, tools=[], run_config=run_config)
    tools = [
        _span_to_tool(span, run, has_calls=span.span_id in around_calls)
        for span in by_start
        if span.operation == c.EXECUTE_TOOL
    ]
    return replace(run, tools=tools)


def spans_to_ranks(spans_by_start: Sequence[SpanRow]) -> dict[str, int]:
    """Namespace of each execution -> its place among those of its node, from 0."""
    ranks: dict[str, int] = {}
    counts: Counter[str] = Counter()
    for span in spans_by_start:
        namespace = str(span.attributes.get(c.CHECKPOINT_NS))
        if span.operation == c.INVOKE_AGENT and namespace not in ranks:
            node = str(span.attributes.get(c.NODE))
            ranks[namespace] = counts[node]
            counts[node] += 1
    return ranks


def _span_to_call(
    span: SpanRow, node: str, number: int, ranks: Mapping[str, int], by_id: Mapping[str, SpanRow], episode_id: str
) -> RecordedCall:
    prompt, answer = span.attributes.get(c.INPUT_MESSAGES), span.attributes.get(c.OUTPUT_MESSAGES)
    error = _span_to_error(span)
    if prompt is None or (answer is None and error is None):
        raise GraphError(
            f"replay: episode {episode_id} was recorded without content, so there is no answer to give back; record it"
            " with record.content = true"
        )
    prompt_messages = load_recorded(prompt)
    if any(not isinstance(message, dict) or "parts" not in message for message in prompt_messages):
        raise GraphError(
            f"replay: the prompts of episode {episode_id} have the form of {span.convention}, which is older than"
            f" {c.CONVENTION_VERSION}; record it again"
        )
    namespace = str(span.attributes.get(c.CHECKPOINT_NS) or "")
    return RecordedCall(
        span.span_id,
        node,
        number,
        prompt=to_comparable_prompt(prompt_messages),
        answer=None if error is not None else attributes_to_answer(span.attributes),
        error=error,
        started_ns=span.start_ns,
        ended_ns=span.end_ns,
        namespace=namespace,
        rank=ranks.get(namespace, 0),
        tools=tuple(tool_to_key(by_id[tool_id].attributes) for tool_id in tools_around(span, by_id)),
    )


def is_drawn_id(call_id: str) -> bool:
    """Whether the id of a tool call is a UUID, which is drawn anew in each run unless a recorded answer has it."""
    return _UUID.fullmatch(call_id) is not None


def to_comparable_prompt(messages: list[Any]) -> list[Any]:
    """A prompt whose tool calls go by number where their ids are UUIDs: who made them draws them anew in each run,
    and in whose texts quoted messages have no more than their answers.

    Which result belongs to which call stays; ids that a model gave are no UUIDs of this form, or come from the record.
    """
    numbers: dict[str, str] = {}
    messages = without_reports(messages)

    def number_call(part: Any) -> Any:
        call_id = part.get("id") if isinstance(part, dict) and part.get("type") in _CALL_PARTS else None
        if not isinstance(call_id, str) or not is_drawn_id(call_id):
            return part
        return {**part, "id": numbers.setdefault(call_id, f"call {len(numbers) + 1}")}

    return [
        {**message, "parts": [number_call(part) for part in message["parts"]]}
        if isinstance(message.get("parts"), list)
        else message
        for message in messages
    ]


def _span_to_error(span: SpanRow) -> RecordedError | None:
    if span.status != "error":
        return None
    name = str(span.attributes.get(c.ERROR_TYPE) or "Exception").rpartition(".")[2]
    classes = load_recorded(span.attributes.get(c.ERROR_CLASSES)) or ()
    status = span.attributes.get(c.HTTP_STATUS)
    text = (span.status_message or "").removeprefix(f"{name}: ")
    return RecordedError(name, text, tuple(classes), http_status=status if isinstance(status, int) else None)


def attributes_to_answer(attributes: Mapping[str, Any]) -> AIMessage:
    """The attributes of a chat span -> the message that the model gave: its parts, and what is recorded beside them."""
    messages = load_recorded(attributes[c.OUTPUT_MESSAGES])
    parts = messages[0].get("parts") or [] if messages else []
    rest = load_recorded(attributes.get(c.ANSWER_REST) or "{}")
    texts = [part["content"] for part in parts if part.get("type") == "text"]
    others = [part for part in parts if part.get("type") not in ("text", "tool_call")]
    content: Any = "".join(texts)
    if others:
        content = [_part_to_block(part) for part in parts if part.get("type") != "tool_call"]
    tool_calls, invalid_calls = [], []
    for part in parts:
        if part.get("type") != "tool_call":
            continue
        call_id, name, arguments = part.get("id"), part.get("name"), part.get("arguments")
        if isinstance(arguments, dict):
            tool_calls.append(ToolCall(name=name, args=arguments, id=call_id, type="tool_call"))
        else:
            invalid_calls.append(
                InvalidToolCall(name=name, args=arguments, id=call_id, error=None, type="invalid_tool_call")
            )
    reasons = attributes.get(c.FINISH_REASONS)
    reasons = load_recorded(reasons) if isinstance(reasons, str) and reasons.startswith("[") else reasons
    metadata = {
        "model_name": attributes.get(c.RESPONSE_MODEL),
        "finish_reason": reasons[0] if isinstance(reasons, (list, tuple)) and reasons else reasons,
    }
    counts = [attributes.get(key) for key in (c.USAGE_INPUT_TOKENS, c.USAGE_OUTPUT_TOKENS)]
    usage = None
    if counts[0] is not None and counts[1] is not None:
        usage = {"input_tokens": counts[0], "output_tokens": counts[1], "total_tokens": counts[0] + counts[1]}
    return AIMessage(
        content=rest.get("content", content),
        id=rest.get("id"),
        name=messages[0].get("name") if messages else None,
        tool_calls=tool_calls,
        invalid_tool_calls=invalid_calls,
        additional_kwargs=rest.get("additional_kwargs") or {},
        response_metadata={key: value for key, value in metadata.items() if value is not None},
        usage_metadata=usage,
    )


def _part_to_block(part: Mapping[str, Any]) -> dict[str, Any]:
    if part.get("type") == "text":
        return {"type": "text", "text": part["content"]}
    if part.get("type") == "reasoning" and "content" in part:
        return {"type": "reasoning", "reasoning": part["content"]}
    return dict(part)


def _span_to_tool(span: SpanRow, run: RecordedRun, *, has_calls: bool) -> RecordedTool:
    arguments = span.attributes.get(c.TOOL_ARGUMENTS)
    output, result = load_recorded(span.attributes.get(c.TOOL_OUTPUT)), str(span.attributes.get(c.TOOL_RESULT) or "")
    if run.is_dated and result.startswith("Command("):  # what it gave back was not recorded; its text looks like one
        output = {"run_again": "Command"}
    error = _span_to_error(span)
    return RecordedTool(
        span.span_id,
        str(span.attributes.get(c.TOOL_NAME)),
        node=str(span.attributes.get(c.NODE) or ""),
        call_id=span.attributes.get(c.TOOL_CALL_ID),
        arguments=arguments_to_json(arguments),
        result=result,
        output=output,
        error=error,
        has_calls=has_calls,
        was_cancelled=error is not None and error.name == _CANCELLED and not run.was_cut,
    )


def arguments_to_json(arguments: Any) -> Any:
    """The arguments of a tool as they are recorded: JSON, or a text that is none."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return read_json(arguments)
    except ValueError:
        return arguments


def tool_to_key(attributes: Mapping[str, Any]) -> str:
    """The attributes of a tool's span -> its name and arguments, as one text that is equal where they are."""
    arguments = arguments_to_json(attributes.get(c.TOOL_ARGUMENTS))
    return json.dumps([attributes.get(c.TOOL_NAME), arguments], sort_keys=True, default=str)


def tools_around(span: SpanRow, by_id: Mapping[str, SpanRow]) -> list[str]:
    """The ids of the tool runs that enclose a span, innermost first."""
    tools = []
    while span.parent_span_id is not None and span.parent_span_id in by_id:
        span = by_id[span.parent_span_id]
        if span.operation == c.EXECUTE_TOOL:
            tools.append(span.span_id)
    return tools


# -- values ---------------------------------------------------------------------------------------------------------


def json_to_value(value: Any, forms: Sequence[Any]) -> Any:
    """What `run_facts.value_to_text` wrote -> values with LangChain's messages in them.

    Args:
        forms: of the value, see `value_forms.value_to_forms`; what has one, or whose data has one, is no message.
    """
    return _add_messages(value, (), formed_paths={tuple(path) for path, _ in forms})


def _add_messages(value: Any, path: ValuePath, formed_paths: Set[ValuePath]) -> Any:
    if isinstance(value, list):
        return [_add_messages(item, (*path, number), formed_paths) for number, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if is_message_form(value) and not {path, (*path, "data")} & formed_paths:
        with suppress(ValueError):  # a message of a class of the app's own
            return messages_from_dict([value])[0]
    return {key: _add_messages(item, (*path, key), formed_paths) for key, item in value.items()}


def json_to_command(fields: Mapping[str, Any]) -> Command[Any]:
    """The fields of a Command, with the messages in them made again, -> the Command."""
    arguments = dict(fields)
    if "goto" in arguments:
        arguments["goto"] = _json_to_goto(arguments["goto"])
    return Command(**arguments)


def _json_to_goto(goto: Any) -> Any:
    if isinstance(goto, list):
        return [_json_to_goto(each) for each in goto]
    if isinstance(goto, dict) and {"node", "arg"} <= set(goto):
        return Send(goto["node"], goto["arg"])
    return goto
