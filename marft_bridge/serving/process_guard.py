"""A command line -> its process tree, which ends when the parent of this process does.

    python -m marft_bridge.serving.process_guard -- ARGV...

The guard starts ARGV in a session of its own and waits for whichever comes first: the child ends, standard input
reaches its end (the parent held the pipe's write end and is gone, even by SIGKILL), or a stop signal. Then it ends
the whole process group: SIGTERM, and SIGKILL after `GRACE_S`. Invariant: when the guard has exited, nothing of the
group is left; where the guard itself is killed, Linux sends the child a SIGTERM. Standard library only: it also runs
as a plain script and starts in some ten milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from types import FrameType

GRACE_S = 10.0
_PR_SET_PDEATHSIG = 1
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _ignore_signal(_signal: int, _frame: FrameType | None) -> None:
    """A handler must be set for Python to write the signal's number to the wake-up pipe; that is all."""


def wait_for_end(child: subprocess.Popen[bytes], wake_fd: int) -> None:
    """Blocks until the child has ended, standard input has ended, or a stop signal has come through `wake_fd`."""
    with selectors.DefaultSelector() as selector:
        selector.register(wake_fd, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        while child.poll() is None:  # SIGCHLD wakes the selector when the child ends
            for key, _ in selector.select():
                received = os.read(key.fd, 4096)
                if key.fd == 0 and not received:
                    return
                if key.fd == wake_fd and any(number in received for number in _STOP_SIGNALS):
                    return


def _is_group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def end_group(child: subprocess.Popen[bytes], grace_s: float = GRACE_S) -> None:
    """Ends every process of the child's group: SIGTERM, and SIGKILL after `grace_s` seconds."""
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 2.0)):
        deadline = time.monotonic() + patience_s
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            break
        while time.monotonic() < deadline:
            child.poll()  # reap it: a zombie keeps its group alive
            if not _is_group_alive(child.pid):
                break
            time.sleep(0.05)
    child.wait()


def _die_with_guard() -> None:
    """Runs in the child before it becomes the command: Linux will send it SIGTERM when the guard dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def main(arguments: list[str]) -> int:
    """Guards the command after `--`; returns its exit code, or 128 + N when signal N ended it."""
    if arguments[:1] != ["--"] or len(arguments) < 2:
        sys.stderr.write("usage: python -m marft_bridge.serving.process_guard -- ARGV...\n")
        return 2
    wake_fd, wake_write_fd = os.pipe()
    os.set_blocking(wake_write_fd, False)
    signal.set_wakeup_fd(wake_write_fd)
    for number in (*_STOP_SIGNALS, signal.SIGCHLD):
        signal.signal(number, _ignore_signal)
    # The guard has one thread only, so that a function may run between fork and exec.
    child = subprocess.Popen(
        arguments[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_guard
    )
    wait_for_end(child, wake_fd)
    end_group(child)
    code = child.returncode
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
