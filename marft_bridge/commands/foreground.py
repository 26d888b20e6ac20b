"""The terminal of this process -> that of a command beside it, lent as a shell lends it to a job.

The command reads what is typed, and Ctrl-C and Ctrl-Z are its own. Where Ctrl-Z stops it, this process stops too, so
that the shell has the terminal; after `fg` both go on. Invariants: when the block has ended the terminal is this
process's again, unless a shell has taken it meanwhile; a process in the background takes it from nobody.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

_STOPPING_S = 0.1  # until a signal to the own group has stopped the threads of this process too
_OF_BACKGROUND = (signal.SIGTTIN, signal.SIGTTOU)  # what stops a process that reads or changes a terminal of others


class PutOffInterrupts:
    """From its making to `let_come`, what SIGINT does, as SIGTERM and SIGHUP do by it, is put off. In the main thread,
    which alone is interrupted; what is started meanwhile is interrupted as ever."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._handler = (
            signal.signal(signal.SIGINT, lambda number, _: self._numbers.append(number))
            if threading.current_thread() is threading.main_thread()
            else None
        )

    def let_come(self) -> None:
        """Interrupts now, where something did meanwhile."""
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        if self._numbers:
            signal.raise_signal(signal.SIGINT)


class LentTerminal:
    """Lends the terminal on standard input inside a `with` block; does nothing where there is none.

    Args:
        child: the leader of a process group of its own.
    """

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child, self._own_group = child, os.getpgrp()
        # Who may set handlers is the main thread alone.
        self._is_used = _foreground_group() is not None and threading.current_thread() is threading.main_thread()
        self._was_lent = False

    def __enter__(self) -> Self:
        if self._is_used:
            self._handler = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # to take it back, and to write meanwhile
            self._lend()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_used:
            self._take_back()
            signal.signal(signal.SIGTTOU, self._handler)

    def follow(self) -> None:
        """Stops this process where the command was stopped, and goes on with it; called every moment while it runs."""
        number = self._stop_signal() if self._is_used else None
        if number is None:
            return
        if number not in _OF_BACKGROUND or _foreground_group() != self._own_group:
            self._take_back()
            os.killpg(self._own_group, signal.SIGTSTP)  # the shell goes on; without one this does nothing
            time.sleep(_STOPPING_S)
        self._lend()

    def pass_on_interrupt(self) -> None:
        """Sends this process and its group the Ctrl-C by which the command ended: its group alone was sent it.

        Raises KeyboardInterrupt, as the handler of SIGINT does.
        """
        if self._was_lent and self._child.returncode in (-signal.SIGINT, 128 + signal.SIGINT):
            self._take_back()
            os.killpg(self._own_group, signal.SIGINT)
            time.sleep(_STOPPING_S)

    def _lend(self) -> None:
        """From the foreground only; the command goes on where it was stopped, as by reading before it was lent to."""
        if _foreground_group() == self._own_group:
            with suppress(OSError):  # the command has ended, or the terminal is gone
                os.tcsetpgrp(0, self._child.pid)
                self._was_lent = True
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGCONT)

    def _take_back(self) -> None:
        if _foreground_group() == self._child.pid:
            with suppress(OSError):
                os.tcsetpgrp(0, self._own_group)

    def _stop_signal(self) -> int | None:
        """The signal that stopped the command since the last look; None where none did, or the system cannot tell."""
        if not hasattr(os, "waitid"):
            return None
        try:
            state = os.waitid(os.P_PID, self._child.pid, os.WSTOPPED | os.WNOHANG)
        except ChildProcessError:  # it has ended
            return None
        return None if state is None else state.si_status


def _foreground_group() -> int | None:
    """The process group that has the terminal on standard input; None where that is no terminal of this session."""
    try:
        return os.tcgetpgrp(0)
    except OSError:
        return None
