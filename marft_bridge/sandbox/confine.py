"""A request on standard input -> one Python program, run behind walls that the kernel enforces, and how it ended.

The program is source text, or one of `ENTRIES` with a job, which speaks over two pipes with another such process.

Started by `programs` as a script of its own (`python -I -S`), with an almost empty environment and four descriptors. It
imports the standard library only, calls the kernel through ctypes, and needs neither root nor a dependency.

    namespaces   own user, mount, process, network and IPC namespaces: a root of read-only interpreter and libraries,
                 one small tmpfs to write in, no /proc, no interface, nobody else's processes; then system calls
                 filtered. Process 1 of the namespace waits; when it ends, the kernel ends whatever is left.
    landlock     for kernels that refuse user namespaces: reads of interpreter and libraries only, nothing to write
                 in, no child processes, no signals; system calls filtered.
    limits-only  resource limits and nothing else. Not a wall.

Invariant: a wall that the kernel refuses is reported on the report pipe before a line of the program runs.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import json
import os
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

if __package__:
    from marft_bridge.sandbox.call_filter import (
        CAPSET,
        NEW_NAMESPACES,
        PIVOT_ROOT,
        Refusal,
        column_of_machine,
        filter_calls,
        libc,
        require_success,
        set_no_new_privileges,
    )
else:  # run as a script, without the project on the path
    sys.path.insert(0, str(Path(__file__).parent))
    from call_filter import (  # type: ignore[import-not-found, no-redef]
        CAPSET,
        NEW_NAMESPACES,
        PIVOT_ROOT,
        Refusal,
        column_of_machine,
        filter_calls,
        libc,
        require_success,
        set_no_new_privileges,
    )

    del sys.path[0]  # else files of that folder would shadow modules of the standard library

NOBODY = 65534
BOX = "/box"  # the program's own folder, in its own root
ENTRIES = ("answer_process", "judge_process")
"""Modules beside this one that may be run in place of a source text."""
_REPORT_FD = 9  # the descriptor of the report on how the program ended
_CHANNEL_FDS = (10, 11)  # what an entry reads from and writes to; no other descriptor is higher
_REASON_FD = 3  # the descriptor on which a process gives the reason why its walls do not stand

# ── namespaces ────────────────────────────────────────────────────────────────────────────────────────────────────


def enter_namespaces() -> None:
    """Continues as a child of this process in namespaces of its own; the parent waits for the child and ends with it.

    A user may map `nobody` inside to itself outside, and nothing else. Root, for whom no limit of processes holds,
    builds the walls as itself and then becomes `nobody` outside as well.
    """
    uid, gid = os.geteuid(), os.getegid()
    ids = [f"0 0 1\n{NOBODY} {NOBODY} 1"] * 2 if uid == 0 else [f"{NOBODY} {uid} 1", f"{NOBODY} {gid} 1"]
    ready_pipe, mapped_pipe = os.pipe(), os.pipe()
    pid = os.fork()
    if pid:
        os.close(ready_pipe[1])
        os.close(mapped_pipe[0])
        if os.read(ready_pipe[0], 1):
            with suppress(OSError):  # the child then fails, and reports it
                Path(f"/proc/{pid}/setgroups").write_text("deny", encoding="ascii")
                for name, lines in zip(("uid_map", "gid_map"), ids, strict=True):
                    Path(f"/proc/{pid}/{name}").write_text(lines, encoding="ascii")
            os.write(mapped_pipe[1], b"m")
        _wait_and_exit(pid, signal.SIGTERM)
    _die_with_parent()
    if os.geteuid() == 0:
        with suppress(OSError):
            os.setgroups([])
    require_success("user namespaces (unshare)", libc.unshare(NEW_NAMESPACES))
    _die_with_parent()  # again: a change of user or capabilities resets it
    os.write(ready_pipe[1], b"r")
    os.read(mapped_pipe[0], 1)
    for fd in (*ready_pipe, *mapped_pipe):
        os.close(fd)


def _wait_and_exit(pid: int, child_signal: signal.Signals) -> None:
    """Closes all descriptors and waits for the child; on SIGTERM it sends the child `child_signal` and still waits.

    The first process of a namespace ends last in it, so when this process has ended, everything in the namespace has.
    """
    _hand_on_sigterm(pid, child_signal)
    os.closerange(0, 256)
    os.waitpid(pid, 0)
    os._exit(0)


def _hand_on_sigterm(pid: int, child_signal: signal.Signals) -> None:
    """From now on a SIGTERM is the child's `child_signal`; one that comes when the child has ended means nothing."""

    def hand_on(*_: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, child_signal)

    signal.signal(signal.SIGTERM, hand_on)


def _die_with_parent() -> None:
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def build_root(mount_point: str, readable: list[str], hidden: list[str], box_bytes: int) -> None:
    """Builds this process's new root over the folder `mount_point`: `readable` read-only, devices, and the box."""
    # mount(2): 0x1 read-only, 0x2 no set-user-ID, 0x4 no devices, 0x1000 bind, 0x4000 recursive, 0x40000 private.
    _mount(None, "/", None, flags=0x4000 | 0x40000)  # nothing that is mounted here reaches the rest of the machine
    _mount("tmpfs", mount_point, "tmpfs", flags=0x2 | 0x4, data="size=1m,mode=0755")
    for path in (*readable, "/dev/null", "/dev/zero", "/dev/urandom"):
        target = Path(mount_point + path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if Path(path).is_dir():
            target.mkdir(exist_ok=True)
        else:
            target.touch()
        _mount(path, str(target), None, flags=0x1000 | 0x4000)
        _make_read_only(str(target), device=path.startswith("/dev/"))
    for path in hidden:  # installed packages: the program sees the standard library
        _mount("tmpfs", mount_point + path, "tmpfs", flags=0x1 | 0x2 | 0x4, data="size=4k")
    for link in ("/lib", "/lib64"):
        if Path(link).is_symlink():
            Path(mount_point + link).symlink_to(Path(link).readlink())
    Path(mount_point + BOX).mkdir()
    _mount("tmpfs", mount_point + BOX, "tmpfs", flags=0x2 | 0x4, data=f"size={box_bytes},nr_inodes=4096,mode=0777")
    os.chdir(mount_point)
    require_success("pivot_root", libc.syscall(PIVOT_ROOT[column_of_machine()[0]], b".", b"."))
    require_success("leaving the old root", libc.umount2(b".", 2))
    require_success("a read-only root", _set_attributes("/", 0x1 | 0x2 | 0x4, recursive=False))
    os.chdir(BOX)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, data)]
    result = libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    require_success(f"mounting {target}", result)


def _make_read_only(path: str, *, device: bool) -> None:
    require_success(f"a read-only {path}", _set_attributes(path, 0x1 | 0x2 | (0 if device else 0x4), recursive=True))


def _set_attributes(path: str, attributes: int, *, recursive: bool) -> int:
    mount_attr = struct.pack("QQQQ", attributes, 0, 0, 0)
    # The call mount_setattr, relative to the working folder (-100), for all mounts below it too (0x8000).
    return int(libc.syscall(442, -100, path.encode(), 0x8000 if recursive else 0, mount_attr, ctypes.c_size_t(32)))


# ── Landlock ──────────────────────────────────────────────────────────────────────────────────────────────────────


def enter_landlock(readable: list[str], hidden: list[str]) -> None:
    """From here on this process opens `readable` without `hidden` for reading, and nothing else."""
    # Calls 444, 445 and 446: landlock_create_ruleset (asked for its version first), _add_rule and _restrict_self.
    version = int(libc.syscall(444, None, ctypes.c_size_t(0), 1))
    require_success("Landlock", version)
    # A version adds: 2 moves between folders, 3 truncation, 4 TCP, 5 ioctls of devices, 6 abstract sockets and signals.
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    attributes = struct.pack("QQQ", handled, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = require_success("Landlock", int(libc.syscall(444, attributes, ctypes.c_size_t(size), 0)))
    read_file, read_folder = 0x4, 0x8
    for path in readable:
        # A rule for a folder covers everything below it, so a folder that contains a hidden one is opened part by part.
        for part, access in _split_readable(Path(path), {Path(name) for name in hidden}):
            _allow(rules, part, access & (read_file | read_folder) if part.is_dir() else read_file)
    _allow(rules, Path("/dev/null"), read_file)
    _allow(rules, Path("/dev/urandom"), read_file)
    set_no_new_privileges()
    require_success("Landlock", int(libc.syscall(446, rules, 0)))
    os.close(rules)


def _split_readable(path: Path, hidden: set[Path]) -> list[tuple[Path, int]]:
    if path in hidden:
        return []
    if not any(path in name.parents for name in hidden):
        return [(path, 0xC)]
    return [(path, 0x8), *(pair for part in sorted(path.iterdir()) for pair in _split_readable(part, hidden))]


def _allow(rules: int, path: Path, access: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what cannot be opened stays closed
    require_success(f"Landlock for {path}", int(libc.syscall(445, rules, 1, struct.pack("<Qi", access, fd), 0)))
    os.close(fd)


# ── limits ──


def set_limits(limits: dict[str, int], isolation: str) -> None:
    """Sets the resource limits, soft and hard, so that they cannot be raised."""
    rlimits = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_CORE: 0,
    }
    if isolation == "namespaces":  # counted inside; elsewhere it would count everything that the user runs
        rlimits[resource.RLIMIT_NPROC] = limits["processes"] + limits["waiting"]
    for rlimit, limit in rlimits.items():
        resource.setrlimit(rlimit, (limit, limit))
    # First SIGXCPU, which names the cause, then SIGKILL.
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))


# ── the program ───────────────────────────────────────────────────────────────────────────────────────────────────


def load_entry(name: str) -> Callable[[dict[str, Any]], None]:
    """The `main` of a module of `ENTRIES`; to be called before the walls hide this folder."""
    assert name in ENTRIES
    if __package__:
        module = importlib.import_module(f"marft_bridge.sandbox.{name}")
    else:
        sys.path.insert(0, str(Path(__file__).parent))
        module = importlib.import_module(name)
        del sys.path[0]
    entry: Callable[[dict[str, Any]], None] = module.main
    return entry


def source_to_entry(program: str) -> Callable[[], object]:
    """A function that runs the source as __main__."""
    return lambda: exec(  # noqa: S102
        compile(program, "program", "exec", dont_inherit=True), {"__name__": "__main__", "__builtins__": __builtins__}
    )


def run_program(entry: Callable[[], object], box: str) -> int:
    """Runs the program; returns its exit status, 1 with a traceback on standard error if it raised."""
    os.environ.clear()
    os.environ.update(HOME=box, TMPDIR=box, LANG="C.UTF-8")
    sys.argv, sys.path[:] = ["program"], [path for path in sys.path if path != str(Path(__file__).parent)]
    try:
        entry()
    except SystemExit as system_exit:
        code = system_exit.code
        status = code if isinstance(code, int) else 0 if code is None else 1
    except MemoryError:  # which leaves no memory for a traceback
        os.write(2, b"MemoryError\n")
        status = 1
    except BaseException:  # noqa: BLE001 - whatever it raises ends it
        traceback.print_exc()
        status = 1
    else:
        status = 0
    with suppress(Exception):
        sys.stdout.flush()
    with suppress(Exception):
        sys.stderr.flush()
    return status & 0xFF


def main() -> None:
    """Descriptor 0: the request; 1 and 2: the program's output; the numbers in argv: the report pipe, and an entry's
    two pipes to another process."""
    _move_descriptors([int(number) for number in sys.argv[1:]])
    report_fd = _REPORT_FD
    request = json.loads(sys.stdin.buffer.read())
    isolation, limits = request["isolation"], request["limits"]
    if request["entry"] is not None:
        request["run"] = partial(load_entry(request["entry"]), request["job"])
    else:
        request["run"] = source_to_entry(request["program"])
    limits["waiting"] = 1 if os.geteuid() == 0 else 2  # processes of this file that count as the program's
    _die_with_parent()
    try:
        if isolation == "namespaces":
            enter_namespaces()
            build_root(request["box"], request["readable"], request["hidden"], box_bytes=limits["box_bytes"])
        else:
            os.chdir(request["box"])
        report = _run_and_wait(request)
    except (Refusal, OSError) as refusal:
        report = {"refused": " ".join(str(refusal).split())}
    with suppress(OSError):
        os.write(report_fd, json.dumps(report).encode())
    os._exit(0)


def _move_descriptors(given_fds: list[int]) -> None:
    """Gives the descriptors the numbers `_REPORT_FD` and `_CHANNEL_FDS`, whatever numbers they have."""
    out_of_the_way = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(_CHANNEL_FDS) + 1) for fd in given_fds]
    for fd in given_fds:
        os.close(fd)
    for fd, number in zip(out_of_the_way, (_REPORT_FD, *_CHANNEL_FDS), strict=False):
        os.dup2(fd, number)
        os.close(fd)


def _run_and_wait(request: dict[str, Any]) -> dict[str, Any]:
    """Forks a process that waits (process 1 of a new namespace) and below it the program; only the first can report."""
    isolation = request["isolation"]
    if isolation == "namespaces":
        pid = os.fork()  # the first process of the new namespace
        if pid:
            _wait_and_exit(pid, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a first process without handlers cannot be signalled from inside
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    if isolation != "limits-only":
        _drop_capabilities()
        _die_with_parent()
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: the program cannot look into this process
    reason_read_fd, reason_write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        _run_confined(request, reason_write_fd)
    if isolation != "namespaces":
        _hand_on_sigterm(pid, signal.SIGKILL)
    os.close(reason_write_fd)
    with os.fdopen(reason_read_fd, "rb") as pipe:
        reason = pipe.read()  # ends when the walls stand, since the program is run without this descriptor
    if reason:
        os.waitpid(pid, 0)
        raise Refusal(reason.decode(errors="replace"))
    os.write(_REPORT_FD, b'{"walls": "stand"}\n')
    os.closerange(0, 3)
    os.closerange(_REPORT_FD + 1, max(_CHANNEL_FDS) + 1)
    _, wait_status, usage = os.wait4(pid, 0)
    return {"status": os.waitstatus_to_exitcode(wait_status), "cpu_s": usage.ru_utime + usage.ru_stime}


def _drop_capabilities() -> None:
    """Needed inside a namespace too, where a change of user does not drop them."""
    no_capabilities = struct.pack("IIIIII", 0, 0, 0, 0, 0, 0)
    header = struct.pack("Ii", 0x20080522, 0)  # version 3 of the call, this process
    require_success("no capabilities", libc.syscall(CAPSET[column_of_machine()[0]], header, no_capabilities))


def _run_confined(request: dict[str, Any], reason_fd: int) -> None:
    """Puts up the walls, then runs the program; the reason pipe closes between the two."""
    isolation = request["isolation"]
    box = BOX if isolation == "namespaces" else request["box"]
    try:
        _die_with_parent()
        if isolation == "namespaces":
            os.setsid()  # else a signal to its own group would reach the launcher
        if request["entry"] is not None:
            for fd, standard_fd in zip(_CHANNEL_FDS, (0, 1), strict=True):
                os.dup2(fd, standard_fd)
        else:
            stdin = os.memfd_create("stdin")
            with os.fdopen(stdin, "wb", closefd=False) as file:
                file.write(request["stdin"].encode())
            os.lseek(stdin, 0, os.SEEK_SET)
            os.dup2(stdin, 0)
            sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - the program's own
        if reason_fd != _REASON_FD:
            reason_fd = os.dup2(reason_fd, _REASON_FD)
        os.closerange(_REASON_FD + 1, _REPORT_FD + 8)
        if isolation == "landlock":
            enter_landlock(request["readable"], request["hidden"])
        set_limits(request["limits"], isolation)
        if isolation != "limits-only":
            filter_calls(alone=isolation == "landlock")
    except (Refusal, OSError, ValueError) as refusal:
        os.write(reason_fd, " ".join(str(refusal).split()).encode() or b"refused")
        os._exit(1)
    os.close(reason_fd)
    os._exit(run_program(request["run"], box))


if __name__ == "__main__":
    main()
