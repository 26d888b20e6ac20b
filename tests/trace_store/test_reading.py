"""Owns: what is read out of a store is what plain SQL finds row by row, in order, once, at any time, in bounded memory.

The expected trajectories come from a slow reading that is written here: every row by itself, put in order by Python.
"""

# ruff: noqa: S608 - statements are put together from constants; every value is bound
from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import duckdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.sample_spans import START, chain

from trace_store import by_episode, reading
from trace_store.assemble import spans_to_trajectory
from trace_store.errors import StoreError
from trace_store.journal import Journal
from trace_store.records import Action, Edge, Episode, Reward, Trajectory
from trace_store.store import TraceStore

T = TypeVar("T", Action, Edge, Episode, Reward)
TABLES: dict[type[Any], str] = {Action: "actions", Edge: "edges", Episode: "episodes", Reward: "rewards"}
NULLABLE_MAPPINGS = ("lineage", "metadata")
MAPPINGS = ("adapters", "task", "tags", *NULLABLE_MAPPINGS)

TEXTS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=8)
WORDS = st.sampled_from(["", "a", "b", "{}", "é😀", "'; --", '"'])
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
LISTS = st.none() | st.lists(INT32, max_size=4).map(tuple)
STARTS = st.sampled_from([START - 1, START, START + 1, START + 10**15])


def optional(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


@st.composite
def trajectories(draw: st.DrawFn, key: str) -> Trajectory:
    """Records that fit each other, with any values that a column can hold."""
    episode = Episode(
        key, draw(WORDS), draw(TEXTS), draw(st.sampled_from(["train", "heldout"])), draw(INT32),
        draw(optional(st.integers(0, 2))), draw(optional(WORDS)), draw(optional(INT64)),
        draw(st.dictionaries(TEXTS, INT32, max_size=2)), "terminated", draw(optional(TEXTS)), draw(STARTS), draw(INT64),
        draw(INT32), draw(st.dictionaries(TEXTS, TEXTS | INT64 | st.none(), max_size=2)),
        draw(st.dictionaries(TEXTS, TEXTS, max_size=2)), draw(optional(TEXTS)), draw(optional(TEXTS)),
        draw(st.dictionaries(TEXTS, TEXTS, max_size=2)), draw(optional(TEXTS)), draw(optional(TEXTS)),
        draw(st.dictionaries(TEXTS, TEXTS | INT64 | st.none(), max_size=2)),
        draw(st.sampled_from([None, "turn", "resume"])), draw(optional(st.booleans())), draw(optional(TEXTS)),
        draw(optional(TEXTS)),
    )  # fmt: skip
    actions = tuple(
        Action(
            f"{key} {index}", key, draw(WORDS), index, draw(optional(INT32)), draw(LISTS), draw(LISTS),
            draw(optional(st.lists(st.floats(), max_size=4).map(tuple))), draw(optional(TEXTS)), draw(optional(TEXTS)),
            draw(optional(INT32)), draw(optional(st.floats())), draw(optional(st.floats())), draw(optional(INT32)),
            draw(optional(INT32)), draw(optional(INT64)), draw(optional(TEXTS)), draw(optional(TEXTS)), draw(INT64),
            draw(INT64), draw(st.booleans()), draw(optional(TEXTS)), draw(optional(INT32)), draw(optional(INT32)),
        )
        for index in range(draw(st.integers(0, 4)))
    )  # fmt: skip
    pairs = [(src, dst) for dst in actions for src in actions if src.index < dst.index]
    edges = [
        Edge(key, src.action_id, dst.action_id, kind, draw(st.booleans()))
        for src, dst in pairs
        for kind in draw(st.permutations(["data", "trigger"]))[: draw(st.integers(0, 2))]
    ]
    scopes = st.sampled_from(["episode", "step"])
    names = st.lists(st.tuples(st.integers(0, 1), WORDS, scopes, optional(WORDS), optional(WORDS)), max_size=3)
    rewards = {
        (created_ns, name, scope, action, node): Reward(
            key, name, draw(st.floats()), "test", created_ns, scope, action, node
        )
        for created_ns, name, scope, action, node in draw(names)
    }
    return Trajectory(episode, actions, tuple(edges), tuple(rewards.values()))


STORES = st.integers(0, 7).flatmap(lambda n: st.tuples(*(trajectories(key=f"e{k}é") for k in range(n))))


def write(path: Path, trajectories: tuple[Trajectory, ...], rng: random.Random) -> None:
    """Every record as a row of its own, in any order but that of the edges of one episode, by nothing of ours."""
    TraceStore.open(path).close()
    actions = [action for trajectory in trajectories for action in trajectory.actions]
    groups: list[list[Any]] = [
        [trajectory.episode for trajectory in trajectories],
        actions,
        [reward for trajectory in trajectories for reward in trajectory.rewards],
    ]
    for group in groups:
        rng.shuffle(group)
    edges = [edge for trajectory in trajectories for edge in trajectory.edges]
    started = {trajectory.episode.episode_id: trajectory.episode.started_ns for trajectory in trajectories}
    with duckdb.connect(str(path)) as con:
        for record in [*groups[0], *groups[1], *groups[2], *edges]:
            row = {field.name: getattr(record, field.name) for field in fields(record)}
            row |= {name: json.dumps(row[name]) for name in MAPPINGS if name in row}
            row |= {name: None for name in NULLABLE_MAPPINGS if row.get(name) == "{}"}
            row |= {name: list(value) for name, value in row.items() if isinstance(value, tuple)}
            if isinstance(record, (Action, Edge)):
                row["episode_started_ns"] = started[record.episode_id]
            names = ", ".join(f'"{name}"' for name in row)
            marks = ", ".join("?" * len(row))
            con.execute(f"INSERT INTO {TABLES[type(record)]} ({names}) VALUES ({marks})", list(row.values()))


def read_slowly(path: Path) -> list[Trajectory]:
    """All trajectories: one query a table, one record a row, everything else in Python."""

    def read(record_class: type[T]) -> list[T]:
        names = [field.name for field in fields(record_class)]
        columns = ", ".join(f'"{name}"' for name in names)
        with duckdb.connect(str(path)) as con:
            rows = con.execute(f"SELECT {columns} FROM {TABLES[record_class]} ORDER BY rowid").fetchall()
        return [record_class(**{n: plain(n, value) for n, value in zip(names, row, strict=True)}) for row in rows]

    def plain(name: str, value: Any) -> Any:
        if name in MAPPINGS:
            return {} if name in NULLABLE_MAPPINGS and value is None else json.loads(value)
        return tuple(value) if isinstance(value, list) else value

    def none_last(*values: Any) -> tuple[Any, ...]:
        return tuple((value is None, value) for value in values)

    actions, edges, rewards = read(Action), read(Edge), read(Reward)
    trajectories = []
    for episode in sorted(read(Episode), key=attrgetter("started_ns", "episode_id")):
        episode_actions = sorted((a for a in actions if a.episode_id == episode.episode_id), key=attrgetter("index"))
        position = [action.action_id for action in episode_actions].index
        episode_edges = [edge for edge in edges if edge.episode_id == episode.episode_id]
        episode_edges.sort(key=lambda edge: (position(edge.dst), position(edge.src)))
        episode_rewards = [reward for reward in rewards if reward.episode_id == episode.episode_id]
        episode_rewards.sort(key=lambda r: none_last(r.created_ns, r.name, r.scope, r.action_id, r.node, r.source))
        trajectories.append(Trajectory(episode, tuple(episode_actions), tuple(episode_edges), tuple(episode_rewards)))
    return trajectories


@contextmanager
def small_pages(*, arrow: bool) -> Iterator[None]:
    """Several stretches, pages and pieces in a small store; with Arrow for everything, or without pyarrow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "EPISODES_PER_STRETCH", 5)
        patch.setattr(reading, "PAGE", (3, 120))
        patch.setattr(reading, "PIECE", (2, 60))
        patch.setattr(by_episode, "MAX_PLAIN_EPISODES", 0)
        if not arrow:
            patch.setitem(sys.modules, "pyarrow", None)
        yield


def to_texts(trajectories: list[Trajectory]) -> list[str]:
    """NaN is not equal to itself, and 0.0 is equal to -0.0 and to False; their texts differ."""
    return [repr(trajectory) for trajectory in trajectories]


# -- what is read -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("arrow", [True, False])
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    written=STORES,
    rng=st.randoms(use_true_random=False),
    filters=st.fixed_dictionaries(
        {},
        optional={
            "run_ids": optional(st.lists(WORDS, max_size=3)),
            "split": optional(st.just("train")),
            "round": optional(st.integers(0, 2)),
            "variant": optional(WORDS),
            "episode_ids": optional(st.lists(st.sampled_from([f"e{k}é" for k in range(9)]), max_size=5)),
            "limit": optional(st.integers(0, 8)),
        },
    ),
)  # fmt: skip
def test_a_stream_is_what_plain_sql_finds_row_by_row(
    tmp_path_factory: pytest.TempPathFactory,
    arrow: bool,
    written: tuple[Trajectory, ...],
    rng: random.Random,
    filters: dict[str, Any],
) -> None:
    path = tmp_path_factory.mktemp("store") / "s.duckdb"
    write(path, written, rng)
    all_trajectories = read_slowly(path)
    matching = [
        trajectory
        for trajectory in all_trajectories
        if (filters.get("run_ids") is None or trajectory.episode.run_id in filters["run_ids"])
        and (filters.get("episode_ids") is None or trajectory.episode.episode_id in filters["episode_ids"])
        and all(
            filters.get(name) in (None, getattr(trajectory.episode, name)) for name in ("split", "round", "variant")
        )
    ][: filters.get("limit")]
    with TraceStore.open(path, read_only=True) as store, small_pages(arrow=arrow):
        assert to_texts(list(store.trajectories())) == to_texts(all_trajectories)
        assert to_texts(list(store.trajectories(**filters))) == to_texts(matching)
        looked_up = [store.trajectory(trajectory.episode.episode_id) for trajectory in all_trajectories]
        assert to_texts([trajectory for trajectory in looked_up if trajectory is not None]) == to_texts(
            all_trajectories
        )
        for action in (action for trajectory in all_trajectories for action in trajectory.actions):
            assert repr(store.action(action.episode_id, action.action_id)) == repr(action)


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    early, late = chain("1"), chain("2", START + 1)
    with TraceStore.open(tmp_path / "s.duckdb") as store:
        assert store.trajectory("nothing") is None
        assert store.action("nothing", "nothing") is None
        take_in(store, [early.spans(), late.spans()])
        first, second = store.trajectories()
        assert store.action(first.episode.episode_id, first.actions[0].action_id) == first.actions[0]
        assert store.action(first.episode.episode_id, "nothing") is None
        assert store.action("nothing", second.actions[0].action_id) is None


def test_no_list_is_not_an_empty_list(tmp_path: Path) -> None:
    with TraceStore.open(tmp_path / "s.duckdb") as store:
        take_in(store, [chain(str(k), START + k).spans() for k in range(3)])
        store.sql("UPDATE actions SET prompt_ids = NULL, sampled_ids = [], logprobs = [0.5, NULL]")
        for arrow in (True, False):
            with small_pages(arrow=arrow):
                lists = [(a.prompt_ids, a.sampled_ids, a.logprobs) for t in store.trajectories() for a in t.actions]
            assert lists == [(None, (), (0.5, None))] * 6


@pytest.mark.parametrize("arrow", [True, False])
def test_rows_of_no_episode_are_not_read_however_near_they_are(tmp_path: Path, arrow: bool) -> None:
    kept_traces, deleted_traces = traces_between(0, 8), traces_between(8, 16)
    with TraceStore.open(tmp_path / "s.duckdb") as store:
        take_in(store, [*kept_traces.values(), *deleted_traces.values()])
        for key in deleted_traces:
            store.sql("DELETE FROM episodes WHERE episode_id = ?", (key,))
        with small_pages(arrow=arrow):
            trajectories = {trajectory.episode.episode_id: trajectory for trajectory in store.trajectories()}
            assert trajectories == {key: spans_to_trajectory(spans) for key, spans in kept_traces.items()}


def test_an_edge_without_its_action_is_an_error_that_names_both(tmp_path: Path) -> None:
    with TraceStore.open(tmp_path / "s.duckdb") as store:
        take_in(store, [chain().spans()])
        (trajectory,) = store.trajectories()
        store.sql('DELETE FROM actions WHERE "index" = 0')
        names = f"episode {trajectory.episode.episode_id}: an edge names the action '{trajectory.actions[0].action_id}'"
        with pytest.raises(StoreError, match=names):
            list(store.trajectories())


# -- at any time ------------------------------------------------------------------------------------------------------


def take_in(store: TraceStore, traces: list[Any]) -> None:
    with closing(Journal(store.journal_folder)) as journal:
        journal.append_all([span for spans in traces for span in spans])
    store.take_in()


def traces_between(begin: int, end: int) -> dict[str, Any]:
    """Traces by their ids; they start a little apart, in an order unlike that of their ids."""
    samples = (chain(str(k), START + (k * 7919) % 1000) for k in range(begin, end))
    return {sample.trace_id: sample.spans() for sample in samples}


@pytest.mark.parametrize("arrow", [True, False])
def test_a_stream_beside_a_writer_sees_each_episode_once_and_all_that_were_there(tmp_path: Path, arrow: bool) -> None:
    early, late = traces_between(0, 20), traces_between(20, 60)
    late_spans = list(late.values())
    with TraceStore.open(tmp_path / "s.duckdb") as store, small_pages(arrow=arrow):
        take_in(store, list(early.values()))
        streamed = []
        for trajectory in store.trajectories():
            streamed.append(trajectory)
            take_in(store, [late_spans.pop()] if late_spans else [])
    ids = [trajectory.episode.episode_id for trajectory in streamed]
    assert len(ids) == len(set(ids))
    assert set(early) <= set(ids) <= set(early) | set(late)
    assert streamed == sorted(
        streamed, key=lambda trajectory: (trajectory.episode.started_ns, trajectory.episode.episode_id)
    )
    assert {trajectory.episode.episode_id: trajectory for trajectory in streamed} == {
        key: spans_to_trajectory((early | late)[key]) for key in ids
    }


@pytest.mark.slow
def test_two_streams_and_a_writer_in_three_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    early, late = traces_between(0, 30), traces_between(30, 90)
    with TraceStore.open(tmp_path / "s.duckdb") as store, small_pages(arrow=True), ThreadPoolExecutor() as threads:
        take_in(store, list(early.values()))
        streams = [threads.submit(lambda: list(store.trajectories())) for _ in range(2)]
        writer = threads.submit(lambda: [take_in(store, [spans]) for spans in late.values()])
        streamed = [stream.result() for stream in streams]
        writer.result()
        all_trajectories = list(store.trajectories())
    assert {trajectory.episode.episode_id for trajectory in all_trajectories} == set(early | late)
    for stream_result in streamed:
        assert stream_result == [trajectory for trajectory in all_trajectories if trajectory in stream_result]
        assert set(early) <= {trajectory.episode.episode_id for trajectory in stream_result}


def test_a_stream_that_is_not_read_to_its_end_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    with TraceStore.open(path) as store, small_pages(arrow=True):
        take_in(store, list(traces_between(0, 20).values()))
        unfinished = store.trajectories()
        next(unfinished)
    # DuckDB lets go of the file when its last connection is closed; this one is for another process to open.
    opened = subprocess.run(
        [sys.executable, "-c", "import duckdb, sys; duckdb.connect(sys.argv[1])", str(path)], check=False
    )
    assert opened.returncode == 0
    with pytest.raises(StoreError, match=f"store {path}"):
        list(unfinished)


# -- in bounded memory ------------------------------------------------------------------------------------------------


def test_what_duckdb_keeps_for_a_reader_is_bounded_however_often_the_store_is_open(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    TraceStore.open(path).close()
    with TraceStore.open(path, read_only=True) as first, TraceStore.open(path, read_only=True) as second:
        assert [store.sql("SELECT current_setting('memory_limit')") for store in (first, second)] == [
            [("488.2 MiB",)]
        ] * 2


READER = """
import sys
from pathlib import Path
from trace_store.store import TraceStore

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

if sys.argv[2] == "plain":
    sys.modules["pyarrow"] = None
else:
    import pyarrow
with TraceStore.open(Path(sys.argv[1]), read_only=True) as store:
    before, most, numbers = resident(), 0, 0
    for trajectory in store.trajectories():
        numbers += sum(len(action.prompt_ids) for action in trajectory.actions)
        most = max(most, resident())
print(int(most - before), numbers)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("way", "allowed"), [("arrow", 450), ("plain", 600)])
def test_a_stream_takes_bounded_memory_however_much_longer_later_episodes_are(
    tmp_path: Path, way: str, allowed: int
) -> None:
    path, short, long, ids = tmp_path / "s.duckdb", 9000, 9000, 4000
    TraceStore.open(path).close()
    with duckdb.connect(str(path)) as con:
        con.execute(
            "INSERT INTO episodes BY NAME SELECT 'e' || i AS episode_id, 'r' AS run_id, 't' AS task_id, 'train' AS"
            " split, 0 AS sample, '{}' AS adapters, 'terminated' AS outcome, i AS started_ns, i AS ended_ns,"
            " 1 AS span_count, '{}' AS task, '{}' AS tags FROM range(?) r(i)",
            [short + long],
        )
        con.execute(
            "INSERT INTO actions BY NAME SELECT 'a' || i AS action_id, 'e' || i AS episode_id, 'n' AS node,"
            ' 0 AS "index", list_transform(range(CASE WHEN i < $1 THEN 1 ELSE $3 END), lambda x: (x * 31 + i) % 30000)'
            " AS prompt_ids, i AS started_ns, i AS ended_ns, true AS trainable, i AS episode_started_ns"
            " FROM range($1 + $2) r(i)",
            [short, long, ids],
        )
    # All at once it would be 36 million numbers, of 36 bytes each.
    answer = subprocess.run(
        [sys.executable, "-c", READER, str(path), way], check=True, capture_output=True, text=True
    ).stdout.split()
    grown, numbers = map(int, answer)
    assert numbers == short + long * ids
    assert grown < allowed
