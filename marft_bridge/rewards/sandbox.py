"""An untrusted Python program and limits -> what it wrote and why it ended.

The program runs in a process of its own behind the strongest wall that this kernel gives without root (`confine`
builds it): no network, no files but the interpreter's and its own folder's, nobody else's processes, an empty
environment, limits on processor time, memory, files, processes and output. Invariants: when `program_to_end` returns,
nothing that the program started is alive and its folder is gone (behind `limits-only`, the first of the two is not
held); a wall that cannot be had is an error, never a weaker wall. It does not know what the program is for.
"""

from __future__ import annotations

import functools
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from marft_bridge.errors import GraphError

Isolation = Literal["namespaces", "landlock", "limits-only"]
Ended = Literal["finished", "exit-status", "wall-time", "cpu-time", "memory", "output", "signal"]

_MB = 1 << 20
_CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_AT_ONCE = threading.BoundedSemaphore(_CPUS)  # more would only run into their wall time
_START_S = 30.0  # for interpreter and walls, on a busy machine
_AFTER_KILL_S = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use. Memory and processor time are per process: all of it is that times `processes`."""

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_mb: int = 512  # address space of one process
    processes: int = 4  # threads count too; behind landlock there is one process, whose threads share its memory
    folder_mb: int = 8  # all files together; behind landlock none can be written
    open_files: int = 64
    output_kb: int = 256  # standard output and error together


@dataclass(frozen=True, slots=True)
class End:
    """How a program ended."""

    ended: Ended
    status: int | None  # exit status, or -N for signal N; None when it was stopped from outside
    stdout: str
    stderr: str
    wall_s: float
    cpu_s: float | None  # of the program's own process; None when it was stopped from outside
    isolation: Isolation

    @property
    def last_words(self) -> str:
        """The last line on standard error, where Python names what was raised; empty for none."""
        lines = self.stderr.strip().splitlines()
        return lines[-1].strip() if lines else ""


class NotStarted(Exception):  # noqa: N818 - of the machine, not of the program
    """The machine was too busy to start the program, which therefore shows nothing of the program."""


class _Refused(Exception):  # noqa: N818 - an answer of the kernel, not a fault
    """The kernel does not give this wall here."""


def program_to_end(
    program: str, stdin: str = "", limits: Limits | None = None, isolation: Isolation | None = None
) -> End:
    """Runs Python source as a program. Blocks for `wall_s` and the start at most; safe in any thread.

    Args:
        isolation: None for the strongest wall that there is.

    Raises:
        GraphError: no wall can be had here, or not the one that is asked for; the message says what is missing.
        NotStarted: the machine is too busy.
    """
    wall = isolation or strongest_isolation()
    try:
        with _AT_ONCE:
            return _run(program, stdin, limits or Limits(), wall)
    except _Refused as refused:
        raise GraphError(f"untrusted programs cannot be run behind {wall!r} here: {refused}") from None


@functools.cache
def strongest_isolation() -> Isolation:
    """The strongest wall that holds here, found out by running a program that tries to get through.

    Raises:
        GraphError: none does.
    """
    walls: tuple[Isolation, ...] = ("namespaces", "landlock")
    refusals = []
    for wall in walls:
        try:
            _probe(wall)
        except _Refused as refused:
            refusals.append(f"{wall}: {refused}")
        else:
            return wall
    raise GraphError(
        f"untrusted programs cannot be isolated from network and files here ({'; '.join(refusals)}); allow one of "
        f"them, or set isolation = 'limits-only' if you trust what the model writes"
    )


_PROBE = """
import sys
try:
    import _socket
    _socket.socket()
except OSError:
    print("network held")
try:
    open(sys.stdin.read())
except OSError:
    print("files held")
"""


def _probe(wall: Isolation) -> None:
    with tempfile.NamedTemporaryFile() as secret:
        Path(secret.name).chmod(0o644)  # the wall must hold it, not the file's mode
        end = _run(_PROBE, secret.name, Limits(), wall)
    if end.stdout.split("\n") != ["network held", "files held", ""]:
        raise _Refused(f"a program that tried to get through ended with {end.last_words or end.stdout!r}")


def _run(program: str, stdin: str, limits: Limits, wall: Isolation) -> End:
    readable, hidden = _interpreter_files()
    box = tempfile.mkdtemp(prefix="marft-box-")
    request = {
        "program": program,
        "stdin": stdin,
        "isolation": wall,
        "box": box,
        "readable": readable,
        "hidden": hidden,
        "limits": {
            "cpu_s": limits.cpu_s,
            "memory_bytes": limits.memory_mb * _MB,
            "processes": limits.processes,
            "file_bytes": limits.folder_mb * _MB,
            "box_bytes": limits.folder_mb * _MB,
            "open_files": limits.open_files,
        },
    }
    told, tells = os.pipe()
    try:
        began = time.monotonic()
        process = subprocess.Popen(
            [_interpreter(), "-I", "-S", "-B", str(Path(__file__).with_name("confine.py")), str(tells)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"LANG": "C.UTF-8"},
            cwd="/",
            pass_fds=(tells,),
            start_new_session=True,
        )
        os.close(tells)
        tells = -1
        try:
            outputs, stopped = _talk(process, json.dumps(request).encode(), told, limits)
        finally:
            _end(process)
    finally:
        os.close(told)
        if tells >= 0:
            os.close(tells)
        shutil.rmtree(box, ignore_errors=True)
    return _outputs_to_end(outputs, stopped, time.monotonic() - began, limits, wall)


def _talk(
    process: subprocess.Popen[bytes], request: bytes, told: int, limits: Limits
) -> tuple[dict[str, bytearray], Ended | None]:
    """Sends the request and reads until all pipes end; else the reason for which it has to be stopped."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    outputs = {"stdout": bytearray(), "stderr": bytearray(), "told": bytearray()}
    try:
        process.stdin.write(request)  # the launcher reads all of it before anything else
        process.stdin.close()
    except BrokenPipeError:
        return outputs, None
    with selectors.DefaultSelector() as open_pipes:
        pipes = {"stdout": process.stdout.fileno(), "stderr": process.stderr.fileno(), "told": told}
        for name, pipe in pipes.items():
            open_pipes.register(pipe, selectors.EVENT_READ, name)
        stopped: Ended | None = None
        deadline, runs = time.monotonic() + _START_S, False
        while open_pipes.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                if stopped is not None:
                    break  # stopped, and something still holds a pipe: only without a wall
                stopped, deadline = "wall-time", time.monotonic() + _AFTER_KILL_S
                _tell_to_end(process)
                continue
            for key, _ in open_pipes.select(left):
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    open_pipes.unregister(key.fd)
                elif stopped is None:
                    outputs[key.data] += chunk
            if outputs["told"] and not runs and stopped is None:
                deadline, runs = time.monotonic() + limits.wall_s, True  # the program's time begins with the program
            if stopped is None and len(outputs["stdout"]) + len(outputs["stderr"]) > limits.output_kb * 1024:
                stopped, deadline = "output", time.monotonic() + _AFTER_KILL_S
                _tell_to_end(process)
    return outputs, stopped


def _tell_to_end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # not Popen.terminate, which may wait for it and so give its number away
        os.kill(process.pid, signal.SIGTERM)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Waits for the launcher, which ends when nothing is left of what it started."""
    with selectors.DefaultSelector() as ends:
        handle = os.pidfd_open(process.pid)
        ends.register(handle, selectors.EVENT_READ)
        if not ends.select(1.0):
            _tell_to_end(process)
            ends.select(_AFTER_KILL_S)
        os.close(handle)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # before it is waited for: until then the number is its own
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _outputs_to_end(
    outputs: dict[str, bytearray], stopped: Ended | None, wall_s: float, limits: Limits, wall: Isolation
) -> End:
    told: dict[str, Any] = {}
    for line in outputs["told"].splitlines():
        told |= json.loads(line)
    if stopped == "wall-time" and "walls" not in told:
        raise NotStarted(f"the sandbox did not start in {_START_S:g} s")
    if "refused" in told:
        raise _Refused(told["refused"])
    stderr = outputs["stderr"].decode("utf-8", errors="replace")
    status: int | None = told.get("status")
    if stopped is None and "walls" not in told:
        raise _Refused(f"the launcher ended without a word: {' '.join(stderr.split())[-300:]}")
    end = End(
        ended="signal",
        status=status,
        stdout=outputs["stdout"][: limits.output_kb * 1024].decode("utf-8", errors="replace"),
        stderr=stderr[: limits.output_kb * 1024],
        wall_s=wall_s,
        cpu_s=told.get("cpu_s"),
        isolation=wall,
    )
    return _with_reason(end, stopped, limits)


def _with_reason(end: End, stopped: Ended | None, limits: Limits) -> End:
    if stopped is not None:
        return replace(end, ended=stopped)
    if end.status == 0:
        return replace(end, ended="finished")
    if end.last_words.startswith("MemoryError"):
        return replace(end, ended="memory")
    if end.status == -signal.SIGXCPU or (end.cpu_s or 0.0) >= limits.cpu_s:
        return replace(end, ended="cpu-time")
    return replace(end, ended="signal" if end.status is None or end.status < 0 else "exit-status")


def _interpreter() -> str:
    """The interpreter itself: of a virtual environment, the one that it was made from."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@functools.cache
def _interpreter_files() -> tuple[list[str], list[str]]:
    """What a program may read: interpreter, standard library, the system's libraries; less the installed packages."""
    libraries = [f"{sys.base_prefix}/{name}" for name in ("lib", "lib64")]
    paths = [_interpreter(), *libraries, "/usr/lib", "/usr/lib64", "/lib", "/lib64"]
    real = list(dict.fromkeys(os.path.realpath(path) for path in paths if Path(path).exists()))
    readable = [path for path in real if not any(Path(other) in Path(path).parents for other in real)]
    standard = sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix, "base": sys.base_prefix})
    packages = [Path(standard, name) for name in ("site-packages", "dist-packages")]
    packages += [Path("/usr/lib/python3/dist-packages")]
    return readable, [str(path) for path in packages if path.is_dir()]
