"""A request on standard input -> one Python program, run behind walls that the kernel keeps, and how it ended.

Started by `sandbox` as a script of its own (`python -I -S`), with an empty environment and three descriptors. It
imports the standard library only, asks the kernel through ctypes, and needs neither root nor a dependency.

    namespaces   own user, mount, process, network and IPC namespaces: a root of read-only interpreter and libraries,
                 one small tmpfs to write in, no /proc, no interface, nobody else's processes; then system calls
                 filtered. Process 1 of the namespace waits; when it goes, the kernel ends whatever is left.
    landlock     for kernels that refuse user namespaces: reads of interpreter and libraries only, nothing to write
                 in, no child processes, no signals; system calls filtered.
    limits-only  resource limits and nothing else. Not a wall.

Invariant: a wall that cannot be had is said on the status pipe before a line of the program runs. It does not know
what the program is for.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

if __package__:
    from marft_bridge.rewards.call_filter import (
        CAPSET,
        NEW_NAMESPACES,
        PIVOT_ROOT,
        Refusal,
        asked,
        column_of_machine,
        filter_calls,
        libc,
        no_new_privileges,
    )
else:  # a script of its own, for which the project is not there
    sys.path.insert(0, str(Path(__file__).parent))
    from call_filter import (  # type: ignore[import-not-found, no-redef]
        CAPSET,
        NEW_NAMESPACES,
        PIVOT_ROOT,
        Refusal,
        asked,
        column_of_machine,
        filter_calls,
        libc,
        no_new_privileges,
    )

    del sys.path[0]  # files of that folder would stand before modules of the standard library

NOBODY = 65534
BOX = "/box"  # the program's own folder, in its own root
_STATUS = 9  # the descriptor on which the end is told; no other is higher
_SAYS = 3  # the descriptor on which a process says why its walls do not stand

# ── namespaces ────────────────────────────────────────────────────────────────────────────────────────────────────


def enter_namespaces() -> None:
    """Goes on as the child of this process in namespaces of its own; the parent waits and takes its end as its own.

    A user may map nobody inside to itself outside, and nothing else. Root, which no limit of processes binds, builds
    the walls as itself and then becomes nobody outside as well.
    """
    uid, gid = os.geteuid(), os.getegid()
    ids = [f"0 0 1\n{NOBODY} {NOBODY} 1"] * 2 if uid == 0 else [f"{NOBODY} {uid} 1", f"{NOBODY} {gid} 1"]
    ready, mapped = os.pipe(), os.pipe()
    pid = os.fork()
    if pid:
        os.close(ready[1])
        os.close(mapped[0])
        if os.read(ready[0], 1):
            with suppress(OSError):  # the child finds out, and says so
                Path(f"/proc/{pid}/setgroups").write_text("deny", encoding="ascii")
                for name, lines in zip(("uid_map", "gid_map"), ids, strict=True):
                    Path(f"/proc/{pid}/{name}").write_text(lines, encoding="ascii")
            os.write(mapped[1], b"m")
        _wait_and_exit(pid, signal.SIGTERM)
    _die_with_parent()
    if os.geteuid() == 0:
        with suppress(OSError):
            os.setgroups([])
    asked("user namespaces (unshare)", libc.unshare(NEW_NAMESPACES))
    _die_with_parent()  # a change of user or capabilities forgets it
    os.write(ready[1], b"r")
    os.read(mapped[0], 1)
    for end in (*ready, *mapped):
        os.close(end)


def _wait_and_exit(pid: int, when_told: signal.Signals) -> None:
    """Holds no descriptor. Told to end (SIGTERM), it ends the child and still waits for it.

    The first process of a namespace has ended when everything in the namespace has: so has, then, this one.
    """
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, when_told))
    os.closerange(0, 256)
    os.waitpid(pid, 0)
    os._exit(0)


def _die_with_parent() -> None:
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)


def build_root(over: str, readable: list[str], hidden: list[str], box_bytes: int) -> None:
    """This process's new root, mounted over the folder `over`: `readable` read-only, devices, and the box."""
    _mount(None, "/", None, 0x4000 | 0x40000)  # recursive, private: nothing here reaches the rest of the machine
    _mount("tmpfs", over, "tmpfs", 0x2 | 0x4, "size=1m,mode=0755")
    for path in (*readable, "/dev/null", "/dev/zero", "/dev/urandom"):
        place = Path(over + path)
        place.parent.mkdir(parents=True, exist_ok=True)
        if Path(path).is_dir():
            place.mkdir(exist_ok=True)
        else:
            place.touch()
        _mount(path, str(place), None, 0x1000 | 0x4000)
        _read_only(str(place), device=path.startswith("/dev/"))
    for path in hidden:  # installed packages: the program sees the standard library
        _mount("tmpfs", over + path, "tmpfs", 0x1 | 0x2 | 0x4, "size=4k")
    for link in ("/lib", "/lib64"):
        if Path(link).is_symlink():
            Path(over + link).symlink_to(Path(link).readlink())
    Path(over + BOX).mkdir()
    _mount("tmpfs", over + BOX, "tmpfs", 0x2 | 0x4, f"size={box_bytes},nr_inodes=4096,mode=0777")
    os.chdir(over)
    asked("pivot_root", libc.syscall(PIVOT_ROOT[column_of_machine()[0]], b".", b"."))
    asked("leaving the old root", libc.umount2(b".", 2))
    asked("a read-only root", _set_attributes("/", 0x1 | 0x2 | 0x4, recursive=False))
    os.chdir(BOX)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    asked(f"mounting {target}", libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]))


def _read_only(path: str, *, device: bool) -> None:
    asked(f"a read-only {path}", _set_attributes(path, 0x1 | 0x2 | (0 if device else 0x4), recursive=True))


def _set_attributes(path: str, attributes: int, *, recursive: bool) -> int:
    wanted = struct.pack("QQQQ", attributes, 0, 0, 0)
    return int(libc.syscall(442, -100, path.encode(), 0x8000 if recursive else 0, wanted, ctypes.c_size_t(32)))


# ── Landlock ──────────────────────────────────────────────────────────────────────────────────────────────────────


def enter_landlock(readable: list[str], hidden: list[str]) -> None:
    """From here on this process opens `readable` less `hidden` for reading, and nothing else."""
    version = int(libc.syscall(444, None, ctypes.c_size_t(0), 1))
    asked("Landlock", version)
    # Versions: 2 moves between folders, 3 truncation, 4 TCP, 5 ioctls of devices, 6 abstract sockets and signals.
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    attributes = struct.pack("QQQ", handled, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = asked("Landlock", int(libc.syscall(444, attributes, ctypes.c_size_t(size), 0)))
    read_file, read_folder = 0x4, 0x8
    for path in readable:
        # Reading below a folder includes what is below that again: a folder with something hidden opens by its parts.
        for part, access in _parts(Path(path), {Path(name) for name in hidden}):
            _allow(rules, part, access & (read_file | read_folder) if part.is_dir() else read_file)
    _allow(rules, Path("/dev/null"), read_file)
    _allow(rules, Path("/dev/urandom"), read_file)
    no_new_privileges()
    asked("Landlock", int(libc.syscall(446, rules, 0)))
    os.close(rules)


def _parts(path: Path, hidden: set[Path]) -> list[tuple[Path, int]]:
    if path in hidden:
        return []
    if not any(path in name.parents for name in hidden):
        return [(path, 0xC)]
    return [(path, 0x8), *(pair for part in sorted(path.iterdir()) for pair in _parts(part, hidden))]


def _allow(rules: int, path: Path, access: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what cannot be opened stays closed
    asked(f"Landlock for {path}", int(libc.syscall(445, rules, 1, struct.pack("<Qi", access, place), 0)))
    os.close(place)


# ── limits ──


def set_limits(limits: dict[str, int], isolation: str) -> None:
    """Sets them soft and hard, so that they cannot be raised."""
    wanted = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_CORE: 0,
    }
    if isolation == "namespaces":  # counted inside; elsewhere it would count everything that the user runs
        wanted[resource.RLIMIT_NPROC] = limits["processes"] + limits["waiting"]
    for which, most in wanted.items():
        resource.setrlimit(which, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))  # a signal that tells, then the end


# ── the program ───────────────────────────────────────────────────────────────────────────────────────────────────


def run_program(program: str, box: str) -> int:
    """Runs it as __main__; its exit status. 1 with a traceback on standard error if it raised."""
    os.environ.clear()
    os.environ.update(HOME=box, TMPDIR=box, LANG="C.UTF-8")
    sys.argv, sys.path[:] = ["program"], [path for path in sys.path if path != str(Path(__file__).parent)]
    try:
        exec(compile(program, "program", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})  # noqa: S102
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
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
    """Descriptor 0: the request; 1 and 2: the program's output; the number in argv: where the end is told."""
    status = os.dup2(int(sys.argv[1]), _STATUS)
    if int(sys.argv[1]) != _STATUS:
        os.close(int(sys.argv[1]))
    request = json.loads(sys.stdin.buffer.read())
    isolation, limits = request["isolation"], request["limits"]
    limits["waiting"] = 1 if os.geteuid() == 0 else 2  # processes of this file that count as the program's
    _die_with_parent()
    try:
        if isolation == "namespaces":
            enter_namespaces()
            build_root(request["box"], request["readable"], request["hidden"], limits["box_bytes"])
        else:
            os.chdir(request["box"])
        told = _run_and_wait(request)
    except (Refusal, OSError) as refusal:
        told = {"refused": " ".join(str(refusal).split())}
    with suppress(OSError):
        os.write(status, json.dumps(told).encode())
    os._exit(0)


def _run_and_wait(request: dict[str, Any]) -> dict[str, Any]:
    """Forks what waits (process 1 of a new namespace) and below it what runs; only the first can tell the end."""
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
    libc.prctl(4, 0, 0, 0, 0)  # not dumpable: what runs below cannot look in here
    refused, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        _confined(request, says)
    if isolation != "namespaces":
        signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGKILL))
    os.close(says)
    with os.fdopen(refused, "rb") as pipe:
        why = pipe.read()  # ends when the walls stand, since the program is run without this descriptor
    if why:
        os.waitpid(pid, 0)
        raise Refusal(why.decode(errors="replace"))
    os.write(_STATUS, b'{"walls": "stand"}\n')
    os.closerange(0, 3)
    _, how, used = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(how)
    return {"status": code, "cpu_s": used.ru_utime + used.ru_stime}


def _drop_capabilities() -> None:
    """Also inside a namespace, where a change of user does not take them away."""
    none = struct.pack("IIIIII", 0, 0, 0, 0, 0, 0)
    asked("no capabilities", libc.syscall(CAPSET[column_of_machine()[0]], struct.pack("Ii", 0x20080522, 0), none))


def _confined(request: dict[str, Any], says: int) -> None:
    isolation = request["isolation"]
    box = BOX if isolation == "namespaces" else request["box"]
    try:
        _die_with_parent()
        if isolation == "namespaces":
            os.setsid()  # else a signal to its own group would reach the launcher
        stdin = os.memfd_create("stdin")
        with os.fdopen(stdin, "wb", closefd=False) as file:
            file.write(request["stdin"].encode())
        os.lseek(stdin, 0, os.SEEK_SET)
        os.dup2(stdin, 0)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - the program's own
        if says != _SAYS:
            says = os.dup2(says, _SAYS)
        os.closerange(_SAYS + 1, _STATUS + 8)
        if isolation == "landlock":
            enter_landlock(request["readable"], request["hidden"])
        set_limits(request["limits"], isolation)
        if isolation != "limits-only":
            filter_calls(alone=isolation == "landlock")
    except (Refusal, OSError, ValueError) as refusal:
        os.write(says, " ".join(str(refusal).split()).encode() or b"refused")
        os._exit(1)
    os.close(says)
    os._exit(run_program(request["program"], box))


if __name__ == "__main__":
    main()
