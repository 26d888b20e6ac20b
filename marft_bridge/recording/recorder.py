"""LangChain callbacks of a LangGraph run -> spans: run, node, LLM call and tool call.

One root run is one trace and one episode; which run a callback belongs under is told by `open_runs`. Invariants: every
span ends, at the latest with its run; the root ends last and holds the number of spans, so a reader can tell a whole
episode from a torn one. A failure in here is counted, logged once, and never reaches the app.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from langgraph.errors import GraphBubbleUp, GraphInterrupt, ParentCommand
from langgraph.types import Command, PregelExecutableTask

from marft_bridge.common.error_handlers import failed_task
from marft_bridge.common.node_names import lacks_task_id, namespace_in_task
from marft_bridge.common.running_routers import own_namespace
from marft_bridge.config.record import RecordOptions
from marft_bridge.model_calls.token_capture import ExactTokens, announce_call
from marft_bridge.recording.dependency_evidence import reads_to_attributes, sources_to_attributes
from marft_bridge.recording.episode_context import (
    SUBJECT_METADATA,
    EpisodeContext,
    current_episode,
    end_to_outcome,
    episode_to_attributes,
)
from marft_bridge.recording.format_check import answer_fits, request_to_format
from marft_bridge.recording.given_tasks import GivenTask, OpenGivenTasks
from marft_bridge.recording.inner_calls import latest_call
from marft_bridge.recording.langgraph_hooks import NodeKind, loop_to_position
from marft_bridge.recording.open_runs import OpenRuns
from marft_bridge.recording.open_span import OpenSpan, open_span
from marft_bridge.recording.redaction import Redact
from marft_bridge.recording.run_facts import loop_to_run_config, run_to_attributes, value_to_text
from marft_bridge.recording.span_attributes import (
    answer_to_attributes,
    decision_to_attributes,
    provider_name,
    request_to_attributes,
    tokens_to_attributes,
)
from marft_bridge.recording.span_messages import find_messages, messages_to_text, text_to_message, to_json, to_shown
from marft_bridge.recording.span_processor import options_to_processor
from marft_bridge.recording.state_reads import Reads
from marft_bridge.recording.thread_position import CheckpointWriters
from marft_bridge.recording.tool_definitions import request_to_definitions
from marft_bridge.recording.tool_output import output_to_result, output_to_text
from marft_bridge.recording.trace_state import OpenRun, OpenTrace, task_to_own
from marft_bridge.recording.value_forms import value_to_forms
from marft_bridge.recording.write_ledger import ENTRY
from trace_store import conventions as names
from trace_store.errors import StoreError
from trace_store.journal import Journal

log = logging.getLogger("marft_bridge")
_DEFAULTS = RecordOptions()
LIVE = "live"  # the split of a run that no command started
_Method = TypeVar("_Method", bound=Callable[..., None])


@dataclass(frozen=True, slots=True)
class Losses:
    """What a recorder could not write, or was configured not to write."""

    callbacks: int  # callbacks of LangChain or LangGraph that could not be recorded; their episodes lack spans
    spans: int  # spans that the journal refused
    unredacted: int  # spans that lost their content because redacting it failed
    unreadable: Mapping[str, int]  # values of calls that no column holds and that were left out, by attribute
    redactions: Mapping[str, int]  # places where text was replaced, by pattern

    def __str__(self) -> str:
        parts = [
            (self.callbacks, "callbacks could not be recorded"),
            (self.spans, "spans could not be written"),
            (self.unredacted, "spans lost their content because redacting it failed"),
            *((count, f"values of {name} could not be read") for name, count in sorted(self.unreadable.items())),
            *((count, f"replacements of {pattern}") for pattern, count in sorted(self.redactions.items())),
        ]
        return ", ".join(f"{count} {description}" for count, description in parts if count)


def _never_raise(method: _Method) -> _Method:
    """Makes a callback that never raises: a failure is counted, and its episode marked as torn."""

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

    def __init__(
        self,
        journal: Journal,
        options: RecordOptions = _DEFAULTS,
        redact: Redact | None = None,
        *,
        on_episode: Callable[[], None] = lambda: None,
    ) -> None:
        """`redact` is the function that `options.redact_with` would name; `on_episode` is called for each run that is
        in the journal. Raises a BridgeError for unusable options."""
        self.journal = journal
        self._processor = options_to_processor(journal, options, redact)
        self._processor.on_episode = on_episode
        self._open_runs = OpenRuns()
        self._lock = threading.Lock()
        self._begin_session()
        self._checkpoint_writers = CheckpointWriters()
        self.failures = 0  # callbacks that could not be recorded
        self.hears_other_clients = options.other_clients

    @property
    def losses(self) -> Losses:
        """Counts of what is not in the record, so far."""
        processor, privacy = self._processor, self._processor.privacy
        return Losses(
            self.failures,
            processor.lost_spans,
            privacy.failures,
            unreadable=dict(processor.unreadable),
            redactions=dict(privacy.redactions),
        )

    @property
    def failure(self) -> StoreError | None:
        """The first write that the disk refused, or None."""
        return self._processor.failure or self.journal.failure

    def note_failure(self, callback_name: str, error: Exception) -> None:
        """Counts a callback that could not be recorded; the first one is logged."""
        with self._lock:
            self.failures += 1
            is_first = self.failures == 1
        if is_first:
            # Without the error's text, which may quote a prompt or a key.
            log.warning("recording failed in %s: %s; the app goes on", callback_name, type(error).__name__)
            log.debug("recording failed", exc_info=error)

    @_never_raise
    def end_episode(self, episode: EpisodeContext) -> None:
        """Ends the record of a run that does not end, as of one that was cancelled; nothing more of it is recorded."""
        for run_id, run in self._open_runs.snapshot().items():
            if run.is_root and run.trace.episode is episode:
                self._close(run_id, asyncio.CancelledError())

    def note_lost_call(self, parent_run_id: UUID | None, error: Exception) -> None:
        """Counts a call of another client that could not be recorded; its episode lacks a span."""
        self.note_failure("a call of another client", error)
        self._mark_torn([parent_run_id])

    def _mark_torn(self, arguments: Iterable[Any]) -> None:
        """Counts one span too many for the trace of a failed callback, so that it is never taken for whole."""
        for value in arguments:
            run_id: Any = value if isinstance(value, UUID) else getattr(getattr(value, "manager", None), "run_id", None)
            with suppress(Exception):  # what broke the callback may break this
                run = self._open_runs.get(run_id)
                if run is not None:
                    run.trace.span_count += 1
                    return
        node_run = self._open_runs.node_run()
        if node_run is not None:
            node_run.trace.span_count += 1

    # -- runs and nodes ---------------------------------------------------------------------------------------

    @_never_raise
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
        """A root run opens a trace, a node execution a span; any other chain run shares its parent's span."""
        metadata = metadata or {}
        parent = self._open_runs.find_parent(parent_run_id)
        if parent is None:
            self._open_trace(run_id, str(kwargs.get("name") or "graph"), tags, metadata=metadata, inputs=inputs)
            return
        if kwargs.get("run_type") == "llm":  # LangChain's decision models, which have no callback of their own
            prompt = to_json([text_to_message("user", value_to_text(inputs))])
            messages = list(find_messages(inputs))
            self._open_call(run_id, parent_run_id, metadata, kwargs={}, prompt=prompt, messages=messages)
            return
        checkpoint_ns = own_namespace(str(metadata.get("langgraph_checkpoint_ns") or ""))
        if lacks_task_id(checkpoint_ns) or "|0" in parent.checkpoint_ns:
            checkpoint_ns = namespace_in_task(checkpoint_ns, parent.checkpoint_ns)
        if checkpoint_ns and checkpoint_ns != parent.checkpoint_ns and kwargs.get("name") == metadata["langgraph_node"]:
            node_run = self._open_node(run_id, parent, checkpoint_ns, metadata=metadata)
            self._open_runs.note_node_run(parent_run_id, node_run)
        else:
            router = None if parent.owns_span else parent.router
            self._open_runs.add(run_id, replace(parent, owns_span=False, is_root=False, router=router))

    @_never_raise
    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Ends the node's span, or the whole trace."""
        run = self._open_runs.get(run_id)
        if run is not None and run.is_root:
            run.span.set({names.OUTPUT: value_to_text(outputs)})
        if run is not None and run.is_call:
            run.span.set(self._processor.check_call(decision_to_attributes(outputs)))
        self._close(run_id, None)

    @_never_raise
    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Ends it with an error; LangGraph's own control flow (interrupts, handoffs) is no error."""
        run = self._open_runs.get(run_id)
        if run is not None and isinstance(error, GraphInterrupt):
            run.trace.interrupted = True
        if run is not None and run.owns_span and run.checkpoint_ns and _hands_off(error):
            run.trace.ledger.note_handoff(run.checkpoint_ns)
        self._close(run_id, None if isinstance(error, GraphBubbleUp) else error)

    def _open_trace(
        self, run_id: UUID, name: str, tags: list[str] | None, metadata: Mapping[str, Any], inputs: Any
    ) -> None:
        subject_id = metadata.get(SUBJECT_METADATA)
        episode = current_episode.get()
        if episode is None or episode.recorder not in (None, self):
            episode = self._make_live_episode()
        if episode.subject_id is None and subject_id is not None:
            episode.subject_id = str(subject_id)
        open_trace = OpenTrace(episode)
        attributes = episode_to_attributes(episode, name) | run_to_attributes(tags, metadata, episode.tags)
        open_trace.conversation_id = attributes[names.THREAD_ID]
        input_text = value_to_text(inputs)
        if episode.split == LIVE or input_text != attributes[names.TASK]:  # most commands run the task as it is
            attributes[names.INPUT] = input_text
        attributes[names.INPUT_KIND] = "command" if isinstance(inputs, Command) else None
        forms = value_to_forms(inputs)
        attributes[names.INPUT_FORMS] = json.dumps(forms) if forms else None
        span = self._start_span(open_trace, f"{names.INVOKE_WORKFLOW} {name}", None, attributes=attributes)
        episode.episode_id = span.trace_id
        if episode.spans is not None:
            self._processor.copy_rows_to(span, episode.spans)
        self._open_runs.add(run_id, OpenRun(open_trace, span, True, checkpoint_ns="", is_root=True))

    def _make_live_episode(self) -> EpisodeContext:
        """The episode of a run that no command started. A forked child has a session and a count of its own."""
        with self._lock:
            if self._pid != os.getpid():
                self._begin_session()
            self._live_count += 1
            return EpisodeContext(self._session, f"{self._session}/{self._live_count}", split=LIVE)

    def _begin_session(self) -> None:
        self._pid, self._session, self._live_count = os.getpid(), f"session-{uuid.uuid4().hex[:12]}", 0

    def _open_node(self, run_id: UUID, parent: OpenRun, checkpoint_ns: str, metadata: dict[str, Any]) -> OpenRun:
        task = parent.trace.tasks.get(checkpoint_ns)
        attributes = sources_to_attributes(task.sources if task else None)  # its reads are added when it ends
        if task is not None and task.kind is NodeKind.TOOLS:
            attributes[names.SIDE_BY_SIDE] = True
        attributes[names.HANDLES] = failed_task(checkpoint_ns)
        step = int(metadata["langgraph_step"])
        parent.trace.episode.actors.note(checkpoint_ns, metadata)
        outer_span = self._span_around(parent)
        span = self._start_node_span(parent.trace, outer_span, checkpoint_ns, step=step, attributes=attributes)
        if task is not None:
            task.span = span
        node_run = OpenRun(parent.trace, span, True, checkpoint_ns=checkpoint_ns, task=task)
        self._open_runs.add(run_id, node_run)
        return node_run

    def _start_node_span(
        self, open_trace: OpenTrace, parent: OpenSpan, checkpoint_ns: str, step: int, attributes: dict[str, Any]
    ) -> OpenSpan:
        node = open_trace.episode.actors.agent_at(checkpoint_ns)
        node_attributes: dict[str, Any] = {
            names.OPERATION: names.INVOKE_AGENT,
            names.AGENT_NAME: node,
            names.NODE: node,
            names.STEP: step,
            names.CHECKPOINT_NS: checkpoint_ns,
        }
        return self._start_span(
            open_trace, f"{names.INVOKE_AGENT} {node}", parent, attributes=node_attributes | attributes
        )

    # -- tasks, from `task_hooks` -----------------------------------------------------------------------------

    def own_namespace(self, graph_run: UUID, checkpoint_ns: str) -> str:
        """Our namespace of a task of this graph; LangGraph's where the graph is not recorded."""
        try:
            run = self._open_runs.get(graph_run)
            return checkpoint_ns if run is None else task_to_own(checkpoint_ns, run.checkpoint_ns)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not the app's
            self.note_failure("own_namespace", error)
            return checkpoint_ns

    @_never_raise
    def note_task_start(self, graph_run: UUID, task: PregelExecutableTask, reads: Reads | None) -> None:
        """Notes the sources of a task that is about to run, before its node span opens."""
        run = self._open_runs.get(graph_run)
        if run is not None:
            run.trace.start_task(task, reads, run.checkpoint_ns)

    @_never_raise
    def note_given_task(
        self, graph_run: UUID, task: PregelExecutableTask, given_task: GivenTask, open_tasks: OpenGivenTasks
    ) -> None:
        """Notes a task that does not run, with copies of the spans of the recorded one."""
        run = self._open_runs.get(graph_run)
        if run is None:
            return
        start = run.trace.start_task(task, None, run.checkpoint_ns).start
        run.trace.episode.actors.note(start.ns, task.config.get("metadata"))
        copies: dict[str, OpenSpan] = {}
        for row in given_task.spans:
            parent, attributes = copies.get(row.parent_span_id or "", run.span), open_tasks.to_attributes(row)
            if row.operation == names.INVOKE_AGENT:
                span = self._start_node_span(run.trace, parent, start.ns, step=start.step, attributes=attributes)
            else:
                span = self._start_span(run.trace, row.name, parent, attributes=attributes)
            span.start_ns = open_tasks.to_time(row.start_ns)
            copies[row.span_id] = span
            open_tasks.span_ids[row.span_id] = span.span_id
        for row in sorted(given_task.spans, key=lambda row: row.end_ns):
            span = copies[row.span_id]
            span.set(open_tasks.to_seen(row))
            span.error = row.status_message
            if (answer := open_tasks.answers.get(row.span_id)) is not None:
                run.trace.answers.add(LLMResult(generations=[[ChatGeneration(message=answer)]]), span.span_id)
            node = str(row.attributes.get(names.NODE))
            if row.operation == names.CHAT and node in open_tasks.offered_tools:
                run.trace.offered_tools.setdefault(node, set()).update(open_tasks.offered_tools[node])
            self._processor.end_span(span, open_tasks.to_time(row.end_ns))

    @_never_raise
    def note_router_start(
        self, graph_run: UUID, task: PregelExecutableTask, ns: str, keys: Sequence[str] | None
    ) -> None:
        """Notes the sources of a router that is about to run, inside its node's span."""
        run, node_run = self._open_runs.get(graph_run), self._open_runs.node_run()
        if run is not None and node_run is not None:
            run.trace.start_router(task, ns, keys, outer_ns=run.checkpoint_ns, node_span=node_run.span)

    @_never_raise
    def note_router_end(
        self, graph_run: UUID, task: PregelExecutableTask, ns: str, error: BaseException | None
    ) -> None:
        """Ends the router's span, if it asked a model, and notes which writes were its own."""
        run = self._open_runs.get(graph_run)
        router = run.trace.routers.get(ns) if run is not None else None
        if router is not None:
            router.end_write = len(task.writes)
            if router.run_id is not None:
                self._close(router.run_id, None if isinstance(error, GraphBubbleUp) else error)

    def _span_around(self, run: OpenRun) -> OpenSpan:
        """The span of a run, for one inside it: a router gets its own when something inside it has one."""
        router = run.router
        if router is None:
            return run.span
        if router.run_id is None:
            router.run_id = uuid.uuid4()
            start, sources = router.task.start, router.task.sources
            node_ns = start.ns.rpartition(":")[0]
            attributes = sources_to_attributes(sources) | {names.ROUTES_AFTER: node_ns}
            router.task.span = self._start_node_span(
                run.trace, router.node_span, start.ns, step=start.step, attributes=attributes
            )
            router_run = OpenRun(run.trace, router.task.span, True, checkpoint_ns=start.ns, task=router.task)
            self._open_runs.add(router.run_id, router_run)
        assert router.task.span is not None
        return router.task.span

    @_never_raise
    def note_task_writes(self, loop: Any, task: PregelExecutableTask, writes: Any, cached: bool) -> None:
        """Notes what a task wrote, before the next superstep starts. A cached task, which did not run, gets a span."""
        graph_run = self._open_runs.get(loop.manager.run_id)
        if graph_run is None:
            return
        open_trace = graph_run.trace
        if graph_run.is_root:
            open_trace.loop = loop
        if cached:
            open_task = open_trace.start_task(task, None, graph_run.checkpoint_ns)
            if task.name != ENTRY:
                attributes = sources_to_attributes(open_task.sources) | reads_to_attributes(open_task.sources, None)
                attributes |= {names.CACHED: True}
                start = open_task.start
                open_trace.episode.actors.note(start.ns, task.config.get("metadata"))
                span = self._start_node_span(
                    open_trace, graph_run.span, start.ns, step=start.step, attributes=attributes
                )
                self._end_span(span, None)
        open_trace.note_writes(loop, task, writes, outer_ns=graph_run.checkpoint_ns)

    @_never_raise
    def note_run_config(self, loop: Any) -> None:
        """Notes how the run was started, so that it can be started again."""
        run = self._open_runs.get(loop.manager.run_id)
        if run is None:
            return
        if run.is_root:
            run.span.set({names.RUN_CONFIG: value_to_text(loop_to_run_config(loop))})
        elif run.checkpoint_ns and not run.owns_span and not loop.is_nested:
            run.checkpoint_ns = run.trace.start_graph_apart(run.checkpoint_ns, loop)

    # -- checkpoints, from `task_hooks` -----------------------------------------------------------------------

    @_never_raise
    def note_loop_start(self, loop: Any) -> None:
        """Notes where the run begins on its thread, and the episode that it goes on with."""
        run = self._open_runs.get(loop.manager.run_id)
        if run is None or not run.is_root:
            return
        run.trace.position = position = loop_to_position(loop)
        if position is not None and position.from_checkpoint is not None:
            recorded_ids = run.trace.episode.recorded_checkpoints
            position.from_checkpoint = recorded_ids.get(position.from_checkpoint, position.from_checkpoint)
        if position is not None and run.trace.episode.parent_episode is None:
            with self._lock:
                parent = self._checkpoint_writers.parent_of(position)
            run.trace.episode.parent_episode = parent
            run.span.set({names.PARENT_EPISODE: parent})

    @_never_raise
    def note_checkpoint(self, loop: Any) -> None:
        """Notes a checkpoint that the run has made, so that later runs find who made it."""
        run = self._open_runs.get(loop.manager.run_id)
        if run is None or not run.is_root or run.trace.position is None:
            return
        checkpoints, checkpoint_id = run.trace.position.checkpoints, loop.checkpoint["id"]
        if run.trace.episode.episode_id is not None and checkpoint_id not in checkpoints[-1:]:
            checkpoints.append(checkpoint_id)
            with self._lock:
                self._checkpoint_writers.add(checkpoint_id, run.trace.episode.episode_id)

    # -- LLM calls --------------------------------------------------------------------------------------------

    @_never_raise
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
        prompt = messages_to_text(messages[0])
        self._open_call(run_id, parent_run_id, metadata or {}, kwargs=kwargs, prompt=prompt, messages=messages[0])

    @_never_raise
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
        prompt = to_json([text_to_message("user", text) for text in prompts])
        self._open_call(run_id, parent_run_id, metadata or {}, kwargs=kwargs, prompt=prompt, messages=[])

    def _open_call(
        self,
        run_id: UUID,
        parent_run_id: UUID | None,
        metadata: dict[str, Any],
        kwargs: dict[str, Any],
        prompt: str,
        messages: list[BaseMessage],
    ) -> None:
        parent = self._open_runs.find_parent(parent_run_id)
        if parent is None:  # called outside any recorded graph, it is no action of a game
            self._count_if_lost("a call")
            return
        outer_call = self._open_runs.find_outer_call(parent)
        if outer_call is not None:
            self._open_runs.add(run_id, replace(outer_call, owns_span=False, is_call=False, part_of=outer_call))
            return
        latest_call.set(run_id)
        parameters = kwargs.get("invocation_params") or {}
        declared_format = request_to_format(parameters)
        in_node = bool(parent.checkpoint_ns)
        agent = _agent_of(parent) if in_node else None
        if agent is not None:
            parent.trace.note_tools(agent, parameters)
        attributes = {
            names.OPERATION: names.CHAT,
            names.PROVIDER: provider_name(metadata.get("ls_provider")),
            names.REQUEST_MODEL: (
                parameters.get("model") or parameters.get("model_name") or metadata.get("ls_model_name")
            ),
            **request_to_attributes(parameters),
            names.OUTPUT_TYPE: None if declared_format is None else "json",
            names.INPUT_MESSAGES: prompt,
            names.TOOL_DEFINITIONS: request_to_definitions(parameters),
            names.NODE: agent,
            names.STEP: _step_of(parent, metadata) if in_node else None,
            names.CHECKPOINT_NS: parent.checkpoint_ns or None,
        }
        attributes = self._processor.check_call(attributes)
        model = attributes.get(names.REQUEST_MODEL)
        attributes |= parent.trace.answers.prompt_to_attributes(messages)
        if parent.task is not None:
            attributes |= reads_to_attributes(parent.task.sources, parent.task.reads)
        span = self._start_span(
            parent.trace,
            f"{names.CHAT} {model}" if model else names.CHAT,
            self._span_around(parent),
            attributes=attributes,
        )
        self._open_runs.add(
            run_id,
            OpenRun(
                parent.trace,
                span,
                True,
                checkpoint_ns=parent.checkpoint_ns,
                task=parent.task,
                declared_format=declared_format,
                is_call=True,
            ),
        )

    def open_span_of(self, run_id: UUID | None) -> OpenSpan | None:
        """The span of a call or tool that is under way; None where it is none of a recorded graph's."""
        run = self._open_runs.get(run_id)
        return None if run is None else run.span

    def tools_of_call(self, run_id: UUID) -> frozenset[str]:
        """The tools that the node of a call under way has offered in its run so far, each as canonical JSON."""
        run = self._open_runs.get(run_id)
        node = None if run is None else run.span.attributes.get(names.NODE)
        return frozenset() if run is None or node is None else frozenset(run.trace.offered_tools.get(node, ()))

    @_never_raise
    def note_exact_tokens(self, run_id: UUID, tokens: ExactTokens) -> None:
        """Keeps the engine's token ids and log-probs of a call until the call ends; see `token_capture`."""
        run = self._open_runs.get(run_id)
        if run is None:
            return
        call = run.part_of or run
        # Several answers, from which the wrapping model makes one, are not its tokens.
        call.tokens = tokens if call.tokens is None else replace(tokens, sampled_ids=None, logprobs=None)

    @_never_raise
    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Writes the answer and the exact tokens, and ends the chat span."""
        run = self._open_runs.get(run_id)
        if run is None or run.part_of is not None:
            self._close(run_id, None)
            return
        check = self._processor.check_call
        token_attributes = {} if run.tokens is None else check(tokens_to_attributes(run.tokens))
        run.span.set(check(answer_to_attributes(response)))
        run.span.set(token_attributes)  # the engine's own go before LangChain's report of the same answer
        if run.declared_format is not None:
            run.span.set({names.FORMAT_VALID: answer_fits(run.declared_format, response)})
        run.trace.answers.add(response, run.span.span_id)
        self._close(run_id, None)

    @_never_raise
    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """A call that failed is a span with an error, and no action to train on."""
        self._close(run_id, error)

    # -- tools ------------------------------------------------------------------------------------------------

    @_never_raise
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
        parent = self._open_runs.find_parent(parent_run_id)
        if parent is None:
            self._count_if_lost("a tool")
            return
        name = to_shown((serialized or {}).get("name") or kwargs.get("name") or "tool")
        attributes = {
            names.OPERATION: names.EXECUTE_TOOL,
            **self._processor.check_call({names.TOOL_NAME: name, names.TOOL_CALL_ID: kwargs.get("tool_call_id")}),
            names.TOOL_TYPE: "function",
            names.TOOL_ARGUMENTS: to_json(inputs) if isinstance(inputs := kwargs.get("inputs"), dict) else input_str,
            names.NODE: _agent_of(parent) or None,
            names.CHECKPOINT_NS: parent.checkpoint_ns or None,
        }
        span = self._start_span(
            parent.trace, f"{names.EXECUTE_TOOL} {name}", self._span_around(parent), attributes=attributes
        )
        self._open_runs.add(
            run_id, OpenRun(parent.trace, span, True, checkpoint_ns=parent.checkpoint_ns, task=parent.task)
        )

    @_never_raise
    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Ends the tool span with its result as text."""
        run = self._open_runs.get(run_id)
        if run is not None:
            run.span.set({names.TOOL_RESULT: output_to_result(output)})
            run.span.set({names.TOOL_OUTPUT: output_to_text(output)})
            self._close(run_id, None)

    @_never_raise
    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Ends the tool span with its error."""
        self._close(run_id, error)

    # -- spans ------------------------------------------------------------------------------------------------

    def _start_span(
        self,
        open_trace: OpenTrace,
        name: str,
        parent: OpenSpan | None,
        attributes: dict[str, Any],
    ) -> OpenSpan:
        open_trace.span_count += 1
        if open_trace.conversation_id is not None:
            attributes = attributes | {names.CONVERSATION_ID: open_trace.conversation_id}
        if open_trace.episode.subject_id is not None:  # on every span: a trace whose root never came can be erased too
            attributes = attributes | {names.SUBJECT_ID: open_trace.episode.subject_id}
        return open_span(name, parent, attributes)

    def _count_if_lost(self, name: str) -> None:
        """Counts a start without a parent where a node of a run that we recorded has made it, after that run's end."""
        if self._open_runs.node_run() is not None:
            self.note_failure(name, LookupError("the run that started it has ended"))

    def _close(self, run_id: UUID, error: BaseException | None) -> None:
        run = self._open_runs.remove(run_id)
        if run is None:
            return
        if run.is_root:
            self._close_trace(run, error)
            return
        if run.owns_span:
            if run.task is not None and run.task.span is run.span:
                run.span.set(reads_to_attributes(run.task.sources, run.task.reads))
            self._end_span(run.span, error)

    def _close_trace(self, root: OpenRun, error: BaseException | None) -> None:
        open_trace = root.trace
        with open_trace.lock:
            open_trace.has_ended = True
        unfinished_error = TimeoutError("not finished when the run ended")
        for run_id in list(open_trace.runs.values()):
            self._close(run_id, unfinished_error)
        error = open_trace.episode.judge_end(error) or error
        outcome, reason = end_to_outcome(open_trace.episode, error, open_trace.was_interrupted)
        if outcome == "truncated" and reason is not None:
            open_trace.episode.before_cut(reason)
        outcome_attributes: dict[str, Any] = {
            names.OUTCOME: outcome,
            names.OUTCOME_REASON: reason,
            names.SPAN_COUNT: open_trace.span_count,
        }
        outcome_attributes[names.LINEAGE] = to_json(lineage) if (lineage := open_trace.lineage) else None
        if open_trace.position is not None:
            outcome_attributes |= open_trace.position.to_attributes()
        root.span.set(outcome_attributes)
        self._end_span(root.span, error if outcome == "failed" else None)
        open_trace.forget_all()

    def _end_span(self, span: OpenSpan, error: BaseException | None) -> None:
        if error is not None:
            span.attributes[names.ERROR_TYPE] = type(error).__qualname__
            span.set({names.ERROR_CLASSES: _error_to_classes(error), names.HTTP_STATUS: _error_to_status(error)})
            span.error = f"{type(error).__name__}: {error}"
        self._processor.end_span(span)


def _hands_off(error: BaseException) -> bool:
    """Whether a node ended with a command for the graph around its own.

    LangGraph lets the command bubble up to the task which runs the node's graph, with that task's name in the place of
    PARENT: that one has it, and hands nothing off.
    """
    return isinstance(error, ParentCommand) and bool(error.args) and error.args[0].graph == Command.PARENT


def _error_to_classes(error: BaseException) -> str | None:
    """The class of an error and those above it, as JSON; None where it is one of Python's own, whose name says all."""
    if type(error).__module__ == "builtins":
        return None
    return to_json([f"{above.__module__}:{above.__qualname__}" for above in type(error).__mro__])


def _error_to_status(error: BaseException) -> int | None:
    """The status of the HTTP answer that an error carries, by which retry policies decide."""
    with suppress(Exception):  # properties of an app's own class may raise anything
        status = getattr(getattr(error, "response", None), "status_code", None)
        return status if isinstance(status, int) and 100 <= status < 1000 else None
    return None


def _step_of(run: OpenRun, metadata: Mapping[str, Any]) -> int | None:
    """The superstep of a call inside a task; LangChain's metadata does not always say it."""
    step: int | None = metadata.get("langgraph_step", None if run.task is None else run.task.start.step)
    return step


def _agent_of(run: OpenRun) -> str:
    return run.trace.episode.actors.agent_at(run.checkpoint_ns)
