"""Calls of live traffic -> spans in the journal of a run folder, as episodes of the split `live`.

One call is an agent's execution with a chat span inside. Calls of one graph run (`RequestIdentity.run_key`) are one
episode, which ends when no call is in flight and none has come for a while; a call that names no run is an episode of
its own, and so is a mirrored one, whose prompt holds answers of the other team. Invariants: a proxy does not see a run
end, so no episode here is `terminated`; earlier calls of a run are an upper bound of what a later one read, and only
the result of a tool call is an exact edge; a failure to record is counted and never reaches the client. All of it runs
on one event loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from marft_bridge.ingest.messages import (
    IdIndex,
    messages_to_json,
    messages_to_tool_call_ids,
    messages_to_tool_result_ids,
    to_messages,
)
from marft_bridge.live.identity import RequestIdentity
from marft_bridge.live.split import MIRRORED
from marft_bridge.live.teams import Team
from marft_bridge.live.wire import CHAT, Answer, body_to_untrainable_reason
from marft_bridge.model_calls.routing import PROVIDER
from marft_bridge.recording.episode_context import EpisodeContext, episode_to_attributes
from marft_bridge.recording.journal_exporter import JournalProcessor
from marft_bridge.recording.open_span import OpenSpan, open_span
from marft_bridge.recording.span_attributes import tokens_to_attributes
from marft_bridge.recording.span_messages import to_json
from marft_bridge.recording.tool_definitions import request_to_definitions
from marft_bridge.recording.tool_lineage import request_to_tools, tools_to_lineage
from trace_store import conventions as names

log = logging.getLogger("marft_bridge")

ONE_CALL_REASON = "a call that named no graph run: the run around it is not known"
STOPPED_REASON = "the proxy stopped"
MAX_EARLIER_CALLS = 256  # earlier calls that a call may have read, the latest; the same limit as for ingested traces
MAX_CALLS = 2_000  # of one episode: a trace id that never changes is no run
MAX_OPEN_RUNS = 20_000  # that are open at a time


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """One request, as far as the recorder needs it."""

    path: str
    node: str  # the `model` that the client named
    team: Team  # that answers
    body: Mapping[str, Any]  # as the client sent it
    identity: RequestIdentity
    mirrored_call: Call | None = None  # the answered call that this one shadows
    replaced_call: Call | None = None  # the call of the local model that `hosted_model` answers in place of
    hosted_model: str | None = None


@dataclass(slots=True)
class LiveRun:
    """An episode until it ends."""

    episode: EpisodeContext
    team: Team
    root: OpenSpan
    run_key: str | None  # None for an episode of one call
    last_call_ns: int
    span_count: int = 1
    call_count: int = 0
    calls_in_flight: int = 0
    is_full: bool = False  # no further call is part of it
    last_error: str | None = None  # of its latest call
    ended_executions: list[str] = field(default_factory=list)  # executions, by span id
    tool_calls: IdIndex = field(default_factory=IdIndex)
    offered_tools: dict[str, set[str]] = field(default_factory=dict)  # node -> tools that its calls offered, as JSON


@dataclass(slots=True)
class Call:
    """A call until it ends."""

    request: LiveRequest
    run: LiveRun
    node_span: OpenSpan
    chat_span: OpenSpan

    @property
    def episode_id(self) -> str:
        """The id of the episode that the call is part of."""
        return str(self.run.episode.episode_id)

    @property
    def action_id(self) -> str:
        """The id of the call's chat span."""
        return self.chat_span.span_id


class LiveRecorder:
    """Records the calls of one proxy.

    `run_id` is that of all its episodes; `quiet_s` the seconds without a call after which a run ends; `temperature` the
    engine's default, None when that is not known; `lineage` that of the served model; `frozen` the nodes whose calls
    are never trained on.
    """

    def __init__(
        self,
        processor: JournalProcessor,
        run_id: str,
        workflow: str,
        quiet_s: float,
        temperature: float | None,
        lineage: Mapping[str, str],
        frozen: Iterable[str],
    ) -> None:
        self._processor = processor
        self._run_id, self._workflow, self._quiet_ns = run_id, workflow, int(quiet_s * 1e9)
        self._temperature, self._lineage, self._frozen = temperature, lineage, frozenset(frozen)
        self._open_runs: dict[str, LiveRun] = {}  # by run key, the longest untouched first; none is full
        self._full_runs: list[LiveRun] = []  # until their last calls end
        self._episode_count = 0
        self.failures = 0  # calls that could not be recorded, or not to their end

    @property
    def lost_spans(self) -> int:
        """Spans that the journal refused."""
        return self._processor.lost_spans

    def find_team(self, run_key: str | None) -> Team | None:
        """The team that a run began with; None for a run that is not open."""
        run = self._open_runs.get(run_key) if run_key is not None else None
        return run.team if run is not None else None

    def begin(self, request: LiveRequest) -> Call | None:
        """Opens the spans of a call that is about to be sent to the engine. None when it cannot be recorded."""
        try:
            return self._begin_call(request)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client must not notice
            self._note_failure(error)
            return None

    def end(self, call: Call | None, answer: Answer | None, error: str | None, *, is_replaced: bool = False) -> None:
        """Ends the spans of a call. `error` is `Type: text` for a call that failed, else None.

        Args:
            is_replaced: another call was begun whose answer the client gets instead.
        """
        if call is None:
            return
        try:
            self._end_call(call, answer, error, is_replaced=is_replaced)
        except Exception as failure:  # noqa: BLE001 - as above
            self._note_failure(failure)

    def close_quiet_runs(self) -> None:
        """Ends the runs that have been quiet for long enough."""
        quiet_since_ns = time.time_ns() - self._quiet_ns
        for run in [
            run for run in self._open_runs.values() if not run.calls_in_flight and run.last_call_ns <= quiet_since_ns
        ]:
            self._close_run(run, f"no call for {self._quiet_ns / 1e9:g} s: a proxy does not see a run end")
        for run in [run for run in self._full_runs if not run.calls_in_flight]:  # its last call's end was not recorded
            self._close_run(run, _full_reason())

    def close(self) -> None:
        """Ends the open runs. To be called after the last call has ended."""
        for run in [*self._open_runs.values(), *self._full_runs]:
            self._close_run(run, STOPPED_REASON)

    # -- calls ------------------------------------------------------------------------------------------------

    def _begin_call(self, request: LiveRequest) -> Call:
        run = self._find_or_open_run(request)
        messages = to_messages(request.body.get("messages")) if request.path == CHAT else _body_to_prompt(request.body)
        prompt = messages_to_json(messages)
        if tools := request_to_tools(request.body):
            run.offered_tools.setdefault(request.node, set()).update(tools)
        node_span = self._start_span(
            run,
            f"{names.INVOKE_AGENT} {request.node}",
            run.root,
            attributes={
                names.OPERATION: names.INVOKE_AGENT,
                names.AGENT_NAME: request.node,
                names.NODE: request.node,
                names.MAY_READ_FROM: run.ended_executions[: -MAX_EARLIER_CALLS - 1 : -1] or None,
            },
        )
        model, is_hosted = request.hosted_model, request.hosted_model is not None
        if model is None:
            model = request.team.served_names[request.node]
        call_attributes = {
            names.OPERATION: names.CHAT,
            names.PROVIDER: None if is_hosted else PROVIDER,
            names.NODE: request.node,
            names.REQUEST_MODEL: model,
            names.ADAPTER: None if is_hosted else model,
            names.ADAPTER_VERSION: None if is_hosted else request.team.versions[request.node],
            names.INPUT_MESSAGES: prompt,
            names.TOOL_DEFINITIONS: request_to_definitions(request.body),
            names.SAW_TOOL_RESULTS: run.tool_calls.ids_to_calls(messages_to_tool_result_ids(messages)) or None,
        }
        chat_span = self._start_span(
            run,
            f"{names.CHAT} {model}",
            node_span,
            attributes=self._processor.check_call(
                call_attributes | _body_to_sampling(request.body, None if is_hosted else self._temperature)
            ),
        )
        run.call_count += request.replaced_call is None
        run.calls_in_flight += 1
        if run.run_key is not None and run.call_count >= MAX_CALLS and not run.is_full:
            run.is_full = True  # the next call begins another run: under steady traffic this one always has calls
            self._full_runs.append(self._open_runs.pop(run.run_key))
        return Call(request, run, node_span, chat_span=chat_span)

    def _end_call(self, call: Call, answer: Answer | None, error: str | None, *, is_replaced: bool) -> None:
        run = call.run
        run.calls_in_flight -= 1
        run.last_call_ns = time.time_ns()
        run.last_error = error
        if answer is not None:
            answer_messages = to_messages([message for _, message in sorted(answer.messages.items())])
            answer_attributes = self._processor.check_call(tokens_to_attributes(answer.tokens))
            reasons = [
                answer_attributes.get(names.UNTRAINABLE),
                body_to_untrainable_reason(call.request.path, call.request.body),
            ]
            if call.request.node in self._frozen:
                reasons.append(f"node {call.request.node} is declared frozen")
            answer_attributes[names.UNTRAINABLE] = "; ".join(filter(None, reasons)) or None
            call.chat_span.set(answer_attributes | {names.OUTPUT_MESSAGES: messages_to_json(answer_messages)})
            if not is_replaced:  # nobody read a replaced answer
                run.tool_calls.add(messages_to_tool_call_ids(answer_messages), call.action_id)
        for span in (call.chat_span, call.node_span):
            if error is not None:
                span.error = error
            self._processor.end_span(span, run.last_call_ns)
        if is_replaced:
            return
        run.ended_executions.append(call.node_span.span_id)
        if run.run_key is None:
            self._close_run(run, ONE_CALL_REASON)
        elif run.is_full and not run.calls_in_flight:
            self._close_run(run, _full_reason())

    # -- runs -------------------------------------------------------------------------------------------------

    def _find_or_open_run(self, request: LiveRequest) -> LiveRun:
        if request.replaced_call is not None:
            return request.replaced_call.run
        run_key, subject = request.identity.run_key if request.mirrored_call is None else None, request.identity.subject
        run = self._open_runs.get(run_key) if run_key is not None else None
        if run is not None and None not in (subject, run.episode.subject_id) and subject != run.episode.subject_id:
            run_key, run = None, None  # one subject per episode: one of them may ask for erasure
        if run is None:
            run = self._open_run(request, run_key)
        run.episode.subject_id = run.episode.subject_id or subject
        if run_key is not None:
            self._open_runs.pop(run_key, None)
            self._open_runs[run_key] = run  # at the end: the latest that was touched
            self._close_surplus(run)
        return run

    def _close_surplus(self, kept: LiveRun) -> None:
        """Ends the longest untouched runs beyond the limit, but none that has a call in flight or is about to."""
        while len(self._open_runs) > MAX_OPEN_RUNS:
            idle_runs = (run for run in self._open_runs.values() if not run.calls_in_flight and run is not kept)
            idle = next(idle_runs, None)
            if idle is None:
                return
            self._close_run(idle, f"more than {MAX_OPEN_RUNS} runs were open")

    def _open_run(self, request: LiveRequest, run_key: str | None) -> LiveRun:
        self._episode_count += 1
        identity, mirrored_call = request.identity, request.mirrored_call
        tags = {"key": identity.key_source, "session": identity.session, "run": identity.run_key}
        if mirrored_call is not None:
            tags["mirrors"] = mirrored_call.action_id
        episode = EpisodeContext(
            self._run_id,
            mirrored_call.run.episode.task_id if mirrored_call is not None else f"{self._run_id}/{self._episode_count}",
            split="live",
            variant=request.team.name if mirrored_call is None else MIRRORED,
            adapters=request.team.versions,
            tags={name: value for name, value in tags.items() if value},
            subject_id=identity.subject,
            parent_episode=mirrored_call.episode_id if mirrored_call is not None else None,
        )
        root = open_span(
            f"{names.INVOKE_WORKFLOW} {self._workflow}", None, episode_to_attributes(episode, self._workflow)
        )
        episode.episode_id = root.trace_id
        return LiveRun(episode, request.team, root, run_key=run_key, last_call_ns=time.time_ns())

    def _close_run(self, run: LiveRun, reason: str) -> None:
        if run.is_full:
            self._full_runs.remove(run)
        elif run.run_key is not None:
            self._open_runs.pop(run.run_key, None)
        failed = run.call_count == 1 and run.last_error is not None
        lineage = {**self._lineage, **tools_to_lineage(run.offered_tools)}
        outcome_attributes = {
            names.OUTCOME: "failed" if failed else "truncated",
            names.OUTCOME_REASON: run.last_error if failed else reason,
            names.SPAN_COUNT: run.span_count,
            names.LINEAGE: to_json(lineage) if lineage else None,
            names.SUBJECT_ID: run.episode.subject_id,
        }
        run.root.set(outcome_attributes)
        if failed:
            run.root.error = run.last_error
        self._processor.end_span(run.root, run.last_call_ns)

    def _start_span(self, run: LiveRun, name: str, parent: OpenSpan, attributes: dict[str, Any]) -> OpenSpan:
        if run.episode.subject_id is not None:  # on every span: a trace whose root never came can be erased too
            attributes[names.SUBJECT_ID] = run.episode.subject_id
        run.span_count += 1
        return open_span(name, parent, attributes)

    def _note_failure(self, error: Exception) -> None:
        self.failures += 1
        if self.failures == 1:  # without the error's text, which may quote a prompt or a key
            log.warning("recording a live call failed: %s; the client is answered", type(error).__name__)
            log.debug("recording failed", exc_info=error)


def _full_reason() -> str:
    return f"{MAX_CALLS} calls named one run"


def _body_to_prompt(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The prompt of a plain completion, where it is text."""
    prompt = body.get("prompt")
    texts = [prompt] if isinstance(prompt, str) else prompt if isinstance(prompt, list) else []
    return to_messages([{"role": "user", "content": text} for text in texts if isinstance(text, str)])


def _body_to_sampling(body: Mapping[str, Any], temperature: float | None) -> dict[str, Any]:
    """The request's sampling settings, as it has them; one of the wrong type is left for the engine to refuse."""
    stop, requested_temperature = body.get("stop"), body.get("temperature")
    return {
        names.REQUEST_TEMPERATURE: temperature if requested_temperature is None else requested_temperature,
        names.REQUEST_TOP_P: body.get("top_p"),
        names.REQUEST_TOP_K: body.get("top_k"),
        names.REQUEST_MAX_TOKENS: body.get("max_tokens") or body.get("max_completion_tokens"),
        names.REQUEST_SEED: body.get("seed"),
        names.REQUEST_STOP: [stop] if isinstance(stop, str) else stop,
    }
