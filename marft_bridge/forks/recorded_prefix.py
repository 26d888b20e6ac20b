"""A recorded episode and one of its calls -> the answers that a fork of it there gives again, each to its own call.

Given again are the calls that do not depend on the forked one by D and that began before it ended. A call is known by
its node and its prompt, in which ids that a run draws stand for each other (see `replay.drawn_ids`); among equal ones
by their order. What is given again has the ids of the fork in place of the parent's. With the answers at hand, a call
that depends on the forked one by time alone may come first: it waits until the forked one has come. Invariants: no
recorded answer is given twice; a fork that does not make every one of these calls with its recorded prompt fails, and
says which; a wait ends when nothing has come for `PATIENCE_S`, and for as long as the parent took to come to the forked
call where it is its prompt.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Collection, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from langchain_core.messages import AIMessage

from marft_bridge.common.errors import GraphError
from marft_bridge.forks.given_tools import PrefixTools, ToolChoice, run_to_tools
from marft_bridge.model_calls.given_answers import GivenAnswer
from marft_bridge.model_calls.routing import current_routing
from marft_bridge.model_calls.scripted_answer import fixed_answer, text_to_route
from marft_bridge.model_calls.token_capture import ExactTokens
from marft_bridge.recording.open_span import OpenSpan
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.redaction import REDACTED
from marft_bridge.replay.divergence import DivergedError, Divergence, prompt_difference
from marft_bridge.replay.drawn_ids import DrawnIds, number_ids
from marft_bridge.replay.recorded_answers import NOT_MADE, PATIENCE_S
from marft_bridge.replay.recorded_run import (
    GIVEN_INPUTS,
    RecordedCall,
    RecordedRun,
    RecordedTool,
    load_recorded,
    to_comparable_prompt,
)
from marft_bridge.replay.recorded_tools import RunIt
from trace_store import conventions as c
from trace_store.records import Action, Edge, SpanRow

_LOOK_S = 0.01  # between two looks at whether a call that waits may go on
# What a span says of how its answer was sampled, and that the answer itself does not.
_SAMPLING = (
    c.PROMPT_IDS,
    c.SAMPLED_IDS,
    c.LOGPROBS,
    c.PROVIDER,
    c.REQUEST_MODEL,
    c.REQUEST_TEMPERATURE,
    c.REQUEST_TOP_P,
    c.REQUEST_TOP_K,
    c.REQUEST_MAX_TOKENS,
    c.REQUEST_SEED,
    c.RESPONSE_ID,
    c.RESPONSE_MODEL,
    c.FINISH_REASONS,
    c.USAGE_INPUT_TOKENS,
    c.USAGE_OUTPUT_TOKENS,
    c.ADAPTER,
    c.ADAPTER_VERSION,
    c.UNTRAINABLE,
)


@dataclass(frozen=True, slots=True)
class PrefixCall:
    """One call of the parent whose answer is given again."""

    call: RecordedCall
    attributes: Mapping[str, Any]  # of the span of its repetition
    sampled_ids: Sequence[int] | None
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class RecordedPrefix:
    """What a fork gives again of its parent. See `EpisodeRequest.beginning`."""

    forked: RecordedCall
    given: Sequence[PrefixCall]  # by their start
    later: Sequence[RecordedCall]  # that do not depend on the forked call either, and are sampled anew all the same
    dependents: Sequence[RecordedCall] = ()  # the rest, which depend on it
    inputs: Sequence[Any] = ()  # what the fork is given as the parent was: ids in it stay as they are
    lead_s: float = 0.0  # from the beginning of the run to the forked call
    cached_nodes: Set[str] = frozenset()  # of which a task got what it writes from a cache, and made no call
    text: str | None = None  # the answer of the forked call, where a person gives it; None: its route samples it
    tools: PrefixTools | None = None  # None: every tool runs

    def leave_out(self, copied_ids: Set[str]) -> RecordedPrefix:
        """The rest of it, where these calls and tools are of tasks that do not run."""
        rest = [prefix_call for prefix_call in self.given if prefix_call.call.action_id not in copied_ids]
        return replace(self, given=rest, tools=None if self.tools is None else self.tools.leave_out(copied_ids))

    def begin(self, recorder: Recorder) -> PrefixAnswers:
        """The answers for one run, none of them given yet."""
        return PrefixAnswers(self, recorder)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A call that the fork makes: what it is known by."""

    node: str
    prompt: list[Any]
    key: list[Any]  # the prompt with its drawn ids by number


class PrefixAnswers:
    """The answers of one prefix while a fork is run. Safe for any number of threads. See `given_answers.Prefix`."""

    def __init__(self, prefix: RecordedPrefix, recorder: Recorder) -> None:
        self._prefix, self._recorder = prefix, recorder
        self._given = {each.call.action_id: each for each in prefix.given}
        self._ids = DrawnIds(list(prefix.inputs))
        self._keys: dict[str, list[Any]] = {}  # by action id: the recorded prompt, with its drawn ids by number
        self._tools = None if prefix.tools is None else prefix.tools.begin(recorder, self._ids)
        self._open_calls = sorted(
            [*(each.call for each in prefix.given), prefix.forked], key=lambda call: (call.started_ns, call.action_id)
        )
        self._is_live = False  # a call went to its live route, so that later prompts may be new ones
        self._divergence: Divergence | None = None
        self._lock = threading.Lock()
        self._last_event_s = time.monotonic()  # a call or a tool has come

    async def await_turn(self, run_id: UUID | None) -> None:
        """Waits where a call has come too early, without holding the event loop up; see `given_answers.Prefix`."""
        if (span := self._recorder.open_span_of(run_id)) is None:
            return
        asked = _span_to_asked(span)
        while (patience_s := self._patience_left_s(asked)) > 0:
            await asyncio.sleep(min(patience_s, _LOOK_S))

    def _wait_turn(self, asked: _Asked) -> None:
        """As `await_turn`, in a thread without an event loop: one with it would only hold itself up."""
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            return
        while (patience_s := self._patience_left_s(asked)) > 0:
            time.sleep(min(patience_s, _LOOK_S))

    def _patience_left_s(self, asked: _Asked) -> float:
        """How long a call may still wait for the forked one to come; 0 or less where it need not, or nothing moves."""
        dependents = [call for call in self._prefix.dependents if call.node == asked.node]
        with self._lock:
            is_over = self._is_live or self._divergence is not None
            if not dependents or is_over or self._find_call([*self._open_calls, *self._prefix.later], asked):
                return 0.0
            lead_s = 0.0
            if self._find_call(dependents, asked) is not None:
                lead_s = self._prefix.lead_s
            elif any(call.node == asked.node and call is not self._prefix.forked for call in self._open_calls):
                return 0.0  # rather one of these, with another prompt
            return PATIENCE_S + lead_s - (time.monotonic() - self._last_event_s)

    def answer_call(self, run_id: UUID | None) -> GivenAnswer | None:
        """The recorded answer of the call with this run id; None where its live route answers it.

        Raises:
            DivergedError: the fork has not made the forked call yet, and the parent made no such call.
        """
        span = self._recorder.open_span_of(run_id)
        if span is None:
            raise self._diverged(_unseen_call())
        asked = _span_to_asked(span)
        node = asked.node
        self._wait_turn(asked)
        with self._lock:
            if self._divergence is not None:  # the app caught it, and goes on
                raise DivergedError(str(self._divergence))
            call = self._find_call(self._open_calls, asked)
            if call is None:
                self._is_live = self._is_live or self._is_later(asked)
                if self._is_live:
                    return None
                open_calls = [call for call in self._open_calls if call.node == node]
                is_cached = node in self._prefix.cached_nodes
                raise self._diverged(self._unknown_call(asked, open_calls, is_cached=is_cached))
            self._last_event_s = time.monotonic()
            self._open_calls.remove(call)
            self._ids.note_pair(call.prompt, asked.prompt)
            if call is not self._prefix.forked:
                return self._give(self._given[call.action_id])
            self._is_live = True
        return None if self._prefix.text is None else _say(self._prefix.text, node)

    def take_tool(self, run_id: UUID) -> RecordedTool | RunIt:
        """What the tool run with this id gave in the parent; `RunIt` where it is to run.

        Raises:
            DivergedError: the fork has not made the forked call yet, and the parent ran no such tool.
        """
        if self._tools is None:
            return RunIt()
        with self._lock:
            if self._divergence is not None:
                raise DivergedError(str(self._divergence))
            self._last_event_s = time.monotonic()
            tool = self._tools.take(run_id, is_live=self._is_live)
            if isinstance(tool, Divergence):
                raise self._diverged(tool)
            return tool

    def judge_end(self, error: BaseException | None) -> Exception | None:
        """The divergence of the run, which its graph may have caught, or a call of the prefix that it never made."""
        if self._divergence is None and error is None and self._open_calls:
            missing_call = self._open_calls[0]
            self._divergence = Divergence("missing call", missing_call.node, missing_call.number, text=NOT_MADE)
        return None if self._divergence is None else DivergedError(str(self._divergence))

    def _is_later(self, asked: _Asked) -> bool:
        """Whether the parent made this call too, after the forked one: with the answers at hand, it may come early."""
        return self._find_call(self._prefix.later, asked) is not None

    def _find_call(self, calls: Sequence[RecordedCall], asked: _Asked) -> RecordedCall | None:
        """The first of these recorded calls that this one is; one with known ids before one that fits by number."""
        same_calls = [call for call in calls if call.node == asked.node and self._to_key(call) == asked.key]
        same_calls = [call for call in same_calls if self._ids.fit(call.prompt, asked.prompt)]
        exact_calls = (call for call in same_calls if self._ids.to_now(call.prompt) == asked.prompt)
        return next(exact_calls, same_calls[0] if same_calls else None)

    def _to_key(self, call: RecordedCall) -> list[Any]:
        if call.action_id not in self._keys:
            self._keys[call.action_id] = number_ids(call.prompt)
        return self._keys[call.action_id]

    def _give(self, given: PrefixCall) -> GivenAnswer:
        routing, node = current_routing.get(), given.call.node
        if routing is not None:
            routing.next_call_seed(node)  # so that the calls after it have the seeds of their own numbers
        tokens = ExactTokens(
            routing.routes.get(node) if routing is not None else None,
            node=node,
            sampled_ids=None if given.sampled_ids is None else list(given.sampled_ids),
            finish_reason=given.finish_reason,
            given=given.attributes,
        )
        assert given.call.answer is not None  # see `run_to_prefix`
        answer = self._ids.answer_to_now(given.call.answer.model_copy(deep=True))
        calls = [*answer.tool_calls, *answer.invalid_tool_calls]
        self._ids.note_given([answer.content, [tool_call["args"] for tool_call in calls]])
        return GivenAnswer(answer, tokens)

    def _unknown_call(self, asked: _Asked, open_calls: Sequence[RecordedCall], *, is_cached: bool) -> Divergence:
        """What is said of a call that is none of the prefix."""
        node = asked.node
        if is_cached or not open_calls:
            _, _, words = prompt_difference([], asked.prompt)
            text = "before the fork, the record has no more calls of this node"
            if is_cached:
                text = "in the record it made no such call: its task came from the app's cache, which forks do not have"
            return Divergence("extra call", node, None, text=text, recorded=None, replayed=words)
        nearest = open_calls[0]
        compared = self._to_key(nearest), asked.key
        if compared[0] == compared[1]:  # but for ids that stand for others
            compared = self._ids.to_now(nearest.prompt), asked.prompt
        where, recorded_words, replayed_words = prompt_difference(*compared)
        return Divergence("prompt", node, nearest.number, text=where, recorded=recorded_words, replayed=replayed_words)

    def _diverged(self, divergence: Divergence) -> DivergedError:
        self._divergence = self._divergence or divergence
        return DivergedError(str(self._divergence))


class PrefixParts:
    """What the prefixes of one run have in common: each part is made once, however many of its calls are forked."""

    def __init__(self, run: RecordedRun) -> None:
        self.run = run
        self.spans = {span.span_id: span for span in run.spans}
        self.cached_nodes = {str(s.attributes.get(c.NODE)) for s in run.spans if s.attributes.get(c.CACHED)}
        self._actions = {action.action_id: action for action in run.trajectory.actions}
        self._dependents: dict[str, Set[str]] = {}
        self._given_calls: dict[str, PrefixCall] = {}
        self._redacted: dict[str, bool] = {}  # by the span of a call or a tool

    def dependents_of(self, action_id: str) -> Set[str]:
        """See `actions_to_dependents`."""
        if action_id not in self._dependents:
            self._dependents[action_id] = actions_to_dependents(self.run.trajectory.edges, action_id)
        return self._dependents[action_id]

    def call_to_given(self, call: RecordedCall) -> PrefixCall:
        """A call of the run as it is given again."""
        if call.action_id not in self._given_calls:
            span, action = self.spans[call.action_id], self._actions[call.action_id]
            self._given_calls[call.action_id] = _call_to_given(call, span, action)
        return self._given_calls[call.action_id]

    def is_redacted_call(self, call: RecordedCall) -> bool:
        """Whether something is redacted of a call's prompt or answer."""
        if call.action_id not in self._redacted:
            self._redacted[call.action_id] = REDACTED in json.dumps([call.prompt, str(call.answer)])
        return self._redacted[call.action_id]

    def is_redacted_tool(self, tool: RecordedTool) -> bool:
        """Whether something is redacted of a tool's arguments or result."""
        if tool.span_id not in self._redacted:
            self._redacted[tool.span_id] = REDACTED in json.dumps(
                [tool.arguments, tool.result, tool.output], default=str
            )
        return self._redacted[tool.span_id]


def run_to_prefix(
    run: RecordedRun,
    forked: RecordedCall,
    text: str | None = None,
    *,
    tools: ToolChoice = "recorded",
    parts: PrefixParts | None = None,
) -> RecordedPrefix:
    """What a fork of a run at one of its calls gives again.

    Args:
        text: the answer of the forked call; None: it is sampled.
        tools: whether the tools before it give their recorded results, or run.
        parts: of this run, for who forks several of its calls.

    Raises:
        GraphError: an answer or a result that would be given again is not recorded as it was.
    """
    parts = PrefixParts(run) if parts is None else parts
    dependents = parts.dependents_of(forked.action_id)
    anew_ids = {*dependents, forked.action_id}
    independent_calls = [call for call in run.calls if call.action_id not in anew_ids]
    return _to_prefix(
        parts,
        forked,
        given=[call for call in independent_calls if call.started_ns < forked.ended_ns],
        later=[call for call in independent_calls if call.started_ns >= forked.ended_ns],
        dependents=[call for call in run.calls if call.action_id in dependents],
        text=text,
        tools=tools,
    )


def given_to_prefix(
    parts: PrefixParts, forked: RecordedCall, given_ids: Collection[str], *, tools: ToolChoice = "recorded"
) -> RecordedPrefix:
    """What a fork gives again that repeats these actions and no others.

    Args:
        forked: the first call of the run that is none of them.
        given_ids: with every action that one of them depends on.

    Raises:
        GraphError: as `run_to_prefix`.
    """
    rest = [call for call in parts.run.calls if call.action_id not in given_ids and call is not forked]
    dependents = parts.dependents_of(forked.action_id)
    return _to_prefix(
        parts,
        forked,
        given=[call for call in parts.run.calls if call.action_id in given_ids],
        later=[call for call in rest if call.action_id not in dependents],
        dependents=[call for call in rest if call.action_id in dependents],
        text=None,
        tools=tools,
    )


def _to_prefix(
    parts: PrefixParts,
    forked: RecordedCall,
    *,
    given: Sequence[RecordedCall],
    later: Sequence[RecordedCall],
    dependents: Sequence[RecordedCall],
    text: str | None,
    tools: ToolChoice,
) -> RecordedPrefix:
    run = parts.run
    for call in given:
        if c.REQUEST_CHOICES in parts.spans[call.action_id].attributes:
            raise GraphError(
                f"fork: a call before it asked for several answers in episode {run.episode_id} (node {call.node}, call"
                f" {call.number}), of which one is recorded; fork an episode without one"
            )
        if call.answer is None:
            raise GraphError(
                f"fork: a call before it failed in episode {run.episode_id} (node {call.node}, call {call.number}), and"
                " has no answer to give again; fork an episode without one"
            )
    for call in (*given, forked):
        if parts.is_redacted_call(call):
            raise GraphError(
                f"fork: the record of episode {run.episode_id} is redacted (node {call.node}, call {call.number}), so"
                " its answers cannot be given again as they were"
            )
    given_ids = {call.action_id for call in given}
    sampled_ids = [call.action_id for call in run.calls if call.action_id not in given_ids]
    lead_s = (forked.started_ns - run.root.start_ns) / 1e9
    return RecordedPrefix(
        forked,
        given=[parts.call_to_given(call) for call in given],
        later=later,
        dependents=dependents,
        inputs=[span.attributes.get(key) for span in run.spans for key in GIVEN_INPUTS],
        lead_s=lead_s,
        cached_nodes=parts.cached_nodes,
        text=text,
        tools=run_to_tools(run, sampled_ids, parts.is_redacted_tool) if tools == "recorded" else None,
    )


def actions_to_dependents(edges: Sequence[Edge], action_id: str) -> set[str]:
    """The actions that depend on one by D, on however many others in between; bounds count as edges."""
    targets: dict[str, list[str]] = {}
    for edge in edges:
        targets.setdefault(edge.src, []).append(edge.dst)
    dependents: set[str] = set()
    to_follow = [action_id]
    while to_follow:
        new_ids = set(targets.get(to_follow.pop(), ())) - dependents
        dependents |= new_ids
        to_follow += new_ids
    return dependents


def _span_to_asked(span: OpenSpan) -> _Asked:
    prompt = to_comparable_prompt(load_recorded(span.attributes[c.INPUT_MESSAGES]))
    return _Asked(str(span.attributes.get(c.NODE) or ""), prompt, number_ids(prompt))


def _call_to_given(call: RecordedCall, span: SpanRow, action: Action) -> PrefixCall:
    attributes = {key: span.attributes[key] for key in _SAMPLING if span.attributes.get(key) is not None}
    return PrefixCall(
        call,
        attributes | {c.REPLAYED_FROM: call.action_id},
        sampled_ids=action.sampled_ids,
        finish_reason=action.finish_reason,
    )


def _say(text: str, node: str) -> GivenAnswer:
    tokens = ExactTokens()
    message: AIMessage = fixed_answer(tokens, node, text_to_route(text))
    return GivenAnswer(message, tokens)


def _unseen_call() -> Divergence:
    text = "a model is called where no recorder sees it, in a thread without LangGraph's context"
    return Divergence("extra call", "", None, text=text)
