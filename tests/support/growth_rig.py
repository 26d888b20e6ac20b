"""Stores for the tests of export, vacuum and erasure: real journals of made-up traces, taken in by a real store."""

# ruff: noqa: S608 - statements are put together from constants and paths
from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from support.paths import ROOT
from support.sample_spans import START, SampleTrace, chain
from trace_store import schema
from trace_store.journal import Journal, JournalRecord
from trace_store.packed import floats_to_text, ints_to_text
from trace_store.records import AdapterRow, Prediction, Reward, RunRow, SpanRow
from trace_store.store import TraceStore

DAY_NS = 86_400 * 10**9
LINEAGE = json.dumps({"base": "0" * 64, "tools/a": "f" * 64})
NASTY = [-0.0, 5e-324, -1 / 3, float("nan"), float("inf"), float("-inf"), 0.1 + 0.2]


def trace_id(name: str) -> str:
    return name.rjust(32, "0")


def fill(path: Path, traces: Iterable[Sequence[JournalRecord]]) -> None:
    """Journals the traces and takes them into the store, as separate processes would."""
    with TraceStore.open(path) as store:
        journal = Journal(store.journal_folder)
        for spans in traces:
            journal.append_all(spans)
        journal.close()
        store.take_in()


def secret_trace(name: str, marker: str, ids: list[int], start: int = START, **root: Any) -> list[SpanRow]:
    """A trace of one call whose text holds a marker and whose prompt consists of these token ids."""
    sample = SampleTrace(name, start)
    node = sample.node("solver:1", 10, 20, step=1)
    sample.call(
        "call",
        node,
        11,
        19,
        PROMPT_IDS=ints_to_text(ids),
        SAMPLED_IDS=ints_to_text([7, 8]),
        LOGPROBS=floats_to_text([-0.5, -0.25]),
        INPUT_MESSAGES=[{"role": "user", "content": f"I am {marker}"}],
        OUTPUT_MESSAGES=[{"role": "assistant", "parts": [{"type": "text", "content": f"hello {marker}"}]}],
    )
    return sample.spans(TASK=json.dumps({"question": f"{marker}?"}, ensure_ascii=False), **root)


def fill_variously(path: Path) -> None:
    """A store with something of everything: NULLs, numbers that are not finite, a trace that waits, one refused."""
    odd = SampleTrace("c", START + 5)
    node = odd.node("a:1", 1, 9, step=1)
    odd.call("x", node, 2, 3, LOGPROBS=floats_to_text(NASTY), SAMPLED_IDS=ints_to_text(range(7)))
    odd.call("y", node, 4, 5, PROMPT_IDS=None, SAMPLED_IDS="[]", LOGPROBS="[]", STEP=None)
    fill(
        path,
        [
            chain("a").spans(RUN_ID="r/1 é..", TASK='{"deep": [1.0, null,  "\\u0000"]}', TAGS='{"k":"v"}'),
            chain("b", START + DAY_NS).spans(ROUND=3, VARIANT="after", SEED=2**62, SUBJECT_ID="s", LINEAGE=LINEAGE),
            odd.spans(),
            chain("w").spans()[:2],
            chain("z").spans(OUTCOME="nonsense"),
        ],
    )
    with TraceStore.open(path) as store:
        store.put_run(RunRow("run", "collect", START, {"a": [1.0, float("nan")]}, "1"))
        store.put_adapter(AdapterRow("a", 1, None, "p", "h", "b", START, {"loss": 0.1}))
        store.put_adapter_episodes("a", 1, [trace_id("a"), trace_id("gone")])
        store.put_predictions([Prediction("plan-1", "a", "nats_per_token", 1 / 3, None, 0.5, START)])
        store.put_rewards(
            [Reward(trace_id(name), "r", value, "s", 1 + n) for n, value in enumerate(NASTY) for name in ("a", "gone")]
            + [Reward(trace_id("b"), "r", 0.5, "s", 1, "step", "x", None)]
        )


def dump(store: TraceStore, tables: Iterable[schema.Table] = schema.TABLES) -> dict[str, list[Any]]:
    """Every row of the tables, floats as their bits, in an order of its own."""
    return {
        table.name: sorted(map(_bits, store.sql(f'SELECT {_columns(table)} FROM "{table.name}"')), key=repr)
        for table in tables
    }


def _columns(table: schema.Table) -> str:
    return ", ".join(f'"{column.name}"' for column in table.columns)


def _bits(value: Any) -> Any:
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_bits, value))
    return value


def files_under(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def kill_after(arguments: list[str], seconds: float) -> bool:
    """Runs a piece of Python and kills it with SIGKILL after `seconds` of work; whether it was still running.

    The piece says on stdout when it begins, so that starting Python is not part of the time.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", *arguments],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(seconds)
    running = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    return running
