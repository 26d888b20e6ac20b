"""Recorded calls of hosted nodes -> answers that a round gives again to calls with the same request, without cost.

A hosted node has no route in the rounds: it calls the app's own model. A call is the same where node, messages, offered
tools and the recorded parameters are equal; of several recorded answers one is drawn for each call by the episode's
seed, so that equal calls are answered as they were distributed. Invariants: nothing but what a provider answered is
given; a call that gets a recorded answer says so in its span (`replayed_from`), and has no tokens to learn from. What
no record holds (tool_choice, the schema of a declared form) is not compared.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from langchain_core.utils.function_calling import convert_to_openai_tool

from marft_bridge.common.digests import canonical_json, text_sha256
from marft_bridge.common.errors import GraphError
from marft_bridge.ingest.recorded_chats import UnusableChatError, attributes_to_tools
from marft_bridge.model_calls.given_answers import GivenAnswer
from marft_bridge.model_calls.routing import Routing, calling_node
from marft_bridge.model_calls.token_capture import ExactTokens
from marft_bridge.recording.open_span import OpenSpan
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.redaction import REDACTED
from marft_bridge.recording.tool_lineage import tools_to_lineage
from marft_bridge.replay.recorded_run import attributes_to_answer
from trace_store import conventions as c
from trace_store.json_text import read_json
from trace_store.records import FROM_ENGINE, REPLAYED, TOOLS_OF, Action, SpanRow, Trajectory

_PARAMETERS = (
    c.REQUEST_MODEL,
    c.REQUEST_TEMPERATURE,
    c.REQUEST_TOP_P,
    c.REQUEST_TOP_K,
    c.REQUEST_SEED,
    c.REQUEST_MAX_TOKENS,
    c.REQUEST_STOP,
    c.REQUEST_CHOICES,
    c.OUTPUT_TYPE,
)
# What a span says of the answer and the message alone does not.
_ANSWER = (
    c.PROVIDER,
    c.RESPONSE_ID,
    c.RESPONSE_MODEL,
    c.FINISH_REASONS,
    c.USAGE_INPUT_TOKENS,
    c.USAGE_OUTPUT_TOKENS,
    c.OUTPUT_MESSAGES,
    c.ANSWER_REST,
)


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """The answer of one recorded call, and what its request was besides node and messages."""

    action_id: str
    attributes: Mapping[str, Any]  # `_ANSWER` of its span
    parameters: Mapping[str, Any]  # `_PARAMETERS` of its span
    tools: str | frozenset[str] | None  # our own hash ("": none), canonical JSON of each, or None: not recorded
    is_own: bool  # our recorder wrote it, so that what it does not hold was not given


class AnswerPool:
    """The recorded answers of all nodes but some. Read, and never changed, while rounds run.

    Args:
        routed: nodes that the served models answer.
        only: whether a call that no recorded one equals fails its run, instead of going to the node's own model.
    """

    def __init__(self, routed: Collection[str], only: bool) -> None:
        self._routed, self.only = frozenset(routed), only
        self._answers: dict[tuple[str, str], list[RecordedAnswer]] = {}  # (node, digest of the messages)
        self.counts: Counter[str] = Counter()  # node -> its answers
        self.refused: Counter[str] = Counter()  # reason -> recorded calls of such nodes that are none

    def add(self, trajectory: Trajectory, spans_of: Callable[[str], Sequence[SpanRow]]) -> None:
        """Adds the calls of an episode. `spans_of`: the spans of a trace, by its id."""
        calls = [action for action in trajectory.actions if self._is_hosted(action)]
        if not calls:
            return
        spans = {span.span_id: span for span in spans_of(trajectory.episode.episode_id)}
        for action in calls:
            span = spans.get(action.action_id)
            if span is None:
                self.refused["its span is not stored"] += 1
                continue
            try:
                answer = _span_to_answer(span, action.node, trajectory.episode.lineage)
            except UnusableChatError as error:
                self.refused[str(error)] += 1
                continue
            key = (action.node, _prompt_digest(span))
            self._answers.setdefault(key, []).append(answer)
            self.counts[action.node] += 1

    def begin(self, recorder: Recorder, routing: Routing) -> EpisodeAnswers:
        """The answers of one episode."""
        return EpisodeAnswers(self, recorder, routing)

    def summary(self) -> str:
        """A line about what can be given again, and what not."""
        nodes = ", ".join(f"{node} {count}" for node, count in sorted(self.counts.items()))
        parts = [f"hosted answers: {self.counts.total()} recorded calls can be given again ({nodes or 'no node'})"]
        parts += [f"not {count}: {reason}" for reason, count in sorted(self.refused.items())]
        return "; ".join(parts)

    def find_same(
        self, node: str, prompt: str, attributes: Mapping[str, Any], tools: Collection[str]
    ) -> list[RecordedAnswer] | str:
        """The recorded answers of a call, or the reason why there is none.

        Args:
            prompt: digest of its messages.
            attributes: of its span, before it is answered.
            tools: that its node offers, each as canonical JSON.
        """
        if node not in self.counts:
            return "no call of it is recorded"
        same_prompt = self._answers.get((node, prompt))
        if same_prompt is None:
            return "no recorded call of it has these messages"
        same_tools = [answer for answer in same_prompt if _has_tools(answer, node, tools)]
        if not same_tools:
            return "the recorded calls with these messages offered other tools"
        differences = [_parameter_difference(answer, attributes) for answer in same_tools]
        same = [answer for answer, name in zip(same_tools, differences, strict=True) if name is None]
        return same or f"the recorded calls with these messages have another {differences[0]}"

    def _is_hosted(self, action: Action) -> bool:
        is_answered_by_us = action.adapter is not None or action.replayed_from is not None
        return bool(action.node) and action.node not in self._routed and not is_answered_by_us


class EpisodeAnswers:
    """What the nodes without a route are answered in one episode. Safe for any number of threads.

    See `given_answers.AnswerRecord`.
    """

    def __init__(self, pool: AnswerPool, recorder: Recorder, routing: Routing) -> None:
        self._pool, self._recorder, self._routing = pool, recorder, routing
        self._times: Counter[tuple[str, str]] = Counter()  # of each call, how often it was made so far
        self._failure: GraphError | None = None
        self._lock = threading.Lock()

    def answer_call(self, run_id: UUID | None) -> GivenAnswer | None:
        """One of the recorded answers of the call; None where its node has a route, or its own model is to answer.

        Raises:
            GraphError: no recorded call equals it, and its own model may not be asked.
        """
        span = None if run_id is None else self._recorder.open_span_of(run_id)
        node = calling_node() if span is None else str(span.attributes.get(c.NODE) or "")
        if node in self._routing.routes:
            return None
        if span is None or run_id is None:
            self._refuse(node, "it is called where no recorder sees it")
            return None
        prompt = _prompt_digest(span)
        answers = self._pool.find_same(node, prompt, span.attributes, tools=self._recorder.tools_of_call(run_id))
        if isinstance(answers, str):
            self._refuse(node, answers)
            return None
        with self._lock:
            number = self._times[node, prompt]
            self._times[node, prompt] += 1
        digest = hashlib.sha256(f"{self._routing.seed}/{node}/{prompt}/{number}".encode()).digest()
        return _give(answers[int.from_bytes(digest[:8], "big") % len(answers)], node)

    def refuse_unanswerable(self, kind: str) -> None:
        """Raises GraphError where a call of this kind, which cannot be given an answer, may not be made.

        See `given_answers.AnswerRecord`.
        """
        self._refuse(calling_node(), f"a call of {kind} cannot be given a recorded answer")

    def judge_end(self, error: BaseException | None) -> Exception | None:  # noqa: ARG002 - as of `Prefix`
        """The call that was refused, which the graph may have caught."""
        return self._failure

    def _refuse(self, node: str, reason: str) -> None:
        """Raises GraphError where the node's own model may not be asked."""
        if self._pool.only:
            text = f"node {node!r} has no recorded answer (train.hosted_answers = 'recorded_only'): {reason}"
            self._failure = self._failure or GraphError(text)
            raise GraphError(text)


def trajectories_to_hosted_metrics(trajectories: Sequence[Trajectory], routed: Collection[str]) -> dict[str, Any]:
    """The calls of nodes without a route in some episodes, and the share of them that recorded answers were given to.

    Returns:
        calls, recorded_share (None without a call), and nodes: the two by node.
    """
    calls: Counter[str] = Counter()
    recorded: Counter[str] = Counter()
    for trajectory in trajectories:
        for action in trajectory.actions:
            if action.node and action.node not in routed:
                calls[action.node] += 1
                recorded[action.node] += action.replayed_from is not None
    total = calls.total()
    return {
        "calls": total,
        "recorded_share": recorded.total() / total if total else None,
        "nodes": {
            node: {"calls": count, "recorded_share": recorded[node] / count} for node, count in sorted(calls.items())
        },
    }


def hosted_metrics_to_text(metrics: Mapping[str, Any]) -> str:
    """A line about the hosted calls of a round."""
    if not metrics["calls"]:
        return "no call of a hosted node"
    shares = ", ".join(f"{node} {each['recorded_share']:.0%}" for node, each in metrics["nodes"].items())
    return f"{metrics['recorded_share']:.0%} of {metrics['calls']} hosted calls answered from the record ({shares})"


def _span_to_answer(span: SpanRow, node: str, lineage: Mapping[str, str]) -> RecordedAnswer:
    """Raises UnusableChatError where its answer cannot be given again as it was."""
    attributes = span.attributes
    if span.status != "ok":
        raise UnusableChatError("the call failed")
    if not attributes.get(c.INPUT_MESSAGES) or not attributes.get(c.OUTPUT_MESSAGES):
        raise UnusableChatError("its content was not recorded")
    if any(REDACTED in str(attributes[key]) for key in (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES)):
        raise UnusableChatError("it is redacted")
    reason = str(attributes.get(c.UNTRAINABLE) or FROM_ENGINE)
    if not reason.endswith(FROM_ENGINE) or attributes.get(c.REQUEST_CHOICES) is not None:
        raise UnusableChatError("it is no call with one answer of a model")
    is_own = "+" not in span.convention
    tools: str | frozenset[str] | None = lineage.get(f"{TOOLS_OF}{node}", "")
    if not is_own:
        offered = attributes_to_tools(attributes)
        tools = frozenset(map(canonical_json, offered)) if offered else None
    return RecordedAnswer(
        span.span_id,
        attributes={key: attributes[key] for key in _ANSWER if attributes.get(key) is not None},
        parameters={key: attributes[key] for key in _PARAMETERS if attributes.get(key) is not None},
        tools=tools,
        is_own=is_own,
    )


def _has_tools(answer: RecordedAnswer, node: str, tools: Collection[str]) -> bool:
    if answer.tools is None:
        return True
    if isinstance(answer.tools, str):
        return answer.tools == tools_to_lineage({node: tools}).get(f"{TOOLS_OF}{node}", "")
    return answer.tools == {canonical_json(convert_to_openai_tool(json.loads(tool))) for tool in tools}


def _parameter_difference(answer: RecordedAnswer, attributes: Mapping[str, Any]) -> str | None:
    """The first parameter in which a recorded call differs from one with these attributes.

    Another program's record may leave out what was given: what it does not hold is not compared.
    """
    for name in _PARAMETERS:
        recorded = answer.parameters.get(name)
        if recorded != attributes.get(name) and (answer.is_own or recorded is not None):
            return name.rpartition("request.")[2]
    return None


def _prompt_digest(span: SpanRow | OpenSpan) -> str:
    """The SHA-256 of a call's messages; ids of tool calls, which are drawn anew in each run, count by their order."""
    messages = span.attributes[c.INPUT_MESSAGES]
    if isinstance(messages, str):
        try:
            messages = read_json(messages)
        except ValueError:  # such as lists in lists without end: equal where the text is
            return text_sha256(messages)
    numbers: dict[str, int] = {}

    def to_plain(value: Any) -> Any:
        if not isinstance(value, dict) or not isinstance(value.get("parts"), list):
            return value
        parts = [
            {**part, "id": numbers.setdefault(str(part.get("id")), len(numbers))}
            if isinstance(part, dict) and part.get("type") in ("tool_call", "tool_call_response")
            else part
            for part in value["parts"]
        ]
        names_speaker = value.get("name") is not None and value.get("role") != "tool"
        return {"role": value.get("role"), "parts": parts} | ({"name": value["name"]} if names_speaker else {})

    return text_sha256(canonical_json([to_plain(message) for message in messages]))


def _give(answer: RecordedAnswer, node: str) -> GivenAnswer:
    message = attributes_to_answer(answer.attributes)
    message.id = None  # the same answer twice in one state would be one message
    kept = {key: value for key, value in answer.attributes.items() if key not in (c.OUTPUT_MESSAGES, c.ANSWER_REST)}
    tokens = ExactTokens(
        node=node,
        finish_reason=message.response_metadata.get("finish_reason"),
        given=kept | {c.REPLAYED_FROM: answer.action_id, c.UNTRAINABLE: REPLAYED},
    )
    return GivenAnswer(message, tokens)
