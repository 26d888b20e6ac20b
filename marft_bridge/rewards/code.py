"""An answer with a program in it, and the task's unit tests -> the share of the tests that pass.

Program and tests run in one sandboxed process (see `sandbox`). Invariants: a test counts only when the process reports
it, after the test has ended, with a word that is drawn for this run; leaving early, printing and flooding pass nothing.
A program that does not run is worth 0; tests that do not parse are the task's fault and an error. Tests are not proof:
an answer that overloads `==`, or looks for the tests inside its own process, can fool asserts.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from typing import Any, Literal

from pydantic import Field

from marft_bridge.common.errors import GraphError
from marft_bridge.rewards.contract import Absent, Earned, Kind, RewardOptions, RunView
from marft_bridge.sandbox.programs import Isolation, Limits, NotStarted, run_in_sandbox, strongest_isolation

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


# Runs inside the sandbox. Tests are compiled before a line of the answer runs, so that "unreadable" is the task's.
_DRIVER = """
import json, os, sys

def drive(report, job):
    try:
        tests = [compile(test, "test", "exec") for test in job.pop("tests")]
    except (SyntaxError, ValueError) as error:
        report("unreadable " + str(error))
        return
    names = {"__name__": "answer"}
    try:
        exec(compile(job.pop("setup"), "setup", "exec"), names)
    except Exception as error:
        report("setup " + type(error).__name__ + ": " + str(error))
        return
    exec(compile(job.pop("program"), "answer", "exec"), names)
    for number, test in enumerate(tests):
        try:
            exec(test, names)
        except BaseException:
            continue
        report("passed " + str(number))

def main():
    job = json.loads(sys.stdin.buffer.read())
    os.close(0)  # a file could be read again, and holds the word
    out = os.dup(1)
    os.dup2(2, 1)  # what the answer prints goes to stderr: it is no verdict
    word, write = job.pop("word") + " ", os.write
    drive(lambda line: write(out, (word + line.replace("\\n", " ") + "\\n").encode()), job)

main()
"""


def run_tests(program: str, tests: list[str], setup: str, limits: Limits, isolation: Isolation | None) -> list[bool]:
    """Whether each of the tests passes. Blocks until the sandboxed process has ended.

    Raises:
        GraphError: a test or the setup cannot be run, or this machine cannot isolate the program.
        NotStarted: the sandboxed process did not start.
    """
    word = secrets.token_hex(16)
    job = {"program": program, "tests": tests, "setup": setup, "word": word}
    end = run_in_sandbox(_DRIVER, json.dumps(job), limits, isolation=isolation)
    passed = [False] * len(tests)
    for line in end.stdout.splitlines():
        claimed_word, _, rest = line.partition(" ")
        if claimed_word != word:
            continue  # a line of the program's own
        event, _, detail = rest.partition(" ")
        if event != "passed":
            raise GraphError(f"the task's {'setup' if event == 'setup' else 'tests'} cannot be run: {detail[:300]}")
        passed[int(detail)] = True
    return passed


async def code_to_earned(options: CodeOptions, run: RunView) -> list[Earned]:
    """The registry's function: one number for the episode; 0 where there is no answer."""
    answer = run.answer(options.answer_from)
    if answer is None:
        return [Earned(0.0)]
    if not isinstance(answer, str):
        raise GraphError(f"{options.answer_from!r} holds a {type(answer).__name__}, not the text of a program")
    if len(answer) > MAX_ANSWER:
        raise Absent(f"the answer is longer than {MAX_ANSWER} characters")
    tests = _read_tests(options, run)
    setup = "" if options.setup_from is None else str(run.expected(options.setup_from))
    limits = Limits(
        wall_s=options.wall_s,
        cpu_s=max(1, round(options.wall_s)),
        memory_mb=options.memory_mb,
        processes=options.processes,
    )
    program = answer_to_program(answer, options.block)
    try:
        passed = await asyncio.to_thread(run_tests, program, tests, setup, limits, options.isolation)
    except NotStarted as error:
        raise Absent(str(error)) from None
    value = float(all(passed)) if options.value == "all" else sum(passed) / len(passed)
    return [Earned(value)]


def _read_tests(options: CodeOptions, run: RunView) -> list[str]:
    tests: Any = run.expected(options.tests_from)
    location = f"{options.tests_from!r} of task {run.task.get('id')!r}"
    if isinstance(tests, str):
        entry = run.expected(options.entry_point_from)
        if not (isinstance(entry, str) and entry.isidentifier()):
            raise GraphError(f"{options.entry_point_from!r} of task {run.task.get('id')!r} is no name: {entry!r}")
        return [f"{tests}\n\ncheck({entry})\n"]
    if not (isinstance(tests, list) and tests and all(isinstance(test, str) for test in tests)):
        raise GraphError(f"{location} is neither a list of statements nor a text that defines check(candidate)")
    return tests


def check_code(options: CodeOptions) -> None:
    """Raises GraphError where this machine cannot isolate an untrusted program, before any episode is run."""
    if options.isolation is None:
        strongest_isolation()
    else:
        run_in_sandbox("", isolation=options.isolation)


CODE = Kind(CodeOptions, code_to_earned, check_code)
KINDS = (CODE,)
