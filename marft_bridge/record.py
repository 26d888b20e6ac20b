"""LangChain callbacks of a LangGraph run -> spans: run, node, LLM call and tool call.

One root run is one trace and one episode. Invariants: parents are found by run id, never by ambient context, so
threads and asyncio cannot mix episodes; every span ends, at the latest with its run; the root ends last and says
how many spans there are, so a reader can tell a whole episode from a torn one. A failure in here is counted,
logged once, and never reaches the app. It knows nothing of DuckDB, adapters' files or training.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage, message_to_dict
from langchain_core.outputs import LLMResult
from langgraph.errors import GraphBubbleUp, GraphInterrupt, ParentCommand
from langgraph.types import PregelExecutableTask
from opentelemetry import trace
from opentelemetry.sdk.trace import Span, Tracer
from opentelemetry.trace import Status, StatusCode

from marft_bridge.action_links import reads_to_attributes, sources_to_attributes
from marft_bridge.call_attributes import answer_to_attributes, to_json, tokens_to_attributes
from marft_bridge.declared_format import answer_fits, request_to_format
from marft_bridge.episode import (
    SUBJECT_METADATA,
    EpisodeContext,
    current_episode,
    end_to_outcome,
    episode_to_attributes,
)
from marft_bridge.exact_tokens import ExactTokens, announce_call
from marft_bridge.exporter import open_span, private_provider
from marft_bridge.node_names import namespace_to_node
from marft_bridge.open_trace import OpenRun, OpenTrace
from marft_bridge.record_options import RecordOptions
from marft_bridge.recording import options_to_processor
from marft_bridge.redaction import Redact
from marft_bridge.state_reads import Reads
from marft_bridge.task_writes import ENTRY
from trace_store import conventions as names
from trace_store.errors import StoreError
from trace_store.journal import Journal

log = logging.getLogger("marft_bridge")
_DEFAULTS = RecordOptions()
_Method = TypeVar("_Method", bound=Callable[..., None])
_REMEMBERED_INTERRUPTS = 10_000


@dataclass(frozen=True, slots=True)
class Losses:
    """What a recorder could not write, or was told not to."""

    callbacks: int  # notes of LangChain or LangGraph that could not be recorded; their episodes lack spans
    spans: int  # spans that the journal refused
    unredacted: int  # spans that lost their content because redacting it failed
    redactions: Mapping[str, int]  # places where text was replaced, by pattern

    def __str__(self) -> str:
        parts = [
            (self.callbacks, "callbacks could not be recorded"),
            (self.spans, "spans could not be written"),
            (self.unredacted, "spans lost their content because redacting it failed"),
            *((count, f"replacements of {pattern}") for pattern, count in sorted(self.redactions.items())),
        ]
        return ", ".join(f"{count} {what}" for count, what in parts if count)


def _never_harm(method: _Method) -> _Method:
    """The app must not notice that recording failed; the loss is counted and its episode marked."""

    @functools.wraps(method)
    def guarded(self: Recorder, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not the app's
            self.note_failure(method.__name__, error)
            self._mark_torn((*args, *kwargs.values()))

    return cast(_Method, guarded)


class Recorder(BaseCallbackHandler):
    """Records every graph run that it is attached to into one journal. Use one for many concurrent runs."""

    run_inline = True  # in the caller's context, before the call goes on
    raise_error = False

    def __init__(self, journal: Journal, options: RecordOptions = _DEFAULTS, redact: Redact | None = None) -> None:
        """`redact` is the function that `options.redact_with` would name. Raises a BridgeError for unusable options."""
        self.journal = journal
        self._processor = options_to_processor(journal, options, redact)
        provider = private_provider(self._processor)
        self._tracer = cast(Tracer, provider.get_tracer("marft_bridge", names.CONVENTION_VERSION))
        self._runs: dict[UUID, OpenRun] = {}
        self._nodes: dict[str, OpenRun] = {}  # checkpoint_ns -> the attempt that runs
        self._lock = threading.Lock()
        self._begin_session()
        self._interrupted: dict[str, str] = {}  # thread -> the episode that its next run goes on with
        self.failures = 0  # callbacks that could not be recorded

    @property
    def losses(self) -> Losses:
        """What is not in the record, so far."""
        privacy = self._processor.privacy
        return Losses(self.failures, self._processor.lost, privacy.failures, dict(privacy.redactions))

    @property
    def failure(self) -> StoreError | None:
        """The first write that the disk refused, or None."""
        return self._processor.failure or self.journal.failure

    def note_failure(self, where: str, error: Exception) -> None:
        """Counts a callback that could not be recorded; the first one is logged."""
        with self._lock:
            self.failures += 1
            first = self.failures == 1
        if first:
            # Without the error's text, which may quote a prompt or a key.
            log.warning("recording failed in %s: %s; the app goes on", where, type(error).__name__)
            log.debug("recording failed", exc_info=error)

    def _mark_torn(self, given: Iterable[Any]) -> None:
        """The trace that a failed callback was about counts a span more than it has, so it is never taken for whole."""
        for value in given:
            run_id: Any = value if isinstance(value, UUID) else getattr(getattr(value, "manager", None), "run_id", None)
            with suppress(Exception):  # what broke the callback may break this
                self._runs[run_id].trace.spans += 1
                return

    # -- runs and nodes ---------------------------------------------------------------------------------------

    @_never_harm
    def on_chain_start(
        self,
        serialized: dict[str, Any] | None,
        inputs: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A root run opens a trace; a node execution opens a span; any other chain passes its parent's on."""
        metadata = metadata or {}
        parent = self._parent_of(parent_run_id, metadata)
        if parent is None:
            self._open_trace(run_id, str(kwargs.get("name") or "graph"), metadata)
            return
        checkpoint_ns = str(metadata.get("langgraph_checkpoint_ns") or "")
        if checkpoint_ns and checkpoint_ns != parent.checkpoint_ns and kwargs.get("name") == metadata["langgraph_node"]:
            self._open_node(run_id, parent, checkpoint_ns, metadata)
        else:
            self._add_run(run_id, OpenRun(parent.trace, parent.span, False, parent.checkpoint_ns, parent.task))

    @_never_harm
    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Ends the node's span, or the whole trace."""
        self._close(run_id, None)

    @_never_harm
    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Ends it with an error; LangGraph's own control flow (interrupts, handoffs) is none."""
        run = self._runs.get(run_id)
        if run is not None and isinstance(error, GraphInterrupt):
            run.trace.interrupted = True
        if run is not None and run.owns_span and run.checkpoint_ns and isinstance(error, ParentCommand):
            run.trace.ledger.note_handoff(run.checkpoint_ns)
        self._close(run_id, None if isinstance(error, GraphBubbleUp) else error)

    def _open_trace(self, run_id: UUID, name: str, metadata: Mapping[str, Any]) -> None:
        thread_id, subject_id = metadata.get("thread_id"), metadata.get(SUBJECT_METADATA)
        episode = current_episode.get()
        if episode is None or episode.recorder not in (None, self):
            episode = self._live_episode()
        if episode.subject_id is None and subject_id is not None:
            episode.subject_id = str(subject_id)
        opened = OpenTrace(run_id, episode, thread_id=str(thread_id) if thread_id is not None else None)
        if episode.parent_episode is None and opened.thread_id is not None:
            episode.parent_episode = self._interrupted.pop(opened.thread_id, None)
        span = self._start_span(opened, f"{names.INVOKE_WORKFLOW} {name}", None, episode_to_attributes(episode, name))
        episode.episode_id = trace.format_trace_id(span.get_span_context().trace_id)
        if episode.spans is not None:
            self._processor.also_into(span, episode.spans)
        self._add_run(run_id, OpenRun(opened, span, True, ""))

    def _live_episode(self) -> EpisodeContext:
        """An episode that no command asked for; a forked child counts its own."""
        with self._lock:
            if self._pid != os.getpid():
                self._begin_session()
            self._recorded += 1
            return EpisodeContext(self._session, f"{self._session}/{self._recorded}", split="live")

    def _begin_session(self) -> None:
        self._pid, self._session, self._recorded = os.getpid(), f"session-{uuid.uuid4().hex[:12]}", 0

    def _open_node(self, run_id: UUID, parent: OpenRun, checkpoint_ns: str, metadata: dict[str, Any]) -> None:
        task = parent.trace.tasks.get(checkpoint_ns)
        attributes = sources_to_attributes(task.sources if task else None)  # what it reads is known when it ends
        step = int(metadata["langgraph_step"])
        span = self._start_node_span(parent.trace, parent.span, checkpoint_ns, step, attributes)
        if task is not None:
            task.span = span
        self._nodes[checkpoint_ns] = opened = OpenRun(parent.trace, span, True, checkpoint_ns, task)
        self._add_run(run_id, opened)

    def _start_node_span(
        self, owner: OpenTrace, around: Span, checkpoint_ns: str, step: int, attributes: dict[str, Any]
    ) -> Span:
        node = namespace_to_node(checkpoint_ns)
        about: dict[str, Any] = {
            names.OPERATION: names.INVOKE_AGENT,
            names.AGENT_NAME: node,
            names.NODE: node,
            names.STEP: step,
            names.CHECKPOINT_NS: checkpoint_ns,
        }
        return self._start_span(owner, f"{names.INVOKE_AGENT} {node}", around, about | attributes)

    # -- tasks, from `task_hooks` -----------------------------------------------------------------------------

    @_never_harm
    def note_task_start(self, graph_run: UUID, task: PregelExecutableTask, reads: Reads | None, inherits: bool) -> None:
        """A task is about to run: where it comes from, before its node span opens."""
        run = self._runs.get(graph_run)
        if run is not None:
            run.trace.start_task(task, reads, inherits)

    @_never_harm
    def note_task_writes(self, loop: Any, task: PregelExecutableTask, writes: Any, cached: bool) -> None:
        """What a task wrote, before the next superstep starts; a task that was not run gets its span here."""
        graph_run = self._runs.get(loop.manager.run_id)
        if graph_run is None:
            return
        owner = graph_run.trace
        if owner.root == loop.manager.run_id:
            owner.loop = loop
        if cached:
            started = owner.start_task(task, None, False)
            if task.name != ENTRY:
                attributes = sources_to_attributes(started.sources) | reads_to_attributes(started.sources, None)
                attributes |= {names.CACHED: True}
                at = started.start
                self._start_node_span(owner, graph_run.span, at.ns, at.step, attributes).end()
        owner.note_writes(loop, task, writes)

    # -- LLM calls --------------------------------------------------------------------------------------------

    @_never_harm
    def on_chat_model_start(
        self,
        serialized: dict[str, Any] | None,
        messages: list[list[BaseMessage]],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Opens a chat span under the node that calls."""
        announce_call(run_id, self)
        prompt = [message_to_dict(message) for message in messages[0]]
        self._open_call(run_id, parent_run_id, metadata or {}, kwargs, prompt, messages[0])

    @_never_harm
    def on_llm_start(
        self,
        serialized: dict[str, Any] | None,
        prompts: list[str],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A plain completion model is recorded like a chat model."""
        self._open_call(run_id, parent_run_id, metadata or {}, kwargs, prompts, [])

    def _open_call(
        self,
        run_id: UUID,
        parent_run_id: UUID | None,
        metadata: dict[str, Any],
        kwargs: dict[str, Any],
        prompt: Any,
        messages: list[BaseMessage],
    ) -> None:
        parent = self._parent_of(parent_run_id, metadata)
        if parent is None:
            return  # called outside any recorded graph: not an action of a game
        asked = kwargs.get("invocation_params") or {}
        model = asked.get("model") or asked.get("model_name") or metadata.get("ls_model_name")
        in_node = bool(parent.checkpoint_ns)
        if in_node:
            parent.trace.note_tools(namespace_to_node(parent.checkpoint_ns), asked)
        attributes = {
            names.OPERATION: names.CHAT,
            names.PROVIDER: metadata.get("ls_provider"),
            names.REQUEST_MODEL: model,
            names.REQUEST_TEMPERATURE: asked.get("temperature"),
            names.REQUEST_TOP_P: asked.get("top_p"),
            names.REQUEST_MAX_TOKENS: asked.get("max_tokens") or asked.get("max_completion_tokens"),
            names.REQUEST_SEED: asked.get("seed"),
            names.REQUEST_STOP: [stop] if isinstance(stop := asked.get("stop"), str) else stop,
            names.INPUT_MESSAGES: to_json(prompt),
            names.NODE: namespace_to_node(parent.checkpoint_ns) if in_node else None,
            names.STEP: metadata.get("langgraph_step") if in_node else None,
            names.CHECKPOINT_NS: parent.checkpoint_ns or None,
        }
        attributes |= parent.trace.answers.prompt_to_attributes(messages)
        if parent.task is not None:
            attributes |= reads_to_attributes(parent.task.sources, parent.task.reads)
        span = self._start_span(parent.trace, f"{names.CHAT} {model}", parent.span, attributes)
        declared = request_to_format(asked)
        self._add_run(run_id, OpenRun(parent.trace, span, True, parent.checkpoint_ns, parent.task, declared=declared))

    @_never_harm
    def note_exact_tokens(self, run_id: UUID, tokens: ExactTokens) -> None:
        """The engine's token ids and log-probs of a call, from `policy`, before the call's end is announced."""
        run = self._runs.get(run_id)
        if run is not None:
            run.tokens = tokens

    @_never_harm
    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Writes the answer and the exact tokens, and ends the chat span."""
        run = self._runs.get(run_id)
        if run is None:
            return
        fits = {names.FORMAT_VALID: answer_fits(run.declared, response)}
        self._processor.say(run.span, answer_to_attributes(response) | tokens_to_attributes(run.tokens) | fits)
        run.trace.answers.add(response, trace.format_span_id(run.span.get_span_context().span_id))
        self._close(run_id, None)

    @_never_harm
    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """A call that failed is a span with an error, and no action to train on."""
        self._close(run_id, error)

    # -- tools ------------------------------------------------------------------------------------------------

    @_never_harm
    def on_tool_start(
        self,
        serialized: dict[str, Any] | None,
        input_str: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Opens a tool span: an environment transition, never an action."""
        parent = self._parent_of(parent_run_id, metadata or {})
        if parent is None:
            return
        name = (serialized or {}).get("name") or kwargs.get("name") or "tool"
        attributes = {
            names.OPERATION: names.EXECUTE_TOOL,
            names.TOOL_NAME: name,
            names.TOOL_CALL_ID: kwargs.get("tool_call_id"),
            names.TOOL_ARGUMENTS: input_str,
            names.NODE: namespace_to_node(parent.checkpoint_ns) or None,
            names.CHECKPOINT_NS: parent.checkpoint_ns or None,
        }
        span = self._start_span(parent.trace, f"{names.EXECUTE_TOOL} {name}", parent.span, attributes)
        self._add_run(run_id, OpenRun(parent.trace, span, True, parent.checkpoint_ns, parent.task))

    @_never_harm
    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Ends the tool span with its result as text."""
        run = self._runs.get(run_id)
        if run is not None:
            self._processor.say(run.span, {names.TOOL_RESULT: str(getattr(output, "content", output))})
            self._close(run_id, None)

    @_never_harm
    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Ends the tool span with its error."""
        self._close(run_id, error)

    # -- spans ------------------------------------------------------------------------------------------------

    def _start_span(self, owner: OpenTrace, name: str, parent: Span | None, attributes: dict[str, Any]) -> Span:
        owner.spans += 1
        if owner.episode.subject_id is not None:  # on every span: a trace whose root never came can be erased too
            attributes = attributes | {names.SUBJECT_ID: owner.episode.subject_id}
        span = open_span(self._tracer, name, parent)
        self._processor.say(span, attributes)
        return span

    def _parent_of(self, parent_run_id: UUID | None, metadata: Mapping[str, Any]) -> OpenRun | None:
        """The run around a new one. A call that was given callbacks of its own has no parent, but tells its task."""
        parent = self._runs.get(parent_run_id) if parent_run_id is not None else None
        return parent or self._nodes.get(str(metadata.get("langgraph_checkpoint_ns")))

    def _add_run(self, run_id: UUID, run: OpenRun) -> None:
        run.trace.runs[run_id] = run
        self._runs[run_id] = run

    def _close(self, run_id: UUID, error: BaseException | None) -> None:
        run = self._runs.get(run_id)
        if run is None:
            return
        if run_id == run.trace.root:
            self._close_trace(run, error)
            return
        self._runs.pop(run_id, None)
        run.trace.runs.pop(run_id, None)
        if self._nodes.get(run.checkpoint_ns) is run:
            del self._nodes[run.checkpoint_ns]
        if run.owns_span:
            if run.task is not None and run.task.span is run.span:
                self._processor.say(run.span, reads_to_attributes(run.task.sources, run.task.reads))
            _end_span(run.span, error)

    def _close_trace(self, root: OpenRun, error: BaseException | None) -> None:
        owner = root.trace
        unfinished = TimeoutError("not finished when the run ended")
        for run_id in [other for other in list(owner.runs) if other != owner.root]:
            self._close(run_id, unfinished)
        outcome, reason = end_to_outcome(owner.episode, error, owner.was_interrupted)
        if owner.was_interrupted and owner.thread_id is not None and owner.episode.episode_id is not None:
            self._interrupted[owner.thread_id] = owner.episode.episode_id
            while len(self._interrupted) > _REMEMBERED_INTERRUPTS:
                self._interrupted.pop(next(iter(self._interrupted)))
        told = {names.OUTCOME: outcome, names.OUTCOME_REASON: reason, names.SPAN_COUNT: owner.spans}
        told[names.LINEAGE] = to_json(lineage) if (lineage := owner.lineage) else None
        self._processor.say(root.span, told)
        self._runs.pop(owner.root, None)
        _end_span(root.span, error if outcome == "failed" else None)
        self.journal.sync_soon()  # not sync: this may be the thread of the app's event loop


def _end_span(span: Span, error: BaseException | None) -> None:
    if error is not None:
        span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
    span.end()
