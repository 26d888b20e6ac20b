"""An answer with a program in it, and the task's unit tests -> the share of the tests that pass.

The program runs in one sandboxed process and the tests in another (see `sandbox`), which calls the program's functions
by data. Invariants: the program's process never holds a test, nor a value that one expects; results are compared in the
other process; whatever the program writes, breaks or ends costs its own reward and nothing else. A program that does
not run is worth 0; tests that do not parse, and a setup that fails without the answer, are the task's fault.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

from pydantic import Field

from marft_bridge.common.errors import GraphError
from marft_bridge.rewards.contract import Absent, Earned, Kind, RewardOptions, RunView
from marft_bridge.sandbox.programs import (
    Isolation,
    Limits,
    NotStarted,
    run_answer_and_judge,
    run_in_sandbox,
    strongest_isolation,
)
from trace_store.json_text import read_json

MAX_ANSWER = 1_000_000  # characters; more than any model writes, and too much to be a program


class CodeOptions(RewardOptions):
    """`kind = "code"`: unit tests of the task on a program of the answer."""

    kind: Literal["code"] = "code"
    answer_from: str
    """Path to the text that holds the program."""
    tests_from: str = "tests"
    """Path in the task to a list of statements, each of which raises when it fails; or to one text that defines
    `check(candidate)`."""
    entry_point_from: str = "entry_point"
    """Path in the task to the name of the function that `check` is given; read only for such a text."""
    setup_from: str | None = None
    """Path in the task to code that comes before the program."""
    block: Literal["first", "last", "all"] = "last"
    """Which fenced block of the answer is the program. An answer without one is a program as a whole."""
    value: Literal["share", "all"] = "share"
    """passed / all tests, or 1.0 when all pass and else 0.0."""
    isolation: Isolation | None = None
    """None: the strongest isolation of this machine, and an error where it has none."""
    wall_s: float = Field(10.0, gt=0)
    """Seconds for the program and all tests."""
    memory_mb: int = Field(512, ge=64)
    """Address space of one process."""
    processes: int = Field(4, ge=1)
    """Processes and threads at a time; behind Landlock there are no processes but one."""


_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_PYTHON = {"", "python", "py", "python3"}


def answer_to_program(text: str, block: Literal["first", "last", "all"]) -> str:
    """The program of an answer: its fenced Python (an unclosed fence goes to the end), or all of it without a fence."""
    blocks = [(str(fence[1]).lower(), str(fence[2])) for fence in _FENCE.finditer(text)]
    if not blocks:
        return text
    # Blocks in another language are not programs, unless there is nothing else.
    programs = [body for language, body in blocks if language in _PYTHON] or [body for _, body in blocks]
    return "\n".join(programs) if block == "all" else programs[0 if block == "first" else -1]


def run_tests(
    program: str,
    tests: Sequence[str],
    setup: str,
    limits: Limits,
    isolation: Isolation | None,
    *,
    entry_point: str | None = None,
) -> list[bool]:
    """Whether each of the tests passes. Blocks until both sandboxed processes have ended.

    Args:
        entry_point: a name that means the answer's in the tests, even where the setup or Python has one of that name.

    Raises:
        GraphError: a test or the setup cannot be run, or this machine cannot isolate the program.
        NotStarted: one of the processes did not start, or the setup took all of the time.
    """
    answer_job = {"program": program, "setup": setup}
    judge_job = {"tests": list(tests), "setup": setup, "entry_point": entry_point}
    end = run_answer_and_judge(answer_job, judge_job, limits=limits, isolation=isolation)
    verdicts = list(_read_verdicts(end.stderr))
    for verdict in verdicts:
        for part, key in (("tests", "unreadable"), ("setup", "setup")):
            if key in verdict:
                reason = " ".join(str(verdict[key]).split())
                raise GraphError(f"the task's {part} cannot be run: {reason[:300]}")
    if not any("begun" in verdict for verdict in verdicts):
        raise NotStarted(f"the tests did not begin: the judge's process ended by {end.reason}")
    passed_numbers = {verdict["passed"] for verdict in verdicts if "passed" in verdict}
    return [number in passed_numbers for number in range(len(tests))]


def _read_verdicts(text: str) -> Iterator[dict[str, Any]]:
    """The judge's lines among what else a task's tests write to standard error."""
    for line in text.splitlines():
        if line.startswith("{"):
            with suppress(ValueError):
                yield read_json(line)


async def code_to_earned(options: CodeOptions, run: RunView) -> list[Earned]:
    """The registry's function: one number for the episode; 0 where the answer is no text."""
    answer = run.written_answer(options.answer_from)
    if not isinstance(answer, str):
        return [Earned(0.0)]
    if len(answer) > MAX_ANSWER:
        raise Absent(f"the answer is longer than {MAX_ANSWER} characters")
    tests, entry_point = _read_tests(options, run)
    setup = "" if options.setup_from is None else str(run.expected(options.setup_from))
    limits = Limits(
        wall_s=options.wall_s,
        cpu_s=max(1, round(options.wall_s)),
        memory_mb=options.memory_mb,
        processes=options.processes,
    )
    program = answer_to_program(answer, options.block)
    try:
        passed = await asyncio.to_thread(
            partial(
                run_tests, program, tests, setup, limits=limits, isolation=options.isolation, entry_point=entry_point
            )
        )
    except NotStarted as error:
        raise Absent(str(error)) from None
    value = float(all(passed)) if options.value == "all" else sum(passed) / len(passed)
    return [Earned(value)]


def _read_tests(options: CodeOptions, run: RunView) -> tuple[list[str], str | None]:
    """The task's tests, and the name of the function that they are given where they are one text."""
    tests: Any = run.expected(options.tests_from)
    location = f"{options.tests_from!r} of task {run.task.get('id')!r}"
    if isinstance(tests, str):
        entry = run.expected(options.entry_point_from)
        if not (isinstance(entry, str) and entry.isidentifier()):
            raise GraphError(f"{options.entry_point_from!r} of task {run.task.get('id')!r} is no name: {entry!r}")
        return [f"{tests}\n\ncheck({entry})\n"], entry
    if not (isinstance(tests, list) and tests and all(isinstance(test, str) for test in tests)):
        raise GraphError(f"{location} is neither a list of statements nor a text that defines check(candidate)")
    return tests, None


def check_code(options: CodeOptions) -> None:
    """Raises GraphError where this machine cannot isolate an untrusted program, before any episode is run."""
    if options.isolation is None:
        strongest_isolation()
    else:
        run_in_sandbox("", isolation=options.isolation)


CODE = Kind(CodeOptions, code_to_earned, check_code)
KINDS = (CODE,)
