"""Owns: rows come back equal, stored with pyarrow or without it; token lists are stored once and read as written.

Spans read back are compared with the spans written; the raw attributes in the file show where the lists are.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.paths import TESTS
from support.sample_spans import START, SampleTrace, chain

import trace_store.assemble
from trace_store import conventions as c
from trace_store.errors import StoreError
from trace_store.insertion import insert, records_to_columns
from trace_store.journal import Journal
from trace_store.packed import floats_to_text, ints_to_text
from trace_store.records import SpanRow
from trace_store.schema import ACTIONS
from trace_store.store import TraceStore

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
LOGPROBS = st.lists(st.floats(allow_nan=False) | st.just(math.nan), max_size=5)
# In every form in which a span may have them: packed, JSON, as they are, damaged, or not at all.
ID_FORMS = IDS.map(ints_to_text) | IDS.map(json.dumps) | IDS | st.sampled_from([None, "i4:AQAAAB==", "i4:AQ", "[]"])
LOGPROB_FORMS = LOGPROBS.map(floats_to_text) | st.sampled_from([None, "[-0.5]", [-0.5], [], "f8:"])


def packed_trace(trace: str = "a", start: int = START) -> SampleTrace:
    """Two nodes with a call each, their lists packed as the recorder does."""
    sample = SampleTrace(trace, start)
    for number, name in enumerate("xy"):
        lists: dict[str, Any] = {
            "PROMPT_IDS": ints_to_text([1, 2, 3]),
            "SAMPLED_IDS": ints_to_text([4, 5]),
            "LOGPROBS": floats_to_text([-0.1, -1 / 3]),
        }
        node = sample.node(f"{name}:1", 20 * number, 20 * number + 10, step=number)
        sample.call(name, node, 20 * number + 1, 20 * number + 9, **lists)
    return sample


def take_in(store: TraceStore, *spans: SpanRow) -> None:
    journal = Journal(store.journal_folder)
    journal.append_all(spans)
    journal.close()
    store.take_in()


def in_order(spans: list[SpanRow]) -> list[SpanRow]:
    return sorted(spans, key=lambda span: (span.start_ns, span.span_id))


def keys_in_file(store: TraceStore) -> set[str]:
    """Attributes of the calls' rows, as they lie in the file."""
    return {
        key for (keys,) in store.sql("SELECT json_keys(attributes) FROM spans WHERE operation = 'chat'") for key in keys
    }


LISTS = {c.PROMPT_IDS, c.SAMPLED_IDS, c.LOGPROBS}


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompt=ID_FORMS, sampled=ID_FORMS, logprobs=LOGPROB_FORMS, cuts=st.lists(st.integers(0, 10), max_size=3))
def test_spans_read_back_are_the_spans_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, prompt: Any, sampled: Any, logprobs: Any, cuts: list[int]
) -> None:
    lists = {"PROMPT_IDS": prompt, "SAMPLED_IDS": sampled, "LOGPROBS": logprobs}
    samples = [SampleTrace(name, START + number) for number, name in enumerate(("a", "b"))]
    for sample in samples:
        sample.call("x", sample.node("n:1", 10, 20), 11, 19, USAGE_OUTPUT_TOKENS=None, **lists)
        sample.call("y", sample.node("m:1", 30, 40), 31, 39)
    written = [sample.spans() for sample in samples]
    all_spans = [span for spans in written for span in spans]
    with TraceStore.open(tmp_path_factory.mktemp("store") / "s.duckdb") as store:
        for begin, end in pairwise([0, *sorted(cuts), len(all_spans)]):
            take_in(store, *all_spans[begin:end])
        assert [store.spans(sample.trace_id) for sample in samples] == list(map(in_order, written))


def test_lists_leave_the_attributes_when_their_trace_is_assembled_however_it_arrived(tmp_path: Path) -> None:
    complete, torn = packed_trace("1"), packed_trace("2", START + 1)
    with TraceStore.open(tmp_path / "s.duckdb") as store:
        take_in(store, *complete.spans())
        assert not keys_in_file(store) & LISTS
        take_in(store, *torn.spans()[:3])
        assert keys_in_file(store) >= LISTS  # it waits, and nothing else has them
        take_in(store, *torn.spans()[3:])
        assert not keys_in_file(store) & LISTS
        assert store.spans(torn.trace_id) == in_order(torn.spans())
        assert store.sql("SELECT count(*), count(DISTINCT (trace_id, span_id)) FROM spans") == [(10, 10)]


def test_a_refused_trace_keeps_its_lists(tmp_path: Path) -> None:
    with TraceStore.open(tmp_path / "s.duckdb") as store:
        take_in(store, *packed_trace().spans(RUN_ID=None))
        assert store.counts()["refusals"] == 1
        assert keys_in_file(store) >= LISTS


def test_spans_of_a_file_that_has_lists_in_both_places_are_read_as_they_are(tmp_path: Path) -> None:
    sample = packed_trace()
    with TraceStore.open(tmp_path / "s.duckdb") as store:
        take_in(store, *sample.spans())
        for span in sample.spans():  # as every version before wrote it
            with store.transaction() as con:
                con.execute(
                    "UPDATE spans SET attributes = ? WHERE span_id = ?", [json.dumps(span.attributes), span.span_id]
                )
        assert store.spans(sample.trace_id) == in_order(sample.spans())


def test_log_probs_keep_their_bits_through_compression(tmp_path: Path) -> None:
    values = [-0.0, -5e-324, -1.7976931348623157e308, -1 / 3, -0.25] * 50
    sample = SampleTrace()
    for number in range(200):
        lists = {
            "SAMPLED_IDS": ints_to_text([7] * len(values)),
            "LOGPROBS": floats_to_text(values[number % 5 :] + values[: number % 5]),
        }
        sample.call(f"c{number}", sample.node(f"n:{number}", 10, 20), 11, 19, USAGE_OUTPUT_TOKENS=None, **lists)
    with TraceStore.open(tmp_path / "s.duckdb") as store:
        take_in(store, *sample.spans())
    with TraceStore.open(tmp_path / "s.duckdb") as store:
        assert store.spans(sample.trace_id) == in_order(sample.spans())
        methods = store.sql(
            "SELECT DISTINCT compression FROM pragma_storage_info('actions') WHERE segment_type = 'DOUBLE'"
        )
    assert methods != [("Uncompressed",)]


def test_traces_that_wait_for_ever_are_not_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assembled_ids: list[str] = []
    assemble = trace_store.assemble.spans_to_trajectory

    def assemble_and_note(spans: list[SpanRow]) -> Any:
        assembled_ids.append(spans[0].trace_id)
        return assemble(spans)

    with TraceStore.open(tmp_path / "s.duckdb") as store:
        for k in range(20):
            take_in(store, *chain(f"dead{k}", START + k).spans()[1:])
        monkeypatch.setattr("trace_store.intake.spans_to_trajectory", assemble_and_note)
        live_trace = chain("e", START + 100)
        take_in(store, *live_trace.spans()[:2])
        take_in(store, *live_trace.spans()[2:])
        assert store.counts()["waiting"] == 20
    assert assembled_ids == [live_trace.trace_id]


def test_an_episode_is_stored_once_though_its_spans_come_again_under_other_ids(tmp_path: Path) -> None:
    spans = chain().spans()
    renamed = [
        replace(s, span_id=f"other {s.span_id}", parent_span_id=s.parent_span_id and f"other {s.parent_span_id}")
        for s in spans
    ]
    with TraceStore.open(tmp_path / "s.duckdb") as store:
        take_in(store, *spans)
        take_in(store, *renamed)
        (trajectory,) = store.trajectories()
        assert [action.action_id for action in trajectory.actions] == ["x", "y"]
        assert store.counts()["actions"] == 2


@pytest.mark.parametrize("arrow", [True, False])
@pytest.mark.parametrize("nan", [[], [math.nan]])
def test_lists_of_all_lengths_come_back_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrow: bool, nan: list[float]
) -> None:
    if not arrow:
        monkeypatch.setitem(sys.modules, "pyarrow", None)
    (action, _) = trace_store.assemble.spans_to_trajectory(packed_trace().spans()).actions
    number = 5000  # more than DuckDB handles at a time
    actions = [
        replace(
            action,
            action_id=f"{k:05}",
            prompt_ids=None if k < 2500 else tuple(range(k, k + k % 7)),
            sampled_ids=() if k % 2 else (-(2**31), 2**31 - 1),
            logprobs=None if k % 3 == 0 else (-0.0, 5e-324, -math.inf, -1 / (k + 1), *nan)[: k % 6],
        )
        for k in range(number)
    ]
    with TraceStore.open(tmp_path / "s.duckdb") as store:
        with store.transaction() as con:
            assert insert(con, ACTIONS, records_to_columns(ACTIONS, actions, [START] * number)) == [(number,)]
        rows = store.sql("SELECT action_id, prompt_ids, sampled_ids, logprobs FROM actions ORDER BY action_id")
    names = ("action_id", "prompt_ids", "sampled_ids", "logprobs")
    assert repr(rows) == repr(
        [
            tuple(list(value) if isinstance(value, tuple) else value for value in (getattr(a, name) for name in names))
            for a in actions
        ]
    )


@pytest.mark.parametrize("arrow", [True, False])
@pytest.mark.parametrize(
    ("name", "value"),
    [("prompt_ids", (1, 2**31)), ("sampled_ids", (0.5,)), ("logprobs", (-0.5, None)), ("logprobs", ("x",))],
)
def test_a_list_that_its_column_cannot_hold_is_refused_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrow: bool, name: str, value: Any
) -> None:
    if not arrow:
        monkeypatch.setitem(sys.modules, "pyarrow", None)
    actions = trace_store.assemble.spans_to_trajectory(packed_trace().spans()).actions
    unfit = [actions[0], replace(actions[1], **{name: value})]
    with TraceStore.open(tmp_path / "s.duckdb") as store:
        with pytest.raises(StoreError, match=f"cannot store a value as actions.{name}: "), store.transaction() as con:
            insert(con, ACTIONS, records_to_columns(ACTIONS, unfit, [START] * 2))
        assert store.counts()["actions"] == 0


WITHOUT_ARROW = """
import sys
sys.modules["pyarrow"] = None  # as if it were not installed
from pathlib import Path
from trace_store.errors import StoreError
from trace_store.journal import Journal
from trace_store.records import Reward
from trace_store.store import TraceStore
with TraceStore.open(Path(sys.argv[1])) as store:
    journal = Journal(store.journal_folder)
    journal.append(Reward("e", "reward", 0.5, "test", 1))
    journal.append(Reward("e", "reward", 0.5, "test", 2, "agent", None, "a"))
    journal.close()
    print(store.take_in())
    print(store.put_rewards([Reward("e", "reward", 0.5, "test", 1), Reward("e", "reward", float("nan"), "test", 3)]))
    try:
        store.put_rewards([Reward("e", "reward", 0.5, "test", 2**70)])
    except StoreError as error:
        print(error)
    print(len(list(store.trajectories())), store.counts()["rewards"])
"""


def test_without_pyarrow_the_same_rows_are_stored(tmp_path: Path) -> None:
    traces = [packed_trace("1"), SampleTrace("2", START + 1), chain("3", START + 2)]
    traces[1].call("z", traces[1].node("n:1", 1, 9), 2, 8, PROMPT_IDS="[]", SAMPLED_IDS=None, LOGPROBS=None)
    path = tmp_path / "without.duckdb"
    journal = Journal(path.with_name(path.name + ".journal"))
    journal.append_all([span for sample in traces for span in sample.spans()])
    journal.close()
    with TraceStore.open(tmp_path / "with.duckdb") as store:
        take_in(store, *(span for sample in traces for span in sample.spans()))
        expected = list(store.trajectories())
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ARROW, str(path)], cwd=TESTS.parent, capture_output=True, text=True, check=True
    )
    counted, new, refused, read = done.stdout.splitlines()
    assert counted == "IntakeCounts(spans=13, episodes=3, rewards=2, torn=0, refused=0, foreign=0, odd=0)"
    assert (new, read) == ("1", "3 3")
    assert refused.startswith("cannot store a value in rewards: ")
    with TraceStore.open(path) as store:
        assert list(store.trajectories()) == expected
        assert [store.spans(sample.trace_id) for sample in traces] == [in_order(sample.spans()) for sample in traces]
