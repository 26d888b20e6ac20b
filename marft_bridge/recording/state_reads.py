"""A node that runs -> which keys of its state it has read by now, and which it may have read.

LangGraph hands every state key to every node. The state itself is the app's, and neither watched nor copied: what was
read follows from the code of the node's function (`function_reads`) and from the instruction where that function is.
Invariant: a key is certain only where every way to that instruction has read it; where the instruction is not known
(a thread that no one can follow, an attempt that failed) or the code is not, nothing is certain.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Coroutine
from types import CodeType, FrameType
from typing import Any

from marft_bridge.recording.function_reads import FunctionReads, field_names
from marft_bridge.recording.node_bytecode import WHOLE_STATE, ReadKeys


class Reads:
    """What the latest attempt at a node has read. Before an attempt began, it may have read anything."""

    __slots__ = ("_boundary", "_coroutine", "_fixed", "_function", "_thread")

    def __init__(self, fixed: ReadKeys = WHOLE_STATE) -> None:
        """`fixed`: what the node reads, whatever its code says, while no function of it is known."""
        self._fixed = fixed
        self._function: FunctionReads | None = None
        self._boundary: FrameType | CodeType | None = None  # the function's frame is the next one inside
        self._thread: int | None = None  # the one in which the function runs; None: that of whoever asks
        self._coroutine: Coroutine[Any, Any, Any] | None = None

    def begin(self, function: FunctionReads | None) -> None:
        """A function is about to run; None: nothing is known of it. Forgets what an earlier attempt read."""
        self._function, self._fixed = function, WHOLE_STATE
        self._boundary = self._thread = self._coroutine = None

    def runs_inside(self, boundary: FrameType | CodeType) -> None:
        """The function is called inside this very frame, in this thread; or, given code, inside a frame of that."""
        self._boundary = boundary
        self._thread = threading.get_ident() if isinstance(boundary, FrameType) else None

    def runs_as(self, coroutine: Any) -> None:
        """The function is this coroutine."""
        if getattr(coroutine, "cr_code", None) is (self._function.code if self._function else None):
            self._coroutine = coroutine

    def end(self, *, has_returned: bool, gave_state_on: bool = False) -> None:
        """The attempt is over; `gave_state_on`: the state goes to a runnable that the function returned."""
        function, self._function = self._function, None
        self._boundary = self._thread = self._coroutine = None
        self._fixed = WHOLE_STATE
        if function is not None and not gave_state_on:
            self._fixed = function.reads.at_return if has_returned else function.reads.anywhere

    def so_far(self) -> ReadKeys:
        """What has been read by now. To be asked inside whatever the node calls, or after it."""
        function = self._function
        if function is None:
            return self._fixed
        coroutine = self._coroutine
        frame = coroutine.cr_frame if coroutine is not None else self._find_frame(function.code)
        return function.reads.anywhere if frame is None else function.reads.at(frame.f_lasti)

    def _find_frame(self, code: CodeType) -> FrameType | None:
        """The frame of the node's function: the outermost one of its code inside the boundary."""
        boundary = self._boundary
        if boundary is None:
            return None
        frame: FrameType | None = sys._getframe(1)
        thread = self._thread
        if thread is not None and thread != threading.get_ident():
            frame = sys._current_frames().get(thread)
        outermost: FrameType | None = None
        while frame is not None:
            if frame is boundary:
                return outermost
            if frame.f_code is code:
                caller = frame.f_back
                outermost = frame
                if caller is not None and caller.f_code is boundary:
                    return outermost
            frame = frame.f_back
        return None


def state_keys(state: Any) -> tuple[str, ...] | None:
    """The keys that a node can read of this state; None for a value without keys."""
    if isinstance(state, dict):
        return tuple(dict.__iter__(state)) if all(isinstance(key, str) for key in dict.__iter__(state)) else None
    return field_names(type(state)) or None
