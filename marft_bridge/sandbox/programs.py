"""An untrusted Python program and its limits -> its output, and how it ended.

The program runs in a process of its own behind the strongest wall that this kernel gives without root (`confine`
builds it): no network, no files but the interpreter's and its own folder's, nobody else's processes, an empty
environment, limits on processor time, memory, files, processes and output. Invariants: when `run_in_sandbox` returns,
nothing that the program started is alive (except behind `limits-only`) and its folder is gone; a wall that the kernel
refuses is an error, never replaced by a weaker one.
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

from marft_bridge.common.errors import GraphError

Isolation = Literal["namespaces", "landlock", "limits-only"]
EndReason = Literal["finished", "exit-status", "wall-time", "cpu-time", "memory", "output", "signal"]

_MB = 1 << 20
_CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_RUN_SLOTS = threading.BoundedSemaphore(_CPUS)  # more at a time would only exceed their wall time
_START_S = 30.0  # for interpreter and walls, on a busy machine
_KILL_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use. Memory and processor time are per process: the total is `processes` times that."""

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_mb: int = 512  # address space of one process
    processes: int = 4  # threads count too; behind landlock there is one process, whose threads share its memory
    folder_mb: int = 8  # all files together; behind landlock none can be written
    open_files: int = 64
    output_kb: int = 256  # standard output and error together


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """How a program ended."""

    reason: EndReason
    status: int | None  # exit status, or -N for signal N; None when it was stopped from outside
    stdout: str
    stderr: str
    wall_s: float
    cpu_s: float | None  # of the program's own process; None when it was stopped from outside
    isolation: Isolation

    @property
    def last_error_line(self) -> str:
        """The last line on standard error, where Python names the exception; empty for none."""
        lines = self.stderr.strip().splitlines()
        return lines[-1].strip() if lines else ""


class NotStarted(Exception):  # noqa: N818 - of the machine, not of the program
    """The machine was too busy to start the program, so nothing is known about the program."""


class _RefusedWall(Exception):  # noqa: N818 - an answer of the kernel, not a fault
    """The kernel refuses this wall; the message is the reason."""


def run_in_sandbox(
    program: str, stdin: str = "", limits: Limits | None = None, isolation: Isolation | None = None
) -> ProgramEnd:
    """Runs Python source as a program. Blocks for the start and at most `wall_s` more; safe in any thread.

    Args:
        isolation: the wall; None for the strongest one of this machine.

    Raises:
        GraphError: the kernel refuses every wall, or the requested one; the message says what is missing.
        NotStarted: the machine is too busy.
    """
    wall = isolation or strongest_isolation()
    try:
        with _RUN_SLOTS:
            return _run(program, stdin, limits or Limits(), wall=wall)
    except _RefusedWall as refusal:
        raise GraphError(f"untrusted programs cannot be run behind {wall!r} here: {refusal}") from None


@functools.cache
def strongest_isolation() -> Isolation:
    """The strongest wall that holds on this machine, tested with a program that tries to get through.

    Raises:
        GraphError: no wall holds.
    """
    walls: tuple[Isolation, ...] = ("namespaces", "landlock")
    refusals = []
    for wall in walls:
        try:
            _probe(wall)
        except _RefusedWall as refusal:
            refusals.append(f"{wall}: {refusal}")
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
        end = _run(_PROBE, secret.name, Limits(), wall=wall)
    if end.stdout.split("\n") != ["network held", "files held", ""]:
        raise _RefusedWall(f"a program that tried to get through ended with {end.last_error_line or end.stdout!r}")


def _run(program: str, stdin: str, limits: Limits, wall: Isolation) -> ProgramEnd:
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
    report_read_fd, report_write_fd = os.pipe()
    try:
        start_s = time.monotonic()
        process = subprocess.Popen(
            [_interpreter_path(), "-I", "-S", "-B", str(Path(__file__).with_name("confine.py")), str(report_write_fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"LANG": "C.UTF-8"},
            cwd="/",
            pass_fds=(report_write_fd,),
            start_new_session=True,
        )
        os.close(report_write_fd)
        report_write_fd = -1
        try:
            outputs, stop_reason = _exchange(process, json.dumps(request).encode(), report_read_fd, limits=limits)
        finally:
            _end_process(process)
    finally:
        os.close(report_read_fd)
        if report_write_fd >= 0:
            os.close(report_write_fd)
        shutil.rmtree(box, ignore_errors=True)
    return _outputs_to_end(outputs, stop_reason, time.monotonic() - start_s, limits=limits, wall=wall)


def _exchange(
    process: subprocess.Popen[bytes], request: bytes, report_fd: int, limits: Limits
) -> tuple[dict[str, bytearray], EndReason | None]:
    """Sends the request and reads until all pipes end: their contents, and the reason where it stopped the program."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    outputs = {"stdout": bytearray(), "stderr": bytearray(), "report": bytearray()}
    try:
        process.stdin.write(request)  # the launcher reads all of it before anything else
        process.stdin.close()
    except BrokenPipeError:
        return outputs, None
    with selectors.DefaultSelector() as open_pipes:
        pipes = {"stdout": process.stdout.fileno(), "stderr": process.stderr.fileno(), "report": report_fd}
        for name, pipe in pipes.items():
            open_pipes.register(pipe, selectors.EVENT_READ, name)
        stop_reason: EndReason | None = None
        deadline, has_started = time.monotonic() + _START_S, False
        while open_pipes.get_map():
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                if stop_reason is not None:
                    break  # a process still holds a pipe after the stop: only without a wall
                stop_reason, deadline = "wall-time", time.monotonic() + _KILL_GRACE_S
                _terminate(process)
                continue
            for key, _ in open_pipes.select(remaining_s):
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    open_pipes.unregister(key.fd)
                elif stop_reason is None:
                    outputs[key.data] += chunk
            if outputs["report"] and not has_started and stop_reason is None:
                deadline, has_started = time.monotonic() + limits.wall_s, True  # not counting the start
            if stop_reason is None and len(outputs["stdout"]) + len(outputs["stderr"]) > limits.output_kb * 1024:
                stop_reason, deadline = "output", time.monotonic() + _KILL_GRACE_S
                _terminate(process)
    return outputs, stop_reason


def _terminate(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # not Popen.terminate, which may reap the process and so free its id
        os.kill(process.pid, signal.SIGTERM)


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """Waits for the launcher, which ends when everything that it started has ended."""
    with selectors.DefaultSelector() as selector:
        pidfd = os.pidfd_open(process.pid)
        selector.register(pidfd, selectors.EVENT_READ)
        if not selector.select(1.0):
            _terminate(process)
            selector.select(_KILL_GRACE_S)
        os.close(pidfd)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # before wait: until then its id cannot belong to another process
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _outputs_to_end(
    outputs: dict[str, bytearray], stop_reason: EndReason | None, wall_s: float, limits: Limits, wall: Isolation
) -> ProgramEnd:
    report: dict[str, Any] = {}
    for line in outputs["report"].splitlines():
        report |= json.loads(line)
    if stop_reason == "wall-time" and "walls" not in report:
        raise NotStarted(f"the sandbox did not start in {_START_S:g} s")
    if "refused" in report:
        raise _RefusedWall(report["refused"])
    stderr = outputs["stderr"].decode("utf-8", errors="replace")
    status: int | None = report.get("status")
    if stop_reason is None and "walls" not in report:
        raise _RefusedWall(f"the launcher ended without a word: {' '.join(stderr.split())[-300:]}")
    end = ProgramEnd(
        reason="signal",
        status=status,
        stdout=outputs["stdout"][: limits.output_kb * 1024].decode("utf-8", errors="replace"),
        stderr=stderr[: limits.output_kb * 1024],
        wall_s=wall_s,
        cpu_s=report.get("cpu_s"),
        isolation=wall,
    )
    return _set_reason(end, stop_reason, limits)


def _set_reason(end: ProgramEnd, stop_reason: EndReason | None, limits: Limits) -> ProgramEnd:
    if stop_reason is not None:
        return replace(end, reason=stop_reason)
    if end.status == 0:
        return replace(end, reason="finished")
    if end.last_error_line.startswith("MemoryError"):
        return replace(end, reason="memory")
    if end.status == -signal.SIGXCPU or (end.cpu_s or 0.0) >= limits.cpu_s:
        return replace(end, reason="cpu-time")
    return replace(end, reason="signal" if end.status is None or end.status < 0 else "exit-status")


def _interpreter_path() -> str:
    """The interpreter itself; for a virtual environment, the one that it was made from."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@functools.cache
def _interpreter_files() -> tuple[list[str], list[str]]:
    """(readable, hidden): interpreter, standard and system libraries; the installed packages among them."""
    libraries = [f"{sys.base_prefix}/{name}" for name in ("lib", "lib64")]
    paths = [_interpreter_path(), *libraries, "/usr/lib", "/usr/lib64", "/lib", "/lib64"]
    real = list(dict.fromkeys(os.path.realpath(path) for path in paths if Path(path).exists()))
    readable = [path for path in real if not any(Path(parent) in Path(path).parents for parent in real)]
    standard = sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix, "base": sys.base_prefix})
    packages = [Path(standard, name) for name in ("site-packages", "dist-packages")]
    packages += [Path("/usr/lib/python3/dist-packages")]
    return readable, [str(path) for path in packages if path.is_dir()]
