"""Calls of live traffic -> spans in the journal of a run folder, as episodes of the split `live`.

One call is an agent's execution with a chat span inside. Calls of one graph run (`Sticky.run`) are one episode, which
ends when none of them is under way and no further one came for a while; a call that names no run is an episode of its
own, and so is a mirrored one, whose prompt holds what the other team said. Invariants: a proxy sees no run end, so no
episode here is `terminated`; an earlier call of a run is an upper bound of what a later one read, and only the result
of a tool call is an exact edge; a failure in here is counted and never reaches the client. All of it runs on one event
loop. Nothing of HTTP is known here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from opentelemetry.sdk.trace import Span, Tracer
from opentelemetry.trace import Status, StatusCode, format_span_id, format_trace_id

from marft_bridge.call_attributes import to_json, tokens_to_attributes
from marft_bridge.episode import EpisodeContext, episode_to_attributes
from marft_bridge.exporter import JournalProcessor, open_span, private_provider
from marft_bridge.ingest.messages import IdIndex, answered_tool_calls, asked_tool_calls, messages_text, to_messages
from marft_bridge.lineage import request_to_tools, tools_to_lineage
from marft_bridge.live.split import MIRRORED
from marft_bridge.live.sticky import Sticky
from marft_bridge.live.teams import Team
from marft_bridge.live.wire import CHAT, Answer, body_to_untrainable
from marft_bridge.policy import PROVIDER
from trace_store import conventions as names

log = logging.getLogger("marft_bridge")

ONE_CALL = "a call that named no graph run: the run around it is not known"
STOPPED = "the proxy stopped"
MOST_READ = 256  # earlier calls that one may have read, the latest; as in traces that are taken in
MOST_CALLS = 2_000  # of one episode: a trace id that never changes is no run
MOST_RUNS = 20_000  # that are open at a time


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, as far as its record is concerned."""

    path: str
    node: str
    team: Team
    body: Mapping[str, Any]  # as the client sent it
    sticky: Sticky
    mirrors: Call | None = None  # the answered call that this one shadows


@dataclass(slots=True)
class LiveRun:
    """An episode until it ends."""

    episode: EpisodeContext
    team: Team
    root: Span
    key: str | None  # Sticky.run; None for an episode of one call
    last_ns: int
    spans: int = 1
    calls: int = 0
    under_way: int = 0
    failure: str | None = None  # of its latest call
    ended: list[str] = field(default_factory=list)  # executions, by span id
    tools: IdIndex = field(default_factory=IdIndex)
    offered: dict[str, set[str]] = field(default_factory=dict)  # node -> tools that its calls offered, as JSON


@dataclass(slots=True)
class Call:
    """A call until it ends."""

    asked: Asked
    run: LiveRun
    node_span: Span
    chat_span: Span

    @property
    def episode_id(self) -> str:
        """Of the episode that it is part of."""
        return str(self.run.episode.episode_id)

    @property
    def action_id(self) -> str:
        """Its own."""
        return _span_id(self.chat_span)


class LiveRecorder:
    """Records the calls of one proxy.

    `run_id` is that of all its episodes; `temperature` what the engine takes where a request names none, None when
    that is not known; `lineage` of the served model; `frozen` the nodes whose calls are never trained on.
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
        provider = private_provider(processor)
        self._tracer = cast(Tracer, provider.get_tracer("marft_bridge", names.CONVENTION_VERSION))
        self._run_id, self._workflow, self._quiet_ns = run_id, workflow, int(quiet_s * 1e9)
        self._temperature, self._lineage, self._frozen = temperature, lineage, frozenset(frozen)
        self._open: dict[str, LiveRun] = {}  # by key, the longest untouched first
        self._recorded = 0
        self.failures = 0  # calls that could not be recorded, or not to their end

    @property
    def lost(self) -> int:
        """Spans that the journal refused."""
        return self._processor.lost

    def team_of(self, run: str | None) -> Team | None:
        """The team that a run began with; None for one that is not open."""
        opened = self._open.get(run) if run is not None else None
        return opened.team if opened is not None else None

    def begin(self, asked: Asked) -> Call | None:
        """The call is sent to the engine now. None when it cannot be recorded."""
        try:
            return self._begin(asked)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client must not notice
            self._note_failure(error)
            return None

    def end(self, call: Call | None, answer: Answer | None, error: str | None) -> None:
        """The call is over. `error` is `Type: text` for one that failed, else None."""
        if call is None:
            return
        try:
            self._end(call, answer, error)
        except Exception as failure:  # noqa: BLE001 - as above
            self._note_failure(failure)

    def settle(self) -> None:
        """Ends the runs that have been quiet for long enough."""
        before = time.time_ns() - self._quiet_ns
        for run in [run for run in self._open.values() if not run.under_way and run.last_ns <= before]:
            self._close(run, f"no call for {self._quiet_ns / 1e9:g} s: a proxy does not see a run end")

    def close(self) -> None:
        """Ends what is open. Calls have ended before."""
        for run in list(self._open.values()):
            self._close(run, STOPPED)

    # -- calls ------------------------------------------------------------------------------------------------

    def _begin(self, asked: Asked) -> Call:
        run = self._run_of(asked)
        messages = to_messages(asked.body.get("messages")) if asked.path == CHAT else _prompt(asked.body)
        prompt = messages_text(messages)
        if tools := request_to_tools(asked.body):
            run.offered.setdefault(asked.node, set()).update(tools)
        node_span = self._start_span(
            run,
            f"{names.INVOKE_AGENT} {asked.node}",
            run.root,
            {
                names.OPERATION: names.INVOKE_AGENT,
                names.AGENT_NAME: asked.node,
                names.NODE: asked.node,
                names.MAY_READ_FROM: run.ended[: -MOST_READ - 1 : -1] or None,
            },
        )
        served = asked.team.served[asked.node]
        about = {
            names.OPERATION: names.CHAT,
            names.PROVIDER: PROVIDER,
            names.NODE: asked.node,
            names.REQUEST_MODEL: served,
            names.ADAPTER: served,
            names.ADAPTER_VERSION: asked.team.versions[asked.node],
            names.INPUT_MESSAGES: prompt,
            names.SAW_TOOL_RESULTS: run.tools.named(answered_tool_calls(messages)) or None,
        }
        chat_span = self._start_span(
            run, f"{names.CHAT} {served}", node_span, about | _sampling(asked.body, self._temperature)
        )
        run.calls += 1
        run.under_way += 1
        return Call(asked, run, node_span, chat_span)

    def _end(self, call: Call, answer: Answer | None, error: str | None) -> None:
        run = call.run
        run.under_way -= 1
        run.last_ns = time.time_ns()
        run.failure = error
        if answer is not None:
            said = to_messages([message for _, message in sorted(answer.messages.items())])
            told = tokens_to_attributes(answer.tokens)
            reasons = [told.get(names.UNTRAINABLE), body_to_untrainable(call.asked.path, call.asked.body)]
            if call.asked.node in self._frozen:
                reasons.append(f"node {call.asked.node} is declared frozen")
            told[names.UNTRAINABLE] = "; ".join(filter(None, reasons)) or None
            self._processor.say(call.chat_span, told | {names.OUTPUT_MESSAGES: messages_text(said)})
            run.tools.add(asked_tool_calls(said), call.action_id)
        for span in (call.chat_span, call.node_span):
            if error is not None:
                span.set_status(Status(StatusCode.ERROR, error))
            span.end(run.last_ns)
        run.ended.append(_span_id(call.node_span))
        if run.key is None or (run.calls >= MOST_CALLS and not run.under_way):
            self._close(run, ONE_CALL if run.key is None else f"{MOST_CALLS} calls named one run")

    # -- runs -------------------------------------------------------------------------------------------------

    def _run_of(self, asked: Asked) -> LiveRun:
        key, subject = asked.sticky.run if asked.mirrors is None else None, asked.sticky.subject
        run = self._open.get(key) if key is not None else None
        if run is not None and None not in (subject, run.episode.subject_id) and subject != run.episode.subject_id:
            key, run = None, None  # what two persons said is not one episode: one of them may ask to be forgotten
        if run is None:
            run = self._open_run(asked, key)
        run.episode.subject_id = run.episode.subject_id or subject
        if key is not None:
            self._open.pop(key, None)
            self._open[key] = run  # at the end: the latest that was touched
            idle = next(iter(self._open.values()))
            if len(self._open) > MOST_RUNS and not idle.under_way:
                self._close(idle, f"more than {MOST_RUNS} runs were open")
        return run

    def _open_run(self, asked: Asked, key: str | None) -> LiveRun:
        self._recorded += 1
        sticky, shadowed = asked.sticky, asked.mirrors
        tags = {"key": sticky.source, "session": sticky.session, "run": sticky.run}
        if shadowed is not None:
            tags["mirrors"] = shadowed.action_id
        episode = EpisodeContext(
            self._run_id,
            shadowed.run.episode.task_id if shadowed is not None else f"{self._run_id}/{self._recorded}",
            split="live",
            variant=asked.team.name if shadowed is None else MIRRORED,
            adapters=asked.team.versions,
            tags={name: value for name, value in tags.items() if value},
            subject_id=sticky.subject,
            parent_episode=shadowed.episode_id if shadowed is not None else None,
        )
        root = open_span(self._tracer, f"{names.INVOKE_WORKFLOW} {self._workflow}", None)
        self._processor.say(root, episode_to_attributes(episode, self._workflow))
        episode.episode_id = format_trace_id(root.get_span_context().trace_id)
        return LiveRun(episode, asked.team, root, key, time.time_ns())

    def _close(self, run: LiveRun, why: str) -> None:
        if run.key is not None:
            self._open.pop(run.key, None)
        failed = run.calls == 1 and run.failure is not None
        lineage = {**self._lineage, **tools_to_lineage(run.offered)}
        told = {
            names.OUTCOME: "failed" if failed else "truncated",
            names.OUTCOME_REASON: run.failure if failed else why,
            names.SPAN_COUNT: run.spans,
            names.LINEAGE: to_json(lineage) if lineage else None,
            names.SUBJECT_ID: run.episode.subject_id,
        }
        self._processor.say(run.root, told)
        if failed:
            run.root.set_status(Status(StatusCode.ERROR, run.failure))
        run.root.end(run.last_ns)

    def _start_span(self, run: LiveRun, name: str, parent: Span, attributes: dict[str, Any]) -> Span:
        if run.episode.subject_id is not None:  # on every span: a trace whose root never came can be erased too
            attributes[names.SUBJECT_ID] = run.episode.subject_id
        span = open_span(self._tracer, name, parent)
        self._processor.say(span, attributes)
        run.spans += 1
        return span

    def _note_failure(self, error: Exception) -> None:
        self.failures += 1
        if self.failures == 1:  # without the error's text, which may quote a prompt or a key
            log.warning("recording a live call failed: %s; the client is answered", type(error).__name__)
            log.debug("recording failed", exc_info=error)


def _prompt(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The prompt of a plain completion, where it is text."""
    prompt = body.get("prompt")
    texts = [prompt] if isinstance(prompt, str) else prompt if isinstance(prompt, list) else []
    return to_messages([{"role": "user", "content": text} for text in texts if isinstance(text, str)])


def _sampling(body: Mapping[str, Any], temperature: float | None) -> dict[str, Any]:
    """How the answer was asked to be sampled; what is of another type is the engine's to refuse, and not recorded."""
    stop = body.get("stop")
    asked = _number(body.get("temperature"))
    return {
        names.REQUEST_TEMPERATURE: temperature if asked is None else asked,
        names.REQUEST_TOP_P: _number(body.get("top_p")),
        names.REQUEST_TOP_K: _whole(body.get("top_k")),
        names.REQUEST_MAX_TOKENS: _whole(body.get("max_tokens")) or _whole(body.get("max_completion_tokens")),
        names.REQUEST_SEED: _whole(body.get("seed")),
        names.REQUEST_STOP: [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else None,
    }


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _span_id(span: Span) -> str:
    return format_span_id(span.get_span_context().span_id)
