"""Owns: what is taken in comes back equal, once, whatever the order and however often; who may open a store, and how.

Expected trajectories come from assembling the spans directly.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.sample_spans import START, SampleTrace, chain

from trace_store import reading
from trace_store.assemble import spans_to_trajectory
from trace_store.errors import StoreError
from trace_store.intake import IntakeCounts
from trace_store.journal import Journal
from trace_store.records import AdapterRow, Prediction, Reward, RunRow, SpanRow
from trace_store.store import TraceStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.duckdb"


def record(store: TraceStore, *records: SpanRow | Reward | RunRow | AdapterRow) -> None:
    """One writer's segment, closed."""
    journal = Journal(store.journal_folder)
    for journal_record in records:
        journal.append(journal_record)
    journal.close()


def reward(episode: str, value: float = 1.0, created_ns: int = 1, name: str = "reward") -> Reward:
    return Reward(episode, name, value, "test", created_ns)


def flat(traces: list[list[SpanRow]]) -> list[SpanRow]:
    return [span for spans in traces for span in spans]


def segments(store: TraceStore) -> list[Path]:
    return sorted(store.journal_folder.glob("*.segment"))


# -- taking in --------------------------------------------------------------------------------------------------------


def test_a_journal_comes_back_as_the_trajectories_of_its_spans(path: Path) -> None:
    sample = chain()
    spans = sample.spans(ROUND=1, SEED=2**62, TAGS='{"k":"v"}')
    expected = spans_to_trajectory(spans)
    given_reward = reward(sample.trace_id, 1 / 3)
    with TraceStore.open(path) as store:
        record(store, *spans, given_reward)
        assert store.take_in() == IntakeCounts(spans=5, episodes=1, rewards=1)
        assert segments(store) == []
    with TraceStore.open(path, read_only=True) as store:
        assert list(store.trajectories()) == [replace(expected, rewards=(given_reward,))]
        assert store.episodes() == [expected.episode]
        assert store.spans(sample.trace_id) == sorted(spans, key=lambda span: (span.start_ns, span.span_id))


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(logprobs=st.lists(st.floats(max_value=0.0, allow_nan=False), min_size=1, max_size=20))
def test_stored_log_probs_are_the_floats_of_the_engine(
    tmp_path_factory: pytest.TempPathFactory, logprobs: list[float]
) -> None:
    t = SampleTrace()
    t.call(
        "x", t.node("a:1", 10, 20), 11, 19, SAMPLED_IDS=[7] * len(logprobs), LOGPROBS=logprobs, USAGE_OUTPUT_TOKENS=None
    )
    with TraceStore.open(tmp_path_factory.mktemp("store") / "s.duckdb") as store:
        record(store, *t.spans())
        store.take_in()
        ((action,),) = [trajectory.actions for trajectory in store.trajectories()]
    assert action.logprobs is not None
    assert [value.hex() for value in action.logprobs] == [value.hex() for value in logprobs]


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rng=st.randoms(use_true_random=False), cuts=st.lists(st.integers(0, 40), max_size=4))
def test_order_and_repetition_of_the_journal_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, rng: random.Random, cuts: list[int]
) -> None:
    traces = [chain(str(k), START + k).spans() for k in range(3)]
    records = [*flat(traces), *(reward(spans[0].trace_id) for spans in traces)]
    shuffled = [*records, *records]
    rng.shuffle(shuffled)
    bounds = [0, *sorted(cuts), len(shuffled)]
    with TraceStore.open(tmp_path_factory.mktemp("store") / "s.duckdb") as store:
        total = IntakeCounts()
        for begin, end in pairwise(bounds):
            record(store, *shuffled[begin:end])
            total += store.take_in()
        assert total == IntakeCounts(spans=15, episodes=3, rewards=3)
        assert store.take_in() == IntakeCounts()
        assert [replace(t, rewards=()) for t in store.trajectories()] == [spans_to_trajectory(s) for s in traces]
        assert store.counts()["waiting"] == 0


def test_an_incomplete_trace_waits_and_a_malformed_one_is_refused_with_its_reason(path: Path) -> None:
    waiting, malformed = chain("1").spans(), chain("2").spans(RUN_ID=None)
    with TraceStore.open(path) as store:
        record(store, *waiting[1:], *malformed)
        assert store.take_in() == IntakeCounts(spans=9, refused=1)
        assert store.counts()["waiting"] == 1
        assert store.sql("SELECT trace_id, reason FROM refusals") == [
            (malformed[0].trace_id, "the root span lacks marft.run.id")
        ]
        record(store, waiting[0], malformed[0])
        assert store.take_in() == IntakeCounts(spans=1, episodes=1)
        assert store.counts()["waiting"] == 0


def test_a_living_writer_keeps_its_segment_and_is_read_as_far_as_it_got(path: Path) -> None:
    with TraceStore.open(path) as store:
        journal = Journal(store.journal_folder)
        journal.append(reward("e", created_ns=1))
        journal.sync()
        assert store.take_in() == IntakeCounts(rewards=1)
        (segment,) = segments(store)
        with segment.open("ab") as segment_file:
            segment_file.write(b"half a li")
        assert store.take_in() == IntakeCounts()  # it may still be being written
        journal.append(reward("e", created_ns=2))  # which overwrites it
        assert store.take_in() == IntakeCounts(rewards=1)
        assert segments(store) == [segment]
        journal.close()
        assert store.take_in() == IntakeCounts()
        assert segments(store) == []
        assert store.sql("SELECT records, torn FROM taken_in") == [(2, 0)]


def test_a_torn_tail_of_a_dead_writer_is_counted_once(path: Path) -> None:
    with TraceStore.open(path) as store:
        record(store, reward("e", created_ns=1), reward("e", created_ns=2))
        (segment,) = segments(store)
        segment.write_bytes(segment.read_bytes()[:-5])
        assert store.take_in() == IntakeCounts(rewards=1, torn=1)
        assert store.take_in() == IntakeCounts()
        assert store.sql("SELECT records, torn FROM taken_in") == [(1, 1)]


def test_a_crash_between_commit_and_delete_repeats_nothing(path: Path) -> None:
    with TraceStore.open(path) as store:
        record(store, *chain().spans())
        (segment,) = segments(store)
        content = segment.read_bytes()
        store.take_in()
        segment.write_bytes(content)  # as if it had not been deleted
        assert store.take_in() == IntakeCounts()
        assert segments(store) == []


def test_a_failure_in_the_middle_leaves_the_segment_and_no_row(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(spans: object) -> None:
        raise MemoryError

    with TraceStore.open(path) as store:
        record(store, *chain().spans())
        with monkeypatch.context() as broken:
            broken.setattr("trace_store.intake.spans_to_trajectory", failing)
            with pytest.raises(MemoryError):
                store.take_in()
        assert store.counts()["spans"] == 0
        assert store.take_in() == IntakeCounts(spans=5, episodes=1)


def test_one_intake_spans_several_transactions(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trace_store.intake.LINES_PER_TRANSACTION", 3)
    traces = [chain(str(k), START + k).spans() for k in range(4)]
    with TraceStore.open(path) as store:
        record(store, *flat(traces))
        assert store.take_in() == IntakeCounts(spans=20, episodes=4)
        assert list(store.trajectories()) == [spans_to_trajectory(spans) for spans in traces]


# -- direct writes and reads ------------------------------------------------------------------------------------------


def test_direct_writes_are_stored_once(path: Path) -> None:
    run = RunRow("r", "train", 5, {"lr": 0.1}, "0.1")
    adapters = [AdapterRow("b", 1, None, "p", "s", "m", 1), AdapterRow("a", 2, 1, "p", "s", "m", 3, {"kl": 0.5})]
    rewards = [
        reward("e"),
        Reward("e", "reward", 0.5, "test", 1, "step", action_id="x"),
        Reward("e", "reward", 0.5, "test", 1, "step", action_id="y"),
        Reward("e", "reward", 0.5, "test", 1, "agent", node="a"),
        Reward("e", "reward", 0.5, "test", 1, "agent", node="b"),
        reward("e", 2.0, created_ns=2),
    ]
    with TraceStore.open(path) as store:
        for _ in range(2):
            store.put_run(run)
            for adapter in adapters:
                store.put_adapter(adapter)
        assert [store.put_rewards([new_reward]) for new_reward in rewards] == [1] * 6
        assert store.put_rewards(rewards) == 0
        assert store.runs() == [run]
        assert store.adapters() == [adapters[1], adapters[0]]
        assert store.adapters("b") == [adapters[0]]
        assert store.adapters("nobody") == []
        with pytest.raises(StoreError, match="has another adapter b@1; publish a new version"):
            store.put_adapter(replace(adapters[0], sha256="other"))


def test_the_latest_reward_counts_and_an_absent_one_is_none(path: Path) -> None:
    sample = chain()
    with TraceStore.open(path) as store:
        record(store, *sample.spans())
        store.take_in()
        (trajectory,) = store.trajectories()
        assert trajectory.team_reward("reward") is None
        store.put_rewards([reward(sample.trace_id, 2.0, created_ns=2), reward(sample.trace_id, 1.0, created_ns=1)])
        (trajectory,) = store.trajectories()
        assert trajectory.team_reward("reward") == 2.0


def test_trajectories_are_filtered_paged_and_limited_in_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "EPISODES_PER_STRETCH", 3)
    monkeypatch.setattr(reading, "PAGE", (2, 1000))
    starts = [START, START, START, START + 1, START + 5, START + 5, START + 9]  # ties across pages
    traces = [
        chain(str(k), started_ns).spans(
            RUN_ID=f"r{k % 2}", SPLIT=("train", "heldout")[k // 4], ROUND=k % 3, VARIANT=f"v{k}"
        )
        for k, started_ns in enumerate(starts)
    ]
    expected = [spans_to_trajectory(spans) for spans in traces]
    with TraceStore.open(path) as store:
        record(store, *flat(traces[::-1]))
        store.take_in()
        assert list(store.trajectories()) == expected
        assert list(store.trajectories(limit=3)) == expected[:3]
        assert list(store.trajectories(limit=0)) == []
        assert list(store.trajectories(run_ids=["r1"])) == expected[1::2]
        assert list(store.trajectories(run_ids=["r0", "r1"], split="heldout")) == expected[4:]
        assert list(store.trajectories(run_ids=[])) == []
        assert list(store.trajectories(round=0, split="train")) == [expected[0], expected[3]]
        assert list(store.trajectories(variant="v6")) == expected[6:]
        assert store.episodes(run_id="r0", round=0) == [expected[0].episode, expected[6].episode]


def test_a_stream_that_is_read_while_rewards_arrive_does_not_break(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "EPISODES_PER_STRETCH", 1)
    with TraceStore.open(path) as store:
        record(store, *chain("1").spans(), *chain("2", START + 1).spans())
        store.take_in()
        stream = store.trajectories()
        first = next(stream)
        store.put_rewards([reward(first.episode.episode_id), reward("2".rjust(32, "0"))])
        assert [trajectory.team_reward("reward") for trajectory in stream] == [1.0]


def test_counts_are_rows_by_table(path: Path) -> None:
    with TraceStore.open(path) as store:
        record(store, *chain().spans(), reward("e"))
        store.take_in()
        counts = store.counts()
    assert {name: number for name, number in counts.items() if number} == {
        "spans": 5,
        "episodes": 1,
        "actions": 2,
        "edges": 1,
        "rewards": 1,
        "schema_version": 1,
        "taken_in": 1,
    }


def test_sql_binds_its_parameters_and_fails_in_one_line(path: Path) -> None:
    with TraceStore.open(path) as store:
        assert store.sql("SELECT ? || 'x'", ("'; DROP TABLE runs; --",)) == [("'; DROP TABLE runs; --x",)]
        with pytest.raises(StoreError) as failed:
            store.sql("SELECT * FROM nowhere")
        assert str(failed.value) == f"store {path}: Catalog Error: Table with name nowhere does not exist!"


def test_a_value_that_no_column_holds_is_refused_by_name(path: Path) -> None:
    with (
        TraceStore.open(path) as store,
        pytest.raises(StoreError, match=r"cannot store a value as rewards\.created_ns"),
    ):
        store.put_rewards([reward("e", created_ns=2**70)])


# -- who may open a store ---------------------------------------------------------------------------------------------


def test_files_are_readable_by_their_owner_only(path: Path) -> None:
    old_mask = os.umask(0o022)
    try:
        with TraceStore.open(path) as store:
            store.put_run(RunRow("r", "collect", 1))
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
            assert modes == {path.name: 0o600, path.name + ".wal": 0o600}
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


OPENER = """
import sys
from pathlib import Path
from trace_store.store import TraceStore
with TraceStore.open(Path(sys.argv[1])):
    print("open", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("read_only", [False, True])
def test_a_second_process_is_refused_with_the_first_ones_pid(path: Path, read_only: bool) -> None:
    opener = subprocess.Popen([sys.executable, "-c", OPENER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert opener.stdin is not None
    assert opener.stdout is not None
    with opener:
        assert opener.stdout.readline() == b"open\n"
        with pytest.raises(StoreError, match=rf"store {path} is in use by process {opener.pid} \(.*\); wait until"):
            TraceStore.open(path, read_only=read_only)
        opener.stdin.close()
    TraceStore.open(path, read_only=read_only).close()


TAKER = """
import sys
from pathlib import Path
from trace_store import intake
from trace_store.store import TraceStore
intake.LINES_PER_TRANSACTION = 7
with TraceStore.open(Path(sys.argv[1])) as store:
    print("open", flush=True)
    store.take_in()
"""


def test_an_intake_that_is_killed_is_finished_by_the_next_one(path: Path) -> None:
    traces = [chain(str(k), START + k).spans() for k in range(60)]
    with TraceStore.open(path) as store:
        record(store, *flat(traces))
    for delay in (0.0, 0.02, 0.05, 0.1):
        taker = subprocess.Popen([sys.executable, "-c", TAKER, str(path)], stdout=subprocess.PIPE)
        assert taker.stdout is not None
        with taker:
            taker.stdout.readline()
            try:
                taker.wait(delay)
            except subprocess.TimeoutExpired:
                taker.send_signal(signal.SIGKILL)
    with TraceStore.open(path) as store:
        store.take_in()
        assert list(store.trajectories()) == [spans_to_trajectory(spans) for spans in traces]
        assert store.counts()["spans"] == 300
        assert segments(store) == []


def test_a_reader_writes_nothing(path: Path) -> None:
    TraceStore.open(path).close()
    with TraceStore.open(path, read_only=True) as store:
        with pytest.raises(StoreError, match="is open for reading only"):
            store.put_run(RunRow("r", "collect", 1))
        with pytest.raises(StoreError, match="is open for reading only"):
            store.take_in()


def test_what_cannot_be_opened_is_said_in_one_line(path: Path) -> None:
    with pytest.raises(StoreError, match=f"store {path} does not exist; collect some episodes into it first"):
        TraceStore.open(path, read_only=True)
    path.write_text("not a database " * 1000)
    with pytest.raises(StoreError, match=f"store {path} is not a DuckDB file; give another path"):
        TraceStore.open(path)
    with pytest.raises(StoreError, match="there is no directory"):
        TraceStore.open(path.parent / "nowhere" / "s.duckdb")
    with pytest.raises(StoreError, match="is a folder; only a plain file is used"):
        TraceStore.open(path.parent)


def test_a_segment_that_another_intake_holds_is_left_to_it(path: Path) -> None:
    with TraceStore.open(path) as store:
        record(store, reward("e"))
        (segment,) = segments(store)
        with segment.open("rb") as segment_file:
            fcntl.flock(segment_file, fcntl.LOCK_EX)
            assert store.take_in() == IntakeCounts(rewards=1)
            assert segments(store) == [segment]
        assert store.take_in() == IntakeCounts()
        assert segments(store) == []


def test_a_prediction_is_kept_as_it_was_made(path: Path) -> None:
    early = Prediction("plan-1", "b", "nats_per_token", 1 / 3, 0.25, None, 1)
    late = Prediction("plan-2", "a", "rank", 1.0, None, None, 2)
    with TraceStore.open(path) as store:
        store.put_predictions([late, early])
        store.put_predictions([replace(early, value=0.0)])
        assert store.predictions() == [early, late]
