"""An answer with a mathematical expression in it, and the expected one -> 1.0 when they mean the same, else 0.0.

Equality is decided by math-verify and sympy in worker processes (`math_worker`) that are started once, reused, and
killed when a comparison takes too long. Invariant: no expression can hang, fill the memory of, or run code in the
process that asks, from whichever thread. It does not know how the answer came about.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import queue
import re
import selectors
import subprocess
import sys
import time
from typing import Any, Literal

from pydantic import Field

from marft_bridge.errors import GraphError
from marft_bridge.rewards.contract import Absent, Earned, Kind, RewardOptions, RunView

Find = Literal["auto", "boxed", "hashes", "last_number", "whole"]

MAX_EXPRESSION = 2_000  # characters
_START_S = 120.0  # loading sympy from a cold disk
_MEMORY_MB = 2_048  # address space of a worker, of which the libraries take about a third
_WORKERS = 2

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+(?:\.\d+)?)?|-?\.\d+")


class MathOptions(RewardOptions):
    """`kind = "math"`: whether the answer equals what the task expects, as mathematics."""

    kind: Literal["math"] = "math"
    answer_from: str
    """Path to the text with the answer."""
    expected_from: str
    """Path in the task to the expected expression: all of it, or what it boxes or puts after ####."""
    find: Find = "auto"
    """Where in the answer the expression is: the last \\boxed{}, after the last ####, the last number, all of it;
    auto: the first of these that there is, without `whole`."""
    limit_s: float = Field(5.0, gt=0)
    """Seconds for one comparison."""
    uncheckable: Literal["absent", "wrong"] = "absent"
    """What an answer is that cannot be compared within time, memory and length."""


class Uncheckable(Exception):  # noqa: N818 - of the expression, not of the program
    """Two expressions could not be compared; the message is the reason."""


def text_to_expression(text: str, find: Find) -> str | None:
    """What the text gives as its answer; None when there is no such place in it. Linear in the length of the text."""
    if find == "whole":
        return text.strip() or None
    if find in ("auto", "boxed") and (boxed := _last_boxed(text)) is not None:
        return boxed
    if find in ("auto", "hashes") and "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0].strip() or None
    if find in ("auto", "last_number"):
        numbers = _NUMBER.findall(text)
        return str(numbers[-1]).replace(",", "") if numbers else None
    return None


def _last_boxed(text: str) -> str | None:
    """What is inside the last \\boxed{...}, which may hold braces; None when it is missing, empty or not closed."""
    start = text.rfind("\\boxed{")
    depth = 0
    for place in range(start + len("\\boxed"), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : place].strip() or None
    return None


class _Worker:
    """One process that compares. Used by one thread at a time."""

    def __init__(self) -> None:
        start = "import sys; sys.path[:] = sys.argv[2:]; from marft_bridge.rewards.math_worker import main; "
        paths = [os.path.realpath(path) for path in sys.path if path]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", start + "main(int(sys.argv[1]), sys.argv[2:])", str(_MEMORY_MB), *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self._pending = b""
        try:
            told = self._line(_START_S)
        except Uncheckable as problem:
            told = {"refused": str(problem)}
        if "ready" not in told:
            self.close()
            raise GraphError(f"expressions cannot be compared safely here: {told.get('refused')}")

    def ask(self, expected: str, answer: str, limit_s: float) -> bool:
        job = {"expected": expected, "answer": answer, "limit_s": limit_s}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Uncheckable("the worker that compares was gone") from None
        told = self._line(limit_s)
        if "equal" not in told:
            raise Uncheckable(f"an expression could not be compared: {told['failed']}")
        return bool(told["equal"])

    def _line(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline, pipe = time.monotonic() + limit_s, self._process.stdout.fileno()
        with selectors.DefaultSelector() as readable:
            readable.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not readable.select(max(deadline - time.monotonic(), 0)):
                    raise Uncheckable(f"an expression could not be compared in {limit_s:g} s")
                chunk = os.read(pipe, 1 << 16)
                if not chunk:
                    raise Uncheckable("an expression could not be compared: the worker died of it")
                self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue


class _Workers:
    """At most so many workers, each started when it is first needed and replaced after it failed."""

    def __init__(self) -> None:
        self._places: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(_WORKERS):
            self._places.put(None)

    def ask(self, expected: str, answer: str, limit_s: float) -> bool:
        worker = self._places.get()
        try:
            worker = worker or _Worker()
            return worker.ask(expected, answer, limit_s)
        except BaseException:
            if worker is not None:
                worker.close()  # it may still be at it, or have no memory left
                worker = None
            raise
        finally:
            self._places.put(worker)

    def close(self) -> None:
        taken = [self._places.get() for _ in range(_WORKERS)]
        for worker in taken:
            if worker is not None:
                worker.close()
            self._places.put(None)


_workers = _Workers()
atexit.register(_workers.close)


def close_workers() -> None:
    """Ends the processes that compare; the next comparison starts new ones."""
    _workers.close()


def equal(expected: str, answer: str, limit_s: float = 5.0) -> bool:
    """Whether two expressions mean the same. Blocks; safe in any thread. Starting a worker is not in the limit.

    Raises:
        Uncheckable: not within time, memory and length; the message is the reason.
        GraphError: no worker can be started, or the kernel does not hold it.
    """
    if expected.strip() == answer.strip():
        return True
    if max(len(expected), len(answer)) > MAX_EXPRESSION:
        raise Uncheckable(f"an expression is longer than {MAX_EXPRESSION} characters")
    return _workers.ask(expected, answer, limit_s)


async def math_to_earned(options: MathOptions, run: RunView) -> list[Earned]:
    """The registry's function: 1.0, 0.0 (also for no answer, or one without an expression), or Absent."""
    answer, expected = run.answer(options.answer_from), run.expected(options.expected_from)
    if answer is None:
        return [Earned(0.0)]
    if not isinstance(answer, (str, int, float)):
        raise GraphError(f"{options.answer_from!r} holds a {type(answer).__name__}, not a text with an answer")
    if not isinstance(expected, (str, int, float)) or not str(expected).strip():
        raise GraphError(f"{options.expected_from!r} of task {run.task.get('id')!r} is not an expression: {expected!r}")
    given = text_to_expression(str(answer), options.find)
    if given is None:
        return [Earned(0.0)]
    gold = str(expected)
    gold = text_to_expression(gold, "boxed") or text_to_expression(gold, "hashes") or gold
    try:
        return [Earned(float(await asyncio.to_thread(equal, gold, given, options.limit_s)))]
    except Uncheckable as reason:
        if options.uncheckable == "wrong":
            return [Earned(0.0)]
        raise Absent(str(reason)) from None


def check_math(_: MathOptions) -> None:
    """Starts a worker, so that what is missing is said before any episode is run."""
    equal("1/2", "0.5", _START_S)


MATH = Kind(MathOptions, math_to_earned, check_math)
KINDS = (MATH,)
