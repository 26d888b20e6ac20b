"""The calls of a record and the calls of its replay -> which recorded call answers which, and when.

A call is known by its node and its prompt, in which ids that a run draws stand for each other; among equal ones by what
else it asked for, by the tools around it, then by the execution that makes it, then by their order.
Answers come back in the order in which they came: a call that is early waits for those that had ended before it, so
that calls that run beside each other end as they did. A call that the app itself gave up waiting for, by a timeout or
because another one was faster, has no answer: it waits until the app gives it up again, and answers that came after it
had begun wait until it has begun. Invariants: no recorded call answers twice; a call that came after another one inside
one node, and now comes before it, is a divergence of order; a wait for an answer ends when nothing has happened for
`PATIENCE_S`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from typing import Any

from marft_bridge.replay.call_options import CallOptions, options_divergence
from marft_bridge.replay.divergence import Divergence, prompt_difference
from marft_bridge.replay.drawn_ids import DrawnIds
from marft_bridge.replay.equal_calls import EqualCalls
from marft_bridge.replay.recorded_run import RecordedCall
from trace_store.records import Edge

NOT_MADE = "this call is not made any more"
PATIENCE_S = 1.0
"""How long a call waits for another one to come, after the last that came."""


class RecordedAnswers:
    """The calls of one record, while they are given back. Safe for any number of threads and event loops."""

    def __init__(
        self,
        calls: Sequence[RecordedCall],
        edges: Sequence[Edge],
        *,
        equal_calls: EqualCalls,
        ids: DrawnIds,
        to_key: Callable[[list[Any]], list[Any]],
        endless_ids: Set[str] = frozenset(),
    ) -> None:
        """
        Args:
            ids: of the record and of its replay.
            to_key: what of a prompt has to be the same.
            endless_ids: action ids of the calls that the app gave up waiting for.
        """
        self._equal_calls, self._ids, self._to_key = equal_calls, ids, to_key
        self._keys = {call.action_id: to_key(call.prompt) for call in calls}
        self._endless_ids = endless_ids
        self._by_node: dict[str, list[RecordedCall]] = {}
        for call in calls:
            self._by_node.setdefault(call.node, []).append(call)
        self._calls = {call.action_id: call for call in calls}
        self._sources: dict[str, list[str]] = {}  # of exact edges: what had to be answered before
        for edge in edges:
            if edge.exact:
                self._sources.setdefault(edge.dst, []).append(edge.src)
        with_end = [call for call in calls if call.action_id not in endless_ids]
        self._unanswered = sorted(with_end, key=lambda call: (call.ended_ns, call.started_ns))
        self._claimed: set[str] = set()
        self._answered: set[str] = set()
        self._turn = threading.Condition()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._last_event_s = time.monotonic()
        self._suspects: list[tuple[RecordedCall, RecordedCall]] = []  # a call, and one that had come before it
        self._is_in_order = True  # False: nobody waits for anybody any more
        self._has_ended = False

    @property
    def unclaimed(self) -> list[RecordedCall]:
        """The recorded calls that nobody has made yet, by their start."""
        return [call for call in self._calls.values() if call.action_id not in self._claimed]

    def claim(
        self, node: str, prompt: list[Any], *, options: CallOptions, rank: int, tools: tuple[str, ...]
    ) -> RecordedCall | Divergence:
        """The recorded call that answers one that is made now.

        Args:
            options: what it asks for besides its prompt.
            rank: of the execution that makes it.
            tools: that it is made inside of, as `RecordedCall.tools`.
        """
        with self._turn:
            self._last_event_s = time.monotonic()
            open_calls = [call for call in self._by_node.get(node, ()) if call.action_id not in self._claimed]
            key = self._to_key(prompt)
            same_calls = [call for call in open_calls if self._keys[call.action_id] == key]
            same_calls = [call for call in same_calls if self._ids.fit(call.prompt, prompt)]
            if not same_calls:
                return self._unknown_call(node, prompt, open_calls)
            same_calls = [call for call in same_calls if self._ids.to_now(call.prompt) == prompt] or same_calls
            differences = [options_divergence(call.options, options, node, number=call.number) for call in same_calls]
            if differing := [difference for difference in differences if difference is not None]:
                if len(differing) == len(same_calls):
                    index = next((index for index, call in enumerate(same_calls) if call.rank == rank), 0)
                    self._suspect_missing(same_calls[index], self._claimed)
                    return differing[index]
                pairs = zip(same_calls, differences, strict=True)
                same_calls = [call for call, difference in pairs if difference is None]
            tools_now = list(tools)
            same_calls = [call for call in same_calls if self._ids.to_now(list(call.tools)) == tools_now] or same_calls
            call = next((call for call in same_calls if call.rank == rank), same_calls[0])
            if any(each.answer != call.answer for each in same_calls):
                call = self._equal_calls.choose(node, same_calls, default=call)
            self._claimed.add(call.action_id)
            self._ids.note_pair(call.prompt, prompt)
            if call.action_id in self._endless_ids:
                self._answered.add(call.action_id)  # with nothing: what came after it did not wait for it either
            self._suspect_missing(call, self._answered)
            self._wake()
            return call

    def leave_out(self, action_ids: Set[str]) -> None:
        """Takes calls for made and answered, whose tasks do not run."""
        self._claimed |= action_ids
        self._answered |= action_ids
        self._unanswered = [call for call in self._unanswered if call.action_id not in action_ids]

    def _unknown_call(self, node: str, prompt: list[Any], open_calls: list[RecordedCall]) -> Divergence:
        made_count = sum(self._calls[action_id].node == node for action_id in self._claimed)
        if not open_calls:
            recorded_count = len(self._by_node.get(node, ()))
            _, _, words = prompt_difference([], prompt)
            text = f"the record has {_counted(recorded_count)} of this node, and no answer for one more"
            return Divergence("extra call", node, made_count + 1, text=text, recorded=None, replayed=words)
        key = self._to_key(prompt)
        nearest = max(open_calls, key=lambda call: _shared(self._keys[call.action_id], key))
        self._suspect_missing(nearest, self._claimed)
        compared = self._keys[nearest.action_id], key
        if compared[0] == key:  # but for ids that stand for others
            compared = self._ids.to_now(nearest.prompt), prompt
        where, recorded_words, replayed_words = prompt_difference(*compared)
        return Divergence("prompt", node, nearest.number, text=where, recorded=recorded_words, replayed=replayed_words)

    def _suspect_missing(self, call: RecordedCall, made: Set[str]) -> None:
        """Notes the first call that this one depended on, and that is not among those that were made."""
        missing_calls = [self._calls[source] for source in self._sources.get(call.action_id, ()) if source not in made]
        if missing_calls:
            self._suspects.append((call, min(missing_calls, key=lambda each: each.started_ns)))
            self._is_in_order = False

    @property
    def disorder(self) -> Divergence | None:
        """The first call that was made without one that came before it: which comes later, or not at all."""
        if not self._suspects:
            return None
        call, earlier = self._suspects[0]
        if earlier.action_id not in self._claimed:
            first = next(each for each in self.unclaimed if each.namespace == earlier.namespace)
            return Divergence("missing call", first.node, first.number, text=NOT_MADE)
        text = f"it comes before {earlier.node}, call {earlier.number}, which came before it"
        return Divergence("order", call.node, call.number, text=text)

    # -- whose turn it is ----------------------------------------------------------------------------------------

    def wait_turn(self, call: RecordedCall) -> None:
        """Waits until the answer of a claimed call is due, or is due too early."""
        with self._turn:
            while not self._is_due(call):
                if not self._turn.wait(self._patience_left_s()) and self._patience_left_s() <= 0:
                    self._give_up(call)
                    return

    async def await_turn(self, call: RecordedCall) -> None:
        """As `wait_turn`, without holding the event loop up."""
        loop = asyncio.get_running_loop()
        while True:
            with self._turn:
                if self._is_due(call):
                    return
                if self._patience_left_s() <= 0:
                    self._give_up(call)
                    return
                woken: asyncio.Future[None] = loop.create_future()
                self._waiting.append((loop, woken))
                patience_s = self._patience_left_s()
            with suppress(TimeoutError):
                await asyncio.wait_for(woken, patience_s)

    def wait_for_end(self, limit_s: float) -> bool:
        """Waits until the replay has ended; False where nothing has happened for `limit_s`."""
        with self._turn:
            while not self._has_ended:
                left_s = limit_s - self._idle_s()
                if left_s <= 0:
                    return False
                self._turn.wait(left_s)
        return True

    async def await_end(self, limit_s: float) -> bool:
        """As `wait_for_end`, without holding the event loop up."""
        loop = asyncio.get_running_loop()
        while True:
            with self._turn:
                if self._has_ended:
                    return True
                left_s = limit_s - self._idle_s()
                if left_s <= 0:
                    return False
                woken: asyncio.Future[None] = loop.create_future()
                self._waiting.append((loop, woken))
            with suppress(TimeoutError):
                await asyncio.wait_for(woken, left_s)

    def note_answer(self, call: RecordedCall) -> None:
        """Notes that a call has got its answer."""
        with self._turn:
            self._last_event_s = time.monotonic()
            self._answered.add(call.action_id)
            self._unanswered.remove(call)
            self._wake()

    def note_event(self) -> None:
        """Notes that the replay goes on."""
        self._last_event_s = time.monotonic()

    def end(self) -> None:
        """Ends all waiting."""
        with self._turn:
            self._is_in_order = False
            self._has_ended = True
            self._wake()

    def _is_due(self, call: RecordedCall) -> bool:
        return not self._is_in_order or (self._unanswered[0] is call and not self._is_ahead(call))

    def _is_ahead(self, call: RecordedCall) -> bool:
        """Whether a call that the app gave up had begun before the answer of this one came, and has not yet."""
        to_begin = self._endless_ids - self._claimed
        return any(self._calls[action_id].started_ns < call.ended_ns for action_id in to_begin)

    def _patience_left_s(self) -> float:
        return PATIENCE_S - self._idle_s()

    def _idle_s(self) -> float:
        return time.monotonic() - self._last_event_s

    def _give_up(self, call: RecordedCall) -> None:
        """Nothing moves: the order of the record cannot be met. It matters inside one task of the outermost graph."""
        task = call.namespace.partition("|")[0]
        for earlier in self._unanswered:
            is_in_task = earlier.namespace.partition("|")[0] == task
            if is_in_task and earlier.ended_ns <= call.started_ns and earlier.action_id not in self._claimed:
                self._suspects.append((call, earlier))
                self._is_in_order = False
                self._wake()
                return

    def _wake(self) -> None:
        self._turn.notify_all()
        waiting, self._waiting = self._waiting, []
        for loop, woken in waiting:
            with suppress(RuntimeError):  # its loop is closed
                loop.call_soon_threadsafe(_set, woken)


def _set(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


def _counted(count: int) -> str:
    return "no call" if count == 0 else "1 call" if count == 1 else f"{count} calls"


def _shared(recorded: list[Any], replayed: list[Any]) -> int:
    """How much two prompts share at their beginnings and ends, in characters."""
    before, now = repr(recorded), repr(replayed)
    return _common(before, now) + _common(before[::-1], now[::-1])


def _common(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(one), len(other)))
