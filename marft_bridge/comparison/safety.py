"""A candidate -> whether the user's safety suite passes: a function of its recorded runs, a command beside its server.

Invariants: a suite passes by True, or by exit status 0, and by nothing else; one that fails, raises or does not end in
time has not passed; a command that is stopped takes what it started with it. It knows no gate and no manifest.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import IO, Any

from marft_bridge.errors import ConfigError
from marft_bridge.load_name import load_name
from marft_bridge.rewards.contract import RunView, Served

MOST_OUTPUT = 1 << 20  # bytes that are kept, the last ones: a summary comes at the end
_CHUNK = 1 << 16
_AFTER_KILL_S = 5.0


@dataclass(frozen=True, slots=True)
class SafetyCase:
    """What a safety function is given."""

    candidate: str
    adapters: Mapping[str, int]  # node -> version
    runs: Sequence[RunView]  # every episode of the candidate in the comparison: task, trajectory, spans; no final state


@dataclass(frozen=True, slots=True)
class SafetyEnd:
    """What became of one suite."""

    suite: str
    passed: bool
    why: str  # one line
    seconds: float
    output: bytes = field(default=b"", repr=False)


def load_suite(name: str) -> Callable[[SafetyCase], Any]:
    """The function that `promote.safety` names. Raises GraphError or ConfigError where there is none."""
    found = load_name(name, "promote.safety")
    if not callable(found):
        raise ConfigError(f"promote.safety: {name!r} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]  # whatever it returns is checked


def run_function(name: str, suite: Callable[[SafetyCase], Any], case: SafetyCase, timeout_s: float) -> SafetyEnd:
    """Calls the function, sync or async, and waits for it that long. One that hangs is left behind in its thread."""
    answers: list[tuple[bool, str]] = []

    def call() -> None:
        try:
            answer = suite(case)
            if inspect.isawaitable(answer):
                answer = asyncio.run(_awaited(answer))
            answers.append(_answer_to_verdict(answer))
        except Exception as error:  # noqa: BLE001 - whatever the user's function raises is an answer
            said = " ".join(f"{type(error).__name__}: {error}".split())
            answers.append((False, said))

    began = time.monotonic()
    thread = threading.Thread(target=call, daemon=True, name="safety suite")
    thread.start()
    thread.join(timeout_s)
    passed, why = answers[0] if answers else (False, f"did not end within {timeout_s:g} s")
    return SafetyEnd(name, passed, why, time.monotonic() - began)


def run_command(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> SafetyEnd:
    """Runs the command in a process group of its own, with these variables besides the present ones.

    Raises:
        ConfigError: it cannot be started.
    """
    began = time.monotonic()
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"promote.safety_command: cannot run {command[0]!r}: {error.strerror}") from None
    assert child.stdout is not None  # a pipe was asked for
    kept: deque[bytes] = deque()
    reader = threading.Thread(target=_read_last, args=(child.stdout, kept), daemon=True)
    reader.start()
    try:
        status: int | None = child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        status = None
    finally:  # Ctrl-C too; and what a command that ended has left running
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    reader.join(_AFTER_KILL_S)
    why = f"did not end within {timeout_s:g} s" if status is None else f"exit status {status}"
    name = " ".join(command)
    return SafetyEnd(name, status == 0, why, time.monotonic() - began, b"".join(kept.copy())[-MOST_OUTPUT:])


def command_environment(case: SafetyCase, place: Served, places: Mapping[str, Served]) -> dict[str, str]:
    """What a command is told: where the candidate is served, and by which names.

    Args:
        place: of the base model of [model].
        places: of each node's adapter.
    """
    return {
        "MARFT_SERVER_URL": place.base_url,
        "MARFT_SERVER_KEY": place.api_key,
        "MARFT_SERVER_MODEL": place.model,
        "MARFT_SERVER_MODELS": json.dumps({node: at.model for node, at in places.items()}, sort_keys=True),
        "MARFT_SERVER_PLACES": json.dumps({node: asdict(at) for node, at in places.items()}, sort_keys=True),
        "MARFT_CANDIDATE": case.candidate,
        "MARFT_ADAPTERS": json.dumps(dict(case.adapters), sort_keys=True),
    }


async def _awaited(answer: Any) -> Any:
    return await answer


def _answer_to_verdict(answer: Any) -> tuple[bool, str]:
    """Only True passes: a function that forgot to return says nothing."""
    if answer is True:
        return True, "returned True"
    if answer is False:
        return False, "returned False"
    if isinstance(answer, str) and answer.strip():
        return False, " ".join(answer.split())
    return False, f"returned {type(answer).__name__}, neither True nor the reason why not"


def _read_last(pipe: IO[bytes], kept: deque[bytes]) -> None:
    size = 0
    with pipe:
        while chunk := os.read(pipe.fileno(), _CHUNK):
            kept.append(chunk)
            size += len(chunk)
            while size - len(kept[0]) >= MOST_OUTPUT:
                size -= len(kept.popleft())
