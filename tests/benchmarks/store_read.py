"""What it costs to get trajectories out of a store: a whole one as a stream, one episode of many, at many sizes.

Stores are made by bulk statements and look like those of a run: episodes of three actions with ids, log-probs and a
text, three edges and one reward. Lists have random lengths around a mean, and random values, which compress worst.
"""

# ruff: noqa: S608 - statements are put together from constants; every value is bound
from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from rich.console import Console

from benchmarks.harness import Measurement, bench
from trace_store.records import Action, Edge, Episode, Reward, Trajectory
from trace_store.store import TraceStore

ACTIONS = 3
SHORT, LONG = (64, 32), (256, 256)  # mean numbers of prompt and sampled ids of an action
STREAMED, NAIVE, LOOKED_UP = 100_000, 300, 200
LOOKUP_EPISODES = 334_000  # somewhat more than a million actions
SIZES = (1_000, 10_000, 100_000, 1_000_000)
FLAT = (16, 8)
BAGS = ("adapters", "task", "tags", "lineage")
PER_STATEMENT = 20_000
START, APART = 1_700_000_000_000_000_000, 1_000_000

EPISODES_SQL = f"""
INSERT INTO episodes BY NAME
SELECT md5(i::VARCHAR) AS episode_id, 'run' AS run_id, 'task ' || i % 100 AS task_id, 'train' AS split,
       (i % 4)::INTEGER AS sample, (i // 1000)::INTEGER AS round, i AS seed, '{{"plan":1,"solve":2}}' AS adapters,
       'terminated' AS outcome, {START} + i * {APART} AS started_ns, {START} + i * {APART} + 900 AS ended_ns,
       7 AS span_count, '{{"question":"How many apples?"}}' AS task, '{{}}' AS tags
FROM range(?, ?) r(i)
"""
ACTIONS_SQL = f"""
INSERT INTO actions BY NAME
SELECT left(md5(i || '-' || j), 16) AS action_id, md5(i::VARCHAR) AS episode_id,
       ['plan', 'solve', 'check'][j + 1] AS node, j AS "index", j + 1 AS step, prompt_ids, sampled_ids, logprobs,
       'base' AS model, 'plan@1' AS adapter, 1 AS adapter_version, 1.0 AS temperature, 64 AS max_tokens, i AS seed,
       'stop' AS finish_reason, repeat('seven apples ', 4) AS completion,
       {START} + i * {APART} + j * 10 AS started_ns, {START} + i * {APART} + j * 10 + 9 AS ended_ns,
       true AS trainable, {START} + i * {APART} AS episode_started_ns
FROM lists
"""
EDGES_SQL = f"""
INSERT INTO edges BY NAME
SELECT md5(i::VARCHAR) AS episode_id, left(md5(i || '-' || s), 16) AS src, left(md5(i || '-' || d), 16) AS dst,
       kind, true AS exact, {START} + i * {APART} AS episode_started_ns
FROM range(?, ?) r(i), (VALUES (0, 1, 'trigger'), (0, 2, 'data'), (1, 2, 'trigger')) e(s, d, kind) ORDER BY i
"""
REWARDS_SQL = f"""
INSERT INTO rewards BY NAME
SELECT md5(i::VARCHAR) AS episode_id, 'reward' AS name, (i % 2)::DOUBLE AS value, 'bench' AS source,
       {START} + i * {APART} + 950 AS created_ns, 'episode' AS "scope"
FROM range(?, ?) r(i)
"""


def make_store(path: Path, episodes: int, lengths: tuple[int, int]) -> None:
    """A store with so many episodes, with lists of `lengths` prompt and sampled ids on average."""
    TraceStore.open(path).close()
    rng = np.random.default_rng(0)
    with duckdb.connect(str(path), config={"storage_compatibility_version": "v2.0.0"}) as con:
        for begin in range(0, episodes, PER_STATEMENT):
            span = [begin, min(begin + PER_STATEMENT, episodes)]
            con.execute(EPISODES_SQL, span)
            con.register("lists", _random_lists(rng, *span, lengths))
            con.execute(ACTIONS_SQL)
            con.execute(EDGES_SQL, span)
            con.execute(REWARDS_SQL, span)


def _random_lists(rng: np.random.Generator, begin: int, end: int, lengths: tuple[int, int]) -> pa.Table:
    number = np.arange(ACTIONS * (end - begin))
    prompt, sampled = (
        np.append(0, rng.integers(mean // 2, mean * 3 // 2 + 1, len(number)).cumsum()) for mean in lengths
    )

    def lists(offsets: np.ndarray, values: np.ndarray) -> pa.ListArray:
        return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))

    return pa.table(
        {
            "i": begin + number // ACTIONS,
            "j": (number % ACTIONS).astype(np.int32),
            "prompt_ids": lists(prompt, rng.integers(0, 50_000, prompt[-1], dtype=np.int32)),
            "sampled_ids": lists(sampled, rng.integers(0, 50_000, sampled[-1], dtype=np.int32)),
            "logprobs": lists(sampled, -rng.exponential(1.0, sampled[-1])),
        }
    )


def naive_trajectory(store: TraceStore, episode_id: str) -> Trajectory:
    """What one writes first: a query per table and episode, a record per row."""

    def read(record_class: type[Any], table: str) -> list[Any]:
        names = [field.name for field in fields(record_class)]
        columns = ", ".join(f'"{name}"' for name in names)
        rows = store.sql(f"SELECT {columns} FROM {table} WHERE episode_id = ?", (episode_id,))
        return [
            record_class(**{name: plain(name, value) for name, value in zip(names, row, strict=True)}) for row in rows
        ]

    def plain(name: str, value: Any) -> Any:
        if name in BAGS:
            return {} if value is None else json.loads(value)
        return tuple(value) if isinstance(value, list) else value

    (episode,) = read(Episode, "episodes")
    actions = sorted(read(Action, "actions"), key=lambda action: action.index)
    place = {action.action_id: action.index for action in actions}
    edges = sorted(read(Edge, "edges"), key=lambda edge: (place[edge.dst], place[edge.src]))
    return Trajectory(episode, tuple(actions), tuple(edges), tuple(read(Reward, "rewards")))


def stream_to_cost(store: TraceStore) -> tuple[float, float]:
    """(seconds per episode, MiB by which the process grew) of streaming a whole store."""
    before = most = resident_mib()
    began, number = time.perf_counter(), 0
    for number, _ in enumerate(store.trajectories(), 1):
        if number % 500 == 0:
            most = max(most, resident_mib())
    return (time.perf_counter() - began) / number, most - before


def resident_mib() -> float:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def call_to_ms(work: Callable[..., object], *arguments: object) -> float:
    """Wall-clock time of one call."""
    began = time.perf_counter()
    work(*arguments)
    return 1e3 * (time.perf_counter() - began)


def say(line: str) -> None:
    """A line beside the table, with what one figure cannot tell."""
    Console().print(line, markup=False, highlight=False)


@bench
def store_assemble_episodes_per_s(folder: Path) -> Iterator[Measurement]:
    """Episodes a second from the file to trajectories; it should be over 20,000, and memory stay under 1 GiB."""
    for name, lengths in (("short", SHORT), ("long", LONG)):
        make_store(folder / name, STREAMED, lengths)
    while True:
        with TraceStore.open(folder / "long", read_only=True) as store:
            cost, grown = stream_to_cost(store)
            say(f"lists of {LONG} ids: {1 / cost:,.0f} episodes/s, {grown:.0f} MiB more memory")
        with TraceStore.open(folder / "short", read_only=True) as store:
            cost, grown = stream_to_cost(store)
            say(f"lists of {SHORT} ids: {1 / cost:,.0f} episodes/s, {grown:.0f} MiB more memory")
            some = list(store.trajectories(limit=NAIVE))
            ids = [trajectory.episode.episode_id for trajectory in some]
            began = time.perf_counter()
            expected = [naive_trajectory(store, key) for key in ids]
            naive = (time.perf_counter() - began) / NAIVE
            assert some == expected
        yield Measurement(1 / cost, "episodes/s", 1 / naive, naive / cost)


@bench
def store_point_lookup_ms(folder: Path) -> Iterator[Measurement]:
    """One episode by its id out of a million actions; it should take less than 10 ms. The first one is not counted."""
    path = folder / "store"
    make_store(path, LOOKUP_EPISODES, SHORT)
    size = path.stat().st_size / ACTIONS / LOOKUP_EPISODES
    say(f"{size:,.0f} bytes of file an action, {size / (4 * SHORT[0] + 12 * SHORT[1]):.2f} of the bytes of its lists")
    with TraceStore.open(path, read_only=True) as store:
        asked = store.sql(f"SELECT episode_id FROM episodes USING SAMPLE reservoir({LOOKED_UP} ROWS) REPEATABLE (1)")
        ids = [str(key) for (key,) in asked]
        store.trajectory(ids[0])
        while True:
            times = [call_to_ms(store.trajectory, key) for key in ids]
            naive = median(call_to_ms(naive_trajectory, store, key) for key in ids[:20])
            middle = median(times)
            say(f"lookup: median {middle:.1f} ms, 95 of 100 within {quantiles(times, n=20)[-1]:.1f} ms")
            yield Measurement(middle, "ms", naive, middle / naive)


@bench
def store_flat_cost_ratio(folder: Path) -> Iterator[Measurement]:
    """Cost of an episode in the largest store, by that in the smallest; flat is 1.

    The cost is processor time of all threads: the sizes are measured minutes apart, between which others may have
    begun to use the machine.
    """
    for size in SIZES:
        make_store(folder / str(size), size, FLAT)
    while True:
        costs = []
        for size in SIZES:
            with TraceStore.open(folder / str(size), read_only=True) as store:
                deque(store.trajectories(limit=SIZES[0]), maxlen=0)  # imports, and the first blocks of the file
                began = time.process_time()
                rounds = max(1, 5000 // size)
                for _ in range(rounds):
                    deque(store.trajectories(), maxlen=0)
                costs.append((time.process_time() - began) / rounds / size)
            say(f"{size:>9,} episodes with lists of {FLAT} ids: {1e6 * costs[-1]:.1f} us each")
        yield Measurement(costs[-1] / costs[0], "x", 1.0, costs[-1] / costs[0])
