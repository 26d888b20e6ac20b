"""A command line -> that process tree, which ends when the parent of this process does.

    python -m marft_bridge.server_guard -- ARGV...

The guard starts ARGV in a session of its own and waits for whichever comes first: the child ends, standard input
reaches its end (the parent held the pipe's write end and is gone, even by SIGKILL), or a stop signal. Then it ends
the whole process group: SIGTERM, and SIGKILL after `GRACE_S`. Invariant: when the guard has exited, nothing of the
group is left; where the guard itself is killed, Linux sends the child a SIGTERM. Standard library only: it also runs
as a plain script and starts in some ten milliseconds. It does not know what it guards.
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


def _noted(_signal: int, _frame: FrameType | None) -> None:
    """Python writes the signal's number to the wake-up pipe; nothing else needs doing here."""


def child_ended_or_stop_asked(child: subprocess.Popen[bytes], wake: int) -> None:
    """Block until the child has ended, standard input has ended, or a stop signal has come through `wake`."""
    with selectors.DefaultSelector() as ready:
        ready.register(wake, selectors.EVENT_READ)
        ready.register(0, selectors.EVENT_READ)
        while child.poll() is None:
            for key, _ in ready.select():
                said = os.read(key.fd, 4096)
                if key.fd == 0 and not said:
                    return
                if key.fd == wake and any(number in said for number in _STOP_SIGNALS):
                    return


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def group_ended(child: subprocess.Popen[bytes], grace_s: float = GRACE_S) -> None:
    """End every process of the child's group, politely for `grace_s` seconds."""
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 2.0)):
        deadline = time.monotonic() + patience_s
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            break
        while time.monotonic() < deadline:
            child.poll()  # reap it, or its group seems to live on
            if not _group_lives(child.pid):
                break
            time.sleep(0.05)
    child.wait()


def _ends_with_guard() -> None:
    """In the child, before it becomes the command."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def main(arguments: list[str]) -> int:
    """Guard the command after `--`; answers its exit code, or 128 + N when signal N ended it."""
    if arguments[:1] != ["--"] or len(arguments) < 2:
        sys.stderr.write("usage: python -m marft_bridge.server_guard -- ARGV...\n")
        return 2
    wake, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    for number in (*_STOP_SIGNALS, signal.SIGCHLD):
        signal.signal(number, _noted)
    # The guard has one thread only, so that a function may run between fork and exec.
    child = subprocess.Popen(
        arguments[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_ends_with_guard
    )
    child_ended_or_stop_asked(child, wake)
    group_ended(child)
    code = child.returncode
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
