"""A candidate -> whether the user's safety suites pass: a function of its recorded runs, a command beside its server.

Invariants: a function passes by returning True, a command by exit status 0, and by nothing else; a suite that raises
or does not end in time has not passed; a command that is stopped is killed with all processes it started.
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

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.import_name import load_name
from marft_bridge.rewards.contract import ModelAddress, RunView

MAX_OUTPUT_BYTES = 1 << 20  # of a command; the last ones are kept, since a summary comes at the end
_CHUNK = 1 << 16
_READER_GRACE_S = 5.0  # for reading the rest of the pipe after the command ended


@dataclass(frozen=True, slots=True)
class SafetyCase:
    """The argument of a safety function."""

    candidate: str
    adapters: Mapping[str, int]  # node -> version
    runs: Sequence[RunView]  # every episode of the candidate in the comparison: task, trajectory, spans; no final state


@dataclass(frozen=True, slots=True)
class SuiteOutcome:
    """The outcome of one suite, and the reason for it."""

    suite: str
    passed: bool
    reason: str  # one line
    seconds: float
    output: bytes = field(default=b"", repr=False)


def load_suite(name: str) -> Callable[[SafetyCase], Any]:
    """The function that `promote.safety` names. Raises GraphError or ConfigError where there is none."""
    suite = load_name(name, "promote.safety")
    if not callable(suite):
        raise ConfigError(f"promote.safety: {name!r} is a {type(suite).__name__}, not a function")
    return suite  # type: ignore[no-any-return]  # whatever it returns is checked


def run_function(name: str, suite: Callable[[SafetyCase], Any], case: SafetyCase, timeout_s: float) -> SuiteOutcome:
    """Calls the function, sync or async, for at most `timeout_s`. One that hangs is left behind in a daemon thread."""
    verdicts: list[tuple[bool, str]] = []

    def call_suite() -> None:
        try:
            answer = suite(case)
            if inspect.isawaitable(answer):
                answer = asyncio.run(_await(answer))
            verdicts.append(_answer_to_verdict(answer))
        except BaseException as error:  # noqa: BLE001 - whatever the user's function raises is an answer, sys.exit() too
            error_text = " ".join(f"{type(error).__name__}: {error}".split())
            verdicts.append((False, error_text))

    started = time.monotonic()
    thread = threading.Thread(target=call_suite, daemon=True, name="safety suite")
    thread.start()
    thread.join(timeout_s)
    passed, reason = verdicts[0] if verdicts else (False, f"did not end within {timeout_s:g} s")
    return SuiteOutcome(name, passed, reason, seconds=time.monotonic() - started)


def run_command(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> SuiteOutcome:
    """Runs the command in a process group of its own, with `environment` on top of the present variables.

    Raises:
        ConfigError: it cannot be started.
    """
    started = time.monotonic()
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
    assert child.stdout is not None  # it is a pipe
    chunks: deque[bytes] = deque()
    reader = threading.Thread(target=_keep_last_output, args=(child.stdout, chunks), daemon=True)
    reader.start()
    try:
        status: int | None = child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        status = None
    finally:  # after Ctrl-C too; and a command that ended may have left processes running
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    reader.join(_READER_GRACE_S)
    reason = f"did not end within {timeout_s:g} s" if status is None else f"exit status {status}"
    name = " ".join(command)
    return SuiteOutcome(
        name,
        status == 0,
        reason,
        seconds=time.monotonic() - started,
        output=b"".join(chunks.copy())[-MAX_OUTPUT_BYTES:],
    )


def command_environment(
    case: SafetyCase, base_server: ModelAddress, node_servers: Mapping[str, ModelAddress]
) -> dict[str, str]:
    """The environment variables of a safety command: where the candidate is served, and under which model names.

    Args:
        base_server: where the base model of [model] is served.
        node_servers: node -> where its adapter is served.
    """
    return {
        "MARFT_SERVER_URL": base_server.base_url,
        "MARFT_SERVER_KEY": base_server.api_key,
        "MARFT_SERVER_MODEL": base_server.model,
        "MARFT_SERVER_MODELS": json.dumps(
            {node: server.model for node, server in node_servers.items()}, sort_keys=True
        ),
        "MARFT_SERVER_PLACES": json.dumps(
            {node: asdict(server) for node, server in node_servers.items()}, sort_keys=True
        ),
        "MARFT_CANDIDATE": case.candidate,
        "MARFT_ADAPTERS": json.dumps(dict(case.adapters), sort_keys=True),
    }


async def _await(answer: Any) -> Any:
    return await answer


def _answer_to_verdict(answer: Any) -> tuple[bool, str]:
    """Only True passes: a function that forgot to return has not. A text is the reason for a failure."""
    if answer is True:
        return True, "returned True"
    if answer is False:
        return False, "returned False"
    if isinstance(answer, str) and answer.strip():
        return False, " ".join(answer.split())
    return False, f"returned {type(answer).__name__}, neither True nor the reason why not"


def _keep_last_output(pipe: IO[bytes], chunks: deque[bytes]) -> None:
    """Reads the pipe to its end, keeping whole chunks of at least the last MAX_OUTPUT_BYTES."""
    size = 0
    with pipe:
        while chunk := os.read(pipe.fileno(), _CHUNK):
            chunks.append(chunk)
            size += len(chunk)
            while size - len(chunks[0]) >= MAX_OUTPUT_BYTES:
                size -= len(chunks.popleft())
