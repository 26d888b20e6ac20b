"""Owns: a command beside `marft-bridge serve`, on the terminal and off it.

- The terminal is the command's: it reads what is typed, Ctrl-C is its own and ends both, Ctrl-Z stops both until `fg`.
- However `serve` is ended, the command is too, stopped or not; only under `nohup` a closed terminal ends neither.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from marft_bridge.commands import serve

BESIDE = """
import sys
from marft_bridge import cli
from marft_bridge.commands.serve import _run_beside

def run(arguments):
    try:
        code = _run_beside([lambda: None], arguments, {})
    except KeyboardInterrupt:
        print("ended as by Ctrl-C", flush=True)
        return 130
    print("ended with", code, flush=True)
    if code == 0:
        print("typed:", input(), flush=True)  # the terminal is its own again
    return code

cli.run = run
print("starts", flush=True)
cli.main()
"""
"""The entry point, with a command beside no server in the place of all commands."""

SHELL = """
import os, signal, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
child = os.fork()
if child == 0:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:]])
while True:
    _, status = os.waitpid(child, os.WUNTRACED)
    os.tcsetpgrp(0, os.getpgrp())
    if not os.WIFSTOPPED(status):
        break
    print("stopped by", os.WSTOPSIG(status), flush=True)
    assert input() == "fg"
    os.tcsetpgrp(0, child)
    os.killpg(child, signal.SIGCONT)
print("the job ended with", os.waitstatus_to_exitcode(status), flush=True)
"""
"""What an interactive shell does with one job."""


class Terminal:
    """A terminal, with a process on it that leads its session."""

    def __init__(self, program: str, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str) -> str:
        """What the terminal shows, once this is in what was not waited for yet."""
        deadline = time.monotonic() + 60
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown
            if select.select([self._master], [], [], 0.2)[0]:
                with suppress(OSError):  # all that had it open have ended
                    self.shown += os.read(self._master, 4096).decode()
        before, _, self.shown = self.shown.partition(text)
        return before

    def foreground(self) -> int:
        """The process group that the terminal is lent to."""
        return os.tcgetpgrp(self._master)

    def wait_until_lent(self) -> None:
        """Until it is no more the group of the process that leads the session."""
        wait_until(lambda: self.foreground() != self.process.pid)

    def close(self) -> None:
        os.close(self._master)


@contextmanager
def terminal(program: str, *arguments: str) -> Iterator[Terminal]:
    shown = Terminal(program, *arguments)
    try:
        yield shown
    finally:
        with suppress(OSError):
            shown.close()
        with suppress(subprocess.TimeoutExpired):
            shown.process.wait(timeout=20)
        shown.process.kill()
        shown.process.wait()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def end_group(group: int) -> bool:
    """Ends what is left of a process group some seconds after it was told to end; whether anything was."""
    deadline = time.monotonic() + 10
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.05)
        os.killpg(group, signal.SIGKILL)
        return True
    return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_command_reads_what_is_typed_and_gives_the_terminal_back() -> None:
    with terminal(BESIDE, "sh", "-c", "echo asking; read x; echo got $x") as shown:
        shown.wait_for("asking")
        shown.type("hello\n")
        shown.wait_for("got hello")
        shown.wait_for("ended with 0")
        shown.type("thanks\n")
        shown.wait_for("typed: thanks")


def test_ctrl_c_is_the_command_s_and_ends_both() -> None:
    with terminal(BESIDE, "sh", "-c", "echo pid=$$.; exec sleep 600") as shown:
        shown.wait_for("pid=")
        pid = int(shown.wait_for("."))
        shown.wait_until_lent()
        assert shown.foreground() == pid
        shown.type("\x03")
        shown.wait_for("ended as by Ctrl-C")
        assert shown.process.wait(60) == 130
        assert not is_running(pid)


def test_a_command_that_goes_on_after_ctrl_c_is_left_to_go_on_and_its_code_is_serve_s() -> None:
    # whether the signal comes before `read` or ends it
    with terminal(BESIDE, "sh", "-c", "trap 'echo not yet' INT; echo there; until read x; do :; done; exit 7") as shown:
        shown.wait_for("there")
        shown.wait_until_lent()
        shown.type("\x03")
        shown.wait_for("not yet")
        shown.type("\n")
        shown.wait_for("ended with 7")


def test_ctrl_z_stops_both_and_the_shell_s_fg_goes_on_with_both() -> None:
    with terminal(SHELL, BESIDE, "sh", "-c", "echo asking; read x; echo got $x; exit 5") as shown:
        shown.wait_for("asking")
        shown.type("\x1a")
        shown.wait_for(f"stopped by {int(signal.SIGTSTP)}")
        shown.type("fg\n")
        time.sleep(1)
        shown.type("hello\n")
        shown.wait_for("got hello")
        shown.wait_for("the job ended with 5")


def test_ctrl_c_reaches_the_script_that_runs_serve() -> None:
    script = (
        f"trap 'echo the script hears it' INT; {sys.executable} -c \"$0\" sh -c 'echo there; exec sleep 600'; exit 9"
    )
    with terminal(f"import os, sys; os.execvp('sh', ['sh', '-c', {script!r}, sys.argv[1]])", BESIDE) as shown:
        shown.wait_for("there")
        shown.wait_until_lent()
        shown.type("\x03")
        shown.wait_for("ended as by Ctrl-C")
        shown.wait_for("the script hears it")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_signal_to_serve_leaves_no_command_behind(number: signal.Signals, is_stopped: bool) -> None:
    argv = [sys.executable, "-c", BESIDE, "sh", "-c", "echo pid=$$.; sleep 600 & wait"]
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "starts\n"
        (pid,) = map(int, re.findall(r"pid=(\d+)", process.stdout.readline()))
        if is_stopped:
            os.killpg(pid, signal.SIGSTOP)
        process.send_signal(number)
        process.send_signal(number if number == signal.SIGHUP else 0)  # a terminal that closes says so twice
        try:
            said, _ = process.communicate(timeout=60)
        finally:
            was_left = end_group(pid)
        assert (said, process.returncode, was_left) == ("ended as by Ctrl-C\n", 130, False)


def test_an_interruption_while_the_command_starts_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self.pid)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        serve._run_beside([lambda: None], ["sleep", "600"], {})
    assert signal.getsignal(signal.SIGINT) is handler
    assert not end_group(started[0])


def test_a_terminal_that_closes_ends_serve_and_the_command() -> None:
    with terminal(BESIDE, "sh", "-c", "trap '' HUP; echo pid=$$.; sleep 600 & wait") as shown:
        shown.wait_for("pid=")
        pid = int(shown.wait_for("."))
        shown.close()
        try:
            shown.process.wait(60)
        finally:
            was_left = end_group(pid)
        assert not was_left


def test_under_nohup_a_closed_terminal_ends_nothing() -> None:
    argv = ["nohup", sys.executable, "-c", BESIDE, "sh", "-c", "echo there; sleep 2; exit 3"]
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "starts\n"
        assert process.stdout.readline() == "there\n"
        process.send_signal(signal.SIGHUP)
        assert process.stdout.read() == "ended with 3\n"
        assert process.wait(60) == 3


def test_the_code_of_a_command_that_a_signal_ended_is_that_of_a_shell() -> None:
    argv = [sys.executable, "-c", BESIDE, "sh", "-c", "kill -TERM $$"]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (143, "starts\nended with 143\n")
