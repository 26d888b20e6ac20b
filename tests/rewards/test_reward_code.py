"""Owns: untrusted programs and the reward that runs them (rewards/sandbox.py, confine.py, code.py).

- Each attack does no harm behind each wall that this kernel gives, and comes back soon with a reason.
- A wall that cannot be had is refused; limits alone only where they are asked for.
- A test counts when it ran to its end, however the answer leaves, prints or floods.
- Programs are found in answers; tests that do not parse are the task's fault.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.paths import ROOT

from marft_bridge.common.errors import GraphError
from marft_bridge.rewards.code import CODE, CodeOptions, answer_to_program, run_tests
from marft_bridge.rewards.contract import Absent, RunView
from marft_bridge.sandbox import programs as sandbox
from marft_bridge.sandbox.programs import Isolation, Limits, ProgramEnd, run_in_sandbox

WALLS: tuple[Isolation, ...] = ("bubblewrap", "namespaces", "landlock")
SOON_S = 12.0  # generous: other work shares these processors


def attack(program: str, wall: Isolation, stdin: str = "", **limits: Any) -> ProgramEnd:
    began = time.monotonic()
    end = run_in_sandbox(program, stdin, Limits(**({"wall_s": 6.0, "cpu_s": 3} | limits)), wall)
    assert time.monotonic() - began < SOON_S
    return end


def kernel_gives(wall: Isolation) -> bool:
    """Asked past the code under test, so that a wall that is broken is no wall that is missing."""
    if wall == "landlock":
        return int(ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1)) >= 1
    nested = ["unshare", "-r", "-m", "-n", "-p", "-f", "true"]
    if wall == "bubblewrap":  # and within it what our own walls need
        outer = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
        return shutil.which("bwrap") is not None and subprocess.run([*outer, *nested], check=False).returncode == 0
    return subprocess.run(nested, check=False).returncode == 0


@pytest.fixture(params=WALLS)
def wall(request: pytest.FixtureRequest) -> Isolation:
    """Every wall of this kernel. One that it does not give is refused."""
    if not kernel_gives(request.param):
        with pytest.raises(GraphError, match=f"cannot be run behind '{request.param}'"):
            run_in_sandbox("", isolation=request.param)
        pytest.skip(f"this kernel gives no {request.param}")
    return request.param  # type: ignore[no-any-return]


def processes_with(word: str) -> list[int]:
    """Live processes whose command line holds `word`, in every namespace below this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if word.encode() in line:
                found.append(int(entry.name))
    return found


def test_a_program_gets_its_input_and_gives_its_output_and_status(wall: Isolation) -> None:
    end = attack("import sys; print(input()[::-1]); print('said', file=sys.stderr); sys.exit(7)", wall, "abc\n")
    assert (end.stdout, end.stderr, end.status, end.reason) == ("cba\n", "said\n", 7, "exit-status")
    assert attack("import json, re, math, threading, subprocess, asyncio, sqlite3", wall).reason == "finished"


def test_a_program_may_use_threads_and_an_event_loop(wall: Isolation) -> None:
    program = """
import asyncio, threading
t = threading.Thread(target=print, args=("thread",)); t.start(); t.join()
async def f(): await asyncio.sleep(0.01); return "loop"
print(asyncio.run(f()))
"""
    assert attack(program, wall).stdout == "thread\nloop\n"


@pytest.mark.slow
def test_an_endless_loop_is_ended_by_its_processor_time(wall: Isolation) -> None:
    end = attack("while True: pass", wall, cpu_s=1, wall_s=11.0)
    assert end.reason == "cpu-time"


@pytest.mark.slow
def test_endless_sleep_is_ended_by_the_clock(wall: Isolation) -> None:
    assert attack("import time; time.sleep(1e6)", wall, wall_s=1.0).reason == "wall-time"
    ignoring = "import signal, time\nfor n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n  except: pass\n"
    assert attack(ignoring + "time.sleep(1e6)", wall, wall_s=1.0).reason == "wall-time"


def test_a_fork_bomb_stays_within_its_processes(wall: Isolation) -> None:
    bomb = """
import os, time
made = 0
for _ in range(200):
    try:
        if os.fork() == 0: time.sleep(30)
        made += 1
    except OSError: break
print(made, flush=True)
"""
    end = attack(bomb, wall, processes=4, wall_s=4.0)
    assert end.reason == "finished"
    assert int(end.stdout) == (0 if wall == "landlock" else 3)
    assert attack("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", wall, wall_s=1.5).reason in {
        "wall-time",
        "cpu-time",
    }


def test_huge_output_is_cut_and_the_program_ended(wall: Isolation) -> None:
    end = attack("while True: print('x' * 65536)", wall, output_kb=64)
    assert end.reason == "output"
    assert len(end.stdout) <= 64 * 1024
    assert attack("import os\nwhile True: os.write(2, b'e' * 65536)", wall, output_kb=64).reason == "output"


def test_huge_memory_is_refused_to_the_program(wall: Isolation) -> None:
    assert attack("x = bytearray(4 << 30)", wall, memory_mb=256).reason == "memory"
    assert attack("x = []\nwhile True: x.append(bytearray(1 << 20))", wall, memory_mb=256).reason == "memory"
    assert attack("import os; os.memfd_create('m')", wall).last_error_line.startswith("PermissionError")


def test_a_huge_file_is_not_written(wall: Isolation) -> None:
    end = attack("f = open('f', 'wb')\nwhile True: f.write(bytes(1 << 20))", wall, folder_mb=2)
    assert end.status != 0
    many = "n = 0\nwhile n < 64:\n  open(str(n), 'wb').write(bytes(1 << 20)); n += 1"
    end = attack(many, wall, folder_mb=2)
    assert end.last_error_line.startswith(("OSError: [Errno 28]", "PermissionError"))


def test_the_network_is_out_of_reach(wall: Isolation, tmp_path: Path) -> None:
    with (
        socket.socket() as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        tcp.bind(("127.0.0.1", 0)), udp.bind(("127.0.0.1", 0))
        unix.bind(str(tmp_path / "s")), abstract.bind(f"\0marft-{os.getpid()}")
        for server in (tcp, unix, abstract):
            server.listen()
        for server in (tcp, udp, unix, abstract):
            server.setblocking(False)
        program = f"""
import socket
def tried(name, do):
    try: do(); print(name, "REACHED")
    except OSError as e: print(name, "held")
tried("tcp", lambda: socket.create_connection(("127.0.0.1", {tcp.getsockname()[1]}), 1))
tried("udp", lambda: socket.socket(2, 2).sendto(b"x", ("127.0.0.1", {udp.getsockname()[1]})))
tried("unix", lambda: socket.socket(1).connect({str(tmp_path / "s")!r}))
tried("abstract", lambda: socket.socket(1).connect("\\0marft-{os.getpid()}"))
"""
        end = attack(program, wall)
        assert end.stdout == "tcp held\nudp held\nunix held\nabstract held\n"
        for server in (tcp, unix, abstract):
            with pytest.raises(BlockingIOError):
                server.accept()
        with pytest.raises(BlockingIOError):
            udp.recv(1)


def test_files_outside_are_neither_read_nor_written(wall: Isolation, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    secret.chmod(0o644)
    for directory in (tmp_path, *tmp_path.parents):
        if directory.stat().st_uid == os.getuid() and directory != Path("/"):
            assert os.access(directory, os.X_OK)
    program = f"""
import os, sys
def tried(name, do):
    try: do(); print(name, "REACHED")
    except OSError: print(name, "held")
s = {str(secret)!r}
tried("read", lambda: open(s).read())
tried("append", lambda: open(s, "a"))
tried("create", lambda: open(s + "2", "w"))
tried("remove", lambda: os.remove(s))
tried("rename", lambda: os.rename(s, s + "3"))
tried("link", lambda: os.link(s, "link"))
tried("chmod", lambda: os.chmod(s, 0))
tried("truncate", lambda: os.truncate(s, 0))
tried("touch", lambda: os.utime(s))
tried("list", lambda: os.listdir({str(tmp_path)!r}))
tried("passwords", lambda: open("/etc/passwd").read())
tried("library", lambda: open(os.__file__, "a"))
tried("library", lambda: os.chmod(os.__file__, 0))
try: os.symlink(s, "sym")
except OSError: pass
tried("symlink", lambda: open("sym").read())
"""
    end = attack(program, wall)
    lines = end.stdout.splitlines()
    assert len(lines) == 14, end.stderr
    assert [line for line in lines if "REACHED" in line] == []
    assert secret.read_text() == "the secret"
    assert secret.stat().st_mode & 0o777 == 0o644
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret"]


def test_its_own_folder_is_writable_where_there_is_one_and_gone_after(
    wall: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # other tests make such folders at the same time
    end = attack("open('f', 'w').write('mine'); print(open('f').read())", wall)
    assert end.stdout == ("" if wall == "landlock" else "mine\n")
    assert attack("import os\nprint(os.listdir('.'))", wall).stdout == ("" if wall == "landlock" else "[]\n")
    assert list(tmp_path.iterdir()) == []


def test_other_processes_cannot_be_signalled_traced_or_read(wall: Isolation) -> None:
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={"WORD": "private"})
    try:
        program = f"""
import ctypes, os, signal, resource
def tried(name, do):
    try: do(); print(name, "REACHED")
    except OSError: print(name, "held")
libc = ctypes.CDLL(None, use_errno=True)
def called(answer):
    if answer < 0: raise OSError(ctypes.get_errno(), "held")
for pid in ({victim.pid}, {os.getpid()}):
    tried("kill", lambda: os.kill(pid, signal.SIGKILL))
    tried("ptrace", lambda: called(libc.ptrace(16, pid, 0, 0)))
    tried("seize", lambda: called(libc.ptrace(0x4206, pid, 0, 0)))
    tried("environ", lambda: open(f"/proc/{{pid}}/environ").read())
    tried("memory", lambda: open(f"/proc/{{pid}}/mem", "rb").read(1))
    tried("prlimit", lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, 1)))
tried("launcher's environ", lambda: open(f"/proc/{{os.getppid()}}/environ").read())
tried("own /proc", lambda: open("/proc/self/environ").read())
tried("namespaces", lambda: called(libc.unshare(0x10000000)))
tried("mount", lambda: called(libc.mount(b"x", b"/", b"tmpfs", 0, None)))
"""
        end = attack(program, wall)
        assert [line for line in end.stdout.splitlines() if "REACHED" in line] == []
        assert len(end.stdout.splitlines()) == 16, end.stderr
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_killing_the_parent_and_everybody_ends_no_more_than_the_program(wall: Isolation) -> None:
    for shot in ("os.kill(os.getppid(), 9)", "os.kill(-1, 9)", "os.kill(0, 15)", "os.kill(1, 9)", "os.abort()"):
        end = attack(f"import os\ntry:\n    {shot}\nexcept OSError: pass\nprint('alive')", wall)
        assert end.reason in {"finished", "signal"}, shot


def test_an_end_without_a_word_is_an_end_of_the_program_and_no_missing_wall() -> None:
    """What the kernel kills for want of memory may be the launcher: no program is to end a run that way."""
    process = subprocess.Popen(["true"])
    box = sandbox._Box(process, -1, report=bytearray(b'{"walls": "stand"}\n'))
    end = sandbox._box_to_end(box, 1.0, Limits(), "namespaces")
    assert (end.reason, end.status) == ("signal", None)
    with pytest.raises(sandbox._RefusedWall, match="without a word"):
        sandbox._box_to_end(sandbox._Box(process, -1), 1.0, Limits(), "namespaces")
    process.wait()


def test_a_daemon_does_not_outlive_the_program(wall: Isolation) -> None:
    program = """
import os, subprocess, sys, time
print("began", flush=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 100)
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(77.125)"])
    os._exit(0)
time.sleep(0.5)
"""
    end = attack(f"import sys; sys.executable = {sandbox._interpreter_path()!r}\n" + program, wall, processes=6)
    assert end.stdout == "began\n"
    assert processes_with("time.sleep(77.125)") == []


def test_a_program_does_not_outlive_the_run_that_is_killed(wall: Isolation) -> None:
    program = "import time; time.sleep(99)"
    run = "import sys; from marft_bridge.sandbox.programs import *; run_in_sandbox(sys.argv[1], isolation=sys.argv[2])"
    process = subprocess.Popen([sys.executable, "-c", run, program, wall], cwd=ROOT)
    try:
        deadline = time.monotonic() + SOON_S
        count = {"bubblewrap": 6, "namespaces": 4, "landlock": 2}[wall]  # the program and what waits for it
        while len(launchers := processes_below(process.pid)[1:]) < count and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(launchers) == count
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + SOON_S  # of its own: a busy machine may have taken long to start it
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}/cwd").exists() for pid in launchers):
        time.sleep(0.05)
    assert [pid for pid in launchers if Path(f"/proc/{pid}/cwd").exists()] == []


def processes_below(root: int) -> list[int]:
    """A process and all that it started, as they are now."""
    below, pending = [], [root]
    while pending:
        below.append(pending.pop())
        children = Path(f"/proc/{below[-1]}/task/{below[-1]}/children")
        pending += map(int, children.read_text().split()) if children.exists() else []
    return below


@pytest.mark.skipif(not kernel_gives("bubblewrap"), reason="no bubblewrap here")
def test_bubblewrap_holds_what_would_get_through_our_own_walls(tmp_path: Path) -> None:
    """The same attacks as without a wall, below, with nothing but bwrap around them."""
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    box = tmp_path / "box"
    with socket.socket() as tcp:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        program = f"""
import os, socket
def tried(name, do):
    try: do(); print(name, "REACHED")
    except OSError: print(name, "held")
tried("network", lambda: socket.create_connection(("127.0.0.1", {tcp.getsockname()[1]}), 1))
tried("read", lambda: open({str(secret)!r}))
tried("write", lambda: open({str(box / "new")!r}, "w"))
tried("write", lambda: open("/new", "w"))
tried("process", lambda: os.kill({os.getpid()}, 0))
tried("packages", lambda: os.stat({pytest.__file__!r}))
"""
        command = [*sandbox._bubblewrap_command(str(box)), sandbox._interpreter_path(), "-I", "-S", "-c", program]
        process = subprocess.run(command, capture_output=True, text=True, check=True)
    names = ("network", "read", "write", "write", "process", "packages")
    assert process.stdout.splitlines() == [f"{name} held" for name in names]


def test_without_bubblewrap_the_other_walls_stand_and_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_bubblewrap_path", lambda: None)
    assert sandbox.wall_refusal("bubblewrap") == "bubblewrap (the program bwrap) is not installed"
    with pytest.raises(GraphError, match=r"cannot be run behind 'bubblewrap' here: bubblewrap .* is not installed"):
        run_in_sandbox("", isolation="bubblewrap")
    sandbox.strongest_isolation.cache_clear()
    try:
        given = [wall for wall in WALLS if wall != "bubblewrap" and kernel_gives(wall)]
        if given:
            assert sandbox.strongest_isolation() == given[0]
    finally:
        sandbox.strongest_isolation.cache_clear()


def test_a_bubblewrap_that_refuses_is_refused_with_its_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    bwrap.chmod(0o755)
    monkeypatch.setattr(sandbox, "_bubblewrap_path", lambda: str(bwrap))
    assert "bwrap: No permissions to create a new namespace" in str(sandbox.wall_refusal("bubblewrap"))


def test_the_program_starts_with_no_environment_no_descriptors_and_no_project(
    wall: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL_KEY", "very secret")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with (tmp_path / "open").open("w+") as held:
        os.set_inheritable(held.fileno(), True)
        program = """
import os
print(sorted(os.environ))
ends = []
for n in range(200):
    try: os.fstat(n); ends.append(n)
    except OSError: pass
print(ends)
for name in ("marft_bridge", "trace_store", "pydantic", "torch"):
    try: __import__(name); print(name, "REACHED")
    except ImportError: pass
"""
        assert attack(program, wall).stdout == "['HOME', 'LANG', 'TMPDIR']\n[0, 1, 2]\n"


def test_the_program_has_no_capability_and_a_filter_that_it_cannot_take_off(wall: Isolation) -> None:
    program = """
import ctypes, platform, struct
libc = ctypes.CDLL(None, use_errno=True)
sets = ctypes.create_string_buffer(24)
print(libc.syscall({"x86_64": 125, "aarch64": 90}[platform.machine()], struct.pack("Ii", 0x20080522, 0), sets))
print(sets.raw == bytes(24), libc.prctl(21, 0, 0, 0, 0), libc.prctl(39, 0, 0, 0, 0))
"""
    assert attack(program, wall).stdout == "0\nTrue 2 1\n"


def test_the_strongest_wall_of_the_kernel_is_taken() -> None:
    given = [wall for wall in WALLS if kernel_gives(wall)]
    if given:
        assert sandbox.strongest_isolation() == given[0]
    else:
        with pytest.raises(GraphError, match="cannot be isolated"):
            sandbox.strongest_isolation()


def test_a_wall_that_cannot_be_had_is_refused_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(wall: Isolation) -> None:
        raise sandbox._RefusedWall(f"no {wall} today")

    monkeypatch.setattr(sandbox, "_probe", refuses)
    sandbox.strongest_isolation.cache_clear()
    try:
        with pytest.raises(GraphError, match=r"no namespaces today.*no landlock today.*limits-only") as raised:
            CODE.check(CodeOptions(name="tests", answer_from="answer"))
        assert "\n" not in str(raised.value)
        CODE.check(CodeOptions(name="tests", answer_from="answer", isolation="limits-only"))
    finally:
        sandbox.strongest_isolation.cache_clear()


def test_a_wall_that_lets_a_program_through_is_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    through = ProgramEnd("finished", 0, "files held\n", "", 0.1, 0.1, "landlock")
    monkeypatch.setattr(sandbox, "_run", lambda *_, **__: through)
    with pytest.raises(sandbox._RefusedWall, match="tried to get through"):
        sandbox._probe("landlock")


def test_without_a_wall_the_same_attacks_get_through(tmp_path: Path) -> None:
    """What the attacks above are worth: they fail for the walls, not by themselves."""
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    with socket.socket() as tcp:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        program = f"""
import os, socket
socket.create_connection(("127.0.0.1", {tcp.getsockname()[1]}), 5)
print(open({str(secret)!r}).read())
os.kill({os.getpid()}, 0)
open({str(tmp_path / "written")!r}, "w").close()
print(len(open("/proc/{os.getpid()}/environ").read()) > 0)
"""
        assert attack(program, "limits-only").stdout == "the secret\nTrue\n"
        tcp.accept()[0].close()
    assert (tmp_path / "written").exists()


@pytest.mark.slow
def test_no_more_programs_run_at_once_than_this_process_has_processors() -> None:
    """Bound to one of them, two programs run one after the other; with two, they overlap."""
    both = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:int(sys.argv[1])])
from marft_bridge.sandbox.programs import run_in_sandbox
program = "import time; a = time.monotonic(); time.sleep(3); print(a, time.monotonic())"
with ThreadPoolExecutor(2) as pool:
    for end in pool.map(lambda _: run_in_sandbox(program, isolation="limits-only"), range(2)):
        print(end.stdout.strip())
"""

    def overlap(processors: int) -> bool:
        argv = [sys.executable, "-c", both, str(processors)]
        said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        (began, ended), (began_too, ended_too) = [map(float, line.split()) for line in said.splitlines()]
        return max(began, began_too) < min(ended, ended_too)

    assert not overlap(1)
    if len(os.sched_getaffinity(0)) > 1:
        assert overlap(2)


@pytest.mark.slow
def test_limits_only_limits() -> None:
    assert attack("while True: pass", "limits-only", cpu_s=1, wall_s=11.0).reason == "cpu-time"
    assert attack("x = bytearray(4 << 30)", "limits-only", memory_mb=256).reason == "memory"
    assert attack("import time; time.sleep(1e6)", "limits-only", wall_s=1.0).reason == "wall-time"


# ── the reward ────────────────────────────────────────────────────────────────────────────────────────────────────

ADD = "def add(a, b):\n    return a + b\n"


@pytest.mark.parametrize(
    ("answer", "block", "program"),
    [
        ("x = 1", "last", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nthen\n```py\nx = 2\n```\n", "last", "x = 2\n"),
        ("Here:\n```python\nx = 1\n```\nthen\n```py\nx = 2\n```\n", "first", "x = 1\n"),
        ("Here:\n```python\nx = 1\n```\nthen\n```\nx = 2\n```\n", "all", "x = 1\n\nx = 2\n"),
        ("```python\nx = 1\n```\nRun it:\n```bash\npython x.py\n```", "last", "x = 1\n"),
        ("```python\nx = 1\ny = ", "last", "x = 1\ny = "),
    ],
)
def test_the_program_of_an_answer(answer: str, block: Any, program: str) -> None:
    assert answer_to_program(answer, block) == program


def passed(program: str, tests: list[str], setup: str = "", **limits: Any) -> list[bool]:
    return run_tests(program, tests, setup, Limits(**({"wall_s": 5.0} | limits)), None)


def test_each_test_counts_for_itself() -> None:
    tests = ["assert add(1, 2) == 3", "assert add(1, 2) == 4", "undefined", "import math; assert add(0, math.pi) > 3"]
    assert passed(ADD, tests) == [True, False, False, True]
    assert passed("def add(a, b): return K", ["assert add(0, 0) == 5"], "K = 5") == [True]


@pytest.mark.slow
@pytest.mark.parametrize(
    "leaving",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "print('passed 0'); import os; os.write(1, b'passed 0'); os._exit(0)",
        "import os\nfor n in range(1, 20):\n  try: os.write(n, b'passed 0\\n')\n  except OSError: pass\nraise KeyError",
        "def add(a, b):\n  import os; os._exit(0)",
        "def add(a, b):\n  raise KeyboardInterrupt",
        "def add(a, b):\n  while True: pass",
        "def add(a, b):\n  import sys; sys.setrecursionlimit(10**9)\n  return add(a, b)",
        "this is no program",
        "\0",
        "\ud800",
        "x = " + "(" * 5000,
        "while True: print('passed 0' * 1000)",
    ],
)
def test_an_answer_that_leaves_prints_or_floods_passes_nothing(leaving: str) -> None:
    assert passed(leaving, ["assert add(1, 2) == 3"], wall_s=3.0, cpu_s=2) == [False]


@pytest.mark.slow
def test_what_passed_before_the_time_was_up_counts() -> None:
    program = ADD + "def forever():\n    while True: pass\n"
    assert passed(program, ["assert add(1, 1) == 2", "forever()", "assert add(1, 1) == 2"], cpu_s=1) == [
        True,
        False,
        False,
    ]


def test_tests_and_setup_that_cannot_be_run_are_the_tasks_fault() -> None:
    with pytest.raises(GraphError, match="tests cannot be run"):
        passed(ADD, ["assert add(1, 2) =="])
    with pytest.raises(GraphError, match="setup cannot be run: ZeroDivisionError"):
        passed(ADD, ["assert add(1, 2) == 3"], "1 / 0")


def earned(task: dict[str, Any], answer: Any, **options: Any) -> float:
    view = RunView(task={"id": "t"} | task, result={"answer": answer})
    (one,) = asyncio.run(CODE.compute(CodeOptions(name="tests", answer_from="answer", **options), view))
    assert one.level == "episode"
    return one.value


def test_the_reward_is_the_share_of_tests_or_all_of_them() -> None:
    tests = {"tests": ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(2, 2) == 5"]}
    answer = f"Of course:\n```python\n{ADD}```\n"
    assert earned(tests, answer) == pytest.approx(2 / 3)
    assert earned(tests, answer, value="all") == 0.0
    assert earned({"tests": tests["tests"][:2]}, answer, value="all") == 1.0
    assert earned(tests, None) == 0.0


def test_a_check_function_is_given_the_named_candidate() -> None:
    check = "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(-1, 1) == 0\n"
    assert earned({"tests": check, "entry_point": "add"}, ADD) == 1.0
    assert earned({"tests": check, "entry_point": "add"}, "def add(a, b): return 5") == 0.0
    with pytest.raises(GraphError, match="is no name"):
        earned({"tests": check, "entry_point": "__import__('os')"}, ADD)


def test_a_machine_too_busy_to_start_the_program_says_nothing_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    assert earned({"tests": ["assert add(1, 2) == 3"]}, ADD) == 1.0
    monkeypatch.setattr(sandbox, "_START_S", 0.0)
    with pytest.raises(Absent, match="did not start in 0 s"):
        earned({"tests": ["assert add(1, 2) == 3"]}, ADD)


@pytest.mark.parametrize("tests", [[], [1], {"a": 1}, None])
def test_tests_in_another_form_are_refused(tests: Any) -> None:
    with pytest.raises(GraphError, match="'tests' of task 't' is neither"):
        earned({"tests": tests}, ADD)


@pytest.mark.parametrize("answer", [3, None, [ADD], {"program": ADD}], ids=str)
def test_an_answer_that_is_no_text_is_a_wrong_answer(answer: Any) -> None:
    assert earned({"tests": ["pass"]}, answer) == 0.0


def test_options_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValidationError):
        CodeOptions(name="tests", answer_from="answer", isolation="none")  # type: ignore[arg-type]
