"""An untrusted Python program and its limits -> its output, and how it ended.

The program runs in a process of its own behind the strongest wall that this kernel gives without root: no network, no
files but the interpreter's and its own folder's, nobody else's processes, an empty environment, limits on processor
time, memory, files, processes and output. `confine` builds it; with `bubblewrap`, inside of namespaces and a root that
bwrap has made before, so that what gets through one of the two is held by the other. Invariants: when `run_in_sandbox`
returns, nothing that the program started is alive (except behind `limits-only`) and its folder is gone; a wall that the
kernel refuses is an error, never replaced by a weaker one.
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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from marft_bridge.common.errors import GraphError

Isolation = Literal["bubblewrap", "namespaces", "landlock", "limits-only"]
EndReason = Literal["finished", "exit-status", "wall-time", "cpu-time", "memory", "output", "signal"]

WALLS: tuple[Isolation, ...] = ("bubblewrap", "namespaces", "landlock")
"""The walls, the strongest first."""
_MB = 1 << 20
_CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_RUN_SLOTS = threading.BoundedSemaphore(_CPUS)  # more at a time would only exceed their wall time
_LAUNCHER = Path(__file__).resolve().with_name("confine.py")
_NOBODY = "65534"
_START_S = 30.0  # for interpreter and walls, on a busy machine
_KILL_GRACE_S = 5.0
_SYSTEM_PATH = "/usr/bin:/bin:/usr/local/bin:/run/current-system/sw/bin"  # not PATH, in which anything may lie


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
    refusals = []
    for wall in WALLS:
        if (refusal := wall_refusal(wall)) is None:
            return wall
        refusals.append(f"{wall}: {refusal}")
    raise GraphError(
        f"untrusted programs cannot be isolated from network and files here ({'; '.join(refusals)}); allow one of "
        f"them, or set isolation = 'limits-only' if you trust what the model writes"
    )


def wall_refusal(wall: Isolation) -> str | None:
    """Why a wall cannot be had on this machine; None where it holds.

    Raises:
        NotStarted: the machine is too busy to find out.
    """
    try:
        _probe(wall)
    except _RefusedWall as refusal:
        return str(refusal)
    return None


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


@dataclass(slots=True)
class _Box:
    """One process of `confine`, the pipes from it, and what came through them so far."""

    process: subprocess.Popen[bytes]
    report_fd: int
    outputs: dict[str, bytearray] = field(default_factory=lambda: {"stdout": bytearray(), "stderr": bytearray()})
    report: bytearray = field(default_factory=bytearray)
    stop_reason: EndReason | None = None  # set where it was stopped from outside
    is_open: bool = True  # whether anything can still come

    def stop(self, reason: EndReason) -> None:
        """Has the launcher end everything that it started."""
        if self.stop_reason is None:
            self.stop_reason = reason
            _terminate(self.process)

    def read_rest_of_report(self) -> None:
        """What the launcher wrote before it ended."""
        os.set_blocking(self.report_fd, False)
        with suppress(BlockingIOError):
            while chunk := os.read(self.report_fd, 1 << 16):
                self.report += chunk

    def report_values(self) -> dict[str, Any]:
        """The lines of the report as one mapping."""
        values: dict[str, Any] = {}
        for line in self.report.splitlines():
            values |= json.loads(line)
        return values


def _run(program: str, stdin: str, limits: Limits, wall: Isolation) -> ProgramEnd:
    return _run_boxes([{"entry": None, "program": program, "stdin": stdin}], limits, wall)


def run_answer_and_judge(
    answer_job: Mapping[str, Any], judge_job: Mapping[str, Any], limits: Limits, isolation: Isolation | None
) -> ProgramEnd:
    """Runs an answer's program in one sandbox and its tests in another, joined by two pipes and by nothing else.

    Args:
        answer_job, judge_job: what `main` of `answer_process` and of `judge_process` take.
        limits: of each of the two.

    Returns:
        How the judge ended, on whose standard error the verdicts are. The program is ended with it.

    Raises:
        GraphError, NotStarted: as `run_in_sandbox`.
    """
    wall = isolation or strongest_isolation()
    requests = [
        {"entry": "judge_process", "job": judge_job},
        {"entry": "answer_process", "job": answer_job},
    ]
    try:
        with _RUN_SLOTS:
            return _run_boxes(requests, limits, wall)
    except _RefusedWall as refusal:
        raise GraphError(f"untrusted programs cannot be run behind {wall!r} here: {refusal}") from None


def _run_boxes(requests: Sequence[Mapping[str, Any]], limits: Limits, wall: Isolation) -> ProgramEnd:
    """Runs the requests beside each other until the first of them ends: how that was. Two are joined by pipes."""
    start_s = time.monotonic()
    boxes: list[_Box] = []
    with ExitStack() as stack:
        pipes = [os.pipe(), os.pipe()] if len(requests) == 2 else []
        closing = stack.enter_context(ExitStack())  # of the ends that only the processes are to hold
        for pipe_end in [pipe_end for pipe in pipes for pipe_end in pipe]:
            closing.callback(os.close, pipe_end)
        for number, request in enumerate(requests):
            # The first reads what the second writes, and the other way round.
            channel = [pipes[number][0], pipes[1 - number][1]] if pipes else []
            boxes.append(_start_box(request, channel, limits, wall=wall, stack=stack))
        closing.close()
        _exchange(boxes, limits)
        for box in boxes[1:]:
            _terminate(box.process)
        for box in boxes:
            _end_process(box.process)
        for box in boxes[1:]:
            box.read_rest_of_report()
            _refuse_unstarted(box)
    return _box_to_end(boxes[0], time.monotonic() - start_s, limits=limits, wall=wall)


def _start_box(
    request: Mapping[str, Any], channel: Sequence[int], limits: Limits, *, wall: Isolation, stack: ExitStack
) -> _Box:
    """Starts one process and gives it its request; whatever happens, the stack ends it and removes its folder."""
    readable, hidden = _interpreter_files()
    folder = tempfile.mkdtemp(prefix="marft-box-")
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    whole_request = {
        **request,
        "isolation": "namespaces" if wall == "bubblewrap" else wall,
        "box": folder,
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
    stack.callback(os.close, report_read_fd)
    passed_fds = [report_write_fd, *channel]
    try:
        process = subprocess.Popen(
            [
                *(_bubblewrap_command(folder) if wall == "bubblewrap" else ()),
                *(_interpreter_path(), "-I", "-S", "-B", str(_LAUNCHER)),
                *map(str, passed_fds),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"LANG": "C.UTF-8"},
            cwd="/",
            pass_fds=passed_fds,
            start_new_session=True,
        )
    finally:
        os.close(report_write_fd)
    stack.callback(_end_process, process)
    box = _Box(process, report_read_fd)
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(whole_request).encode())  # the launcher reads all of it before anything else
        process.stdin.close()
    except BrokenPipeError:  # it has ended, and what it said is in the pipe
        box.is_open = False
        assert process.stderr is not None
        os.set_blocking(process.stderr.fileno(), False)
        box.outputs["stderr"] += process.stderr.read() or b""
    return box


def _exchange(boxes: Sequence[_Box], limits: Limits) -> None:
    """Reads until all pipes of the first box end, or one could not be started; stops what exceeds its limits."""
    with selectors.DefaultSelector() as open_pipes:
        for box in boxes:
            if not box.is_open:
                return
            assert box.process.stdout is not None
            assert box.process.stderr is not None
            open_pipes.register(box.process.stdout, selectors.EVENT_READ, (box, box.outputs["stdout"]))
            open_pipes.register(box.process.stderr, selectors.EVENT_READ, (box, box.outputs["stderr"]))
            open_pipes.register(box.report_fd, selectors.EVENT_READ, (box, box.report))
        deadline, have_started, is_over = time.monotonic() + _START_S, False, False
        while any(key.data[0] is boxes[0] for key in open_pipes.get_map().values()):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                if is_over:
                    return  # a process still holds a pipe after the stop: only without a wall
                deadline, is_over = time.monotonic() + _KILL_GRACE_S, True
                for box in boxes:
                    box.stop("wall-time")
                continue
            for key, _ in open_pipes.select(remaining_s):
                box, output = key.data
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    open_pipes.unregister(key.fileobj)
                elif box.stop_reason is None:
                    output += chunk
                if sum(map(len, box.outputs.values())) > limits.output_kb * 1024 and box.stop_reason is None:
                    box.stop("output")
                    if box is boxes[0]:
                        deadline, is_over = time.monotonic() + _KILL_GRACE_S, True
            if not have_started and not is_over and all(box.report for box in boxes):
                deadline, have_started = time.monotonic() + limits.wall_s, True  # not counting the start
            if any(b"refused" in box.report for box in boxes):
                return


def _terminate(process: subprocess.Popen[bytes]) -> None:
    """Has a launcher end what it started, and wait for that."""
    if _kill_namespace_of_bubblewrap(process):
        return
    with suppress(ProcessLookupError):  # not Popen.terminate, which may reap the process and so free its id
        os.kill(process.pid, signal.SIGTERM)


def _kill_namespace_of_bubblewrap(process: subprocess.Popen[bytes]) -> bool:
    """Kills the first process of the namespace that a bwrap made: False where there is none.

    The kernel then ends all others in it, and the first is seen to end when there are no others any more. A bwrap that
    is told to end itself does not wait for them.
    """
    command = process.args
    if not (isinstance(command, list) and command[0] == _bubblewrap_path()):
        return False
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    with suppress(OSError, ValueError):
        (child,) = children.read_text(encoding="ascii").split()
        pidfd = os.pidfd_open(int(child))
        try:
            if child in children.read_text(encoding="ascii").split():  # else the number may be another process's
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                return True
        finally:
            os.close(pidfd)
    return False


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """Waits for the launcher, which ends when everything that it started has ended. May be called again."""
    if process.returncode is not None:
        return
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
            with suppress(BrokenPipeError):
                pipe.close()


def _refuse_unstarted(box: _Box) -> None:
    report = box.report_values()
    if box.stop_reason == "wall-time" and "walls" not in report:
        raise NotStarted(f"the sandbox did not start in {_START_S:g} s")
    if "refused" in report:
        raise _RefusedWall(report["refused"])


def _box_to_end(box: _Box, wall_s: float, limits: Limits, wall: Isolation) -> ProgramEnd:
    report = box.report_values()
    _refuse_unstarted(box)
    stderr = box.outputs["stderr"].decode("utf-8", errors="replace")
    status: int | None = report.get("status")
    if box.stop_reason is None and "walls" not in report:
        raise _RefusedWall(f"the launcher ended without a word: {' '.join(stderr.split())[-300:]}")
    end = ProgramEnd(
        reason="signal",
        status=status,
        stdout=box.outputs["stdout"][: limits.output_kb * 1024].decode("utf-8", errors="replace"),
        stderr=stderr[: limits.output_kb * 1024],
        wall_s=wall_s,
        cpu_s=report.get("cpu_s"),
        isolation=wall,
    )
    return _set_reason(end, box.stop_reason, limits)


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


def _bubblewrap_path() -> str | None:
    """Where bwrap is installed; None where it is not."""
    return shutil.which("bwrap", path=_SYSTEM_PATH)


def _bubblewrap_command(folder: str) -> list[str]:
    """What comes before a launcher's command to have it in namespaces and a read-only root of bwrap's.

    The launcher needs /proc to map its users, and the folder to build its own root over. Root stays root in it, since
    the kernel limits no process of root's: the launcher becomes nobody, as it does without bwrap. Raises _RefusedWall.
    """
    path = _bubblewrap_path()
    if path is None:
        raise _RefusedWall("bubblewrap (the program bwrap) is not installed")
    readable, hidden = _interpreter_files()
    links = [(str(Path(link).readlink()), link) for link in ("/lib", "/lib64") if Path(link).is_symlink()]
    own_folder = str(_LAUNCHER.parent)
    return [
        *(path, "--die-with-parent", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        "--unshare-cgroup-try",
        *(() if os.geteuid() == 0 else ("--unshare-user", "--uid", _NOBODY, "--gid", _NOBODY)),
        *(part for name in readable for part in ("--ro-bind", name, name)),
        *(part for target, link in links for part in ("--symlink", target, link)),
        *(part for name in hidden for part in ("--tmpfs", name)),
        *("--ro-bind", own_folder, own_folder),
        *(part for name in hidden for part in ("--remount-ro", name)),
        *("--proc", "/proc", "--dev", "/dev", "--dir", folder, "--chdir", "/", "--remount-ro", "/", "--"),
    ]


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
