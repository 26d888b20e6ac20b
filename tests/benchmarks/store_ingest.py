"""How fast records become durable rows, on one core, and how large they are.

An action has 256 prompt ids, 256 sampled ids and 256 log-probs, all random: the worst case for compression. A trace has
three of them in three nodes, so seven spans; its prompts and answers are about a kilobyte of text each. The process is
pinned to one core while it measures, so that threads of DuckDB share it; every transaction is committed, and what
closing the store still writes is part of the time.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.harness import Measurement, bench
from trace_store import conventions as c
from trace_store import schema
from trace_store.assemble import spans_to_trajectory
from trace_store.insertion import insert, records_to_columns
from trace_store.journal import Journal
from trace_store.packed import floats_to_text, ints_to_text
from trace_store.records import Action, SpanRow
from trace_store.store import TraceStore

CALLS, TOKENS, VOCABULARY = 3, 256, 49_152
RAW_BYTES = TOKENS * (4 + 4 + 8)  # of one action's lists
ACTIONS, BATCH = 24_000, 4_000
BASELINE_ACTIONS = 1_500
START, SECOND = 1_700_000_000_000_000_000, 10**9
WORDS = ("two", "baskets", "hold", "apples", "so", "count", "them", "one", "by", "before", "you", "answer", "me")


@contextmanager
def one_core() -> Iterator[None]:
    """Threads that are started inside share one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def number_to_trace(number: int, chance: random.Random, calls: int = CALLS, tokens: int = TOKENS) -> list[SpanRow]:
    """One trace as the recorder writes it: each call before its node, the root last."""
    trace_id, start = f"{chance.getrandbits(128):032x}", START + number * SECOND
    root, spans, before = _span_id(chance), [], None
    for step in range(1, calls + 1):
        node, ns, begin = _span_id(chance), f"node{step}:{chance.getrandbits(128):032x}", start + step * 10_000
        common = {c.NODE: f"node{step}", c.STEP: step}
        seen = [before] if before else []
        call = {c.OPERATION: c.CHAT, **common, **_call(chance, tokens)}
        run = {c.OPERATION: c.INVOKE_AGENT, **common, c.CHECKPOINT_NS: ns, c.TRIGGERED_BY: seen, c.READS_FROM: seen}
        spans.append(_span(trace_id, _span_id(chance), node, c.CHAT, begin + 10, begin + 900, call))
        spans.append(_span(trace_id, node, root, c.INVOKE_AGENT, begin, begin + 1000, run))
        before = ns
    episode = {
        c.OPERATION: c.INVOKE_WORKFLOW,
        c.RUN_ID: "run",
        c.TASK_ID: f"task{number % 500}",
        c.SPLIT: "train",
        c.TASK: '{"question":"three and four?"}',
        c.SAMPLE: 0,
        c.ROUND: 1,
        c.SEED: number,
        c.OUTCOME: "terminated",
        c.ADAPTERS: json.dumps({f"node{k}": 3 for k in range(1, calls + 1)}),
        c.SPAN_COUNT: 2 * calls + 1,
    }
    return [*spans, _span(trace_id, root, None, c.INVOKE_WORKFLOW, start, start + 50_000, episode)]


def _call(chance: random.Random, tokens: int) -> dict[str, object]:
    prompt, answer = (" ".join(chance.choices(WORDS, k=max(1, tokens - 56))) for _ in range(2))
    return {
        c.INPUT_MESSAGES: json.dumps([{"role": "user", "content": prompt}]),
        c.OUTPUT_MESSAGES: json.dumps([{"role": "assistant", "content": answer, "tool_calls": []}]),
        c.PROMPT_IDS: ints_to_text(chance.choices(range(VOCABULARY), k=tokens)),
        c.SAMPLED_IDS: ints_to_text(chance.choices(range(VOCABULARY), k=tokens)),
        c.LOGPROBS: floats_to_text([-chance.expovariate(1) for _ in range(tokens)]),
        c.REQUEST_MODEL: "model",
        c.RESPONSE_MODEL: "model",
        c.ADAPTER: "node@3",
        c.ADAPTER_VERSION: 3,
        c.REQUEST_TEMPERATURE: 1.0,
        c.REQUEST_TOP_P: 1.0,
        c.REQUEST_MAX_TOKENS: tokens,
        c.FINISH_REASONS: ["stop"],
        c.REQUEST_SEED: chance.getrandbits(31),
        c.USAGE_INPUT_TOKENS: tokens,
        c.USAGE_OUTPUT_TOKENS: tokens,
    }


def _span_id(chance: random.Random) -> str:
    return f"{chance.getrandbits(64):016x}"


def _span(
    trace_id: str, span_id: str, parent: str | None, operation: str, begin: int, end: int, attributes: dict[str, object]
) -> SpanRow:
    return SpanRow(
        *(trace_id, span_id, parent, f"{operation} x", operation, begin, end),
        *("ok", None, c.CONVENTION_VERSION, attributes),
    )


def traces(first: int, count: int, templates: list[list[SpanRow]]) -> Iterator[list[SpanRow]]:
    """New traces in time with the contents of the templates in turn: making contents takes longer than storing them."""
    chance = random.Random(first)
    for number in range(first, first + count):
        template = templates[number % len(templates)]
        trace_id, later = f"{chance.getrandbits(128):032x}", number * SECOND - (template[-1].start_ns - START)
        yield [
            replace(span, trace_id=trace_id, start_ns=span.start_ns + later, end_ns=span.end_ns + later)
            for span in template
        ]


def make_templates(count: int = 1_000) -> list[list[SpanRow]]:
    """Traces of random contents."""
    chance = random.Random(count)
    return [number_to_trace(number, chance) for number in range(count)]


def insert_actions(path: Path, actions: list[Action], *, row_by_row: bool = False) -> float:
    """Seconds until the actions are durable in a new store, closed."""
    store = TraceStore.open(path)
    began = time.perf_counter()
    if row_by_row:
        marks = ", ".join("?" * len(schema.ACTIONS.columns))
        for action in actions:
            columns = records_to_columns(schema.ACTIONS, [action], [action.started_ns])
            with store.transaction() as con:
                con.execute(f"INSERT INTO actions VALUES ({marks})", [value for (value,) in columns])  # noqa: S608
    else:
        for first in range(0, len(actions), BATCH):
            some = actions[first : first + BATCH]
            with store.transaction() as con:
                con.execute("SET GLOBAL max_vacuum_tasks = 0")  # as an intake of this size does
                insert(con, schema.ACTIONS, records_to_columns(schema.ACTIONS, some, [a.started_ns for a in some]))
    store.close()
    return time.perf_counter() - began


def make_actions(count: int) -> list[Action]:
    """Actions of the templates over and over, with new ids."""
    assembled = [action for spans in make_templates() for action in spans_to_trajectory(spans).actions]
    return [replace(assembled[k % len(assembled)], action_id=f"{k:016x}") for k in range(count)]


def inserted_per_second(folder: Path) -> Iterator[tuple[float, float]]:
    """(actions per second in bulk, row by row), on one core."""
    actions = make_actions(ACTIONS)
    for number in range(sys.maxsize):
        with one_core():
            bulk = insert_actions(folder / f"{number}.duckdb", actions)
            rows = insert_actions(folder / f"{number}.rows.duckdb", actions[:BASELINE_ACTIONS], row_by_row=True)
        yield ACTIONS / bulk, BASELINE_ACTIONS / rows


@bench
def store_ingest_actions_per_s(folder: Path) -> Iterator[Measurement]:
    """Actions, as records, until they are durable rows. At least 15,000; the baseline inserts and commits each row."""
    for bulk, rows in inserted_per_second(folder):
        yield Measurement(bulk, "actions/s", rows, bulk / rows)


_WITHOUT_ARROW = """
import sys
sys.modules["pyarrow"] = None
from pathlib import Path
from benchmarks.store_ingest import inserted_per_second
print(*next(inserted_per_second(Path(sys.argv[1]))))
"""


@bench
def store_ingest_without_pyarrow_actions_per_s(folder: Path) -> Iterator[Measurement]:
    """The same where pyarrow is not installed. At least 7,000."""
    for number in range(sys.maxsize):
        at = folder / str(number)
        at.mkdir()
        command = [sys.executable, "-c", _WITHOUT_ARROW, str(at)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        bulk, rows = map(float, done.stdout.split())
        yield Measurement(bulk, "actions/s", rows, bulk / rows)


def journal_traces(store: TraceStore, first: int, count: int, templates: list[list[SpanRow]]) -> None:
    """One segment of new traces, its writer gone."""
    journal = Journal(store.journal_folder)
    for spans in traces(first, count, templates):
        journal.append_all(spans)
    journal.close()


@bench
def store_take_in_actions_per_s(folder: Path) -> Iterator[Measurement]:
    """The whole way of a journal segment, all spans included, into rows; the baseline is reading the lines alone."""
    templates, count = make_templates(), 4_000
    for number in range(sys.maxsize):
        path = folder / f"{number}.duckdb"
        store = TraceStore.open(path)
        journal_traces(store, 0, count, templates)
        (segment,) = store.journal_folder.iterdir()
        with one_core():
            began = time.perf_counter()
            for line in segment.read_bytes().splitlines():
                json.loads(line[9:])
            read = time.perf_counter() - began
            began = time.perf_counter()
            taken = store.take_in()
            store.close()
            seconds = time.perf_counter() - began
        assert taken.episodes == count
        yield Measurement(count * CALLS / seconds, "actions/s", count * CALLS / read, read / seconds)


@bench
def store_bytes_per_action(folder: Path) -> Iterator[Measurement]:
    """The file by its actions, their spans, texts and edges included; the baseline is their lists, raw."""
    templates, count = make_templates(), 4_000
    for number in range(sys.maxsize):
        path = folder / f"{number}.duckdb"
        with TraceStore.open(path) as store:
            journal_traces(store, 0, count, templates)
            store.take_in()
        size = path.stat().st_size / (count * CALLS)
        yield Measurement(size, "bytes", RAW_BYTES, size / RAW_BYTES)


STEP, SIZES = 10_000, (10_000, 100_000, 300_000)


def copy_episodes(store: TraceStore, copies: int) -> None:
    """The first STEP episodes of a store once more for each copy, later in time, by SQL."""
    shift, last = f"n * {STEP} * {SECOND}", START + STEP * SECOND
    some = f"range(1, {copies + 1}) c(n)"
    changed = {
        "spans": (f"md5(trace_id || n) AS trace_id, start_ns + {shift} AS start_ns", "start_ns"),
        "episodes": (f"md5(episode_id || n) AS episode_id, started_ns + {shift} AS started_ns", "started_ns"),
        "actions": (f"md5(episode_id || n) AS episode_id, started_ns + {shift} AS started_ns", "started_ns"),
    }
    for table, (columns, time_column) in changed.items():
        with store.transaction() as con:
            con.execute(
                f"INSERT INTO {table} SELECT * EXCLUDE (n) REPLACE ({columns}) FROM {table}, {some}"  # noqa: S608
                f" WHERE {time_column} < {last} ORDER BY n, {time_column}"
            )


@bench
def store_take_in_flat_ratio(folder: Path) -> Iterator[Measurement]:
    """CPU time to take in 10,000 episodes into a store of 300,000, to that into one of 10,000; prints the curve.

    Episodes of one short call: what grows with a store is not their contents. The episodes before are copies of the
    first ones, with ids and times of their own.
    """
    template = number_to_trace(0, random.Random(0), calls=1, tokens=4)
    for number in range(sys.maxsize):
        curve: dict[int, float] = {}
        for size in SIZES:
            with TraceStore.open(folder / f"{number}-{size}.duckdb") as store:
                journal_traces(store, 0, STEP, [template])
                store.take_in()
                copy_episodes(store, size // STEP - 1)
            with TraceStore.open(folder / f"{number}-{size}.duckdb") as store:
                journal_traces(store, size, STEP, [template])
                began = time.process_time()
                store.take_in()
                curve[size] = time.process_time() - began
                assert store.counts()["episodes"] == size + STEP
        shown = ", ".join(f"{size:,}: {seconds / STEP * 1e6:.0f}" for size, seconds in curve.items())
        sys.stdout.write(f"CPU us per episode, by episodes in the store: {shown}\n")
        ratio = curve[SIZES[-1]] / curve[SIZES[0]]
        yield Measurement(ratio, "", 1.0, ratio)
