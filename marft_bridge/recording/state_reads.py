"""A node that runs -> which keys of its state it has read by now, and which it may have read.

LangGraph hands every state key to every node. The state itself is the app's, and neither watched nor copied: what was
read follows from the code of the node's function (`function_reads`) and from the instruction where that function is.
Invariant: a key is certain only where every way to that instruction has read it; where the instruction is not known
(nobody's frame proves to be the function's, an attempt that failed) or the code is not, nothing is certain.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Coroutine
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any

from marft_bridge.recording.function_reads import FunctionReads, field_names
from marft_bridge.recording.node_bytecode import WHOLE_STATE, ReadKeys


class Reads:
    """What the latest attempt at a node has read. Before an attempt began, it may have read anything."""

    __slots__ = ("_caller", "_coroutine", "_fixed", "_function", "_thread", "_worker")

    def __init__(self, fixed: ReadKeys = WHOLE_STATE) -> None:
        """`fixed`: what the node reads, whatever its code says, while no function of it is known."""
        self._fixed = fixed
        self.begin(None, fixed)

    def begin(self, function: FunctionReads | None, fixed: ReadKeys = WHOLE_STATE) -> None:
        """A function is about to run; None: nothing is known of it. Forgets what an earlier attempt read."""
        self._function, self._fixed = function, fixed
        self._caller: FrameType | None = None
        self._thread = 0
        self._worker: tuple[CodeType, Any] | None = None
        self._coroutine: Any = None

    def runs_inside(self, caller: FrameType) -> None:
        """The function is called inside this frame, in this thread."""
        self._caller, self._thread = caller, threading.get_ident()

    def runs_in_worker(self, worker: CodeType, state: Any) -> None:
        """The function is called in some thread by this code, whose variable `args` has the state as its only value."""
        self._worker = (worker, state)

    def runs_as(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """The function is this coroutine."""
        self._coroutine = coroutine

    def end(self, *, has_returned: bool, gave_state_on: bool = False) -> None:
        """The attempt is over; `gave_state_on`: the state goes to a runnable that the function returned."""
        function, after_it = self._function, WHOLE_STATE
        if function is not None and not gave_state_on:
            after_it = function.reads.at_return if has_returned else function.reads.anywhere
        self.begin(None, after_it)

    def so_far(self) -> ReadKeys:
        """What has been read by now. To be asked inside whatever the node calls, or after it."""
        function = self._function
        if function is None:
            return self._fixed
        frame = self._find_frame(function.code)
        return function.reads.anywhere if frame is None else function.reads.at(frame.f_lasti)

    def _find_frame(self, code: CodeType) -> FrameType | None:
        """The frame of the node's function; None where no frame proves to be it.

        Frames of other threads are never looked at: on CPython 3.11 that stopped apps for ever (`sys._current_frames`
        holds a lock of the interpreter while a collection may let a starting thread wait for it), and crashed them.
        So what is asked in a thread of the function's own making has no frame, unless the function is a coroutine.
        """
        coroutine, caller, worker = self._coroutine, self._caller, self._worker
        if coroutine is not None:
            frame: FrameType | None = getattr(coroutine, "cr_frame", None)
            return frame if frame is not None and frame.f_code is code else None
        if caller is not None:
            # A frame that is a variable of itself would keep all of the stack alive: these are arguments only.
            return _frame_inside(caller, code) if self._thread == threading.get_ident() else None
        if worker is not None:
            return _frame_in_worker(sys._getframe(), worker, code)
        return None


_usual_depths: dict[int, int] = {}  # id of a node's code -> how far below us its frame was last
_MAX_DEPTHS = 4096


def _frame_inside(caller: FrameType, code: CodeType) -> FrameType | None:
    """The outermost frame of `code` in `caller`: what runs it a second time is inside the first.

    Python makes an object for every frame that is looked at, so the search begins where the frame was the last time: it
    lies at the same depth whenever the node calls its model in the same way.
    """
    depth = _usual_depths.get(id(code))
    if depth is not None:
        with suppress(ValueError):  # the stack is not that deep
            frame, _ = _outermost_frame(sys._getframe(depth), caller, code)
            if frame is not None:  # what was skipped lies inside it
                return frame
    frame, depth = _outermost_frame(sys._getframe(), caller, code)
    if len(_usual_depths) >= _MAX_DEPTHS:
        _usual_depths.clear()
    if frame is not None:
        _usual_depths[id(code)] = depth
    return frame


def _outermost_frame(frame: FrameType | None, caller: FrameType, code: CodeType) -> tuple[FrameType | None, int]:
    """The outermost frame of `code` from `frame` out to `caller`, and how far out it is; None where there is none, or
    where `frame` is not inside `caller`."""
    outermost, depth = None, 0
    distance = 0
    while frame is not None and frame is not caller:
        if frame.f_code is code:
            outermost, depth = frame, distance
        frame, distance = frame.f_back, distance + 1
    return (None, 0) if frame is None else (outermost, depth)


def _frame_in_worker(innermost: FrameType | None, worker: tuple[CodeType, Any], code: CodeType) -> FrameType | None:
    """The frame of `code` that this worker called with this state."""
    frame, (worker_code, state) = innermost, worker
    while frame is not None:
        outer = frame.f_back
        if frame.f_code is code and outer is not None and outer.f_code is worker_code:
            arguments = outer.f_locals.get("args")
            if isinstance(arguments, tuple) and len(arguments) == 1 and arguments[0] is state:
                return frame
        frame = outer
    return None


def state_keys(state: Any) -> tuple[str, ...] | None:
    """The keys that a node can read of this state; None for a value without keys."""
    if isinstance(state, dict):
        keys = tuple(dict.__iter__(state))
        are_texts = {*map(type, keys)} <= {str} or all(isinstance(key, str) for key in keys)
        return keys if are_texts else None
    return field_names(type(state)) or None
