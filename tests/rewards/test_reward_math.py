"""Owns: mathematical equivalence as a reward (rewards/math.py, math_worker.py).

- Hand-checked pairs are equal or not; answers are found where the options say.
- No expression hangs, fills the memory, or runs anything; the next comparison works.
- It works outside the main thread, from many threads, and a worker is started once.
- What a worker runs is held by the kernel: no network, no child, no file written, memory limited.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.tiers import one_in

from marft_bridge.common.errors import GraphError
from marft_bridge.rewards import math as maths
from marft_bridge.rewards.contract import Absent, RunView
from marft_bridge.rewards.math import MATH, FindMode, MathOptions, Uncheckable, are_equal, text_to_expression


@pytest.fixture(scope="module", autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    MATH.check(MathOptions(name="right", answer_from="answer", expected_from="answer"))
    yield
    maths.close_workers()


def pids() -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if b"math_worker import main" in (entry / "cmdline").read_bytes() and _parent(entry) == os.getpid():
                    found.add(int(entry.name))
            except OSError:
                continue
    return found


def _parent(entry: Path) -> int:
    return int((entry / "stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(
    ("expected", "answer", "same"),
    [
        ("1/2", "0.5", True),
        ("1/2", r"\frac{1}{2}", True),
        ("0.5", "50%", True),
        ("1,234", "1234", True),
        ("42", "42.0", True),
        ("42", "43", False),
        ("-3", "3", False),
        ("2x+2", "2(x+1)", True),
        ("2x+2", "2(x+2)", False),
        ("x^2", "x**2", True),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        (r"\sin^2 x + \cos^2 x", "1", True),
        (r"\{1, 2\}", r"\{2, 1\}", True),
        ("(1, 2)", "(2, 1)", False),
        ("3", "x = 3", True),
        (r"\pi", "3.14", False),
        ("7", "seven apples of two kinds", False),
        ("$12$", "12", True),
    ],
)
def test_equality_is_mathematical(expected: str, answer: str, same: bool) -> None:
    assert are_equal(expected, answer, 30.0) is same


@pytest.mark.parametrize(
    ("text", "find", "expression"),
    [
        (r"so \boxed{1} and \boxed{\frac{1}{2}} it is, of 7", "auto", r"\frac{1}{2}"),
        (r"so \boxed{\frac{1}{2}}", "boxed", r"\frac{1}{2}"),
        ("no box: 7", "boxed", None),
        (r"\boxed{not closed", "boxed", None),
        (r"\boxed{}", "boxed", None),
        ("steps 1 2 3\n#### 42\n", "auto", "42"),
        ("#### 1\n#### 2", "hashes", "2"),
        ("it is 42", "hashes", None),
        ("first 3, then 1,234.50 dollars.", "auto", "1234.50"),
        ("from -3 to -1/2", "last_number", "-1/2"),
        ("2, 3, 4", "last_number", "4"),
        ("none at all", "auto", None),
        ("It is 1e3.", "auto", "1000"),
        ("about 2.5E-3", "auto", "0.0025"),
        ("about 3e+9999", "auto", r"3 \cdot 10^{9999}"),
        ("It is −5.", "auto", "-5"),
        ("x = - 5", "auto", "-5"),
        ("3-4 apples", "auto", "4"),
        ("on 2024-05-06", "last_number", "06"),
        ("  x + 1 ", "whole", "x + 1"),
    ],
)
def test_the_answer_is_found_where_the_options_say(text: str, find: FindMode, expression: str | None) -> None:
    assert text_to_expression(text, find) == expression


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 150_000,
        "\\boxed{" + "{" * 1_000_000,
        "1,111" * 200_000,
        "#" * 1_000_000,
        "-" * 1_000_000,
        "1/" * 500_000,
    ],
)
def test_finding_the_answer_in_a_megabyte_takes_no_time(text: str) -> None:
    began = time.monotonic()
    for find in ("auto", "boxed", "hashes", "last_number", "whole"):
        text_to_expression(text, find)  # type: ignore[arg-type]
    assert time.monotonic() - began < 5.0


HOSTILE = [
    "9**9**9**9",
    "9^{9^{9^{9}}}",
    "(10^9)!",
    "2^{2^{36}}",
    r"\binom{10^9}{5 \cdot 10^8}",
    r"\sum_{n=1}^{10^9} n^n",
    r"\prod_{n=1}^{10^9} n",
    "(" * 900 + "1" + ")" * 900,
    "{" * 1900,
    "-" * 1900 + "1",
    "^".join("9" * 900),
    r"\frac{" * 300,
    r"\def\a{\a\a}\a",
    "1e999999999",
    "\0\x01\ud800".encode("utf-8", "replace").decode(),
    "1" * 1_000_000,
    "x" * 1_000_000,
]


@pytest.mark.parametrize("hostile", one_in(4, {str(i): hostile for i, hostile in enumerate(HOSTILE)}))
def test_a_hostile_expression_is_not_equal_or_not_comparable_and_soon_over(hostile: str) -> None:
    began = time.monotonic()
    said = ""
    try:
        assert are_equal("1", hostile, 1.0) is False
    except Uncheckable as reason:
        said = str(reason)
    assert "\n" not in said
    assert hostile not in said
    assert time.monotonic() - began < 1.0 + 120.0  # the limit, and starting a worker on a machine that is very busy


def test_after_a_hostile_expression_the_next_one_is_compared() -> None:
    with pytest.raises(Uncheckable, match=r"not be compared in 0\.5 s"):
        are_equal("1", r"\prod_{n=1}^{10^9} n", 0.5)
    assert are_equal("1/2", "0.5", 30.0)


@pytest.mark.parametrize(
    "python",
    [
        "__import__('os').system('touch {}')",
        "eval(\"open('{}', 'w')\")",
        "().__class__.__bases__[0].__subclasses__()",
        "$__import__('pathlib').Path('{}').touch()$",
        '1 + exec(\'open("{}", "w")\')',
        r"\boxed{{__import__('os').system('touch {}')}}",
        "lambda: open('{}','w')",
    ],
)
def test_python_in_an_answer_is_not_run(python: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    with suppress(Uncheckable):
        assert are_equal("1", python.replace("{}", str(mark)), 5.0) is False
    assert not mark.exists()


def test_what_the_worker_runs_is_held_by_the_kernel(tmp_path: Path) -> None:
    program = f"""
import json, os, socket, sys
from marft_bridge.sandbox.worker_main import confine
held = {{}}
def tried(name, do):
    try: do(); held[name] = False
    except (OSError, MemoryError): held[name] = True
def all():
    tried("network", socket.socket)
    tried("child", os.fork)
    tried("write", lambda: open({str(tmp_path / "w")!r}, "w"))
    tried("signal", lambda: os.kill(os.getppid(), 0))
    tried("memory", lambda: bytearray(3 << 30))
    tried("program", lambda: os.execv("/bin/true", ["true"]))
confine(2048, [])
all()
print(json.dumps(held))
"""
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert json.loads(run.stdout) == dict.fromkeys(("network", "child", "write", "signal", "memory", "program"), True)
    are_equal("1/3", "2/6", 30.0)
    (worker, *_) = pids()
    status = Path(f"/proc/{worker}/status").read_text()
    assert "Seccomp:\t2" in status
    assert "NoNewPrivs:\t1" in status


def test_a_worker_sees_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    maths.close_workers()
    assert pids() == set()
    monkeypatch.setenv("MODEL_KEY", "very secret")
    assert are_equal("1/3", "2/6", 60.0)
    (worker,) = pids()
    try:
        environment = Path(f"/proc/{worker}/environ").read_bytes()
    except PermissionError:
        return
    assert b"very secret" not in environment


def test_workers_are_started_once_and_serve_every_thread() -> None:
    pairs = [(f"{n}/4", str(n / 4)) for n in range(1, 41)]
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda pair: are_equal(*pair, 60.0), pairs))
        workers = pids()
        assert 1 <= len(workers) <= 2
        assert not any(threads.map(lambda n: are_equal(f"{n}/7", f"{n}/8", 60.0), range(1, 41)))
    assert pids() == workers
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(are_equal("x+x", "2x", 60.0)))
    thread.start()
    thread.join()
    assert seen == [True]


def earned(expected: Any, answer: Any, **options: Any) -> float:
    view = RunView(task={"id": "t", "gold": expected}, result={"answer": answer})
    asked = MathOptions(name="right", answer_from="answer", expected_from="gold", **({"limit_s": 30.0} | options))
    (one,) = asyncio.run(MATH.compute(asked, view))
    assert one.level == "episode"
    return one.value


def test_the_reward_is_one_or_zero() -> None:
    assert earned("x #### 42", "I think it is 41, no: \\boxed{42.0}") == 1.0
    assert earned("42", "I think it is 41") == 0.0
    assert earned(42, "6 * 7 = 42") == 1.0
    assert earned("42", "I do not know") == 0.0
    assert earned("42", None) == 0.0
    assert earned("42", "the answer is 42", find="boxed") == 0.0
    assert earned(r"\boxed{\frac{3}{4}}", 0.75) == 1.0


def test_what_cannot_be_compared_is_absent_or_wrong_as_the_options_say() -> None:
    monster = r"\boxed{\prod_{n=1}^{10^9} n}"
    with pytest.raises(Absent, match=r"could not be compared in 0\.5 s"):
        earned("42", monster, limit_s=0.5)
    assert earned("42", monster, limit_s=0.5, uncheckable="wrong") == 0.0


def test_a_number_is_the_same_however_it_is_written() -> None:
    assert earned(0.00001, "\\boxed{0.00001}") == 1.0
    assert earned(1e-05, 1e-05) == 1.0
    assert earned(-5, 1e-05) == 0.0
    assert earned(3, "It is 1e3") == 0.0
    assert earned("1e3", "so 1,000") == 1.0
    assert earned("12000", "\\boxed{1, 2e3}") == 0.0  # a list of two
    assert earned("5", "9 - 4 = +5") == 1.0
    assert earned("5", "It is −5") == 0.0
    assert earned("−5", "It is \\boxed{-5}") == 1.0


def test_an_answer_of_another_form_is_a_wrong_answer() -> None:
    for answer in (None, ["42"], {"x": 42}):
        assert earned("42", answer) == 0.0


def test_what_is_no_expectation_is_refused() -> None:
    for nothing in (None, "", " ", [1]):
        with pytest.raises(GraphError, match="'gold' of task 't' is not an expression"):
            earned(nothing, "42")
