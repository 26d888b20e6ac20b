"""LangChain callbacks of a LangGraph run -> spans: run, node, LLM call and tool call.

One root run is one trace and one episode. Invariants: parents are found by run id, never by ambient context, so
threads and asyncio cannot mix episodes; every span ends, at the latest with its run; the root ends last and says
how many spans there are, so a reader can tell a whole episode from a torn one. A failure in here is counted,
logged once, and never reaches the app. It knows nothing of DuckDB, adapters' files or training.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage, message_to_dict
from langchain_core.outputs import LLMResult
from langgraph.errors import GraphBubbleUp, GraphInterrupt, ParentCommand
from langgraph.types import PregelExecutableTask
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import Span
from opentelemetry.trace import Status, StatusCode

from marft_bridge.action_links import (
    AnswerIndex,
    around_to_input_writers,
    reads_to_attributes,
    sources_to_attributes,
)
from marft_bridge.call_attributes import answer_to_attributes, tokens_to_attributes
from marft_bridge.episode import EpisodeContext, current_episode, end_to_outcome, episode_to_attributes
from marft_bridge.exporter import private_provider
from marft_bridge.policy import ExactTokens, announce_call, namespace_to_node
from marft_bridge.record_options import RecordOptions
from marft_bridge.recording import options_to_processor
from marft_bridge.redaction import Redact
from marft_bridge.state_reads import Reads, state_keys
from marft_bridge.task_hooks import is_subgraph
from marft_bridge.task_writes import ENTRY, Sources, TaskStart, WriteLedger, Writers, graph_of
from trace_store import conventions as names
from trace_store.errors import StoreError
from trace_store.journal import Journal

log = logging.getLogger("marft_bridge")
_DEFAULTS = RecordOptions()
_Method = TypeVar("_Method", bound=Callable[..., None])
_BREAKPOINTS = ("interrupt_before", "interrupt_after")
_REMEMBERED_INTERRUPTS = 10_000


@dataclass(slots=True)
class _Trace:
    """One graph run while it is being recorded."""

    root: UUID
    episode: EpisodeContext
    thread_id: str | None = None
    ledger: WriteLedger = field(default_factory=WriteLedger)
    answers: AnswerIndex = field(default_factory=AnswerIndex)
    tasks: dict[str, _Task] = field(default_factory=dict)  # checkpoint_ns -> the task, from its start on
    runs: dict[UUID, _Run] = field(default_factory=dict)
    spans: int = 0
    interrupted: bool = False
    loop: Any = None  # LangGraph's, of the outermost graph


@dataclass(slots=True)
class _Task:
    """A task that LangGraph runs: where it comes from, and what its node reads."""

    sources: Sources
    reads: Reads | None
    inherits: bool
    span: Span | None = None  # of its latest attempt


@dataclass(slots=True)
class _Run:
    """One callback run: with a span of its own, or passing its parent's on."""

    trace: _Trace
    span: Span  # its own, or the nearest ancestor's
    owns_span: bool
    checkpoint_ns: str
    task: _Task | None = None  # the task around it, where LangGraph told us of it
    tokens: ExactTokens | None = None


def _never_harm(method: _Method) -> _Method:
    """The app must not notice that recording failed; the loss is counted and its episode marked."""

    @functools.wraps(method)
    def guarded(self: Recorder, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not the app's
            self.note_failure(method.__name__, error)

    return cast(_Method, guarded)


class Recorder(BaseCallbackHandler):
    """Records every graph run that it is attached to into one journal. Use one for many concurrent runs."""

    run_inline = True  # in the caller's context, before the call goes on
    raise_error = False

    def __init__(self, journal: Journal, options: RecordOptions = _DEFAULTS, redact: Redact | None = None) -> None:
        """`redact` is the function that `options.redact_with` would name. Raises a BridgeError for unusable options."""
        self.journal = journal
        self._processor = options_to_processor(journal, options, redact)
        self._tracer = private_provider(self._processor).get_tracer("marft_bridge")
        self._runs: dict[UUID, _Run] = {}
        self._lock = threading.Lock()
        self._session = f"session-{uuid.uuid4().hex[:12]}"
        self._recorded = 0
        self._interrupted: dict[str, str] = {}  # thread -> the episode that its next run goes on with
        self.failures = 0  # callbacks that could not be recorded

    @property
    def failure(self) -> StoreError | None:
        """The first write that the disk refused, or None."""
        return self._processor.failure

    def note_failure(self, where: str, error: Exception) -> None:
        """Counts a callback that could not be recorded; the first one is logged."""
        with self._lock:
            self.failures += 1
            first = self.failures == 1
        if first:
            log.warning("recording failed in %s: %s: %s; the app goes on", where, type(error).__name__, error)

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
        parent = self._runs.get(parent_run_id) if parent_run_id is not None else None
        metadata = metadata or {}
        if parent is None:
            self._open_trace(run_id, str(kwargs.get("name") or "graph"), metadata.get("thread_id"))
            return
        checkpoint_ns = str(metadata.get("langgraph_checkpoint_ns") or "")
        if checkpoint_ns and checkpoint_ns != parent.checkpoint_ns and kwargs.get("name") == metadata["langgraph_node"]:
            self._open_node(run_id, parent, checkpoint_ns, metadata)
        else:
            self._add_run(run_id, _Run(parent.trace, parent.span, False, parent.checkpoint_ns, parent.task))

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

    def _open_trace(self, run_id: UUID, name: str, thread_id: Any) -> None:
        episode = current_episode.get()
        if episode is None:
            self._recorded += 1
            episode = EpisodeContext(self._session, f"{self._session}/{self._recorded}", split="live")
        opened = _Trace(run_id, episode, thread_id=str(thread_id) if thread_id is not None else None)
        if episode.parent_episode is None and opened.thread_id is not None:
            episode.parent_episode = self._interrupted.pop(opened.thread_id, None)
        span = self._start_span(opened, f"{names.INVOKE_WORKFLOW} {name}", None, episode_to_attributes(episode, name))
        episode.episode_id = trace.format_trace_id(span.get_span_context().trace_id)
        self._add_run(run_id, _Run(opened, span, True, ""))

    def _open_node(self, run_id: UUID, parent: _Run, checkpoint_ns: str, metadata: dict[str, Any]) -> None:
        task = parent.trace.tasks.get(checkpoint_ns)
        attributes = sources_to_attributes(task.sources if task else None, None)
        attributes |= {names.READS_FROM: None, names.MAY_READ_FROM: None}  # known when it ends
        step = int(metadata["langgraph_step"])
        span = self._start_node_span(parent.trace, parent.span, checkpoint_ns, step, attributes)
        if task is not None:
            task.span = span
        self._add_run(run_id, _Run(parent.trace, span, True, checkpoint_ns, task))

    def _start_node_span(
        self, owner: _Trace, around: Span, checkpoint_ns: str, step: int, attributes: dict[str, Any]
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
            self._start_task(run.trace, task, reads, inherits)

    def _start_task(self, owner: _Trace, task: PregelExecutableTask, reads: Reads | None, inherits: bool) -> _Task:
        start = _task_to_start(task)
        keys = state_keys(task.input) if reads is not None else None
        started = _Task(owner.ledger.task_started(start, keys), reads, inherits)
        owner.tasks[start.ns] = started
        return started

    @_never_harm
    def note_task_writes(self, loop: Any, task: PregelExecutableTask, writes: Any, cached: bool) -> None:
        """What a task wrote, before the next superstep starts; a task that was not run gets its span here."""
        graph_run = self._runs.get(loop.manager.run_id)
        if graph_run is None:
            return
        owner, start = graph_run.trace, _task_to_start(task)
        if owner.root == loop.manager.run_id:
            owner.loop = loop
        if cached:
            sources = self._start_task(owner, task, None, False).sources
            if task.name != ENTRY:
                attributes = sources_to_attributes(sources, None) | {names.CACHED: True}
                self._start_node_span(owner, graph_run.span, start.ns, start.step, attributes).end()
        owner.ledger.note_writes(
            start.ns,
            start.path,
            start.step,
            writes,
            loop.channels,
            loop.trigger_to_nodes.__contains__,
            is_subgraph=is_subgraph(task),
            input_writers=functools.partial(_input_writers, owner, start.ns),
        )

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
        parent = self._runs.get(parent_run_id) if parent_run_id is not None else None
        if parent is None:
            return  # called outside any recorded graph: not an action of a game
        asked = kwargs.get("invocation_params") or {}
        model = asked.get("model") or asked.get("model_name") or metadata.get("ls_model_name")
        in_node = bool(parent.checkpoint_ns)
        attributes = {
            names.OPERATION: names.CHAT,
            names.PROVIDER: metadata.get("ls_provider"),
            names.REQUEST_MODEL: model,
            names.REQUEST_TEMPERATURE: asked.get("temperature"),
            names.REQUEST_TOP_P: asked.get("top_p"),
            names.REQUEST_MAX_TOKENS: asked.get("max_tokens") or asked.get("max_completion_tokens"),
            names.REQUEST_SEED: asked.get("seed"),
            names.INPUT_MESSAGES: json.dumps(prompt, default=str),
            names.NODE: namespace_to_node(parent.checkpoint_ns) if in_node else None,
            names.STEP: metadata.get("langgraph_step") if in_node else None,
            names.CHECKPOINT_NS: parent.checkpoint_ns or None,
        }
        attributes |= parent.trace.answers.prompt_to_attributes(messages)
        if parent.task is not None:
            attributes |= reads_to_attributes(parent.task.sources, parent.task.reads)
        span = self._start_span(parent.trace, f"{names.CHAT} {model}", parent.span, attributes)
        self._add_run(run_id, _Run(parent.trace, span, True, parent.checkpoint_ns, parent.task))

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
        run.span.set_attributes(_present(answer_to_attributes(response) | tokens_to_attributes(run.tokens)))
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
        **kwargs: Any,
    ) -> None:
        """Opens a tool span: an environment transition, never an action."""
        parent = self._runs.get(parent_run_id) if parent_run_id is not None else None
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
        self._add_run(run_id, _Run(parent.trace, span, True, parent.checkpoint_ns, parent.task))

    @_never_harm
    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Ends the tool span with its result as text."""
        run = self._runs.get(run_id)
        if run is not None:
            run.span.set_attribute(names.TOOL_RESULT, str(getattr(output, "content", output)))
            self._close(run_id, None)

    @_never_harm
    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Ends the tool span with its error."""
        self._close(run_id, error)

    # -- spans ------------------------------------------------------------------------------------------------

    def _start_span(self, owner: _Trace, name: str, parent: Span | None, attributes: dict[str, Any]) -> Span:
        context = trace.set_span_in_context(parent, Context()) if parent is not None else Context()
        owner.spans += 1
        return cast(Span, self._tracer.start_span(name, context=context, attributes=_present(attributes)))

    def _add_run(self, run_id: UUID, run: _Run) -> None:
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
        if run.owns_span:
            if run.task is not None and run.task.span is run.span:
                run.span.set_attributes(_present(reads_to_attributes(run.task.sources, run.task.reads)))
            _end_span(run.span, error)

    def _close_trace(self, root: _Run, error: BaseException | None) -> None:
        owner = root.trace
        unfinished = TimeoutError("not finished when the run ended")
        for run_id in [other for other in owner.runs if other != owner.root]:
            self._close(run_id, unfinished)
        interrupted = owner.interrupted or getattr(owner.loop, "status", None) in _BREAKPOINTS
        outcome, reason = end_to_outcome(owner.episode, error, interrupted)
        if interrupted and owner.thread_id is not None and owner.episode.episode_id is not None:
            self._interrupted[owner.thread_id] = owner.episode.episode_id
            while len(self._interrupted) > _REMEMBERED_INTERRUPTS:
                self._interrupted.pop(next(iter(self._interrupted)))
        root.span.set_attributes(
            _present({names.OUTCOME: outcome, names.OUTCOME_REASON: reason, names.SPAN_COUNT: owner.spans})
        )
        self._runs.pop(owner.root, None)
        _end_span(root.span, error if outcome == "failed" else None)
        self.journal.sync()


def _input_writers(owner: _Trace, entry: str, key: str) -> Writers:
    around, task = owner.tasks.get(graph_of(entry)), owner.tasks.get(entry)
    if around is None or task is None:
        return {}  # the outermost graph: its input comes from outside the episode
    return around_to_input_writers(around.sources, around.reads, task.inherits, key)


def _task_to_start(task: PregelExecutableTask) -> TaskStart:
    return TaskStart(
        ns=task.config["configurable"]["checkpoint_ns"],
        node=task.name,
        step=int(task.config["metadata"]["langgraph_step"]),
        path=task.path,
        subscribed=task.triggers,
        input=task.input,
    )


def _end_span(span: Span, error: BaseException | None) -> None:
    if error is not None:
        span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
    span.end()


def _present(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Absent stays absent: an attribute of None is not written."""
    return {key: value for key, value in attributes.items() if value is not None}
