"""A recorded run and the app's graph -> the same run once more, without a model, and the first difference.

The graph is the app's own; its models, and the tools whose results are recorded, answer from the record, and it runs
under a recorder of its own, so that both runs are compared as records: calls, prompts (to the token where their
tokenizer is at hand), D and the final state. Invariants: no model is asked, whatever client the app uses; no
checkpointer, store or cache of the app's is touched, an empty one stands in for each; one replay runs at a time in a
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple
from uuid import UUID

from langchain_core.messages import AIMessage
from langgraph.pregel import Pregel
from langgraph.types import Interrupt

from marft_bridge.common.errors import GraphError
from marft_bridge.config.record import RecordOptions
from marft_bridge.model_calls.clients.hooks import clients_answered_by
from marft_bridge.model_calls.model_entries import stand_in_for_models
from marft_bridge.model_calls.routing import Routing, calling_node, current_routing
from marft_bridge.recording.episode_context import EpisodeContext, current_episode
from marft_bridge.recording.given_tasks import GivenTasks, OpenGivenTasks, giving_tasks
from marft_bridge.recording.instrument import instrument_paused
from marft_bridge.recording.open_span import OpenSpan
from marft_bridge.recording.recorder import Recorder
from marft_bridge.recording.redaction import REDACTED, Redactor
from marft_bridge.recording.value_forms import is_message_form
from marft_bridge.recording.wrap import graph_to_original, wrap
from marft_bridge.replay.call_options import OPTION_KEYS, attributes_to_options
from marft_bridge.replay.connections import allowed_connections, refused_connections
from marft_bridge.replay.declared_classes import graph_to_classes
from marft_bridge.replay.divergence import (
    DivergedError,
    Divergence,
    RefusedConnectionError,
    value_difference,
)
from marft_bridge.replay.drawn_ids import DrawnIds, number_ids
from marft_bridge.replay.equal_calls import EqualCalls
from marft_bridge.replay.moments import RunMoments
from marft_bridge.replay.pins import NO_CLOCK, pinned
from marft_bridge.replay.private_memory import PrivateMemory, memory_of_run, private_memory
from marft_bridge.replay.prompt_ids import PromptModels
from marft_bridge.replay.quoted_messages import without_reports
from marft_bridge.replay.recorded_answers import NOT_MADE, PATIENCE_S, RecordedAnswers
from marft_bridge.replay.recorded_models import chat_stand_in, llm_stand_in
from marft_bridge.replay.recorded_run import (
    GIVEN_INPUTS,
    RecordedCall,
    RecordedRun,
    RecordedTool,
    arguments_to_json,
    load_recorded,
    spans_to_ranks,
    to_comparable_prompt,
    tool_to_key,
    tools_around,
)
from marft_bridge.replay.recorded_tools import RunIt, recorded_tools, tool_divergence, tool_to_now, tools_like
from marft_bridge.replay.replayed_thread import (
    INTERRUPTS,
    ReplayedThread,
    add_memory,
    run_to_arguments,
    streamed_keys,
    translate_interrupts,
)
from trace_store import conventions as c
from trace_store.assemble import Incomplete, Malformed, spans_to_trajectory
from trace_store.journal import Journal
from trace_store.records import ONE_TOOL_OF, Edge, SpanRow, Trajectory

SPLIT = "replay"
_MAX_INTERRUPTS = 16  # of one execution, that a later run may answer by their ids
_MAX_REFUSED = 16  # connections, which libraries try several times and at several addresses
DATED = "recorded before the record said how a run was started: it was run asynchronously"
GIVEN_UP = "the app did not wait for its answer, which the record does not have, and now it waits"
LOST = "its input was given as JSON, where it had"
_one_at_a_time = threading.Lock()
_MESSAGE_FIELDS = ("type", "content", "name", "tool_calls", "tool_call_id", "role", "artifact", "status")


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What is given back, and what is pinned."""

    tools: Literal["recorded", "run"] = "recorded"  # run: every tool runs itself, and may connect
    freeze_time: bool = False  # the app's clock stands at the start of the recorded run
    seed: int | None = None  # what `random` and numpy begin with
    allow_connections: bool = False  # nodes may connect, to a database of theirs


@dataclass(frozen=True, slots=True)
class Replayed:
    """How a replay went."""

    episode_id: str
    divergence: Divergence | None  # None: it came out the same
    call_count: int  # that were given their recorded answers
    seconds: float  # that the graph ran, without what loading the record and comparing take
    recorded_seconds: float
    note: str | None = None  # what could not be compared, and why
    prompts_compared: int = 0  # that were compared by their token ids, too


class _Attempt(NamedTuple):
    """One attempt at a replay, and the attributes that its calls have now, by the ids of those of the record."""

    replayed: Replayed
    attributes_now: Mapping[str, Mapping[str, Any]]


class _CutError(RuntimeError):
    """The replay has come to where the recorded run was stopped from outside, or to its end while a call waits."""


class _OverError(BaseException):
    """Ends an app that goes on asking after its replay is over: one that catches every `Exception` would for ever."""


class _Recorder(Recorder):
    """A recorder that says which of its node's executions one is."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(journal)
        self._ranks: dict[str, int] = {}
        self._rank_counts: Counter[str] = Counter()

    def rank_of(self, namespace: str) -> int:
        """The place of an execution among those of its node; see `recorded_run.spans_to_ranks`."""
        return self._ranks.get(namespace, 0)

    def _start_node_span(self, *args: Any, **kwargs: Any) -> Any:
        span = super()._start_node_span(*args, **kwargs)
        namespace, node = str(span.attributes[c.CHECKPOINT_NS]), str(span.attributes[c.NODE])
        with self._lock:
            if namespace not in self._ranks:
                self._ranks[namespace] = self._rank_counts[node]
                self._rank_counts[node] += 1
        return span

    def tools_around(self, span: OpenSpan) -> tuple[str, ...]:
        """The tools that an open span is inside of; see `RecordedCall.tools`."""
        open_by_id = {run.span.span_id: run.span for run in self._open_runs.snapshot().values()}
        keys = []
        while span.parent_span_id is not None and span.parent_span_id in open_by_id:
            span = open_by_id[span.parent_span_id]
            if c.TOOL_NAME in span.attributes:
                keys.append(tool_to_key(span.attributes))
        return tuple(keys)


class _Replay:
    """One replay under way: gives answers and tool results back, and keeps the first difference."""

    def __init__(self, run: RecordedRun, recorder: _Recorder, options: ReplayOptions, equal_calls: EqualCalls) -> None:
        self._run, self._recorder, self._options = run, recorder, options
        self.moments = RunMoments(run.root.start_ns, run.root.end_ns) if options.freeze_time else None
        # In a run that was stopped from outside nobody knows of such a call who stopped it: the replay ends there.
        self._endless_ids = frozenset(call.action_id for call in run.calls if call.has_no_end and not run.was_cut)
        self._ids = DrawnIds([span.attributes.get(key) for span in run.spans for key in GIVEN_INPUTS])
        self.answers = RecordedAnswers(
            run.calls,
            run.trajectory.edges,
            equal_calls=equal_calls,
            ids=self._ids,
            to_key=self._to_key,
            endless_ids=self._endless_ids,
        )
        self.divergence: Divergence | None = None
        self.reached_cut = False
        self.stop: Callable[[], object] = lambda: None
        self.matched_calls: dict[str, RecordedCall] = {}  # span of the replay -> call
        self.matched_tools: dict[str, RecordedTool] = {}
        self._open_tools = list(run.tools)
        self._redactor = Redactor(RecordOptions().redact)
        self._is_redacted = any(REDACTED in str(value) for span in run.spans for value in span.attributes.values())
        self._refused_count = 0
        self._lock = threading.Lock()

    def to_compared(self, value: Any) -> Any:
        """A prompt or a result, recorded or of the replay, as it is compared: while the clock stands, without it."""
        return value if self.moments is None else self.moments.unify(value)

    def _to_key(self, value: Any) -> Any:
        """What of a prompt, or of the arguments of a tool, has to be the same."""
        return self.to_compared(number_ids(value))

    def leave_out(self, given_tasks: GivenTasks) -> None:
        """Makes the calls and tools of these tasks none of those that are still to come."""
        copied_ids = given_tasks.span_ids
        self.answers.leave_out(copied_ids & {call.action_id for call in self._run.calls})
        self._open_tools = [tool for tool in self._run.tools if tool.span_id not in copied_ids]
        copied_tools = [tool for tool in self._run.tools if tool.span_id in copied_ids]
        self._ids.note_given([[tool.result, tool.output] for tool in copied_tools])

    def match_copies(self, open_tasks: OpenGivenTasks) -> None:
        """Notes which spans were copied from which of the record."""
        calls = {call.action_id: call for call in self._run.calls}
        tools = {tool.span_id: tool for tool in self._run.tools}
        for recorded_id, copied_id in open_tasks.span_ids.items():
            if recorded_id in calls:
                self.matched_calls[copied_id] = calls[recorded_id]
            if recorded_id in tools:
                self.matched_tools[copied_id] = tools[recorded_id]

    # -- answers, see `recorded_models.AnswerSource` --------------------------------------------------------------

    def take_answer(self, run_id: UUID | None, *, knows_settings: bool = True) -> AIMessage:
        call = self._claim(run_id, knows_settings=knows_settings)
        if call.action_id in self._endless_ids:
            raise self._no_answer(call, has_ended=self.answers.wait_for_end(self._wait_of(call)))
        self.answers.wait_turn(call)
        return self._give(call)

    async def atake_answer(self, run_id: UUID | None, *, knows_settings: bool = True) -> AIMessage:
        call = self._claim(run_id, knows_settings=knows_settings)
        if call.action_id in self._endless_ids:
            raise self._no_answer(call, has_ended=await self.answers.await_end(self._wait_of(call)))
        await self.answers.await_turn(call)
        return self._give(call)

    def _wait_of(self, call: RecordedCall) -> float:
        """How long, in seconds, the app may wait for a call that it gave up: as long as the recorded run went on."""
        if call.error is not None and call.error.is_closed_stream:
            return 0.0  # it had read what it wanted, which is not recorded
        return (self._run.root.end_ns - call.started_ns) / 1e9 + PATIENCE_S

    def _no_answer(self, call: RecordedCall, *, has_ended: bool) -> Exception:
        """The error of a call that the app gave up in the recorded run, and does not give up now."""
        self._raise_if_over()
        if has_ended:
            return _CutError("the run has ended")
        return self.diverged(Divergence("extra call", call.node, call.number, text=GIVEN_UP))

    def _claim(self, run_id: UUID | None, *, knows_settings: bool) -> RecordedCall:
        self._raise_if_over()
        span = self._recorder.open_span_of(run_id)
        if span is None:
            text = "a model is called where no recorder sees it, in a thread without LangGraph's context"
            raise self.diverged(Divergence("extra call", calling_node(), None, text=text))
        namespace = str(span.attributes.get(c.CHECKPOINT_NS) or "")
        prompt = to_comparable_prompt(load_recorded(self._as_recorded(span, c.INPUT_MESSAGES)))
        options = attributes_to_options({key: self._as_recorded(span, key) for key in OPTION_KEYS})
        call = self.answers.claim(
            str(span.attributes.get(c.NODE) or ""),
            prompt,
            options=options if knows_settings else replace(options, settings=None),
            rank=self._recorder.rank_of(namespace),
            tools=self._recorder.tools_around(span),
        )
        if isinstance(call, Divergence):
            if call.kind == "extra call" and self._run.was_cut:
                raise self._cut()
            raise self.diverged(call)
        with self._lock:
            self.matched_calls[span.span_id] = call
        return call

    def _as_recorded(self, span: Any, key: str) -> Any:
        """An attribute of an open span as the record would have it: redacted, where that is."""
        value = span.attributes.get(key)
        return self._redactor.value_to_clean(key, value, Counter()) if self._is_redacted else value

    def _give(self, call: RecordedCall) -> AIMessage:
        self._raise_if_over()
        self.answers.note_answer(call)
        if call.error is not None:
            raise self._cut() if call.has_no_end else call.error.to_exception()
        assert call.answer is not None  # a call has one or the other
        answer = self._ids.answer_to_now(call.answer.model_copy(deep=True))
        calls = [*answer.tool_calls, *answer.invalid_tool_calls]
        self._ids.note_given([answer.content, [tool_call["args"] for tool_call in calls]])
        return answer

    # -- tools, see `recorded_tools.ToolSource` ------------------------------------------------------------------

    def take_tool(self, run_id: UUID) -> RecordedTool | RunIt:
        self._raise_if_over()
        self.answers.note_event()
        span = self._recorder.open_span_of(run_id)
        if span is None:
            return RunIt()  # outside any graph: not recorded either
        name, call_id = str(span.attributes[c.TOOL_NAME]), span.attributes.get(c.TOOL_CALL_ID)
        arguments = arguments_to_json(self._as_recorded(span, c.TOOL_ARGUMENTS))
        node = str(span.attributes.get(c.NODE) or "")
        with self._lock:
            tools = tools_like(self._open_tools, name, node, call_id=call_id)
            same_tools = self._ids.find_same(tools, arguments, to_json=lambda tool: tool.arguments, to_key=self._to_key)
            if same_tools:
                self._ids.note_pair(same_tools[0].arguments, arguments)
                self._open_tools.remove(same_tools[0])
                self.matched_tools[span.span_id] = same_tools[0]
        # Of several that are the same and run at once nobody knows which this is.
        if self._options.tools == "run" or any(_is_run_of(each, same_tools[:1]) for each in self._run.tools):
            return RunIt()
        if not same_tools:
            raise self.diverged(tool_divergence(node, name, arguments, open_tools=tools, ids=self._ids))
        return tool_to_now(same_tools[0], self._ids)

    @contextmanager
    def tool_running(self) -> Iterator[None]:
        with allowed_connections() if self._options.tools == "run" else contextlib.nullcontext():
            yield
        self.answers.note_event()

    # -- ends ---------------------------------------------------------------------------------------------------

    def refuse_connection(self, address: str) -> BaseException:
        """The error of a node that connects to `address`."""
        self._refused_count += 1
        if self._refused_count > _MAX_REFUSED:
            return _OverError("it connects again and again")
        text = f"it connects to {address}, past its models and tools"
        return RefusedConnectionError(str(self.diverged(Divergence("connection", calling_node(), None, text=text))))

    def diverged(self, divergence: Divergence) -> Exception:
        """Keeps the first divergence and ends the run; the error to raise in the app."""
        with self._lock:
            if self.divergence is None and not self.reached_cut:
                self.divergence = self.answers.disorder or divergence
        self.answers.end()
        self.stop()
        return DivergedError(str(divergence))

    def _cut(self) -> Exception:
        with self._lock:
            if self.divergence is None:
                self.reached_cut = True
        self.answers.end()
        self.stop()
        return _CutError("the recorded run was stopped here")

    def _raise_if_over(self) -> None:
        if self.divergence is not None:
            raise _OverError(str(self.divergence))
        if self.reached_cut:
            raise _OverError("the recorded run was stopped here")


def _is_run_of(tool: RecordedTool, matched: Sequence[RecordedTool]) -> bool:
    """Whether a recorded run that only the tool itself can do again is one of those that the matched run may be."""
    keys = [(each.name, each.node, each.call_id, each.arguments) for each in (tool, *matched)]
    return tool.must_run and bool(matched) and keys[0] == keys[1]


# -- the run ----------------------------------------------------------------------------------------------------------


def require_graph(graph: Any) -> None:
    """Raises GraphError where `graph` is no compiled graph."""
    if not isinstance(graph, Pregel):
        raise GraphError(
            f"replay: a {type(graph).__name__} is no compiled graph; give the one that .compile() returns, or that the"
            " factory makes"
        )


def replay_run(
    graph: Any,
    run: RecordedRun,
    *,
    thread: ReplayedThread | None = None,
    options: ReplayOptions = ReplayOptions(),
    graph_input: Any = None,
    arguments: Mapping[str, Any] | None = None,
    runner: asyncio.Runner | None = None,
    given_tasks: GivenTasks | None = None,
    models: PromptModels | None = None,
) -> Replayed:
    """Runs `graph` as `run` says, and compares.

    Args:
        graph: the app's compiled graph.
        thread: what the earlier runs of the thread left, which must have been replayed before; None for the first.
        graph_input: the input, where the record has it only as a task; None: the recorded one.
        arguments: `config` and `context` of the run where the record lacks them.
        runner: the event loop that the app was opened on; None: one of its own.
        given_tasks: tasks that get what they wrote, and whose nodes do not run; None: every node runs.
        models: that rendered the prompts, by which these are compared to the token; None: as messages alone.

    Raises:
        GraphError: `graph` is no compiled graph; the run goes on with one that was not replayed, or the graph cannot be
            run at all.
    """
    require_graph(graph)
    thread = thread or ReplayedThread()
    memory_at_start = thread.memory.copy() if _may_tie(run) else PrivateMemory()
    first: Replayed | None = None
    equal_calls = EqualCalls()
    while True:
        replayed, attributes_now = _replay_once(
            graph,
            run,
            thread,
            options=options,
            graph_input=graph_input,
            arguments=arguments,
            runner=runner,
            equal_calls=equal_calls,
            given_tasks=given_tasks,
        )
        if replayed.divergence is None and models is not None:
            return _compare_prompts(run, replayed, models, attributes_now=attributes_now)
        if replayed.divergence is None:
            return replayed
        first = first or replayed
        # Equal prompts that were asked at once have different answers, and these may have come to the wrong ones.
        if options.tools == "run" or not equal_calls.is_worth_another(replayed.divergence):
            return first
        thread.memory.restore(memory_at_start)


def _may_tie(run: RecordedRun) -> bool:
    """Whether equal prompts of one node had different answers."""
    answers: dict[str, Any] = {}
    keys = [(json.dumps([call.node, call.prompt], default=str), call.answer) for call in run.calls]
    return any(answers.setdefault(key, answer) != answer for key, answer in keys)


def _replay_once(
    graph: Any,
    run: RecordedRun,
    thread: ReplayedThread,
    *,
    options: ReplayOptions,
    graph_input: Any,
    arguments: Mapping[str, Any] | None,
    runner: asyncio.Runner | None,
    equal_calls: EqualCalls,
    given_tasks: GivenTasks | None,
) -> _Attempt:
    """One attempt."""
    equal_calls.begin_attempt()
    with _one_at_a_time, tempfile.TemporaryDirectory(prefix="marft-replay-") as folder, ExitStack() as stack:
        recorder = _Recorder(Journal(Path(folder) / "journal"))
        stack.callback(recorder.journal.close)
        replay = _Replay(run, recorder, options, equal_calls=equal_calls)
        if given_tasks is not None:
            replay.leave_out(given_tasks)
        open_tasks = stack.enter_context(giving_tasks(given_tasks))
        episode = EpisodeContext("replay", run.trajectory.episode.task_id, SPLIT, spans=[], recorder=recorder)
        thread.memory.clear_caches()
        recorded_graph = wrap(add_memory(graph_to_original(graph), run, thread.memory), recorder)
        stack.callback(recorded_graph.unwrap)
        classes = graph_to_classes(graph_to_original(graph))
        call_arguments = run_to_arguments(run, thread, arguments, classes=classes) | streamed_keys(recorded_graph, run)
        value, lost = run.graph_input(classes) if graph_input is None else (graph_input, [])
        value = translate_interrupts(value, thread)
        stack.enter_context(private_memory(thread.memory))
        stack.enter_context(memory_of_run(thread.memory))
        stack.enter_context(instrument_paused())
        stack.enter_context(stand_in_for_models(chat_stand_in(replay), llm_stand_in(replay)))
        stack.enter_context(clients_answered_by(replay))
        stack.enter_context(recorded_tools(replay))
        if not options.allow_connections:
            stack.enter_context(refused_connections(replay.refuse_connection))
        started_ns = run.root.start_ns
        pins = pinned(graph_to_original(graph), start_ns=started_ns, freeze_time=options.freeze_time, seed=options.seed)
        clock_stands = stack.enter_context(pins)
        stack.enter_context(_set_for_run(current_episode, episode))
        stack.enter_context(_set_for_run(current_routing, Routing({}, actors=episode.actors)))
        began_s = time.perf_counter()
        error = _run_graph(recorded_graph, run, replay, value=value, arguments=call_arguments, runner=runner)
        seconds = time.perf_counter() - began_s
        if open_tasks is not None:
            replay.match_copies(open_tasks)
        divergence, note = _compare(run, replay, episode.spans or [], error=error)
        lost += run.context(classes)[1]
        if divergence is not None and lost:
            divergence = replace(divergence, text=f"{divergence.text} ({LOST} {', '.join(lost)})")
        if options.freeze_time and not clock_stands:
            if divergence is not None:
                divergence = replace(divergence, text=f"{divergence.text} ({NO_CLOCK})")
            note = "; ".join(filter(None, (note, NO_CLOCK)))
        if divergence is None:
            _keep_ids(run, replay, episode.spans or [], thread=thread)
    recorded_seconds = (run.root.end_ns - run.root.start_ns) / 1e9
    replayed = Replayed(
        run.episode_id,
        divergence,
        len(replay.matched_calls),
        seconds=seconds,
        recorded_seconds=recorded_seconds,
        note=note,
    )
    calls = replay.matched_calls
    spans = [row for row in episode.spans or [] if row.span_id in calls]
    return _Attempt(replayed, {calls[span.span_id].action_id: span.attributes for span in spans})


def _compare_prompts(
    run: RecordedRun, replayed: Replayed, models: PromptModels, *, attributes_now: Mapping[str, Mapping[str, Any]]
) -> Replayed:
    """A replay that came out the same, with what came of its prompts."""
    prompts = models.compare(run, attributes_now)
    note = "; ".join(filter(None, (replayed.note, prompts.note))) or None
    return replace(replayed, divergence=prompts.divergence, note=note, prompts_compared=prompts.count)


@contextmanager
def _set_for_run(variable: Any, value: Any) -> Iterator[None]:
    reset_token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(reset_token)


def _run_graph(
    graph: Any,
    run: RecordedRun,
    replay: _Replay,
    value: Any,
    arguments: Mapping[str, Any],
    runner: asyncio.Runner | None,
) -> BaseException | None:
    """Runs the graph as it was run, sync or async; returns the error that it ended with."""
    try:
        if run.run_config.get("is_async") or run.is_dated:
            with ExitStack() as stack:
                own_runner = runner if runner is not None else stack.enter_context(asyncio.Runner())
                own_runner.run(
                    _run_async(graph, replay, value, arguments=arguments), context=contextvars.copy_context()
                )
        else:
            graph.invoke(value, **arguments)
    except (asyncio.CancelledError, _OverError) as error:
        return error
    except Exception as error:  # noqa: BLE001 - whatever the app raises is how its run ended
        return error
    finally:
        replay.answers.end()
    return None


async def _run_async(graph: Any, replay: _Replay, value: Any, arguments: Mapping[str, Any]) -> Any:
    loop = asyncio.get_running_loop()
    running = asyncio.ensure_future(graph.ainvoke(value, **arguments))
    replay.stop = lambda: loop.call_soon_threadsafe(running.cancel)
    return await running


# -- comparing --------------------------------------------------------------------------------------------------------


def _compare(
    run: RecordedRun, replay: _Replay, rows: list[SpanRow], error: BaseException | None
) -> tuple[Divergence | None, str | None]:
    """The first divergence, and what could not be compared."""
    if replay.divergence is not None:
        return replay.divergence, None
    if replay.reached_cut:
        return None, f"the recorded run was cut ({run.trajectory.episode.reason}); the same up to there"
    if (disorder := replay.answers.disorder) is not None:
        return disorder, None
    recorded_episode = run.trajectory.episode
    root = next((row for row in rows if row.parent_span_id is None), None)
    if root is None:
        return Divergence("outcome", None, None, text=f"the run did not begin: {_one_line(error)}"), None
    ends = [
        " ".join(filter(None, (str(attributes.get(c.OUTCOME)), attributes.get(c.OUTCOME_REASON))))
        for attributes in (run.root.attributes, root.attributes)
    ]
    ends = [to_comparable_output(end) for end in ends]
    missing_calls = [call for call in replay.answers.unclaimed if not (run.was_cut and call.has_no_end)]
    if ends[0] != ends[1] and not run.was_cut and (root.attributes.get(c.OUTCOME) == "failed" or not missing_calls):
        return Divergence(
            "outcome", None, None, text="the run ends otherwise", recorded=ends[0], replayed=ends[1]
        ), None
    if missing_calls:
        first = missing_calls[0]
        return Divergence("missing call", first.node, first.number, text=NOT_MADE), None
    if run.was_cut:
        return None, f"the recorded run was cut ({recorded_episode.reason}); the same up to there"
    notes = [] if not run.is_dated else [DATED]
    if c.follows_todays_rule(run.root.convention):
        try:
            trajectory = spans_to_trajectory(_with_recorded_times(run, replay, rows))
        except (Malformed, Incomplete) as fault:
            return Divergence("edges", None, None, text=f"the replay's record is not whole: {fault}"), None
        if (divergence := _compare_edges(run, replay, trajectory)) is not None:
            return divergence, None
        if (divergence := _compare_tools_offered(run.trajectory, trajectory)) is not None:
            return divergence, None
    else:
        notes.append("edges not compared, which follow an older rule")
    if c.OUTPUT in run.root.attributes and (divergence := _compare_results(run, replay, root)) is not None:
        return divergence, None
    return None, "; ".join(notes) or None


def _one_line(error: BaseException | None) -> str:
    return "" if error is None else " ".join(f"{type(error).__name__}: {error}".split())


def _with_recorded_times(run: RecordedRun, replay: _Replay, rows: Sequence[SpanRow]) -> list[SpanRow]:
    """The replay's spans at the times of those that they replay: what of D follows from time alone is the record's."""
    by_id = {span.span_id: span for span in run.spans}
    times = {row_id: by_id[call.action_id] for row_id, call in replay.matched_calls.items()}
    times |= {row_id: by_id[tool_id] for row_id, tool_id in _match_tools(run, replay, rows).items()}
    times |= _match_executions(run, replay, rows)
    times |= {row.span_id: run.root for row in rows if row.parent_span_id is None}
    return [
        row
        if (original := times.get(row.span_id)) is None
        else replace(row, start_ns=original.start_ns, end_ns=original.end_ns)
        for row in rows
    ]


def _match_executions(run: RecordedRun, replay: _Replay, rows: Sequence[SpanRow]) -> dict[str, SpanRow]:
    """Executions of the replay -> those of the record: by the calls inside them, else by namespace, rank and order.

    What runs beside each other may begin in another order, and LangGraph numbers the namespaces of subgraphs as they
    begin; so the calls come first.
    """
    by_id, rows_by_id = {span.span_id: span for span in run.spans}, {row.span_id: row for row in rows}
    matches: dict[str, SpanRow] = {}
    for row_id, call in replay.matched_calls.items():
        if row_id in rows_by_id:
            pair = _executions_around(rows_by_id[row_id], rows_by_id), _executions_around(by_id[call.action_id], by_id)
            if len(pair[0]) == len(pair[1]):
                matches |= {now.span_id: before for now, before in zip(*pair, strict=True)}
    taken_ids = {before.span_id for before in matches.values()}
    by_start, recorded_by_start = (
        sorted(spans, key=lambda span: (span.start_ns, span.span_id)) for spans in (rows, run.spans)
    )
    namespaces, executions = _matched_namespaces(rows, replay), _attempts(recorded_by_start)
    ranks, recorded_ranks = spans_to_ranks(by_start), spans_to_ranks(recorded_by_start)
    by_rank = {(str(executions[ns][0].attributes.get(c.NODE)), rank): ns for ns, rank in recorded_ranks.items()}
    for namespace, attempts in _attempts(by_start).items():
        node = str(attempts[0].attributes.get(c.NODE))
        recorded_namespace = namespaces.get(namespace) or by_rank.get((node, ranks.get(namespace, -1)))
        left = [each for each in attempts if each.span_id not in matches]
        recorded_left = [each for each in executions.get(recorded_namespace or "", ()) if each.span_id not in taken_ids]
        for now, before in zip(left, recorded_left, strict=False):
            matches[now.span_id] = before
            taken_ids.add(before.span_id)
    by_node: dict[str, list[SpanRow]] = {}
    for span in recorded_by_start:
        if span.operation == c.INVOKE_AGENT and span.span_id not in taken_ids:
            by_node.setdefault(str(span.attributes.get(c.NODE)), []).append(span)
    for row in by_start:
        same_node = by_node.get(str(row.attributes.get(c.NODE)))
        if row.operation == c.INVOKE_AGENT and row.span_id not in matches and same_node:
            matches[row.span_id] = same_node.pop(0)
    return matches


def _executions_around(span: SpanRow, by_id: Mapping[str, SpanRow]) -> list[SpanRow]:
    """The executions that enclose a span, innermost first."""
    executions = []
    while span.parent_span_id is not None and span.parent_span_id in by_id:
        span = by_id[span.parent_span_id]
        if span.operation == c.INVOKE_AGENT:
            executions.append(span)
    return executions


def _match_tools(run: RecordedRun, replay: _Replay, rows: Sequence[SpanRow]) -> dict[str, str]:
    """Span of a tool in the replay -> in the record: by the calls inside it, else as it was when it began."""
    by_id, rows_by_id = {span.span_id: span for span in run.spans}, {row.span_id: row for row in rows}
    matches: dict[str, str] = {}
    for row_id, call in replay.matched_calls.items():
        if row_id in rows_by_id:
            pair = tools_around(rows_by_id[row_id], rows_by_id), tools_around(by_id[call.action_id], by_id)
            matches |= dict(zip(*pair, strict=False))
    taken_ids = set(matches.values())
    tools = {tool.span_id: tool for tool in run.tools}
    for row_id, tool in replay.matched_tools.items():
        if row_id in matches:
            continue
        key = (tool.name, tool.node, tool.arguments)
        same_ids = [each.span_id for each in tools.values() if (each.name, each.node, each.arguments) == key]
        free_ids = [span_id for span_id in (tool.span_id, *same_ids) if span_id not in taken_ids]
        if free_ids:
            matches[row_id] = free_ids[0]
            taken_ids.add(free_ids[0])
    return matches


def _attempts(spans_by_start: Sequence[SpanRow]) -> dict[str, list[SpanRow]]:
    attempts: dict[str, list[SpanRow]] = {}
    for span in spans_by_start:
        if span.operation == c.INVOKE_AGENT:
            attempts.setdefault(str(span.attributes.get(c.CHECKPOINT_NS)), []).append(span)
    return attempts


def _matched_namespaces(rows: Sequence[SpanRow], replay: _Replay) -> dict[str, str]:
    """Namespace of the replay -> of the record, of the executions around matched calls."""
    namespaces: dict[str, str] = {}
    for row in rows:
        call = replay.matched_calls.get(row.span_id)
        if call is None:
            continue
        now, before = str(row.attributes.get(c.CHECKPOINT_NS) or "").split("|"), call.namespace.split("|")
        if len(now) == len(before):
            for depth in range(1, len(now) + 1):
                namespaces["|".join(now[:depth])] = "|".join(before[:depth])
    return namespaces


def _compare_edges(run: RecordedRun, replay: _Replay, trajectory: Trajectory) -> Divergence | None:
    def key(edge: Edge) -> tuple[str, str, str, bool]:
        return (edge.src, edge.dst, edge.kind, edge.exact)

    calls = {call.action_id: call for call in run.calls}
    recorded_ids = {row_id: call.action_id for row_id, call in replay.matched_calls.items()}
    recorded_edges = {key(edge) for edge in run.trajectory.edges}
    edges = {
        (recorded_ids.get(src, src), recorded_ids.get(dst, dst), kind, exact)
        for src, dst, kind, exact in map(key, trajectory.edges)
    }
    different = sorted(
        recorded_edges ^ edges, key=lambda edge: (calls[edge[1]].started_ns, calls[edge[0]].started_ns, edge[2:])
    )
    if not different:
        return None
    src, dst, kind, exact = different[0]
    source, sink = calls[src], calls[dst]
    verb = "no longer depends" if different[0] in recorded_edges else "now depends"
    certainty = "" if exact else ", at most"
    text = f"it {verb} on {source.node}, call {source.number} ({kind}{certainty})"
    return Divergence("edges", sink.node, sink.number, text=text)


def _compare_tools_offered(recorded: Trajectory, replayed: Trajectory) -> Divergence | None:
    before, now = (
        {name: digest for name, digest in trajectory.episode.lineage.items() if name.startswith(ONE_TOOL_OF)}
        for trajectory in (recorded, replayed)
    )
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            node, _, tool = name.removeprefix(ONE_TOOL_OF).rpartition("/")
            verb = "another schema of" if name in before and name in now else "no longer" if name in before else "now"
            return Divergence("tools offered", node, None, text=f"it offers its model {verb} the tool {tool}")
    return None


def _compare_results(run: RecordedRun, replay: _Replay, root: SpanRow) -> Divergence | None:
    outputs = [run.output, load_recorded(root.attributes.get(c.OUTPUT))]
    recorded, now = (replay.to_compared(to_comparable_output(output)) for output in outputs)
    difference = value_difference(recorded, now)
    if difference is None:
        return None
    path, recorded_words, words = difference
    place = f"the result differs at {path}" if path else "the result differs"
    return Divergence("result", None, None, text=place, recorded=recorded_words, replayed=words)


def to_comparable_output(value: Any) -> Any:
    """A recorded state without what a model reports besides its answer; what is drawn anew in each run goes by number,
    so that which is which stays."""

    def convert(value: Any) -> Any:
        if isinstance(value, list):
            return [convert(item) for item in value]
        if not isinstance(value, dict):
            return value
        if is_message_form(value):
            value = {key: item for key, item in value["data"].items() if key in _MESSAGE_FIELDS}
        return {str(key): convert(_without_ids(item) if key == INTERRUPTS else item) for key, item in value.items()}

    return number_ids(without_reports(convert(value)))


def _without_ids(interrupts: Any) -> Any:
    """Interrupts without their ids."""

    def without_ids(interrupt: Any) -> Any:
        is_dict = isinstance(interrupt, dict)
        return {key: item for key, item in interrupt.items() if key not in ("id", "ns")} if is_dict else interrupt

    return [without_ids(interrupt) for interrupt in interrupts] if isinstance(interrupts, list) else interrupts


def _keep_ids(run: RecordedRun, replay: _Replay, rows: list[SpanRow], thread: ReplayedThread) -> None:
    """Remembers which checkpoints and interrupts of the replay are which of the record, for runs that go on from it."""
    root = next(row for row in rows if row.parent_span_id is None)
    recorded_ids = str(run.trajectory.episode.checkpoints or "").split()
    thread.checkpoints.update(zip(recorded_ids, str(root.attributes.get(c.CHECKPOINTS) or "").split(), strict=False))
    namespaces = {row.span_id: str(row.attributes.get(c.CHECKPOINT_NS) or "") for row in rows}
    for row_id, recorded in _match_executions(run, replay, rows).items():
        recorded_namespace = str(recorded.attributes.get(c.CHECKPOINT_NS) or "")
        for answered in range(_MAX_INTERRUPTS):
            interrupt_id = _to_interrupt_id(recorded_namespace, answered)
            thread.interrupts[interrupt_id] = _to_interrupt_id(namespaces[row_id], answered)


def _to_interrupt_id(namespace: str, answered: int) -> str:
    """The id that LangGraph gives an interrupt of an execution which that many others have been answered of."""
    return Interrupt.from_ns(None, f"{namespace}|{answered}" if answered else namespace).id
